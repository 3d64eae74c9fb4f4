"""engine="copy" for messages: a copy engine writes a large one into SCRATCH of its receiver.

The receiver runs the half of any staged message, in the large SCRATCH, with few blocks; so only
the sender knows who copies. Its lane is one stream: gates (``kernels/message_gates.cuh``) await
credits and post arrivals, and a copy moves many slices at once, the last ones ever fewer, so that
the receiver has little left to do behind the last. Not timed on several GPUs, so both ends must ask
for it. See :mod:`.copies` and :mod:`.large_scratch`.

A copy waits for the receiver's kernel alone, which blocks no hardware queue once it runs and which
its rank enqueues ahead of its own lane. With several lanes a copy that waits for one receiver could
hold up another's in a queue that both share: a launch has one lane, kernels send the rest.

Only for two ranks (:data:`RANKS`): of more, one may still be copying what a collective has left in
the receiver's SCRATCH when the next message comes there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ringcoll.executors.cuda.copies import Copy, Schedule
from ringcoll.executors.cuda.copy_gates import ENTER, GATE_FRAME, LEAVE, CopyGate
from ringcoll.executors.cuda.params import Addresses, Body
from ringcoll.executors.cuda.point_to_point import (
    IN_SCRATCH,
    Half,
    form_of,
    half_words,
    message_words,
    scratch_of,
)
from ringcoll.executors.cuda.source import kernel_text
from ringcoll.executors.cuda.workspace import Workspace

RANKS = 2
"""Ranks whose messages take copy engines."""

_WORDS = 16


def lane_of(halves: Sequence[Half]) -> Half | None:
    """The one half of a launch that a copy engine can send; None without, or with several."""
    lanes = [half for half in halves if half.sends and any(m.scratch for m in half.messages)]
    if len(lanes) != 1 or len(lanes[0].messages) != 1:
        return None
    return lanes[0]


def batches(slices: int, window: int) -> Iterator[tuple[int, int]]:
    """The first slice and the end of each copy: at most half a window, at last ever fewer."""
    first = 0
    while first < slices:
        left = slices - first
        end = first + min(-(-left // 2), max(1, window // 2), window - first % window)
        yield first, end
        first = end


def message_schedule(workspace: Workspace, at: Addresses, half: Half) -> Schedule:
    """The gates and copies of a message."""
    (message,) = half.messages
    form = form_of(message.nbytes, workspace, scratch=message.scratch)
    piece = form.layout(message.nbytes).piece(message.nbytes)
    target = scratch_of(at, at.rank, half.peer)
    credits = at.workspaces[at.rank] + workspace.pair(half.peer, sends=True)
    arrivals = at.workspaces[half.peer] + workspace.pair(at.rank, sends=False)

    def gate(what: int, slice_: int, arrived: int, credit: int) -> CopyGate:
        """A gate that says so many slices have arrived and awaits so many credits; 0: neither."""
        pairs = [
            (flags + workspace.pair_flags, count)
            for flags, count in ((arrivals, arrived), (credits, credit))
            if count
        ]
        head = what | bool(arrived) << 32 | bool(credit) << 48
        return CopyGate(0, at, (head, *(word for pair in pairs for word in pair)), slice_)

    rows: list[CopyGate | Copy] = [gate(ENTER, 0, 0, 0)]
    for number, (first, end) in enumerate(batches(form.slices, form.window)):
        credit = max(0, end - form.window)
        if first or credit:
            rows.append(gate(0, number, first, credit))
        nbytes = min(message.nbytes, end * piece) - first * piece
        if nbytes > 0:
            slot = target + first % form.window * piece
            rows.append(Copy(0, slot, message.address + first * piece, nbytes, number))
    rows.append(gate(LEAVE, number, form.slices, 0))
    return Schedule(1, (), tuple(rows), ())


def message_gate_body(workspace: Workspace, half: Half, gate: CopyGate) -> Body:
    """Text and words of a gate."""
    (message,) = half.messages
    words = [
        *half_words(workspace, gate.at, half, 0, 1),
        *message_words(message, IN_SCRATCH << 16),
        *gate.words,
    ]
    words += [0] * (_WORDS - len(words))
    return Body(message_gate_text(workspace.nranks), (tuple(words),), (0,), 0, 0)


def message_gate_text(nranks: int) -> str:
    """The source text of all gates of messages of so many ranks."""
    constants = {"RANKS": nranks, "LOCAL": 1, "WORDS": _WORDS}
    return kernel_text(
        "message_gates", constants, GATE_FRAME, "pairs::run_gate(args, args.local[0]);"
    )
