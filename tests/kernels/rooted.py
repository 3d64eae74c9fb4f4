"""Rooted calls that carry two programs, on the stand-in of a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ringcoll.arguments.calls import Call
from ringcoll.dtypes import dtype_of
from ringcoll.encode import encode
from ringcoll.executors.cuda.body import body_of
from ringcoll.executors.cuda.chosen import Chosen
from ringcoll.executors.cuda.params import Addresses, Header, pack
from ringcoll.launch import ALL_MAPPED, Launch
from ringcoll.plan import Buffer, Plan
from tests.kernels.cases import Arrays, Case
from tests.kernels.world import Ready, World, roomy


@dataclass(frozen=True)
class Rooted:
    """A call whose ranks reach each other's buffers, and the root's own one or not.

    Args:
        plan: the algorithm's.
        slices: of the program that goes around the root's own buffer, and of the other.
        replicas: of both.
        in_place: whether the root's buffers are one; launches of collectives that reduce are in
            place whatever they are.
        count: elements a segment.
        shift: elements by which the arrays miss an aligned address.
        op: by name; used if the collective reduces.
        scalars: of every rank, where the operator is premul_sum.

    """

    plan: Plan
    slices: tuple[int, int] = (5, 1)
    replicas: tuple[int, int] = (1, 2)
    in_place: bool = False
    count: int = 1203
    shift: int = 0
    op: str = "sum"
    scalars: tuple[complex, ...] = ()

    @property
    def own(self) -> Buffer:
        """What only the root has."""
        return Buffer[self.plan.collective.kind.rooted.upper()]

    @property
    def case(self) -> Case:
        """The arrays."""
        return self._case(0, in_place=self.in_place)

    def _case(self, number: int, *, in_place: bool) -> Case:
        mapped = ALL_MAPPED if number else ALL_MAPPED - {self.own}
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
    def chosen(self) -> Chosen:
        """What runs."""
        first, second = (self._chosen(number) for number in range(2))
        return replace(first, blocks=max(first.blocks, second.blocks), reached=second)

    def _chosen(self, number: int) -> Chosen:
        case = self._case(number, in_place=self.plan.collective.reduces or self.in_place)
        program = encode(case.plan, case.launch)
        lanes = max(len(program.of(rank)) for rank in range(case.plan.nranks))
        layout = case.layout(sliced=True)
        blocks = lanes * case.replicas
        return Chosen(case.plan, program, case.launch, layout, case.replicas, blocks, case.threads)


def addresses(world: World, call: Rooted, arrays: Arrays, rank: int, *, there: bool) -> Addresses:
    """Where a rank finds everything; only of the root's own buffer it may be said that it is
    out of reach."""
    found, own = world.addresses(rank, arrays, call.case), call.own is Buffer.OUTPUT
    if there or rank != call.plan.collective.root:
        return found
    hello = (found.hello[0], 0) if own else (0, found.hello[1])
    return replace(found, hello=hello)


def launch(
    world: World,
    call: Rooted,
    arrays: Arrays,
    *,
    there: bool,
    ranks: Sequence[int] | None = None,
    timeout: float = 60.0,
) -> Ready:
    """The launch of ``ranks``, by default of all; ``there``: peers reach the root's own buffer."""
    chosen, case = call.chosen, call.case
    at = tuple(
        replace(addresses(world, call, arrays, rank, there=there), launch=7)
        for rank in (range(world.nranks) if ranks is None else ranks)
    )
    op = case.op_of(0) if call.plan.collective.reduces else None
    made = Call(call.plan.collective.name, 0, None, None, case.count, dtype_of(case.dtype), op)
    body = roomy(body_of(chosen, made, world.arena, at))
    header = Header(timeout, 1234, chosen.total, bool(chosen.launch.mapped), chosen.replicas)
    parameter = pack(body, header, world.arena.progress, at)
    return Ready(body.text, parameter, chosen.blocks, len(at), chosen.threads)
