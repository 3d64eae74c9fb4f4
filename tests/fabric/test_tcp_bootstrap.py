"""Ranks that meet at a port of the loopback device, by an address or by an id; each is a thread."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import struct
import threading
import time
from functools import partial

import pytest

import ringcoll
from ringcoll.bootstrap import handshake, relayed, tcp
from ringcoll.bootstrap.relay import CALLED, FRAME, Kind
from ringcoll.bootstrap.tcp import TcpBootstrap, id_bootstrap
from ringcoll.errors import (
    DeadlineError,
    MachineError,
    MismatchError,
    RankLostError,
)
from tests.adapters.ports import free_port


def together(ranks, begin, work):
    """What ``work(bootstrap)`` returned or raised, by rank; ``begin(rank)`` makes the bootstrap."""
    found = {}

    def run(number):
        try:
            bootstrap = begin(number)
            try:
                found[number] = work(bootstrap)
            finally:
                bootstrap.close()
        except Exception as error:
            found[number] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def every(nranks, part):
    """What an exchange returns to all ranks where each sends the same."""
    return {rank: [part] * nranks for rank in range(nranks)}


def met(nranks, work, *, timeout=20.0, ranks=None):
    port = free_port()
    return together(
        ranks or range(nranks),
        lambda rank: TcpBootstrap(rank, nranks, "127.0.0.1", port, timeout),
        work,
    )


@pytest.mark.parametrize("nranks", [1, 2, 5])
def test_bytes_of_any_length_in_rank_order(nranks):
    def work(bootstrap):
        first = bootstrap.allgather(bytes([bootstrap.rank]) * (1 << 10 * (bootstrap.rank % 3)))
        return [len(part) for part in first], bootstrap.allgather(b"")

    lengths = [1 << 10 * (rank % 3) for rank in range(nranks)]
    assert met(nranks, work) == dict.fromkeys(range(nranks), (lengths, [b""] * nranks))


@pytest.mark.parametrize("timeout", [4_294_967.5, 1e10, 1e300, float("inf")])
def test_a_timeout_may_be_longer_than_a_socket_waits(timeout):
    """A socket refuses the long ones, and waits half a second for the first, by an int's turn."""

    def work(bootstrap):
        return bootstrap.allgather(b"x")

    assert met(2, work, timeout=timeout) == every(2, b"x")


def test_parts_of_the_ranks_go_their_own_ways():
    def work(bootstrap):
        members = [0, 2, 4] if bootstrap.rank % 2 == 0 else [1, 3]
        part = bootstrap.part(members)
        own = b"%d" % bootstrap.rank
        rounds = [part.allgather(own) for _ in range(1 + bootstrap.rank % 2)]
        return rounds, bootstrap.allgather(own)

    every = [b"0", b"1", b"2", b"3", b"4"]
    for rank, (rounds, whole) in met(5, work).items():
        assert rounds == [every[rank % 2 :: 2]] * (1 + rank % 2)
        assert whole == every


def test_a_rank_that_does_not_come_is_named():
    found = met(3, lambda bootstrap: bootstrap.allgather(b"x"), timeout=0.5, ranks=[0, 2])
    for rank in (0, 2):
        assert isinstance(found[rank], (DeadlineError, RankLostError))
    assert any("for rank 1: did every rank call init()?" in str(error) for error in found.values())


def test_without_rank_0_nobody_waits_for_ever():
    found = met(2, lambda bootstrap: None, timeout=0.3, ranks=[1])
    assert isinstance(found[1], DeadlineError)
    assert "to reach rank 0 at 127.0.0.1:" in str(found[1])


@pytest.mark.parametrize(("lost", "rounds"), [(0, 1), (0, 3), (1, 0), (1, 1), (2, 3)])
def test_a_rank_that_ends_is_named_at_once(lost, rounds):
    def work(bootstrap):
        for _ in range(rounds):
            bootstrap.allgather(b"x")
        if bootstrap.rank == lost:
            bootstrap._link.close()  # as the kernel does
            if bootstrap._relay is not None:
                bootstrap._relay.halt()
            return time.monotonic()
        bootstrap.allgather(b"x")
        raise AssertionError

    found = met(3, work)
    for rank in {0, 1, 2} - {lost}:
        assert isinstance(found[rank], RankLostError)
        assert f"rank {lost} " in str(found[rank])


def test_a_rank_that_fails_is_named_with_its_error():
    def work(bootstrap):
        if bootstrap.rank == 1:
            bootstrap.fail(ValueError("no such file"))
        bootstrap.allgather(b"x")

    found = met(3, work)
    for rank in (0, 2):
        assert type(found[rank]) is ringcoll.AbortedError
        assert str(found[rank]) == "rank 1 aborted: ValueError: no such file"
    assert isinstance(found[1], MachineError)  # its connection is closed


def called(address, until=20.0):
    """A connection that is made when somebody listens."""
    late = time.monotonic() + until
    while time.monotonic() < late:
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection(address, 5)
        time.sleep(0.005)
    raise AssertionError(f"nobody listens at {address}")


def strange(kind, number):
    """What a stranger sends."""
    mixed = random.Random(number)
    call = struct.pack("<I16s", 1, b"n" * 16)
    return {
        "silent": b"",
        "half": call[: mixed.randrange(1, len(call))],
        "call": call,
        "proof": call + mixed.randbytes(32),
        "garbage": mixed.randbytes(mixed.randrange(1, 500)),
        "http": b"GET / HTTP/1.1\r\n\r\n".ljust(100),
    }[kind]


KINDS = ("silent", "half", "call", "proof", "garbage", "http")


@pytest.mark.parametrize("by_id", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_strangers_cost_nobody_else_anything(kind, by_id):
    """40 before the ranks, which stay open; two ranks meet in spite of them."""
    port, given = free_port(), ringcoll.unique_id("127.0.0.1")
    address = "127.0.0.1", int(given.split(":")[1]) if by_id else port
    done, strangers = threading.Event(), []

    def intrude():
        for number in range(40):
            with contextlib.suppress(OSError):
                link = called(address)
                strangers.append(link)
                link.sendall(strange(kind, number))
        done.set()

    thread = threading.Thread(target=intrude)
    thread.start()

    def begin(rank):
        if rank == 1:
            done.wait()
        if by_id:
            return id_bootstrap(given, rank, 2, 20)
        return TcpBootstrap(rank, 2, *address, 20)

    found = together(range(2), begin, lambda bootstrap: bootstrap.allgather(b"x"))
    thread.join()
    for link in strangers:
        link.close()
    assert found == every(2, b"x")


def test_a_byte_now_and_then_costs_the_stranger_alone(monkeypatch):
    monkeypatch.setattr(handshake, "PATIENCE", 0.3)
    port = free_port()
    closed = []

    def drip():
        with called(("127.0.0.1", port)) as link:
            with contextlib.suppress(OSError):
                for _ in range(100):
                    link.sendall(b"x")
                    time.sleep(0.02)
            closed.append(True)

    thread = threading.Thread(target=drip)
    thread.start()

    def begin(rank):
        if rank == 1:
            thread.join()  # the stranger has been closed before
        return TcpBootstrap(rank, 2, "127.0.0.1", port, 20)

    found = together(range(2), begin, lambda bootstrap: bootstrap.allgather(b"x"))
    assert found == every(2, b"x")
    assert closed == [True]


def test_more_strangers_than_there_are_places():
    """300 connections that stay open: the ranks join, and the process keeps its descriptors."""
    given = ringcoll.unique_id("127.0.0.1")
    address = "127.0.0.1", int(given.split(":")[1])
    links = [called(address) for _ in range(300)]
    work = id_bootstrap
    found = together(
        range(2), lambda rank: work(given, rank, 2, 20), lambda bootstrap: bootstrap.allgather(b"x")
    )
    for link in links:
        link.close()
    assert found == every(2, b"x")


def proven(given, rank=1):
    """A connection that has proven that it knows an id."""
    _, port, secret = given.split(":")
    link = called(("127.0.0.1", int(port)))
    handshake.prove(link, secret.encode(), rank, CALLED, time.monotonic() + 5)
    return link


def framed(kind, payload):
    return FRAME.pack(kind, len(payload)) + payload


def hello(rank, nranks, age=1e6):
    said = {"rank": rank, "nranks": nranks, "name": "somebody", "age": age}
    return framed(Kind.HELLO.value, json.dumps(said).encode())


BROKEN = [
    framed(b"H", b"{"),
    framed(b"H", b"\xff\xfe"),
    framed(b"H", b"[1, 2]"),
    hello(True, 2),
    hello(1, "2"),
    hello(0, 1 << 40),
    framed(b"?", b""),
    framed(b"G", b""),
    FRAME.pack(b"H", 1 << 62),
    hello(1, 2) + framed(b"G", b"\x01"),
    hello(1, 2) + framed(b"G", struct.pack("<I", 1 << 30)),
    hello(1, 2) + framed(b"G", struct.pack("<II", 1, 7)),
    hello(1, 2) + hello(1, 2),
    hello(1, 2) + framed(b"F", b"\x80"),
    hello(1, 2) + framed(b"F", b'{"failure": "SystemExit", "text": "x"}'),
    hello(2, 2),
    hello(-1, 2),
    hello(1, 2, age="old"),
]


@pytest.mark.parametrize("number", range(len(BROKEN)))
def test_a_rank_that_sends_nonsense_ends_in_an_error_of_this_library(number):
    """It knows the id, so that the others may fail, in words; the next world of the id works."""
    given = ringcoll.unique_id("127.0.0.1")
    with proven(given) as link:
        link.sendall(BROKEN[number])
        found = together(
            [0], lambda rank: id_bootstrap(given, rank, 2, 0.5), lambda b: b.allgather(b"")
        )
    assert isinstance(found[0], ringcoll.Error)
    again = together(
        range(2), lambda rank: id_bootstrap(given, rank, 2, 20), lambda b: b.allgather(b"x")
    )
    assert again == every(2, b"x")


def test_random_bytes_of_a_rank_end_in_an_error_of_this_library():
    mixed = random.Random(7)
    given = ringcoll.unique_id("127.0.0.1")
    for _ in range(60):
        with proven(given) as link:
            whole = hello(1, 2) + framed(b"G", bytes(4) + b"x")
            cut = mixed.randrange(len(whole))
            link.sendall(whole[:cut] + mixed.randbytes(mixed.randrange(1, 60)))
            link.shutdown(socket.SHUT_WR)
            found = together(
                [0], lambda rank: id_bootstrap(given, rank, 2, 0.05), lambda b: b.allgather(b"")
            )
        assert isinstance(found[0], (ringcoll.Error, list))


ANSWERS = [
    framed(b"H", b"") + framed(b"G", b"\x07"),
    framed(b"H", b"") + framed(b"G", struct.pack("<Q", 9) + b"short"),
    framed(b"H", b"") + framed(b"?", b""),
    framed(b"H", b"") + FRAME.pack(b"G", 1 << 62),
    framed(b"H", b"") + framed(b"F", b"\xff"),
    framed(b"F", b"[]"),
    framed(b"H", b"") + framed(b"A", b"{"),
    framed(b"H", b"")[:4],
    b"",
]


@pytest.mark.parametrize("number", range(len(ANSWERS)))
def test_what_a_relay_answers_is_not_believed(number):
    listener = socket.create_server(("127.0.0.1", 0))
    ended = threading.Event()

    def lie():
        key, calls = b"ringcoll", []
        with contextlib.suppress(DeadlineError, OSError):
            calls = handshake.answer(listener, key, CALLED, {1}, time.monotonic() + 5)
            calls[0][1].setblocking(True)
            calls[0][1].sendall(ANSWERS[number])
        ended.wait(1.5)
        for _, link in calls:
            link.close()

    thread = threading.Thread(target=lie)
    thread.start()
    port = listener.getsockname()[1]
    found = together(
        [1], lambda rank: TcpBootstrap(rank, 2, "127.0.0.1", port, 1), lambda b: b.allgather(b"x")
    )
    assert isinstance(found[1], ringcoll.Error)
    ended.set()
    thread.join()


def test_two_that_claim_one_rank_are_both_named():
    given = ringcoll.unique_id("127.0.0.1")
    found = together(
        ["0", "1", "1 again"],
        lambda name: id_bootstrap(given, int(name[0]), 3, 20),
        lambda bootstrap: bootstrap.allgather(b"x"),
    )
    for error in found.values():
        assert isinstance(error, MismatchError)
        assert str(error).startswith("init: two processes are rank 1: process ")


def test_a_rank_that_comes_after_two_have_claimed_another_learns_it():
    given = ringcoll.unique_id("127.0.0.1")
    gone = threading.Barrier(3)

    def begin(name):
        if name == "0":
            gone.wait()
        return id_bootstrap(given, int(name[0]), 3, 20)

    def work(bootstrap):
        try:
            bootstrap.allgather(b"x")
        finally:
            if bootstrap.rank == 1:
                bootstrap.close()
                gone.wait()

    for error in together(["0", "1", "1 again"], begin, work).values():
        assert isinstance(error, MismatchError)
        assert str(error).startswith("init: two processes are rank 1: process ")


@pytest.mark.parametrize("again", [False, True])
def test_a_program_that_is_started_again_with_its_id_begins_anew(monkeypatch, again):
    """Rank 1 aborts; rank 0 comes late, or is of the program's next start."""
    given = ringcoll.unique_id("127.0.0.1")
    id_bootstrap(given, 1, 2, 20).fail(ValueError("no such file"))
    if again:
        monkeypatch.setattr(relayed, "_age", lambda: 0.0)
    ranks = [0, 1] if again else [0]
    found = together(ranks, lambda r: id_bootstrap(given, r, 2, 20), lambda b: b.allgather(b""))
    if again:
        assert found == every(2, b"")
    else:
        assert str(found[0]) == "rank 1 aborted: ValueError: no such file"


def test_an_address_that_does_not_answer_leaves_time_for_the_next():
    with socket.socket() as deaf, contextlib.ExitStack() as waiting:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        for _ in range(3):  # its queue is full: what comes after is not answered
            link = waiting.enter_context(socket.socket())
            link.setblocking(False)
            link.connect_ex(deaf.getsockname())
        given = ringcoll.unique_id("127.0.0.1")
        _, port, secret = given.split(":")
        at = [deaf.getsockname(), ("127.0.0.1", int(port))]
        bootstrap = relayed.RelayedBootstrap(0, 1, 4.0, "rank 0")
        bootstrap.reach(at, secret.encode())
        assert bootstrap.allgather(b"x") == [b"x"]
        bootstrap.close()


def test_a_name_of_this_host_is_reached_from_others(monkeypatch):
    """The name stands for the loopback interface here, as in many /etc/hosts."""
    monkeypatch.setattr(tcp, "resolved", {"here": ["127.0.1.1"]}.get)
    given = ringcoll.unique_id("here")
    assert given.startswith("here:")
    callers = tcp._serving[given]._callers
    assert callers is not None
    assert callers._listener.getsockname()[0] in ("0.0.0.0", "::")


def test_ranks_of_two_worlds_are_told_so():
    given = ringcoll.unique_id("127.0.0.1")
    found = together(
        [0, 1],
        lambda rank: id_bootstrap(given, rank, 2 + rank, 20),
        lambda bootstrap: bootstrap.allgather(b"x"),
    )
    for error in found.values():
        assert isinstance(error, MismatchError)
        assert "nranks=2" in str(error)
        assert "nranks=3" in str(error)


def test_an_id_without_its_secret_lets_nobody_in():
    given = ringcoll.unique_id("127.0.0.1")
    other = given[:-32] + "0" * 32
    with pytest.raises(DeadlineError, match=r"the id of .* has another secret: pass every rank"):
        id_bootstrap(other, 1, 2, 0.5)
    found = together(range(2), lambda r: id_bootstrap(given, r, 2, 20), lambda b: b.allgather(b""))
    assert found == every(2, b"")


def test_another_secret_ends_its_own_rank_soon_and_not_those_that_wait():
    given = ringcoll.unique_id("127.0.0.1")
    first = id_bootstrap(given, 0, 2, 20)
    with pytest.raises(MismatchError, match=r"rank 1 of 2: the id of .* has another secret: pass"):
        id_bootstrap(given[:-32] + "0" * 32, 1, 2, 60)  # long before its deadline
    second = id_bootstrap(given, 1, 2, 20)
    found = together([0, 1], [first, second].__getitem__, lambda b: b.allgather(b"x"))
    assert found == every(2, b"x")


def test_a_rank_that_waits_in_vain_hears_of_another_secret():
    given = ringcoll.unique_id("127.0.0.1")
    with pytest.raises(DeadlineError):
        id_bootstrap(given[:-32] + "0" * 32, 1, 2, 0.3)
    bootstrap = id_bootstrap(given, 0, 2, 0.5)
    with pytest.raises(DeadlineError, match=r"for rank 1: .* A caller with another secret was ref"):
        bootstrap.allgather(b"x")
    bootstrap.close()


def test_an_id_serves_many_worlds_in_a_row_failed_ones_too():
    given = ringcoll.unique_id("127.0.0.1")
    for size in (2, 3, 1):

        def begin(rank, size=size, timeout=20.0):
            return id_bootstrap(given, rank, size, timeout)

        found = together(range(size), begin, lambda b: b.allgather(b"x"))
        assert found == every(size, b"x")
        short = partial(begin, timeout=0.2)
        failed = together(range(1, size), short, lambda b: b.allgather(b""))
        assert all(isinstance(error, DeadlineError) for error in failed.values())


def test_an_id_whose_maker_has_ended_is_served_by_rank_0():
    made = f"127.0.0.1:{free_port()}:{'0123456789abcdef' * 2}"
    found = together(range(2), lambda r: id_bootstrap(made, r, 2, 20), lambda b: b.allgather(b"x"))
    assert found == every(2, b"x")
