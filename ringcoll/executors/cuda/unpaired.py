"""Sends and receives of GPU ranks, which are not served yet: refused before anything moves."""

from __future__ import annotations

from collections.abc import Sequence

from ringcoll.arguments.calls import Call
from ringcoll.errors import ArgumentError
from ringcoll.executors.drive import Task

__all__ = ["Unpaired"]


class Unpaired:
    """Stands where CPU ranks have their pairs."""

    def __init__(self) -> None:
        self.running: list[object] = []

    def task(self, calls: Sequence[Call], _timeout: float) -> Task:
        """Refuse.

        Raises:
            ArgumentError: always.

        """
        raise ArgumentError(
            f"{calls[0].collective} on rank {calls[0].rank}: point-to-point is not served on GPU "
            f"ranks yet; use a collective, or a communicator with device='cpu'"
        )

    def compare_running(self) -> None:
        """Nothing runs."""

    def late(self, _ticket: object) -> str:
        """Nothing runs."""
        return ""

    def absent(self, _ticket: object) -> list[int]:
        """Nothing runs."""
        return []
