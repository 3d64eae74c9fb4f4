"""Calls of copy engines on the stand-in of a GPU: a stream is a thread, a copy is memmove."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event, Thread

from ringcoll.dtypes import dtype_of, op_of
from ringcoll.encode import encode
from ringcoll.executors.cuda.copies import Copy, Schedule, kernel_part, schedule
from ringcoll.executors.cuda.copy_gates import CopyGate, gate_body, gate_text
from ringcoll.executors.cuda.copy_streams import Placing, place_on_streams
from ringcoll.executors.cuda.generic import generic_body
from ringcoll.executors.cuda.params import Addresses, Body, Header, pack
from ringcoll.executors.cuda.simple import simple_body
from ringcoll.plan import Buffer
from tests.kernels.cases import Arrays, Case
from tests.kernels.stand_in import KERNELS
from tests.kernels.world import Ready, World, roomy

GATE_THREADS = 3


@dataclass(frozen=True, eq=False)
class Device:
    """What one device is given for a call; a call of it runs all of that.

    Args:
        found: gates and copies.
        world: of the ranks.
        header: of its kernels.
        kernel: of the blocks that are no lanes.
        flat: everything on one stream.
        kernels: where the kernels' sources are.

    """

    found: Schedule
    world: World
    header: Header
    kernel: Ready | None
    flat: bool = False
    kernels: Path = KERNELS

    def gate(self, gate: CopyGate) -> Ready:
        body = gate_body(gate, self.world.nranks)
        parameter = pack(body, self.header, self.world.workspace.progress, [gate.at])
        return Ready(body.text, parameter, 1, 1, GATE_THREADS)

    def row(self, row: CopyGate | Copy) -> None:
        if isinstance(row, Copy):
            ctypes.memmove(row.dst, row.src, row.nbytes)
        else:
            self.gate(row)(self.kernels)

    def stream(self, number: int, placing: Placing, ended: Sequence[Event]) -> None:
        for at, placed in enumerate(placing.rows):
            if placed.stream == number:
                for awaited in placed.after:
                    ended[awaited].wait()
                self.row(placed.row)
                ended[at].set()

    def __call__(self) -> None:
        found = self.found
        for gate in found.enter:
            self.row(gate)
        streams = [Thread(target=self.kernel)] if self.kernel is not None else []
        if self.flat:
            assert not streams
            for row in found.rows:
                self.row(row)
        else:
            placing = place_on_streams(found.rows, found.lanes)
            ended = [Event() for _ in placing.rows]
            streams += [
                Thread(target=self.stream, args=(k, placing, ended)) for k in range(placing.streams)
            ]
        for stream in streams:
            stream.start()
        for stream in streams:
            stream.join()
        for gate in found.leave:
            self.row(gate)

    def texts(self) -> list[str]:
        kernel = [] if self.kernel is None else [self.kernel.text]
        return [self.gate(self.found.enter[0]).text, *kernel]


def devices(
    world: World,
    case: Case,
    arrays: Arrays,
    groups: Sequence[Sequence[int]],
    *,
    timeout: float = 60.0,
    signature: int = 1234,
    number: int = 7,
    flat: bool = False,
    generic: bool = False,
    scratch: tuple[int, ...] = (),
) -> list[Device]:
    """A call of these ranks, so many on a device.

    ``generic``: by the kernel of any call; ``scratch``: every rank's, outside of workspaces.
    """
    program, layout = encode(case.plan, case.launch), case.layout(sliced=True)
    dtype = dtype_of(case.dtype)
    header = Header(timeout, signature, True, False, case.replicas)
    made = []
    for ranks in groups:
        at = [known(world, case, arrays, rank) for rank in ranks]
        local = [replace(each, launch=number, scratch=scratch) for each in at]
        others = kernel_part(program, world.workspace, local)
        found = schedule(
            case.plan, case.launch, program, layout, dtype, world.workspace, local, case.replicas
        )
        kernel = None
        if any(program.blocks[block].rank in ranks for block in others.blocks):
            body = kernel_body(world, case, local, generic=generic)
            blocks = max(
                sum(program.blocks[block].rank == rank for block in others.blocks)
                for rank in range(world.nranks)
            )
            parameter = pack(body, header, world.workspace.progress, local)
            kernel = Ready(body.text, parameter, blocks * case.replicas, len(local), case.threads)
        made.append(Device(found, world, header, kernel, flat))
    return made


def kernel_body(world: World, case: Case, local: Sequence[Addresses], *, generic: bool) -> Body:
    """The kernel beside the lanes of copies."""
    program, layout = encode(case.plan, case.launch), case.layout(sliced=True)
    op = op_of(case.op) if case.plan.collective.reduces else None
    others = kernel_part(program, world.workspace, local)
    dtype = dtype_of(case.dtype)
    body = simple_body(program, layout, dtype, op, world.workspace, local, kernel_part=others)
    if generic:
        carried = generic_body(roomy(body), world.nranks)
        assert carried is not None
        return carried
    return roomy(body)


def texts_of(
    world: World, case: Case, groups: Sequence[Sequence[int]], *, generic: bool
) -> set[str]:
    """The kernels that a call is made of."""
    program, nowhere = encode(case.plan, case.launch), (0,) * world.nranks
    others = kernel_part(program, world.workspace).blocks
    found = {gate_text(world.nranks)}
    for ranks in groups:
        if any(program.blocks[block].rank in ranks for block in others):
            local = [Addresses(rank, nowhere, 0) for rank in ranks]
            found.add(kernel_body(world, case, local, generic=generic).text)
    return found


def known(world: World, case: Case, arrays: Arrays, rank: int) -> Addresses:
    """Where a rank finds everything, its peers' arrays too where they can be reached."""
    at = [world.addresses(peer, arrays, case) for peer in range(world.nranks)]
    send, recv = (
        tuple(each.user[buffer is Buffer.OUTPUT] for each in at)
        if buffer in case.launch.mapped
        else ()
        for buffer in (Buffer.INPUT, Buffer.OUTPUT)
    )
    return replace(at[rank], mappings=0, hello=(0, 0), peer_buffers=(send, recv))


def run(calls: Sequence[Device]) -> None:
    """Every device at once, and the end of all."""
    threads = [Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
