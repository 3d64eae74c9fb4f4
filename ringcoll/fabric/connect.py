"""One TCP connection between each two processes of different nodes, made by the bootstrap.

Each rank listens and sends its addresses over the bootstrap, with random bytes; the higher rank of
a pair connects to the lower one. Both prove (see :mod:`ringcoll.bootstrap.handshake`) that they
know the random bytes of all ranks, so that nobody else on the network can take a rank's place.
Where all ranks share a network namespace they listen on the loopback interface alone.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ringcoll.bootstrap.addresses import addresses, bracketed, listening_at
from ringcoll.bootstrap.contract import Bootstrap, exchange_values
from ringcoll.bootstrap.handshake import PATIENCE, answer, prove
from ringcoll.errors import DeadlineError, Error, MachineError
from ringcoll.fabric.identity import boot_id
from ringcoll.fabric.links import Link
from ringcoll.fabric.mapping import outcome, texts_of


class Connections:
    """A process's connections, by the random bytes that name the other process."""

    def __init__(self) -> None:
        self.own = secrets.token_hex(16)
        self.links: dict[str, Link] = {}

    def alive(self) -> list[str]:
        """The processes whose connections hold."""
        for link in self.links.values():
            link.pump()
        self.links = {name: link for name, link in self.links.items() if not link.broken}
        return list(self.links)

    def forked(self) -> None:
        """This process is a child: it must not hold the parent's connections open."""
        for link in self.links.values():
            link.close()
        self.own, self.links = secrets.token_hex(16), {}


_CONNECTIONS = Connections()
os.register_at_fork(after_in_child=_CONNECTIONS.forked)


def connect(
    bootstrap: Bootstrap,
    nodes: Sequence[int],
    timeout: float,
    connections: Connections = _CONNECTIONS,
) -> dict[int, Link]:
    """The connections of this rank to all ranks of other nodes; collective.

    A connection that both processes still have is used again.
    """
    rank, deadline = bootstrap.rank, time.monotonic() + timeout
    far = [peer for peer, node in enumerate(nodes) if node != nodes[rank]]
    links: dict[int, Link] = {}
    failure: Error | None = None
    own: dict[str, Any] = {
        "network": _network(),
        "token": secrets.token_hex(32),
        "host": socket.gethostname(),
    }
    networks = exchange_values(bootstrap, [own["network"]], (str,))
    alone = len({network for (network,) in networks}) == 1
    with listening_at("127.0.0.1" if alone else None, 0, len(nodes)) as listener:
        own["addresses"] = ["127.0.0.1"] if alone else addresses()
        own |= {"process": connections.own, "connected": connections.alive()}
        found = _gathered(bootstrap, {**own, "port": listener.getsockname()[1], "pid": os.getpid()})
        key = hashlib.sha256("".join(str(other["token"]) for other in found).encode()).digest()
        for peer in far:
            other = found[peer]
            if other["process"] in own["connected"] and connections.own in other["connected"]:
                links[peer] = connections.links[other["process"]]
        kept = set(links)
        try:
            for peer in (peer for peer in far if peer < rank and peer not in kept):
                links[peer] = Link(
                    _call(found[peer], key, rank, peer, deadline), _name(found[peer])
                )
            higher = {peer for peer in far if peer > rank and peer not in kept}
            for peer, connection in answer(listener, key, rank, higher, deadline):
                links[peer] = Link(connection, _name(found[peer]))
        except Error as error:
            failure = error
        except OSError as error:
            failure = MachineError(f"init: rank {rank} cannot connect to other nodes: {error}")
        try:
            outcome(texts_of(bootstrap), True, failure)
        except Error:
            for peer in set(links) - kept:
                links[peer].close()
            raise
    connections.links |= {str(found[peer]["process"]): link for peer, link in links.items()}
    return links


def _gathered(bootstrap: Bootstrap, own: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What every rank has sent of itself, of the types of this rank's."""
    names = list(own)
    types = [type(value) for value in own.values()]
    received = exchange_values(bootstrap, list(own.values()), types)
    return [dict(zip(names, values, strict=True)) for values in received]


def _network() -> str:
    """The identity of this network namespace among all hosts."""
    return f"{boot_id()} {Path('/proc/self/ns/net').stat().st_ino}"


def _name(peer: Mapping[str, Any]) -> str:
    return f"process {peer['pid']} on host {peer['host']}"


def _call(
    other: Mapping[str, Any], key: bytes, rank: int, peer: int, deadline: float
) -> socket.socket:
    """Connect to a lower rank, trying its addresses in turn."""
    errors: list[str] = []
    while True:
        for number, address in enumerate(other["addresses"]):
            left = deadline - time.monotonic()
            if left <= 0:
                raise DeadlineError(
                    f"init: rank {rank} did not reach rank {peer}, {_name(other)}, in time: "
                    f"{'; '.join(errors[-3:]) or 'no answer'}; does a firewall close "
                    "ports between the hosts?"
                )
            # One that does not answer must leave time for the rest.
            seconds = min(left / (len(other["addresses"]) - number), PATIENCE)
            try:
                to = str(address), int(other["port"])
                connection = socket.create_connection(to, seconds)
            except OSError as error:
                errors.append(f"{bracketed(address)}: {error}")
                continue
            until = time.monotonic() + seconds
            try:
                prove(connection, key, rank, peer, until)
            except OSError as error:
                connection.close()
                errors.append(f"{bracketed(address)}: {error}")
                continue
            return connection
        if not other["addresses"]:
            raise MachineError(
                f"init: rank {peer}, {_name(other)}, has no address that other hosts reach"
            )
        time.sleep(0.01)
