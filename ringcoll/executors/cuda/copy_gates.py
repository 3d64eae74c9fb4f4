"""Copy gates: the kernels that wait and signal for copies, as source text and words.

See ``kernels/copy_gates.cuh`` and :mod:`.copies`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ringcoll.executors.cuda.params import Addresses, Body, padded
from ringcoll.executors.cuda.source import kernel_text

ENTER, WAIT_ALL, LEAVE = 1, 2, 4
"""Further work of a gate: see ``kernels/copy_gates.cuh``."""
GATE_THREADS = 32
GATE_FRAME = "RC_SMALL_KERNEL(32)"
"""A warp of 32 registers a thread, so that a gate finds room beside the blocks of other kernels: a
block of a GEMM often takes 384 threads of 168 registers, which leaves just as many."""


@dataclass(frozen=True, slots=True)
class CopyGate:
    """A kernel of one block that waits and signals on a lane; lane 0 is the caller's stream."""

    lane: int
    at: Addresses
    words: tuple[int, ...]
    slice: int = 0


def merged(gate: CopyGate, what: int) -> CopyGate:
    """A gate that also enters, waits for all ranks or leaves."""
    return replace(gate, words=(gate.words[0] | what, *gate.words[1:]))


def parts(gate: CopyGate) -> tuple[CopyGate | None, CopyGate | None]:
    """The part of a gate that signals and the part that waits, None where it has none."""
    head, pairs = gate.words[0], gate.words[1:]
    signals, waits, step = head >> 32 & 0xFFFF, head >> 48, head & 0xFFFFFFFF
    posts = (step | signals << 32, *pairs[: 2 * signals])
    polls = (step | waits << 48, *pairs[2 * signals :])
    return (
        replace(gate, words=posts) if signals else None,
        replace(gate, words=polls) if waits else None,
    )


def gate_body(gate: CopyGate, nranks: int) -> Body:
    """Text and words of a gate."""
    return Body(gate_text(nranks), (_padded(gate.words, nranks),), (0,), 0, 0)


def _padded(words: Sequence[int], nranks: int) -> tuple[int, ...]:
    """As many words as the gate of the most pairs has."""
    return padded([words, (0,) * (1 + 4 * nranks)])[0]


def gate_text(nranks: int) -> str:
    """The source text of all gates of so many ranks."""
    constants = {"RANKS": nranks, "LOCAL": 1, "WORDS": len(_padded((), nranks))}
    return kernel_text("copy_gates", constants, GATE_FRAME, "gates::run(args, args.local[0]);")
