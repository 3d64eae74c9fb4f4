"""Ranks on several nodes whose GPUs are fake: ``python gpus.py PART ... WORD``; WORD marks it."""

import contextlib
import logging
import os
import pkgutil
import random
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np

import ringcoll
from benchmarks.gpu.crossing import CROSSING, crossing
from ringcoll.communicator.cuda import nodes
from ringcoll.communicator.cuda.nodes import NodesState
from ringcoll.communicator.cuda.state import CudaState
from ringcoll.cuda.raw import from_pointer
from ringcoll.dtypes import dtype_of
from ringcoll.executors.cuda.workspace import Workspace
from ringcoll.executors.cuda_nodes import carry, executor, pieces, point_to_point
from ringcoll.executors.cuda_nodes import layers as executor_layers
from ringcoll.executors.cuda_nodes.exchange import RailLimits
from ringcoll.tuner import measured
from tests.communicator.cases import ROOTED, SHAPES, Case
from tests.gpu.fake_gpus import HALVES, FakeBuffer, Gpus, fake
from tests.gpu.messages import by_threads, messages, ring, several, unequal
from tests.gpu.ranks import Call, Mirror, inputs_of, judge
from tests.kernels import stand_in
from tests.processes.programs.verdict import Checks, error_of, say

SMALL = 16 << 10
"""Bytes of a piece here, so that calls have many."""

FAKE = True
"""Whether ranks share a few cores: those of larger communicators make fewer calls."""


class FakeMemory(Mirror):
    """A rank's bytes, which are host memory and a fake device's at once."""

    def __init__(self, comm, half: int = 1 << 20) -> None:
        self.half, self.comm = half, comm
        self.symmetric, self.plain = np.zeros(2 * half, np.uint8), np.zeros(2 * half, np.uint8)

    def device(self, view):
        return on_device(self.comm, view)


class Plain(FakeBuffer):
    """An array of the fake device's own memory, also where a scenario asks for another."""

    def _place(self):
        self.symmetric = False
        return super()._place()


class FakeCall(Call):
    """A case's call: nothing has to be brought to the device."""

    def upload(self) -> None:
        pass

    def make(self) -> None:
        positional, named = self.arguments()
        arrays = [None if a is None else self._arrays[id(a)] for a in positional]
        getattr(self.comm, self.case.collective)(*arrays, **named)

    def download(self) -> None:
        pass


def on_device(comm, view):
    """A host array as a fake device's."""
    ordinal = int(comm.device.partition(":")[2])
    return from_pointer(view.ctypes.data, view.size, dtype_of(view.dtype).name, ordinal)


def run(comm, checks, *cases) -> None:
    """Cases, all enqueued before any is looked at."""
    memories = [FakeMemory(comm) for _ in cases]
    calls = [
        FakeCall(comm, memory, case, inputs_of(case, comm.nranks))
        for memory, case in zip(memories, cases, strict=True)
    ]
    for call in calls:
        call.make()
    comm.synchronize()
    for call, case in zip(calls, cases, strict=True):
        judge(call, case)
        checks.count += 1


def collectives(comm, checks, _gpus) -> None:
    """Every collective, in place and not, in sizes of no piece, one and many, by turns.

    More than two ranks take the same way in two sizes, in one of them in place.
    """
    n = comm.nranks
    few = FAKE and n > 2
    for number, name in enumerate(SHAPES):
        spread = n if "n" in SHAPES[name] else 1
        many = 40_003 // spread
        for index, count in enumerate((1, many) if few else (0, 1, 1001, many)):
            root = (number + index) % n if name in ROOTED else 0
            places: tuple[bool, ...] = (False, True) if index != 2 else (True, True)
            if few:
                places = ((number + index) % 2 == 1,)
            cases = [
                Case(name, count, "float32", root=root, in_place=in_place, seed=seed)
                for seed, in_place in enumerate(places)
            ]
            run(comm, checks, *cases)


def types(comm, checks, _gpus) -> None:
    """Types and operators, at odd addresses."""
    names = ("bool", "int8", "uint16", "int64", "float16", "bfloat16", "float8_e4m3fn")
    for seed, name in enumerate((*names, "float64", "complex64")):
        for op in ("sum", "prod", "max"):
            if not (name == "complex64" and op == "max"):
                offset = (seed % 3) * dtype_of(name).itemsize
                run(comm, checks, Case("all_reduce", 777, name, op=op, offset=offset, seed=seed))
        run(comm, checks, Case("reduce_scatter", 333, name, seed=seed))
        run(comm, checks, Case("all_to_all", 9001, name, seed=seed))
    scalars = tuple(0.5 * (rank + 1) for rank in range(comm.nranks))
    run(comm, checks, Case("all_reduce", 5000, op="premul_sum", scalars=scalars))


def options(comm, checks, _gpus) -> None:
    """A left fold has the same bits in pieces; algorithms by name; what is not of several nodes."""
    for name in ("all_reduce", "reduce", "reduce_scatter"):
        ordered = {"deterministic": True}
        run(comm, checks, Case(name, 20_001, wild=True, options=ordered, seed=1))
    for algorithm in ("ring", "two_shot", "hierarchical", "recursive_doubling", "tree"):
        run(comm, checks, Case("all_reduce", 20_001, options={"algorithm": algorithm}))
    run(comm, checks, Case("all_to_all", 9001, options={"slices": 2}))
    x = FakeMemory(comm).device(np.zeros(10, "float32"))
    for how in ({"protocol": "LL"}, {"engine": "sm"}, {"algorithm": "bruck"}):
        checks.true(f"{how}", error_of(comm.all_reduce, x, **how).startswith("ArgumentError"))
    checks.true("explain", "pinned host memory" in comm.explain("all_reduce", 1 << 20))


def layers(comm, checks, _gpus) -> None:
    """In two layers: folded by kernels, slices and what they leave over, in place and not."""
    n = comm.nranks
    for name in ("all_reduce", "reduce_scatter", "all_gather"):
        few = n > 2  # kernels that wait for each other take turns on the machine's cores
        for number, size in enumerate((30_005,) if few else (60_005, 50_000)):
            count = size if name == "all_reduce" else size // n + 1
            cases = [
                Case(name, count, kind, op, in_place=in_place, seed=number, options=how)
                for kind, op, in_place, how in (
                    ("float32", "sum", False, {}),
                    ("bfloat16", "avg", True, {}),
                    ("int16", "max", True, {"accumulate": "dtype"}),
                    ("float16", "sum", False, {"accumulate": "dtype"}),
                    ("bool", "land", False, {}),
                    ("float8_e4m3fn", "prod", True, {"algorithm": "hierarchical"}),
                )[number : 6 if name == "all_reduce" else 2]
                # Kernels of each type and operator are compiled: two ranks run all of them.
                if not (FAKE and few and kind in ("int16", "bool"))
            ]
            run(comm, checks, *cases)
    run(comm, checks, Case("all_reduce", 30_001, "bfloat16", offset=2))
    for root in (0, n - 1):
        cases = [Case("broadcast", 30_005, root=root, in_place=where) for where in (False, True)]
        run(comm, checks, *cases, Case("broadcast", 40_001, "uint8", root=root, offset=1))
    for slots in () if few else (1, 2, 4):  # many slices, which follow each other in few slots
        with comm.split(0) as child:
            child._state.set_rail_limits(RailLimits(4096, slots))
            for name, count in (("all_reduce", 30_005), ("all_gather", 15_001)):
                run(child, checks, Case(name, count, seed=slots), Case(name, count, "int16"))
    said, nodes = comm.explain("all_reduce", 1 << 24), comm._state.fabric.nodes
    equal = len({nodes.count(node) for node in nodes}) == 1
    checks.true(said, ("in two layers" in said) == equal)


def rails(comm, checks, _gpus) -> None:
    """In two layers on more ranks or nodes: few calls, with few threads of kernels."""
    n, few = comm.nranks, {"max_sms": 1}
    for name, count, kind, root, in_place in (
        ("all_reduce", 20_007, "bfloat16", 0, True),
        ("reduce_scatter", 10_007 // n + 1, "float32", 0, False),
        ("all_gather", 10_007 // n + 1, "float32", 0, True),
        ("reduce", 10_007, "float32", 1, False),
        ("broadcast", 10_007, "float32", 4 % n, False),
        ("broadcast", 8003, "int64", n - 1, True),
    ):
        run(comm, checks, Case(name, count, kind, root=root, in_place=in_place, options=few))
    said = comm.explain("broadcast", 1 << 24)
    checks.true(said, "in two layers" in said)


def direct(comm, checks, _gpus) -> None:
    """Segments that ranks of different nodes exchange directly, however many a node has."""
    n, few = comm.nranks, {"max_sms": 1}
    each = (3 if n > 4 else 2) if FAKE and n > 3 else 1  # every other call, or every third one
    for number, (count, kind, in_place) in enumerate(
        (
            (30_007 // n, "float32", False),
            (30_007 // n, "float32", True),
            (16_001 // n, "int16", True),
            (32_011 // n, "uint8", False),
            (4001 // n, "float64", True),
        )[::each]
    ):
        how = Case("all_to_all", count, kind, in_place=in_place, seed=number, options=few)
        run(comm, checks, how, replace(how, offset=dtype_of(kind).itemsize, seed=number + 10))
    for slots in (1, 2, 3)[each - 1 :: each]:  # many slices, which follow each other in few slots
        with comm.split(0) as child:
            child._state.set_rail_limits(RailLimits(4096, slots))
            how = Case("all_to_all", 9001 // n, in_place=slots > 1, seed=slots, options=few)
            run(child, checks, how, replace(how, seed=slots + 2))
    said = comm.explain("all_to_all", 1 << 24)
    checks.true(said, "in two layers" in said and "from each rank to each" in said)
    x = Plain(comm, n * 9000)
    refused = error_of(comm.all_to_all, x.array, algorithm="hierarchical")
    checks.true(refused, refused.startswith("ArgumentError"))


def direct_of_some(comm, checks, gpus) -> None:
    """The same of five of six ranks, of which a node has three.

    The ranks are on nodes a,b,b,a,a,b: a start for each placement would take longer.
    """
    nodes, rank, members = comm._state.fabric.nodes, comm.rank, (0, 3, 1, 4, 2)
    found = "".join("ab"[nodes[member] != nodes[0]] for member in members)
    checks.true(f"{members}: {found}", found == "aabab")
    inside = rank in members
    part = comm.split(0 if inside else None, key=members.index(rank) if inside else 0)
    if part is not None:
        with part:
            direct(part, checks, gpus)


def reduces(comm, checks, _gpus) -> None:
    """To each root, from slices that follow each other in few slots, and in which order.

    More than three ranks: to one root of each node.
    """
    n, few = comm.nranks, {"max_sms": 1}
    every = not FAKE or n <= 3
    narrow = {**few, "accumulate": "dtype"}
    for root, (kind, op, in_place, how) in enumerate(
        (
            ("float32", "sum", False, few),
            ("bfloat16", "avg", True, few),
            ("int16", "max", True, narrow),
            ("float16", "sum", False, narrow),
            ("uint8", "bxor", False, {**few, "algorithm": "hierarchical"}),
            ("float64", "prod", True, few),
        )
    ):
        if every or root in (1, 3):
            which = {"root": root % n, "in_place": in_place, "seed": root, "options": how}
            run(comm, checks, Case("reduce", 30_007, kind, op, **which))
    for slots in (1, 2, 4) if every else (2,):
        with comm.split(0) as child:
            child._state.set_rail_limits(RailLimits(4096, slots))
            how = Case("reduce", 9001, root=slots % n, seed=slots, options=few)
            run(child, checks, how, replace(how, seed=slots + 1, in_place=True))
    nodes = comm._state.fabric.nodes
    for kind in ("float32", "bfloat16"):
        wide = dtype_of(kind).accumulator
        given = [
            np.random.default_rng(rank)
            .standard_normal(30_720 // n * n)
            .astype(dtype_of(kind).numpy)
            for rank in range(n)
        ]
        parts = [
            sum(given[rank].astype(wide) for rank in range(n) if nodes[rank] == node)
            for node in sorted(set(nodes))
        ]
        sums = [Plain(comm, given[comm.rank], kind) for _ in range(2)]
        comm.all_reduce(sums[0].array, **few)
        comm.reduce(sums[1].array, root=n - 1, **few)
        comm.synchronize()
        sums[0].check(sum(parts))
        sums[1].check(sum(parts) if comm.rank == n - 1 else given[comm.rank])
        checks.count += 2
    said = comm.explain("reduce", 1 << 24)
    checks.true(said, "in two layers" in said and "fold over nodes" in said)


def crosses(comm, checks, _gpus) -> None:
    """As many bytes go between nodes as the benchmark gives to mpi4py."""
    nodes, each = comm.nnodes, comm.nranks // comm.nnodes
    exchanges = comm._state.layers._phases.exchanges
    exchange = exchanges.exchange
    found = Counter[int](), Counter[int]()

    def counted(kind, number, call, *ways):
        for count, parts in zip(found, ways, strict=True):
            for peer, array in parts:
                count[peer] += array.nbytes
        return exchange(kind, number, call, *ways)

    exchanges.exchange = counted
    for name in CROSSING:
        x = Plain(comm, np.zeros(480 * 32 * comm.nranks), "bfloat16")
        for count in found:
            count.clear()
        getattr(comm, name)(x.array, max_sms=1)
        comm.synchronize()
        want = crossing(name, comm.rank, nodes, each, x.nbytes, 4 if each > 1 else 2)
        checks.true(f"{name}: {found}, {want}", found == (want.sends, want.recvs))
    exchanges.exchange = exchange


def vectors(comm, checks, _gpus) -> None:
    """A count for each rank, sends and receives, by one call, in groups, to oneself."""
    n = comm.nranks
    by_threads(several([*unequal(n, [40, 5000, 20_000])]), Plain)(comm)
    for count in (0, 1, 1237, 60_000):
        by_threads(ring(count, "bfloat16", offset=1), Plain)(comm)
    rng = random.Random(3)
    for seed in range(5):
        sent = [
            (rng.randrange(n), rng.randrange(n), rng.choice([0, 1, 33, 6001, 30_000]))
            for _ in range(rng.randrange(1, 9))
        ]
        by_threads(messages(sent, seed), Plain, grouped=True)(comm)
        checks.count += 1
    # One end groups its calls, the other makes them one by one, the other way round.
    first, last, count = 0, n - 1, 30_000
    here = Plain(comm, np.full(count, comm.rank)), Plain(comm, count)
    if comm.rank == first:
        with ringcoll.group():
            comm.send(here[0].array, last)
            comm.recv(here[1].array, last)
    elif comm.rank == last:
        comm.send(here[0].array, first)
        comm.recv(here[1].array, first)
    comm.synchronize()
    if comm.rank in (first, last):
        here[1].check(np.full(count, first + last - comm.rank))


def streams(comm, checks, gpus) -> None:
    """Calls by turns on several streams, in groups with others, waited for later."""
    n, total = comm.nranks, comm.nranks * (comm.nranks - 1) // 2
    x = Plain(comm, np.full(9001, comm.rank))
    for turn in range(6):
        gpus.current.ptr = 5 + turn % 3
        comm.all_reduce(x.array)
    gpus.current.ptr = 0
    comm.synchronize()
    x.check(np.full(9001, total * n**5))
    work = comm.all_reduce(x.array, stream=7, async_op=True, op="max")
    work.wait()
    comm.synchronize()
    checks.true("done", work.done() and work.exception() is None)
    got, sums = Plain(comm, 30_000), [Plain(comm, np.full(3000, comm.rank)) for _ in range(3)]
    sent = Plain(comm, np.full(30_000, comm.rank))
    with ringcoll.group():
        for number, each in enumerate(sums):
            comm.all_reduce(each.array, stream=number + 1)
        comm.sendrecv(sent.array, (comm.rank + 1) % n, got.array, (comm.rank - 1) % n, stream=9)
    comm.synchronize()
    got.check(np.full(30_000, (comm.rank - 1) % n))
    for each in sums:
        each.check(np.full(3000, total))
    gpus.streamIsCapturing = lambda stream: stream == 8
    refused = error_of(comm.all_reduce, x.array, stream=8)
    checks.true(refused, refused.startswith("LaunchRefused") and "graph" in refused)
    refused = error_of(comm.send, x.array, (comm.rank + 1) % n, stream=8)
    checks.true(refused, refused.startswith("LaunchRefused"))
    del gpus.streamIsCapturing
    comm.all_reduce(sums[0].array, op="max")
    comm.synchronize()


def splits(comm, checks, _gpus) -> None:
    """Parts on one node and on several, beside the whole."""
    n, rank = comm.nranks, comm.rank
    nodes = comm._state.fabric.nodes
    checks.true("of several nodes", isinstance(comm._state, NodesState))
    for colors in (list(nodes), [r % 2 for r in range(n)], [0] * n):
        with comm.split(colors[rank], key=-rank) as part:
            members = [r for r in reversed(range(n)) if colors[r] == colors[rank]]
            several = len({nodes[r] for r in members}) > 1
            wanted = NodesState if several else CudaState
            checks.true(f"{colors}: {part._state}", type(part._state) is wanted)
            for count in (5, 9001):
                x = Plain(comm, np.full(count, rank))
                y = Plain(comm, np.full(count, rank))
                part.all_reduce(x.array)
                comm.all_reduce(y.array)
                part.synchronize()
                comm.synchronize()
                x.check(np.full(count, sum(members)))
                y.check(np.full(count, n * (n - 1) // 2))
                checks.count += 1
    rest = comm.shrink([0]) if rank else None
    if rest is not None:
        x = Plain(comm, np.full(100, rank))
        rest.all_reduce(x.array)
        rest.synchronize()
        x.check(np.full(100, n * (n - 1) // 2))
        rest.close()
    comm.barrier()


def one_core(comm, checks, gpus):
    """A process that its launcher has bound to one core is told, and goes on."""
    said: list[str] = []

    def keep(record: logging.LogRecord) -> bool:
        said.append(record.getMessage())
        return True

    log = logging.getLogger("ringcoll")
    log.addFilter(keep)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    with begin() as bound:
        layers(bound, checks, gpus)
        bound.barrier()
    log.removeFilter(keep)
    assert any(f"rank {comm.rank} is bound to one core" in words for words in said), said


PARTS = {
    part.__name__: part
    for part in (
        *(collectives, types, options, layers, rails, reduces, direct, direct_of_some, crosses),
        *(vectors, streams, splits, one_core),
    )
}


class Attributes(contextlib.ExitStack):
    """Sets attributes as pytest's MonkeyPatch does, whose import is a third of a rank's start."""

    def setattr(self, target, *rest) -> None:
        if len(rest) == 1:
            place, _, name = target.rpartition(".")
            target = pkgutil.resolve_name(place)
        else:
            name = rest[0]
        self.callback(setattr, target, name, getattr(target, name))
        setattr(target, name, rest[-1])


@contextlib.contextmanager
def fake_gpus() -> Iterator[Gpus]:
    """Four GPUs that this process has to itself, and short pieces."""
    with Attributes() as patched:
        gpus = fake(patched, 4, sms=4)
        gpus.one_process = False
        # Several ranks share a core: who polls keeps the others from what is polled for.
        patched.setattr(carry, "_SPIN_SECONDS", 0.0)
        patched.setattr(executor, "PIECE_BYTES", SMALL)
        patched.setattr(point_to_point, "_PIECE_BYTES", SMALL)
        patched.setattr(pieces, "_SHORT", SMALL // 2)
        patched.setattr(executor_layers, "_SHORT", SMALL // 8)
        short = replace(measured.LAYERS_BYTES, value=30_000)
        patched.setattr(measured, "LAYERS_BYTES", short)
        # Each communicator takes its memory anew, page by page: room for the largest call here.
        halves = {name: nbytes // 4 for name, nbytes in HALVES.items()}
        workspace = partial(Workspace, **halves, zone_bytes=256 << 10)
        for module in ("communicator.cuda.state", "executors.cuda.preparing"):
            patched.setattr(f"ringcoll.{module}.Workspace", workspace)
        patched.setattr(nodes, "RailLimits", partial(RailLimits, 256 << 10))
        patched.setattr(nodes, "SCRATCH_BYTES", 1 << 20)
        # Random values, more than the largest call here takes.
        patched.setattr("tests.communicator.cases.POOL", 1 << 16)
        try:
            yield gpus
        finally:
            gpus.close()
            for folder in stand_in._kept:
                folder.cleanup()


def begin(**how):
    """The communicator of all ranks."""
    return ringcoll.init(device="cuda", transport="host", **{"timeout": 60, **how})


def main() -> None:
    checks = Checks()
    # Kernels that wait for each other share a few cores, maybe with other tests.
    with fake_gpus() as gpus, begin(timeout=60) as comm:
        for name in sys.argv[1:-1]:
            PARTS[name](comm, checks, gpus)
        comm.barrier()
    say(comm.rank, count=checks.count, failures=checks.failures[:5])


if __name__ == "__main__":
    main()
