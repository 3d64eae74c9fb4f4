"""IPv4 and IPv6 addresses: of ids, of listeners, of names; worlds that meet by each of them."""

from __future__ import annotations

import errno
import re
import socket
import time

import pytest

import ringcoll
from ringcoll.bootstrap import addresses as found_addresses
from ringcoll.bootstrap import relayed, tcp
from ringcoll.bootstrap.addresses import (
    addresses,
    bracketed,
    is_literal,
    is_own,
    listening_at,
    resolved,
    unbracketed,
)
from ringcoll.bootstrap.contract import Failure
from ringcoll.bootstrap.tcp import TcpBootstrap, id_bootstrap
from ringcoll.errors import ArgumentError, DeadlineError
from tests.adapters.ports import free_port
from tests.fabric.test_tcp_bootstrap import every, together

SECRET = "0123456789abcdef" * 2


def no_ipv6() -> str:
    """Why nobody can listen at ::1 here; "" where one can."""
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::1", 0))
    except OSError as error:
        return f"this machine has no ::1: {error}"
    return ""


ipv6 = pytest.mark.skipif(bool(no_ipv6()), reason=no_ipv6())


@pytest.fixture
def names(monkeypatch):
    """A resolver that knows these names, by their addresses, besides what it knew."""
    known: dict[str, list[str]] = {}
    plain = socket.getaddrinfo

    def look_up(host, port, *rest, **others):
        if host not in known:
            return plain(host, port, *rest, **others)
        if others.get("flags", 0) & socket.AI_NUMERICHOST:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [one for at in known[host] for one in plain(at, port, *rest, **others)]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return known


def meet(begin, nranks=2):
    return together(range(nranks), begin, lambda bootstrap: bootstrap.allgather(b"x"))


@pytest.mark.parametrize(
    ("given", "hosts"),
    [
        ("[::1]:7:", ["::1"]),
        ("[fd00::7],node1,10.0.0.1:7:", ["fd00::7", "node1", "10.0.0.1"]),
        ("10.0.0.1,[fe80::1%eth0]:7:", ["10.0.0.1", "fe80::1%eth0"]),
    ],
)
def test_the_hosts_of_an_id(given, hosts):
    assert tcp._parsed(given + SECRET)[1:3] == (hosts, 7)


@pytest.mark.parametrize("given", ["::1:7:", "[::1:7:", "::1]:7:", "[]:7:", "[::1]7:", "[a],:7:"])
def test_an_ipv6_address_without_its_brackets_is_refused(given):
    with pytest.raises(ArgumentError, match=r"brackets") as caught:
        id_bootstrap(given + SECRET, 0, 2, 1)
    assert SECRET not in str(caught.value)


def test_brackets_are_for_ipv6_addresses():
    hosts = ["node1", "10.0.0.1", "fd00::7"]
    assert [bracketed(host) for host in hosts] == ["node1", "10.0.0.1", "[fd00::7]"]
    assert [unbracketed(bracketed(host)) for host in hosts] == hosts
    assert [is_literal(host) for host in hosts] == [False, True, True]


def test_the_addresses_of_this_host_are_those_that_others_reach(monkeypatch, tmp_path):
    rows = [
        "fe8000000000000000fc00fffe000001 04 40 20 80     eth0",  # names a link alone
        "fd000000000000000000000000000002 04 40 00 82     eth0",
        "fd000000000000000000000000000003 04 40 00 c0     eth0",  # tentative
        "fd000000000000000000000000000004 04 40 00 88     eth0",  # another host's
        "00000000000000000000000000000001 01 80 10 80       lo",
    ]
    file = tmp_path / "if_inet6"
    monkeypatch.setattr(found_addresses, "_INTERFACES", file)
    plain = addresses()  # without the file there is no IPv6
    assert all(":" not in address for address in plain)
    file.write_text("\n".join(rows) + "\n")
    assert addresses() == [*plain, "fd00::2"]
    assert is_own("fd00:0:0::2")
    assert is_own("::1")
    assert not is_own("fd00::3")


def test_a_name_has_addresses_of_both_kinds_each_once(names):
    names["both"] = ["fd00::7", "10.0.0.1", "fd00::7", "fe80::1%1"]
    assert resolved("both") == ["fd00::7", "10.0.0.1", "fe80::1%1"]
    assert resolved("no such name") == ["no such name"]
    assert resolved("FD00:0::7") == ["fd00::7"]


def test_each_address_of_a_name_has_a_share_of_the_time(names, monkeypatch):
    names["both"] = ["fd00::7", "10.0.0.1"]
    asked = []

    def fail(address, until):
        asked.append(address)
        raise ConnectionRefusedError(address)

    monkeypatch.setattr(relayed, "_connect", fail)
    with pytest.raises(DeadlineError, match=r"rank 0, .* at both:7"):
        id_bootstrap(f"both:7:{SECRET}", 1, 2, 0.01)
    assert asked[:2] == [("fd00::7", 7), ("10.0.0.1", 7)]


def test_a_refusal_leaves_time_for_the_second_address_of_a_name(names, monkeypatch):
    names["both"] = ["fd00::7", "10.0.0.1"]
    began, turns = time.monotonic(), []

    def fail(address, until):
        turns.append(until - began)
        raise TimeoutError if len(turns) < 2 else ArgumentError("the second one, too")

    monkeypatch.setattr(relayed, "_connect", fail)
    with pytest.raises(ArgumentError, match="the second"):
        relayed.post([("both", 7)], b"", Failure("AbortedError", "x"), 4.0, 4.0)
    assert 0 < turns[0] < 3 < turns[1] < 5


@ipv6
@pytest.mark.parametrize("host", ["::1", "[::1]", "0:0:0:0:0:0:0:1"])
def test_a_world_meets_at_an_id_of_ipv6(host):
    made = ringcoll.unique_id(host)
    assert made.startswith(f"[{host.strip('[]')}]:")
    callers = tcp._serving[made]._callers
    assert callers is not None
    assert callers._listener.getsockname()[0] == "::1"  # closed to other hosts
    assert meet(lambda rank: id_bootstrap(made, rank, 2, 20)) == every(2, b"x")


@ipv6
@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_a_world_meets_at_an_address_of_ipv6(host):
    port = free_port()
    assert meet(lambda rank: TcpBootstrap(rank, 2, host, port, 20)) == every(2, b"x")
    with pytest.raises(DeadlineError, match=re.escape(f"rank 0 at [::1]:{port}")):
        TcpBootstrap(1, 2, host, port, 0.1)


@ipv6
def test_rank_0_serves_an_id_of_ipv6_whose_maker_has_ended():
    made = f"[::1]:{free_port()}:{SECRET}"
    assert meet(lambda rank: id_bootstrap(made, rank, 2, 20)) == every(2, b"x")


@ipv6
def test_a_communicator_begins_by_an_id_of_ipv6():
    made = ringcoll.unique_id("::1")
    with ringcoll.init(id=made, rank=0, nranks=1, device="cpu") as comm:
        assert comm.nranks == 1


@ipv6
def test_an_id_for_any_address_is_reached_by_both_kinds(monkeypatch):
    monkeypatch.setattr(tcp, "addresses", lambda: ["fd00::7"])  # of a host without IPv4's
    made = ringcoll.unique_id()
    assert made.startswith("[fd00::7]:")
    port, secret = made.split("]:")[1].split(":")
    at = ["127.0.0.1", "[::1]"]
    found = meet(lambda rank: id_bootstrap(f"{at[rank]}:{port}:{secret}", rank, 2, 20))
    assert found == every(2, b"x")


@ipv6
@pytest.mark.parametrize("known", [["::1"], ["::1", "127.0.0.1"]])
def test_a_world_meets_at_a_name_with_addresses_of_ipv6(names, known):
    names["six"] = known
    made, port = ringcoll.unique_id("six"), free_port()
    assert meet(lambda rank: id_bootstrap(made, rank, 2, 20)) == every(2, b"x")
    assert meet(lambda rank: TcpBootstrap(rank, 2, "six", port, 20)) == every(2, b"x")


@pytest.mark.parametrize("kind", [errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, None])
def test_a_host_without_ipv6_listens_by_ipv4(monkeypatch, kind):
    plain = socket.create_server

    def create(address, **options):
        if options.get("family") == socket.AF_INET6:
            raise ValueError("dualstack_ipv6") if kind is None else OSError(kind, "no IPv6")
        return plain(address, **options)

    monkeypatch.setattr(socket, "create_server", create)
    with listening_at(None, 0, 1) as listener:
        assert listener.getsockname()[0] == "0.0.0.0"


def test_a_port_that_is_taken_is_taken_for_both_kinds():
    with socket.create_server(("", 0)) as taken, pytest.raises(OSError, match="in use"):
        listening_at(None, taken.getsockname()[1], 1)


def test_a_rank_that_has_called_itself_leaves_the_port_to_rank_0(monkeypatch):
    """The kernel may give a caller the very port that it calls."""
    port = free_port()
    calls: list[object] = []
    selves: list[object] = []
    connect = socket.create_connection

    def own(address, seconds=None):
        calls.append(address)
        if len(calls) > 3:
            return connect(address, seconds)
        with socket.socket() as link:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            link.bind(address)
            link.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)  # as a caller's has it
            link.connect(address)
            selves.append(link.getpeername() == link.getsockname())
            return socket.socket(fileno=link.detach())

    monkeypatch.setattr(socket, "create_connection", own)

    def begin(rank):
        late = time.monotonic() + (0.0 if rank else 1.0)
        while len(calls) <= 3 and time.monotonic() < late:  # at the fourth the others have ended
            time.sleep(1e-3)
        return TcpBootstrap(rank, 2, "127.0.0.1", port, 20.0)

    assert together((0, 1), begin, lambda one: one.allgather(b"x")) == every(2, b"x")
    assert selves == [True] * 3


def test_a_connection_that_is_reset_at_once_is_closed(monkeypatch):
    """Then the system knows no address of its other end."""
    ends = []

    class Reset(socket.socket):
        def getpeername(self):
            ends.append(self)
            raise OSError(errno.ENOTCONN, "not connected")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        at = listener.getsockname()
        number = socket.create_connection(at).detach()
        monkeypatch.setattr(socket, "create_connection", lambda *_: Reset(fileno=number))
        with pytest.raises(OSError, match="not connected"):
            found_addresses.connected(at, 5.0)
    assert [end.fileno() for end in ends] == [-1]
