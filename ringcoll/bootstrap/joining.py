"""The bootstrap of ``init``: the one that it was given, or the one that the environment names.

Without an argument the world is, in this order: that of ``run_ranks``, which starts the processes
of ``ringcoll bench -n``; that of RINGCOLL_ID; that of an MPI launcher of several processes
(PMI_SIZE, OMPI_COMM_WORLD_SIZE, SLURM_STEP_NUM_TASKS); an MPI world of several that the program has
initialized; torchrun's (WORLD_SIZE and MASTER_ADDR, RANK, MASTER_PORT); else this process alone.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterable, Iterator
from typing import Any, cast

from ringcoll.bootstrap.contract import (
    Bootstrap,
    Failure,
    SingleBootstrap,
    mpi_running,
    shortage,
    whole,
)
from ringcoll.bootstrap.launcher import job_of, launched_rank, launcher_of, torch_world
from ringcoll.bootstrap.mpi import is_mpi_communicator, mpi_bootstrap
from ringcoll.bootstrap.overlap import LAUNCHER, check, enter, leave
from ringcoll.bootstrap.relayed import RelayedBootstrap
from ringcoll.bootstrap.sockets import HostBootstrap, adopted
from ringcoll.bootstrap.store import StoreBootstrap, is_store, store_bootstrap
from ringcoll.bootstrap.tcp import id_bootstrap, id_of, post_refusal
from ringcoll.errors import ArgumentError, ArgumentTypeError, Error, LauncherError

_POSTING = 5.0  # seconds


def bootstrap_of(
    given: object = None,
    *,
    timeout: float,
    id: str | None = None,
    rank: int | None = None,
    nranks: int | None = None,
) -> Bootstrap:
    """The bootstrap that ``init`` was given, or the one that the environment names.

    ``given``: an mpi4py communicator, a torch Store, an object with ``rank``, ``nranks`` and
    ``allgather(bytes) -> list[bytes]``, or None: that of ``id``, else MPI's launcher's if it has
    started this process as one of several, torch's Store if torchrun has, else a world of one.
    ``timeout``: seconds for all exchanges over sockets together, and for each over a Store.
    """
    if math.isnan(timeout) or timeout <= 0:
        raise ArgumentError(f"timeout must be a positive number of seconds, not {timeout}")
    if given is None:
        try:
            return _found(timeout, id, rank, nranks)
        except (OSError, RuntimeError) as error:
            own = launched_rank(os.environ) if rank is None else rank
            if not isinstance(error, Error) and (lack := shortage(error, own)) is not None:
                raise lack from error
            raise
    if (id, rank, nranks) != (None, None, None):
        raise ArgumentError(
            "init: a bootstrap says which ranks there are; leave out id, rank, nranks"
        )
    if isinstance(given, RelayedBootstrap):
        return given
    if is_mpi_communicator(given):
        return mpi_bootstrap(given, timeout)
    if is_store(given) and not hasattr(given, "allgather"):
        enter(given)
        return store_bootstrap(given, timeout, os.environ)
    return _Checked(given)


def post_failure(
    error: BaseException,
    given: object,
    *,
    id: str | None = None,
    rank: int | None = None,
    nranks: int | None = None,
    timeout: object = None,
) -> None:
    """Let the other ranks raise an error that this one has met before it began with them.

    It takes the place of what this rank would have sent first. It waits for ranks that come late no
    longer than ``timeout``, what ``init`` was given, and never longer than 5 s.
    """
    seconds = _POSTING
    if isinstance(timeout, (int, float)) and 0 < timeout < seconds:
        seconds = float(timeout)
    # Exceptions of a user's bootstrap are suppressed too.
    with contextlib.suppress(Exception), contextlib.ExitStack() as stack:
        stack.callback(leave)
        world = bootstrap_of(given, timeout=seconds, id=id, rank=rank, nranks=nranks)
        if world.nranks > 1:
            try:
                world.allgather(Failure.of(error, world.rank).encode())
            except Exception:
                _fail(world, error)  # ranks that come later learn this error, not that of waiting
                raise
            if isinstance(world, RelayedBootstrap):
                world.close()


@contextlib.contextmanager
def joined(given: object, *, timeout: float, **met: Any) -> Iterator[Bootstrap]:
    """The ranks of :func:`bootstrap_of`, until the end of the block."""
    try:
        world = bootstrap_of(given, timeout=timeout, **met)
        with ending(world):
            yield world
            check()
    finally:
        leave()


@contextlib.contextmanager
def ending(bootstrap: Bootstrap) -> Iterator[None]:
    """End a bootstrap with its block; an error of the block reaches the ranks that wait."""
    try:
        yield
    except BaseException as error:
        _fail(bootstrap, error)
        if not isinstance(error, Error):
            lack = shortage(error, bootstrap.rank)
            if lack is not None:
                raise lack from error
        raise
    if isinstance(bootstrap, RelayedBootstrap):
        bootstrap.close()


def _fail(bootstrap: Bootstrap, error: BaseException) -> None:
    if isinstance(bootstrap, (RelayedBootstrap, StoreBootstrap)):
        bootstrap.fail(error)


def _found(timeout: float, id: str | None, rank: int | None, nranks: int | None) -> Bootstrap:
    started = adopted(timeout) if id is None else None
    if started is not None:
        return started
    try:
        met = id_of(id, rank, nranks, os.environ)
    except Error as error:
        found = id or os.environ.get("RINGCOLL_ID")
        if found:
            with contextlib.suppress(Exception):  # the error itself is to be raised
                post_refusal(found, error, timeout)
        raise
    if met is not None:
        return id_bootstrap(*met, timeout)
    launcher = launcher_of(os.environ)
    try:
        world = torch_world(os.environ, launcher)
    except LauncherError as error:
        if launcher is None or launcher.nranks == 1:
            from ringcoll.bootstrap.torchrun import post_torch_refusal

            with contextlib.suppress(Exception):  # the error itself is to be raised
                post_torch_refusal(os.environ, error, min(timeout, _POSTING))
        raise
    if launcher is not None and launcher.nranks > 1:
        job, own = job_of(os.environ), launched_rank(os.environ)
        if job is not None and own is not None:
            enter(LAUNCHER)
            return HostBootstrap(job, own, launcher.nranks, timeout)
        return mpi_bootstrap(None, timeout)
    running = mpi_running()
    if running is not None and running.COMM_WORLD.Get_size() > 1:
        return mpi_bootstrap(None, timeout)
    if world is None:
        return SingleBootstrap()
    from ringcoll.bootstrap.torchrun import torchrun_bootstrap

    enter(LAUNCHER)
    return torchrun_bootstrap(world, timeout)


class _Checked:
    """A user's bootstrap whose answers are checked."""

    def __init__(self, given: object) -> None:
        rank, nranks = (whole(getattr(given, name, None)) for name in ("rank", "nranks"))
        if rank is None or nranks is None or not hasattr(given, "allgather"):
            raise ArgumentTypeError(
                "bootstrap must be an mpi4py communicator, a torch Store, or an object with rank, "
                "nranks (integers) and allgather(bytes) -> list[bytes], not "
                f"{type(given).__name__}"
            )
        if not 0 <= rank < nranks:
            raise ArgumentError(f"bootstrap has rank {rank} of {nranks}: wanted 0 <= rank < nranks")
        self._given, self.rank, self.nranks = cast(Bootstrap, given), rank, nranks

    def allgather(self, payload: bytes) -> list[bytes]:
        """Every rank's bytes."""
        answer = self._given.allgather(payload)
        parts = list(answer) if isinstance(answer, Iterable) else []
        if len(parts) != self.nranks or not all(isinstance(part, bytes) for part in parts):
            raise ArgumentTypeError(
                f"the bootstrap's allgather must return {self.nranks} bytes objects"
            )
        if parts[self.rank] != payload:
            raise ArgumentError(
                f"the bootstrap's allgather must return the bytes of rank r at place r: at place "
                f"{self.rank} are not those of this rank"
            )
        return parts
