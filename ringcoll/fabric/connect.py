"""One TCP connection between each two processes of different nodes, made once the ranks have met.

Each rank listens, and says over the bootstrap where, with random bytes; the higher rank of a pair
calls the lower one. Both prove (see :mod:`ringcoll.fabric.handshake`) that they know the random
bytes of all ranks, so that nobody else on the network can take a rank's place. Where all ranks
share a network namespace they listen on the loopback interface alone.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ringcoll.bootstrap.contract import Bootstrap
from ringcoll.errors import DeadlineError, Error, MachineError
from ringcoll.fabric.handshake import PATIENCE, answer, prove
from ringcoll.fabric.links import Link

__all__ = ["connect"]

_SIOCGIFADDR = 0x8915
_TEXT = 500


class Known:
    """The connections that a process has, by the random bytes that name the other process."""

    def __init__(self) -> None:
        self.own = secrets.token_hex(16)
        self.links: dict[str, Link] = {}

    def alive(self) -> list[str]:
        """Whose connections still hold."""
        for link in self.links.values():
            link.pump()
        self.links = {name: link for name, link in self.links.items() if not link.broken}
        return list(self.links)

    def forked(self) -> None:
        """This process is a child: another one, which must not hold the parent's open."""
        for link in self.links.values():
            link.close()
        self.own, self.links = secrets.token_hex(16), {}


_KNOWN = Known()
os.register_at_fork(after_in_child=_KNOWN.forked)


def connect(
    bootstrap: Bootstrap, nodes: Sequence[int], timeout: float, known: Known = _KNOWN
) -> dict[int, Link]:
    """The connections of this rank to all ranks of other nodes; collective.

    Two processes that are connected already, and both say so, stay with that.

    Args:
        bootstrap: the ranks.
        nodes: the node of each.
        timeout: seconds; may be ``math.inf``.
        known: this process's connections.

    Raises:
        DeadlineError: a rank was not reached in time; it is named.
        MachineError: there is no way from here to a rank, or another rank has failed.

    """
    rank, deadline = bootstrap.rank, time.monotonic() + timeout
    far = [peer for peer, node in enumerate(nodes) if node != nodes[rank]]
    door = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    links: dict[int, Link] = {}
    failure: Error | None = None
    with door:
        own: dict[str, Any] = {
            "network": _network(),
            "token": secrets.token_hex(32),
            "host": socket.gethostname(),
        }
        alone = len(set(_gathered(bootstrap, own["network"]))) == 1
        door.bind(("127.0.0.1" if alone else "", 0))
        door.listen(len(nodes))
        own["addresses"] = ["127.0.0.1"] if alone else _addresses()
        own |= {"process": known.own, "connected": known.alive()}
        said = _gathered(bootstrap, {**own, "port": door.getsockname()[1], "pid": os.getpid()})
        key = hashlib.sha256("".join(str(other["token"]) for other in said).encode()).digest()
        for peer in far:
            other = said[peer]
            if other["process"] in own["connected"] and known.own in other["connected"]:
                links[peer] = known.links[other["process"]]
        kept = set(links)
        try:
            for peer in (peer for peer in far if peer < rank and peer not in kept):
                links[peer] = Link(_call(said[peer], key, rank, peer, deadline), _name(said[peer]))
            higher = {peer for peer in far if peer > rank and peer not in kept}
            for peer, connection in answer(door, key, rank, higher, deadline):
                links[peer] = Link(connection, _name(said[peer]))
        except Error as error:
            failure = error
        except OSError as error:
            failure = MachineError(f"init: rank {rank} cannot connect to other nodes: {error}")
        try:
            outcomes = _gathered(bootstrap, None if failure is None else str(failure)[:_TEXT])
            if failure is not None:
                raise failure
            for peer, text in enumerate(outcomes):
                if text is not None:
                    raise MachineError(f"init: rank {peer} failed: {text}")
        except Error:
            for peer in set(links) - kept:
                links[peer].close()
            raise
    known.links |= {str(said[peer]["process"]): link for peer, link in links.items()}
    return links


def _gathered(bootstrap: Bootstrap, value: object) -> list[Any]:
    return [json.loads(part) for part in bootstrap.allgather(json.dumps(value).encode())]


def _network() -> str:
    """What tells one network namespace of one running host from all others."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/net').stat().st_ino}"


def _addresses() -> list[str]:
    """The IPv4 addresses of this host's interfaces, the loopback interface's left out."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # an interface without an address
            address = socket.inet_ntoa(answer[20:24])
            if not address.startswith("127."):
                found.append(address)
    return found


def _name(said: Mapping[str, Any]) -> str:
    return f"process {said['pid']} on host {said['host']}"


def _call(
    said: Mapping[str, Any], key: bytes, rank: int, peer: int, deadline: float
) -> socket.socket:
    """Call a lower rank at each of its addresses until one answers."""
    errors: list[str] = []
    while True:
        for address in said["addresses"]:
            left = deadline - time.monotonic()
            if left <= 0:
                raise DeadlineError(
                    f"init: rank {rank} did not reach rank {peer}, {_name(said)}, in time: "
                    f"{'; '.join(errors[-3:]) or 'no answer'}"
                )
            try:
                to = str(address), int(said["port"])
                connection = socket.create_connection(to, min(left, PATIENCE))
            except OSError as error:
                errors.append(f"{address}: {error}")
                continue
            until = time.monotonic() + min(left, PATIENCE)
            try:
                prove(connection, key, rank, peer, until)
            except OSError as error:
                connection.close()
                errors.append(f"{address}: {error}")
                continue
            return connection
        if not said["addresses"]:
            raise MachineError(f"init: rank {peer}, {_name(said)}, has no address to call it at")
        time.sleep(0.01)
