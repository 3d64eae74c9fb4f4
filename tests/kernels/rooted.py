"""Calls that carry two programs, on the stand-in of a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ringcoll.arguments.calls import Call
from ringcoll.dtypes import dtype_of
from ringcoll.encode import encode
from ringcoll.executors.cuda.generic import generic_body
from ringcoll.executors.cuda.kernel_body import body_of
from ringcoll.executors.cuda.params import Addresses, Body, Header, pack
from ringcoll.launch import ALL_MAPPED, Launch
from ringcoll.plan import Buffer, Plan
from ringcoll.tuner.choice import Choice, Grid
from tests.kernels.cases import Arrays, Case
from tests.kernels.world import Ready, World, roomy


@dataclass(frozen=True)
class Rooted:
    """A call whose ranks reach each other's buffers and the root's own one, or not that.

    Of a collective without a root: all buffers, or not those of one rank.

    Args:
        plan: the algorithm's.
        slices: of the program that goes around what may be out of reach, and of the other.
        replicas: of both.
        in_place: whether the root's buffers are one; launches of collectives that reduce are in
            place whatever they are.
        count: elements a segment.
        shift: elements by which the arrays miss an aligned address.
        op: by name; used if the collective reduces.
        scalars: of every rank, where the operator is premul_sum.
        lacks: the rank whose buffers are out of reach, if the collective has no root.

    """

    plan: Plan
    slices: tuple[int, int] = (5, 1)
    replicas: tuple[int, int] = (1, 2)
    in_place: bool = False
    count: int = 1203
    shift: int = 0
    op: str = "sum"
    scalars: tuple[complex, ...] = ()
    lacks: int = 0

    @property
    def own(self) -> frozenset[Buffer]:
        """What may be out of reach: what only the root has, or all."""
        kind = self.plan.collective.kind
        return frozenset({Buffer[kind.rooted.upper()]}) if kind.has_root else ALL_MAPPED

    @property
    def case(self) -> Case:
        """The arrays."""
        return self._case(0, in_place=self.in_place)

    def _case(self, number: int, *, in_place: bool) -> Case:
        mapped = ALL_MAPPED if number else ALL_MAPPED - self.own
        launch = Launch(slices=self.slices[number], mapped=mapped, in_place=in_place)
        return Case(
            self.plan,
            launch,
            self.count,
            op=self.op,
            shift=self.shift,
            replicas=self.replicas[number],
            scalars=self.scalars,
        )

    @property
    def choice(self) -> Choice:
        """What runs."""
        first, second = (self._chosen(number) for number in range(2))
        blocks = max(first.grid.blocks, second.grid.blocks)
        return replace(first, grid=first.grid._replace(blocks=blocks), direct=second)

    def _chosen(self, number: int) -> Choice:
        case = self._case(number, in_place=self.plan.collective.reduces or self.in_place)
        program = encode(case.plan, case.launch)
        lanes = max(len(program.of(rank)) for rank in range(case.plan.nranks))
        layout = case.layout(sliced=True)
        grid = Grid(case.replicas, lanes * case.replicas, case.threads)
        return Choice(case.plan, program, case.launch, layout, grid)


def addresses(world: World, call: Rooted, arrays: Arrays, rank: int, *, there: bool) -> Addresses:
    """Where a rank finds everything; ``there``: none of its buffers is said to be out of reach."""
    found, collective = world.addresses(rank, arrays, call.case), call.plan.collective
    if there or rank != (collective.root if collective.kind.has_root else call.lacks):
        return found
    send, recv = found.hello
    return replace(
        found, hello=(send * (Buffer.INPUT not in call.own), recv * (Buffer.OUTPUT not in call.own))
    )


def launch(
    world: World,
    call: Rooted,
    arrays: Arrays,
    *,
    there: bool,
    ranks: Sequence[int] | None = None,
    timeout: float = 60.0,
    generic: bool = False,
) -> Ready:
    """The launch of ``ranks``, by default of all; ``there``: peers reach all buffers."""
    choice, case = call.choice, call.case
    at = tuple(
        replace(addresses(world, call, arrays, rank, there=there), launch=7)
        for rank in (range(world.nranks) if ranks is None else ranks)
    )
    body = body_at(world, call, at)
    if generic:
        body = generic_body(body, world.nranks) or body
    header = Header(timeout, 1234, choice.total, choice.reads_hellos, choice.grid.replicas)
    parameter = pack(body, header, world.workspace.progress, at)
    return Ready(body.text, parameter, choice.grid.blocks, len(at), case.threads)


def text_of(world: World, call: Rooted) -> str:
    """What is compiled for a call of all ranks."""
    nowhere = (0,) * world.nranks
    at = tuple(Addresses(rank, nowhere, 0) for rank in range(world.nranks))
    return body_at(world, call, at).text


def body_at(world: World, call: Rooted, at: tuple[Addresses, ...]) -> Body:
    case = call.case
    op = case.op_of(0) if call.plan.collective.reduces else None
    made = Call(call.plan.collective.name, 0, None, None, case.count, dtype_of(case.dtype), op)
    return roomy(body_of(call.choice, made, world.workspace, at))
