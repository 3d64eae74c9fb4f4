"""What one process does in the tests on real devices: ``python program.py NAME FOLDER``.

It returns something that JSON can hold, which is left in the folder under the rank.
"""

import gc
import json
import math
import sys
from pathlib import Path
from typing import Any

import cupy

from ringcoll.bootstrap import bootstrap_of
from ringcoll.communicator.cuda.state import CudaState
from ringcoll.communicator.public import Communicator
from ringcoll.communicator.setup.devices import loader
from ringcoll.config import DEFAULTS, Settings
from ringcoll.cuda import quarantine
from ringcoll.cuda.arrays import device_array
from ringcoll.cuda.device import devices, on
from ringcoll.cuda.memory import GRANULE
from ringcoll.errors import Error
from ringcoll.fabric import open_fabric
from ringcoll.symmetric.device import CudaSymmetricMemory
from ringcoll.transports.host_memory import allocate_hosted
from ringcoll.transports.peers import allocate_shared
from ringcoll.transports.probe import check_pairs
from tests.communicator.cases import ROOTED, SHAPES, Case
from tests.gpu import pieces
from tests.gpu.ranks import program_of, run_alone


def viewed(pointer, nbytes, ordinal):
    """Any memory that this device reaches, as bytes."""
    memory = cupy.cuda.UnownedMemory(pointer, nbytes, None, ordinal)
    return cupy.ndarray((nbytes,), "uint8", cupy.cuda.MemoryPointer(memory, 0))


def free_bytes(ordinal):
    with on(ordinal) as cuda:
        return cuda.memGetInfo()[0]


def communicator(fabric, ordinal, **settings):
    """A rank's communicator, whose first calls wait for their own kernels."""
    whole = Settings(kernel_wait=math.inf, **settings)
    return Communicator(CudaState(fabric, DEFAULTS, whole, devices()[ordinal], loader(None)))


def shared(fabric, ordinal):
    """Kernels of every rank write to every peer, and each reads what it got."""
    memory = allocate_shared(fabric, ordinal, 1 << 20, what="scratch")
    check_pairs(fabric, memory, ordinal)
    with cupy.cuda.Device(ordinal):
        for pointer in memory.pointers:
            viewed(pointer + 256 * fabric.rank, 256, ordinal)[...] = fabric.rank + 1
        cupy.cuda.Device(ordinal).synchronize()
        fabric.allgather(b"", what="written")
        own = viewed(memory.pointers[fabric.rank], 256 * fabric.nranks, ordinal).get()
    fabric.allgather(b"", what="read")
    memory.close()
    fabric.allgather(b"", what="closed")
    quarantine.sweep()
    return [sorted({*own[256 * rank : 256 * (rank + 1)].tolist()}) for rank in range(fabric.nranks)]


def hosted(fabric, ordinal):
    """The same in pinned host memory, whose bytes each rank also reads without its device."""
    memory = allocate_hosted(fabric, ordinal, 1 << 20, what="scratch")
    with cupy.cuda.Device(ordinal):
        for pointer in memory.pointers:
            viewed(pointer + 256 * fabric.rank, 256, ordinal)[...] = fabric.rank + 1
        cupy.cuda.Device(ordinal).synchronize()
        fabric.allgather(b"", what="written")
        seen = [
            viewed(pointer, 256 * fabric.nranks, ordinal).get().tolist()
            for pointer in memory.pointers
        ]
    fabric.allgather(b"", what="read")
    memory.close()
    fabric.allgather(b"", what="closed")
    quarantine.sweep()
    if any(part != seen[0] for part in seen):
        raise AssertionError(f"ranks have seen different things: {seen}")
    return [sorted({*seen[0][256 * r : 256 * (r + 1)]}) for r in range(fabric.nranks)]


def collectives(fabric, ordinal):
    """Calls of every kind through pinned host memory, each rank on a thread of its own."""
    comm = communicator(fabric, ordinal, transport="host")
    todo = [
        Case(name, count, root=comm.nranks - 1 if name in ROOTED else 0, in_place=bool(count % 2))
        for name in SHAPES
        for count in (1, 300, 60_001)
    ]
    done = run_alone(comm, todo)
    fabric.allgather(b"", what="done")
    comm.close()
    return done == len(todo)


def symmetric(fabric, ordinal):
    """Arrays that come, go and come back; what a peer reads through its own mapping."""
    memory = CudaSymmetricMemory(fabric, ordinal)
    with cupy.cuda.Device(ordinal):
        first = memory.empty(GRANULE, "float32")
        start = first.data.ptr
        first[:] = fabric.rank
        cupy.cuda.Device(ordinal).synchronize()
        number, offset = memory.lookup(first[5:].data.ptr, 4) or (0, 0)
        fabric.allgather(b"", what="written")
        seen = [
            float(viewed(memory.peer_pointer(rank, number, offset, 4), 4, ordinal).view("f4")[0])
            for rank in range(fabric.nranks)
        ]
        fabric.allgather(b"", what="read")
        del first
        gc.collect()
        again = memory.empty(GRANULE, "float32")
        half = memory.empty((3, 4), "bfloat16")
        half.view("uint16")[...] = 0x3F80
        reused = again.data.ptr == start
        ones = float(half.get().astype("float32").sum())
    memory.close()
    fabric.allgather(b"", what="closed")
    del again, half
    gc.collect()
    quarantine.sweep()
    return [seen, reused, ones, quarantine.waiting()]


def registered(fabric, ordinal):
    """An array from CuPy's pool, which lies inside a larger allocation."""
    memory = CudaSymmetricMemory(fabric, ordinal)
    with cupy.cuda.Device(ordinal):
        kept = cupy.zeros(100, "uint8")
        array = cupy.full(1000, fabric.rank + 1, "uint8")
        cupy.cuda.Device(ordinal).synchronize()
        found = device_array(array, argument="array", where="register")
        there = memory.register(found)
        number, offset = memory.lookup(array.data.ptr, 1) or (0, 0)
        seen = [
            int(viewed(memory.peer_pointer(rank, number, offset, 1), 1, ordinal)[0])
            for rank in range(fabric.nranks)
        ]
        fabric.allgather(b"", what="read")
        memory.unregister(found)
        kept = memory.empty(1, "uint8")
        if not kept.size:
            raise AssertionError("an empty array")
    memory.close()
    return [there, seen]


def virtual(fabric, ordinal):
    """An array across pieces of virtual memory, and one that cannot be exported."""
    memory = CudaSymmetricMemory(fabric, ordinal)
    sizes = (pieces.PIECE, 2 * pieces.PIECE, pieces.PIECE)
    inside, nbytes = pieces.PIECE - 256, 2 * pieces.PIECE + 512
    with cupy.cuda.Device(ordinal):
        cupy.zeros(1)  # makes the context
        starts = [pieces.make(ordinal, *sizes, exportable=flag) for flag in (True, False)]
        array = viewed(starts[0] + inside, nbytes, ordinal)
        array[...] = fabric.rank + 1
        cupy.cuda.Device(ordinal).synchronize()
        found = device_array(array, argument="array", where="register")
        there = memory.register(found)
        number, _ = memory.lookup(array.data.ptr, nbytes) or (0, 0)
        at = [memory.peer_pointer(rank, number, 0, nbytes) for rank in range(fabric.nranks)]
        ends = [
            [int(viewed(pointer + offset, 1, ordinal)[0]) for pointer in at]
            for offset in (0, nbytes - 1)
        ]
        fabric.allgather(b"", what="read")
        memory.unregister(found)
        kept = memory.empty(1, "uint8")
        quarantine.sweep()
        fabric.allgather(b"", what="swept")
        other = device_array(viewed(starts[1], nbytes, ordinal), argument="array", where="register")
        again = memory.register(other) and not fabric.threads
        cupy.cuda.Device(ordinal).synchronize()
        memory.close()
        fabric.allgather(b"", what="closed")
        quarantine.sweep()
        fabric.allgather(b"", what="swept")
        del array, found, other
        for start in starts:
            pieces.remove(start, *sizes)
    return [there, *ends, kept.size == 1, again]


def registered_calls(fabric, ordinal):
    """An all_reduce of virtual memory that peers reach."""
    comm = communicator(fabric, ordinal)
    with cupy.cuda.Device(ordinal):
        start = pieces.make(ordinal, pieces.PIECE, pieces.PIECE)
        array = viewed(start, 2 * pieces.PIECE, ordinal).view("float32")
        array[...] = fabric.rank + 1
        there = comm.register(array)
        comm.all_reduce(array)
        comm.synchronize()
        seen = sorted({*array.get().tolist()})
    fabric.allgather(b"", what="done")
    comm.close()
    return [there, seen]


class Uses:
    """Calls of a rank on plain memory of CuPy, compared, and the programs that they ran."""

    COUNT = 5_000_001  # int32: more than lines carry

    def __init__(self, comm):
        self.comm, self.n, self.wrong, self.use = comm, comm.nranks, 0, 0
        self.base = cupy.arange(self.n * self.COUNT, dtype="int32") % 97
        comm._state.start_trace()

    def sizes(self, name):
        """Elements of both buffers."""
        whole = self.n * self.COUNT
        if name in ("all_reduce", "broadcast", "reduce"):
            return self.COUNT, self.COUNT
        return {"all_gather": (self.COUNT, whole), "reduce_scatter": (whole, self.COUNT)}.get(
            name, (whole, whole)
        )

    def fill(self, send, recv):
        """Other numbers than before; what is to come is poisoned."""
        self.use += 1
        send[:] = self.base[: send.size] + 1000 * self.comm.rank + self.use
        recv[:] = -1

    def check(self, name, recv):
        n, rank, count, root = self.n, self.comm.rank, self.COUNT, self.n - 1
        ranks = 1000 * cupy.arange(n, dtype="int32") + self.use
        part = self.base[rank * count : (rank + 1) * count]
        wanted = {
            "all_reduce": lambda: n * self.base[:count] + ranks.sum(dtype="int32"),
            "all_gather": lambda: (self.base[:count] + ranks[:, None]).ravel(),
            "reduce_scatter": lambda: n * part + ranks.sum(dtype="int32"),
            "all_to_all": lambda: (part + ranks[:, None]).ravel(),
            "broadcast": lambda: self.base[:count] + ranks[root],
            "reduce": lambda: n * self.base[:count] + ranks.sum(dtype="int32"),
        }[name]()
        if name == "reduce" and rank != root:
            wanted = cupy.full(count, -1, "int32")
        self.wrong += int((recv != wanted).sum())

    def call(self, name, send, recv):
        """One call by arrays made for it; 1 where it ran the direct program."""
        self.fill(send, recv)
        given, root = [send[:], recv[:]], self.n - 1
        if name in ("broadcast", "reduce"):
            if self.comm.rank != root:
                given[name == "reduce"] = None
            getattr(self.comm, name)(*given, root=root)
        else:
            getattr(self.comm, name)(*given)
        self.comm.synchronize()
        number = program_of(self.comm)
        self.check(name, recv)
        self.comm._state.fabric.allgather(b"", what="ended")
        return number

    def arrays(self, name):
        return [cupy.empty(size, "int32") for size in self.sizes(name)]


def used_again(fabric, ordinal):
    """Plain memory is staged, then mapped; what was freed and came back is staged again."""
    comm = communicator(fabric, ordinal)
    seen: dict[str, Any] = {}
    with cupy.cuda.Device(ordinal):
        uses, free = Uses(comm), cupy.get_default_memory_pool().free_all_blocks
        names = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce")
        for name in names:
            for turn in ("first", "again"):  # likely at the same addresses
                pair: Any = None
                other = None
                free()
                pair = uses.arrays(name)
                seen[f"{name} {turn}"] = [uses.call(name, *pair) for _ in range(6)]
            other = list(pair)
            if comm.rank == 0:  # the buffer that it has in any case
                other[name != "reduce"] = cupy.empty(pair[name != "reduce"].size, "int32")
            seen[f"{name} elsewhere"] = [uses.call(name, *each) for each in (other, pair)]
    seen["wrong"] = uses.wrong
    fabric.allgather(b"", what="done")
    comm.close()
    return seen


def used_again_in_graphs(fabric, ordinal):
    """Captured calls stay right while other memory comes, goes and is captured."""
    comm = communicator(fabric, ordinal)
    state: Any = comm._state
    registry = state.cuda.auto_register
    with cupy.cuda.Device(ordinal), cupy.cuda.Stream(non_blocking=True) as stream:
        uses, name = Uses(comm), "all_reduce"
        known, unknown = uses.arrays(name), uses.arrays(name)
        direct = [uses.call(name, *known) for _ in range(4)][-1]
        before = len(registry._own)
        stream.begin_capture()
        for pair in (known, *[unknown] * 4):
            comm.all_reduce(*pair)
        graph = stream.end_capture()
        captured = len(registry._own) - before
        for turn in range(12):
            uses.fill(*known)
            for array, like in zip(unknown, known, strict=True):
                array[:] = like
            graph.launch(stream)
            comm.synchronize()
            for pair in (known, unknown):
                uses.check(name, pair[1])
            state.cuda.recorder._clear()
            fabric.allgather(b"", what="replayed")
            if turn % 3 == 0:
                passing = uses.arrays(name)
                for _ in range(4):
                    uses.call(name, *passing)
                del passing
                cupy.get_default_memory_pool().free_all_blocks()
    fabric.allgather(b"", what="done")
    comm.close()
    return [direct, captured, uses.wrong]


def refused(fabric, ordinal):
    """More than the device has."""
    try:
        allocate_shared(fabric, ordinal, 1 << 42, what="empty")
    except Error as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def repeated(fabric, ordinal):
    """Nothing is left of memory that came and went."""
    room = []
    for _ in range(5):
        memory = allocate_shared(fabric, ordinal, 64 << 20, what="scratch")
        memory.close()
        fabric.allgather(b"", what="closed")
        quarantine.sweep()
        fabric.allgather(b"", what="swept")
        room.append(free_bytes(ordinal))
        fabric.allgather(b"", what="looked")
    return room[0] == room[-1]


SCENARIOS = {
    f.__name__: f
    for f in (
        shared,
        hosted,
        collectives,
        symmetric,
        registered,
        virtual,
        registered_calls,
        used_again,
        used_again_in_graphs,
        refused,
        repeated,
    )
}


def main():
    fabric = open_fabric(bootstrap_of(None, timeout=60.0), timeout=60.0)
    result = SCENARIOS[sys.argv[1]](fabric, fabric.rank % len(devices()))
    path = Path(sys.argv[2], str(fabric.rank))
    path.with_suffix(".new").write_text(json.dumps(result))
    path.with_suffix(".new").replace(path)
    fabric.close()


if __name__ == "__main__":
    main()
