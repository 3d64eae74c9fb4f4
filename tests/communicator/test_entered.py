"""Messages that the compiled part has entered: a work of which nothing is left has ended."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import ringcoll
from ringcoll.communicator.work import MessageWork


@pytest.fixture
def progress():
    """The messages of a rank alone."""
    (comm,) = ringcoll.init_all(1, device="cpu")
    with comm:
        yield comm._state.progress


LEFT = SimpleNamespace(messages_on=lambda *_: [], seconds=lambda *_: 1.0), None, None, (), "send"


def test_a_call_that_waits(progress):
    assert progress.go_on([LEFT], None).done()
    assert not progress.is_busy()


def test_a_call_that_nobody_waits_for(progress):
    work = MessageWork(progress, progress.state, "send", 0)

    def queue(entered: list[Any], queues: dict[Any, Any], more: dict[Any, Any], left: int) -> bool:
        assert (more, left) == ({}, 0)
        entered.clear()
        return True

    entered: Any = SimpleNamespace(work=work, left=lambda: (LEFT, None, 0), queue=queue)
    progress.entered.append(entered)
    progress.take_over()
    assert work.done() and not progress.is_busy()
