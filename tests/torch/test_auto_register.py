"""Which tensors a group posts by itself, with posts that only note what they are told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from ringcoll.torch.auto_register import MIN_BYTES, USES_BEFORE, AutoRegistration


class AutoRegister:
    """One rank's; a post is reached as soon as it is looked for again."""

    def __init__(self, mapped: bool = True) -> None:
        self.mapped, self.looks = mapped, 0
        self.posted: list[int] = []

    def poll(self):
        self.looks += 1

    def register(self, pointer):
        if pointer not in self.posted or not self.mapped:
            self.posted.append(pointer)
        return self.mapped

    def mapped_address(self, pointer, nbytes):
        return 7 << 48 if self.mapped and pointer in self.posted else 0


def made(posts, capturing=(), symmetric=False):
    state: Any = SimpleNamespace(
        together=lambda call: call(),
        cuda=SimpleNamespace(open_auto_register=lambda: posts),
        symmetric=SimpleNamespace(lookup=lambda *_place: (1, 0) if symmetric else None),
    )
    return AutoRegistration(state, lambda: bool(capturing))


def buckets(count):
    return [torch.empty(MIN_BYTES, dtype=torch.uint8) for _ in range(count)]


def steps(registration, tensors, times, *, caller_owned=True):
    """So many steps, each of a call on every tensor; what the last step's calls were told."""
    for _ in range(times):
        words = [registration.count_use(tensor, caller_owned=caller_owned) for tensor in tensors]
    return words


@pytest.mark.parametrize("count", [1, 5, 20])
def test_buckets_are_posted_when_they_come_for_the_third_time(count):
    posts, tensors = AutoRegister(), buckets(count)
    registration = made(posts)
    assert steps(registration, tensors, USES_BEFORE) == [0] * count
    assert posts.posted == []
    assert steps(registration, tensors, 1) == [0] * count
    assert posts.posted == [t.data_ptr() for t in tensors]
    assert steps(registration, tensors, 3) == [7 << 48] * count
    assert len(posts.posted) == count and posts.looks == count * (USES_BEFORE + 4)


def test_copies_are_not_posted_but_named_where_they_lie_in_what_was():
    posts, tensors = AutoRegister(), buckets(2)
    registration = made(posts)
    assert steps(registration, tensors, 9, caller_owned=False) == [0, 0]
    assert posts.posted == [] and posts.looks == 18
    posts.posted.append(tensors[0].data_ptr())
    assert steps(registration, tensors, 1, caller_owned=False) == [7 << 48, 0]


def test_nothing_is_posted_during_a_capture():
    posts, tensors = AutoRegister(), buckets(2)
    capturing = [True]
    registration = made(posts, capturing)
    steps(registration, tensors, 9)
    assert posts.posted == []
    capturing.clear()
    steps(registration, tensors, 3)
    assert len(posts.posted) == 2


def test_symmetric_memory_is_not_posted():
    posts = AutoRegister()
    steps(made(posts, symmetric=True), buckets(3), 9)
    assert posts.posted == []


def test_memory_that_cannot_be_mapped_is_tried_once_each():
    posts = AutoRegister(mapped=False)
    steps(made(posts), buckets(3), 9)
    assert len(posts.posted) == 3


def test_memory_that_is_named_no_more_is_posted_again_when_it_has_come_again():
    """Its storage was resized, and CUDA has given it another allocation."""
    posts, (tensor,) = AutoRegister(), buckets(1)
    registration = made(posts)
    steps(registration, [tensor], 5)
    tensor.untyped_storage().resize_(0)
    tensor.untyped_storage().resize_(MIN_BYTES)
    posts.posted.clear()
    assert steps(registration, [tensor], 3) == [0]
    assert steps(registration, [tensor], 1) == [7 << 48]


def test_temporaries_that_come_to_lie_at_one_place_do_not_come_back():
    """As torch's allocator gives them out: other memory at the same address, in every step."""
    posts, memory = AutoRegister(), buckets(2)
    registration = made(posts)
    for number in range(40):
        array = memory[number % 2].numpy()  # each wrapped anew: storages of their own
        registration.count_use(torch.frombuffer(array, dtype=torch.uint8), caller_owned=True)
    assert posts.posted == []


def test_a_tensor_is_kept_by_nobody():
    posts, (tensor,) = AutoRegister(), buckets(1)
    registration = made(posts)
    before = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    steps(registration, [tensor], 5)
    assert torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) == before
