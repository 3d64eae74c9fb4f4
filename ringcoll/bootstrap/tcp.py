"""Bootstrap over TCP: rank 0 listens at an address that all ranks know, the others connect.

Rank 0 collects the payloads and answers each. Lengths are checked and nothing is unpickled, but
nothing is authenticated either: use an address of a trusted network.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time

from ringcoll.bootstrap.contract import named
from ringcoll.bootstrap.frames import exactly, joined, left, split
from ringcoll.errors import ArgumentError, DeadlineError, MachineError, RankLostError

_HELLO = struct.Struct("<8sQQ")  # magic, rank, nranks
_MAGIC = b"ringcoll"
_LENGTH = struct.Struct("<Q")
_LONGEST = 1 << 30  # bytes of a frame
_AGAIN = 0.02  # seconds between two attempts to reach rank 0
_PATIENCE = 1.0  # seconds that a new connection has to name its rank


class TcpBootstrap:
    """One of the ranks that meet at ``host:port``; rank 0 listens there."""

    def __init__(self, rank: int, nranks: int, host: str, port: int, timeout: float) -> None:
        if not 0 <= rank < nranks:
            raise ArgumentError(f"rank {rank} of {nranks}: wanted 0 <= rank < nranks")
        if not 0 < port < 1 << 16:
            raise ArgumentError(f"port={port}: wanted one from 1 to 65535, the same on all ranks")
        self.rank, self.nranks, self.timeout = rank, nranks, timeout
        self._place = f"{host}:{port}"
        # Rank 0 holds a link to every other rank, the others one to rank 0.
        self._links: dict[int, socket.socket] = {}
        deadline = time.monotonic() + timeout
        try:
            if rank == 0 and nranks > 1:
                self._gather_ranks(host, port, deadline)
            elif rank:
                self._links[0] = self._reach(host, port, deadline)
        except BaseException:
            self.close()
            raise

    def allgather(self, payload: bytes) -> list[bytes]:
        """Every rank's bytes, relayed by rank 0."""
        deadline = time.monotonic() + self.timeout
        if self.rank:
            self._send(0, payload, deadline)
            return split(self._receive(0, deadline), self.nranks, "init: rank 0")
        parts = [payload, *(self._receive(peer, deadline) for peer in range(1, self.nranks))]
        answer = joined(parts)
        for peer in self._links:
            self._send(peer, answer, deadline)
        return parts

    def close(self) -> None:
        """Close the connections. Idempotent."""
        while self._links:
            self._links.popitem()[1].close()

    def _gather_ranks(self, host: str, port: int, deadline: float) -> None:
        try:
            listener = socket.create_server((host, port), backlog=max(1, self.nranks))
        except OSError as error:
            raise MachineError(
                f"init: rank 0 cannot listen at {self._place} ({error}): pass another host or port"
            ) from error
        with listener:
            while len(self._links) < self.nranks - 1:
                try:
                    listener.settimeout(left(deadline))
                    link, _ = listener.accept()
                except TimeoutError:
                    missing = [r for r in range(1, self.nranks) if r not in self._links]
                    raise DeadlineError(
                        f"init: rank 0 waited {self.timeout:.3g} s at {self._place} for "
                        f"{named(missing)}"
                    ) from None
                peer = self._rank_of(link, deadline)
                if peer is None:
                    link.close()
                else:
                    self._links[peer] = link

    def _rank_of(self, link: socket.socket, deadline: float) -> int | None:
        """The rank at the other end; None: no rank of ours, or one that is connected already."""
        with contextlib.suppress(OSError):
            soon = min(deadline, time.monotonic() + _PATIENCE)
            magic, peer, nranks = _HELLO.unpack(exactly(link, _HELLO.size, soon))
            known = magic == _MAGIC and nranks == self.nranks
            if known and 0 < peer < nranks and peer not in self._links:
                return int(peer)
        return None

    def _reach(self, host: str, port: int, deadline: float) -> socket.socket:
        while True:
            try:
                link = socket.create_connection((host, port), left(deadline))
            except OSError as error:
                if time.monotonic() + _AGAIN > deadline:
                    raise DeadlineError(
                        f"init: rank {self.rank} tried {self.timeout:.3g} s to reach rank 0 at "
                        f"{self._place} ({error})"
                    ) from None
                time.sleep(_AGAIN)  # rank 0 may not be there yet
                continue
            link.sendall(_HELLO.pack(_MAGIC, self.rank, self.nranks))
            return link

    def _send(self, peer: int, payload: bytes, deadline: float) -> None:
        link = self._link(peer)
        try:
            link.settimeout(left(deadline))
            link.sendall(_LENGTH.pack(len(payload)) + payload)
        except OSError as error:
            raise self._failed(peer, error) from error

    def _receive(self, peer: int, deadline: float) -> bytes:
        link = self._link(peer)
        try:
            (length,) = _LENGTH.unpack(exactly(link, _LENGTH.size, deadline))
            if length > _LONGEST:
                raise MachineError(f"init: rank {peer} sent a frame of {length} bytes")
            return exactly(link, length, deadline)
        except OSError as error:
            raise self._failed(peer, error) from error

    def _link(self, peer: int) -> socket.socket:
        link = self._links.get(peer)
        if link is None:
            raise MachineError(f"init: the connections of rank {self.rank} are closed")
        return link

    def _failed(self, peer: int, error: OSError) -> DeadlineError | RankLostError:
        """Close all links: after a broken exchange the next frame's meaning is unknown."""
        self.close()
        if isinstance(error, TimeoutError):
            return DeadlineError(
                f"init: rank {self.rank} waited {self.timeout:.3g} s for rank {peer}"
            )
        return RankLostError(
            f"init: rank {peer} has closed its connection to rank {self.rank} ({error}): it "
            f"failed, or was not started as one of {self.nranks} ranks"
        )
