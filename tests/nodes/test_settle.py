"""Waiting for the streams of all ranks of a process."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("cupy")

from ringcoll.errors import MachineError
from ringcoll.executors.cuda_nodes import executor


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


class NotedLane:
    """A lane that stands for whether streams wait for it."""

    def __init__(self, *_words):
        self.over = False

    def give_up(self):
        self.over = True


def test_no_stream_waits_for_a_lane_that_is_made_after_all_was_given_up(monkeypatch):
    """One thread finds a call wrong while another prepares one: nobody would carry it."""
    monkeypatch.setattr(executor, "StagingLane", NotedLane)
    fabric, device = SimpleNamespace(rank=0, fence=None), SimpleNamespace(ordinal=0)
    words: list[Any] = [fabric, device, None, None, None]
    staging: Any = executor.CudaNodesExecutor(*words)
    executor._alive.discard(staging)
    assert not staging.lanes[0].over
    staging.give_up()
    staging.lane(2, 64)
    assert [lane.over for lane in staging.lanes] == [True, True]
