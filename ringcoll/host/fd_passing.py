"""Passing descriptors over a socket, for peers that may not open them in /proc.

Every rank of the exchange takes four steps that never wait for a later step of another: listen,
connect, accept and send the descriptors, receive. Names live in the abstract name space (no
file) and carry random bytes; a caller must have the same user and know the name.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Sequence

from ringcoll.errors import DeadlineError, MachineError
from ringcoll.host.limits import waitable

MOST = 250
"""Descriptors of a server; Linux passes 253 at once."""

_TOKEN = 16  # random bytes of a name
_INT = struct.Struct("i")
_CREDENTIALS = struct.Struct("iII")  # process, user, group


def credentials(connection: socket.socket) -> tuple[int, int]:
    """The process and the user at the other end of a Unix socket, as the kernel knows them."""
    sent = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(sent)
    return pid, user


class FdServer:
    """A listening socket that hands descriptors to peers that know its name."""

    def __init__(self) -> None:
        self.name = os.urandom(_TOKEN).hex()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._socket.bind(f"\0ringcoll-{self.name}")
        self._socket.listen(1024)

    def serve(self, fds: Sequence[int], callers: int, deadline: float) -> None:
        """Hand descriptors, at most :data:`MOST`, to so many callers."""
        served = 0
        while served < callers:
            self._socket.settimeout(_left(deadline, callers - served))
            try:
                peer, _ = self._socket.accept()
            except TimeoutError as error:
                raise _late(callers - served) from error
            with peer:
                if credentials(peer)[1] != os.geteuid():
                    continue
                socket.send_fds(peer, [b"\1"], list(fds))
                served += 1

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()


def receive(
    names: Sequence[str], deadline: float, server: FdServer, fds: Sequence[int], callers: int
) -> list[tuple[int, ...]]:
    """The descriptors of other ranks' servers, while serving one's own.

    All of the servers ``names`` listen already; ``callers`` peers will call this rank's.

    Raises:
        DeadlineError: a peer did not answer.
        MachineError: a peer answered without a descriptor.

    """
    calls: list[socket.socket] = []
    received: list[tuple[int, ...]] = []
    try:
        for name in names:
            call = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            calls.append(call)
            call.settimeout(_left(deadline, 1))
            call.connect(f"\0ringcoll-{name}")
        server.serve(fds, callers, deadline)
        for call in calls:
            call.settimeout(_left(deadline, 1))
            # Not socket.recv_fds, which drops its flags.
            room = socket.CMSG_LEN(_INT.size * MOST)
            _, passed, _, _ = call.recvmsg(1, room, socket.MSG_CMSG_CLOEXEC)
            if not passed or len(passed[0][2]) % _INT.size:
                raise MachineError("a peer closed its connection without passing a descriptor")
            received.append(tuple(fd for (fd,) in _INT.iter_unpack(passed[0][2])))
    except BaseException as error:
        for fd in (fd for taken in received for fd in taken):
            os.close(fd)
        if isinstance(error, TimeoutError) and not isinstance(error, DeadlineError):
            raise _late(len(names) - len(received)) from error
        raise
    finally:
        for call in calls:
            call.close()
    return received


def _left(deadline: float, missing: int) -> float | None:
    left = deadline - time.monotonic()
    if left <= 0:
        raise _late(missing)
    return waitable(left)


def _late(missing: int) -> DeadlineError:
    return DeadlineError(f"passing descriptors: {missing} peers did not answer in time")
