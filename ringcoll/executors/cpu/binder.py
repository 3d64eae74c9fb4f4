"""Bind a choice to memory: rows of closures, for one half of SCRATCH.

Done once for each set of arrays and hellos; the executor keeps the result for the next call.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy.typing as npt

from ringcoll.arguments.calls import Call
from ringcoll.arithmetic import SMALL
from ringcoll.bootstrap.contract import named
from ringcoll.bounded import evict
from ringcoll.collectives import Collective
from ringcoll.dtypes import OPS, ReduceOp
from ringcoll.encode import Program
from ringcoll.errors import MismatchError
from ringcoll.executors.binding import Binding, Pacer, TraceEntry, slot_bytes
from ringcoll.executors.cpu.cpu_call import ActiveCall, BoundRows
from ringcoll.executors.cpu.recount import Recount
from ringcoll.executors.node_signals import NodeSignals
from ringcoll.executors.rows import (
    NodeMessages,
    Row,
    RowTemplate,
    Wiring,
    bind_rows,
    flag_slots,
    lane_rows,
    lane_templates,
    senders,
)
from ringcoll.executors.shared_state import FLAGS, Hello, SharedState
from ringcoll.fabric import Fabric
from ringcoll.fabric.mpi import FIRST
from ringcoll.launch import Launch, Layout
from ringcoll.plan import Buffer
from ringcoll.symmetric.host import SymmetricMemory
from ringcoll.tuner.choice import Choice
from ringcoll.views import start_of, view_at

Array = npt.NDArray[Any]

TEMPLATES = 64
"""Programs of which a rank keeps the rows without arrays, and rows that calls have left: the oldest
goes first."""

UNROLLED = 512
"""Rows of a lane up to which they are bound once and kept for the next call."""

_MAPPING_BITS = 48


class Binder:
    """Binds the calls of one rank; without a pacer its links run free."""

    def __init__(
        self,
        fabric: Fabric,
        symmetric: SymmetricMemory,
        shared_state: SharedState,
        node_signals: NodeSignals | None,
        pacer: Pacer | None,
    ) -> None:
        self.rank, self.nranks, self.nodes = fabric.rank, fabric.nranks, fabric.nodes
        self.symmetric, self.shared_state = symmetric, shared_state
        self.node_signals, self.pacer = node_signals, pacer
        self._templates: dict[tuple[object, ...], ProgramTemplate] = {}
        self._halves: dict[int, list[Array]] = {}
        self._spare: dict[Hashable, BoundRows] = {}
        shared_state.bound.append(self.forget)

    def forget(self) -> None:
        """Drop kept rows and views of SCRATCH."""
        self._halves.clear()
        self._templates.clear()
        self._spare.clear()

    def mapped_address(self, start: int, nbytes: int) -> int:
        """An address in symmetric memory: mapping << 48 | offset; 0 outside of it."""
        found = self.symmetric.lookup(start, nbytes) if start else None
        return 0 if found is None else found[0] << _MAPPING_BITS | found[1]

    def bind(
        self,
        active: ActiveCall,
        choice: Choice,
        layout: Layout,
        hellos: Sequence[Hello],
        trace: list[TraceEntry] | None,
    ) -> BoundRows:
        """The lanes of this rank; each executed row is appended to ``trace``, if there is one."""
        call, program, half = active.prepared.call, choice.program, active.epoch & 1
        slot, prepared = slot_bytes(call, layout), active.prepared
        self.shared_state.need(program.scratch * program.slots * slot)
        patched = trace is None and slot <= SMALL and layout.shares == (1,)
        once = patched and prepared.once and prepared.any_class and self.pacer is None
        kept = self._template(choice, call)
        spare = kept, half, call.in_place
        rows = self._spare.pop(spare, None) if once else None
        if rows is not None and rows.recount is not None and rows.recount.to(call.count, layout):
            rows.move_to(call, prepared.given)
            return rows
        user = self._user(call, choice, layout, hellos)
        loads = [call.op or OPS["sum"]] * self.nranks
        if call.op is not None and call.op.scalar is not None:
            loads = [ReduceOp(call.op.name, hello.scalar) for hello in hellos]
        binding = Binding(layout, user, self._scratch(half), slot, loads, self.pacer, trace)
        lanes: list[Iterable[Row]] = []
        for lane in kept.lanes:
            if isinstance(lane, int):
                lanes.append(LongLane(kept.wiring, lane, binding))
            else:
                lanes.append(tuple(bind_rows(lane, kept.wiring, binding)))
        parts = binding.user_parts
        bound = BoundRows(
            *(kept.total, lanes, kept.messages, kept.sources, user, parts, binding.works)
        )
        if (once or (patched and prepared.counts)) and len(binding.works) == kept.works:
            bound.recount = Recount(binding, call)
            if once:
                bound.spare = spare
        return bound

    def leave(self, bound: BoundRows) -> None:
        """Keep the rows of a call that is not kept, and has ended, for the next one."""
        bound.leave()
        if self._halves:  # else all has been forgotten since they were bound
            evict(self._spare, TEMPLATES)
            self._spare[bound.spare] = bound

    def _template(self, choice: Choice, call: Call) -> ProgramTemplate:
        """What does not depend on the count: made once for a program, its slices, dtype, and op."""
        program, slices, dtype, op = choice.program, choice.layout.slices, call.dtype, call.op
        operator = None if op is None else (op.name, op.scalar is None)
        key = program, slices, dtype.name, dtype.wide, operator
        kept = self._templates.get(key)
        if kept is None:
            evict(self._templates, TEMPLATES)
            kept = self._templates[key] = self._new_template(choice, call)
        return kept

    def _new_template(self, choice: Choice, call: Call) -> ProgramTemplate:
        program, slices, signals = choice.program, choice.layout.slices, self.node_signals
        wiring = Wiring(
            program=program,
            slices=slices,
            ranks=range(self.nranks),
            flag=self._flags(program),
            entered=[(words, self.shared_state.entered) for words in self.shared_state.words],
            dtype=call.dtype,
            op=call.op,
            nodes=choice.launch.nodes,
            node_messages=None if signals is None else NodeMessages(signals.messages, FIRST),
            senders=senders(program) if signals is not None else {},
        )
        programs = program.programs
        own = [n for n, block in enumerate(programs) if block.block.rank == self.rank]
        lanes: list[int | tuple[RowTemplate, ...]] = [
            number
            if len(programs[number].rows) * slices > UNROLLED
            else tuple(lane_templates(wiring, number))
            for number in own
        ]
        return ProgramTemplate(
            program.total,
            wiring,
            lanes,
            frozenset(at for at, number in enumerate(own) if programs[number].messages),
            frozenset(rank for sent, rank in wiring.senders.items() if sent.rank == self.rank),
            sum(-UNROLLED if isinstance(lane, int) else _works(lane) for lane in lanes),
        )

    def _user(
        self, call: Call, choice: Choice, layout: Layout, hellos: Sequence[Hello]
    ) -> dict[tuple[int, Buffer], Array]:
        """The arrays of the call, and the mapped arrays of peers."""
        user: dict[tuple[int, Buffer], Array] = {}
        if call.send is not None:
            user[self.rank, Buffer.INPUT] = call.send
        if call.recv is not None:
            user[self.rank, Buffer.OUTPUT] = call.recv
        collective = choice.plan.collective
        for buffer in choice.launch.mapped if hellos else ():
            for rank, hello in enumerate(hellos):
                here = rank != self.rank and self._near(rank)
                if not (here and collective.has(buffer.name, rank)):
                    continue
                word = hello.send if buffer is Buffer.INPUT else hello.recv
                ends = [
                    sum(layout.segment(buffer, rank, number))
                    for number in range(collective.segments(buffer.name))
                ]
                nbytes = max(ends) * call.dtype.itemsize
                mapping, offset = word >> _MAPPING_BITS, word & ((1 << _MAPPING_BITS) - 1)
                if nbytes:
                    memory = self.symmetric.peer(rank, mapping, offset, nbytes)
                    # Keeps nothing alive: rows are bound anew once memory has been freed.
                    user[rank, buffer] = view_at(start_of(memory), nbytes, call.dtype.numpy)
        return user

    def _near(self, rank: int) -> bool:
        return not self.nodes or self.nodes[rank] == self.nodes[self.rank]

    def _scratch(self, half: int) -> list[Array]:
        found = self._halves.get(half)
        if found is None:
            nbytes = self.shared_state.half_bytes
            start = self.shared_state.scratch + half * nbytes
            found = [memory[start : start + nbytes] for memory in self.shared_state.bytes]
            self._halves[half] = found
        return found

    def _flags(self, program: Program) -> Callable[[int, int], tuple[Any, int]]:
        slots, blocks = flag_slots(program), program.blocks

        def flag(src: int, dst: int) -> tuple[Any, int]:
            at, rank = (
                self.shared_state.flags + blocks[src].rank * FLAGS + slots[src, dst],
                blocks[dst].rank,
            )
            if self.node_signals is not None and not self._near(rank):
                return self.node_signals.signals[rank], at
            return self.shared_state.words[rank], at

        return flag


@dataclass(frozen=True, slots=True, eq=False)
class ProgramTemplate:
    """What one rank runs of a program, but for the arrays; see :class:`BoundRows`."""

    total: bool
    wiring: Wiring
    lanes: list[int | tuple[RowTemplate, ...]]  # of a lane of many rows, the number of its block
    messages: frozenset[int]
    sources: frozenset[int]
    works: int
    """How many rows move data, unless the count is too small; below 0 with a lane of many rows."""


@dataclass(frozen=True, slots=True, eq=False)
class LongLane:
    """A lane of many rows, which are bound again each time that they run."""

    wiring: Wiring
    number: int
    binding: Binding

    def __iter__(self) -> Iterator[Row]:
        # Arrays and their parts are noted for lanes that keep their rows.
        return lane_rows(self.wiring, self.number, replace(self.binding, user_parts=[], works=[]))


def _works(lane: Sequence[RowTemplate]) -> int:
    return sum(row.step is not None and row.step.extent is not None for row in lane)


@dataclass(frozen=True, slots=True, eq=False)
class HostFits:
    """What ``half`` bytes of SCRATCH hold, those of one call; calls take two halves by turns."""

    half: int

    def scratch(self, call: Call, choice: Choice) -> tuple[int, int]:
        """Bytes of SCRATCH that a choice needs, and bytes that are there."""
        program = choice.program
        return program.scratch * program.slots * slot_bytes(call, choice.layout), self.half

    def parameters(self, _call: Call, _choices: Sequence[Choice], _together: int) -> bool:
        """Whether a launch holds the steps: the host has no limit."""
        return True

    def packs(self, _call: Call, _launch: Launch, _layout: Layout) -> int:
        """None: the host has no lines."""
        return 0


def agreed(
    call: Call, hellos: Sequence[Hello], *, rank: int, nranks: int, alike: bool
) -> tuple[frozenset[Buffer], bool]:
    """The buffers that all ranks have mapped, and whether the launch is in place, by the hellos.

    A reducing collective is in place if any rank is: that only adds order, which is right for the
    other ranks too. The built-in plans of the others write into an input only what it holds
    already; they are in place if all ranks are. A user's plan may not be mixed.

    Args:
        alike: all ranks must be in place, or none, unless the collective reduces.

    """
    collective = Collective(call.collective, nranks, root=call.root)
    both = [
        hello
        for other, hello in enumerate(hellos)
        if collective.has("INPUT", other) and collective.has("OUTPUT", other)
    ]
    flags = [hello.in_place for hello in both]
    mixed = any(flags) != all(flags) and not collective.reduces
    if mixed and alike:
        inside = [other for other, hello in enumerate(hellos) if hello.in_place]
        raise MismatchError(
            f"{call.collective} on rank {rank}: in place on {named(inside)} only; "
            f"pass recvbuf on every rank or on none"
        )
    in_place = any(flags) if collective.reduces else bool(flags) and all(flags)
    mapped = set()
    for buffer in (Buffer.INPUT, Buffer.OUTPUT):
        words = [
            hello.send if buffer is Buffer.INPUT else hello.recv
            for other, hello in enumerate(hellos)
            if collective.has(buffer.name, other)
        ]
        if all(words):
            mapped.add(buffer)
    if mixed:
        # On ranks that are in place INPUT is overwritten: peers must not read it.
        mapped.discard(Buffer.INPUT)
    return frozenset(mapped), in_place
