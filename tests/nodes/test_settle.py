"""Waiting for the streams of all ranks of a process."""

import pytest

pytest.importorskip("cupy")

from ringcoll.errors import MachineError
from ringcoll.executors.staging import executor


class Stands:
    """For a rank whose streams are waited for."""

    def __init__(self, seen, error=None):
        self.seen, self.error = seen, error

    def synchronize(self):
        self.seen.append(self)
        if self.error is not None:
            raise self.error


def test_another_ranks_device_that_fails_is_not_this_ranks_error(monkeypatch):
    seen: list[Stands] = []
    ranks = {Stands(seen, MachineError("rank 1: its device fails")), Stands(seen)}
    monkeypatch.setattr(executor, "_alive", ranks)
    executor.settle()
    assert set(seen) == ranks
