"""What goes wrong between GPU ranks of several nodes.

``python gpu_faults.py SCENARIO,... WORD``: those after which the ranks are healthy by one start.
"""

import os
import signal
import sys
import time
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np

from ringcoll.errors import OutOfMemory
from ringcoll.executors.cuda_nodes import carry
from tests.nodes.programs.gpus import Attributes, Plain, begin, fake_gpus
from tests.processes.programs.verdict import error_of, say

SHORT, LARGE = 0.5, 100_000


_kept: list[Plain] = []


def numbers(comm, count=10, dtype="float32"):
    """An array of ones; streams may copy to it when its call has long failed."""
    _kept.append(Plain(comm, np.ones(count), dtype))
    return _kept[-1].array


def finished(comm, call, *args, **how) -> str:
    """What a call raised, at once or when it was waited for."""

    def both() -> None:
        call(*args, **how)
        comm.synchronize()

    return error_of(both)


def never_comes(_gpus) -> dict:
    """Rank 1 makes none of the calls; it hears of each at its next call."""
    calls = {
        "all_reduce": lambda c, **how: c.all_reduce(numbers(c), **how),
        "all_reduce large": lambda c, **how: c.all_reduce(numbers(c, LARGE), **how),
        "broadcast": lambda c, **how: c.broadcast(numbers(c), root=1, **how),
        "recv": lambda c, **how: c.recv(numbers(c), 1, **how),
        "barrier": lambda c, **how: c.barrier(**how),
    }
    seen = {}
    with begin() as comm:
        for name, call in calls.items():
            child = comm.split(0)
            if comm.rank != 1:
                seen[name] = finished(child, call, child, timeout=SHORT)
            comm.barrier()
            comm.synchronize()
            if comm.rank == 1:
                seen[name] = finished(child, child.barrier)
            error_of(child.close)
        x = Plain(comm, np.full(7, comm.rank))
        comm.all_reduce(x.array)
        comm.synchronize()
        x.check(np.full(7, comm.nranks * (comm.nranks - 1) // 2))
    return seen


def disagree(_gpus) -> dict:
    """Rank 1 makes another call than the others."""
    cases = {
        "count": (
            lambda c: c.all_reduce(numbers(c, LARGE)),
            lambda c: c.all_reduce(numbers(c, LARGE + 1)),
        ),
        "op": (
            lambda c: c.all_reduce(numbers(c)),
            lambda c: c.all_reduce(numbers(c), op="max"),
        ),
        "collective": (
            lambda c: c.all_reduce(numbers(c, LARGE)),
            lambda c: c.barrier(),
        ),
        "root": (
            lambda c: (c.broadcast(numbers(c)), c.barrier()),
            lambda c: (c.broadcast(numbers(c), root=2), c.barrier()),
        ),
        "pair": (
            lambda c: c.send(numbers(c, LARGE), 1) if c.rank == 0 else None,
            lambda c: c.recv(numbers(c, LARGE + 1), 0),
        ),
        "empty": (lambda c: c.empty(10), lambda c: c.empty(20)),
    }
    seen = {}
    with begin() as comm:
        for name, (ours, theirs) in cases.items():
            child = comm.split(0)
            seen[name] = finished(child, theirs if comm.rank == 1 else ours, child)
            comm.barrier()
            comm.synchronize()
            error_of(child.close)
    return seen


def layers(_gpus) -> dict:
    """Of calls in two layers: one that differs, one that is not made, another collective."""
    cases = {
        "differs": (
            lambda c: c.all_reduce(numbers(c, LARGE)),
            lambda c: c.all_reduce(numbers(c, LARGE), deterministic=True),
        ),
        "never comes": (lambda c: c.all_reduce(numbers(c, LARGE), timeout=SHORT), lambda c: None),
        "other buffers": (
            lambda c: c.all_reduce(numbers(c, LARGE), op="max"),
            lambda c: c.reduce_scatter(numbers(c, LARGE), op="max"),
        ),
        "other segments": (
            lambda c: c.all_to_all(numbers(c, LARGE)),
            lambda c: c.all_to_all(numbers(c, LARGE + 4)),
        ),
        "other place": (
            lambda c: c.all_to_all(numbers(c, LARGE)),
            lambda c: c.all_to_all(numbers(c, LARGE), numbers(c, LARGE)),
        ),
        "other root": (
            lambda c: c.reduce(numbers(c, LARGE), root=2),
            lambda c: c.reduce(numbers(c, LARGE), root=1),
        ),
        "no segments": (lambda c: c.all_to_all(numbers(c, LARGE), timeout=SHORT), lambda c: None),
    }
    seen = {}
    with begin() as comm:
        for name, (ours, theirs) in cases.items():
            child = comm.split(0)
            seen[name] = finished(child, theirs if comm.rank == 1 else ours, child)
            comm.barrier()
            comm.synchronize()
            if seen[name] == "no error":
                seen[name] = error_of(child.check)
            error_of(child.close)
        x = Plain(comm, np.full(40_000, comm.rank))
        comm.all_reduce(x.array)
        comm.synchronize()
        x.check(np.full(40_000, comm.nranks * (comm.nranks - 1) // 2))
    return seen


def short(gpus) -> dict:
    """Rank 1 has no memory left when a first call needs some, and when a communicator is made."""
    staging = "ringcoll.executors.cuda_nodes"
    calls = {
        "slots": (f"{staging}.lane.host_mapped", lambda c: c.all_reduce(numbers(c, LARGE))),
        "slices": (f"{staging}.phases.allocate", lambda c: c.all_reduce(numbers(c, LARGE))),
        "pairs": (
            f"{staging}.lane.host_mapped",
            lambda c: c.recv(numbers(c), 0) if c.rank == 1 else c.barrier(),
        ),
    }
    seen: dict[str, object] = {}

    def none_left(*_args, **_how) -> None:
        raise OutOfMemory("no memory is left")

    def lacking(comm, place: str, call) -> str:
        with Attributes() as patched:
            if comm.rank == 1:
                patched.setattr(place, none_left)
            return call()

    with begin() as comm:
        for name, (place, call) in calls.items():
            child = comm.split(0)
            comm.barrier()  # a rank still in split() would meet there what goes wrong in the child
            comm.synchronize()
            started = time.monotonic()
            seen[name] = lacking(comm, place, partial(finished, child, call, child))
            seen[f"{name}, seconds"] = time.monotonic() - started
            error_of(child.close)
        before = set(gpus.host)
        made = []
        place = "ringcoll.communicator.cuda.nodes.CudaNodesPairs"
        seen["half made"] = lacking(
            comm, place, lambda: error_of(lambda: made.append(comm.split(0)))
        )
        seen["left"] = len(set(gpus.host) - before)
        comm.barrier()  # rank 1 has its own error, not that of those who abort
        comm.synchronize()
        for child in made:
            error_of(child.abort, "enough")
            error_of(child.close)
        comm.barrier()
        comm.synchronize()
    return seen


def late(_gpus) -> dict:
    """The root of a broadcast has left when the others come with other counts."""
    seen = {}
    with begin() as comm:
        for end in ("check", "synchronize", "close"):
            child = comm.split(0)
            error = error_of(child.broadcast, numbers(child, 10 + (comm.rank == 1)))
            comm.barrier()
            comm.synchronize()
            until = time.monotonic() + 10 * (end == "check")  # which tells what has come so far
            while error == "no error":
                error = error_of(getattr(child, end))
                if time.monotonic() >= until:
                    break
            seen[end] = error
            comm.barrier()
            comm.synchronize()
            seen[f"{end}, then close"] = error_of(child.close)
    return seen


def killed(_gpus) -> dict:
    """The last rank dies again and again; the others notice, and go on without it."""
    waits = {
        "all_reduce": lambda c, last: c.all_reduce(numbers(c, LARGE)),
        "recv": lambda c, last: c.recv(numbers(c), last),
    }

    def end(_comm, _call) -> None:
        time.sleep(0.2)  # the others are waiting by now
        os.kill(os.getpid(), signal.SIGKILL)

    return bereaved(waits, end)


def cut_off(_gpus) -> dict:
    """The last rank dies again and again, each time while slices of a call are on the network."""
    # Of all_to_all a survivor might have all it needs.
    calls = {
        "all_reduce": lambda c, last: c.all_reduce(numbers(c, LARGE)),
        "reduce": lambda c, last: c.reduce(numbers(c, LARGE)),
    }

    def end(comm, call) -> None:
        kind: Any = carry.Flow
        posted = kind.posted

        def dies(flow) -> bool:
            """Whether there is a first exchange to begin; the second is this rank's end."""
            there = posted(flow)
            if there and flow.begun:
                os.kill(os.getpid(), signal.SIGKILL)
            return there

        kind.posted = dies
        finished(comm, call, comm, comm.rank)

    return bereaved(calls, end)


def bereaved(waits: dict, end) -> dict:
    """What survivors of each call see, in which the last rank comes to its end; they go on."""
    comm, seen = begin(), {}
    for name, wait in waits.items():
        last = comm.nranks - 1
        # Nothing is left to compile: what a launcher sends at a death would end the compiler.
        comm.all_reduce(numbers(comm, LARGE))
        comm.barrier()
        comm.synchronize()
        if comm.rank == last:
            end(comm, wait)
        started = time.monotonic()
        error = finished(comm, wait, comm, last)
        took = time.monotonic() - started
        refused = error_of(comm.all_reduce, numbers(comm))
        rest = comm.shrink()
        error_of(comm.close)
        comm = rest
        x = Plain(comm, np.full(7000, comm.rank))
        comm.all_reduce(x.array)
        comm.synchronize()
        x.check(np.full(7000, comm.nranks * (comm.nranks - 1) // 2))
        seen[name] = [error, took, refused, comm.nranks == last]
    comm.close()
    return seen


def aborted(gpus) -> dict:
    """A rank gives up while calls of the others wait for their stream, or for it."""
    seen = {}
    with begin() as comm:
        for name in ("in the call", "before the stream comes"):
            child, x = comm.split(0), numbers(comm, LARGE)
            gate = __import__("threading").Event()
            if name != "in the call":
                gpus.give(3, gate.wait)
            if comm.rank:
                error_of(child.all_reduce, x, stream=3)
                time.sleep(0.1)
                if comm.rank == 2:
                    hear(child)
                    child.abort("enough")
            else:
                child.abort("enough")
            gate.set()
            seen[name] = finished(child, child.check)
            error_of(child.close)
            comm.barrier()
            comm.synchronize()
    return seen


def hear(comm) -> None:
    """Return once another rank's error is known here, which on a loaded machine takes its time."""
    late = time.monotonic() + 20
    while error_of(comm.check) == "no error" and time.monotonic() < late:
        time.sleep(0.01)


class Stream:
    """Kept by the call that it is given to."""

    def __cuda_stream__(self):
        return 0, 7


def captured(gpus) -> dict:
    """A communicator is closed while its last call's stream is being captured, and after that."""
    seen: dict[str, object] = {}
    with begin() as comm:
        for name in ("before", "meanwhile"):
            child, x = comm.split(0), numbers(comm, LARGE)
            child.all_reduce(x, stream=Stream())
            pinned = set(gpus.host)
            child.synchronize()
            gpus.streamIsCapturing = lambda stream: stream == 7
            if name == "before":
                seen[name] = error_of(child.close)
                seen["kept"] = set(gpus.host) == pinned and not child._state.closed
                del gpus.streamIsCapturing
                seen["call"] = error_of(child.all_reduce, x, stream=Stream())
                seen["again"] = finished(comm, child.close)
            else:  # the capture begins when the end has begun
                child._state.cuda.stream_order.refuse_capture = lambda what: None
                lanes, messages = list(child._state.cuda.lanes), child._state.fabric.messages
                seen[name] = error_of(child.close)
                seen["pinned"] = all(lane._memory.host for lane in lanes)
                seen["the rest"] = messages is not None and child._state.fabric.messages is None
                del gpus.streamIsCapturing
    return seen


class Other:
    """Another one."""

    def __cuda_stream__(self):
        return 0, 8


def elsewhere(gpus) -> dict:
    """A stream is captured that large calls have been on before those of another stream."""
    stream_order: Any = import_module("ringcoll.executors.cuda.stream_order")
    seen: dict[str, object] = {}
    with begin() as comm:
        child, x, small = comm.split(0), numbers(comm, LARGE), numbers(comm, 3)
        first, then = Stream(), Other()
        child.all_reduce(x, stream=first)
        child.all_reduce(small, stream=then)
        child.synchronize()
        gpus.streamIsCapturing = lambda stream: stream == 7
        stream_order.capture_of = lambda stream: 77 * (stream == 7)
        seen["large"] = error_of(child.all_reduce, x, stream=then)
        seen["close"] = finished(comm, child.close)
        seen["inside"] = child._state.inside.closed
        del gpus.streamIsCapturing
    return seen


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (
        *(never_comes, disagree, layers, short, late),
        *(killed, cut_off, aborted, captured, elsewhere),
    )
}


def main() -> None:
    # By which MPICH's launcher tells a rank that one beside it has died.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    rank = int(os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
    with fake_gpus() as gpus:
        for name in sys.argv[1].split(","):
            say(rank, scenario=name, **SCENARIOS[name](gpus))


if __name__ == "__main__":
    main()
