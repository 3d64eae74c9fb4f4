"""torch.compile of what calls a group: graphs break there, and ringcoll is not traced."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ringcoll
from tests.torch.on_ranks.fakes import Fake

HOME = str(Path(ringcoll.__file__).parent)


class Compiler:
    """Compiles functions, and remembers what got into graphs."""

    def __init__(self, **how):
        from torch._dynamo import convert_frame

        torch._dynamo.reset()
        self._seen = convert_frame.input_codes
        self._how = how
        self.operations: list[list[str]] = []

    def __call__(self, function):
        return torch.compile(function, backend=self._graph, **self._how)

    def _graph(self, module, _inputs):
        nodes = module.graph.nodes
        assert not any(HOME in (node.stack_trace or "") for node in nodes)
        self.operations.append([str(n.target) for n in nodes if n.op.startswith("call")])
        return module.forward

    def close(self):
        """No frame of ringcoll has been looked at."""
        codes = [code for code in (seen() for seen in self._seen.seen) if code is not None]
        ours = {code.co_name for code in codes if code.co_filename.startswith(HOME)}
        torch._dynamo.reset()
        assert codes
        assert not ours


def asynchronous_calls(rank, n):
    def step(x):
        y = x * 2
        dist.all_reduce(y, async_op=True).wait()
        z = y + 1
        work = dist.broadcast(z, 1, async_op=True)
        work.wait()
        assert work.is_completed()
        return z - 3

    compiler = Compiler()
    compiled = compiler(step)
    for _ in range(2):
        assert compiled(torch.full((3,), float(rank))).tolist() == [10.0] * 3
    compiler.close()
    assert [len(graph) for graph in compiler.operations] == [1, 1, 1]


def blocking_calls(rank, n):
    def step(x):
        parts = [torch.zeros(2) for _ in range(n)]
        dist.all_gather(parts, x * 2)
        dist.barrier()
        y = torch.stack(parts).sum(0)
        out = torch.zeros(2)
        dist.scatter(out, [y + q for q in range(n)] if rank == 0 else None)
        work = dist.irecv(y, (rank + 1) % n)
        dist.send(out, (rank - 1) % n)
        work.wait()
        return y - 1

    compiler = Compiler()
    wanted = 12.0 + (rank + 1) % n - 1
    assert compiler(step)(torch.full((2,), float(rank))).tolist() == [wanted] * 2
    compiler.close()


def calls_of_the_group(rank, n):
    """torch 2.13 refuses to look at any group's methods; what it says is the same of all."""
    group = dist.group.WORLD
    options = dist.AllreduceOptions()

    def step(x):
        y = x + group.size() + group.rank()
        torch._dynamo.graph_break()
        return y

    compiler = Compiler()
    assert compiler(step)(torch.zeros(2)).tolist() == [n + rank] * 2
    compiler.close()

    def reduced(x):
        y = x * 2
        group.allreduce([y], options).wait()
        return y

    eager = torch.compiler.disable(reduced)
    compiler = Compiler()
    assert compiler(lambda x: eager(x) + 1)(torch.ones(2)).tolist() == [9.0] * 2
    compiler.close()


def what_is_known_may_be_in_a_graph(rank, n):
    group = dist.group.WORLD

    def step(x):
        return x + group.size() * 10 + group.rank()

    compiler = Compiler(fullgraph=True)
    assert compiler(step)(torch.zeros(1)).tolist() == [10 * n + rank]


def ddp_with_a_static_graph(rank, n):
    """As PyTorch's own test of GPUs has it."""
    torch.manual_seed(0)
    model = torch.nn.Linear(10, 10)
    compiler = Compiler()
    plain = DistributedDataParallel(copy.deepcopy(model))
    ways = [
        compiler(DistributedDataParallel(copy.deepcopy(model), static_graph=static))
        for static in (False, True)
    ]
    x = torch.rand(10, 10, generator=torch.Generator().manual_seed(rank))
    for _ in range(6):
        outs = [way(x).sum() for way in (plain, *ways)]
        for out in outs:
            out.backward()
        for way, out in zip(ways, outs[1:], strict=True):
            assert torch.equal(out, outs[0])
            for mine, wanted in zip(way.parameters(), plain.parameters(), strict=True):
                assert torch.equal(mine.grad, wanted.grad)
    compiler.close()


def streams_of_gpus(rank, n):
    """What a GPU's tensors get must not be followed to streams and events."""
    fake = Fake()

    def step(x):
        y = x * 2
        dist.all_reduce(y, group=fake.group, async_op=True).wait()
        dist.all_reduce(y, group=fake.group, async_op=True).wait()
        return y + 1

    with fake.device():
        compiler = Compiler()
        assert compiler(step)(torch.ones(2)).tolist() == [2.0 * n * n + 1] * 2
        compiler.close()
    once = [
        "side waits for main",
        "all_reduce on side",
        "event on side",
        "main waits for event of side",
    ]
    assert fake.noted == 2 * once
