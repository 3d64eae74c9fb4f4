"""Ranks whose memory is one array of bytes, and calls of theirs on the stand-in of a GPU."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ringcoll.dtypes import dtype_of
from ringcoll.encode import encode
from ringcoll.executors.cuda.generic import generic_body
from ringcoll.executors.cuda.ll import ll_body
from ringcoll.executors.cuda.params import Addresses, Body, Header, factor_bytes, pack
from ringcoll.executors.cuda.reports import Report, read
from ringcoll.executors.cuda.simple import simple_body
from ringcoll.executors.cuda.trace import traced
from ringcoll.executors.cuda.workspace import (
    HELLO_STRIDE,
    HELLOS,
    MOST_BLOCKS,
    Workspace,
)
from ringcoll.launch import PROTOCOLS, Launch
from tests.definition import run
from tests.kernels.cases import POISON, Array, Arrays, Case, joined, values
from tests.kernels.stand_in import KERNELS, library

GUARD = 64
"""Bytes on either side of a user's array that nobody may write."""

USER_BYTES = 1 << 19
ROOM = 256
"""Words of a rank: what all calls of these tests find enough, or nearly all."""
ABORT = 6
"""The word of a report by which the host gives up."""
LEFT_RANKS = 8
"""The first of the words by which the host says that ranks have left."""


@dataclass(frozen=True, eq=False)
class Ready:
    """A launch of some ranks with its parameter."""

    text: str
    parameter: bytes
    blocks: int
    locals: int
    threads: int

    def __call__(self, kernels: Path = KERNELS, calls: int = 1) -> None:
        built = library(self.text, kernels)
        if built.args_bytes() != len(self.parameter):
            raise AssertionError(
                f"{built.args_bytes()} bytes of Args, {len(self.parameter)} packed"
            )
        held = ctypes.create_string_buffer(self.parameter, len(self.parameter))
        built.launch(held, self.blocks, self.locals, self.threads, calls)


def lanes_of(launch: Launch) -> int:
    """Threads that share a line; the stand-in's lines are shorter."""
    return min(2, launch.lanes or 1)


class World:
    """Arenas, reports, tables and arrays of ranks.

    Args:
        nranks: how many.
        address: where the kernels will find the memory; None: where it lies in this process.
        zone: bytes into which one rank sends to another.
        copied: bytes of SCRATCH of copy engines, through which large messages are staged.
        scratch_half: bytes of a half of SCRATCH of protocol Simple.

    """

    def __init__(
        self,
        nranks: int,
        address: int | None = None,
        zone: int = 8 << 10,
        copied: int = 1 << 20,
        scratch_half: int = 1 << 20,
    ) -> None:
        self.nranks, half = nranks, 1 << 20
        self.workspace = Workspace(
            nranks,
            line_half=half,
            wide_half=half,
            scratch_half=scratch_half,
            replicas=5,
            pair_replicas=4,
            copied=copied,
            zone_bytes=zone * nranks,
        )
        self._report = nranks * self.workspace.nbytes
        self._user = -(-(self._report + nranks * self.workspace.report_bytes) // 4096) * 4096
        size = self._user + USER_BYTES
        held = np.zeros(size + 4096, np.uint8)
        self.memory = held[-held.ctypes.data % 4096 :][:size]
        self.address = self.memory.ctypes.data if address is None else address
        self.traces = [0] * nranks  # addresses of records of executed rows
        self._taken = 0
        for rank in range(nranks):  # SCRATCH of protocol Simple may hold anything
            self.workspace_of(rank)[self.workspace.scratch :][: 2 * scratch_half] = POISON
            self.workspace_of(rank)[self.workspace.zone(0) :] = POISON

    def workspace_of(self, rank: int) -> Array:
        return self.memory[rank * self.workspace.nbytes :][: self.workspace.nbytes]

    def broken(self, rank: int) -> bool:
        return bool(self.workspace_of(rank)[:4].any())

    def progress(self, rank: int) -> Array:
        """Epoch and known of every block."""
        found = self.workspace_of(rank)[self.workspace.progress :][: MOST_BLOCKS * 16]
        return found.view(np.uint64).reshape(MOST_BLOCKS, 2)

    def hellos(self, rank: int) -> Array:
        """What all ranks have said to one: words of slot, source rank and line."""
        found = self.workspace_of(rank)[HELLOS:][: self.workspace.hello_bytes]
        return found.view(np.uint32).reshape(-1, self.nranks, HELLO_STRIDE, 4)

    def words(self, rank: int) -> Array:
        """The report as words."""
        nbytes = self.workspace.report_bytes
        return self.memory[self._report + rank * nbytes :][:nbytes].view(np.uint32)

    def report(self, rank: int) -> Report | None:
        return read(memoryview(self.words(rank).tobytes()))

    def reports(self) -> list[Report | None]:
        return [self.report(rank) for rank in range(self.nranks)]

    def forget_arrays(self) -> None:
        self._taken = 0

    def arrays(self, case: Case, seed: int = 0) -> Arrays:
        """Inputs of the call, and outputs full of poison; kept until ``forget_arrays``."""
        plan, collective = case.plan, case.plan.collective
        item = dtype_of(case.dtype).numpy
        rng = np.random.default_rng([seed, case.count, self.nranks])
        table = self.take(3 * self.nranks * 8).view(np.uint64).reshape(3, self.nranks)
        first = self._taken
        inputs: list[Array | None] = [None] * self.nranks
        outputs: list[Array | None] = [None] * self.nranks
        for rank in range(self.nranks):
            for buffer, found in (("INPUT", inputs), ("OUTPUT", outputs)):
                if collective.has(buffer, rank):
                    nbytes = collective.segments(buffer) * case.count * item.itemsize
                    taken = self.take(nbytes, case.shift * item.itemsize).view(item)
                    taken[:] = values(case.dtype, taken.size, rng)
                    found[rank] = taken
        contributions = [None if given is None else given.copy() for given in inputs]
        whole = self.memory[self._user + first : self._user + self._taken]
        guards = np.ones(whole.size, bool)
        start = whole.ctypes.data
        for rank, seen in enumerate(outputs):
            given = inputs[rank]
            if seen is None:
                continue
            seen.view(np.uint8)[:] = POISON
            if case.launch.in_place and given is not None:
                given, seen = joined(case, rank, given, seen, contributions[rank])
                inputs[rank], outputs[rank] = given, seen
            at = seen.ctypes.data - start
            guards[at : at + seen.nbytes] = False
        layout = case.layout(sliced=False)
        ops = [case.op_of(rank) for rank in range(self.nranks)]
        wanted = run(plan, contributions, op=ops, layout=layout)
        return Arrays(inputs, outputs, wanted, whole, whole.copy(), guards, table)

    def take(self, nbytes: int, shift: int = 0) -> Array:
        """Bytes for a user, poison around them."""
        begin = -(-(self._taken + GUARD) // 128) * 128 + shift
        self._taken = begin + nbytes + GUARD
        if self._taken > USER_BYTES:
            raise AssertionError(f"{self._taken} bytes of arrays, {USER_BYTES} are there")
        at = self._user + begin
        self.memory[at - GUARD : at + nbytes + GUARD] = POISON
        return self.memory[at : at + nbytes]

    def ready(
        self,
        case: Case,
        arrays: Arrays,
        *,
        ranks: Sequence[int] | None = None,
        timeout: float = 60.0,
        signature: int = 1234,
        number: int = 7,
        generic: bool = False,
    ) -> Ready:
        """The launch of ``ranks``, by default of all, whose calls have this number and the next.

        ``generic``: of one rank, by the kernel that carries every call.
        """
        ranks = range(self.nranks) if ranks is None else ranks
        program = encode(case.plan, case.launch)
        at = [
            replace(self.addresses(rank, arrays, case), launch=number + place)
            for place, rank in enumerate(ranks)
        ]
        body = self.body(case, at)
        if generic:
            found = generic_body(body, self.nranks)
            if found is None:
                raise AssertionError(f"{case}: no generic kernel carries it")
            body = found
        header = Header(timeout, signature, program.total, bool(case.launch.mapped), case.replicas)
        parameter = pack(body, header, self.workspace.progress, at)
        lanes = 1 if case.launch.in_band else max(len(program.of(r)) for r in range(self.nranks))
        return Ready(body.text, parameter, lanes * case.replicas, len(at), case.threads)

    def body(self, case: Case, at: Sequence[Addresses] | None = None) -> Body:
        """Text and words of a call; without addresses the text alone has a meaning."""
        if at is None:
            nowhere = (0,) * self.nranks
            at = [Addresses(rank, nowhere, 0, trace=t) for rank, t in enumerate(self.traces)]
        dtype = dtype_of(case.dtype)
        op = case.op_of(0) if case.plan.collective.reduces else None
        program, layout = encode(case.plan, case.launch), case.layout(sliced=True)
        if case.launch.in_band:
            protocol = replace(PROTOCOLS[case.launch.protocol], lanes=lanes_of(case.launch))
            body = ll_body(program, layout, dtype, op, self.workspace, at, protocol)
        else:
            body = simple_body(program, layout, dtype, op, self.workspace, at)
        return traced(roomy(body), at)

    def call(self, case: Case, seed: int = 0, kernels: Path = KERNELS, **options: Any) -> Arrays:
        """Make a call of all ranks and wait for its end."""
        arrays = self.arrays(case, seed)
        self.ready(case, arrays, **options)(kernels)
        return arrays

    def addresses(self, rank: int, arrays: Arrays, case: Case) -> Addresses:
        """Peers find a buffer in mapping 1 or 2 at some offset, other on every rank."""
        offset = 16 * (rank + 1)
        user, hello = [], []
        for k, array in enumerate((arrays.inputs[rank], arrays.outputs[rank])):
            user.append(0 if array is None else self.seen(array))
            hello.append(0 if array is None else (1 + k) << 48 | offset)
            arrays.table[1 + k, rank] = max(0, user[k] - offset)
        return replace(
            self.place(rank),
            mappings=self.seen(arrays.table),
            hello=(hello[0], hello[1]),
            user=(user[0], user[1]),
            factor=factor_bytes(case.op_of(rank), dtype_of(case.dtype)),
            trace=self.traces[rank],
        )

    def place(self, rank: int) -> Addresses:
        """Where a rank finds the arenas and its report."""
        workspaces = tuple(self.address + r * self.workspace.nbytes for r in range(self.nranks))
        report = self._report + rank * self.workspace.report_bytes
        return Addresses(rank, workspaces, self.address + report)

    def seen(self, array: Array) -> int:
        """Where the kernels find an array."""
        return self.address + array.ctypes.data - self.memory.ctypes.data


def roomy(body: Body) -> Body:
    """The same with room for more words, so that fewer texts differ and have to be compiled."""
    length = max(ROOM, len(body.words[0]))
    words = tuple((*row, *(0,) * (length - len(row))) for row in body.words)
    text = re.sub(r"#define RC_WORDS \d+", f"#define RC_WORDS {length}", body.text)
    return replace(body, text=text, words=words)
