"""Groups: the calls of several ranks of this process, or of several pairs, made as one.

Collectives of one communicator run one after the other, as do calls of one pair in one direction.
Messages that stand between two collectives of their communicator run between them, on CPU ranks;
all else runs concurrently, so that a pattern of sends and receives cannot deadlock. Sends and
receives of CPU ranks are posted with those that are under way.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, ContextDecorator
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any

from ringcoll.arguments.calls import Call
from ringcoll.communicator.cpu.entered import OF_A_GROUP
from ringcoll.communicator.cpu.exchange import GroupedExchange, made_at_once
from ringcoll.communicator.cpu.progress import Progress
from ringcoll.communicator.cpu.waiting import wait_for
from ringcoll.communicator.failures import error_text, more_frames, settle
from ringcoll.communicator.rank import RankState
from ringcoll.communicator.work import Work
from ringcoll.errors import AbortedError, UsageError
from ringcoll.executors.contract import GroupCall, LaunchRequest
from ringcoll.executors.drive import Task, drive, together
from ringcoll.fabric import Fabric, each


@dataclass(frozen=True, slots=True, eq=False)
class ControlCall:
    """A call of the control plane inside a group; ``run`` is collective."""

    run: Callable[[], object]


Launched = LaunchRequest | GroupCall | Call
"""What a group runs: a prepared call, or a send or receive that it matches with others."""

Held = Launched | GroupedExchange
"""What a group holds of a call; sends and receives may be kept ones."""

Item = tuple["RankState", "Held", "float | None"]
Part = tuple["RankState", "Launched", "float | None"]
Control = tuple["RankState", ControlCall, None]


class _Local(threading.local):
    """The group of a thread. The default is in the class: a missing attribute costs 600 ns."""

    group: Group | None = None


of_thread = _Local()

open_groups: set[Group] = set()
"""The groups of all threads: to look whether there are any takes a quarter of the time of asking
for this thread's."""


class Group:
    """The calls made inside a ``with ringcoll.group():``."""

    __slots__ = ("__weakref__", "alive", "asked", "items", "works")

    def __init__(self) -> None:
        self.items: list[Item | Control] = []
        self.alive: list[object] = []
        self.works: list[Work] = []
        self.asked: Work | None = None
        """That of the innermost body, which may be discarded alone, once a call asked for it."""

    @property
    def work(self) -> Work:
        """What an asynchronous call of the innermost body returns."""
        if self.asked is None:
            self.asked = Work(
                "of a group", not_started="the group that it belongs to has not ended"
            )
            self.works.append(self.asked)
        return self.asked

    def add(self, state: RankState, call: Held, timeout: float | None, alive: object) -> None:
        """Add a call to run at the end of the group; keeps its arrays ``alive`` until then."""
        state.usable()
        self.items.append((state, call, timeout))
        self.alive.append(alive)

    def add_control(self, state: RankState, run: Callable[[], object]) -> None:
        """Collect a call of the control plane."""
        state.usable()
        self.items.append((state, ControlCall(run), None))


def current() -> Group | None:
    """The group of this thread, or None; one that another thread has left has ended."""
    found = of_thread.group
    if found is not None and found not in open_groups:
        of_thread.group = found = None
    return found


class _Body(ContextDecorator):
    """The body of a ``with group():``; a generator took 2 to 6 µs longer."""

    _open = False  # in the class: an interrupt may come before all else

    def __enter__(self) -> None:
        if self._open:
            raise UsageError(
                "group(): the block has been entered already; call group() once for each block"
            )
        outer = current()
        mine = Group() if outer is None else outer
        self._outer, self._group, self._asked = outer, mine, mine.asked
        self._items, self._works = len(mine.items), len(mine.works)
        mine.asked = None
        self._open = True  # from here on an interrupt is for __del__
        if outer is None:
            open_groups.add(mine)
            of_thread.group = mine

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self._leave(error)
        self._open = False  # not where an interrupt has come

    def __del__(self) -> None:
        """Discard the calls of a block that an interrupt has ended on its way in or out."""
        if self._open:
            self.__exit__(None, KeyboardInterrupt("an interrupt"), None)

    def _leave(self, error: BaseException | None) -> None:
        mine = self._group
        if self._outer is not None:
            mine.asked = self._asked
            if error is not None:
                _discard(mine, self._items, self._works, error)
            return
        here = of_thread.group is mine
        open_groups.discard(mine)
        if here:
            of_thread.group = None
        if error is not None or not here:
            refused = UsageError(
                "group(): the block ends in another thread than it began in: none of its calls is "
                "made; leave it in the thread that has entered it"
            )
            _discard(mine, 0, 0, error or refused)
            if error is None:
                raise refused
        elif mine.items:
            _run_group(mine)

    def _recreate_cm(self) -> _Body:
        return _Body()


def group() -> AbstractContextManager[None]:
    """Collect the calls of the body and run them together at its end; nests.

    Calls of several communicators, collectives, sends and receives may be mixed. Those of one
    communicator keep their order, but its sends and receives between two collectives run at once,
    and on GPUs all of them after the collectives. An exception in the body discards the group and
    aborts its communicators, so that the other ranks do not wait for calls that are never made.

    Where ranks are threads, ``empty``, ``register``, ``split`` and ``shrink`` are collected too, so
    that one thread can hold all ranks of :func:`ringcoll.init_all`. Such an array can be written at
    once; such a communicator is made when the group ends.

    Raises:
        UsageError: the body ends in another thread than it began in; its calls are discarded.
        Error: what one of the calls raises; none of them may be repeated alone.

    Example:
        >>> comms = ringcoll.init_all(2)
        >>> arrays = [np.full(2, comm.rank + 1.0) for comm in comms]
        >>> with ringcoll.group():
        ...     for comm, x in zip(comms, arrays):
        ...         comm.all_reduce(x)
        >>> arrays
        [array([3., 3.]), array([3., 3.])]

    """
    return _Body()


def _run_group(group: Group) -> None:
    """Run the calls of a group, and end its works."""
    items = group.items
    states = {id(state): state for state, _, _ in items}
    try:
        for state in states.values():
            state.yield_to_worker()
        if len(states) == 1:  # most groups: they need no stack of locks
            with state.lock:
                _run_in_stages(items)
        else:
            with contextlib.ExitStack() as held:
                # All threads take the locks in one order, so that two groups cannot deadlock.
                for _, state in sorted(states.items()):
                    held.enter_context(state.lock)
                _run_in_stages(items)
    except BaseException as error:
        for state in states.values():
            state.fail(error)
            state.quarantine(tuple(group.alive))
        for work in group.works:
            work._end(error)
        raise
    else:
        for work in group.works:
            work._end()
    finally:  # whoever has begun them has said how they ended
        group.items.clear()
        group.works.clear()


def _discard(group: Group, first: int, first_work: int, error: BaseException) -> None:
    """Drop the calls of a body that raised, and abort their communicators."""
    why = f"a group was left by {error_text(error)}"
    for state, _, _ in group.items[first:]:
        state.abort(why)
    for work in group.works[first_work:]:
        work._end(AbortedError(f"{why}: none of its calls was made"))
    del group.items[first:], group.works[first_work:]


def _run_in_stages(items: list[Item | Control]) -> None:
    """Run a group's calls; those of one communicator that move data and others keep their order."""
    moves: list[Item] = [
        (state, call, timeout)
        for state, call, timeout in items
        if not isinstance(call, ControlCall)
    ]
    if len(moves) == len(items):  # most groups
        run_together(moves)
        return
    stages: list[tuple[list[Item], list[Control]]] = []
    last: dict[int, tuple[int, bool]] = {}  # a communicator's stage, and whether it has others
    for state, call, timeout in items:
        at, others = last.get(id(state), (0, False))
        is_control = isinstance(call, ControlCall)
        at += others and not is_control
        last[id(state)] = at, is_control
        if at == len(stages):
            stages.append(([], []))
        if isinstance(call, ControlCall):
            stages[at][1].append((state, call, None))
        else:
            stages[at][0].append((state, call, timeout))
    for data, control in stages:
        run_together(data)
        _run_control(control)


def _run_control(items: list[Control]) -> None:
    """Run collective calls of ranks of this thread, each rank's on a thread of its own."""
    calls: dict[int, list[ControlCall]] = {}
    fabrics: dict[int, Fabric] = {}
    for state, call, _ in items:
        calls.setdefault(id(state.fabric), []).append(call)
        fabrics[id(state.fabric)] = state.fabric

    def run(fabric: Fabric) -> None:
        for call in calls[id(fabric)]:
            call.run()

    if fabrics:
        each(list(fabrics.values()), run)


def run_together(items: list[Item]) -> None:
    """Run calls of any ranks of this process on this thread."""
    if not items:
        return
    states = list({id(state): state for state, _, _ in items}.values())
    kept = [call for _, call, _ in items if isinstance(call, GroupedExchange)]
    begun = False
    try:
        for state in states:
            state.usable()
            state.fabric.check()
        begun = len(items) > 1  # a refused call alone has no effect on other ranks
        if len(kept) == len(items) and len(states) == 1 and _made_at_once(items, kept):
            return
        parts: Any = _expanded(items) if kept else items
        _run(states, parts)
        for call in kept:
            call.learn()
    except BaseException as error:
        limit = more_frames(error)
        begun = begun or any(call.small is not None and call.small.lost for call in kept)
        try:
            known = settle(states, error, begun=begun)
        finally:
            sys.setrecursionlimit(limit)
        if known is error:
            raise
        raise known from error


def _made_at_once(items: list[Item], kept: list[GroupedExchange]) -> bool:
    """Whether the compiled part has made the messages of one rank, with one timeout."""
    state, _, timeout = items[0]
    if state.progress is None or any(own != timeout for _, _, own in items):
        return False
    return made_at_once(state.progress, kept, timeout)


def _expanded(items: list[Item]) -> list[Part]:
    """The calls with those that are kept as the messages that they are."""
    return [
        (state, call, timeout)
        for state, given, timeout in items
        for call in (given.calls() if isinstance(given, GroupedExchange) else [given])
    ]


def _run(states: list[RankState], items: list[Part]) -> None:
    """Run calls of ranks that are usable."""

    def driven(tasks: list[Task]) -> None:
        timeout = min(map(_timeout, items))
        drive(tasks, lambda ready: wait_for(states, ready, timeout))

    joint = [call for _, call, _ in items if isinstance(call, GroupCall)]
    alone = None if joint else _only_messages(items)
    if alone is not None:
        calls = [call for _, call, _ in items if isinstance(call, Call)]
        alone.issue(calls, min(map(_timeout, items)), OF_A_GROUP, (), later=False)
        return
    if len(joint) < len(items):
        driven(_tasks(items))
    for first in {type(call): call for call in joint}.values():
        tasks = first.tasks([call for call in joint if type(call) is type(first)])
        if tasks:
            driven(tasks)


def _only_messages(items: list[Part]) -> Progress | None:
    """The messages of the one rank whose sends and receives are all there is, with one timeout."""
    state = items[0][0]
    alike = all(
        isinstance(call, Call) and not call.shown and other is state and timeout == items[0][2]
        for other, call, timeout in items
    )
    return state.progress if alike else None


def _timeout(item: Part) -> float:
    state, call, timeout = item
    if not isinstance(call, Call):
        return call.timeout
    return state.fabric.timeout if timeout is None else timeout


def _launches(calls: list[tuple[RankState, list[LaunchRequest]]]) -> list[Task]:
    """A task for each rank; one for all communicators of a rank that shares its device.

    Such a launch waits on the host for the others of its device. A later one of another
    communicator, enqueued meanwhile on its stream, could wait for a rank that has both in order.
    """
    tasks: dict[tuple[str, int], list[Task]] = {}
    ranks = Counter(state.launches_on for state, _ in calls)
    for number, (state, prepared) in enumerate(calls):
        place, key = state.launches_on, ("call", number)
        if place is not None and ranks[place] == 1:  # several of a communicator go on in turns
            key = "device", place[0]
        tasks.setdefault(key, []).append(state.executor.task(prepared))
    return [chain.from_iterable(own) for own in tasks.values()]


def _tasks(items: list[Part]) -> list[Task]:
    """Tasks for the calls of all communicators, which run concurrently."""
    own: dict[int, list[Part]] = {}
    for item in items:
        if not isinstance(item[1], GroupCall):
            own.setdefault(id(item[0]), []).append(item)
    runs = [_runs(of) for of in own.values()]
    at_once = list(chain.from_iterable(chain.from_iterable(of) for of in runs if len(of) == 1))
    return [*_unordered(at_once), *(_in_order(of) for of in runs if len(of) > 1)]


def _runs(items: list[Part]) -> list[list[Part]]:
    """The calls of one communicator in parts that run one after the other.

    One part of GPU ranks: which of their calls is ready is not known on the host.
    """
    if items[0][0].on_gpu:
        return [items]
    return [list(part) for _, part in groupby(items, key=lambda item: isinstance(item[1], Call))]


def _in_order(runs: list[list[Part]]) -> Task:
    for items in runs:
        yield from together(_unordered(items))


def _unordered(items: list[Part]) -> list[Task]:
    """Tasks for messages and for the collectives of each communicator."""
    calls: dict[int, tuple[RankState, list[LaunchRequest]]] = {}
    messages: dict[int, tuple[Progress, list[tuple[Call, float]]]] = {}
    pairs: dict[tuple[int, int, bool], tuple[RankState, list[Call], float]] = {}
    for item in items:
        state, call, _ = item
        if isinstance(call, LaunchRequest):
            calls.setdefault(id(state), (state, []))[1].append(call)
        elif isinstance(call, Call) and state.progress is not None and not call.shown:
            own = messages.setdefault(id(state), (state.progress, []))[1]
            own.append((call, _timeout(item)))
        elif isinstance(call, Call):
            key = id(state), call.peer, call.send is not None
            pairs.setdefault(key, (state, [], _timeout(item)))[1].append(call)
    return [
        *_launches(list(calls.values())),
        *(state.pairs.task(halves, timeout) for state, halves, timeout in pairs.values()),
        *(progress.task(own) for progress, own in messages.values()),
    ]
