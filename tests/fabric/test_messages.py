"""Messages over a stand-in for MPI: what two threads do with them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest

from ringcoll.errors import AbortedError
from ringcoll.fabric.mpi import PAIRS, Messages


class Request:
    """A receive that nothing comes for; it notes two threads at once."""

    def __init__(self) -> None:
        self.inside = threading.Lock()
        self.tested, self.go_on = threading.Event(), threading.Event()
        self.cancelled = self.met = False

    @contextlib.contextmanager
    def alone(self):
        free = self.inside.acquire(blocking=False)
        self.met = self.met or not free
        try:
            yield
        finally:
            if free:
                self.inside.release()

    def Cancel(self) -> None:  # noqa: N802 (mpi4py's name)
        with self.alone():
            self.cancelled = True

    def Test(self, _status: object = None) -> bool:  # noqa: N802
        with self.alone():
            if not self.cancelled:
                self.tested.set()
                self.go_on.wait(10)
            return self.cancelled


@pytest.fixture
def request_and_messages():
    request = Request()
    status = SimpleNamespace(Get_count=lambda _: 8)
    mpi = SimpleNamespace(Exception=RuntimeError, BYTE=None, Status=lambda: status)
    communicator = SimpleNamespace(Irecv=lambda *_: request, Isend=lambda *_: request)
    carrier = SimpleNamespace(mpi=mpi, serial=False, communicator=communicator, ranks=[0])
    return request, Messages(carrier, [0], 0)  # type: ignore[arg-type]


def beside_a_look(request: Request, look: Callable[[], object], end: Callable[[], object]) -> None:
    """End everything while another thread looks: nothing is cancelled before that is over."""
    looks, ends = threading.Thread(target=look), threading.Thread(target=end)
    looks.start()
    assert request.tested.wait(10)
    ends.start()
    ends.join(0.1)
    assert not request.cancelled
    request.go_on.set()
    looks.join(10)
    ends.join(10)


def test_whoever_gives_up_waits_for_a_look_of_another_thread(request_and_messages):
    request, messages = request_and_messages
    transfer = messages.receive(np.zeros(8, np.uint8), 0, PAIRS)
    seen: list[bool] = []
    beside_a_look(
        request,
        lambda: seen.append(transfer.done()),
        lambda: seen.append(messages.give_up(())),
    )
    assert seen == [False, True]
    assert not request.met
    assert transfer.done()
    assert not messages.active


def test_nothing_begins_once_all_has_been_given_up(request_and_messages):
    """Nobody would give it up again, and its array is let go of."""
    _request, messages = request_and_messages
    assert messages.give_up(())
    for begin in (messages.send, messages.receive):
        with pytest.raises(AbortedError, match="rank 0: a call failed"):
            begin(np.zeros(8, np.uint8), 0, PAIRS)
    assert not messages.active


class Store:
    """Takes what is posted, and has it wait for the end of another thread's work."""

    def __init__(self, meanwhile) -> None:
        self.meanwhile, self.posts = meanwhile, 0

    def take(self, _rank: int, _payload: memoryview) -> None:
        self.posts += 1
        self.meanwhile()


def test_who_closes_waits_for_a_look_at_what_is_posted(request_and_messages):
    request, messages = request_and_messages
    store = Store(int)
    messages.receive_posts([0], store.take)
    beside_a_look(request, messages.progress, messages.close)
    messages.progress()
    assert request.cancelled
    assert not request.met
    assert store.posts == 0


def test_nothing_is_received_any_more_after_a_close_while_a_post_is_stored(request_and_messages):
    request, messages = request_and_messages
    store = Store(messages.close)
    messages.receive_posts([0], store.take)
    request.cancelled = True  # for once: it has come
    messages.progress()
    assert store.posts == 1
    assert not messages._awaited
