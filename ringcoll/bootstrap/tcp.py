"""Bootstraps over TCP: at an address that all ranks know, or by an id that one of them has made.

Where an id is used the ends of each connection prove to each other that they have its secret, which
never travels. An address alone authenticates nobody: use one of a trusted network. Lengths are
checked and nothing is unpickled; what strangers send costs them their connection.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import re
import time
from collections.abc import Callable, Mapping

from ringcoll.bootstrap.addresses import (
    addresses,
    bracketed,
    is_literal,
    is_loopback,
    is_own,
    resolved,
    unbracketed,
)
from ringcoll.bootstrap.contract import Failure, shortage, this_process, whole
from ringcoll.bootstrap.launcher import launched_rank, launcher_of
from ringcoll.bootstrap.relay import Relay
from ringcoll.bootstrap.relayed import (
    RelayedBootstrap,
    listening,
    post,
    serving,
)
from ringcoll.errors import ArgumentError, ArgumentTypeError, Error, MachineError

_OPEN = b"ringcoll"  # the key of those that have an address and no secret
_HOST = r"(?:[^:,\s\[\]]+|\[[^,\s\[\]]+\])"  # an IPv6 address is in brackets
_ID = re.compile(rf"({_HOST}(?:,{_HOST})*):(\d{{1,5}}):([0-9a-f]{{32}})")
_UNKEYED = re.compile(rf"{_HOST}(?:,{_HOST})*:\d{{1,5}}:?")
_SECRET = re.compile(r"[0-9a-fA-F]{12,}")  # of whatever length, where an id is malformed
_VARIABLES = ("RINGCOLL_ID", "RINGCOLL_RANK", "RINGCOLL_NRANKS")
_SAME_ID = "pass every rank the one id that ringcoll.unique_id() has returned"
_POSTING = 5.0  # seconds to report the error of a process that has no valid rank
_REFUSED = 0.5  # seconds of these where this host is to be called and nobody listens

_PARTING = 0.5  # seconds for all relays of a process to send what they have, when it ends

_serving: dict[str, Relay] = {}  # by the ids that this process serves, to its end
os.register_at_fork(after_in_child=_serving.clear)


def _end() -> None:
    """Let the relays send the last answers: their threads would end with the process."""
    late = time.monotonic() + _PARTING
    for relay in list(_serving.values()):
        relay.halt(max(0.0, late - time.monotonic()))


atexit.register(_end)


class TcpBootstrap(RelayedBootstrap):
    """One of the ranks that meet at ``host:port``; rank 0 listens there."""

    def __init__(self, rank: int, nranks: int, host: str, port: int, timeout: float) -> None:
        if not 0 < port < 1 << 16:
            raise ArgumentError(f"port={port}: wanted one from 1 to 65535, the same on all ranks")
        host = unbracketed(host)
        where = f"{bracketed(host)}:{port}"
        try:
            super().__init__(rank, nranks, timeout, f"rank 0 at {where}")
        except ArgumentError as error:
            with contextlib.suppress(OSError):  # the error itself is to be raised
                _post([host], port, _OPEN, error, timeout)
            raise
        if rank == 0:
            try:
                listener = listening((host, port), max(1, nranks))
            except OSError as error:
                raise shortage(error, 0) or MachineError(
                    f"init: rank 0 cannot listen at {where} ({error}): pass another host or port"
                ) from error
            self._relay = serving(listener, _OPEN, nranks)
        self.reach([(host, port)], _OPEN)


def unique_id(host: str | None = None) -> str:
    """A name for a world to be: one process makes it, and every rank passes it to ``init``.

    The ranks meet at this process, or at rank 0 if this process has ended by then and rank 0 is on
    its host. Hand the id over by any means that you trust: who has it can join.

    Args:
        host: the address or name by which the other ranks reach this host, such as "node1",
            "192.0.2.7" or "fd00::7"; None: all its addresses, IPv4's and IPv6's. "127.0.0.1" or
            "::1" keeps the port closed to other hosts.

    Returns:
        A text of one line: addresses, port and secret. IPv6 addresses are in brackets.

    Raises:
        MachineError: this process cannot listen at ``host``.

    Example:
        >>> text = ringcoll.unique_id("127.0.0.1")
        >>> comm = ringcoll.init(id=text, rank=0, nranks=1, device="cpu")
        >>> comm.nranks
        1
        >>> comm.close()

    """
    host = None if host is None else unbracketed(host)
    try:
        listener = listening((_bound(host), 0))
    except OSError as error:
        raise MachineError(f"unique_id: cannot listen at {host or 'any port'}: {error}") from error
    port, secret = listener.getsockname()[1], os.urandom(16).hex()
    hosts = [host] if host else addresses() or ["127.0.0.1"]
    made = f"{','.join(map(bracketed, hosts))}:{port}:{secret}"
    _serving[made] = serving(listener, secret.encode(), 0)
    return made


def id_bootstrap(
    given: str,
    rank: int,
    nranks: int,
    timeout: float,
    *,
    once: bool = False,
    news: Callable[[], object] = lambda: None,
    begun: float | None = None,
) -> RelayedBootstrap:
    """The ranks that have one id; ``once``: it serves this world alone, and rank 0 has made it.

    ``news`` is called between attempts to connect; what it raises ends them. ``timeout`` counts
    from ``begun`` on, a time of ``time.monotonic()``; None: from now on.
    """
    given, hosts, port, key = _parsed(given)
    maker = "" if once else ", or the process that made the id,"
    where = f"rank 0{maker} at {bracketed(hosts[0])}:{port}"
    relay = _serving.pop(given, None) if once else None
    bootstrap = RelayedBootstrap(rank, nranks, timeout, where, relay, begun)
    if rank == 0 and given not in _serving and not once:
        _serve_for_maker(given, hosts, port, key)
    bootstrap.local = _serving.get(given)
    if not once:
        bootstrap.unlike = (
            f"the id of the process that listens at port {port} has another secret: {_SAME_ID}"
        )
        bootstrap.advice = "did every rank call init(), with the id of this start, not an old one?"
    return bootstrap.reach([(host, port) for host in hosts], key, news)


def post_refusal(given: object, error: Error, timeout: float) -> None:
    """Report to the ranks that meet by an id that this process has no valid rank for it."""
    _, hosts, port, key = _parsed(given)
    _post(hosts, port, key, error, timeout)


def _post(hosts: list[str], port: int, key: bytes, error: Error, timeout: float) -> None:
    origin = this_process()
    text = f"{origin} aborted: {type(error).__name__}: {error}"
    post(
        [(host, port) for host in hosts],
        key,
        Failure("AbortedError", text, origin),
        min(timeout, _POSTING),
        _REFUSED if all(map(is_own, hosts)) else _POSTING,
    )


def _parsed(given: object) -> tuple[str, list[str], int, bytes]:
    """An id without spaces around it, its hosts, its port and its secret."""
    given = given.strip() if isinstance(given, str) else given  # a file's last line ends
    found = _ID.fullmatch(given) if isinstance(given, str) else None
    if found is None or not 0 < int(found[2]) < 1 << 16:
        shown = _SECRET.sub("…", repr(given))
        source, why = os.environ.get(_VARIABLES[0], "").strip(), ""
        by = ", by RINGCOLL_ID" if source and given == source else ""
        if isinstance(given, str) and _UNKEYED.fullmatch(given):
            why = "the secret after the port is missing: "
        elif isinstance(given, str) and (given.count(":") > 2 or {"[", "]"} & set(given)):
            why = "an IPv6 address stands in brackets: "
        raise ArgumentError(
            f"init: id={shown}{by}: {why}wanted the whole line that ringcoll.unique_id() has "
            "returned on one rank, address:port:secret"
        )
    return found[0], list(map(unbracketed, found[1].split(","))), int(found[2]), found[3].encode()


def _bound(host: str | None) -> str | None:
    """Where to listen for those who know this host by a name or an address; None: everywhere.

    A host's own name may stand for its loopback interface there, and for another elsewhere, and for
    addresses of several kinds.
    """
    if host is None or host == "localhost" or is_literal(host):
        return host
    found = resolved(host)
    return None if len(found) > 1 or is_loopback(found[0]) else host


def _serve_for_maker(given: str, hosts: list[str], port: int, key: bytes) -> None:
    """Listen at an id's port where its maker has ended and this is its host."""
    if not any(map(is_own, hosts)):
        return
    try:
        listener = listening((_bound(hosts[0] if len(hosts) == 1 else None), port))
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
            text = f"init: rank 0 cannot listen at port {port}: {error}"
            raise shortage(error, 0) or MachineError(text) from error
        return
    _serving[given] = serving(listener, key, 0)


def id_of(
    given: str | None, rank: int | None, nranks: int | None, environ: Mapping[str, str]
) -> tuple[str, int, int] | None:
    """Id, rank and nranks, as given or as the environment has them; None where there is no id.

    A rank without RINGCOLL_RANK is the launcher's.
    """
    text = given or environ.get(_VARIABLES[0]) or None
    if text is None:
        for variable in _VARIABLES[1:]:
            if environ.get(variable):
                raise ArgumentError(
                    f"init: {variable}={environ[variable]!r} is set, but RINGCOLL_ID is missing: "
                    "set it to what ringcoll.unique_id() has returned on one rank, or unset "
                    f"{variable}"
                )
        if rank is not None or nranks is not None:
            raise ArgumentError(
                f"init: rank={rank}, nranks={nranks} without an id: pass id=, what "
                "ringcoll.unique_id() has returned on one rank, or set RINGCOLL_ID; or leave both "
                "out and start by mpiexec or torchrun, or let ringcoll.spawn start threads"
            )
        return None
    launcher = launcher_of(environ)
    found = {
        "rank": (rank, launched_rank(environ), "RANK"),
        "nranks": (nranks, launcher and launcher.nranks, "WORLD_SIZE"),
    }
    numbers, sources = [], []
    for (name, (own, launched, last)), variable in zip(found.items(), _VARIABLES[1:], strict=True):
        words = {
            "": own,
            variable: environ.get(variable) or None,
            "the launcher": launched,
            last: environ.get(last),
        }
        source, word = next((one for one in words.items() if one[1] is not None), ("", None))
        sources += [f"{name} by {source}"] if source else []
        number = int(word) if isinstance(word, str) and word.isdecimal() else whole(word)
        if number is None:
            kind = ArgumentError if word is None or isinstance(word, str) else ArgumentTypeError
            what = f"init: {name}={word!r} with an id" + (f", by {source}" if source else "")
            if word is None and not given:
                what = f"init: RINGCOLL_ID is set, but {variable} is missing"
            remedy = f"pass {name}= as an integer"
            if word is None:
                remedy += f", or set {variable}"
            elif source and source != "the launcher":
                remedy = f"wanted an integer: correct {source}, or pass {name}="
            raise kind(f"{what}: {remedy}")
        numbers.append(number)
    if not 0 <= numbers[0] < numbers[1]:
        by = f" ({', '.join(sources)})" if sources else ""
        raise ArgumentError(
            f"init: rank={numbers[0]}, nranks={numbers[1]}: wanted 0 <= rank < nranks{by}"
        )
    return text, numbers[0], numbers[1]
