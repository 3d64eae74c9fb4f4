"""Which tensors a group registers by itself, with a state that only notes what it is told."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import torch

from ringcoll.errors import MachineError
from ringcoll.torch import returning as module
from ringcoll.torch.returning import FACTOR, FIRST, LEAST, TIMES, WINDOW, Returning


class State:
    """One rank's; ``others``: what another says of each call."""

    def __init__(self, others: bytes = b"\1", mapped: bool = True) -> None:
        self.fabric, self.symmetric, self.cuda, self.mappings = self, self, self, self
        self.updates = self.sweeps = 0
        self.others, self.mapped = others, mapped
        self.said: list[bytes] = []
        self.registered: dict[int, int] = {}

    def together(self, call):
        return call()

    def allgather(self, sent, *, what):
        self.said.append(sent)
        return [sent, self.others]

    def synchronize(self):
        """Nothing is under way."""

    def update(self):
        self.updates += 1

    def sweep(self):
        self.sweeps += 1

    def register(self, array, *, own):
        assert own
        if self.mapped is None:
            raise MachineError("no more handles")
        if self.mapped:
            self.registered[array.pointer] = array.nbytes
        return self.mapped

    def unregister(self, array, *, own):
        assert own
        del self.registered[array.pointer]

    def lookup(self, address, nbytes, *, own):
        assert own
        return (1, 0) if self.registered.get(address, 0) >= nbytes else None


@pytest.fixture(autouse=True)
def arrays(monkeypatch):
    def device_array(tensor, *, argument, where, ordinal):
        return SimpleNamespace(pointer=tensor.data_ptr(), nbytes=tensor.nbytes)

    monkeypatch.setattr(module, "device_array", device_array)


def made(state, capturing=False):
    return Returning(state, lambda: capturing)


def buckets(count):
    return [torch.empty(LEAST, dtype=torch.uint8) for _ in range(count)]


def steps(returning, tensors, calls, *, lasting=True):
    """So many calls, the tensors in turns."""
    for number in range(calls):
        returning.meet(tensors[number % len(tensors)], lasting=lasting)


@pytest.mark.parametrize("count", [1, 5, 20])
def test_buckets_that_come_back_are_registered_within_the_first_window(count):
    state, tensors = State(), buckets(count)
    returning = made(state)
    steps(returning, tensors, FIRST)
    assert not returning.reaches
    steps(returning, [*tensors[FIRST % count :], *tensors[: FIRST % count]], WINDOW)
    assert returning.reaches
    assert state.registered == {t.data_ptr(): t.nbytes for t in tensors}


def test_others_are_registered_in_later_windows():
    state, tensors, more = State(), buckets(2), buckets(2)
    returning = made(state)
    steps(returning, tensors, FIRST + WINDOW)
    steps(returning, more, FACTOR * FIRST - FIRST - WINDOW)
    assert len(state.registered) == 2
    steps(returning, more, WINDOW)
    assert set(state.registered) == {t.data_ptr() for t in tensors + more}
    assert (state.updates, state.sweeps) == (4, 1)


def test_all_ranks_speak_in_the_same_calls_whatever_they_have():
    states = [State(), State(b"\0"), State(mapped=True)]
    held = []
    for state, fresh in zip(states, (False, True, True), strict=True):
        returning, tensors = made(state), buckets(3)
        for number in range(FACTOR * FIRST + WINDOW + 1):
            tensor = buckets(1)[0] if fresh else tensors[number % 3]
            held.append(tensor)
            returning.meet(tensor, lasting=number % 2 == 0 or not fresh)
    assert [len(state.said) for state in states] == [2 * WINDOW] * 3
    assert [bool(state.registered) for state in states] == [True, False, False]


def test_nothing_is_registered_unless_all_ranks_say_so():
    state = State(b"\0")
    steps(made(state), buckets(2), FIRST + WINDOW)
    assert state.registered == {} and b"\1" in state.said


def test_copies_are_not_registered():
    state = State()
    steps(made(state), buckets(2), FIRST + WINDOW, lasting=False)
    assert state.said == [b"\0"] * WINDOW and state.registered == {}


def test_nothing_is_registered_during_a_capture():
    state = State()
    steps(made(state, capturing=True), buckets(2), FIRST + WINDOW)
    assert state.said == [b"\0"] * WINDOW and state.registered == {}


@pytest.mark.parametrize("mapped", [False, None], ids=["of another kind", "refused by CUDA"])
def test_memory_that_cannot_be_mapped_is_asked_for_once(mapped):
    state = State(mapped=mapped)
    returning = made(state)
    steps(returning, buckets(1), FIRST + WINDOW)
    assert len(state.said) == 1 and not returning.reaches


def test_what_is_reached_is_not_registered_again():
    state, tensors = State(), buckets(2)
    returning = made(state)
    state.registered = {t.data_ptr(): t.nbytes for t in tensors}
    steps(returning, tensors, FIRST + WINDOW)
    assert state.said == [b"\0"] * WINDOW


@pytest.mark.parametrize("gone", ["deleted", "resized"])
def test_what_only_the_group_has_is_let_go(gone):
    state, tensors = State(), buckets(2)
    returning = made(state)
    steps(returning, tensors, FIRST + 2 * TIMES)
    assert len(state.registered) == 2
    first = tensors[0].data_ptr()
    if gone == "deleted":
        del tensors[0]
    else:
        tensors.pop(0).untyped_storage().resize_(0)
    steps(returning, tensors, 1)
    assert first not in state.registered and len(state.registered) == 1


def test_temporaries_that_come_to_lie_at_one_place_do_not_come_back():
    """As torch's allocator gives them out: other memory at the same address, in every step."""
    state = State()
    returning = made(state)
    memory = buckets(2)
    for number in range(FIRST + WINDOW):
        array = memory[number % 2].numpy()  # each wrapped anew: storages of their own
        returning.meet(torch.frombuffer(array, dtype=torch.uint8), lasting=True)
    assert state.registered == {} and state.said == [b"\0"] * WINDOW


def test_slices_of_one_buffer_are_let_go_together():
    state = State()
    returning = made(state)
    whole = torch.empty(3 * LEAST, dtype=torch.uint8)
    steps(returning, list(whole.split(LEAST)), FIRST + 8)
    assert len(state.registered) == 3
    other = buckets(1)
    steps(returning, other, 1)
    assert len(state.registered) == 3
    del whole
    steps(returning, other, 1)
    assert state.registered == {}
