"""A rank's end of a relayed bootstrap, against a relay that this file plays."""

import errno
import gc
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import ringcoll
from ringcoll.bootstrap import ending, tcp
from ringcoll.bootstrap.contract import Failure
from ringcoll.bootstrap.frames import joined
from ringcoll.bootstrap.handshake import prove
from ringcoll.bootstrap.relay import CALLED, FRAME, Kind
from ringcoll.bootstrap.relayed import RelayedBootstrap, serving
from tests.adapters.ports import free_port


def frame(kind, payload=b""):
    return FRAME.pack(kind.value, len(payload)) + payload


LOST = frame(Kind.FAIL, Failure("RankLostError", "rank 0 ended").encode())
HELLO = frame(Kind.HELLO)


@pytest.fixture
def rank():
    """Rank 1 of 2, over a connection that it keeps, and the relay's end of it."""
    own, relays = socket.socketpair()
    relays.sendall(HELLO)
    bootstrap = RelayedBootstrap(1, 2, 5.0, "the relay").over(own, 5.0)
    yield bootstrap, relays
    relays.close()
    own.close()


def test_a_failure_that_came_with_an_answer_is_noticed(rank):
    bootstrap, relay = rank
    answer = joined([b"a", b"b"])
    relay.sendall(frame(Kind.GATHER, answer) + LOST)
    assert bootstrap.allgather(b"b") == [b"a", b"b"]
    for _ in range(2):
        with pytest.raises(ringcoll.RankLostError, match="rank 0 ended"):
            bootstrap.check()


def test_part_of_a_frame_is_waited_for_by_nobody_who_checks(rank):
    bootstrap, relay = rank
    bootstrap.check()
    for byte in (LOST[:1], LOST[1:30], LOST[30:-1]):
        relay.sendall(byte)
        bootstrap.check()
    relay.sendall(LOST[-1:])
    with pytest.raises(ringcoll.RankLostError, match="rank 0 ended"):
        bootstrap.check()


def test_what_is_left_of_a_session_is_not_taken_for_the_next_ones(rank):
    bootstrap, relay = rank
    relay.sendall(LOST[:20])
    bootstrap.check()
    rest = threading.Timer(0.1, relay.sendall, [LOST[20:] + HELLO])
    rest.start()
    own = bootstrap._link
    bootstrap._link = None  # as after a parting that the relay has not answered in time
    bootstrap.over(own, 5.0)
    rest.join()
    relay.sendall(frame(Kind.GATHER, joined([b"a", b"b"])))
    assert bootstrap.allgather(b"b") == [b"a", b"b"]


def test_a_kept_connection_that_has_ended_is_a_lost_rank(rank):
    bootstrap, relay = rank
    relay.close()
    own = bootstrap._link
    for _ in range(2):
        with pytest.raises(ringcoll.RankLostError, match="the relay closed its connection"):
            bootstrap.over(own, 5.0)


@pytest.mark.parametrize("timeout", [1e10, 1e300])
def test_a_kept_connection_takes_any_timeout(timeout):
    own, relay = socket.socketpair()
    relay.sendall(HELLO + frame(Kind.GATHER, joined([b"a", b"b"])))
    with own, relay:
        bootstrap = RelayedBootstrap(1, 2, 5.0, "the relay").over(own, timeout)
        assert bootstrap.allgather(b"b") == [b"a", b"b"]


def test_a_relay_that_does_not_answer_is_waited_for_no_longer_than_the_deadline():
    own, relay = socket.socketpair()
    with own, relay, pytest.raises(ringcoll.DeadlineError, match=r"rank 1 of 2 waited 0\.1 s"):
        RelayedBootstrap(1, 2, 0.1, "the relay").over(own, 0.1)


def test_a_closed_connection_ends_no_program_that_has_reset_sigpipe():
    child = os.fork()
    if not child:
        status = 1
        try:
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            own, relay = socket.socketpair()
            relay.sendall(HELLO)
            bootstrap = RelayedBootstrap(1, 2, 5.0, "the relay").over(own, 5.0)
            relay.close()
            try:
                bootstrap.allgather(b"")
            except ringcoll.RankLostError:
                status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


class Gone:
    """A user's bootstrap that raises an error of its own."""

    rank, nranks = 0, 2

    def allgather(self, payload):
        raise RuntimeError("no connection")


def test_an_error_of_a_users_bootstrap_hides_no_error_of_an_option():
    with pytest.raises(ringcoll.ArgumentTypeError, match="sliecs"):
        ringcoll.init(Gone(), device="cpu", sliecs=1)


def test_an_error_of_an_option_waits_for_late_ranks_no_longer_than_the_timeout():
    """The others learn it as long as the process that made the id serves it."""
    made = ringcoll.unique_id("127.0.0.1")
    code = (
        "import sys, time, ringcoll; started = time.monotonic()\n"
        "try: ringcoll.init(id=sys.argv[1], rank=1, nranks=2, device='cpu', timeout=1, sliecs=1)\n"
        "except ringcoll.ArgumentTypeError: print(time.monotonic() - started < 30)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, made], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "True\n"
    with pytest.raises(ringcoll.AbortedError, match=r"rank 1 aborted: .*sliecs"):
        ringcoll.init(id=made, rank=0, nranks=2, device="cpu", timeout=20)


def forked(work):
    """What ``work()`` returns in a forked child, as text; an error is its text."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        gc.disable()  # what the parent's tests have left would close descriptors meanwhile
        try:
            text = str(work())
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writing, text.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return text


def test_a_forked_child_holds_no_port_of_an_id():
    listener = socket.create_server(("127.0.0.1", 0))
    relay = serving(listener, b"key", 2)
    caller = socket.create_connection(listener.getsockname())  # one that has yet to prove its rank
    own = socket.create_connection(listener.getsockname())
    prove(own, b"key", 1, CALLED, time.monotonic() + 20)
    shared = {os.fstat(end.fileno()).st_ino for end in (listener, relay._wake, relay._woken)}

    def held():
        names = [name.name for name in Path("/proc/self/fd").iterdir()]
        return [*shared.intersection(map(inode, names))]

    assert forked(held) == "[]"
    with caller, own:  # and the parent's relay has lost nothing
        own.sendall(frame(Kind.HELLO, b'{"rank": 1, "nranks": 2, "name": "x", "age": 1.0}'))
        assert own.recv(FRAME.size) == HELLO
    relay.halt(0.0)


def inode(descriptor):
    try:
        return os.fstat(int(descriptor)).st_ino
    except OSError:
        return 0


def test_a_forked_child_serves_no_id_of_its_parent():
    made = ringcoll.unique_id("127.0.0.1")
    assert made in tcp._serving
    assert forked(lambda: made in tcp._serving) == "False"


@pytest.fixture
def loaded():
    """The modules of ``init`` are loaded: without a descriptor Python could open none of them."""
    made = ringcoll.unique_id("127.0.0.1")
    ringcoll.init(id=made, rank=0, nranks=1, device="cpu").close()


def limit_descriptors():
    """Leave this process few descriptors, however many its parent had open."""
    most = max(int(path.name) for path in Path("/proc/self/fd").iterdir()) + 20
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


@pytest.mark.usefixtures("loaded")
def test_without_a_descriptor_init_says_at_once_which_rank_lacks_it():
    made = ringcoll.unique_id("127.0.0.1")

    def begin():
        limit_descriptors()
        with pytest.raises(OSError, match="Too many"):
            while True:
                os.open("/dev/null", os.O_RDONLY)
        ringcoll.init(id=made, rank=1, nranks=2, device="cpu", timeout=60)

    error = forked(begin)
    assert error.startswith("OutOfMemory: init: rank 1 lacks descriptors")
    assert "ulimit -n" in error


@pytest.mark.usefixtures("loaded")
def test_without_a_descriptor_for_its_callers_rank_0_says_so():
    made = f"127.0.0.1:{free_port()}:{'01' * 16}"

    def begin():
        limit_descriptors()
        held = []
        with pytest.raises(OSError, match="Too many"):
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY))
        for _ in range(5):  # listener, selector, wake pair and this rank's end
            os.close(held.pop())
        ringcoll.init(id=made, rank=0, nranks=2, device="cpu", timeout=3)

    error = forked(begin)
    assert error.startswith("OutOfMemory: init: rank 0 lacks descriptors"), error


def test_without_a_thread_init_says_which_rank_lacks_it(monkeypatch):
    def start(self):
        raise RuntimeError("can't start new thread")

    made = f"127.0.0.1:{free_port()}:{'01' * 16}"
    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(ringcoll.OutOfMemory, match=r"rank 0 lacks .*ulimit -u"):
        ringcoll.init(id=made, rank=0, nranks=2, device="cpu", timeout=20)
    monkeypatch.undo()
    socket.create_server(("127.0.0.1", int(made.split(":")[1]))).close()  # the port is free


def test_a_descriptor_that_init_lacks_later_is_posted():
    own, relay = socket.socketpair()
    relay.sendall(HELLO)
    bootstrap = RelayedBootstrap(1, 2, 5.0, "the relay").over(own, 5.0)
    relay.sendall(frame(Kind.BYE))
    with own, relay:
        with pytest.raises(ringcoll.OutOfMemory, match="rank 1 lacks"), ending(bootstrap):
            raise OSError(errno.EMFILE, "Too many open files")
        assert b"rank 1 aborted: OSError" in relay.recv(1 << 16)


def test_a_rank_that_is_late_reads_what_the_relay_has_said_before_it_asks(rank):
    """The relay has ended: to send to it is an error, and over TCP drops what has come."""
    bootstrap, relay = rank
    relay.sendall(LOST)
    relay.close()
    late = bootstrap._link
    with pytest.raises(ringcoll.RankLostError, match="rank 0 ended"):
        raise bootstrap._late(late)
