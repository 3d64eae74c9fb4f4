"""Small calls of torch.distributed on CPU tensors, which the compiled part makes once known."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import ringcoll
from ringcoll.executors.cpu import small_calls

all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class _Counted:
    """The host of the group, and how many calls the compiled part has made for it meanwhile."""

    def __init__(self):
        group = dist.distributed_c10d._get_default_group()
        self.host = group._engine(torch.ones(1), "all_reduce")
        self.small, self.made = self.host._small, 0
        compiled = hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
        assert (self.small is None) == (small_calls._small_calls is None)
        self.compiled = compiled and self.small is not None

    def __enter__(self):
        if self.small is not None:
            self._honest = self.small.make
            self.small.make = self._make
        return self

    def _make(self, *given):
        made = self._honest(*given)
        self.made += made
        return made

    def __exit__(self, *_error):
        if self.small is not None:
            self.small.make = self._honest


def _values(rank, n, turn):
    """What all ranks give in a turn, and this one."""
    whole = torch.arange(3.0 * n).reshape(n, 3) + 100 * turn
    return whole, whole[rank].clone()


def calls_that_come_again_are_compiled_and_right(rank, n):
    with _Counted() as counted:
        for turn in range(12):
            whole, x = _values(rank, n, turn)
            if turn % 4 == 3 and rank % 2:  # this rank's is made in Python
                x.requires_grad_()
            dist.all_reduce(x)
            assert x.tolist() == whole.sum(0).tolist()
            _, x = _values(rank, n, turn)
            dist.all_reduce(x, dist.ReduceOp.MAX)
            assert x.tolist() == whole[-1].tolist()
            _, x = _values(rank, n, turn)
            dist.broadcast(x, turn % n)
            assert x.tolist() == whole[turn % n].tolist()
            _, x = _values(rank, n, turn)
            dist.reduce(x, 1)
            assert x.tolist() == (whole.sum(0) if rank == 1 else whole[rank]).tolist()
            _, x = _values(rank, n, turn)
            rows = torch.full((n, 3), -1.0)
            all_gather_single(rows, x)
            assert torch.equal(rows, whole)
            sums = torch.full((3,), -1.0)
            reduce_scatter_single(sums, (whole + rank).reshape(-1))
            assert sums.tolist() == (n * whole[rank] + sum(range(n))).tolist()
            parts = [torch.full((3,), -1.0) for _ in range(n)]
            dist.all_gather(parts, x)
            assert torch.equal(torch.stack(parts), whole)
            strided = whole.repeat_interleave(2, 1)[rank, ::2]
            dist.all_reduce(strided)
            assert strided.tolist() == whole.sum(0).tolist()
    assert (counted.made > 50) == counted.compiled


def asynchronous_calls_keep_their_order(rank, n):
    for turn in range(8):
        whole, x = _values(rank, n, turn)
        y = x.clone()
        work = dist.all_reduce(x, async_op=True)
        dist.all_reduce(y)
        assert x.tolist() == y.tolist() == whole.sum(0).tolist()
        work.wait()


def calls_in_a_block_of_ringcoll_are_made_at_once(rank, n):
    for turn in range(6):
        whole, x = _values(rank, n, turn)
        with ringcoll.group():
            dist.all_reduce(x)
            assert x.tolist() == whole.sum(0).tolist()


def counts_that_differ_are_told(rank, n):
    """In the words of Python, and the group goes on after none of it: it is one of its own."""
    group = dist.new_group(range(n))
    x = torch.ones(4)
    for _ in range(5):
        dist.all_reduce(x, group=group)
    with pytest.raises(dist.DistBackendError, match="they differ in count"):
        dist.all_reduce(torch.ones(4 if rank else 6), group=group)
