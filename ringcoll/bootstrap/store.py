"""Bootstrap over a key-value store: torch's TCPStore, FileStore, HashStore or PrefixStore.

torch itself is never imported here: any object with ``set``, ``get``, ``check`` and ``add`` is a
store. Bytes are written behind their length, nothing is pickled. A store may outlive the ranks'
communicators (that of torchrun's agent does), so each communicator has keys of its own.
"""

from __future__ import annotations

import contextlib
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol, TypeGuard

from ringcoll.bootstrap.contract import Failure, named, this_process
from ringcoll.bootstrap.launcher import torch_place
from ringcoll.bootstrap.overlap import check
from ringcoll.errors import (
    ArgumentError,
    ArgumentTypeError,
    DeadlineError,
    Error,
    LauncherError,
    MachineError,
    RankLostError,
)

_LENGTH = struct.Struct("<Q")
_FIRST, _LAST = 2e-4, 1e-2  # seconds between polls, which grow from the one to the other
_VERBS = ("set", "get", "check", "add")


class Store(Protocol):
    """The methods that a store needs; ``delete_key(key)`` is used where it exists."""

    def set(self, key: str, value: bytes, /) -> object:
        """Keep ``value``."""

    def get(self, key: str, /) -> bytes:
        """The value of a key that exists."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all the keys exist; returns at once."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter that begins at 0; its new value."""


def is_store(candidate: object) -> TypeGuard[Store]:
    """Whether this has the methods of a store."""
    return all(callable(getattr(candidate, verb, None)) for verb in _VERBS)


def store_bootstrap(store: Store, timeout: float, environ: Mapping[str, str]) -> StoreBootstrap:
    """The ranks that meet over ``store``, by RANK and WORLD_SIZE, as torchrun sets them."""
    if not environ.get("RANK") and not environ.get("WORLD_SIZE"):
        # Nothing is posted: no rank waits for this process, which may go on as the error says.
        raise ArgumentError(
            "a store does not number its clients: set RANK and WORLD_SIZE, as torchrun does, "
            "or pass ringcoll.bootstrap.StoreBootstrap(store, rank, nranks, timeout)"
        )
    try:
        return StoreBootstrap(store, *torch_place(environ), timeout)
    except LauncherError as error:
        post_refusal(store, error)
        raise


def post_refusal(store: Store, error: Error) -> None:
    """Let the ranks that meet over a store raise the error of a process that has no valid rank."""
    with contextlib.suppress(Exception):  # the error itself is to be raised
        # The number of no rank: its first bootstrap meets the others' first, as a rank's does.
        generation = int(store.add("ringcoll/generation/none", 1))
        text = f"{this_process()} aborted: {type(error).__name__}: {error}"
        store.set(f"ringcoll/{generation}/failure", Failure("AbortedError", text).encode())


class StoreBootstrap:
    """Ranks that meet over one store, torch's or any with ``set``, ``get``, ``check`` and ``add``.

    Every rank makes its bootstraps over one store in the same order: the n-th of a rank meets the
    n-th of the others, whatever earlier ones have left behind. ``timeout``: seconds for each
    exchange; ``prefix``: of all keys.
    """

    def __init__(
        self, store: Store, rank: int, nranks: int, timeout: float, *, prefix: str = ""
    ) -> None:
        if not is_store(store):
            raise ArgumentTypeError(
                f"store must have {', '.join(_VERBS)}, as torch's have, not {type(store).__name__}"
            )
        self.rank = rank
        self.nranks = nranks
        self.timeout = timeout
        self._store = store
        self._exchange = 0
        self._broken = ""
        prefix += "ringcoll"
        with self._errors():
            self._prefix = f"{prefix}/{int(store.add(f'{prefix}/generation/{rank}', 1))}"
        self._failure = f"{self._prefix}/failure"
        if not 0 <= rank < nranks:
            error = ArgumentError(f"there is no rank {rank} of {nranks}")
            self.fail(error)
            raise error
        self.watch: Callable[[], None] = lambda: None  # called while it waits; may raise
        # Called while it waits: why ranks, by their numbers, send no more than they have sent.
        self.left: Callable[[], Mapping[int, str]] = dict

    def allgather(self, payload: bytes) -> list[bytes]:
        """Every rank's bytes."""
        if self._broken:
            raise MachineError(self._broken)
        self._exchange += 1
        folder = f"{self._prefix}/{self._exchange}"
        keys = [f"{folder}/{rank}" for rank in range(self.nranks)]
        with self._errors():
            self._store.set(keys[self.rank], _LENGTH.pack(len(payload)) + payload)
            self._wait(keys)
            answer = [self._unpacked(rank, self._store.get(key)) for rank, key in enumerate(keys)]
            self._tidy(folder, keys)
        return answer

    def part(self, members: Sequence[int], timeout: float | None = None) -> StoreBootstrap:
        """Some of the ranks, this one among them; other parts may begin at the same time."""
        prefix = f"{self._prefix}/part/{'-'.join(map(str, members))}/"
        rank, nranks = members.index(self.rank), len(members)
        part = StoreBootstrap(self._store, rank, nranks, timeout or self.timeout, prefix=prefix)
        part.watch = self.watch
        part._failure = self._failure
        return part

    def fail(self, error: BaseException) -> None:
        """Let the ranks that wait raise an error of this one."""
        self._broken = self._broken or "an earlier exchange among the ranks has failed"
        with contextlib.suppress(Error), self._errors():
            if not self._store.check([self._failure]):
                self._store.set(self._failure, Failure.of(error, self.rank).encode())

    def _wait(self, keys: list[str]) -> None:
        # A wait inside the store would hold its client's lock and block the calls of every other
        # thread, among them those that another rank is waiting for.
        started, pause = time.monotonic(), _FIRST
        while not self._store.check(keys):
            for rank, why in self.left().items():
                if not self._store.check([keys[rank]]):
                    raise RankLostError(why)
            if self._store.check([self._failure]):
                self._broken = "an earlier exchange among the ranks has failed"
                raise Failure.decode(self._store.get(self._failure)).error()
            self.watch()
            check()
            if time.monotonic() - started > self.timeout:
                absent = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
                if not absent:
                    return
                self._broken = "an earlier exchange among the ranks has failed"
                raise DeadlineError(
                    f"init: rank {self.rank} of {self.nranks} waited {self.timeout:.3g} s over the "
                    f"store for {named(absent)}: did every rank make the same communicators in "
                    "the same order?"
                )
            time.sleep(pause)
            pause = min(pause * 1.5, _LAST)

    def _unpacked(self, rank: int, value: bytes) -> bytes:
        size = _LENGTH.size
        if len(value) < size or len(value) - size != _LENGTH.unpack_from(value)[0]:
            self._broken = (
                f"the store's value for rank {rank} was not written by ringcoll; give each program "
                "a store of its own, or torch's PrefixStore of it"
            )
            raise MachineError(self._broken)
        return bytes(value[size:])

    def _tidy(self, folder: str, keys: list[str]) -> None:
        """The last rank to have read deletes the keys, if this store can."""
        delete = getattr(self._store, "delete_key", None)
        if delete is None or self._store.add(f"{folder}/read", 1) < self.nranks:
            return
        # Stores that cannot delete raise one of these; keys that are left do no harm.
        with contextlib.suppress(NotImplementedError, RuntimeError):
            for key in (*keys, f"{folder}/read"):
                delete(key)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Raise failures of the store as this library's; torch's stores raise RuntimeError."""
        try:
            yield
        except Error:
            raise
        except (RuntimeError, OSError) as error:
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            self._broken = (
                f"rank {self.rank} of {self.nranks} cannot use the store ({first}): has the "
                "process that serves it ended?"
            )
            raise MachineError(self._broken) from error
