"""What torch's profilers see of a group's calls."""

from __future__ import annotations

from collections import Counter

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.torch.on_ranks.fakes import Fake

PROFILERS = torch.profiler.profile, torch.autograd.profiler.profile


def _counts(profile):
    """How often each call of a backend was seen."""
    events = profile.events() if hasattr(profile, "events") else profile.function_events
    return Counter(event.name for event in events if event.name.startswith("ringcoll"))


def _calls(n, *, later):
    """Calls by the names of their events."""
    x, whole = torch.ones(2), torch.ones(2 * n)
    parts = [torch.zeros(2) for _ in range(n)]
    mine = dist.get_rank()
    first = mine == 0
    how = {"async_op": later}
    gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    return {
        "all_reduce": [
            lambda: dist.all_reduce(x, **how),
            lambda: dist.all_reduce(whole[::2], **how),
        ],
        "broadcast": [lambda: dist.broadcast(x, 0, **how)],
        "reduce": [lambda: dist.reduce(x, 0, **how)],
        "all_gather": [
            lambda: dist.all_gather(parts, x, **how),
            lambda: gather_single(whole, x, **how),
        ],
        "reduce_scatter": [
            lambda: dist.reduce_scatter(x, parts, **how),
            lambda: scatter_single(x, whole, **how),
        ],
        "all_to_all": [
            lambda: dist.all_to_all_single(torch.zeros(2 * n), whole, **how),
            lambda: dist.all_to_all([torch.zeros(2) for _ in range(n)], parts, **how),
        ],
        "gather": [lambda: dist.gather(x, parts if first else None, 0, **how)],
        "scatter": [lambda: dist.scatter(x, parts if first else None, 0, **how)],
        "barrier": [lambda: dist.barrier(**how)],
        "send": [lambda: dist.isend(torch.ones(1), (mine + 1) % n)],
        "recv": [lambda: dist.irecv(torch.ones(1), (mine - 1) % n)],
    }


def every_call_has_an_event(rank, n):
    """Trap 11: a profiler sees nothing of what it is not told."""
    for kind in PROFILERS:
        for later in (False, True):
            calls = _calls(n, later=later)
            with kind() as profile:
                works = [call() for several in calls.values() for call in several]
                for work in filter(None, works):
                    work.wait()
            wanted = {f"ringcoll:{name}": len(several) for name, several in calls.items()}
            assert _counts(profile) == wanted


def several_tensors_are_one_call(rank, n):
    tensors = [torch.ones(2), torch.ones(3)]
    with torch.profiler.profile() as profile, dist._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    assert _counts(profile) == {"ringcoll:all_reduce": 1}
    assert tensors[1].tolist() == [4] * 3


def messages_from_anywhere(rank, n):
    pair = dist.new_group([0, 1])
    with torch.profiler.profile() as profile:
        if rank == 0:
            dist.recv(torch.ones(1), group=pair)
        elif rank == 1:
            dist.send(torch.ones(1), 0, group=pair)
    assert (
        list(_counts(profile)) == ([["ringcoll:recvAnySource"], ["ringcoll:send"]] + n * [[]])[rank]
    )
    if rank < 2:
        dist.destroy_process_group(pair)


def ddp(rank, n):
    """As PyTorch's own test of GPUs has it."""
    for kind in PROFILERS:
        model = DistributedDataParallel(torch.nn.Linear(10, 10, bias=False))
        with kind() as profile:
            for _ in range(6):
                model(torch.ones(3, 10)).sum().backward()
        counts = _counts(profile)
        assert counts["ringcoll:all_reduce"] == 6
        assert counts["ringcoll:broadcast"] >= 1  # the buckets are rebuilt once
        assert set(counts) == {"ringcoll:all_reduce", "ringcoll:broadcast"}
        with kind() as profile:  # once more, when DDP has run for a while
            model(torch.ones(3, 10)).sum().backward()
        assert _counts(profile) == {"ringcoll:all_reduce": 1}


def calls_on_gpus(rank, n):
    fake = Fake()
    with fake.device(), torch.profiler.profile() as profile:
        for later in (False, True):
            work = dist.all_reduce(torch.ones(2), group=fake.group, async_op=later)
            if later:
                work.wait()
        dist.isend(torch.ones(2), (rank + 1) % n, group=fake.group)
    assert _counts(profile) == {"ringcoll:all_reduce": 2, "ringcoll:send": 1}


def nothing_is_left_behind(rank, n):
    with torch.profiler.profile() as profile:
        pass
    dist.all_reduce(torch.ones(2))
    assert not _counts(profile)
