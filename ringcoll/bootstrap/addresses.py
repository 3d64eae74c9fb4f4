"""Addresses of hosts, IPv4's and IPv6's: which this host has, what a name stands for; TCP to them.

In a text an IPv6 address that a port follows stands in brackets: ``[::1]:5000``.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import struct
from pathlib import Path

__all__ = [
    "addresses",
    "bracketed",
    "connected",
    "is_literal",
    "is_loopback",
    "is_own",
    "listening_at",
    "resolved",
    "unbracketed",
]

_SIOCGIFADDR = 0x8915
_INTERFACES = Path("/proc/net/if_inet6")
_GLOBAL, _SITE = 0x00, 0x40  # scopes of IPv6 addresses that other hosts can reach by these alone
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER of 0 s: close() resets, and no TIME_WAIT follows
_UNUSABLE = 0x40 | 0x08  # flags: tentative, and taken by another host


def addresses() -> list[str]:
    """The addresses of this host's interfaces by which others reach it: IPv4's, then IPv6's.

    Those of the loopback interface are left out, and those of IPv6 that name a link alone (fe80::):
    their callers would have to name an interface of their own.
    """
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(query, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # an interface without an address
            found.append(socket.inet_ntoa(answer[20:24]))
    try:
        lines = _INTERFACES.read_text().splitlines()
    except OSError:
        lines = []  # a kernel without IPv6
    for line in lines:
        number, _, _, scope, flags, _ = line.split()
        if int(scope, 16) in (_GLOBAL, _SITE) and not int(flags, 16) & _UNUSABLE:
            found.append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(number)))
    return [address for address in found if not is_loopback(address)]


def is_loopback(address: str) -> bool:
    """Whether an address is one of the loopback interface."""
    return address.startswith("127.") or address == "::1"


def bracketed(host: str) -> str:
    """A name or an address as it stands before ``:port``."""
    return f"[{host}]" if ":" in host else host


def unbracketed(host: str) -> str:
    """A name or an address without the brackets that an IPv6 address may have."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def is_literal(host: str) -> bool:
    """Whether this is an address, not a name."""
    try:
        return bool(socket.getaddrinfo(host, None, flags=socket.AI_NUMERICHOST))
    except (OSError, UnicodeError):
        return False


def resolved(host: str) -> list[str]:
    """The addresses of a name, in the order in which to try them; an address: itself.

    The name itself where it has none: whoever calls or listens there gets the resolver's error.
    """
    try:
        found = [place for *_, place in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    except (OSError, UnicodeError):
        return [host]
    # The fourth word is the interface of an address that names a link alone.
    names = [f"{at[0]}%{at[3]}" if len(at) == 4 and at[3] else str(at[0]) for at in found]
    return list(dict.fromkeys(names))


def is_own(host: str) -> bool:
    """Whether a name or an address is of this host."""
    own = addresses()
    return any(is_loopback(address) or address in own for address in resolved(host))


def connected(address: tuple[str | None, int], seconds: float | None) -> socket.socket:
    """A connection to a listener; ``seconds``: until it must be there.

    Where nobody listens at a port of its own range, the kernel may give the caller that very port,
    and connects it to itself: once in some 14,000 attempts at an even port. Such a connection would
    keep rank 0 from listening there, and is refused.
    """
    link = socket.create_connection(address, seconds)
    try:
        if link.getsockname() == link.getpeername():
            link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except BaseException:
        link.close()
        raise
    return link


def listening_at(host: str | None, port: int, backlog: int) -> socket.socket:
    """A listener at an address, or with None at every address of both kinds.

    Of a name's addresses it is the first, IPv4's before IPv6's: callers try them all.
    """
    if host is None:
        try:
            return socket.create_server(
                ("::", port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True
            )
        except ValueError:
            pass  # Python's answer where there is no IPv6
        except OSError as error:
            if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                raise
        return socket.create_server(("", port), backlog=backlog)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise OSError(f"no name of a host: {error}") from error
    family, *_, place = min(found, key=lambda one: one[0] == socket.AF_INET6)
    return socket.create_server(place, family=family, backlog=backlog)
