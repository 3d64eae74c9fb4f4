"""Where the ranks of this process come from, once it is known that it measures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from ringcoll.communicator.public import Communicator
from ringcoll.communicator.start import init, init_all, spawn

__all__ = ["World"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class World:
    """Makes communicators with options, one after the other, always of the same ranks.

    Args:
        threads: ranks as threads of this process; 1: this process is one rank of its launcher's.
        device: "auto" or "cpu".
        timeout: seconds a call may take; None: the library's own.

    """

    threads: int = 1
    device: str = "auto"
    timeout: float | None = None

    def run(
        self, function: Callable[[Communicator, Communicator], T], **options: object
    ) -> list[T]:
        """Call ``function(control, comm)`` on every rank of this process; what each returned.

        ``comm`` is what is measured. ``control`` is a plain communicator of the same ranks, for
        barriers and for what the ranks tell each other: no pace and no algorithm touches it.

        Args:
            function: keeps nothing of the communicators.
            options: of ``ringcoll.init``, for ``comm``; None leaves an option out.

        """
        given: dict[str, Any] = {
            name: value for name, value in options.items() if value is not None
        }
        plain: dict[str, Any] = {"device": self.device, "timeout": self.timeout}
        if self.threads > 1:
            return self._threads(function, plain, given)
        with init(**plain) as control:
            if not given:
                return [function(control, control)]
            with init(**plain, **given) as comm:
                return [function(control, comm)]

    def _threads(
        self,
        function: Callable[[Communicator, Communicator], T],
        plain: dict[str, Any],
        given: dict[str, Any],
    ) -> list[T]:
        comms = init_all(self.threads, **plain, **given)

        def work(control: Communicator) -> T:
            comm = comms[control.rank]
            try:
                return function(control, comm)
            except BaseException as error:
                comm.abort(f"{type(error).__name__}: {error}")
                raise

        try:
            results: list[T] = spawn(work, self.threads, **plain)
        finally:
            for comm in comms:
                comm.close()
        return results
