"""What is enqueued for copy engines is the lowered plan: row by row, and in its order."""

from __future__ import annotations

from collections import Counter

import pytest

from ringcoll.algorithms import build
from ringcoll.dtypes import dtype_of
from ringcoll.encode import encode
from ringcoll.executors.cuda.copies import Copy, kernel_part, schedule
from ringcoll.executors.cuda.copy_gates import ENTER, LEAVE, WAIT_ALL, CopyGate
from ringcoll.executors.cuda.params import Addresses
from ringcoll.executors.cuda.simple import Writer
from ringcoll.launch import Launch
from ringcoll.lower import lower
from ringcoll.plan import HELLO, Buffer
from ringcoll.tuner.simple import copied_blocks
from tests.kernels.cases import Case
from tests.kernels.world import World

N = 3
PLANS = [
    ("broadcast", "chain"),
    ("broadcast", "scatter_gather"),
    ("all_gather", "all_pairs"),
    ("all_gather", "ring"),
    ("all_to_all", "all_pairs"),
    ("all_reduce", "all_pairs"),
    ("all_reduce", "two_shot"),
    ("reduce_scatter", "all_pairs"),
]
LAUNCHES = [
    Launch(slices=1),
    Launch(slices=5),
    Launch(slices=2, in_place=True),
    Launch(slices=1, mapped=frozenset()),
    Launch(slices=7, mapped=frozenset()),
]
USER = 1 << 40
REPLICAS = 2


def addresses(rank: int, launch: Launch) -> Addresses:
    """Every buffer in a place of its own; in place both are one."""

    def user(peer: int, buffer: Buffer) -> int:
        return USER * (1 + 2 * peer + (buffer is Buffer.OUTPUT and not launch.in_place))

    send, recv = (
        tuple(user(peer, buffer) for peer in range(N)) for buffer in (Buffer.INPUT, Buffer.OUTPUT)
    )
    return Addresses(
        rank,
        tuple(USER * (100 + peer) for peer in range(N)),
        0,
        user=(send[rank], recv[rank]),
        peer_buffers=(
            send if Buffer.INPUT in launch.mapped else (),
            recv if Buffer.OUTPUT in launch.mapped else (),
        ),
    )


class Wanted:
    """The lowered plan's steps as gates and copies would have them."""

    def __init__(self, case: Case, world: World, local: list[Addresses]) -> None:
        launch = case.launch
        self.program = encode(case.plan, launch)
        self.layout, self.dtype = case.layout(sliced=True), dtype_of(case.dtype)
        self.copied = copied_blocks(self.program)
        self.writer = Writer(
            self.program,
            self.layout,
            self.dtype,
            world.workspace,
            local,
            kernel_part(self.program, world.workspace),
        )
        self.lowered = lower(case.plan, launch)
        self.number = {block: k for k, block in enumerate(self.program.blocks)}
        self.at = {at.rank: at for at in local}
        cell = self.lowered.collective.cell
        self.read, self.written = Counter[object](), Counter[object]()
        for _, step in self.lowered.order:
            self.read.update(map(cell, step.srcs))
            self.written.update(map(cell, step.dsts))
        self.cell = cell

    def aside(self, src, dst) -> bool:
        """Whether nothing else in the call touches what a copy touches, but to read its source."""
        if src.rank != dst.rank or Buffer.SCRATCH in (src.buffer, dst.buffer):
            return False
        source, target = self.cell(src), self.cell(dst)
        return (self.read[target], self.written[target], self.written[source]) == (0, 1, 0)

    def place(self, chunk, rank: int) -> int:
        """The address of a chunk of the lowered plan."""
        if chunk.buffer is Buffer.SCRATCH:
            region = self.at[rank].workspaces[chunk.rank] + self.writer.carried.scratch
            return region + chunk.index * self.writer.width
        start, _ = self.layout.span(chunk.buffer, chunk.rank, chunk.index)
        output = chunk.buffer is Buffer.OUTPUT
        mine = self.at[rank]
        base = mine.user[output] if chunk.rank == rank else mine.peer_buffers[output][chunk.rank]
        return base + start * self.dtype.itemsize

    def copies(self) -> list[tuple[int, int, bool]]:
        """All, in the plan's order; local ones after those to peers, none onto itself.

        With each whether it goes aside.
        """
        found = []
        for block, step in self.lowered.order:
            if self.number[block] not in self.copied or block.rank not in self.at:
                continue
            for dst in sorted(step.dsts, key=lambda chunk: chunk.rank == block.rank):
                pair = self.place(dst, block.rank), self.place(step.srcs[0], block.rank)
                if pair[0] != pair[1]:
                    found.append((*pair, self.aside(step.srcs[0], dst)))
        return found

    def lane(self, number: int) -> list[tuple[Counter[int], Counter[int]]]:
        """Signals and waits of a block before, between and after its copies."""
        block = self.program.blocks[number]
        parts = [(Counter[int](), Counter[int]())]
        taken, posted = Counter[int](), Counter[int]()
        mine = self.at[block.rank]
        for step in self.lowered.steps[block]:
            others = [self.number[other] for other in step.waits if other.channel != HELLO]
            taken.update(others)
            for other in others:
                parts[-1][1][self.writer.flag(other, number, mine)] = taken[other]
            source = self.place(step.srcs[0], block.rank) if step.srcs else 0
            targets = [self.place(dst, block.rank) for dst in step.dsts]
            parts += [
                (Counter(), Counter())
                for dst, target in zip(step.dsts, targets, strict=True)
                if target != source and not self.aside(step.srcs[0], dst)
            ]
            others = [self.number[other] for other in step.signals]
            posted.update(others)
            for other in others:
                parts[-1][0][self.writer.flag(number, other, mine)] = posted[other]
        return parts


def decoded(gate: CopyGate) -> tuple[int, Counter[int], Counter[int]]:
    """What else a gate does; flags and counts of its signals and waits."""
    head, pairs = gate.words[0], gate.words[1:]
    signals, waits = head >> 32 & 0xFFFF, head >> 48
    assert len(pairs) == 2 * (signals + waits)
    found = Counter[int](), Counter[int]()
    for k in range(signals + waits):
        found[k >= signals][pairs[2 * k]] = pairs[2 * k + 1] & 0xFFFFFFFF
    return head & 255, *found


@pytest.mark.parametrize("launch", LAUNCHES, ids=lambda v: f"S={v.slices}-{len(v.mapped)}")
@pytest.mark.parametrize("name", PLANS, ids="-".join)
@pytest.mark.parametrize("groups", [[[0], [1], [2]], [[0, 2], [1]], [[0, 1, 2]]], ids=str)
def test_the_rows_are_the_lowered_plans(groups, name, launch):
    collective, algorithm = name
    # 2560 elements: no slice of any chunk is empty.
    case = Case(build(collective, algorithm, N), launch, 2560, dtype="int32")
    world = World(N)
    for ranks in groups:
        local = [addresses(rank, launch) for rank in ranks]
        wanted = Wanted(case, world, local)
        found = schedule(
            case.plan,
            launch,
            wanted.program,
            wanted.layout,
            wanted.dtype,
            world.workspace,
            local,
            REPLICAS,
        )
        numbers = [n for n in sorted(wanted.copied) if wanted.program.blocks[n].rank in ranks]
        lanes = max(1, len(numbers))
        copies = [
            (row.dst, row.src, row.lane == lanes) for row in found.rows if isinstance(row, Copy)
        ]
        assert copies == wanted.copies()
        assert found.lanes == lanes + any(aside for _, _, aside in copies)
        rows = (*found.enter, *found.rows, *found.leave)
        done = 0
        for lane in range(lanes):
            parts = [(Counter[int](), Counter[int]())]
            for row in rows:
                if row.lane != lane:
                    continue
                if isinstance(row, Copy):
                    parts.append((Counter(), Counter()))
                    continue
                what, signals, waits = decoded(row)
                done += what
                # Within a part signals come first, or a peer might wait for ever.
                assert not (signals and parts[-1][1])
                parts[-1][0].update(signals)
                parts[-1][1].update(waits)
            if numbers:
                assert parts == wanted.lane(numbers[lane])
        assert done == len(ranks) * (ENTER | WAIT_ALL | LEAVE)


def test_the_other_side_of_a_kernel_has_a_word_a_replica():
    launch = Launch(slices=2)
    case = Case(build("all_reduce", "all_pairs", N), launch, 2560, dtype="int32")
    world, local = World(N), [addresses(0, launch)]
    wanted = Wanted(case, world, local)
    found = schedule(
        case.plan,
        launch,
        wanted.program,
        wanted.layout,
        wanted.dtype,
        world.workspace,
        local,
        REPLICAS,
    )
    words = {
        word >> 32 & 0xFFFF
        for row in found.rows
        if isinstance(row, CopyGate)
        for word in row.words[2::2]
    }
    assert words == {1, REPLICAS}
