"""Every collective of torch.distributed on CPU tensors; all 4 ranks run each function."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from ringcoll.torch.options import ROWS

# Their names before 2.13.
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

REDUCED = [kind for kind in ROWS if kind != torch.bool]
MOVED = [*ROWS, torch.float8_e4m3fnuz, torch.complex64]


def _full(kind, value, count=5):
    """Not every type has a kernel that fills."""
    return torch.full((count,), float(value)).to(kind)


def _same(one, other):
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def all_reduce_every_dtype(rank, n):
    for kind in REDUCED:
        if kind.is_complex:
            continue
        x = _full(kind, rank + 1)
        dist.all_reduce(x)
        assert _same(x, _full(kind, n * (n + 1) / 2)), kind


def all_reduce_every_op(rank, n):
    op = dist.ReduceOp
    wanted = {
        op.SUM: 1 + 2 + 3 + 4,
        op.PRODUCT: 24,
        op.MIN: 1,
        op.MAX: 4,
        op.BAND: 0,
        op.BOR: 7,
        op.BXOR: 1 ^ 2 ^ 3 ^ 4,
        op.AVG: 2,
    }
    for kind, value in wanted.items():
        x = torch.full((7,), rank + 1)
        dist.all_reduce(x, op=kind)
        assert x.tolist() == [value] * 7, kind
    x = torch.full((3,), float(rank + 1))
    dist.all_reduce(x, op=op.AVG)
    assert x.tolist() == [2.5] * 3


def all_reduce_premul_sum(rank, n):
    for factor in (0.5, torch.tensor([0.5])):
        x = torch.full((3,), float(rank))
        dist.all_reduce(x, op=dist._make_nccl_premul_sum(factor))
        assert x.tolist() == [3.0] * 3


def all_reduce_complex(rank, n):
    x = torch.full((3,), complex(rank, 1))
    dist.all_reduce(x)
    assert x.tolist() == [complex(6, 4)] * 3
    with pytest.raises(ValueError, match="complex"):
        dist.all_reduce(x, op=dist.ReduceOp.MAX)


def all_reduce_bool(rank, n):
    x = torch.tensor([True, False, rank == 2])
    dist.all_reduce(x)
    assert x.tolist() == [True, False, True]
    x = torch.tensor([True, False, rank == 2])
    dist.all_reduce(x, op=dist.ReduceOp.BAND)
    assert x.tolist() == [True, False, False]


def all_reduce_sizes(rank, n):
    for count in (0, 1, 1000, 300_000):
        x = torch.arange(count, dtype=torch.float32) + rank
        dist.all_reduce(x)
        assert torch.equal(x, torch.arange(count) * 4.0 + 6)


def all_reduce_keeps_no_tensor_and_serves_the_next_at_its_place(rank, n):
    base = torch.zeros(64, dtype=torch.uint8)
    for kind, count in ((torch.float32, 16), (torch.int64, 8), (torch.float32, 16)):
        for value in (1, 2):
            x = base.view(kind)[:count]
            x.fill_(rank + value)
            dist.all_reduce(x)
            assert x.tolist() == [6 + n * value] * count
    wide = base.view(torch.float32)[:16].view(4, 4)
    wide.copy_(torch.arange(16.0).view(4, 4))
    dist.all_reduce(wide.t())  # the same place and count, in another order
    assert torch.equal(wide, torch.arange(16.0).view(4, 4) * n)


def tensors_whose_signs_torch_only_remembers(rank, n):
    for later in (False, True):
        x = torch._neg_view(torch.full((3,), float(rank)))
        work = dist.all_reduce(x, dist.ReduceOp.MAX, async_op=later)
        if later:
            work.wait()
        assert x.tolist() == [0.0] * 3


def strided_tensors(rank, n):
    x = torch.arange(24.0).view(4, 6)[:, ::2]
    before = x.clone()
    dist.all_reduce(x)
    assert torch.equal(x, before * n)
    y = torch.zeros(6, 2).t()
    dist.broadcast(y if rank else y.fill_(3), 0)
    assert (y == 3).all()
    out = torch.zeros(4, 2 * n)[:, ::2]
    all_gather_single(out.t(), torch.full((1, 4), float(rank)).t().reshape(1, 4))
    assert out[0].tolist() == [0, 1, 2, 3]
    lists = [torch.zeros(3, 2).t() for _ in range(n)]
    dist.all_gather(lists, torch.full((3, 2), float(rank)).t())
    assert [float(part.sum()) for part in lists] == [0, 6, 12, 18]
    result = torch.zeros(4)[::2]
    dist.reduce_scatter(result, [torch.full((4,), float(q))[::2] for q in range(n)])
    assert result.tolist() == [4.0 * rank] * 2


def tensors_that_require_grad(rank, n):
    x = torch.full((3,), float(rank), requires_grad=True)
    dist.all_reduce(x)
    assert x.tolist() == [6.0] * 3
    strided = torch.full((6,), float(rank), requires_grad=True)
    dist.all_reduce(strided.detach()[::2])
    assert strided.tolist() == [6.0, rank] * 3
    parts = [torch.zeros(2, requires_grad=True) for _ in range(n)]
    dist.all_gather(parts, torch.full((2,), float(rank), requires_grad=True))
    assert [part.tolist() for part in parts] == [[float(q)] * 2 for q in range(n)]


def ranks_that_are_not_there_are_called_as_torch_calls_them(rank, n):
    x = torch.ones(2)
    with pytest.raises(ValueError, match=rf"broadcast on rank {rank}: src={n} is no rank"):
        dist.broadcast(x, src=n)
    with pytest.raises(ValueError, match=rf"reduce on rank {rank}: dst={n + 1} .* to {n - 1}"):
        dist.reduce(x, dst=n + 1)
    dist.all_reduce(x)
    assert x.tolist() == [n, n]


def sparse_tensors_are_refused_at_once(rank, n):
    x = torch.eye(3).to_sparse()
    with pytest.raises(TypeError, match="to_dense"):
        dist.all_reduce(x)
    parts, dense = [torch.eye(3).to_sparse() for _ in range(n)], torch.eye(3)
    with pytest.raises(TypeError, match="to_dense"):
        dist.all_gather(parts, dense)
    with pytest.raises(TypeError, match="to_dense"):
        dist.all_to_all(parts, [dense] * n)
    y = torch.ones(2)
    dist.all_reduce(y)  # and the group is as it was
    assert y.tolist() == [4, 4]


def tensors_are_resized_between_calls(rank, n):
    x = torch.ones(4)
    dist.all_reduce(x)
    x.resize_(100).fill_(1)
    dist.all_reduce(x)
    assert x.tolist() == [4] * 100
    for nbytes in (0, 8):
        x = torch.ones(4)
        x.untyped_storage().resize_(nbytes)
        with pytest.raises(ValueError, match=f"storage was resized to {nbytes}; resize"):
            dist.all_reduce(x)
        with pytest.raises(ValueError, match=f"storage was resized to {nbytes}; resize"):
            dist.broadcast(x, 0)
    y = torch.ones(2)
    dist.all_reduce(y)
    assert y.tolist() == [4, 4]


def dtypes_without_arithmetic(rank, n):
    x = torch.ones(4).to(torch.float8_e4m3fnuz)
    with pytest.raises(TypeError, match="no arithmetic"):
        dist.all_reduce(x)


def broadcast_every_dtype(rank, n):
    for kind in MOVED:
        x = _full(kind, 1 if rank == 2 else 0)
        dist.broadcast(x, 2)
        assert _same(x, _full(kind, 1)), kind


def reduce_to_a_root(rank, n):
    x = torch.full((5,), float(rank))
    dist.reduce(x, 1)
    assert x.tolist() == [6.0 if rank == 1 else float(rank)] * 5


def gather_and_scatter(rank, n):
    parts = [torch.zeros(3) for _ in range(n)] if rank == 3 else None
    dist.gather(torch.full((3,), float(rank)), parts, dst=3)
    if parts is not None:
        assert [part.tolist() for part in parts] == [[float(q)] * 3 for q in range(n)]
    out = torch.zeros(2)
    dist.scatter(out, [torch.full((2,), q + 0.5) for q in range(n)] if rank == 1 else None, src=1)
    assert out.tolist() == [rank + 0.5] * 2


def all_gather_every_dtype(rank, n):
    for kind in MOVED:
        parts = [_full(kind, 0) for _ in range(n)]
        dist.all_gather(parts, _full(kind, rank % 2))
        assert all(_same(part, _full(kind, q % 2)) for q, part in enumerate(parts)), kind


def all_gather_uneven(rank, n):
    parts = [torch.zeros(q) for q in range(n)]
    dist.all_gather(parts, torch.full((rank,), float(rank)))
    assert [part.tolist() for part in parts] == [[float(q)] * q for q in range(n)]


def all_gather_into_a_list_of_views(rank, n):
    whole = torch.zeros(n, 3)
    dist.all_gather(list(whole), torch.full((3,), float(rank)))
    assert whole[:, 0].tolist() == [0, 1, 2, 3]


def all_gather_in_place(rank, n):
    """Trap 10: FSDP2's input is a view into the output."""
    for count in (3, 50_000):
        whole = torch.zeros(n * count)
        mine = whole.narrow(0, rank * count, count).fill_(rank + 1.0)
        all_gather_single(whole, mine)
        assert whole.view(n, count)[:, 0].tolist() == [1, 2, 3, 4]
        assert whole.view(n, count)[:, -1].tolist() == [1, 2, 3, 4]


def all_gather_coalesced_both_kinds(rank, n):
    inputs = [torch.full((2,), float(rank)), torch.full((3,), rank + 10.0)]
    outputs = [torch.zeros(2 * n), torch.zeros(3 * n)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for output, given in zip(outputs, inputs, strict=True):
            all_gather_single(output, given)
    manager.wait()
    assert outputs[0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert outputs[1][::3].tolist() == [10, 11, 12, 13]
    rows = [[torch.zeros(2), torch.zeros(3)] for _ in range(n)]
    dist.distributed_c10d.all_gather_coalesced(rows, inputs)
    assert [float(row[1][0]) for row in rows] == [10, 11, 12, 13]


def all_reduce_coalesced_both_kinds(rank, n):
    tensors = [torch.full((3,), float(rank)), torch.full((2, 2), 1.0).t()]
    with dist._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    assert tensors[0].tolist() == [6.0] * 3
    assert tensors[1].tolist() == [[4.0] * 2] * 2
    dist.distributed_c10d.all_reduce_coalesced(tensors)
    assert tensors[0].tolist() == [24.0] * 3


def reduce_scatter_every_way(rank, n):
    out = torch.zeros(2)
    reduce_scatter_single(out, torch.arange(2.0 * n))
    assert out.tolist() == [8.0 * rank, 8.0 * rank + 4]
    parts = [torch.full((q,), float(rank)) for q in range(n)]
    uneven = torch.zeros(rank)
    dist.reduce_scatter(uneven, parts)
    assert uneven.tolist() == [6.0] * rank
    outputs = [torch.zeros(1), torch.zeros(2)]
    with dist._coalescing_manager():
        for output in outputs:
            reduce_scatter_single(output, torch.ones(n * output.numel()))
    assert [out.tolist() for out in outputs] == [[4.0], [4.0, 4.0]]
    whole = torch.arange(2.0 * n)
    reduce_scatter_single(whole.narrow(0, 2 * rank, 2), whole)
    assert whole.narrow(0, 2 * rank, 2).tolist() == [8.0 * rank, 8.0 * rank + 4]


def all_to_all_every_way(rank, n):
    out = torch.zeros(n)
    dist.all_to_all_single(out, torch.arange(4.0) + 10 * rank)
    assert out.tolist() == [rank, 10 + rank, 20 + rank, 30 + rank]
    sent = [q for q in range(n) for _ in range(q)]  # q rows to rank q
    given = torch.tensor(sent, dtype=torch.float32).view(-1, 1).repeat(1, 2) + 10 * rank
    rows = torch.zeros(n * rank, 2)
    dist.all_to_all_single(rows, given, [rank] * n, list(range(n)))
    wanted = [10.0 * source + rank for source in range(n) for _ in range(rank)]
    assert rows[:, 1].tolist() == wanted
    targets = [torch.zeros(source + 1) for source in range(n)]
    dist.all_to_all(targets, [torch.full((rank + 1,), 10.0 * rank + q) for q in range(n)])
    assert [t.tolist() for t in targets] == [[10.0 * q + rank] * (q + 1) for q in range(n)]
    for wrong in ([1, 1], [1, 1, 1, 2]):
        with pytest.raises(ValueError, match="output_split_sizes"):
            dist.all_to_all_single(torch.zeros(4), torch.zeros(4), wrong, [1] * 4)


def wrong_sizes_are_refused_at_once(rank, n):
    with pytest.raises(ValueError, match="recvbuf"):
        all_gather_single(torch.zeros(5), torch.zeros(2))
    with pytest.raises(ValueError, match="4 tensors"):
        dist.all_gather([torch.zeros(2)] * 3, torch.zeros(2))
    with pytest.raises(ValueError, match="recvbuf") as caught:
        all_gather_single(torch.zeros(5), torch.zeros(2), async_op=True).wait()
    assert caught.value.__cause__ is None
    dist.barrier()


def objects(rank, n):
    """Trap 7: object collectives ask the group for its devices."""
    assert torch.device("cpu") in dist.group.WORLD._device_types
    found: list = [None] * n
    dist.all_gather_object(found, {"rank": rank, "name": "x" * rank})
    assert [entry["rank"] for entry in found] == [0, 1, 2, 3]
    told = [("a", rank), None]
    dist.broadcast_object_list(told, src=2)
    assert told[0] == ("a", 2)
    mine = [None]
    dist.scatter_object_list(mine, [f"for {q}" for q in range(n)], src=0)
    assert mine == [f"for {rank}"]
    gathered = [None] * n if rank == 0 else None
    dist.gather_object(rank, gathered, dst=0)
    assert gathered in (None, [0, 1, 2, 3])


def names_of_before_2_13(rank, n):
    group = dist.group.WORLD
    out = torch.zeros(n)
    group._allgather_base(out, torch.tensor([float(rank)])).wait()
    assert out.tolist() == [0, 1, 2, 3]
    mine = torch.zeros(1)
    group._reduce_scatter_base(mine, torch.ones(n), dist.ReduceScatterOptions()).wait()
    assert mine.tolist() == [4]
    group.alltoall_base(out, torch.full((n,), float(rank)), [], []).wait()
    assert out.tolist() == [0, 1, 2, 3]
    for names in (
        ("_allgather_base", "all_gather_single"),
        ("allgather_into_tensor_coalesced", "all_gather_single_coalesced"),
        ("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"),
    ):
        old, new = (getattr(type(group), name) for name in names)
        assert old is new
