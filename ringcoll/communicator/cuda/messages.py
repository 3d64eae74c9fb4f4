"""Messages of GPU ranks: from the caller's arrays to the launch of a call's sends and receives.

Messages are found by their shape. Those whose counts alone are new are launched like others between
the same ranks, and only checked where their counts say how a buffer is cut; they are kept when they
come again.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from ringcoll.arguments.calls import Call
from ringcoll.arguments.counts import Site
from ringcoll.arguments.vector import VCall, all_to_all_segments
from ringcoll.bounded import Seen, evict
from ringcoll.communicator.call_cache import CACHED_CALLS, can_change, comparable
from ringcoll.communicator.cpu.rank_calls import with_options
from ringcoll.communicator.cuda.device_work import DeviceWork
from ringcoll.communicator.engine import Engine, check_tag
from ringcoll.communicator.group import of_thread, open_groups
from ringcoll.communicator.work import Work
from ringcoll.cuda.readers import Libraries
from ringcoll.errors import ArgumentError
from ringcoll.executors.contract import GroupCall, LaunchRequest
from ringcoll.executors.cuda.launches import StreamOwners
from ringcoll.executors.cuda.message_calls import PairCalls
from ringcoll.executors.cuda.message_launch import PreparedPairs
from ringcoll.executors.cuda.recounted import COUNTS, REPEATS
from ringcoll.executors.cuda.recounted_messages import (
    AroundCount,
    NewCounts,
    Peers,
    Places,
    around_count,
)
from ringcoll.options import checked_async_op, take_seconds
from ringcoll.tuner.measured import ANY_BYTES
from ringcoll.views import start_of

_ALL_TO_ALL = "all_to_all_v"

_EVERY: Peers = ()
"""Stands for the peers of an all_to_all_v: all ranks."""


@dataclass(slots=True, eq=False)
class _Messages:
    """The checked messages of one call, for all arrays of their shape."""

    calls: PairCalls
    places: Places
    nbytes: tuple[int, int]  # of both buffers
    peers: Peers
    texts: tuple[AroundCount, ...]
    timeout: float  # of messages that are alike and have none of their own
    prepared: PreparedPairs | None = None  # the launch of these alone
    seen: Seen = field(default_factory=lambda: Seen(COUNTS, often=REPEATS))
    """Counts of messages that are alike, and a timeout of their own."""

    def recounted(
        self,
        counts: tuple[int, ...],
        seconds: float | None,
        places: Places,
    ) -> NewCounts:
        """Messages like these; ``seconds``: a timeout of their own."""
        calls, timeout = self.calls, self.timeout if seconds is None else seconds
        if calls.timeout != timeout:
            calls = replace(calls, timeout=timeout)
        return NewCounts(calls, self.peers, counts, self.texts, places)


_MessageShape = tuple[tuple[Any, ...], _Messages | None, Any, bool, int, int, dict[str, Any]]
"""The key of messages, the kept messages if there are any, and what is not kept of their call: its
stream, whether it returns a Work, the addresses of ``sendbuf`` and ``recvbuf``, its other options.
A tuple, since a call is found in a microsecond."""


class MessageEngine(Engine):
    """Makes the calls of one GPU rank that are sends and receives."""

    _libraries: Libraries
    _owners: StreamOwners

    def __init__(self, state: Any, nranks: int, *, keeps: bool) -> None:
        super().__init__(state, nranks)
        self._keeps_messages = keeps
        self._messages: dict[object, _Messages] = {}
        self._alike: dict[object, _Messages] = {}  # by what is no count

    def message(
        self, name: str, sendbuf: Any, dest: Any, recvbuf: Any, source: Any, exact: Any, how: Any
    ) -> Work | None:
        """Find messages by their shape, or check and prepare them, and launch them."""
        # With types: True and 1.0 are equal to 1.
        peers = dest, source, exact, dest.__class__, source.__class__, exact.__class__
        shape = self._message_shape(name, peers, sendbuf, recvbuf, how)
        if shape is None:
            return super().message(name, sendbuf, dest, recvbuf, source, exact, how)
        found: _Messages | NewCounts | None = shape[1]
        if found is None:
            check_tag(name, self._rank, shape[-1])
            found = self._recounted_message(shape)
        if found is None:
            calls = self._check_message(name, sendbuf, dest, recvbuf, source, exact)
            found = self._kept_messages(name, calls, shape, peers)
        return self._launch_messages(found, shape, name, sendbuf, recvbuf)

    def exchange(
        self,
        name: str,
        check: Callable[..., VCall],
        sendbuf: Any,
        recvbuf: Any,
        arguments: tuple[Any, ...],
        how: dict[str, Any],
    ) -> Work | None:
        """Find the messages of a v-variant by its shape, or check them, and launch them."""
        shape = self._message_shape(name, comparable(arguments), sendbuf, recvbuf, how)
        if shape is None:
            return super().exchange(name, check, sendbuf, recvbuf, arguments, how)
        found: _Messages | NewCounts | None = shape[1]
        if found is None and name == _ALL_TO_ALL:
            found = self._recounted_all_to_all(shape, arguments)
        if found is None:
            calls = self._check_exchange(name, check, sendbuf, recvbuf, arguments)
            peers = _EVERY if name == _ALL_TO_ALL else _peers_of(calls)
            found = None if peers is _EVERY else self._recounted_exchange(calls, shape)
            found = found or self._kept_messages(name, calls, shape, peers)
        return self._launch_messages(found, shape, name, sendbuf, recvbuf)

    def _recounted_message(self, shape: _MessageShape) -> NewCounts | None:
        """A send, a receive or both like others of another count; None: they are to be kept."""
        _, peers, sends, receives, _ = shape[0]
        key, seconds = _without_counts(shape, peers)
        like = self._alike.get(key)
        if like is None:
            return None
        counts = tuple((sends if sent else receives)[0] for _, sent, _ in like.peers)
        if not all(counts) or like.seen.often((counts, seconds)):
            return None
        return like.recounted(counts, seconds, like.places)

    def _recounted_exchange(self, calls: list[Call], shape: _MessageShape) -> NewCounts | None:
        """Checked messages like those of another call; None: they are to be kept."""
        _, _, _, _, first, second, _ = shape
        key, seconds = _without_counts(shape, _peers_of(calls))
        like, counts = self._alike.get(key), tuple(call.count for call in calls)
        if like is None or like.seen.often((counts, seconds)):
            return None
        return like.recounted(counts, seconds, _places_of(calls, first, second))

    def _recounted_all_to_all(
        self, shape: _MessageShape, arguments: tuple[Any, ...]
    ) -> NewCounts | None:
        """The messages of an all_to_all_v like another one; None: they are to be kept.

        Nothing else than its counts is to be checked: a call with these arguments has been right.
        """
        key, seconds = _without_counts(shape, _EVERY)
        like = self._alike.get(key)
        if like is None:
            return None
        _, _, input_, output, _ = shape[0]
        site = Site(_ALL_TO_ALL, self._rank, self._nranks)
        segments = all_to_all_segments(site, (input_[0], output[0]), *arguments)
        if like.seen.often((segments, seconds)):
            return None
        sent, first, received, second = segments
        size = like.calls.calls[0].dtype.itemsize
        counts: list[int] = []
        places: list[tuple[int | None, int | None]] = []
        for peer, sends, receives in like.peers:
            counts.append((sent if sends else received)[peer])
            places.append(
                (first[peer] * size if sends else None, second[peer] * size if receives else None)
            )
        return like.recounted(tuple(counts), seconds, tuple(places))

    def _message_shape(
        self, name: str, arguments: object, sendbuf: Any, recvbuf: Any, how: dict[str, Any]
    ) -> _MessageShape | None:
        """The shape of messages, and what is kept of it; None: nothing can be kept."""
        if not self._keeps_messages:
            return None
        libraries, stream, later, options = self._libraries, None, False, how
        values: tuple[object, ...] = ()
        if how:
            options = dict(how)
            stream = options.pop("stream", None)
            later = options.pop("async_op", False)
            if later is not True and later is not False:
                later = checked_async_op(later, f"{name} on rank {self._rank}")
            if options:
                values = *options.items(), *map(type, options.values())
        sent = (0, None) if sendbuf is None else libraries[type(sendbuf)].read(sendbuf)
        received = (0, None) if recvbuf is None else libraries[type(recvbuf)].read(recvbuf)
        if sent is None or received is None:
            return None
        (first, sends), (second, receives) = sent, received
        key = name, arguments, sends, receives, values
        try:
            found = self._messages.get(key)
        except TypeError:  # an illegal argument that has no hash
            return None
        nbytes = (bytes_of(sends), bytes_of(receives)) if found is None else found.nbytes
        if first and second and -nbytes[1] < second - first < nbytes[0]:
            return None  # in place other messages are made, or it is refused
        return key, found, stream, later, first, second, options

    def _launch_messages(
        self,
        found: _Messages | NewCounts,
        shape: _MessageShape,
        name: str,
        sendbuf: Any,
        recvbuf: Any,
    ) -> Work | None:
        """Launch messages on the caller's stream, alone or with others of a group."""
        key, _, stream, later, first, second, _ = shape
        like = recvbuf if sendbuf is None else sendbuf
        library = self._libraries[like.__class__]
        if stream is None:
            pointer, owner = library.stream(like)
        else:
            pointer, owner = self._stream_of(stream, like, name)
        if owner is None or found.calls.copied or (open_groups and of_thread.group is not None):
            given = tuple(
                (0 if send is None else first + send, 0 if recv is None else second + recv)
                for send, recv in found.places
            )
            new = found if isinstance(found, NewCounts) else None
            calls = found.calls.on(pointer, given, owned=owner is not None, new=new)
            return self._enqueue(calls, pointer, (sendbuf, recvbuf), owner, later=later, name=name)
        prepared = None if isinstance(found, NewCounts) else found.prepared
        if prepared is None and not isinstance(found, NewCounts):
            prepared = self._prepared_messages(key, found)
        state: Any = self._state
        with state.lock:
            before = self._owners.now
            if before.get(pointer) is not owner or len(before) > 1:
                self._owners.now = {pointer: owner}
            try:
                if prepared is None:  # its launch holds until the next of its kind
                    prepared = state.recounted_pairs(found)
                state.run_pairs(prepared, pointer, first, second)
            except BaseException:
                self._keep(before)
                raise
        if not later:
            return None
        event = state.cuda.events.record(pointer)
        return DeviceWork(state.cuda, event, pointer, owner, library, like, name)

    def _kept_messages(
        self, name: str, calls: list[Call], shape: _MessageShape, peers: object
    ) -> _Messages:
        """Keep the checked messages of a call; ``peers``: what no count of others may change."""
        state: Any = self._state
        key, _, _, _, first, second, options = shape
        state.usable()
        _refuse_matching(name, calls)
        config, _, _ = self._options(name, options)
        if "timeout" in options:
            rest = {option: value for option, value in options.items() if option != "timeout"}
            timeout = state.timeout_of(self._options(name, rest)[0])
        else:
            timeout = state.timeout_of(config)
        made = tuple(with_options(call, config) for call in calls)
        paired = state.paired(
            made,
            0,
            state.timeout_of(config),
            owned=True,
            most=config.max_sms,
            engine=config.engine,
        )
        places, own = _places_of(calls, first, second), _peers_of(calls)
        texts, nbytes = tuple(map(around_count, made)), (bytes_of(key[2]), bytes_of(key[3]))
        found = _Messages(paired, places, nbytes, own, texts, timeout)
        arguments: Any = key[1]
        if can_change(*arguments, *options.values()):
            found.calls = replace(paired, key=())
            return found
        with state.lock:
            evict(self._messages, CACHED_CALLS)
            self._messages[key] = found
            alike = _without_counts(shape, peers)[0]
            # A larger message would be for copy engines.
            if alike not in self._alike and state.least_copied(config.engine) == ANY_BYTES:
                evict(self._alike, CACHED_CALLS)
                self._alike[alike] = found
        return found

    def _prepared_messages(self, key: object, found: _Messages) -> PreparedPairs:
        """Prepare the messages of a call, before anything of them is launched."""
        state: Any = self._state
        state.usable()
        with state.lock:  # another thread's launch uses the same kept kernels
            try:
                found.prepared = state.prepared_pairs(found.calls, found.places)
            except BaseException:
                self._messages.pop(key, None)
                raise
        return found.prepared

    def forget(self) -> None:
        """Drop all prepared calls."""
        super().forget()
        self._messages.clear()
        self._alike.clear()

    def pairs(
        self, name: str, calls: list[Call], how: dict[str, Any], alive: tuple[object, ...], /
    ) -> Work | None:
        """Sends and receives that are launched together."""
        state = self._state
        state.usable()
        _refuse_matching(name, calls)
        config, stream, later = self._options(name, how)
        pointer, owner = self._stream_of(stream, first_of(alive), name)
        timeout = state.timeout_of(config)
        owned = owner is not None
        made = tuple(with_options(call, config) for call in calls)
        paired = state.paired(
            made, pointer, timeout, owned=owned, most=config.max_sms, engine=config.engine
        )
        return self._enqueue(paired, pointer, alive, owner, later=later, name=name)

    @abstractmethod
    def _stream_of(self, stream: Any, like: object, name: str) -> tuple[int, object]:
        """The handle of a call's stream, and its owner, if known."""

    @abstractmethod
    def _enqueue(
        self,
        call: LaunchRequest | GroupCall,
        stream: int,
        alive: tuple[object, ...],
        owner: object,
        *,
        later: bool,
        name: str,
    ) -> Work | None:
        """Enqueue a call alone, or with others of a group."""

    @abstractmethod
    def _keep(self, before: dict[int, object]) -> None:
        """After a call that was not enqueued: keep the owner of the last enqueued call's stream."""


def _without_counts(shape: _MessageShape, peers: object) -> tuple[tuple[object, ...], float | None]:
    """What of a key of messages is no count and no timeout, and a timeout of their own."""
    (name, _, sends, receives, values), options, seconds = shape[0], shape[-1], None
    if "timeout" in options:
        options = dict(options)
        seconds = take_seconds(options)
        values = *options.items(), *map(type, options.values())
    return (name, peers, sends and sends[1:], receives and receives[1:], values), seconds


def _peers_of(calls: list[Call]) -> Peers:
    return tuple((c.peer, c.send is not None, c.recv is not None) for c in calls)


def _places_of(calls: list[Call], first: int, second: int) -> Places:
    """Where messages lie in ``sendbuf`` and ``recvbuf``, which begin there.

    Empty ones, which have no address, lie at the beginning.
    """
    return tuple(
        (
            None if call.send is None else (start_of(call.send) or first) - first,
            None if call.recv is None else (start_of(call.recv) or second) - second,
        )
        for call in calls
    )


def bytes_of(shape: Any) -> int:
    """Bytes of an argument, by its shape."""
    return int(shape[0] * shape[1].itemsize) if shape else 0


def first_of(buffers: tuple[object, ...]) -> object:
    """The buffer whose library knows the current stream; None: CuPy knows it."""
    return next((buffer for buffer in buffers if buffer is not None), None)


def _refuse_matching(name: str, calls: list[Call]) -> None:
    """Refuse what only the host could decide: whose message a receive takes, and how long it is."""
    for call in calls:
        if not call.exact or call.peer < 0:
            raise ArgumentError(
                f"{name} on rank {call.rank}: source=ANY and exact=False are for CPU ranks: a "
                f"kernel cannot look at messages first; pass the source and the count that it sends"
            )
