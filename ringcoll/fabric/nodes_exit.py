"""How processes of several nodes meet in MPI_Finalize: over the connections between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ringcoll import finalize
from ringcoll.fabric.links import Frame, Link

__all__ = ["hold_exit"]


def hold_exit(world: frozenset[object], links: Mapping[int, Link]) -> None:
    """Remember whom this process meets in MPI_Finalize.

    The connections of the first fabric of a world serve for that to the end. Those of later ones
    are closed with them, at both ends: so ``world`` is the same on all ranks.

    Args:
        world: what tells these processes from others.
        links: to every rank of the other nodes.

    """
    held = tuple(links.values())
    finalize.hold(world, finalize.Exit(_Door(held), held, _Deaths(held)))


class _Door:
    """How this process says on all connections that it is about to enter MPI_Finalize."""

    def __init__(self, links: Sequence[Link]) -> None:
        self._links = links
        self.exiting = False

    def exit(self) -> None:
        """Say so, once."""
        if not self.exiting:
            self.exiting = True
            for link in self._links:
                link.send(Frame.EXITING, 0)


class _Deaths:
    """Which of the processes at the other ends are gone."""

    def __init__(self, links: Sequence[Link]) -> None:
        self._links = links

    def read(self) -> Sequence[int]:
        """Their places."""
        for link in self._links:
            link.pump()
        return [index for index, link in enumerate(self._links) if link.dead]
