"""What ranks say at a barrier of their GPUs, and decide."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from ringcoll.torch import barriers
from ringcoll.torch.barriers import SETTLED, Decision, decide, device_key, device_of


@pytest.fixture
def gpus(monkeypatch):
    """Says which of 4 GPUs this process has used; None: it has not asked for any."""

    def use(*used, initialized=True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda ordinal: (ordinal in used) << 21)

    return use


def test_a_device_is_named_by_the_barrier_then_by_the_group_then_by_its_use(gpus):
    gpus(2)
    assert device_of([1], torch.device("cuda", 3)) == 1
    assert device_of([], torch.device("cuda", 3)) == 3
    assert device_of([], None) == 2


def test_what_is_not_known_is_not_guessed(gpus):
    gpus(0, 2)
    assert device_of([], None) is None
    gpus()
    assert device_of([], None) is None
    gpus(2, initialized=False)
    assert device_of([], None) is None


def test_without_a_gpu_it_is_gpus_decided(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_of([], None) is None
    assert device_key(None) == SETTLED


def test_a_place_is_one_gpu_of_one_host(gpus, monkeypatch):
    gpus(2)
    found = [type("Device", (), {"pci": f"0000:{number}"}) for number in range(2)]
    monkeypatch.setattr(barriers, "devices", lambda: found)
    monkeypatch.setattr(barriers, "available", lambda: None)
    assert decide([device_key(0), device_key(1)]) is Decision.OPEN
    assert decide([device_key(1), device_key(1)]) is Decision.SETTLED
    assert decide([device_key(1), device_key(None)]) is Decision.LATER
    assert device_key(2) == SETTLED, "this process does not see it"
    monkeypatch.setattr(barriers, "available", lambda: "CuPy cannot be imported")
    assert device_key(0) == SETTLED
    assert decide([SETTLED, "later", "GPU"]) is Decision.SETTLED
