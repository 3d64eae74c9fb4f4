"""What one rank does in the tests with real processes: ``python scenarios.py NAME FOLDER``.

A scenario returns something that JSON can hold, which is left in the folder under the rank.
"""

import ctypes
import gc
import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
from numpy.testing import assert_equal

import ringcoll
from ringcoll import version
from ringcoll.bootstrap import bootstrap_of
from ringcoll.errors import MachineError
from ringcoll.fabric import Fabric, identity, mapping, open_fabric
from ringcoll.host import shm
from ringcoll.host.shm import ProcAccessDenied
from ringcoll.symmetric.host import SymmetricMemory
from tests.fabric.mpi_messages import mpi_truncated  # noqa: F401  # found by its name
from tests.processes.programs.verdict import error_of

LONG = 20.0  # seconds: a deadline that no passing test reaches


def opened(timeout=LONG) -> Fabric:
    return open_fabric(bootstrap_of(None, timeout=timeout), timeout=timeout)


def never(fabric, peers=None):
    """Wait for what never comes."""
    fabric.wait(lambda: False, deadline=fabric.deadline(), describe=lambda: "late", peers=peers)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def lengths():
    fabric = opened()
    for length in (0, 1, 17, 100_000):
        sent = bytes([fabric.rank]) * (length * fabric.rank)
        wanted = [bytes([rank]) * (length * rank) for rank in range(fabric.nranks)]
        assert_equal(fabric.allgather(sent, what="lengths"), wanted)
    fabric.close()
    return True


def share():
    fabric = opened()
    views = fabric.share(5000 * fabric.rank, what="memory")
    zeroed = not any(bytes(views[fabric.rank]))
    fabric.allgather(b"", what="read")
    for view in views[1:]:
        view[fabric.rank] = 1 + fabric.rank
    fabric.allgather(b"", what="written")
    addresses = [np.frombuffer(view, np.uint8).ctypes.data % 4096 for view in views[1:]]
    seen = [list(view[: fabric.nranks]) for view in views[1:]]
    fabric.close()
    # The memory lives as long as its views.
    after = [list(view[: fabric.nranks]) for view in views[1:]]
    return [zeroed, [len(view) for view in views], addresses, seen, seen == after]


def late():
    fabric = opened()
    fabric.timeout = 0.5  # of this call alone: a loaded machine may take longer to begin
    if fabric.rank == 1:
        time.sleep(1.5)
    return error_of(fabric.allgather, b"", what="all_reduce 7")


def different():
    fabric = opened()
    error = error_of(fabric.allgather, b"", what=f"call {fabric.rank // 2}")
    again = fabric.allgather(b"x", what="the plane is still in step")
    return [error, len(again)]


def killed():
    fabric = opened()
    memory = SymmetricMemory(fabric)
    array = memory.empty(4, "int64")
    if fabric.rank == 1:
        die()
    started = time.monotonic()
    error = error_of(never, fabric)
    took = time.monotonic() - started
    survivors = [rank for rank in range(fabric.nranks) if rank not in fabric.lost()]
    small = fabric.subset(survivors, what="shrink")
    child = SymmetricMemory(small, memory, survivors)
    array[:] = 10 * small.rank
    small.allgather(b"", what="written")
    number, offset = child.lookup(array.ctypes.data, array.nbytes) or (0, 0)
    peers = [int(child.peer(r, number, offset, 8).view("i8")[0]) for r in range(small.nranks)]
    fabric.close()
    return [error, took, survivors, peers, error_of(small.check)]


def registered():
    """Processes cannot reach each other's own memory, and say so."""
    memory = SymmetricMemory(opened())
    array = np.zeros(10)
    return [memory.register(array), memory.lookup(array.ctypes.data, 80)]


def ended():
    """All others have closed in order: that is no error for who waits for nobody."""
    fabric = opened()
    fabric.allgather(b"", what="any")
    if fabric.rank == 0:
        time.sleep(0.5)
        said = [error_of(fabric.check), fabric.lost(), error_of(never, fabric)]
        fabric.close()
        return said
    fabric.close()
    return None


def aborted():
    fabric = opened()
    if fabric.rank == 0:
        time.sleep(0.2)
        fabric.abort("the input is not sorted")
        fabric.abort("something else")
    first = error_of(never, fabric)
    second = error_of(fabric.check)
    if fabric.rank == 1:
        fabric.abort(first)  # what a rank does that leaves its `with` by that error
    # A new start among all is possible.
    small = fabric.subset(range(fabric.nranks), what="restart")
    while fabric.rank and not fabric.lost():
        time.sleep(0.01)
    fabric.close()  # from then on rank 0 is lost, though its process goes on
    small.allgather(b"", what="seen")
    return [first, second, error_of(small.check)]


def closed():
    fabric = opened()
    if fabric.rank == 2:
        fabric.close()
        fabric.close()
        return error_of(fabric.allgather, b"", what="any")
    if fabric.rank == 1:
        # Only rank 0 is waited for: that rank 2 has left is no error.
        started = time.monotonic()
        fabric.wait(
            lambda: time.monotonic() > started + 0.2,
            deadline=fabric.deadline(),
            describe=lambda: "late",
            peers=lambda: [0],
        )
    error = error_of(fabric.allgather, b"", what="any")
    if fabric.rank == 0:
        time.sleep(0.5)  # rank 1 waits for this one meanwhile
    return error


def forgotten():
    fabric = opened()
    if fabric.rank == 2:
        del fabric
        gc.collect()
        time.sleep(0.5)
        return "gone"
    return error_of(never, fabric, lambda: [2])


def forked():
    fabric = opened()
    if fabric.rank == 0:
        read, write = os.pipe()
        if os.fork() == 0:
            said = error_of(fabric.allgather, b"", what="any") + " | " + error_of(fabric.check)
            fabric.abort("from the child")
            fabric.close()
            os.write(write, said.encode())
            sys.exit(0)  # through all exit functions
        os.wait()
        said = os.read(read, 4096).decode()
    else:
        said = ""
    fabric.allgather(b"", what="the parent goes on")
    fabric.close()
    return said


def raised():
    fabric = opened()
    if fabric.rank == 1:
        raise ValueError("no such file")
    return error_of(never, fabric)


def exited():
    fabric = opened()
    if fabric.rank == 1:
        sys.exit(0)
    return error_of(fabric.allgather, b"", what="any")


def greedy():
    fabric = opened()
    error = error_of(fabric.share, 1 << 50, what="scratch")
    return [error, len(fabric.share(100, what="a little"))]


def refused():
    """Rank 1's kernel has no memory although there seemed to be enough."""
    fabric = opened()
    plain = os.posix_fallocate
    if fabric.rank == 1:

        def posix_fallocate(fd, start, length):
            raise OSError(12, "Cannot allocate memory")

        os.posix_fallocate = posix_fallocate
    error = error_of(fabric.share, 100, what="scratch")
    os.posix_fallocate = plain
    return error


def tampered():
    """The memory that is found at rank 1's descriptor is not what rank 1 has announced."""
    if os.environ["RANK_IN_TEST"] == "1":
        create = shm.create

        def other(nbytes, what):
            segment = create(nbytes, what)
            os.pwrite(segment.fd, bytes(64), 0)
            return segment

        vars(mapping)["create"] = other
    return error_of(opened)


def passed():
    """No rank may look into /proc."""
    attach = shm.attach

    def denied(handle, what, descriptor=None):
        if descriptor is None:
            raise ProcAccessDenied(f"{what}: denied")
        return attach(handle, what, descriptor)

    vars(mapping)["attach"] = denied
    fabric = opened()
    views = fabric.share(100, what="memory")
    views[fabric.rank][0] = 1 + fabric.rank
    fabric.allgather(b"", what="written")
    found = [view[0] for view in views]
    fabric.close()
    return found


def undumpable():
    """The kernel itself denies /proc/PID/fd: the ranks are not dumpable, and have no capability."""
    libc = ctypes.CDLL(None, use_errno=True)
    nothing = (ctypes.c_uint32 * 6)()
    if libc.capset((ctypes.c_uint32 * 2)(0x20080522, 0), nothing) or libc.prctl(4, 0, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "cannot give up what lets a process look into another")
    bootstrap = bootstrap_of(None, timeout=LONG)
    pid, *_ = [int(part) for part in bootstrap.allgather(b"%d" % os.getpid())]
    found = [open_fabric(bootstrap, timeout=LONG).nranks]
    if bootstrap.rank != 0:
        found.append(os.access(f"/proc/{pid}/fd/0", os.F_OK))
    return found


def unlike():
    """Rank 1 differs from the others in one point after the other."""
    odd = os.environ["RANK_IN_TEST"] == "1"
    bootstrap = bootstrap_of(None, timeout=LONG)
    errors = []
    for key in ("version", "boot", "pidns", "uid"):
        own = {**identity.identity(), **({key: "other"} if odd else {})}
        said = [json.loads(part) for part in bootstrap.allgather(json.dumps(own).encode())]
        errors.append(error_of(identity.compare, said, "init"))
    plain = version.__version__
    if odd:
        version.__version__ = "0.0.7"
    errors.append(error_of(open_fabric, bootstrap, timeout=LONG))
    version.__version__ = plain
    return errors


def subsets():
    """Overlapping subsets in a row, among them the same again and again."""
    fabric = opened()
    made = 0
    for members in ([0, 1], [1, 0], [0, 1], [1, 2], [2, 1, 0], [0, 2], [0], [1, 2], [2, 1]) * 4:
        if fabric.rank in members:
            small = fabric.subset(members, what="split")
            assert_equal(small.rank, members.index(fabric.rank))
            said = small.allgather(b"%d" % fabric.rank, what="ranks")
            assert_equal([int(part) for part in said], members)
            small.close()
            made += 1
    fabric.allgather(b"", what="the parent is in step")
    open_now = len(list(Path("/proc/self/fd").iterdir()))
    return [made, open_now]


def alone():
    """A member that never comes to the subset."""
    fabric = opened(1.0)
    if fabric.rank == 1:
        time.sleep(1.5)
        return "slept"
    error = error_of(fabric.subset, [0, 1], what="split") if fabric.rank == 0 else ""
    return error


def churn():
    """Random lengths and random delays; every rank checks what it gets."""
    fabric = opened()
    shared = np.random.default_rng(7)
    own = np.random.default_rng(fabric.rank)
    for number in range(200):
        sizes = [int(size) for size in shared.integers(0, 40_000, fabric.nranks)]
        if own.random() < 0.02:
            time.sleep(0.005)
        sent = bytes([number % 256]) * sizes[fabric.rank]
        said = fabric.allgather(sent, what=f"round {number}")
        assert_equal(said, [bytes([number % 256]) * size for size in sizes])
    fabric.close()
    return True


def leftovers():
    """Descriptors and maps of a process before a communicator and after it."""

    def maps():
        return Path("/proc/self/maps").read_text().count("memfd:ringcoll")

    bootstrap = bootstrap_of(None, timeout=LONG)
    counts = []
    for _ in range(3):
        fabric = open_fabric(bootstrap, timeout=LONG)
        memory = SymmetricMemory(fabric)
        array = memory.empty(10_000, "f8")
        fabric.allgather(b"", what="made")
        memory.close()
        fabric.close()
        held = maps()
        array[:] = 1  # outlives both
        del array, memory, fabric
        gc.collect()
        counts.append([held, maps(), len(list(Path("/proc/self/fd").iterdir()))])
    return counts


def outlast(*ranks, seconds=60):
    """Wait until these have ended their scenario."""
    files = [Path(sys.argv[2]) / f"ended.{rank}" for rank in ranks]
    late = time.monotonic() + seconds
    while not all(file.exists() for file in files) and time.monotonic() < late:
        time.sleep(0.01)


def absent():
    """Rank 1 never begins; rank 2 begins after rank 0, whose deadline is the first one."""
    if os.environ["RANK_IN_TEST"] == "1":
        outlast(0, 2)
        return "slept"
    begun = Path(sys.argv[2]) / "begun.0"
    if os.environ["RANK_IN_TEST"] == "0":
        begun.touch()
    else:
        while not begun.exists():
            time.sleep(0.01)
        time.sleep(0.2)
    return error_of(opened, 2.0)


def gone():
    """Rank 1 ends before it begins."""
    if os.environ["RANK_IN_TEST"] == "1":
        return "left"
    return error_of(opened)


def note_mpi_files():
    """What MPICH leaves in /dev/shm when it is not finalized, for the test to remove."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    names = {line.split()[5] for line in lines if "/dev/shm/" in line and "(deleted)" not in line}
    (Path(sys.argv[2]) / f"files.{os.getpid()}").write_text("\n".join(sorted(names)))


def mpi_killed():
    fabric = opened()
    note_mpi_files()
    if fabric.rank == 1:
        die()
    error = error_of(never, fabric)
    (Path(sys.argv[2]) / f"error.{fabric.rank}").write_text(error)
    fabric.close()
    return "closed"


def mpi_killed_at_exit():
    fabric = opened()
    note_mpi_files()
    fabric.close()
    if fabric.rank == 1:
        time.sleep(1)
        die()
    return "waits for rank 1 at its exit"


def mpi_raised():
    fabric = opened()
    if fabric.rank == 1:
        raise ValueError("no such file")
    error = error_of(never, fabric)
    fabric.close()
    return error


def mpi_finalize():
    from mpi4py import MPI

    fabric = opened()
    fabric.allgather(b"", what="any")
    fabric.close()
    if fabric.rank == 0:
        MPI.Finalize()
    return True


def mpi_absent():
    from mpi4py import MPI

    rank = MPI.COMM_WORLD.Get_rank()
    if rank == 1:
        # Not for ever: Open MPI's first message to a rank waits until that is in MPI again.
        outlast(0, 2, seconds=4)
        return "slept"
    return error_of(ringcoll.init, MPI.COMM_WORLD, timeout=1.0)


def mpi_begin():
    """Many beginnings on one communicator, and one on a part of it in another order."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    for number in range(5):
        bootstrap = bootstrap_of(world if number % 2 else None, timeout=LONG)
        assert_equal((bootstrap.rank, bootstrap.nranks), (world.rank, world.size))
        said = bootstrap.allgather(b"x" * 1000 * bootstrap.rank)
        assert_equal([len(part) for part in said], [1000 * r for r in range(world.size)])
        open_fabric(bootstrap, timeout=LONG).close()
    part = world.Split(world.rank % 2, -world.rank)
    fabric = open_fabric(bootstrap_of(part, timeout=LONG), timeout=LONG)
    said = fabric.allgather(b"%d" % world.rank, what="ranks")
    # No word of ours is left for the user's own receive of anything from anyone.
    stray = world.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG) or part.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)
    fabric.close()
    return [[int(text) for text in said], stray]


# These leave the process as it was: one start of the ranks serves all of them.
HARMLESS = (
    *(lengths, churn, share, different, greedy, registered, subsets, leftovers),
    # After these too the ranks are healthy, and open a fabric again.
    *(late, aborted, closed, ended, forgotten, refused, alone, unlike),
)


def harmless():
    results = {}
    for scenario in HARMLESS:
        results[scenario.__name__] = scenario()
        gc.collect()
    return results


def main():
    rank = (os.environ.get("_RINGCOLL_SOCKET", "") + " 0 0").split()[1]
    os.environ["RANK_IN_TEST"] = os.environ.get(
        "PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", rank)
    )
    if sys.argv[1].startswith("mpi_killed"):
        os.environ.pop("MPI_LOCALNRANKS", None)  # as on several hosts: they begin over MPI
    result = globals()[sys.argv[1]]()
    (Path(sys.argv[2]) / f"ended.{os.environ['RANK_IN_TEST']}").touch()
    (Path(sys.argv[2]) / os.environ["RANK_IN_TEST"]).write_text(json.dumps(result))


if __name__ == "__main__":
    if not issubclass(ProcAccessDenied, MachineError):
        raise SystemExit("the tests stand on this")
    main()
