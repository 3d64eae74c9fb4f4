"""Arrays that are not numpy's own take the path of numpy's: their calls are kept, and checked."""

from __future__ import annotations

import array
import gc
import threading
import weakref

import numpy as np
import pytest

import ringcoll
from ringcoll import ArgumentError, ArgumentTypeError
from ringcoll.arguments.host_arrays import HostArrays


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
            if k:
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


def test_a_tensor_of_a_call_under_way_keeps_its_memory():
    torch = pytest.importorskip("torch")
    checked = threading.Event()

    def work(comm):
        x = torch.ones(1 << 12)
        ended: list[bool] = []
        comm.all_reduce(x)
        if comm.rank:
            assert checked.wait(20)
            comm.all_reduce(x)
            return True
        work = comm.all_reduce(x, async_op=True)
        weakref.finalize(x, ended.append, True)
        del x
        gc.collect()
        alive = not ended
        checked.set()
        work.wait()
        return alive

    assert ringcoll.spawn(work, 2, device="cpu", timeout=20) == [True, True]


def test_a_view_keeps_its_tensor_alive():
    torch = pytest.importorskip("torch")
    tensor = torch.arange(4.0)
    known, view = weakref.ref(tensor), HostArrays().viewed(tensor)
    del tensor
    gc.collect()
    assert known() is not None and view.tolist() == [0, 1, 2, 3]
    del view
    gc.collect()
    assert known() is None
