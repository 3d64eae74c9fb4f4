"""The kernel of sends and receives broken on purpose: what the stand-in shows of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.kernels.stand_in import KERNELS, needs_compiler
from tests.kernels.test_broken import changed, copied
from tests.kernels.traffic import Traffic, side_by_side
from tests.kernels.world import World

pytestmark = needs_compiler

SLOW = ("if (first >= count) return 0;", "for (u32 k = 0; replica && k < 200; ++k) pause();")
"""A machine on which all replicas but the first take their time."""


@dataclass(frozen=True)
class Mutant:
    """A kernel that is wrong.

    Args:
        name: what is wrong.
        file: of the kernels.
        old: the text that is right; it stands there once.
        new: in its place.
        lengths: of messages from rank 0 to rank 1 that suffer.
        together: whether each end makes one launch of them.
        late: seconds by which the receiver comes after the sender.
        blocks: CUDA blocks of each end.
        mapped: whether the sender has mapped the receive buffers.

    """

    name: str
    file: str
    old: str
    new: str
    lengths: tuple[int, ...]
    together: bool = False
    late: float = 0.0
    blocks: tuple[int, int] = (8, 8)
    mapped: bool = False


MUTANTS = [
    Mutant(
        "one half for all calls",
        "call.cuh",
        "(epoch & 1) * args.half",
        "0 * args.half",
        (100_000, 100_000),
        late=0.3,
        blocks=(8, 1),
    ),
    Mutant(
        "the sender is two calls ahead",
        "point_to_point.cuh",
        "sends && !large ? epoch - 1 : epoch",
        "sends ? 0 : epoch",
        (3000,) * 3,
        late=0.3,
    ),
    Mutant(
        "blocks go on alone between two calls",
        "point_to_point.cuh",
        "await_flag(sequence + b * 8, epoch, peer, 0)",
        "true",
        (200_000,) * 12,
        together=True,
    ),
    Mutant(
        "replicas without a block are left out",
        "point_to_point.cuh",
        "replica += half.blocks",
        "replica += replicas",
        (200_000,),
        blocks=(2, 2),
    ),
    Mutant(
        "blocks that a launch has not are forgotten",
        "point_to_point.cuh",
        "st_relaxed_sys_u64(sequence + b * 8, epoch);\n    }",
        "{}\n    }",
        (1000, 200_000),
        blocks=(8, 2),
    ),
    Mutant(
        "the calls of a launch are counted as one",
        "point_to_point.cuh",
        "++epoch;",
        "if (signature == 0) ++epoch;",
        (1000, 2000),
        together=True,
    ),
    Mutant(
        "a direct message goes where the one before went",
        "point_to_point.cuh",
        "bases.at[1][0] = mapped == 0",
        "if (epoch == 1) bases.at[1][0] = mapped == 0",
        (400_000, 400_000),
        together=True,
        mapped=True,
    ),
    Mutant(
        "a direct message lies at the start of its mapping",
        "point_to_point.cuh",
        "start + (mapped & 0xffffffffffffull)",
        "start",
        (400_000,),
        mapped=True,
    ),
]


def verdict(mutant: Mutant, kernels: Path, timeout: float = 50.0) -> str:
    """One word for what has come of the messages."""
    world = World(2, zone=512 << 10)
    mapped = range(len(mutant.lengths)) if mutant.mapped else ()
    traffic = Traffic([(0, 1, nbytes) for nbytes in mutant.lengths], mapped=mapped)
    parts = [traffic] if mutant.together else [*traffic.apart()]
    launches = [
        [
            part.ready(world, (rank,), blocks=mutant.blocks[rank], timeout=timeout, threads=3)
            for part in parts
        ]
        for rank in range(2)
    ]
    side_by_side(launches, kernels, mutant.late)
    if any(world.reports()):
        return "report"
    try:
        traffic.check()
    except AssertionError:
        return "wrong"
    return "right"


def kernels_of(mutant: Mutant, folder: Path, *, wrong: bool) -> Path:
    kernels = copied(folder / f"kernels-{wrong}")
    old, slow = SLOW
    changed(kernels, "simple.cuh", old, f"{old}\n        {slow}")
    if wrong:
        changed(kernels, mutant.file, mutant.old, mutant.new)
    return kernels


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_wrong_kernel_is_seen(mutant: Mutant, tmp_path: Path) -> None:
    kernels = kernels_of(mutant, tmp_path, wrong=True)
    # A busy machine is slower to go wrong.
    tries = [replace(mutant, late=mutant.late * more) for more in (1, 4, 16)]
    assert any(verdict(each, kernels, 1.0 + 2 * each.late) != "right" for each in tries)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_right_kernel_bears_it(mutant: Mutant, tmp_path: Path) -> None:
    assert verdict(mutant, KERNELS) == "right"
    assert verdict(mutant, kernels_of(mutant, tmp_path, wrong=False)) == "right"
