"""Which tensors a group posts by itself, with posts that only note what they are told."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import torch

from ringcoll.torch.returning import LEAST, TIMES, Returning


class State:
    """One rank's, with its posts."""

    def __init__(self, mapped: bool = True, symmetric: bool = False) -> None:
        self.mapped, self.lock = mapped, threading.RLock()
        self.cuda = SimpleNamespace(open_posts=lambda: self, tend=None)
        self.symmetric = SimpleNamespace(lookup=lambda *_place: (1, 0) if symmetric else None)
        self.looks = self.tended = self.changes = self.asked = 0
        self.posted: dict[tuple[int, int], object] = {}
        self.withdrawn: list[int] = []

    def together(self, call):
        return call()

    def look(self):
        self.looks += 1

    def tend(self, calls):
        self.tended = calls

    def post(self, pointer, nbytes, keep):
        self.asked += 1
        if self.mapped:
            self.posted[pointer, nbytes] = keep
        return self.mapped

    def withdraw(self, pointer, nbytes, calls):
        del self.posted[pointer, nbytes]
        self.withdrawn.append(calls)
        self.changes += 1


def made(state, capturing=()):
    return Returning(state, lambda: bool(capturing))


def buckets(count):
    return [torch.empty(LEAST, dtype=torch.uint8) for _ in range(count)]


def places(tensors):
    return {(t.data_ptr(), t.nbytes) for t in tensors}


def steps(returning, tensors, times, *, lasting=True):
    """So many steps, each of a call on every tensor."""
    for _ in range(times):
        for tensor in tensors:
            returning.meet(tensor, lasting=lasting)


@pytest.mark.parametrize("count", [1, 5, 20])
def test_buckets_are_posted_when_they_come_for_the_third_time(count):
    state, tensors = State(), buckets(count)
    returning = made(state)
    steps(returning, tensors, TIMES)
    assert state.posted == {}
    steps(returning, tensors, 1)
    assert set(state.posted) == places(tensors)
    steps(returning, tensors, 3)
    assert state.asked == count and state.looks == count * (TIMES + 4)


def test_a_call_hears_whether_what_is_prepared_holds():
    state, (tensor,) = State(), buckets(1)
    returning = made(state)
    assert not returning.meet(tensor, lasting=True)
    state.changes += 1
    assert returning.meet(tensor, lasting=True)
    assert not returning.meet(tensor, lasting=True)


def test_copies_are_not_posted():
    state = State()
    steps(made(state), buckets(2), 9, lasting=False)
    assert state.asked == 0 and state.looks == 18


def test_nothing_is_posted_during_a_capture():
    state = State()
    steps(made(state, capturing=[True]), buckets(2), 9)
    assert state.asked == 0


def test_memory_that_cannot_be_mapped_is_tried_once():
    state = State(mapped=False)
    steps(made(state), buckets(3), 9)
    assert state.asked == 1


def test_symmetric_memory_is_not_posted():
    state = State(symmetric=True)
    steps(made(state), buckets(3), 9)
    assert state.asked == 0


def test_what_only_the_group_has_is_let_go():
    state, tensors = State(), buckets(2)
    returning = made(state)
    steps(returning, tensors, 5)
    returning.tend()
    assert set(state.posted) == places(tensors) and state.withdrawn == []
    del tensors[0]
    returning.tend()
    assert set(state.posted) == places(tensors)
    assert state.withdrawn == [10] and state.tended == 10
    assert returning.meet(tensors[0], lasting=True)


def test_a_tensor_whose_storage_was_resized_is_let_go_at_once():
    state, (tensor,) = State(), buckets(1)
    returning = made(state)
    steps(returning, [tensor], 5)
    at = tensor.data_ptr()
    tensor.untyped_storage().resize_(0)
    assert set(state.posted) == {(at, LEAST)}
    later = SimpleNamespace(data_ptr=lambda: at, nbytes=LEAST)  # other memory that came there
    assert returning.meet(later, lasting=True)
    assert state.posted == {} and state.withdrawn == [5]


def test_what_was_captured_is_kept():
    state, (tensor,) = State(), buckets(1)
    capturing: list[bool] = []
    returning = made(state, capturing)
    steps(returning, [tensor], 5)
    capturing.append(True)
    returning.meet(tensor, lasting=True)
    del tensor
    returning.tend()
    assert len(state.posted) == 1


def test_temporaries_that_come_to_lie_at_one_place_do_not_come_back():
    """As torch's allocator gives them out: other memory at the same address, in every step."""
    state, memory = State(), buckets(2)
    returning = made(state)
    for number in range(40):
        array = memory[number % 2].numpy()  # each wrapped anew: storages of their own
        returning.meet(torch.frombuffer(array, dtype=torch.uint8), lasting=True)
    assert state.asked == 0


def test_slices_of_one_buffer_are_let_go_together():
    state = State()
    returning = made(state)
    whole = torch.empty(3 * LEAST, dtype=torch.uint8)
    steps(returning, whole.split(LEAST), 3)
    assert len(state.posted) == 3
    returning.tend()
    assert len(state.posted) == 3
    del whole
    returning.tend()
    assert state.posted == {}


def test_nothing_is_let_go_while_a_call_is_under_way():
    state, tensors = State(), buckets(1)
    returning = made(state)
    steps(returning, tensors, 5)
    del tensors[0]
    with state.lock:
        thread = threading.Thread(target=returning.tend)
        thread.start()
        thread.join()
    assert len(state.posted) == 1
