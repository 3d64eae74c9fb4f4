"""Collective steps that may fail on one rank, such as mapping a segment of every rank.

A rank that fails reports it in the next exchange, so that all ranks raise and none is left waiting.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ringcoll.bootstrap.contract import Bootstrap, malformed
from ringcoll.errors import Error, MachineError, OutOfMemory
from ringcoll.host.fd_passing import FdServer, receive
from ringcoll.host.limits import no_descriptor
from ringcoll.host.shm import ProcAccessDenied, Segment, SegmentHandle, attach, create

T = TypeVar("T")

# Every rank's text, in rank order.
Gather = Callable[[str], list[str]]
_TEXT_LIMIT = 2000


def map_all(
    rank: int, nbytes: int, gather: Gather, deadline: float, what: str
) -> tuple[list[memoryview], list[SegmentHandle]]:
    """Make one segment per rank and map all of them; their memory and handles. Collective."""
    own: Segment | None = None
    failure: Error | None = None
    try:
        own = create(nbytes, what)
    except MachineError as error:
        failure = error
    try:
        texts = outcome(gather, own.handle.encode() if own else None, failure)
        handles = [SegmentHandle.decode(text) for text in texts]
        if own is None:
            raise MachineError(f"{what}: no memory was made")
        views = _attach(rank, own, handles, gather, deadline, what)
    finally:
        if own is not None:
            own.seal()
    return views, handles


def outcome(gather: Gather, value: object, failure: Error | None) -> list[Any]:
    """Exchange JSON values of one type; a rank's failure is raised on all ranks. Collective."""
    own = report(failure) if failure else json.dumps({"value": value})
    texts = gather(own)
    if failure:
        raise failure
    wanted = type(json.loads(own)["value"])
    values = []
    for peer, text in enumerate(texts):
        try:
            answer = json.loads(text)
        except (ValueError, RecursionError):
            answer = None
        if isinstance(answer, dict) and isinstance(answer.get("error"), str):
            kind = OutOfMemory if answer.get("memory") is True else MachineError
            raise kind(f"rank {peer} failed: {answer['error'][:_TEXT_LIMIT]}")
        if not isinstance(answer, dict) or type(answer.get("value")) is not wanted:
            raise MachineError(f"rank {peer} sent a malformed answer: {text[:80]!r}")
        values.append(answer["value"])
    return values


def report(failure: BaseException, limit: int = _TEXT_LIMIT) -> str:
    """What :func:`outcome` of the peers raises; at most so many characters of the failure's."""
    memory = isinstance(failure, MemoryError)
    return json.dumps({"error": str(failure)[:limit], "memory": memory})


def together(
    gather: Gather,
    make: Callable[[], T],
    *,
    undo: Callable[[T], object] = lambda made: None,
    catch: type[Error] = MachineError,
) -> T:
    """Make something on every rank, or undo it and raise if one fails by ``catch``; collective."""
    try:
        made = make()
    except catch as error:
        outcome(gather, True, error)
        raise
    try:
        outcome(gather, True, None)
    except BaseException:
        undo(made)
        raise
    return made


def texts_of(bootstrap: Bootstrap) -> Gather:
    """A bootstrap's exchange, of texts."""

    def gather(text: str) -> list[str]:
        parts = bootstrap.allgather(text.encode())
        try:
            return [part.decode() for part in parts]
        except UnicodeDecodeError as error:
            raise malformed(parts.index(error.object), error.object) from None

    return gather


def ranks_of(answers: Sequence[Sequence[object]], nranks: int) -> list[list[int]]:
    """The lists of ranks that :func:`outcome` has gathered, checked."""
    found = []
    for peer, numbers in enumerate(answers):
        ranks = [number for number in numbers if type(number) is int and 0 <= number < nranks]
        if len(ranks) < len(numbers):
            raise MachineError(f"rank {peer} sent a malformed answer: {str(numbers)[:80]!r}")
        found.append(ranks)
    return found


def _attach(
    rank: int,
    own: Segment,
    handles: Sequence[SegmentHandle],
    gather: Gather,
    deadline: float,
    what: str,
) -> list[memoryview]:
    views: list[memoryview | None] = [None] * len(handles)
    views[rank] = own.body
    denied: list[int] = []
    failure: MachineError | None = None
    for peer, handle in enumerate(handles):
        if peer == rank or failure:
            continue
        try:
            views[peer] = attach(handle, f"{what}: rank {peer}")
        except ProcAccessDenied:
            denied.append(peer)
        except MachineError as error:
            failure = error
    refused = ranks_of(outcome(gather, denied, failure), len(handles))
    if any(refused):
        for peer, view in _passed(rank, own, handles, refused, gather, deadline, what):
            views[peer] = view
    return [view for view in views if view is not None]


def _passed(
    rank: int,
    own: Segment,
    handles: Sequence[SegmentHandle],
    refused: Sequence[Sequence[int]],
    gather: Gather,
    deadline: float,
    what: str,
) -> list[tuple[int, memoryview]]:
    """The memory of the peers that /proc denies, by descriptors that they pass."""
    wanted = refused[rank]
    callers = sum(rank in denied for denied in refused)
    server = together(gather, lambda: _server(what), undo=FdServer.close)
    views: list[tuple[int, memoryview]] = []
    failure: Error | None = None
    try:
        names = outcome(gather, server.name, None)
        try:
            passed = receive([names[peer] for peer in wanted], deadline, server, [own.fd], callers)
            for peer, (fd,) in zip(wanted, passed, strict=True):
                views.append((peer, attach(handles[peer], f"{what}: rank {peer}", fd)))
        except Error as error:
            failure = error
        except OSError as error:
            failure = no_descriptor(error, what) or MachineError(
                f"{what}: a descriptor could not be passed: {error}"
            )
        outcome(gather, True, failure)
    finally:
        server.close()
    return views


def _server(what: str) -> FdServer:
    try:
        return FdServer()
    except OSError as error:
        text = f"{what}: a descriptor could not be passed: {error}"
        raise no_descriptor(error, what) or MachineError(text) from error
