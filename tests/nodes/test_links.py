"""Connections between nodes: who is let in, what is read, and what ranks say of their places."""

from __future__ import annotations

import itertools
import socket
import struct
import threading
import time
from typing import Any

import numpy as np
import pytest

from ringcoll.bootstrap import handshake
from ringcoll.errors import AbortedError, MachineError
from ringcoll.executors.node_signals import NodeSignals
from ringcoll.executors.shared_state import Hello, SharedState
from ringcoll.fabric import connect as connecting
from ringcoll.fabric import thread_fabrics
from ringcoll.fabric.connect import Connections, connect
from ringcoll.fabric.identity import nodes_of
from ringcoll.fabric.links import Frame, Link
from ringcoll.fabric.liveness import State, Status, raise_failed
from tests.fabric.test_addresses import no_ipv6


def pair():
    with socket.create_server(("127.0.0.1", 0)) as door:
        there = socket.create_connection(door.getsockname())
        here, _ = door.accept()
    return here, there


@pytest.fixture
def linked():
    here, there = pair()
    link = Link(here, "process 7 on host far")
    yield link, there
    link.close()
    there.close()


def pumped(link, until):
    for _ in range(2000):
        link.pump()
        if until():
            return
        threading.Event().wait(0.001)
    raise AssertionError("it never came")


def test_frames_come_whole_and_in_order_whatever_their_size():
    here, there = pair()
    one, two = Link(here, "one"), Link(there, "two")
    sent = [bytes([n % 251]) * (n * 997 % 300_000) for n in range(60)]
    for number, payload in enumerate(sent):
        one.send(Frame.GATHER, number % 2, payload)
        two.pump()
    boxes = [two.inbox(0).gathers, two.inbox(1).gathers]

    def there_are_all():
        one.pump()
        return len(boxes[0]) + len(boxes[1]) == len(sent)

    pumped(two, there_are_all)
    assert list(boxes[0]) == sent[::2]
    assert list(boxes[1]) == sent[1::2]
    one.close()
    pumped(two, lambda: two.dead)
    assert two.broken == "its connection was closed"
    two.close()


def test_the_first_word_counts_and_an_announced_end_is_no_death(linked):
    link, there = linked
    header = struct.Struct("<BQI")
    for text in (b"[3, 'first']", b"[4, 'second']"):
        there.sendall(header.pack(Frame.STATE, 5, len(text)) + text)
    there.sendall(header.pack(Frame.EXITING, 0, 0))
    there.close()
    pumped(link, lambda: bool(link.broken))
    assert link.inbox(5).state == b"[3, 'first']"
    assert link.exiting
    assert not link.dead


@pytest.mark.parametrize(
    "junk", [struct.pack("<BQI", 99, 0, 0), struct.pack("<BQI", Frame.GATHER, 0, 1 << 31)]
)
def test_what_is_no_frame_ends_the_connection(linked, junk):
    link, there = linked
    there.sendall(junk)
    pumped(link, lambda: bool(link.broken))
    assert "invalid frame" in link.broken
    assert not link.inbox(0).gathers


def test_a_token_that_was_withdrawn_is_forgotten(linked):
    link, there = linked
    other = Link(there, "other")
    other.send(Frame.JOIN, 1, b"[0,1] old")
    other.send(Frame.WITHDRAW, 1, b"[0,1] old")
    other.send(Frame.JOIN, 1, b"[0,1] new")
    other.send(Frame.WITHDRAW, 1, b"[0,1] old")
    other.send(Frame.GATHER, 1, b"last")
    pumped(link, lambda: bool(link.inbox(1).gathers))
    assert link.inbox(1).tokens == {b"[0,1]": b"new"}


def test_nothing_is_kept_of_a_fabric_that_both_sides_have_ended(linked):
    link, there = linked
    other = Link(there, "other")
    link.inbox(1).gathers.append(b"unread")
    link.forget(1)
    other.send(Frame.GATHER, 1, b"late")
    other.send(Frame.STATE, 1, b"[1, '']")
    other.send(Frame.STATE, 2, b"[1, '']")
    pumped(link, lambda: link.inbox(2).state is not None)
    link.forget(2)
    assert not link._inboxes


def test_a_frame_is_sent_while_the_same_thread_sends_or_reads(linked):
    """As by the finalizer of a fabric, which the garbage collector calls wherever it likes."""
    link, there = linked
    other = Link(there, "other")
    with link._lock:
        link.send(Frame.GATHER, 1, b"from a finalizer")
    link.send(Frame.GATHER, 1, b"next")
    pumped(other, lambda: len(other.inbox(1).gathers) == 2)
    assert list(other.inbox(1).gathers) == [b"from a finalizer", b"next"]


def test_a_fabric_is_forgotten_where_its_finalizer_interrupts_its_own_thread(linked):
    link, _ = linked
    link.inbox(1).gathers.append(b"unread")

    def close():
        with link._lock:
            link.forget(1)
        link.send(Frame.GATHER, 2)

    thread = threading.Thread(target=close, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    assert link.inbox(1).over
    assert not link.inbox(1).gathers


class Meeting:
    """A bootstrap of threads."""

    def __init__(self, fabric):
        self.rank, self.nranks, self._fabric = fabric.rank, fabric.nranks, fabric

    def allgather(self, payload):
        return self._fabric.allgather(payload, what="bootstrap")


def connected(nodes, timeout=20.0, known=None):
    """What connect() gives each rank, or raises there."""
    knowing = known or [Connections() for _ in nodes]
    found: list = [None] * len(nodes)

    def work(rank, fabric):
        try:
            found[rank] = connect(Meeting(fabric), nodes, timeout, knowing[rank])
        except Exception as error:
            found[rank] = error

    fabrics = enumerate(thread_fabrics(len(nodes)))
    threads = [threading.Thread(target=work, args=pair) for pair in fabrics]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_every_two_ranks_of_different_nodes_are_connected():
    nodes = (0, 1, 0, 2, 1)
    found = connected(nodes)
    for rank, links in enumerate(found):
        assert sorted(links) == [peer for peer, node in enumerate(nodes) if node != nodes[rank]]
        for peer, link in links.items():
            link.send(Frame.GATHER, 3, b"%d to %d" % (rank, peer))
    for rank, links in enumerate(found):
        for peer, link in links.items():
            box = link.inbox(3).gathers
            pumped(link, lambda box=box: bool(box))
            assert box == type(box)([b"%d to %d" % (peer, rank)])
    for links in found:
        for link in links.values():
            link.close()


@pytest.mark.skipif(bool(no_ipv6()), reason=no_ipv6())
@pytest.mark.parametrize("own", [["::1"], ["fe80::1", "127.0.0.1"]])
def test_ranks_of_hosts_with_addresses_of_ipv6_are_connected(monkeypatch, own):
    networks = itertools.count()
    monkeypatch.setattr(connecting, "_network", lambda: str(next(networks)))
    monkeypatch.setattr(connecting, "addresses", lambda: own)
    links = [link for links in connected((0, 1, 2)) for link in links.values()]
    assert len(links) == 6
    for link in links:
        link.pump()
    assert {link.broken for link in links} == {""}
    for link in links:
        link.close()


def test_an_address_that_does_not_answer_leaves_time_for_the_next(monkeypatch):
    seconds: list[float] = []

    def unanswered(to, timeout):
        seconds.append(timeout)
        raise TimeoutError if len(seconds) < 2 else MachineError("the second one, too")

    monkeypatch.setattr(socket, "create_connection", unanswered)
    far = {"addresses": ["fd00::7", "10.0.0.1"], "port": 1, "pid": 1, "host": "far"}
    with pytest.raises(MachineError, match="the second"):
        connecting._call(far, b"", 1, 0, time.monotonic() + 4)
    assert 0 < seconds[0] <= 2 < seconds[1] <= 4


def test_a_host_without_an_address_is_named(monkeypatch):
    networks = itertools.count()
    monkeypatch.setattr(connecting, "_network", lambda: str(next(networks)))
    monkeypatch.setattr(connecting, "addresses", list)
    errors = connected((0, 1), timeout=0.3)
    assert "rank 0, process" in str(errors[1])
    assert "has no address that other hosts reach" in str(errors[1])


def test_processes_that_are_connected_stay_so_while_both_ends_hold():
    nodes, known = (0, 1, 2), [Connections() for _ in range(3)]
    first = connected(nodes, known=known)
    assert connected(nodes, known=known) == first
    first[0][1].close()  # the other end has not heard of it yet
    again = connected(nodes, known=known)
    assert again[0][2] is first[0][2]
    assert again[0][1] is not first[0][1]
    assert again[1][0] is not first[1][0]
    again[0][1].send(Frame.GATHER, 1, b"new")
    pumped(again[1][0], lambda: bool(again[1][0].inbox(1).gathers))
    for links in (*first, *again):
        for link in links.values():
            link.close()


def test_a_child_knows_none_of_its_parents_connections():
    known = connecting.Connections()
    here, there = pair()
    known.links["far"], own = Link(here, "far"), known.own
    known.forked()
    assert not known.alive()
    assert known.own != own
    assert there.recv(1) == b""
    there.close()


def test_strangers_are_sent_away(monkeypatch):
    """They call first: one with junk, one that plays a rank without knowing the key."""
    honest, calls = handshake.answer, []

    def answer(door, key, rank, callers, deadline):
        for word in (b"\0" * 20, struct.pack("<I", max(callers, default=0)) + b"x" * 16):
            stranger = socket.create_connection(door.getsockname())
            stranger.sendall(word + b"y" * 32)
            calls.append(stranger)
        return honest(door, key, rank, callers, deadline)

    monkeypatch.setattr(connecting, "answer", answer)
    found = [link for links in connected((0, 1)) for link in links.values()]
    assert len(found) == 2
    for link in found:
        link.pump()
    assert [link.broken for link in found] == ["", ""]
    for link in found:
        link.close()
    for stranger in calls:
        stranger.close()


@pytest.mark.parametrize("crowd", [3, 200])
def test_strangers_who_say_nothing_hold_up_nobody(monkeypatch, crowd):
    """They have all called before the ranks do, one of them with the half of a call."""
    honest, here = handshake.answer, threading.Event()
    calls: list[socket.socket] = []

    def answer(door, key, rank, callers, deadline):
        if callers:
            door.listen(crowd)
            calls.extend(socket.create_connection(door.getsockname()) for _ in range(crowd))
            calls[0].sendall(b"\0" * 7)
            here.set()
        return honest(door, key, rank, callers, deadline)

    def call(*args):
        here.wait()
        return calling(*args)

    calling = connecting._call
    monkeypatch.setattr(connecting, "answer", answer)
    monkeypatch.setattr(connecting, "_call", call)
    monkeypatch.setattr(connecting, "PATIENCE", 30.0)
    monkeypatch.setattr(handshake, "PATIENCE", 30.0)
    found = connected((0, 1, 2), timeout=25.0)
    assert [sorted(links) for links in found] == [[1, 2], [0, 2], [0, 1]]
    for links in found:
        for link in links.values():
            link.close()
    for stranger in calls:
        stranger.close()


def test_a_rank_that_cannot_be_reached_is_named(monkeypatch):
    def refused(to, timeout):
        raise ConnectionRefusedError("nobody listens")

    monkeypatch.setattr(socket, "create_connection", refused)
    errors = connected((0, 1), timeout=0.3)
    assert "rank 1 did not reach rank 0" in str(errors[1])
    assert "nobody listens" in str(errors[1])
    assert str(errors[0]).startswith(("init: rank 0 waited for rank 1", "rank 1 failed"))


def test_a_node_is_a_name_or_a_host_with_its_processes():
    a = {"host": "a", "boot": "1", "pidns": "1", "uid": "0"}
    assert nodes_of([a, a, {**a, "uid": "1"}]) == [0, 0, 0]
    other = [{**a, "host": "b"}, a, {**a, "boot": "2"}, {**a, "pidns": "2"}]
    assert nodes_of(other) == [0, 1, 2, 3]
    named = [{**a, "node": "x"}, a, {**a, "node": "y"}, {**a, "host": "b", "node": "x"}]
    assert nodes_of(named) == [0, 1, 2, 0]
    assert nodes_of([{**a, "node": ""}, a]) == [0, 0]


class FakeMessages:
    """Stands for the messages of one rank: what is posted is kept."""

    def __init__(self):
        self.posted: list[tuple[int, bytes]] = []

    def receive_posts(self, ranks, store):
        self.ranks, self.store = ranks, store

    def post(self, rank, payload):
        self.posted.append((rank, payload))

    def flushed(self):
        return True


class Apart:
    """A fabric of three ranks on three nodes, each with memory of its own."""

    nodes = (0, 1, 2)

    def __init__(self, rank):
        self.rank, self.nranks = rank, 3

    def share(self, nbytes, *, what):
        return [memoryview(bytearray(nbytes * (rank == self.rank))) for rank in range(3)]


@pytest.fixture
def boards():
    found = []
    for rank in range(3):
        fabric: Any = Apart(rank)
        posts: Any = FakeMessages()
        shared_state = SharedState(fabric, 1 << 16)
        found.append((shared_state, NodeSignals(fabric, shared_state, posts), posts))
    return found


def test_a_hello_is_heard_on_the_other_nodes_with_its_text(boards):
    (shared_state, crossing, posts), (there, *_), _ = boards
    shared_state.record(5, "all_reduce count=3")
    hello = Hello(77, 5, 1 << 48, 2 << 48, True, 2.5)
    shared_state.enter(9, hello)
    crossing.announce(9, 5)
    assert [rank for rank, _ in posts.posted] == [1, 2]
    boards[1][2].store(0, memoryview(posts.posted[0][1]))
    assert there.hello(0, 9) == hello
    assert there.recorded(0, 5) == "all_reduce count=3"
    assert there.words[0][there.entered] == 9 << 32
    assert there.words[2][there.entered] == 0


def test_a_hello_of_two_ranks_goes_to_the_other_one(boards):
    (shared_state, crossing, posts), (there, *_), _ = boards
    shared_state.record(6, "count=3")
    at = shared_state.pair(1, sends=True)
    shared_state.enter(2, Hello(78, 6), at)
    crossing.announce_pair(1, at, 2, 6)
    ((rank, payload),) = posts.posted
    assert rank == 1
    boards[1][2].store(0, memoryview(payload))
    assert there.hello(0, 2, at) == Hello(78, 6, scalar=0j)
    assert there.recorded(0, 6) == "count=3"


def test_a_signal_is_stored_in_the_words_of_the_rank_that_waits(boards):
    (_, crossing, posts), (there, *_), _ = boards
    at = there.flags + 0 * 64 + 3
    crossing.signals[1][at] = 12345
    ((rank, payload),) = posts.posted
    boards[1][2].store(0, memoryview(payload))
    assert (rank, there.words[1][at]) == (1, 12345)


@pytest.mark.parametrize("kind", [0, 1, 2])
@pytest.mark.parametrize(
    ("offset", "length"), [(1 << 31, 8), (1, 8), (0, 4096), (8, 7), (0, 8), (4, 8)]
)
def test_what_is_posted_for_no_such_place_is_refused(boards, kind, offset, length):
    shared_state, _, posts = boards[1]
    before = [memory.copy() for memory in shared_state.bytes]
    payload = struct.pack("<QIIQ", kind, offset, length, 0) + b"\1" * min(length, 1000)
    if (kind, offset, length) == (0, 0, 8):
        posts.store(0, memoryview(payload))  # a copy of its own first word: that may be
        return
    with pytest.raises(MachineError, match="rank 0 posted"):
        posts.store(0, memoryview(payload))
    assert all(np.array_equal(a, b) for a, b in zip(before, shared_state.bytes, strict=True))


@pytest.mark.parametrize("length", [0, 7, 12, 20])
def test_what_is_cut_off_is_refused(boards, length):
    whole = struct.pack("<QIIQ", 0, 0, 8, 0) + b"\1" * 8
    with pytest.raises(MachineError, match="rank 0 posted"):
        boards[1][2].store(0, memoryview(whole[:length]))


@pytest.mark.parametrize(
    ("reason", "shown"),
    [
        ("rank 0 aborted: no such file", "rank 0 aborted: no such file"),
        ("no such file", "rank 1 aborted: no such file"),
    ],
)
def test_an_error_names_the_rank_that_aborted_not_the_one_that_relays_it(reason, shown):
    statuses = {0: Status(), 1: Status(State.ABORTED, 1, reason)}
    with pytest.raises(AbortedError) as caught:
        raise_failed(statuses, 0, range(2), lambda: None)
    assert str(caught.value) == shown
