"""The id, the rank and the number of ranks that a process is given; who is given wrong ones."""

from __future__ import annotations

import math
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import ringcoll
from ringcoll.bootstrap import bootstrap_of, relay, relayed
from ringcoll.bootstrap.contract import Failure
from ringcoll.bootstrap.tcp import TcpBootstrap, id_bootstrap, id_of
from ringcoll.errors import (
    AbortedError,
    ArgumentError,
    ArgumentTypeError,
    DeadlineError,
    MachineError,
)
from tests.adapters.ports import free_port
from tests.fabric.test_tcp_bootstrap import every, together

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "given", ["", "x", "127.0.0.1:1", "127.0.0.1:0:" + "0" * 32, 7, "a b:1:" + "0" * 32]
)
def test_what_is_no_id_is_refused(given):
    with pytest.raises(ArgumentError, match="unique_id"):
        id_bootstrap(given, 0, 2, 1)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("127.0.0.1:33773", "the secret after the port is missing: wanted the whole line"),
        ("[::1],127.0.0.1:33773:", "the secret after the port is missing: "),
        ("fd00::7:5000:" + "0" * 32, "an IPv6 address stands in brackets: "),
        ("host", "wanted the whole line that ringcoll.unique_id"),
    ],
)
def test_an_id_of_the_environment_says_what_is_wrong_with_it(monkeypatch, given, said):
    monkeypatch.setenv("RINGCOLL_ID", given)
    with pytest.raises(ArgumentError, match=rf"init: id='.*', by RINGCOLL_ID: {said}"):
        bootstrap_of(timeout=1, rank=0, nranks=2)


ENDING = """
import time
import ringcoll
from ringcoll.bootstrap import relay
from ringcoll.bootstrap.tcp import id_bootstrap

plain = relay.Relay._send

def late(self, link, kind, payload):
    if kind is relay.Kind.GATHER and link.rank == 1:
        time.sleep(0.3)
    plain(self, link, kind, payload)

relay.Relay._send = late
made = ringcoll.unique_id("127.0.0.1")
print(made, flush=True)
id_bootstrap(made, 0, 2, 20).allgather(b"0")
"""


def test_a_maker_that_ends_behind_the_last_exchange_still_answers_the_others():
    with subprocess.Popen(
        [sys.executable, "-c", ENDING], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as maker:
        assert maker.stdout is not None
        bootstrap = id_bootstrap(maker.stdout.readline(), 1, 2, 20)
        assert bootstrap.allgather(b"1") == [b"0", b"1"]
        bootstrap.close()
    assert maker.returncode == 0


def test_an_id_whose_maker_has_ended_asks_for_the_id_of_this_start():
    old = f"127.0.0.1:{free_port()}:{'0' * 32}"
    with pytest.raises(DeadlineError, match="with the id of this start, not an old one"):
        id_bootstrap(old, 1, 2, 0.3)


def test_the_timeout_that_is_told_is_the_one_given_though_part_of_it_has_passed():
    old = f"127.0.0.1:{free_port()}:{'0' * 32}"
    begun = time.monotonic() - 999.7
    with pytest.raises(DeadlineError, match=r"rank 1 of 2 tried 1e\+03 s to reach"):
        id_bootstrap(old, 1, 2, 1000.0, begun=begun)


def test_rank_and_nranks_come_with_the_id_or_from_the_environment():
    assert id_of("i", 1, 2, {}) == ("i", 1, 2)
    assert id_of(None, None, None, {}) is None
    assert id_of(None, None, None, {"RINGCOLL_ID": ""}) is None
    own = {"RINGCOLL_ID": "e", "RINGCOLL_RANK": "3", "RINGCOLL_NRANKS": "4"}
    assert id_of(None, None, None, own) == ("e", 3, 4)
    assert id_of("i", 0, None, own) == ("i", 0, 4)
    assert id_of("i", None, None, {"PMI_RANK": "1", "PMI_SIZE": "2"}) == ("i", 1, 2)
    assert id_of("i", None, None, {"RANK": "1", "WORLD_SIZE": "2"}) == ("i", 1, 2)
    with pytest.raises(ArgumentError, match=r"without an id: .*mpiexec or torchrun, or .*spawn"):
        id_of(None, 0, 2, {})
    with pytest.raises(ArgumentError, match="RINGCOLL_RANK"):
        id_of("i", None, 2, {})
    with pytest.raises(ArgumentError, match="rank='0x' with an id, by RINGCOLL_RANK: wanted an "):
        id_of("i", None, 2, {"RINGCOLL_RANK": "0x"})
    with pytest.raises(ArgumentError, match=r"integer: correct RINGCOLL_RANK, or pass rank=$"):
        id_of("i", None, 2, {"RINGCOLL_RANK": "x"})
    with pytest.raises(ArgumentError, match="nranks='-2' with an id, by WORLD_SIZE: wanted an"):
        id_of("i", 0, None, {"WORLD_SIZE": "-2"})
    with pytest.raises(ArgumentError, match=r"\(rank by RANK, nranks by WORLD_SIZE\)"):
        id_of("i", None, None, {"RANK": "2", "WORLD_SIZE": "2"})
    with pytest.raises(ArgumentTypeError, match="rank=True"):
        id_of("i", True, 2, {})
    with pytest.raises(ArgumentTypeError, match=r"nranks=2\.0"):
        id_of("i", 0, 2.0, {})  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"0 <= rank < nranks"):
        id_of("i", 2, 2, {})
    with pytest.raises(ArgumentError, match="leave out id"):
        bootstrap_of(object(), timeout=1, id="i")


@pytest.mark.parametrize("variable", ["RINGCOLL_RANK", "RINGCOLL_NRANKS"])
def test_rank_or_nranks_of_the_environment_without_an_id_name_what_is_missing(variable):
    with pytest.raises(ArgumentError, match=rf"{variable}='1' is set, but RINGCOLL_ID is missing"):
        id_of(None, None, None, {variable: "1"})
    assert id_of(None, None, None, {variable: ""}) is None
    environ = {"RINGCOLL_ID": "i", "RINGCOLL_RANK": "0", "RINGCOLL_NRANKS": "2"}
    with pytest.raises(ArgumentError, match=rf"RINGCOLL_ID is set, but {variable} is missing"):
        id_of(None, None, None, {**environ, variable: ""})


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(
    ("rank", "nranks", "text"),
    [(2, 2, "rank=2, nranks=2: wanted 0 <= rank < nranks"), (None, 2, "rank=None with an id")],
)
def test_a_rank_out_of_range_ends_the_init_of_the_others(first, rank, nranks, text):
    given = ringcoll.unique_id("127.0.0.1")
    began = threading.Event()

    def wrong():
        with pytest.raises(ArgumentError, match=text):
            bootstrap_of(timeout=20, id=given, rank=rank, nranks=nranks)

    def join(number):
        bootstrap = bootstrap_of(timeout=20, id=given, rank=number, nranks=3)
        began.set()
        return bootstrap

    late = threading.Thread(target=lambda: (began.wait(), wrong()))
    wrong() if first else late.start()
    found = together([0, 1], join, lambda bootstrap: bootstrap.allgather(b"x"))
    for error in found.values():
        assert isinstance(error, AbortedError)
        assert re.match(f"process .* aborted: ArgumentError: init: {text}", str(error))
    if not first:
        late.join()
    # The id serves the next world.
    found = together(range(2), lambda r: id_bootstrap(given, r, 2, 20), lambda b: b.allgather(b"x"))
    assert found == every(2, b"x")


def refuse(given):
    """``init`` of a process that was given a wrong rank."""
    with pytest.raises(ArgumentError, match="rank=7, nranks=2"):
        bootstrap_of(timeout=20, id=given, rank=7, nranks=2)


def meet(given):
    return together(range(2), lambda r: id_bootstrap(given, r, 2, 20), lambda b: b.allgather(b"x"))


def test_a_rank_out_of_range_between_two_worlds_of_a_program_ends_neither():
    given = ringcoll.unique_id("127.0.0.1")
    assert meet(given) == every(2, b"x")
    refuse(given)
    assert meet(given) == every(2, b"x")
    assert meet(given) == every(2, b"x")


@pytest.mark.parametrize("between", [False, True])
def test_a_rank_that_corrects_itself_meets_the_others(between):
    """Its refusal ends no world that it begins itself; a rank that comes in between learns it."""
    given = ringcoll.unique_id("127.0.0.1")
    refused, learnt, corrected = (threading.Event() for _ in range(3))

    def begin(rank):
        if rank == 0:
            refuse(given)
            refused.set()
            assert not between or learnt.wait(20)
        elif between:
            assert refused.wait(20)
            first = id_bootstrap(given, rank, 2, 20)
            with pytest.raises(AbortedError, match=r"^process .* aborted: .*rank=7, nranks=2"):
                first.allgather(b"x")
            first.close()
            learnt.set()
        assert rank == 0 or corrected.wait(20)
        bootstrap = id_bootstrap(given, rank, 2, 20)
        corrected.set()
        return bootstrap

    assert together(range(2), begin, lambda b: b.allgather(b"x")) == every(2, b"x")


def test_a_rank_out_of_range_concerns_no_rank_that_comes_much_later(monkeypatch):
    monkeypatch.setattr(relay, "_KEPT", 0.0)
    given = ringcoll.unique_id("127.0.0.1")
    refuse(given)
    assert meet(given) == every(2, b"x")


def test_a_kept_failure_concerns_a_program_that_began_after_the_last_world():
    failure = Failure("AbortedError", "process 1 aborted")
    session = relay._Session(failure=failure, failed=2.0, since=1.0)
    assert [session.concerns(begun) for begun in (0.5, 1.5, 2.5)] == [False, True, False]
    session.lapses = -math.inf
    assert not session.concerns(1.5)
    session.links[0] = relay._Link(socket.socket())  # one rank has learnt it: the others must
    assert session.concerns(1.5)
    session.links[0].connection.close()


@pytest.mark.parametrize(("host", "seconds"), [("127.0.0.1", 0.5), ("192.0.2.1", 5.0)])
def test_a_wrong_rank_is_soon_reported_where_this_host_refuses(monkeypatch, host, seconds):
    """The clock is the test's own: each attempt that fails costs nothing but the pause after it."""
    pauses: list[float] = []

    def fail(address, until):
        raise ConnectionRefusedError(address)

    class Clock:
        sleep = pauses.append

        @staticmethod
        def monotonic():
            return sum(pauses)

    monkeypatch.setattr(relayed, "_connect", fail)
    monkeypatch.setattr(relayed, "time", Clock)
    refuse(f"{host}:1:{'0' * 32}")
    assert seconds <= sum(pauses) <= seconds + 2 * relayed._LAST


def test_a_rank_out_of_range_by_address_ends_the_init_of_the_others():
    port = free_port()

    def begin(rank):
        return TcpBootstrap(rank, 2, "127.0.0.1", port, 20)

    found = together([0, 2], begin, lambda bootstrap: bootstrap.allgather(b"x"))
    assert isinstance(found[0], AbortedError)
    assert "rank 2 of 2" in str(found[0])
    assert isinstance(found[2], ArgumentError)


def test_no_such_rank_or_port():
    with pytest.raises(ArgumentError, match="rank 3 of 2"):
        TcpBootstrap(3, 2, "127.0.0.1", 13333, 1)
    with pytest.raises(ArgumentError, match="port=0"):
        TcpBootstrap(0, 2, "127.0.0.1", 0, 1)


def test_a_port_that_is_taken_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(MachineError, match=rf"rank 0 cannot listen at 127\.0\.0\.1:{port}"):
            TcpBootstrap(0, 2, "127.0.0.1", port, 1)


def test_a_refused_id_shows_no_secret():
    secret = "0123456789abcdef" * 2
    with pytest.raises(ArgumentError, match=r"127\.0\.0\.1:port") as caught:
        id_bootstrap(f"127.0.0.1:port:{secret}", 0, 1, 1.0)
    assert secret[:12] not in str(caught.value)


def test_an_id_from_a_file_ends_with_its_line():
    made = ringcoll.unique_id("127.0.0.1")
    bootstrap = id_bootstrap(f"{made}\n", 0, 1, 20.0)
    assert bootstrap.allgather(b"x") == [b"x"]
    bootstrap.close()
