"""Ranks that meet at a port of the loopback device; each is a thread here."""

from __future__ import annotations

import socket
import struct
import threading

import pytest

from ringcoll.bootstrap.tcp import TcpBootstrap
from ringcoll.errors import ArgumentError, DeadlineError, MachineError, RankLostError
from tests.adapters.ports import free_port


def met(nranks, work, *, timeout=20.0, ranks=None):
    """What ``work(bootstrap)`` returned or raised, by rank."""
    port = free_port()
    found = {}

    def rank(number):
        try:
            bootstrap = TcpBootstrap(number, nranks, "127.0.0.1", port, timeout)
            try:
                found[number] = work(bootstrap)
            finally:
                bootstrap.close()
        except Exception as error:
            found[number] = error

    threads = [threading.Thread(target=rank, args=(r,)) for r in ranks or range(nranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("nranks", [1, 2, 5])
def test_bytes_of_any_length_in_rank_order(nranks):
    def work(bootstrap):
        first = bootstrap.allgather(bytes([bootstrap.rank]) * (1 << 10 * (bootstrap.rank % 3)))
        return [len(part) for part in first], bootstrap.allgather(b"")

    lengths = [1 << 10 * (rank % 3) for rank in range(nranks)]
    assert met(nranks, work) == dict.fromkeys(range(nranks), (lengths, [b""] * nranks))


def test_a_rank_that_does_not_come_is_named():
    found = met(3, lambda bootstrap: bootstrap.allgather(b"x"), timeout=0.5, ranks=[0, 2])
    assert isinstance(found[0], DeadlineError)
    assert str(found[0]).endswith("for rank 1")
    assert isinstance(found[2], (DeadlineError, RankLostError))


def test_without_rank_0_nobody_waits_for_ever():
    found = met(2, lambda bootstrap: None, timeout=0.3, ranks=[1])
    assert isinstance(found[1], DeadlineError)
    assert "to reach rank 0 at 127.0.0.1:" in str(found[1])


def test_a_rank_that_leaves_is_named():
    def work(bootstrap):
        if bootstrap.rank != 1:
            bootstrap.allgather(b"x")

    found = met(2, work)
    assert isinstance(found[0], RankLostError)
    assert "rank 1 has closed its connection" in str(found[0])


def test_strangers_are_turned_away():
    port = free_port()
    results = []
    ready = threading.Event()

    def listen():
        ready.set()
        bootstrap = TcpBootstrap(0, 2, "127.0.0.1", port, 20)
        results.append(bootstrap.allgather(b"0"))
        bootstrap.close()

    thread = threading.Thread(target=listen)
    thread.start()
    ready.wait()
    wrong = [b"GET / HTTP/1.1\r\n\r\n".ljust(24), struct.pack("<8sQQ", b"ringcoll", 1, 3)]
    wrong.append(struct.pack("<8sQQ", b"ringcoll", 0, 2))
    for words in wrong:
        while True:
            try:
                link = socket.create_connection(("127.0.0.1", port))
                break
            except ConnectionRefusedError:
                continue
        link.sendall(words)
        assert link.recv(1) == b""  # closed by rank 0
        link.close()
    bootstrap = TcpBootstrap(1, 2, "127.0.0.1", port, 20)
    assert bootstrap.allgather(b"1") == [b"0", b"1"]
    bootstrap.close()
    thread.join()
    assert results == [[b"0", b"1"]]


@pytest.mark.parametrize("answer", [b"\x07", struct.pack("<Q", 9) + b"short"])
def test_a_truncated_answer_is_not_believed(answer):
    listener = socket.create_server(("127.0.0.1", 0))

    def lie():
        link, _ = listener.accept()
        link.recv(1 << 10)
        link.sendall(struct.pack("<Q", len(answer)) + answer)
        link.recv(1 << 10)
        link.close()

    thread = threading.Thread(target=lie)
    thread.start()
    bootstrap = TcpBootstrap(1, 2, "127.0.0.1", listener.getsockname()[1], 20)
    with pytest.raises(MachineError, match="truncated"):
        bootstrap.allgather(b"x")
    bootstrap.close()
    with pytest.raises(MachineError, match="are closed"):
        bootstrap.allgather(b"x")
    thread.join()
    listener.close()


def test_no_such_rank_or_port():
    with pytest.raises(ArgumentError, match="rank 3 of 2"):
        TcpBootstrap(3, 2, "127.0.0.1", 13333, 1)
    with pytest.raises(ArgumentError, match="port=0"):
        TcpBootstrap(0, 2, "127.0.0.1", 0, 1)
