"""What communicators of GPU ranks a group opens, without a GPU."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import torch.distributed as dist

import ringcoll.torch.group as group_module
from ringcoll.torch.group import MAX_SMS, ProcessGroupRingcoll


@pytest.fixture
def opened(monkeypatch):
    """The configurations of the communicators that are opened, of no ranks at all."""
    found = []

    def communicator_on(_fabric, config, _settings, _ordinal):
        found.append(config)
        return SimpleNamespace()

    monkeypatch.setattr(group_module, "open_fabric", lambda *_how, **_more: None)
    monkeypatch.setattr(group_module, "communicator_on", communicator_on)
    return found


@pytest.mark.parametrize(
    ("device", "given", "environment", "wanted"),
    [
        ("cuda", None, None, MAX_SMS),
        ("cuda", {"max_sms": 100}, None, 100),
        ("cuda", None, "7", 7),
        ("cpu", None, None, None),  # which have no thread blocks
    ],
)
def test_calls_of_gpu_ranks_leave_most_multiprocessors(
    opened, monkeypatch, device, given, environment, wanted
):
    if environment is not None:
        monkeypatch.setenv("RINGCOLL_MAX_SMS", environment)
    made = ProcessGroupRingcoll(dist.HashStore(), 0, 1, timedelta(seconds=5), given)
    made._open(device, device, [0], "all_reduce")
    assert [config.max_sms for config in opened] == [wanted]
