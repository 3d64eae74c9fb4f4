"""Prepared calls, found again by what they depend on, which is no address.

A call's arguments are checked once for their *shape*: collective, dtype, count, operator, root,
options, what of the alignment a kernel is compiled for, and how one buffer lies in the other. A
checked call is prepared once for each class of memory; across nodes and for copy engines, once for
each address. Every launch is given its addresses, and memory that peers reach is looked up by
address at every call: nothing is known of an old one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ringcoll.arguments.calls import Call, prepare
from ringcoll.bounded import evict
from ringcoll.config import Config
from ringcoll.dtypes import ReduceOp
from ringcoll.executors.contract import Given
from ringcoll.tuner.predicted import power
from ringcoll.views import Extent, device_view, start_of, view_at

CACHED_CALLS = 512
"""Calls that a communicator caches, and preparations of all of them: the oldest goes first. Where
preparations depend on addresses, between nodes and by copy engines, one call may have many."""

_STEADY = 64
"""Pairs of addresses of which a checked call remembers what it ran there."""

_ALIKE = 4
"""Calls that differ in their count alone by which others are prepared: GPU ranks need one for each
kernel."""


class Part(NamedTuple):
    """Where a buffer of a call lies: in argument 0 or 1, or in none (2), at an offset in bytes."""

    argument: int = 2
    offset: int = 0
    nbytes: int = 0

    def scaled(self, before: int, now: int) -> Part:
        """The part of a call of another count: it begins at a whole segment."""
        argument, offset, nbytes = self
        return Part(argument, offset // before * now, nbytes // before * now)


class Steady(NamedTuple):
    """What a call on buffers at the same addresses takes again, unless their memory has changed."""

    prepared: Any
    given: Given
    memory: object  # of which the state knows whether it has changed


@dataclass(slots=True, eq=False)
class CheckedCall:
    """A call whose arguments are checked, without addresses, and its preparations."""

    call: Call  # without arrays, or with those of its first time
    config: Config
    input: Part
    output: Part
    nbytes: tuple[int, int]  # of both arguments
    count: int
    any_class: Any = None  # the prepared call, if memory of any class will do
    prepared: dict[Hashable, Any] = field(default_factory=dict)  # by class of memory
    steady: dict[tuple[int, int], Steady] = field(default_factory=dict)  # by address of both
    taken: int = 0  # see SmallCalls.add, of CPU ranks

    alone: bool = field(init=False)  # whether INPUT and OUTPUT are its first argument
    apart: bool = field(init=False)  # whether they are its first and its second
    places: tuple[int, int, int, int] = field(init=False)  # of both: argument and offset

    def __post_init__(self) -> None:
        self.places = *self.input[:2], *self.output[:2]
        self.alone, self.apart = self.places == (0, 0, 0, 0), self.places == (0, 0, 1, 0)

    def starts(self, first: int, second: int) -> tuple[int, int]:
        """Where INPUT and OUTPUT of a call on arguments at these addresses begin."""
        bases, (sent, sent_offset, received, received_offset) = (first, second, 0), self.places
        return bases[sent] + sent_offset, bases[received] + received_offset

    def count_of(self, first: int, second: int) -> int:
        """The count of a call on arguments of so many bytes; 0 unless its count alone differs."""
        count, (one, other) = self.count, self.nbytes
        if one % count or other % count:
            return 0
        # Bytes of each argument for one element of the count; the call has one argument at least.
        one, other = one // count, other // count
        now = first // one if one else second // (other or 1)
        return now if first == one * now and second == other * now else 0

    def recounted(self, first: Extent, second: Extent) -> CheckedCall | None:
        """The call on arguments that lie there; None unless its count alone differs."""
        call, sent, received = self.call, self.input, self.output
        count, now = self.count, self.count_of(first[1], second[1])
        if not now:
            return None
        new = sent.scaled(count, now)
        parts = new, new if sent == received else received.scaled(count, now)
        call = call.on(call.send, call.recv)
        call.count, call.nbytes = now, call.nbytes // count * now
        return CheckedCall(call, self.config, *parts, (first[1], second[1]), now)


class CallCache:
    """The prepared calls of one communicator; ``how`` is for preparing them."""

    _counted = False
    """Whether a launch is given the count too: its prepared call serves others."""

    def __init__(self, state: Any, **how: bool) -> None:
        self._state, self._how = state, how
        self._checked: dict[Hashable, CheckedCall] = {}
        self.checked = self._checked.get
        """The checked call of a key whose arguments do not share memory, or None."""
        self._shapes: dict[Hashable, tuple[CheckedCall, ...]] = {}  # of any count, newest first
        self._prepared: dict[tuple[CheckedCall, Hashable], None] = {}  # all, the oldest first
        # Threads look calls up at once, and no call may wait for one that another is running. A
        # signal handler may close the communicator in the middle of that.
        self._adding = threading.RLock()

    def find(
        self,
        key: Hashable,
        first: int,
        second: int,
        checked: CheckedCall | None = None,
        patience: float | None = None,
    ) -> tuple[Any, Given] | None:
        """A prepared call, and what its launch on arguments at these addresses is given.

        ``key`` says all of the arguments but their addresses, which are 0 where there is no memory;
        None: such a call has not been checked. ``checked``: what :attr:`checked` has of it.
        ``patience``: of GPU ranks, see :meth:`.CudaPreparer.prepare`.
        """
        if checked is None:
            checked = self._checked.get(key)
        if second and first:
            distance = second - first
            if checked is None or -checked.nbytes[1] < distance < checked.nbytes[0]:
                checked = self._checked.get((key, distance))
        if checked is None:
            return None
        if checked.apart:  # most calls: saves a call
            start, end = first, second
        else:
            start, end = checked.starts(first, second)
        prepared = checked.any_class  # read once: another thread may evict it
        if prepared is None:
            return self._in_memory(checked, start, end, patience=patience)
        given = (start, end, 0, 0, checked.count) if self._counted else (start, end, 0, 0)
        return prepared, given

    def find_like(
        self,
        key: Hashable,
        shape: Hashable,
        first: Extent,
        second: Extent,
        patience: float | None = None,
    ) -> tuple[Any, Given] | None:
        """A call of GPU ranks whose count alone is new.

        It is kept like one that was checked, unless it is launched by words of another that are
        rewritten. ``shape`` says what the key does but the counts. Not one kernel runs every count:
        it may be prepared anew. None where it must be checked.
        """
        if second[0] and first[0] and overlap(first, second):
            if first != second:
                return None
            key, shape = (key, 0), (shape, 0)
        likes = self._shapes.get(shape)
        if likes is None:
            return None
        found = self._recounted(likes, first, second)
        if found is not None:
            return found
        checked = likes[0].recounted(first, second)
        if checked is None:
            return None
        starts = checked.starts(first[0], second[0])
        return self._prepared_like(likes, checked, (key, shape), starts, patience)

    def find_counted(
        self,
        key: Hashable,
        shape: Hashable,
        call: Call,
        first: Extent,
        second: Extent,
        patience: float | None = None,
    ) -> tuple[Any, Given] | None:
        """The same of a checked call with a count for each rank, which alone are new."""
        likes = self._shapes.get(shape)
        if likes is None or overlap(first, second):
            return None
        starts = start_of(call.send), start_of(call.recv)
        prepared = self.recounted(shape, call)
        if prepared is not None:
            return prepared, (*starts, 0, 0)
        checked = _checked_call(call, likes[0].config, first, second)
        return self._prepared_like(likes, checked, (key, shape), starts, patience)

    def recounted(self, shape: Hashable, call: Call) -> Any:
        """A call with a count for each rank, which alone are new, that is not kept; or None."""
        for like in self._shapes.get(shape, ()):
            before = like.any_class
            if before is not None:
                prepared = self._state.recount(before, call.count, call)
                if prepared is not None:
                    return prepared
        return None

    def like_of(self, shape: Hashable, prepared: Any) -> CheckedCall | None:
        """The checked call of a prepared one by which others of other counts are launched."""
        likes = *self._shapes.get(shape, ()), *self._shapes.get((shape, 0), ())
        return next((like for like in likes if like.any_class is prepared), None)

    def _prepared_like(
        self,
        likes: tuple[CheckedCall, ...],
        checked: CheckedCall,
        keys: tuple[Hashable, Hashable],
        starts: tuple[int, int],
        patience: float | None,
    ) -> tuple[Any, Given]:
        """A call like one that differs in its counts alone.

        What is prepared is kept; a launch that only rewrites words of another is not.
        """
        state, call, config, (key, shape) = self._state, checked.call, checked.config, keys
        start, end = starts
        extents = (start, checked.input.nbytes), (end, checked.output.nbytes)
        kind, given, prepared, used = None, (start, end, 0, 0), None, None
        for like in likes:
            if like.any_class is not None and prepared is None:
                prepared, used = state.prepare_like(like.any_class, call, config), like
        if prepared is None:
            # Once for each call: it counts their uses.
            kind, given, _ = state.memory_class(call, config, *extents, **self._how)
            for like in likes:
                before = like.prepared.get(kind)
                if before is not None and prepared is None:
                    once = state.recount(before, call.count, call if call.counts else None)
                    if once is not None:
                        with self._adding:
                            self._renew(like)
                        return once, given
                    prepared, used = state.prepare_like(before, call, config), like
        anew = prepared is None
        if prepared is None:
            prepared = self._prepare(viewed(call, extents, device_view), config, patience)
        with self._adding:
            if anew and call.count:  # no count is like 0
                self._shapes[shape] = checked, *likes[: _ALIKE - 1]
            elif used is not None:
                self._renew(used)
            self._keep(checked, kind, prepared, key)
        return prepared, given

    def _recounted(
        self, likes: Sequence[CheckedCall], first: Extent, second: Extent
    ) -> tuple[Any, Given] | None:
        """A call whose count has not come often, which is not kept; None: it is to be."""
        for like in likes:
            before = like.any_class
            count = 0 if before is None else like.count_of(first[1], second[1])
            prepared = self._state.recount(before, count) if count else None
            if prepared is not None:
                at, input_, output = (first[0], second[0], 0), like.input, like.output
                start, end = at[input_.argument], at[output.argument]
                if input_.offset or output.offset:
                    start += input_.offset // like.count * count
                    end += output.offset // like.count * count
                return prepared, (start, end, 0, 0)
        return None

    def add(
        self,
        key: Hashable,
        call: Call,
        config: Config,
        first: Extent,
        second: Extent,
        shape: Hashable = None,
        patience: float | None = None,
    ) -> tuple[Any, Given]:
        """Keep a checked call on arguments that lie there, and prepare it.

        With a key of None it is not kept. With a ``shape``, calls of other counts are kept like it.
        """
        shared = overlap(first, second)
        checked = _checked_call(call, config, first, second)
        # What is kept of a call on the host must not keep its arrays alive.
        whole = call if self._state.on_gpu else None
        starts = start_of(call.send), start_of(call.recv)
        found = self._in_memory(checked, *starts, whole, patience=patience)
        if key is None:
            return found
        with self._adding:
            evict(self._checked, CACHED_CALLS)
            self._checked[(key, second[0] - first[0]) if shared else key] = checked
            # On CPU ranks, calls with a count for each rank are never like others.
            same = call.count and (self._state.on_gpu or not call.custom_signature)
            if shape is not None and same and (not shared or first == second):
                evict(self._shapes, CACHED_CALLS)
                shape = (shape, 0) if shared else shape
                self._shapes[shape] = checked, *self._shapes.get(shape, ())[: _ALIKE - 1]
        return found

    def _in_memory(
        self,
        checked: CheckedCall,
        start: int,
        end: int,
        whole: Call | None = None,
        *,
        patience: float | None = None,
    ) -> tuple[Any, Given]:
        """The call prepared for memory of the class of these buffers; ``whole``: with arrays."""
        state, call = self._state, checked.call
        steady = checked.steady.get((start, end))
        if steady is not None and state.unchanged(steady.memory):
            return steady.prepared, steady.given
        extents = (start, checked.input.nbytes), (end, checked.output.nbytes)
        kind, given, memory = state.memory_class(call, checked.config, *extents, **self._how)
        prepared = checked.prepared.get(kind)
        if prepared is None:
            view = device_view if state.on_gpu else view_at
            whole = whole or viewed(call, extents, view)
            prepared = self._prepare(whole, checked.config, patience)
            with self._adding:
                self._keep(checked, kind, prepared)
        if memory is not None:
            with self._adding:
                evict(checked.steady, _STEADY)
                checked.steady[start, end] = Steady(prepared, given, memory)
        return prepared, given

    def _prepare(self, call: Call, config: Config, patience: float | None) -> Any:
        """Prepare a call from the beginning."""
        how = self._how if patience is None else {**self._how, "patience": patience}
        return self._state.prepare(call, config, **how)

    def _keep(
        self, checked: CheckedCall, kind: Hashable, prepared: Any, key: Hashable = None
    ) -> None:
        """Keep a prepared call, and with a key the checked one; the caller holds the lock."""
        if key is not None:
            evict(self._checked, CACHED_CALLS)
            self._checked[key] = checked
        while len(self._prepared) >= CACHED_CALLS:
            found = next(iter(self._prepared), None)
            if found is not None:
                del self._prepared[found]
                oldest, place = found
                oldest.prepared.pop(place, None)
                oldest.any_class = None
                oldest.steady.clear()
        self._prepared[checked, kind] = None
        checked.prepared[kind] = prepared
        if prepared.any_class:
            checked.any_class = prepared

    def _renew(self, checked: CheckedCall) -> None:
        """Make its preparations the newest: else calls that are prepared like it would evict it."""
        for kind in [*checked.prepared]:  # a signal handler's call may evict some
            if self._prepared.pop((checked, kind), checked) is None:
                self._prepared[checked, kind] = None

    def __len__(self) -> int:
        """How many calls are kept."""
        return len(self._checked)

    def clear(self) -> None:
        """Drop all calls."""
        with self._adding:
            self._checked.clear()
            self._shapes.clear()
            self._prepared.clear()


def viewed(call: Call, extents: tuple[Extent, Extent], view: Callable[..., Any]) -> Call:
    """A call on buffers that lie there."""
    send, recv = (
        view(*extent, call.dtype.numpy) if extent[0] else array
        for extent, array in zip(extents, (call.send, call.recv), strict=True)
    )
    return call.on(send, recv)


def overlap(first: Extent, second: Extent) -> bool:
    """Whether two arguments share memory; 0 is none."""
    if not first[0] or not second[0]:
        return False
    return -second[1] < second[0] - first[0] < first[1]


def _checked_call(call: Call, config: Config, first: Extent, second: Extent) -> CheckedCall:
    """A checked call on arguments that lie there, without them."""
    input_, output = (_part(array, first, second) for array in (call.send, call.recv))
    emptied = call.on(_emptied(call.send), _emptied(call.recv))
    return CheckedCall(emptied, config, input_, output, (first[1], second[1]), call.count)


def _part(array: npt.NDArray[Any] | None, first: Extent, second: Extent) -> Part:
    """The part of the arguments that a buffer is."""
    at = start_of(array)
    if array is None or not at:
        return Part()
    for number, (start, nbytes) in enumerate((first, second)):
        if start <= at < start + nbytes:
            return Part(number, at - start, array.nbytes)
    raise ValueError(f"the buffer at {at:#x} lies in no argument")  # its memory is not read


def _emptied(array: npt.NDArray[Any] | None) -> npt.NDArray[Any] | None:
    """Nothing for a buffer with an address; another empty one for an empty one."""
    return None if array is None or start_of(array) else np.empty(0, array.dtype)


def counted_shape(
    name: str, call: Call, starts: tuple[int, int], given: Hashable
) -> tuple[object, ...]:
    """What a checked call of GPU ranks with a count for each rank is found by when these are new.

    In place its own slot may begin anywhere in an array; ``given`` says the rest.
    """
    return name, call.op, starts[0] & 7, starts[1] & 7, power(call.nbytes), given


def prepare_collective(
    name: str, arguments: tuple[Any, ...], rank: int, nranks: int, send: Any, recv: Any
) -> Call:
    """Check a call whose buffers have one count."""
    op, root = arguments
    return prepare(name, rank=rank, nranks=nranks, sendbuf=send, recvbuf=recv, op=op, root=root)


_INTEGERS = frozenset({int, *(np.dtype(code).type for code in np.typecodes["AllInteger"])})
"""Types of counts that cannot change; a tensor of one element can."""

_NUMBERS = _INTEGERS | {bool, float, *(np.dtype(code).type for code in np.typecodes["Float"])}
"""Types of numbers that cannot change."""

_MOST_COUNTS = 1 << 12
"""Of a longer array, which may be a buffer at the wrong place, no copy is made."""


def comparable(arguments: tuple[Any, ...]) -> object:
    """Counts and displacements by value and by type; without a hash if nothing is equal to them."""
    found: list[object] = []
    for argument in arguments:
        kind = argument.__class__
        if argument is None or kind is int:
            found.append(argument)
        elif (kind is list or kind is tuple) and _INTEGERS.issuperset(map(type, argument)):
            found.append((*argument, *map(type, argument)))
        elif kind is np.ndarray and argument.dtype.kind in "iu" and argument.size <= _MOST_COUNTS:
            found.append((argument.dtype, argument.shape, argument.tobytes()))
        elif isinstance(argument, (str, ReduceOp)):
            found.append(argument)
        else:
            return found
    return tuple(found)


def can_change(*arguments: object) -> bool:
    """Whether one is a number that can change, as a tensor of one element: by it nothing is kept.

    It is the same object and has the same hash when it is another rank.
    """
    kinds = {*map(type, arguments)} - _NUMBERS
    return any(hasattr(kind, "__index__") or hasattr(kind, "__float__") for kind in kinds)
