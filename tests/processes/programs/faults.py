"""What goes wrong between ranks, one scenario a run: ``python faults.py SCENARIO WORD``.

A scenario returns what its rank has seen. Scenarios after which the processes are still healthy
use a communicator of their own for every case, made by ``split``.
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import product

import ringcoll
from ringcoll.fabric.base import Fabric
from tests.processes.programs.setting import (
    LARGE,
    SHORT,
    SMALL,
    again,
    begin,
    die,
    numbers,
    own_rank,
    perform,
)
from tests.processes.programs.verdict import error_of, say


def never_comes() -> dict:
    """Rank 1 makes none of the calls; it hears of each at its next call."""
    calls = {
        "all_reduce": lambda c, **how: c.all_reduce(numbers(), **how),
        "all_reduce large": lambda c, **how: c.all_reduce(numbers(LARGE), **how),
        "broadcast": lambda c, **how: c.broadcast(numbers(), root=1, **how),
        "reduce_scatter": lambda c, **how: c.reduce_scatter(numbers(3 * LARGE), **how),
        "recv": lambda c, **how: c.recv(numbers(), 1, **how),
        "send large": lambda c, **how: c.send(numbers(2_000_000), 1, **how),
        "barrier": lambda c, **how: c.barrier(**how),
    }
    seen = {}
    with begin() as comm:
        for name, call in calls.items():
            child = again(comm)
            if comm.rank != 1:
                seen[name] = error_of(call, child, timeout=SHORT)
            comm.barrier()
            if comm.rank == 1:
                seen[name] = error_of(child.barrier)
            comm.barrier()
            child.close()
    return seen


def never_comes_to_empty() -> dict:
    with begin() as other:
        other.barrier()
        comm = begin(timeout=2)
        if comm.rank == 1:
            other.barrier()
        error = error_of(comm.empty, 10)
        if comm.rank != 1:
            other.barrier()
        after = error_of(comm.barrier)
        comm.close()
    return {"error": error, "after": after}


def killed() -> dict:
    """The last rank dies again and again; the others notice wherever they wait, and go on."""
    waits = {
        "all_reduce": lambda c, last: c.all_reduce(numbers()),
        "broadcast": lambda c, last: c.broadcast(numbers(LARGE), root=last),
        "recv": lambda c, last: c.recv(numbers(), last),
        "empty": lambda c, last: c.empty(10),
        "barrier": lambda c, last: c.barrier(),
    }
    comm = begin()
    shared = comm.empty(LARGE)
    seen = {}
    for name, wait in waits.items():
        last = comm.nranks - 1
        comm.barrier()
        if comm.rank == last:
            time.sleep(0.1)  # the others are waiting by now
            die()
        started = time.monotonic()
        error = error_of(wait, comm, last)
        took = time.monotonic() - started
        refused = error_of(comm.all_reduce, numbers())
        rest = comm.shrink()
        comm.close()
        comm = rest
        shared[:] = comm.rank
        comm.all_reduce(shared)
        right = bool((shared == comm.nranks * (comm.nranks - 1) // 2).all())
        seen[name] = [error, took, refused, right and comm.nranks == last]
    comm.close()
    return seen


def gathering(part, whole, counts):
    return lambda comm: comm.all_gather_v(part, whole, counts)


def disagree() -> dict:
    """Rank 1 makes another call than the others, in every way there is."""
    cases: dict[str, tuple] = {}
    for size in (SMALL, LARGE):
        few, more = numbers(size), numbers(size + 1)
        doubles = numbers(size, "float64")
        many = numbers(3 * size)
        cases |= {
            f"collective {size}": (
                lambda c, x=few: c.all_reduce(x),
                lambda c, x=few: c.broadcast(x),
            ),
            f"count {size}": (
                lambda c, x=few: c.all_reduce(x),
                lambda c, x=more: c.all_reduce(x),
            ),
            f"dtype {size}": (
                lambda c, x=few: c.all_reduce(x),
                lambda c, x=doubles: c.all_reduce(x),
            ),
            f"op {size}": (
                lambda c, x=few: c.all_reduce(x),
                lambda c, x=few: c.all_reduce(x, op="max"),
            ),
            f"root {size}": (
                lambda c, x=few: c.broadcast(x),
                lambda c, x=few: c.broadcast(x, root=2),
            ),
            f"algorithm {size}": (
                lambda c, x=few: c.all_reduce(x, algorithm="ring"),
                lambda c, x=few: c.all_reduce(x, algorithm="tree"),
            ),
            f"counts {size}": (
                gathering(few, many, [size] * 3),
                gathering(few, more, [1, size, 0]),
            ),
        }
    cases |= {
        "small and large": (
            lambda c: c.all_reduce(numbers(SMALL)),
            lambda c: c.all_reduce(numbers(LARGE)),
        ),
        "barrier": (lambda c: c.barrier(), lambda c: c.all_reduce(numbers())),
        "empty": (lambda c: c.empty(10), lambda c: c.empty(20)),
    }
    seen = {}
    with begin() as comm:
        for name, (ours, theirs) in cases.items():
            child = again(comm)

            def both(child=child, call=theirs if comm.rank == 1 else ours) -> None:
                call(child)
                child.barrier()  # a rooted call may have ended before the others came

            seen[name] = error_of(both)
            child.close()
    return seen


def control_against_data() -> dict:
    """Rank 1 is in a call of the control plane, the others are in one that moves data."""
    control = {
        "empty": lambda c: c.empty(4),
        "register": lambda c: c.register(numbers()),
        "split": lambda c: c.split(0),
        "shrink": lambda c: c.shrink(),
    }
    data = {
        "all_reduce": lambda c: c.all_reduce(numbers()),
        "broadcast": lambda c: c.broadcast(numbers(LARGE), root=1),
    }
    seen = {}
    with begin() as comm:
        for (name, ours), (other, theirs) in product(control.items(), data.items()):
            for when in ("", " late") if name == "shrink" else ("",):
                child = again(comm)
                child.barrier()
                began = time.monotonic()
                with looking_late() if when else nullcontext():
                    error = error_of(ours if comm.rank == 1 else theirs, child)
                seen[name + " " + other + when] = error, time.monotonic() - began
                comm.barrier()
                child.close()
    return seen


@contextmanager
def looking_late() -> Iterator[None]:
    """A rank in ``shrink`` begins to wait only when its peers have found another call there."""
    from unittest.mock import patch  # as much work as half of a start's other imports

    prompt = Fabric._await_members

    def late(fabric: Fabric, *args, **how) -> None:
        while fabric.nranks == 3 and fabric._intact():
            fabric.progress()
        prompt(fabric, *args, **how)

    with patch.object(Fabric, "_await_members", late):
        yield


def bytes_of_another() -> dict:
    """Rank 1 makes another rooted call than the others; which ranks return from it."""
    few, doubles, many = numbers(), numbers(dtype="int32"), numbers(3 * SMALL)
    cases = {
        "reduce op": (
            lambda c: c.reduce(few, root=2),
            lambda c: c.reduce(few, root=2, op="max"),
        ),
        "gather dtype": (
            lambda c: c.gather(few, many if c.rank == 2 else None, root=2),
            lambda c: c.gather(doubles, root=2),
        ),
        "broadcast dtype": (
            lambda c: c.broadcast(few, root=2),
            lambda c: c.broadcast(doubles, root=2),
        ),
        "scatter dtype": (
            lambda c: c.scatter(many if c.rank == 2 else None, few, root=2),
            lambda c: c.scatter(None, doubles, root=2),
        ),
    }
    seen = {}
    with begin() as comm:
        for name, (usual, other) in cases.items():
            child = again(comm)
            child.barrier()
            seen[name] = error_of(other if comm.rank == 1 else usual, child)
            comm.barrier()
            error_of(child.close)
    return seen


def disagree_late() -> dict:
    """The root of a broadcast has left when the others come with other counts."""
    seen = {}
    with begin() as comm:
        for end in ("check", "synchronize", "close", "block"):
            child = again(comm)
            call = error_of(child.broadcast, numbers(SMALL + (comm.rank == 1)), root=0)
            comm.barrier()

            def block(child=child) -> None:
                with child:
                    pass

            ends = block if end == "block" else getattr(child, end)
            seen[end] = call if call != "no error" else error_of(ends)
            comm.barrier()
            child.close()
    return seen


def unlike_options() -> dict:
    """The ranks begin with different options; then with the same."""
    error = error_of(ringcoll.init, slices=1 + (own_rank() == 1), timeout=20)
    with begin() as comm:
        x = numbers()
        comm.all_reduce(x)
    return {"error": error, "sum": float(x[0])}


def pairs_disagree() -> dict:
    seen = {}
    with begin() as comm:
        for size in (SMALL, LARGE):
            for name, other in (
                ("count", numbers(size + 1)),
                ("dtype", numbers(size, "int32")),
            ):
                child = again(comm)

                def call(child=child, size=size, other=other) -> None:
                    if child.rank == 0:
                        child.send(numbers(size), 1)
                    elif child.rank == 1:
                        child.recv(other, 0)
                    child.barrier()

                seen[f"{name} {size}"] = error_of(call)
                child.close()
    return seen


def raises() -> dict:
    """Rank 1 leaves its ``with`` block by an error of its own."""

    def block() -> None:
        with begin() as comm:
            if comm.rank == 1:
                time.sleep(0.1)
                raise ValueError("no such file")
            comm.all_reduce(numbers())

    return {"error": error_of(block)}


def aborts() -> dict:
    """abort() by one rank, wherever the others are; twice is once, and nothing is left to raise."""
    seen = {}
    with begin() as comm:
        for number, call in enumerate(
            (
                lambda c: c.all_reduce(numbers()),
                lambda c: c.recv(numbers(), 0),
                lambda c: c.empty(9),
            )
        ):
            with_end = "silent"
            try:
                with again(comm) as child:
                    if comm.rank == 0:
                        time.sleep(0.05)
                        child.abort(f"case {number}")
                        child.abort("again")
                    seen[f"call {number}"] = error_of(call, child)
            except ringcoll.Error as error:
                with_end = type(error).__name__
            seen[f"end {number}"] = with_end
    return seen


def grouped(*comms) -> None:
    with ringcoll.group():
        for comm in comms:
            comm.all_reduce(numbers())


def closes() -> dict:
    """close() by rank 2 while the others still wait for it; then by all, twice."""
    seen = {}
    with begin() as comm:
        spare = again(comm)
        for name, call in {
            "all_reduce": lambda c: c.all_reduce(numbers()),
            "large": lambda c: c.all_reduce(numbers(LARGE)),
            "recv": lambda c: c.recv(numbers(), 2),
            "empty": lambda c: c.empty(10),
            "split": lambda c: c.split(0),
            "group": lambda c: grouped(c, spare),
        }.items():
            child = again(comm)
            child.barrier()
            if comm.rank == 2:
                child.close()
                child.close()
            elif comm.rank == 0:
                time.sleep(0.05)
            seen[name] = error_of(call, child)
            comm.barrier()
            child.close()
        spare.close()
    return seen


def interrupted() -> dict:
    """SIGINT reaches rank 1 alone, inside its wait."""
    comm = begin()
    if comm.rank == 1:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
    try:
        if comm.rank == 1:
            comm.all_reduce(numbers())
        else:
            comm.recv(numbers(), 1)
    except KeyboardInterrupt:
        # Caught by the user: what was interrupted is broken, and says so.
        after = error_of(comm.all_reduce, numbers())
        checked = error_of(comm.check)
        rest = comm.shrink()
        comm.close()
        rest.all_reduce(numbers())
        rest.close()
        return {"error": "KeyboardInterrupt", "after": after, "checked": checked}
    except ringcoll.Error as error:
        caught = f"{type(error).__name__}: {error}"
        rest = comm.shrink()
        comm.close()
        rest.all_reduce(numbers())
        rest.close()
        return {"error": caught}
    return {"error": "none"}


def uncaught_interrupt() -> dict:
    """The same, and nobody catches it."""

    def block() -> None:
        with begin() as comm:
            if comm.rank == 1:
                signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
                signal.setitimer(signal.ITIMER_REAL, 0.3)
            comm.barrier() if comm.rank != 1 else comm.recv(numbers(), 0)

    return {"error": error_of(block)}


def waits_for_ever() -> dict:
    """All ranks wait until somebody presses Ctrl-C."""
    comm = begin(timeout=60)
    comm.barrier()
    say(comm.rank, ready=True)
    comm.recv(numbers(), (comm.rank + 1) % comm.nranks)
    return {"error": "none"}


def between_enter_and_finish() -> dict:
    """An error that nobody foresees, in the middle of a call of rank 1."""
    seen = {}
    with begin() as comm:
        for count in (SMALL, LARGE):
            child = again(comm)
            if comm.rank == 1:

                def bind(ticket):
                    raise MemoryError("no room for the rows")

                child._state.executor.bind = bind
            try:
                child.all_reduce(numbers(count))
            except (MemoryError, ringcoll.Error) as error:
                seen[f"call {count}"] = f"{type(error).__name__}: {error}"
            seen[f"after {count}"] = error_of(child.all_reduce, numbers(count))
            child.close()
    return seen


if __name__ == "__main__":
    perform(globals())
