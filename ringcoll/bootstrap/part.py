"""Some ranks of an MPI communicator as a bootstrap, without a communicator of their own.

MPI makes a smaller communicator only in a call that has no deadline. So these ranks send each
other what they say point to point; the messages of a pair keep their order, and with it the
exchanges.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ringcoll.bootstrap.contract import named
from ringcoll.bootstrap.mpi import MpiBootstrap, load_mpi
from ringcoll.errors import DeadlineError

__all__ = ["PartOfMpi"]

_TAG = 32748  # MPI promises tags up to 32767
_YIELDS = 200  # polls that yield before a poll sleeps
_SLEEP = 1e-3  # seconds


class PartOfMpi:
    """The ranks of one node.

    Args:
        whole: the bootstrap of all ranks.
        members: who takes part, in order; this rank is one of them.
        timeout: seconds for each exchange.

    """

    def __init__(self, whole: MpiBootstrap, members: Sequence[int], timeout: float) -> None:
        self.rank, self.nranks = members.index(whole.rank), len(members)
        self._members, self._timeout = tuple(members), timeout
        self._communicator = whole.communicator
        self._mpi = load_mpi()
        self._unsent: list[tuple[Any, npt.NDArray[np.uint8]]] = []

    def allgather(self, payload: bytes) -> list[bytes]:
        """Every member's bytes.

        Raises:
            DeadlineError: a member did not take part.

        """
        deadline = time.monotonic() + self._timeout
        sent = np.frombuffer(payload or b"\0", np.uint8)
        said: dict[int, bytes] = {self.rank: payload}
        others = [index for index in range(self.nranks) if index != self.rank]
        for index in others:
            message = [sent, len(payload), self._mpi.BYTE]
            request = self._communicator.Isend(message, self._members[index], _TAG)
            self._unsent.append((request, sent))
        polls = 0
        while len(said) < self.nranks or self._unsent:
            for index in others:
                if index not in said:
                    self._take(index, said)
            self._unsent = [(call, array) for call, array in self._unsent if not call.Test()]
            if time.monotonic() > deadline:
                absent = [self._members[index] for index in others if index not in said]
                raise DeadlineError(
                    f"init: rank {self._members[self.rank]} waited {self._timeout:.3g} s over MPI "
                    f"for {named(absent) if absent else 'the others'}"
                )
            polls += 1
            if polls < _YIELDS:
                os.sched_yield()
            else:
                time.sleep(_SLEEP)
        return [said[index] for index in range(self.nranks)]

    def _take(self, index: int, said: dict[int, bytes]) -> None:
        status = self._mpi.Status()
        message = self._communicator.Improbe(self._members[index], _TAG, status)
        if message is None:
            return
        length = status.Get_count(self._mpi.BYTE)
        received = np.zeros(length + 1, np.uint8)
        message.Recv([received, length, self._mpi.BYTE])
        said[index] = received[:length].tobytes()
