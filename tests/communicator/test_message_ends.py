"""Errors of messages under way, and what becomes of these when a rank ends."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import numpy as np
import pytest

import ringcoll
from ringcoll import ANY, AbortedError, ClosedError, DeadlineError, MismatchError, RankLostError
from ringcoll.communicator.cpu.message_thread import MessageThread

LARGE = 300_000
"""Elements: many slices of a landing zone."""


def test_a_ring_of_large_sends_is_told_what_exchanges():
    def work(comm):
        with pytest.raises((DeadlineError, AbortedError, RankLostError)) as late:
            comm.send(np.ones(1 << 20), (comm.rank + 1) % comm.nranks, timeout=0.2)
        comm.close()
        return type(late.value), str(late.value)

    found = [text for kind, text in ringcoll.spawn(work, 3) if kind is DeadlineError]
    assert found
    assert all(text.endswith("wait for each other: use sendrecv or a group") for text in found)


def test_a_late_message_names_its_peer_and_breaks_the_communicator():
    def work(comm):
        if comm.rank == 1:
            with pytest.raises((DeadlineError, ClosedError), match="recv from rank 1 on rank 0"):
                while True:
                    comm.check()
            comm.close()
            return None
        late = comm.recv(np.zeros(3), 1, async_op=True, timeout=0.2)
        other = comm.recv(np.zeros(3), ANY, async_op=True)
        with pytest.raises(DeadlineError, match=r"waited 0\.2 s; rank 1 made no matching send"):
            late.wait()
        assert isinstance(other.exception(), ClosedError)
        with pytest.raises(ClosedError, match="DeadlineError"):
            comm.send(np.zeros(3), 1)
        comm.close()
        return True

    assert ringcoll.spawn(work, 2)[0]


def test_a_receive_from_any_rank_has_a_deadline():
    def work(comm):
        with pytest.raises(DeadlineError, match=r"recv from any rank on rank 0 \(count<=3"):
            comm.recv(np.zeros(3), ANY, timeout=0.1)
        comm.close()

    ringcoll.spawn(work, 1)


def test_waiting_for_a_message_may_end_before_the_message():
    def work(comm):
        if comm.rank == 1:
            comm.barrier()
            comm.send(np.ones(2), 0)
            return None
        out = np.zeros(2)
        pending = comm.recv(out, 1, async_op=True)
        with pytest.raises(DeadlineError, match=r"Work\.wait\(timeout=0\.05\)"):
            pending.wait(0.05)
        comm.barrier()
        pending.wait(20)
        return out.tolist()

    assert ringcoll.spawn(work, 2)[0] == [1.0, 1.0]


@pytest.mark.parametrize("how", ["wait", "call", "check", "synchronize", "with"])
def test_the_error_of_a_message_is_never_lost(how):
    def work(comm):
        x, peer = np.zeros(3 + comm.rank), 1 - comm.rank
        pending = (comm.send if comm.rank else comm.recv)(x, peer, async_op=True)
        while how == "check":
            comm.check()
        match how:
            case "wait":
                pending.wait()
            case "call":
                comm.barrier()
                while not pending.done():
                    time.sleep(0.001)
                comm.barrier()
            case "synchronize":
                comm.synchronize()
            case "with":
                with comm:
                    pass
                return
        comm.barrier()

    with pytest.raises(MismatchError, match="count=3") as caught:
        ringcoll.spawn(work, 2)
    assert "count=4" in str(caught.value)


def test_a_rank_that_raises_reaches_all_messages_under_way():
    seen = {}

    def work(comm):
        outs = np.zeros((40, 3, 4))
        pending = [comm.recv(out, by, async_op=True) for row in outs for by, out in enumerate(row)]
        pending += [comm.recv(np.zeros(4), ANY, async_op=True)]
        comm.barrier()
        if comm.rank == 2:
            raise KeyError("mine")
        started = time.monotonic()
        for each in pending:
            with pytest.raises(AbortedError, match="KeyError"):
                each.wait()
        seen[comm.rank] = time.monotonic() - started
        raise RuntimeError("seen")

    with pytest.raises(KeyError):
        ringcoll.spawn(work, 3)
    assert set(seen) == {0, 1}
    assert max(seen.values()) < 20


def test_close_ends_messages_that_nobody_matches():
    def work(comm):
        pending = [comm.recv(np.zeros(2), by, async_op=True) for by in (1 - comm.rank, ANY)]
        comm.barrier()
        comm.close()
        return [type(each.exception()) for each in pending]

    ends = ringcoll.spawn(work, 2)
    assert [ClosedError] * 2 in ends
    assert {*ends[0], *ends[1]} <= {ClosedError, RankLostError}  # the later one hears of the other


def test_close_lets_a_started_send_end():
    def work(comm):
        x = np.full(LARGE, 5.0)
        if comm.rank == 0:
            pending = comm.send(x, 1, async_op=True)
            comm.close()
            return pending.exception()
        out = np.zeros(LARGE)
        time.sleep(0.1)
        comm.recv(out, 0)
        return set(out)

    assert ringcoll.spawn(work, 2) == [None, {5.0}]


def test_a_peer_that_has_closed_is_told_to_who_waits_inside_a_message():
    """It had posted its end, and left before the data had moved."""

    def work(comm):
        if comm.rank == 1:
            comm.recv(np.zeros(LARGE), 0, async_op=True)
            comm.barrier()
            comm.close()
            return None
        comm.barrier()
        time.sleep(0.05)
        with pytest.raises(RankLostError, match="rank 1 closed its communicator"):
            comm.send(np.zeros(LARGE), 1)
        comm.close()
        return True

    assert ringcoll.spawn(work, 2)[0]


def test_the_thread_of_messages_ends_when_nothing_is_under_way():
    def threads():
        return [each.name for each in threading.enumerate() if "messages" in each.name]

    [comm] = ringcoll.init_all(1)
    before = threads()
    out = np.zeros(2)
    pending = comm.recv(out, 0, async_op=True)
    assert len(threads()) == len(before) + 1
    comm.send(np.ones(2), 0)
    pending.wait()
    late = time.monotonic() + 20
    while len(threads()) > len(before) and time.monotonic() < late:
        time.sleep(0.01)
    assert threads() == before
    comm.recv(out, 0, async_op=True)  # it begins anew
    comm.send(np.full(2, 3.0), 0)
    comm.synchronize()
    assert out.tolist() == [3.0, 3.0]
    comm.close()
    assert threads() == before


def test_a_message_posted_while_the_thread_ends_is_moved():
    last_look, posted, moved = (threading.Event() for _ in range(3))

    class Messages(MessageThread):
        pending, idle = 0, False

        def is_busy(self):
            busy = self.pending > 0
            if self.idle and not (busy or self._asleep or last_look.is_set()):
                last_look.set()  # the post comes before the thread acts on what it saw
                posted.wait(0.5)
            self.idle = self._asleep
            return busy

        def notify(self):
            pass

        def _move(self, stop):
            self.pending = 0
            moved.set()

    def post():
        last_look.wait(20)
        messages.pending += 1
        messages._wake()
        posted.set()

    messages = Messages("messages", "a message")
    messages._due = time.monotonic()
    poster = threading.Thread(target=post)
    poster.start()
    messages._wake()
    poster.join()
    assert last_look.is_set()
    assert moved.wait(20)
    messages._end_thread()


def test_a_failed_message_holds_no_memory_of_its_peers_once_closed():
    """Without the cycle collector: the error's traceback has frames that knew the message."""
    over = threading.Event()

    def work(comm):
        peer, out = 1 - comm.rank, np.zeros(8)
        for _ in range(4):
            comm.sendrecv(np.ones(8), peer, out, peer)
        if comm.rank == 1:
            over.wait(20)
            comm.close()
            return
        late = comm.recv(out, peer, async_op=True, timeout=0.2)
        with pytest.raises(DeadlineError):
            late.wait()
        over.set()
        kept = [*comm._state.progress.pairs._landings.values()]
        zones = [weakref.ref(one.zone) for both in kept for one in both if one is not None]
        del kept
        comm.close()
        assert zones
        assert [zone for zone in zones if zone() is not None] == []

    gc.disable()
    try:
        ringcoll.spawn(work, 2)
    finally:
        gc.enable()


def test_two_threads_receive_and_send_on_one_communicator():
    """A thread that waits for a message keeps no other from sending."""

    def work(comm):
        peer, out = 1 - comm.rank, np.zeros(2)
        thread = threading.Thread(target=lambda: comm.recv(out, peer))
        thread.start()
        time.sleep(0.02)
        comm.send(np.full(2, comm.rank + 1.0), peer)
        thread.join()
        return out.tolist()

    assert ringcoll.spawn(work, 2, timeout=20) == [[2.0, 2.0], [1.0, 1.0]]


LABELS = [
    ("one", "two", MismatchError),
    ("one", "one", None),
    ("one", None, None),
    (None, "two", None),
]


@pytest.mark.parametrize("count", [2, LARGE])
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(("sent", "received", "kind"), LABELS)
def test_two_labels_of_one_message_are_a_mismatch_and_nothing_moves(
    count, exact, sent, received, kind
):
    told, outs = {}, np.zeros(count)

    def work(comm):
        try:
            for _ in range(6):  # what is kept of a pair's earlier messages says nothing
                outs[:] = 0
                if comm.rank == 0:
                    comm.send(np.ones(count), 1)
                    comm.send(np.ones(count), 1, tag=sent)
                else:
                    comm.recv(outs, 0, tag="any")
                    outs[:] = 0
                    comm.recv(outs, 0, exact=exact, tag=received)
            comm.barrier()
        except ringcoll.Error as error:
            told[comm.rank] = error
            raise

    if kind is None:
        ringcoll.spawn(work, 2)
        assert set(outs) == {1.0}
        return
    with pytest.raises(kind):
        ringcoll.spawn(work, 2)
    assert {type(error) for error in told.values()} == {MismatchError}
    assert set(outs) == {0.0}
    for text in map(str, told.values()):
        assert "tag=one; " in text or "tag=two; " in text
        assert "the tags differ, " in text
        assert text.endswith("receive in the order in which rank 0 sends")


def test_labels_of_a_group_are_compared():
    def work(comm):
        x = np.ones(2)
        with ringcoll.group():
            if comm.rank == 0:
                comm.send(x, 1, tag="a")
            else:
                comm.recv(x, 0, tag="b")
        comm.barrier()

    with pytest.raises(MismatchError, match=r"the tags differ, '[ab]' and '[ab]'"):
        ringcoll.spawn(work, 2)


def test_labels_of_communicators_may_differ():
    def work(comm):
        own = comm.split(0, config=ringcoll.Config(tag=f"of rank {comm.rank}"))
        y = np.zeros(2)
        own.sendrecv(np.full(2, comm.rank + 1.0), 1 - comm.rank, y, 1 - comm.rank)
        own.close()
        return y.tolist()

    assert ringcoll.spawn(work, 2) == [[2.0, 2.0], [1.0, 1.0]]


@pytest.mark.parametrize("tag", [7, np.int64(0), -1])
def test_an_integer_as_tag_is_told_that_messages_have_none(tag):
    [comm] = ringcoll.init_all(1, device="cpu")
    x = np.ones(2)
    calls = {
        "send": lambda: comm.send(x, 0, tag=tag),
        "recv": lambda: comm.recv(x, 0, tag=tag),
        "sendrecv": lambda: comm.sendrecv(x, 0, np.ones(2), 0, tag=tag),
    }
    for name, call in calls.items():
        with pytest.raises(ringcoll.ArgumentTypeError) as refused:
            call()
        assert str(refused.value).startswith(f"{name} on rank 0: tag={tag!r}: messages have no ")
        assert "matched in order; leave it out" in str(refused.value)
    comm.close()


def closing(rounds=1, received=0, error=None):
    """Rank 0 sends to rank 1, and rank 2 to itself; some messages of rank 0 are received."""

    def work(comm):
        for _ in range(rounds):
            if comm.rank == 0:
                comm.send(np.ones(3), 1)
            if comm.rank == 1 and received:
                comm.recv(np.ones(3), 0)
        if comm.rank == 2 and not received:
            comm.send(np.ones(2, "int8"), 2)
        comm.barrier()
        if error is not None:
            comm.abort(error)
        comm.close()
        comm.close()

    return work


def test_close_names_messages_that_nobody_has_received(caplog):
    ringcoll.spawn(closing(), 3)
    assert sorted(record.getMessage() for record in caplog.records) == [
        "rank 1: closed; no recv took the messages (3 float64 from rank 0)",
        "rank 2: closed; no recv took the messages (2 int8 from rank 2)",
    ]


@pytest.mark.parametrize("how", [{"rounds": 3, "received": 3}, {"error": "no data left"}])
def test_close_names_no_message_that_was_received_or_whose_communicator_has_failed(how, caplog):
    ringcoll.spawn(closing(**how), 3)
    assert "no recv took" not in caplog.text


@pytest.mark.parametrize("before", [0, 2])
def test_a_late_call_names_the_last_call_of_the_rank_that_did_not_come(before):
    late = threading.Event()

    def work(comm):
        for _ in range(before):
            comm.all_reduce(np.ones(3))
        if comm.rank == 1:
            late.wait(20)
            comm.close()
            return None
        with pytest.raises(DeadlineError) as error:
            comm.barrier(timeout=0.2)
        late.set()
        comm.close()
        return str(error.value)

    text = ringcoll.spawn(work, 2)[0]
    last = "(the last call of rank 1 was call 2, all_reduce count=3 dtype=float64 op=sum)"
    assert (last in text) is (before > 0)
    assert "look at why rank 1 did not come, or pass a longer timeout=" in text
    assert text.endswith("; this rank's call: barrier")


def test_a_late_probe_says_what_would_have_ended_it():
    (comm,) = ringcoll.init_all(1, device="cpu")
    with pytest.raises(DeadlineError, match="no message came, or those that came belong to rece"):
        comm.probe(timeout=0.05)
    comm.close()


class Owner:
    """Of a communicator, which it closes when the collector finds it: it refers to itself."""

    def __init__(self, comm, closed):
        self.comm, self.closed, self.itself = comm, closed, self

    def __del__(self):
        try:
            self.comm.close()
            self.comm.close()
        except BaseException as error:
            self.closed.append(error)
        else:
            self.closed.append(None)


def test_close_in_the_finalizer_of_a_circle_ends_all():
    def work(comm):
        part, closed = comm.split(0), list[object]()
        right, left = (comm.rank + 1) % comm.nranks, (comm.rank - 1) % comm.nranks
        received = part.recv(np.ones(LARGE), left, async_op=True)
        part.send(np.ones(LARGE), right)
        received.wait()
        thread = part._state.progress._thread
        Owner(part, closed)
        comm.barrier()
        del part, received
        for _ in range(100):
            gc.collect()
            if closed:
                break
            time.sleep(0.01)
        return closed, thread is not None and thread.is_alive()

    assert ringcoll.spawn(work, 2) == [([None], False)] * 2
