"""Small calls that have come before, by the compiled part of the package, where it has been built.

A small call costs a rank the time of the Python that it runs, and more where ranks share cores:
each wait then gives the core to another process, behind which this one's code and data have left
the caches. ``native/small_calls.c`` makes a call that is known in a fraction of the time. Python
stays in charge: it makes every call that is new, and goes on with one that has to wait. Of messages
``small_messages.py`` says what it is given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ringcoll.executors import compiled
from ringcoll.executors.binding import Operand, RowArrays, slot_size
from ringcoll.executors.contract import Given
from ringcoll.executors.cpu.cpu_call import ActiveCall, BoundRows, CpuCall
from ringcoll.executors.cpu.executor import CpuExecutor
from ringcoll.executors.cpu.small_messages import Kept, flags_of, parts_of
from ringcoll.executors.drive import Task
from ringcoll.executors.point_to_point import Pairs
from ringcoll.executors.shared_state import Words
from ringcoll.plan import Buffer
from ringcoll.views import start_of

_INTERFACE = 10
_small_calls: Any = compiled.load("ringcoll.executors.cpu._small_calls", _INTERFACE)

_HALVES = 3  # a bit for each half of SCRATCH; above it the number of times that all was forgotten

MOST = 512
"""Entries for calls, of which one may have two: its first was made before it ran on both halves."""

_POLLS = 8  # of a flag in C for one in Python, which takes 0.1 µs

_YIELDS = 120
"""Yields of the processor, with a poll behind each, before a call is handed over to Python, which
costs tens of µs, and the ranks that wait for this one as many. 200 calls of 256 bytes in a
row on 2 cores, µs with 20, 120 and 300 yields, the lowest and the highest of 3 to 5 medians in
turns: sendrecv by 4 ranks 41-90, 12-24 and 18-29, all_to_all_v 47-81, 26-38 and 29-54, all_reduce
14-26, 12-23 and 15-26; by 2 ranks none differs by more than the machine."""

_FIRST, _SECOND, _ABSOLUTE = 0, 1, 2
_Place = tuple[int, int, int, int]
"""What it is an offset of; the offset in bytes; slots of SCRATCH behind that; and bytes for each
unit of a call: one of its count, or of a call that runs with one count alone, the call."""
_Step = tuple[Any, int, int, int, int, tuple[_Place, ...], tuple[_Place, ...]]
"""The ufunc, None to copy; numpy's number of the type; elements, those of each unit, and the bytes
of one; sources and destinations."""


class Checked(Protocol):
    """What is asked of a checked call."""

    taken: int
    count: int
    places: tuple[int, int, int, int]
    any_class: Any


@dataclass(frozen=True, slots=True)
class _Sizes:
    """The calls that an entry serves."""

    units: range = range(1, 2)
    only: int | None = None  # the one count that it serves; None: its units are counts
    align: int = 1  # elements on whose multiples a slot of SCRATCH ends
    widest: int = 0  # bytes of an element there

    def slot(self, count: int) -> int:
        """Bytes of a slot of SCRATCH for a count."""
        return slot_size(-(-count // self.align) * self.align, self.widest)

    def argument(self, number: int, offset: int, count: int) -> _Place:
        """Where INPUT or OUTPUT of a call with this count lies in an argument."""
        return (number, 0, 0, offset // count) if self.only is None else (number, offset, 0, 0)


def is_wanted(setting: bool | None) -> bool:
    """Whether the setting ``compiled`` asks for it; see :func:`.compiled.is_wanted`."""
    return compiled.is_wanted(setting, _small_calls)


def fits(host: CpuExecutor) -> bool:
    """Whether calls of such a rank may run here: of processes of one host, on free links."""
    fabric = host.fabric
    polls = fabric.notify is None and fabric.fence is None and fabric.liveness is not None
    alone = fabric.threads or bool(fabric.nodes) or host.node_signals is not None
    return polls and not alone and host.pacer is None


Started = tuple[ActiveCall, Given, Task | None]
"""A call that has been entered, its addresses and count, and what is left of it."""


@dataclass(frozen=True, slots=True)
class Sending:
    """What moves the messages of a context: under which lock, and what goes on with those left."""

    lock: Any
    pairs: Pairs
    go_on: Callable[..., object]


class SmallCalls:
    """The calls of one rank that the compiled part knows.

    ``messages`` and ``vector`` move its messages and those of v-variants.
    """

    def __init__(
        self, state: Any, host: CpuExecutor, groups: set[Any], messages: Sending, vector: Sending
    ) -> None:
        shared, fabric = host.shared_state, host.fabric
        timer = fabric.liveness
        if _small_calls is None or timer is None:
            raise RuntimeError("small calls are for processes, where the compiled part is there")
        self._host, self._contexts = host, (messages, vector)
        self._calls = _small_calls.Calls(
            state,
            host,
            fabric,
            groups,
            host.resume,
            host.rest,
            shared.record_numbers,
            state.progress,
            state.progress.entered,
            tuple(
                (each.lock.acquire, each.lock.release, each.pairs, each.pairs.epochs, each.go_on)
                for each in self._contexts
            ),
            timer.alarm,
            # Views of their own: those of the shared state are released when it is closed.
            tuple(words[:] for words in shared.words),
            host.rank,
            fabric.spins * _POLLS,
            _YIELDS,
            shared.entered,
            shared.signatures,
        )
        self.make: Callable[..., bool] = self._calls
        """Makes a call that is known: of its arguments, its options and its own timeout, or None.

        False: it is for Python, and nothing of it has begun.
        """
        self.start: Callable[..., Started | None] = self._calls.start
        """The same of a call that nobody waits for."""
        self.exchange: Callable[..., Any] = self._calls.exchange
        """Makes known sends and receives: of the context, the arguments, options and timeout.

        False as above; else True, or what is left to be waited for.
        """
        self.post: Callable[..., bool] = self._calls.post
        """Enters such messages that nobody waits for: of the same arguments and a MessageWork.

        False as above; else the work has ended, or :attr:`.Progress.entered` has what is left.
        """
        self.finish: Callable[..., bool] = self._calls.finish
        """Moves what is left of all such messages; whether those of a work have ended.

        It waits as long as :attr:`exchange` does, if it is told to wait.
        """
        self.known: Callable[..., Any] = self._calls.known
        """What is kept of the sends and receives that :attr:`exchange` would make of the context,
        the arguments and options; or None."""
        self.exchange_group: Callable[..., Any] = self._calls.exchange_group
        """The same of a group's messages: of a tuple of name, sendbuf, recvbuf, ends and options
        for each call, and of the timeout of them all."""
        self.whole = _HALVES
        """What :meth:`add` notes of a call of which it knows all that it will know."""
        self._size = 0

    @property
    def lost(self) -> bool:
        """Whether messages that other ranks have seen ended in an error, and nobody goes on."""
        return bool(self._calls.lost)

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
        """Take a call that has just run, with its arguments, for each half that has its rows.

        Where its rows are alike for other counts it is taken for all of these.
        """
        hello, now, nothing = prepared.hello, prepared.call.count, self.whole - _HALVES
        name, sendbuf, recvbuf, op, root, how = call
        words, epoch = self._host.shared_state.words, self._host.epoch
        if prepared is not checked.any_class or not words:
            return  # arguments that share memory are another checked call; none: it has been closed
        one = _is_one(sendbuf, recvbuf)
        if one is None:
            return
        empty = any(array is not None and not array.size for array in (sendbuf, recvbuf))
        if not prepared.any_class or empty:
            checked.taken = self.whole
            return
        sizes = _sizes(prepared)
        if sizes.only is not None and checked.count != now:
            return
        found = [_bound(prepared, half, sizes) for half in (0, 1)]
        halves, taken, total = [], nothing, True
        for half, bound in enumerate(found):
            rows = None
            if bound is not None:
                rows = _rows(bound, words, sizes)
                if rows is None:
                    checked.taken = self.whole
                    return
                taken += 1 << half
                total = bound.total
            active = ActiveCall(prepared, 0, hello.signature, prepared.timeout)
            halves.append(rows and (active, rows))
        if taken in (nothing, checked.taken) or epoch != self._host.epoch:
            return  # a signal's handler has made a call meanwhile, perhaps with these rows
        if self._size == MOST:
            self.clear()
            taken += self.whole - _HALVES - nothing
        self._size += 1
        each = 1 if sizes.only is not None else now
        sent, offset, received, other = checked.places
        places = (
            sizes.argument(sent, offset, checked.count),
            sizes.argument(received, other, checked.count),
        )
        self._calls.add(
            *(
                name,
                op,
                root,
                dict(how),
                prepared.timeout,
                _kind(sendbuf, each),
                _kind(recvbuf, each),
                *places,
            ),
            *(total, hello.in_place, hello.count != 0, one, prepared.digest, hello.record),
            *(sizes.units.start, sizes.units.stop, -1 if sizes.only is None else sizes.only),
            *(sizes.align, sizes.widest, tuple(halves)),
        )
        checked.taken = taken

    def add_exchange(
        self, context: int, kept: Kept, call: tuple[str, Any, Any, Any, dict[str, Any]]
    ) -> None:
        """Take sends and receives that have just been made, with their arguments."""
        name, sendbuf, recvbuf, ends, how = call
        empty = any(array is not None and not array.size for array in (sendbuf, recvbuf))
        pairs, words = self._contexts[context].pairs, self._host.shared_state.words
        if not words:
            return  # it has been closed
        most = _small_calls.SMALL
        found = ((), ()) if empty else parts_of(kept, (sendbuf, recvbuf), pairs, most)
        if found is None:
            return
        if found[0]:
            if self._size == MOST:
                self.clear()
            self._size += 1
            arrays = _kind(sendbuf, 1), _kind(recvbuf, 1)
            shape = name, ends, dict(how)
            self._calls.add_exchange(context, kept.later, *shape, kept, *arrays, *found)
        kept.taken = self.whole


def _is_one(first: Any, second: Any) -> bool | None:
    """Whether both arguments are the same memory; None: they share some."""
    if first is None or second is None or not np.may_share_memory(first, second):
        return False
    same = start_of(first) == start_of(second) and first.nbytes == second.nbytes
    return True if same else None


def _kind(array: Any, units: int) -> tuple[np.dtype[Any], int, bool] | None:
    """The type of an argument, its elements for each unit, and whether it is writable."""
    return None if array is None else (array.dtype, array.size // units, array.flags.writeable)


def _sizes(prepared: CpuCall) -> _Sizes:
    """The counts for which the rows of a call are alike but for plain arithmetic."""
    count, counts = prepared.call.count, prepared.counts
    some = next(iter(prepared.bound.values()), None)
    recount = None if some is None else some.recount
    if recount is None or not recount.is_whole or not prepared.hello.count:
        return _Sizes(only=count)
    most = _small_calls.SMALL // max(recount.widest, prepared.call.dtype.itemsize)
    units = range(max(1, counts.start), min(counts.stop, most + 1))
    found = _Sizes(units, None, recount.align, recount.widest)
    return found if count in units else _Sizes(only=count)


def _bound(prepared: CpuCall, half: int, sizes: _Sizes) -> BoundRows | None:
    """Rows of a half: those of the call's count, or of any that they serve as well."""
    of_half = {key[1]: bound for key, bound in prepared.bound.items() if key[0] == half}
    found = of_half.get(prepared.call.count)
    if found is None and sizes.only is None:
        found = next((rows for count, rows in of_half.items() if count in sizes.units), None)
    return found if found is not None and found.given else None


def _rows(bound: BoundRows, words: list[Words], sizes: _Sizes) -> tuple[Any, ...] | None:
    """A single lane of plain rows; None where there is more to it."""
    lane = bound.lanes[0] if len(bound.lanes) == 1 else None
    if bound.messages or not isinstance(lane, tuple):
        return None
    numbers = {id(part): rank for rank, part in enumerate(words)}
    works, rows = iter(bound.works), []
    for waits, work, signals in lane:
        step = None
        if work is not None:
            step = _step(next(works), bound, sizes)
            if step is None:
                return None
        rows.append((flags_of(waits, numbers), step, flags_of(signals, numbers)))
    return tuple(rows)


def _step(work: RowArrays, bound: BoundRows, sizes: _Sizes) -> _Step | None:
    """What a row moves; None unless it copies, or combines by a loop of numpy alone."""
    _, from_, to, srcs, dsts, reduction = work
    if reduction is None or not reduction.is_plain or dsts[0].nbytes > _small_calls.SMALL:
        return None
    kind, ufunc, size = srcs[0].dtype, reduction.ufunc, srcs[0].size
    if (ufunc is None) != (len(srcs) == 1):
        return None
    if ufunc is not None:
        loop = f"{kind.char}{kind.char}->{kind.char}"
        if not isinstance(ufunc, np.ufunc) or loop not in ufunc.types:
            return None
    pairs = zip((*from_, *to), (*srcs, *dsts), strict=True)
    places = [_place(operand, array, bound, sizes) for operand, array in pairs]
    known = tuple(place for place in places if place is not None)
    if len(known) < len(places):
        return None
    fixed, each = (0, size // bound.count) if sizes.only is None else (size, 0)
    return ufunc, int(kind.num), fixed, each, kind.itemsize, known[: len(srcs)], known[len(srcs) :]


def _place(operand: Operand, array: Any, bound: BoundRows, sizes: _Sizes) -> _Place | None:
    """Where an array of a row lies; None for memory of a peer that is mapped."""
    start = start_of(array)
    if operand.span < 0 and sizes.only is not None:
        return _ABSOLUTE, start, 0, 0
    if operand.span < 0:
        return _ABSOLUTE, start - operand.index * sizes.slot(bound.count), operand.index, 0
    if not operand.own:
        return None
    base = _FIRST if operand.chunk.buffer is Buffer.INPUT else _SECOND
    if sizes.only is not None:
        return base, start - bound.given[base], 0, 0
    return base, 0, 0, operand.index * operand.kind.itemsize
