"""Bad input: told on its rank, by call and argument, before anything moves, and harmless."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time

import numpy as np
import pytest

import ringcoll
from ringcoll import AbortedError, ArgumentError, ArgumentTypeError

N = 3
X = np.ones(6)
MATRIX = np.ones((4, 6))


def frozen(array):
    array = array.copy()
    array.flags.writeable = False
    return array


class OnAnotherDevice:
    @property
    def __cuda_array_interface__(self):
        return {"shape": (6,), "typestr": "<f8", "data": (1, False), "version": 3}


# The call, the error, and what its message must name besides the call and the rank.
BAD = [
    (lambda c, x, y: c.all_reduce(x, "max"), ArgumentTypeError, ["recvbuf", "op='max'"]),
    (lambda c, x, y: c.broadcast(x, 2), ArgumentTypeError, ["recvbuf", "root=2"]),
    (lambda c, x, y: c.all_reduce(x[::2]), ArgumentError, ["sendbuf", "not contiguous"]),
    (lambda c, x, y: c.all_reduce(MATRIX.T, y), ArgumentError, ["sendbuf", ".T"]),
    (lambda c, x, y: c.all_reduce(x, y[:5]), ArgumentError, ["recvbuf", "5 elements", "6"]),
    (lambda c, x, y: c.all_reduce(x, y.astype("f4")), ArgumentTypeError, ["float32", "float64"]),
    (lambda c, x, y: c.all_reduce(x[:4], x[2:]), ArgumentError, ["recvbuf overlaps", "+16"]),
    (lambda c, x, y: c.all_reduce(frozen(x)), ArgumentError, ["sendbuf", "read-only"]),
    (lambda c, x, y: c.all_reduce(x, frozen(y)), ArgumentError, ["recvbuf", "read-only"]),
    (lambda c, x, y: c.all_reduce([1.0, 2.0]), ArgumentTypeError, ["sendbuf", "a list"]),
    (lambda c, x, y: c.all_reduce(3.0), ArgumentTypeError, ["sendbuf", "a float"]),
    (lambda c, x, y: c.all_reduce(None), ArgumentTypeError, ["sendbuf", "None"]),
    (lambda c, x, y: c.all_reduce(np.array(["a"])), ArgumentTypeError, ["sendbuf", "dtype"]),
    (lambda c, x, y: c.all_reduce(x.astype(">f8")), ArgumentTypeError, ["sendbuf", "byte order"]),
    (lambda c, x, y: c.all_reduce(OnAnotherDevice()), ArgumentError, ["another device", "CUDA"]),
    (lambda c, x, y: c.all_reduce(x, op="summ"), ArgumentError, ["op='summ'", "sum"]),
    (lambda c, x, y: c.all_reduce(x, op="band"), ArgumentError, ["op='band'", "float64"]),
    (lambda c, x, y: c.all_reduce(x, op=None), ArgumentError, ["op=None"]),
    (lambda c, x, y: c.all_reduce(x + 1j, op="min"), ArgumentError, ["op='min'", "complex128"]),
    (
        lambda c, x, y: c.all_reduce(x.astype(int), op=ringcoll.premul_sum(0.5)),
        ArgumentError,
        ["premul_sum(0.5)", "integer"],
    ),
    (
        lambda c, x, y: c.all_reduce(x, op=ringcoll.premul_sum(10**400)),
        ArgumentError,
        ["premul_sum(1000", "too large", "float64"],
    ),
    (
        lambda c, x, y: c.all_reduce(x, op=ringcoll.premul_sum(1j)),
        ArgumentError,
        ["premul_sum(1j)", "real scalar"],
    ),
    (lambda c, x, y: c.reduce(x, root=3), ArgumentError, ["root=3", "0 to 2"]),
    (lambda c, x, y: c.reduce(x, root=-1), ArgumentError, ["root=-1"]),
    (lambda c, x, y: c.broadcast(x, root="0"), ArgumentTypeError, ["root='0'"]),
    (lambda c, x, y: c.broadcast(x, root=True), ArgumentTypeError, ["root=True"]),
    (lambda c, x, y: c.all_gather(x, y), ArgumentError, ["sendbuf", "recvbuf", "18"]),
    (lambda c, x, y: c.all_gather(None, MATRIX[0, :4]), ArgumentError, ["recvbuf", "4", "3 ranks"]),
    (lambda c, x, y: c.all_gather(x[:2], x), ArgumentError, ["sendbuf overlaps", "recvbuf[2:4]"]),
    (lambda c, x, y: c.reduce_scatter(x, x[:2]), ArgumentError, ["recvbuf", "sendbuf[2:4]"]),
    (lambda c, x, y: c.reduce_scatter(x[:5]), ArgumentError, ["sendbuf", "left over"]),
    (lambda c, x, y: c.all_to_all(x[:4], y[:4]), ArgumentError, ["sendbuf", "4", "left over"]),
    (lambda c, x, y: c.send(x, 3), ArgumentError, ["dest=3"]),
    (lambda c, x, y: c.send(x, "1"), ArgumentTypeError, ["dest='1'"]),
    (lambda c, x, y: c.recv(frozen(x), 0), ArgumentError, ["buf", "read-only"]),
    (lambda c, x, y: c.recv(x, 9), ArgumentError, ["source=9"]),
    (lambda c, x, y: c.sendrecv(x, 0, x, 0), ArgumentError, ["recvbuf overlaps sendbuf"]),
    (lambda c, x, y: c.sendrecv(x, 0, y, 7), ArgumentError, ["source=7"]),
    (
        lambda c, x, y: c.all_gather_v(x[:2], y, [1, 2]),
        ArgumentError,
        ["counts", "2 entries", "3 ranks"],
    ),
    (lambda c, x, y: c.all_gather_v(x[:2], y, [2, 2, -2]), ArgumentError, ["counts", "negative"]),
    (lambda c, x, y: c.all_gather_v(x[:2], y, [2, 2, 3]), ArgumentError, ["recvbuf", "7"]),
    (lambda c, x, y: c.all_gather_v(x[:2], y, 2), ArgumentTypeError, ["counts=2"]),
    (
        lambda c, x, y: c.all_gather_v(x[:2], y, [2, 2, 2], [0, 1, 4]),
        ArgumentError,
        ["segments 0 and 1", "overlap"],
    ),
    (
        lambda c, x, y: c.all_gather_v(x[:2], y, [2, 2, 2], [0, 2, 5]),
        ArgumentError,
        ["displs[2]=5", "beyond"],
    ),
    (
        lambda c, x, y: c.all_to_all_v(x, [2, 2, 2], y, [2, 1, 3]),
        ArgumentError,
        ["sendcounts[1]=2", "recvcounts[1]=1"],
    ),
    (
        lambda c, x, y: c.all_to_all_v(x, [2, 2, 2], x, [2, 2, 2]),
        ArgumentError,
        ["recvbuf overlaps sendbuf"],
    ),
]


def name_of(call):
    """The method that a lambda of BAD calls."""
    return call.__code__.co_names[0]


@pytest.mark.parametrize("later", [False, True])
def test_every_refusal_names_its_call_rank_and_argument_and_harms_nobody(later):
    """On rank 1 alone; between two of them all ranks make a call that works."""

    def work(comm):
        x, y, seen = np.arange(6.0), np.full(6, 8.0), np.empty(1)
        for call, kind, texts in BAD:
            if comm.rank == 1:
                name = name_of(call)
                with pytest.raises(kind) as caught:
                    call(Asking(comm) if later else comm, x, y)
                message = str(caught.value)
                for text in [f"{name} on rank 1", *texts]:
                    assert text in message, f"{name}: {text!r} is not in {message!r}"
                assert isinstance(caught.value, ringcoll.Error)
                assert isinstance(caught.value, (ValueError, TypeError))
            assert x.tolist() == [0, 1, 2, 3, 4, 5], name_of(call)
            assert set(y) == {8.0}, name_of(call)
        for number in range(3):
            seen[:] = comm.rank + number
            comm.all_reduce(seen)
            assert seen[0] == 3 + 3 * number
        comm.synchronize()

    ringcoll.spawn(work, N)


class Asking:
    """A communicator whose calls are all asynchronous."""

    def __init__(self, comm):
        self.comm = comm

    def __getattr__(self, name):
        method = getattr(self.comm, name)
        return lambda *args, **named: method(*args, **named, async_op=True)


def test_a_refusal_inside_a_group_discards_the_group():
    def work(comm):
        x = np.ones(3)
        try:
            with ringcoll.group():
                comm.all_reduce(x)
                comm.all_reduce(x, root=4) if comm.rank == 1 else None
        except TypeError:
            assert set(x) == {1.0}
            raise

    with pytest.raises(TypeError, match="root"):
        ringcoll.spawn(work, N)


@pytest.mark.parametrize("nranks", [0, -1, True, 2.0, "3", None])
def test_numbers_of_ranks_that_cannot_be(nranks):
    with pytest.raises(ArgumentError, match="nranks="):
        ringcoll.init_all(nranks)


def test_options_of_init_that_cannot_be():
    with pytest.raises(ArgumentTypeError, match="did you mean 'slices'"):
        ringcoll.init_all(2, slicse=3)
    with pytest.raises(ArgumentError, match="device='gpu'"):
        ringcoll.init_all(2, device="gpu")
    with pytest.raises(ArgumentError, match="pace="):
        ringcoll.init_all(2, pace=(0, 0))


def test_registering_is_on_or_off():
    with pytest.raises(ArgumentTypeError, match="register=3: wanted True or False"):
        ringcoll.init_all(2, register=3)
    for comm in ringcoll.init_all(2, register=False):
        comm.close()


def test_calls_after_close_are_refused():
    (comm,) = ringcoll.init_all(1)
    x = np.ones(3)
    comm.all_reduce(x)
    comm.close()
    comm.close()
    for call in (
        lambda: comm.all_reduce(x),
        lambda: comm.all_reduce(x, async_op=True),
        lambda: comm.send(x, 0),
        lambda: comm.empty(3),
        lambda: comm.split(0),
        comm.check,
        comm.barrier,
    ):
        with pytest.raises(ringcoll.ClosedError, match="closed"):
            call()
    comm.abort()


def test_leaving_with_after_close_is_fine():
    with ringcoll.init() as comm:
        comm.close()


def test_an_error_in_with_aborts_and_passes_through():
    def work(comm):
        with comm:
            if comm.rank == 1:
                raise LookupError("mine")
            comm.barrier()

    with pytest.raises(LookupError, match="mine"):
        ringcoll.spawn(work, N)


class Unsaid(Exception):
    """Of a program, whose text is wrong."""

    def __str__(self):
        raise RuntimeError("of the text")


@pytest.mark.parametrize("block", [False, True])
def test_an_error_that_has_no_text_aborts_by_its_name(block):
    heard: list[str] = []

    def work(comm):
        with comm if block else contextlib.nullcontext():
            if comm.rank == 0:
                raise Unsaid
            try:
                comm.barrier()
            except AbortedError as error:
                heard.append(str(error))
                raise

    with pytest.raises(Unsaid):
        ringcoll.spawn(work, N, timeout=60)
    assert heard == ["rank 0 aborted: Unsaid"] * (N - 1)


def test_the_first_failure_of_spawn_comes_with_its_rank():
    def work(comm):
        if comm.rank == 2:
            raise LookupError("mine")
        while True:
            comm.barrier()

    with pytest.raises(LookupError, match="mine") as caught:
        ringcoll.spawn(work, N)
    said = "raised on rank 2 of 3; AbortedError on ranks 0, 1"
    assert getattr(caught.value, "__notes__", [said]) == [said]  # from Python 3.11 on


def test_a_failure_of_spawn_names_all_ranks_that_failed():
    meeting = threading.Barrier(3)

    def work(comm):
        meeting.wait(60)
        raise (KeyError if comm.rank == 2 else LookupError)("mine")

    with pytest.raises(LookupError) as caught:
        ringcoll.spawn(work, 3)
    (note,) = getattr(caught.value, "__notes__", [""])
    assert not note or note in {
        "raised on rank 0 of 3, and on rank 1; KeyError on rank 2",
        "raised on rank 1 of 3, and on rank 0; KeyError on rank 2",
        "raised on rank 2 of 3; LookupError on ranks 0, 1",
    }


def test_spawn_tells_the_failure_not_who_waited_for_a_rank_that_had_returned():
    def work(comm):
        if comm.rank == 0:
            return
        if comm.rank == 1:
            time.sleep(0.3)
            raise LookupError("mine")
        comm.barrier()

    with pytest.raises(LookupError, match="mine"):
        ringcoll.spawn(work, 3, timeout=20)


STANDS = r"rank {0} of 3 had not returned .* rank {0} at test_refusals.py:\d+, release.wait\(30\)"


def test_ctrl_c_that_another_thread_gets_is_seen():
    """It wakes no wait of the main thread."""
    release, interrupts = threading.Event(), {signal.SIGINT}

    def work(comm):
        if comm.rank == 0:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, interrupts)
            os.kill(os.getpid(), signal.SIGINT)
            release.wait(30)

    before = signal.pthread_sigmask(signal.SIG_BLOCK, interrupts)
    try:
        with pytest.raises(KeyboardInterrupt, match=STANDS.format(0).replace("3", "2", 1)):
            ringcoll.spawn(work, 2)
    finally:
        release.set()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@pytest.mark.parametrize("stuck", [0, 1])
def test_ctrl_c_names_the_ranks_that_have_not_returned(stuck):
    """The others' calls end at once; nobody waits for the sleeping thread; its line is named."""
    release = threading.Event()

    def work(comm):
        comm.barrier()
        if comm.rank == stuck:
            time.sleep(0.2)  # all have started, and the main thread waits for the first of them
            os.kill(os.getpid(), signal.SIGINT)
            release.wait(30)
            return
        comm.barrier()

    try:
        with pytest.raises(KeyboardInterrupt, match=STANDS.format(stuck)):
            ringcoll.spawn(work, 3)
    finally:
        release.set()


@pytest.mark.parametrize(
    ("arguments", "kind", "said"),
    [
        ((print, 0), ArgumentError, "nranks=0, wanted an integer >= 1"),
        ((print, "2"), ArgumentTypeError, "nranks='2', wanted an integer >= 1"),
        ((print, True), ArgumentTypeError, "nranks=True, wanted an integer >= 1"),
        ((4, print), ArgumentTypeError, "function=4, wanted a function"),
    ],
    ids=range(4),
)
def test_spawn_refuses_by_its_own_name(arguments, kind, said):
    with pytest.raises(ringcoll.UsageError) as refused:
        ringcoll.spawn(*arguments)
    assert type(refused.value) is kind
    assert str(refused.value) == f"spawn: {said}: write spawn(function, nranks)"


def test_calls_of_other_counts_are_refused_as_a_first_call_is():
    """What is kept of the calls before has their shape, but not their overlap or counts."""

    def work(comm):
        x, n, refused = np.ones(100), comm.nranks, []
        for count in (8, 12):
            comm.all_reduce(x[:count], x[:count])
        comm.all_gather_v(np.ones(3), np.zeros(3 * n), counts=[3] * n)
        for call in (
            lambda: comm.all_reduce(x[:10], x[1:11]),
            lambda: comm.all_reduce(x[:10], x[:11]),
            lambda: comm.all_reduce(x[2:10], x[:8]),
            lambda: comm.all_gather_v(np.ones(6), np.zeros(6 * n), counts=[3] * n),
        ):
            with pytest.raises(ArgumentError):
                call()
            refused.append(call)
        return len(refused)

    assert ringcoll.spawn(work, 2) == [4, 4]
