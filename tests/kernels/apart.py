"""Launches in a process of their own, where a kernel may crash or be watched by a sanitizer."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.kernels.cases import Arrays, Case
from tests.kernels.stand_in import KERNELS, program
from tests.kernels.world import Ready, World

ADDRESS = 0x10_0000_0000
"""Free in every process, and where ThreadSanitizer expects memory."""

REPORTED = 66
"""Exit status of a process that a sanitizer has found fault with."""

CRASHED = 70


@dataclass(frozen=True, eq=False)
class Outcome:
    """What became of some calls.

    Args:
        status: of the process; negative if a signal ended it.
        said: by the process.
        world: the memory afterwards.
        arrays: the users'.
        case: the call.

    """

    status: int
    said: str
    world: World
    arrays: Arrays
    case: Case

    def verdict(self) -> str:
        """One word: what shows that something is wrong; "right" if nothing does."""
        if self.status == REPORTED:
            return "race"
        if self.status:
            return "crash"
        if any(self.world.reports()):
            return "report"
        try:
            self.arrays.check(self.case)
        except AssertionError:
            return "wrong"
        return "right"


def run_apart(
    case: Case,
    folder: Path,
    *flags: str,
    kernels: Path = KERNELS,
    calls: int = 1,
    timeout: float = 20.0,
    world: World | None = None,
    ranks: Sequence[int] | None = None,
) -> Outcome:
    """``calls`` calls of all ranks in a row, in a process of their own.

    Args:
        case: the call.
        folder: for the memory.
        flags: of the compiler.
        kernels: the source.
        calls: how many.
        timeout: seconds of the kernels' deadline.
        world: at ``ADDRESS``, with what has happened before; None: a new one.
        ranks: that make the calls; None: all.

    """
    world = World(case.plan.nranks, ADDRESS) if world is None else world
    arrays = world.arrays(case)
    ready = world.ready(case, arrays, ranks=ranks, timeout=timeout)
    done = run_image(world, ready, folder, *flags, kernels=kernels, calls=calls)
    return Outcome(done.returncode, done.stderr, world, arrays, case)


def run_image(
    world: World,
    ready: Ready,
    folder: Path,
    *flags: str,
    kernels: Path = KERNELS,
    calls: int = 1,
) -> subprocess.CompletedProcess[str]:
    """A launch on a world's memory, ``calls`` times, in a process of its own."""
    built = program(ready.text, *flags, kernels=kernels)
    image, parameter = folder / "image", folder / "parameter"
    image.write_bytes(world.memory.tobytes())
    parameter.write_bytes(ready.parameter)
    counts = (ready.blocks, ready.locals, ready.threads, calls)
    done = subprocess.run(
        [built, image, hex(ADDRESS), parameter, *map(str, counts)],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        env={**os.environ, "TSAN_OPTIONS": f"exitcode={REPORTED}"},
    )
    world.memory[:] = np.fromfile(image, np.uint8)
    return done
