"""What a call on GPUs runs, as :func:`ringcoll.executors.cuda.choose.choose` has found it."""

from __future__ import annotations

from dataclasses import dataclass, field

from ringcoll.encode import Program
from ringcoll.executors.cuda.dual_program import Variant
from ringcoll.executors.cuda.planned import NamedPlan
from ringcoll.launch import Launch, Layout
from ringcoll.plan import Plan

__all__ = ["KernelChoice"]


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """What runs.

    Args:
        plan: the algorithm's.
        program: encoded.
        launch: protocol, slices, mapped buffers.
        layout: where the elements of INPUT and OUTPUT lie.
        replicas: CUDA blocks for each block of the program.
        blocks: CUDA blocks a rank.
        threads: of each.
        engine: "copy": lanes of copies go to copy engines; the CUDA blocks run the others.
        direct: what runs instead where peers reach the buffers of which the hellos tell; None
            where that changes nothing.
        source: the plan with its name and its rings; None: the plan alone is known.
        why: what the clock says of it and of others, where a machine's links decide.

    """

    plan: Plan
    program: Program
    launch: Launch
    layout: Layout
    replicas: int
    blocks: int
    threads: int
    engine: str = "sm"
    direct: KernelChoice | None = None
    source: NamedPlan | None = None
    why: tuple[str, ...] = field(default=(), compare=False)

    @property
    def variants(self) -> tuple[KernelChoice, ...]:
        """What may run: one of these, by a number that kernels say in their record."""
        return (self,) if self.direct is None else (self, self.direct)

    @property
    def meets(self) -> bool:
        """Whether the ranks read all hellos before they move anything."""
        return bool(self.launch.mapped) or self.direct is not None

    @property
    def sides(self) -> tuple[Variant, Variant]:
        """Both programs of a launch that carries two."""
        first, last = (
            Variant(found.program, found.layout, found.replicas)
            for found in (self.variants[0], self.variants[-1])
        )
        return first, last

    @property
    def total(self) -> bool:
        """Whether a rank ends only after all have entered, whatever runs."""
        return all(found.program.total for found in self.variants)
