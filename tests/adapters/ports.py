"""A port of the loopback device that nobody listens at."""

from __future__ import annotations

import socket


def free_port() -> int:
    """A port where this process, and those that it starts, may listen.

    A socket that is bound and does not listen holds it to the end of the process: the kernel gives
    it to no connection, and to no listener at 127.0.0.1 or at all addresses that leaves the choice
    to the kernel; one that names the port gets it.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        port: int = held.getsockname()[1]
        held.detach()  # its descriptor stays open
    return port
