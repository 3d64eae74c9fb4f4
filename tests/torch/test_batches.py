"""Posted messages of CUDA tensors, by the calls that a batch makes of them, without a GPU."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from unittest import mock

import pytest

pytest.importorskip("torch")

from ringcoll.cuda.raw import RawArray
from ringcoll.dtypes import dtype_of
from ringcoll.torch.batch import Batch

SEND, RECV = RawArray(4096, (4,), dtype_of("float32"), 0), RawArray(4112, (8,), dtype_of("int8"), 0)


class Calls:
    """A communicator that notes its calls, and where groups begin and end."""

    def __init__(self) -> None:
        self.made = list[tuple[object, ...]]()

    def send(self, *arguments, **how) -> None:
        self.made.append(("send", *arguments, how))

    def recv(self, *arguments, **how) -> None:
        self.made.append(("recv", *arguments, how))

    def sendrecv(self, *arguments, **how) -> None:
        self.made.append(("sendrecv", *arguments, how))


class Side:
    stream = "side"

    def device_guard(self):
        return nullcontext()

    def record_event(self) -> str:
        return "event"


class Engine:
    """Tensors are their own dense copies, and arrays."""

    ordinal, async_stream = 0, Side()

    def __init__(self) -> None:
        self.comm = Calls()

    def lock(self):
        return nullcontext()

    def buffer(self, tensor, _name):
        return tensor


@pytest.fixture
def engine(monkeypatch):
    made = Engine()

    @contextmanager
    def group():
        made.comm.made.append(("group",))
        yield
        made.comm.made.append(("end",))

    monkeypatch.setattr("ringcoll.torch.batch.group", group)
    monkeypatch.setattr("ringcoll.torch.batch.is_copy", lambda *_tensors: False)
    return made


def launched(engine, *posts):
    """The calls of posted messages."""
    batch = Batch(engine, lambda error: error)
    works = [mock.Mock(event=None) for _ in posts]
    batch.posts = [
        (name, tensor, tensor, peer, work)
        for (name, tensor, peer), work in zip(posts, works, strict=True)
    ]
    batch.flush()
    assert batch.posts == []
    assert all(work.event == "event" for work in works)
    return engine.comm.made


HOW = {"stream": "side"}


@pytest.mark.parametrize("order", [1, -1])
def test_one_message_each_way_is_a_sendrecv(engine, order):
    posts = [("send", SEND, 2), ("recv", RECV, 3)][::order]
    assert launched(engine, *posts) == [("sendrecv", SEND, 2, RECV, 3, HOW)]


@pytest.mark.parametrize("name", ["send", "recv"])
def test_a_message_alone_needs_no_group(engine, name):
    assert launched(engine, (name, SEND, 2)) == [(name, SEND, 2, HOW)]


@pytest.mark.parametrize("end", [4111, 4097, 4092])
def test_messages_that_share_memory_are_a_group(engine, end):
    """As with NCCL, whose order is then the caller's; a sendrecv refuses them."""
    shared = RawArray(end, (8,), dtype_of("int8"), 0)
    assert launched(engine, ("send", SEND, 2), ("recv", shared, 2)) == [
        ("group",),
        ("send", SEND, 2, HOW),
        ("recv", shared, 2, HOW),
        ("end",),
    ]


@pytest.mark.parametrize("names", [("send", "send"), ("recv", "recv"), ("send", "recv", "send")])
def test_others_are_a_group_in_their_order(engine, names):
    made = launched(engine, *((name, SEND, 2) for name in names))
    assert [call[0] for call in made] == ["group", *names, "end"]


def test_messages_without_elements_share_no_memory(engine):
    empty = RawArray(4096, (0,), dtype_of("int8"), 0)
    assert launched(engine, ("recv", empty, 1), ("send", SEND, 2))[0][0] == "sendrecv"
