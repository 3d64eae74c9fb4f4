"""Arrays that are not numpy's own take the path of numpy's: their calls are kept, and checked."""

from __future__ import annotations

import array
import contextlib
import ctypes
import gc
import sys
import threading
import types
import weakref

import numpy as np
import pytest

import ringcoll
from ringcoll import ArgumentError, ArgumentTypeError
from ringcoll.arguments.host_arrays import HostArrays
from ringcoll.executors.cpu.tensors import tensor_reader


class Interface:
    """An array that others see by its interface alone."""

    def __init__(self, values):
        self.values = np.array(values, "float32")
        self.__array_interface__ = self.values.__array_interface__


def memmap(values, folder):
    made = np.memmap(folder / f"{values[-1]}", "float32", "w+", shape=len(values))
    made[:] = values
    return made


MAKERS = {
    "array": lambda values, _: array.array("f", values),
    "memoryview": lambda values, _: memoryview(array.array("f", values)),
    "interface": lambda values, _: Interface(values),
    "memmap": memmap,
    "torch": lambda values, _: pytest.importorskip("torch").tensor(values),
}


@pytest.mark.parametrize("name", MAKERS)
def test_one_preparation_serves_the_arrays_of_all_libraries(name, tmp_path):
    def work(comm):
        (tmp_path / f"{comm.rank}").mkdir()
        first, second = (
            MAKERS[name]([1.0, 2.0, last], tmp_path / f"{comm.rank}") for last in (3.0, 4.0)
        )
        counts = [2, 2] if comm.rank == 0 else [1, 1]
        sums, parts = np.zeros((3, 3), "float32"), np.zeros((2, 4), "float32")
        for k, x in enumerate((np.ones(3, "float32"), first, second)):
            comm.all_reduce(x, sums[k])
            for _ in range(2 if k else 0):  # kept the third time, and found the fourth
                comm.all_to_all_v(x, [2, 1], parts[k - 1][: 4 - 2 * comm.rank], counts)
        comm.all_reduce(second)
        view = np.asarray(second.values if isinstance(second, Interface) else second)
        kept = len(comm._engine.calls), len(comm._engine._exchanges)
        return sums.tolist(), parts.tolist(), view.tolist(), kept

    sums, parts, view, kept = ringcoll.spawn(work, 2, device="cpu", timeout=20)[0]
    assert sums == [[2, 2, 2], [2, 4, 6], [2, 4, 8]] and view == [2, 4, 8]
    assert parts == [[1, 2, 1, 2]] * 2
    assert kept == (2, 1)  # out of place and in place, and one all_to_all_v


def test_a_tensor_that_has_changed_is_checked_again():
    torch = pytest.importorskip("torch")
    (comm,) = ringcoll.init_all(1, device="cpu")
    with comm:
        x = torch.ones(4)
        wrong = [
            (x.clone().requires_grad_(), "requires grad"),
            (torch._neg_view(x), r"pass sendbuf\.resolve_neg"),
            (torch.ones(4, 4)[:, 0], "not contiguous"),
            (torch.ones(4, device="meta"), "cannot view|another device"),
        ]
        freed = torch.ones(4)
        for good in (x, freed):
            comm.all_reduce(good, op=ringcoll.premul_sum(3.0))
            comm.all_reduce(good)
        freed.untyped_storage().resize_(0)
        for tensor, words in [*wrong, (freed, "storage was freed")]:
            with pytest.raises((ArgumentError, ArgumentTypeError), match=words):
                comm.all_reduce(tensor)
        y = torch.empty(4)
        comm.all_reduce(wrong[0][0].detach(), y)
        comm.all_reduce(x.requires_grad_(), y)  # is read only
        assert y.tolist() == [3.0] * 4


@pytest.mark.parametrize("kind", ["all_reduce", "recv", "all_to_all_v", "group"])
def test_a_call_under_way_keeps_the_memory_of_its_tensor(kind):
    """Also where the tensor is given other memory meanwhile, and then dropped."""
    torch = pytest.importorskip("torch")
    given, count = threading.Event(), 1 << 12
    halves = [count // 2] * 2

    def call(comm, x, **how):
        if kind == "recv":
            return comm.send(x, 0) if comm.rank else comm.recv(x, 1, **how)
        if kind == "all_to_all_v":
            return comm.all_to_all_v(torch.ones(count), halves, x, halves, **how)
        return comm.all_reduce(x, **how)

    def work(comm):
        x = torch.ones(count)
        call(comm, x)
        if comm.rank:
            assert given.wait(20)
            call(comm, x)
            return True
        in_group = kind == "group"
        with ringcoll.group() if in_group else contextlib.nullcontext():
            work = call(comm, x) if in_group else call(comm, x, async_op=True)
            x.data = torch.empty(0)
            gc.collect()
            others = [torch.full((count,), 7.0) for _ in range(8)]
            given.set()
        if work is not None:
            work.wait()
        return all(bool((other == 7).all()) for other in others)

    assert ringcoll.spawn(work, 2, device="cpu", timeout=20) == [True, True]


@pytest.mark.parametrize("fast", [None, tensor_reader])
def test_a_view_keeps_the_memory_and_lets_it_go(fast):
    torch = pytest.importorskip("torch")
    tensor = torch.arange(4.0)
    ended: list[bool] = []
    storage = tensor.untyped_storage()
    weakref.finalize(storage, ended.append, True)
    view = HostArrays(fast).view(tensor)
    del tensor, storage
    gc.collect()
    assert ended == [] and view.tolist() == [0, 1, 2, 3]
    del view
    gc.collect()
    assert ended == [True]


def test_types_that_come_and_go_are_not_kept():
    arrays = HostArrays()
    for count in (1, 2):
        kind = type(f"Interface{count}", (Interface,), {})
        assert arrays.view(kind([1.0] * count)).size == count
        assert arrays.view((ctypes.c_ubyte * count)()).size == count
        known = weakref.ref(kind)
        del kind
        gc.collect()
        assert known() is None
    assert not arrays._readers


def test_one_read_only_object_for_both_buffers_is_told_as_one():
    (comm,) = ringcoll.init_all(1, device="cpu")
    with comm:
        texts = []
        for x in (np.frombuffer(bytes(4), np.uint8), memoryview(bytes(4))):
            with pytest.raises(ArgumentError) as caught:
                comm.all_reduce(x, x)
            texts.append(str(caught.value))
        assert texts[0] == texts[1] and "sendbuf is read-only" in texts[0]


def test_counts_that_can_change_are_read_by_every_call():
    torch = pytest.importorskip("torch")

    def work(comm):
        counts, found = [torch.tensor(1), torch.tensor(2)], []
        for values in ((1, 2), (2, 1)):
            for count, value in zip(counts, values, strict=True):
                count.fill_(value)
            x = np.arange(3.0)
            comm.reduce_scatter_v(x, None, counts)
            found.append(x.tolist())
        return found

    wanted = [[[0, 1, 2], [0, 2, 2]], [[0, 2, 4], [0, 1, 4]]]
    assert ringcoll.spawn(work, 2, device="cpu", timeout=20) == wanted


def test_a_torch_that_another_thread_is_importing_is_none_yet(monkeypatch):
    (comm,) = ringcoll.init_all(1, device="cpu")
    with comm:
        for module in (types.ModuleType("torch"), None):
            monkeypatch.setitem(sys.modules, "torch", module)
            x = bytearray(b"abc")
            for _ in range(2):
                comm.all_reduce(x)
            assert bytes(x) == b"abc"


def test_what_an_objects_own_property_raises_names_the_argument():
    class Broken:
        @property
        def __array_interface__(self):
            raise KeyError("gone")

    (comm,) = ringcoll.init_all(1, device="cpu")
    with comm:
        for _ in range(2):
            with pytest.raises(ArgumentTypeError, match=r"all_reduce on rank 0: sendbuf.*gone"):
                comm.all_reduce(Broken())
