"""Posted messages of CUDA tensors, by the calls that a batch makes of them, without a GPU.

Tensors lie on the CPU, whose number for torch is -1.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import torch

from ringcoll.cuda.raw import RawArray
from ringcoll.dtypes import dtype_of
from ringcoll.errors import ArgumentError
from ringcoll.torch.batch import Batch
from ringcoll.torch.device import Device
from ringcoll.torch.tensors import dense, held


class Calls:
    """A communicator that notes its calls, and fills what they receive."""

    def __init__(self) -> None:
        self.made = list[tuple[object, ...]]()

    def send(self, buffer, peer, **how) -> None:
        self.made.append(("send", buffer.data_ptr(), peer, how))

    def recv(self, buffer, peer, **how) -> None:
        self.made.append(("recv", buffer.data_ptr(), peer, how))
        buffer.fill_(7)

    def sendrecv(self, sent, dest, received, source, **how) -> None:
        pointers = sent.data_ptr(), received.data_ptr()
        self.made.append(("sendrecv", pointers[0], dest, pointers[1], source, how))
        received.fill_(7)


class Engine:
    """Tensors are arrays; notes which the group's stream keeps."""

    ordinal = -1

    def __init__(self) -> None:
        self.comm, self.kept = Calls(), list[int]()
        self.async_stream = SimpleNamespace(
            stream="side", device_guard=nullcontext, record_event=lambda: "event"
        )

    def lock(self):
        return nullcontext()

    def wait_current_stream(self, touched) -> None:
        self.kept += [tensor.data_ptr() for tensor in touched]

    def takes(self, *_tensors) -> bool:
        return False

    def buffer(self, tensor, _name):
        return tensor

    def async_options(self):
        return {"stream": "side"}


@pytest.fixture
def engine(monkeypatch):
    made = Engine()

    @contextmanager
    def noted(*name):
        made.comm.made.append(name or ("group",))
        yield
        made.comm.made.append(("end",))

    monkeypatch.setattr("ringcoll.torch.batch.group", noted)
    monkeypatch.setattr("torch.cuda.stream", noted)
    return made


def launched(engine, *posts):
    """The calls of posted messages."""
    batch = Batch(engine, lambda error: error)
    works = [batch.post(*post) for post in posts]
    assert engine.comm.made == []
    batch.flush()
    assert batch.posts == []
    assert [str(work.event) for work in works] == ["event"] * len(works)
    return engine.comm.made


HOW = {"stream": "side"}


@pytest.mark.parametrize("order", [1, -1])
def test_one_message_each_way_is_a_sendrecv(engine, order):
    x, y = torch.zeros(4), torch.zeros(3, dtype=torch.int16)
    made = launched(engine, *[("send", x, 2), ("recv", y, 3)][::order])
    assert made == [("sendrecv", x.data_ptr(), 2, y.data_ptr(), 3, HOW)]
    assert engine.kept == [x.data_ptr(), y.data_ptr()][::order]


@pytest.mark.parametrize("name", ["send", "recv"])
def test_a_message_alone_needs_no_group(engine, name):
    x = torch.zeros(4)
    assert launched(engine, (name, x, 2)) == [(name, x.data_ptr(), 2, HOW)]


@pytest.mark.parametrize("first", [0, 3, 7])
def test_messages_that_share_memory_are_a_group(engine, first):
    """As with NCCL, whose order is then the caller's; a sendrecv refuses them."""
    x = torch.zeros(12)
    sent, received = x[4:8], x[first : first + 5]
    assert launched(engine, ("send", sent, 2), ("recv", received, 2)) == [
        ("group",),
        ("send", sent.data_ptr(), 2, HOW),
        ("recv", received.data_ptr(), 2, HOW),
        ("end",),
    ]


@pytest.mark.parametrize("first", [0, 8])
def test_messages_beside_each_other_share_no_memory(engine, first):
    x = torch.zeros(12)
    made = launched(engine, ("recv", x[first : first + 4], 1), ("send", x[4:8], 2))
    assert [call[0] for call in made] == ["sendrecv"]


@pytest.mark.parametrize("names", [("send", "send"), ("recv", "recv"), ("send", "recv", "send")])
def test_others_are_a_group_in_their_order(engine, names):
    made = launched(engine, *((name, torch.zeros(3), 2) for name in names))
    assert [call[0] for call in made] == ["group", *names, "end"]


def test_messages_without_elements_share_no_memory(engine):
    x = torch.zeros(4)
    assert launched(engine, ("recv", x[:0], 1), ("send", x, 2))[0][0] == "sendrecv"


@pytest.mark.parametrize("both", [False, True])
def test_a_strided_tensor_is_filled_on_the_groups_stream(engine, both):
    x = torch.zeros(3, 4).T
    posts = [("recv", x, 1), *([("send", torch.zeros(2), 1)] if both else [])]
    made = launched(engine, *posts)
    assert [call[0] for call in made] == ["sendrecv" if both else "recv", "side", "end"]
    assert bool((x == 7).all())
    assert engine.kept[0] == x.data_ptr() != engine.kept[1]


def test_a_posted_message_owns_its_memory(engine):
    """As pipelines free what they have sent, by other memory for the same tensor."""
    x, sent = torch.arange(4.0), list[list[float]]()
    engine.comm.send = lambda buffer, *_, **__: sent.append(buffer.tolist())
    batch = Batch(engine, lambda error: error)
    batch.post("send", x, 1)
    x.data = torch.zeros(1)
    batch.flush()
    assert sent == [[0.0, 1.0, 2.0, 3.0]]


def test_what_is_dense_is_passed_on_but_for_autograd():
    x = torch.zeros(2, 3)
    assert dense(x, "send") is x
    assert held(x, "send") is not x
    assert held(x, "send").data_ptr() == x.data_ptr()
    leaf = torch.zeros(3, requires_grad=True)
    for tensor in (leaf, leaf * 2):
        assert dense(tensor, "send").data_ptr() == tensor.data_ptr()
        assert not dense(tensor, "send").requires_grad
    for tensor in (x.T, torch.zeros(2, dtype=torch.complex64).conj().imag):
        assert dense(tensor, "send").is_contiguous()
        assert not dense(tensor, "send").is_neg()


def buffer_of(tensor):
    return Device.buffer(SimpleNamespace(ordinal=3), tensor, "send")  # type: ignore[arg-type]


def test_a_tensor_is_an_array_where_it_lies():
    x = torch.zeros(2, 3)
    assert buffer_of(x) == RawArray(x.data_ptr(), (6,), dtype_of("float32"), 3)
    assert buffer_of(x[:0]).size == 0


def test_tensors_that_are_their_own_arrays():
    class Own(torch.Tensor):  # type: ignore[misc]
        """A class of others may say something else of its memory."""

    x = torch.zeros(2, 3)
    assert Device.takes(x) and Device.takes(x, x[1:])
    assert not Device.takes(x, x[:0])
    assert not Device.takes(x.as_subclass(Own))
    assert not Device.takes(torch.zeros(2, dtype=torch.uint8).view(torch.float8_e8m0fnu))


def test_tensors_without_memory_or_alignment_are_refused():
    freed = torch.arange(8.0)
    freed.untyped_storage().resize_(0)
    assert not Device.takes(freed)
    with pytest.raises(ArgumentError, match="null pointer"):
        buffer_of(freed)
    shifted = torch.frombuffer(bytearray(13), dtype=torch.float32, offset=1)
    assert not Device.takes(shifted)
    with pytest.raises(ArgumentError, match="not aligned"):
        buffer_of(shifted)
