"""Small calls that have come before, by the compiled part of the package, where it has been built.

A small call costs a rank the time of the Python that it runs, and more where ranks share cores:
each wait then gives the core to another process, behind which this one's code and data have left
the caches. ``_small_calls.c`` makes a call that is known with a sixth of the instructions. Python
stays in charge: it makes every call that is new, and goes on with one that has to wait.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from ringcoll.errors import MachineError
from ringcoll.executors.binding import Operand, RowArrays
from ringcoll.executors.cpu.cpu_call import ActiveCall, BoundRows, CpuCall
from ringcoll.executors.cpu.executor import CpuExecutor
from ringcoll.executors.rows import Signal, Wait
from ringcoll.executors.shared_state import Words
from ringcoll.fabric.poll import AT_ONCE
from ringcoll.plan import Buffer
from ringcoll.views import start_of

_INTERFACE = 2  # of the compiled part; one that is older than this file is not used

try:
    _small_calls: Any = importlib.import_module("ringcoll.executors.cpu._small_calls")
except ImportError:  # it is built where the package is installed, if there is a C compiler
    _small_calls = None
if _small_calls is not None and _small_calls.INTERFACE != _INTERFACE:
    _small_calls = None

_HALVES = 3  # a bit for each half of SCRATCH; above it the number of times that all was forgotten

MOST = 512
"""Calls that the compiled part knows: as many as a communicator keeps."""

_POLLS = 8  # of a flag in C for one in Python, which takes 0.1 µs

_FIRST, _SECOND, _ABSOLUTE = 0, 1, 2
_Place = tuple[int, int]  # what it is an offset of, and the offset in bytes
_Step = tuple[Any, int, int, int, tuple[_Place, ...], tuple[_Place, ...]]


class Checked(Protocol):
    """What is asked of a checked call."""

    taken: int
    count: int
    places: tuple[int, int, int, int]
    any_class: Any


def is_wanted(setting: bool | None) -> bool:
    """Whether the setting ``compiled`` asks for the compiled part; None: where it has been built.

    Raises:
        MachineError: it is to be used, and has not been built.

    """
    if setting and _small_calls is None:
        raise MachineError(
            "init: compiled=True, but the package has no compiled part for this Python: install it "
            "anew where there is a C compiler, or leave compiled out"
        )
    return _small_calls is not None and setting is not False


def fits(host: CpuExecutor) -> bool:
    """Whether calls of such a rank may run here: of processes of one host, on free links."""
    fabric = host.fabric
    polls = fabric.notify is None and fabric.fence is None and fabric.liveness is not None
    alone = fabric.threads or bool(fabric.nodes) or host.node_signals is not None
    return polls and not alone and host.pacer is None


class SmallCalls:
    """The calls of one rank that the compiled part knows."""

    def __init__(self, state: Any, host: CpuExecutor, groups: set[Any]) -> None:
        shared, fabric = host.shared_state, host.fabric
        timer = fabric.liveness
        if _small_calls is None or timer is None:
            raise RuntimeError("small calls are for processes, where the compiled part is there")
        self._host = host
        self._calls = _small_calls.Calls(
            state,
            host,
            fabric,
            state.lock.acquire,
            state.lock.release,
            groups,
            host.resume,
            shared.record_numbers,
            timer.alarm,
            # Views of their own: those of the shared state are released when it is closed.
            tuple(words[:] for words in shared.words),
            host.rank,
            fabric.spins * _POLLS,
            AT_ONCE,
            shared.entered,
            shared.signatures,
        )
        self.make: Callable[[str, Any, Any, Any, int, dict[str, Any]], bool] = self._calls
        """Makes a call that is known; False: it is for Python, and nothing of it has begun."""
        self.whole = _HALVES
        """What :meth:`add` notes of a call of which it knows all that it will know."""
        self._size = 0

    def clear(self) -> None:
        """Forget all calls."""
        self._calls.clear()
        self.whole += _HALVES + 1
        self._size = 0

    def close(self) -> None:
        """Forget all calls, and let go of the ranks' memory when none runs there any more."""
        self._calls.close()

    def add(
        self,
        checked: Checked,
        prepared: CpuCall,
        call: tuple[str, Any, Any, Any, int, dict[str, Any]],
    ) -> None:
        """Take a call that has just run, with its arguments, for each half that has its rows."""
        count, hello, nothing = checked.count, prepared.hello, self.whole - _HALVES
        if not prepared.any_class or prepared is not checked.any_class or hello.scalar is not None:
            checked.taken = self.whole
            return
        if prepared.call.count != count:
            return
        halves, taken, total = [], nothing, True
        for half in (0, 1):
            bound, rows = prepared.bound.get((half, count)), None
            if bound is not None and bound.given:
                rows = _rows(bound, self._host.shared_state.words)
                if rows is None:
                    checked.taken = self.whole
                    return
                taken += 1 << half
                total = bound.total
            active = ActiveCall(prepared, 0, hello.signature, prepared.timeout)
            halves.append(rows and (active, rows))
        if taken in (nothing, checked.taken):
            return
        if self._size == MOST:
            self.clear()
            taken += self.whole - _HALVES - nothing
        self._size += 1
        name, sendbuf, recvbuf, op, root, how = call
        arrays, places = (_kind(sendbuf), _kind(recvbuf)), checked.places
        words = hello.signature, hello.record, hello.count << 1 | hello.in_place
        self._calls.add(
            *(name, op, root, dict(how), *arrays, places[:2], places[2:]),
            *(total, *words, count, tuple(halves)),
        )
        checked.taken = taken


def _kind(array: Any) -> tuple[np.dtype[Any], int, bool] | None:
    return None if array is None else (array.dtype, array.size, array.flags.writeable)


def _rows(bound: BoundRows, words: list[Words]) -> tuple[Any, ...] | None:
    """A single lane of plain rows; None where there is more to it."""
    lane = bound.lanes[0] if len(bound.lanes) == 1 else None
    if bound.messages or not isinstance(lane, tuple):
        return None
    numbers = {id(part): rank for rank, part in enumerate(words)}
    works, rows = iter(bound.works), []
    for waits, work, signals in lane:
        step = None
        if work is not None:
            step = _step(next(works), bound)
            if step is None:
                return None
        rows.append((_flags(waits, numbers), step, _flags(signals, numbers)))
    return tuple(rows)


def _flags(
    flags: tuple[Wait, ...] | tuple[Signal, ...], numbers: dict[int, int]
) -> tuple[tuple[int, int, int], ...]:
    """The waits or the signals of a row: rank, index and count."""
    return tuple((numbers[id(flag[0])], flag[1], flag[2]) for flag in flags)


def _step(work: RowArrays, bound: BoundRows) -> _Step | None:
    """What a row moves; None unless it copies, or combines by a loop of numpy alone."""
    _, from_, to, srcs, dsts, reduction = work
    if reduction is None or not reduction.is_plain or dsts[0].nbytes > _small_calls.SMALL:
        return None
    kind, ufunc = srcs[0].dtype, reduction.ufunc
    if (ufunc is None) != (len(srcs) == 1):
        return None
    if ufunc is not None:
        loop = f"{kind.char}{kind.char}->{kind.char}"
        if not isinstance(ufunc, np.ufunc) or loop not in ufunc.types:
            return None
    sources = [_place(*both, bound) for both in zip(from_, srcs, strict=True)]
    targets = [_place(*both, bound) for both in zip(to, dsts, strict=True)]
    places = [place for place in (*sources, *targets) if place is not None]
    if len(places) < len(sources) + len(targets):
        return None
    return (
        ufunc,
        kind.num,
        srcs[0].size,
        kind.itemsize,
        (*places[: len(srcs)],),
        (*places[len(srcs) :],),
    )


def _place(operand: Operand, array: Any, bound: BoundRows) -> _Place | None:
    """Where an array of a row lies; None for memory of a peer that is mapped."""
    if operand.span < 0:
        return _ABSOLUTE, start_of(array)
    if not operand.own:
        return None
    base = _FIRST if operand.chunk.buffer is Buffer.INPUT else _SECOND
    return base, start_of(array) - bound.given[base]
