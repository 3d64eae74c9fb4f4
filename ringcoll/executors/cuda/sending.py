"""Sends and receives of GPU ranks: from checked calls to one launch for all that belong together.

All halves of a rank go into one kernel: two that were queued on one stream would wait for each
other. Where ranks share a GPU their halves may have to share the launch too: see
:mod:`.rendezvous`.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ringcoll.arguments.calls import Call
from ringcoll.bounded import evict
from ringcoll.cuda.device import on
from ringcoll.cuda.streams import waiting_ends_capture
from ringcoll.executors.cuda.auto_register import MIN_BYTES
from ringcoll.executors.cuda.loading import Launching
from ringcoll.executors.cuda.message_calls import IN_SCRATCH, Member, PairCalls
from ringcoll.executors.cuda.message_launch import (
    GIVEN_EACH,
    MessageLaunches,
    PreparedPairs,
    Record,
)
from ringcoll.executors.cuda.point_to_point import window_bytes
from ringcoll.executors.cuda.recounted_messages import NewCounts, Places, RecountedMessages
from ringcoll.executors.cuda.rendezvous import Bundle
from ringcoll.executors.cuda.shared_launch import order
from ringcoll.executors.drive import Pause, Task

if TYPE_CHECKING:
    from ringcoll.executors.cuda.executor import CudaExecutor

KEPT = 128
"""Launches that a rank keeps; the oldest goes first."""


@dataclass(frozen=True, slots=True, eq=False)
class _KeptGroup:
    """The launch of a group's messages of one rank that shares its device with no other."""

    calls: tuple[tuple[Call, ...], ...]  # kept ones, by whose identities it is found
    launchable: Launching
    records: list[Record]
    timeout: float  # the shortest of its messages


class CudaPairs:
    """One rank's sends and receives, with the workspace, report and streams of ``executor``."""

    def __init__(self, executor: CudaExecutor) -> None:
        self.executor, self.rank = executor, executor.rank
        self.running: list[Bundle[Member]] = []
        self.small_bytes = window_bytes(executor.workspace)
        self._launches = MessageLaunches(executor)
        self._recounted = RecountedMessages(executor, self._launches)
        self._kept: dict[tuple[object, ...], tuple[Launching, list[Record]]] = {}
        self._groups: dict[tuple[int, ...], _KeptGroup] = {}

    @property
    def launches_alone(self) -> bool:
        """Whether no other rank shares the device, and so the launch."""
        return len(self.executor.shared_launch.ranks) == 1

    def member(self, paired: Sequence[PairCalls]) -> Member:
        """This rank's part of a launch; its large messages for copy engines are numbered."""
        if not any(each.copied for each in paired):
            return Member(self, tuple(paired))
        scratch, before = self.executor.large_scratch, Counter[tuple[int, bool]]()
        engines = []
        for call, copied in [(call, calls.copied) for calls in paired for call in calls.calls]:
            engine = ""
            large = call.nbytes >= max(copied, self.small_bytes + 1)
            if copied and large and call.peer != self.rank:
                engine, pair = " engine=copy", (call.peer, call.send is not None)
                if scratch is not None and scratch.number_message(
                    pair[0], sends=pair[1], before=before[pair]
                ):
                    engine += f" generation={scratch.generation}{IN_SCRATCH}"
                before[pair] += 1
            engines.append(engine)
        return Member(self, tuple(paired), tuple(engines))

    def prepared(self, calls: PairCalls, places: Places) -> PreparedPairs:
        """The launch of the messages of one call, for all arrays of their shape.

        Args:
            calls: the messages.
            places: of each the bytes into INPUT and OUTPUT; None where it has none.

        """
        member, timeout = self.member((calls,)), calls.timeout
        launchable, records = self._keep((timeout, member.key()), [member], timeout)
        sizes = [call.nbytes for call in calls.calls]
        return self._prepared(calls, sizes, places, launchable, records)

    def recounted(self, new: NewCounts) -> PreparedPairs:
        """The launch of messages of new counts, which holds until the next such launch."""
        return self._prepared(new.calls, new.sizes, new.places, *self._recounted.launch(new))

    def _prepared(
        self,
        calls: PairCalls,
        sizes: Sequence[int],
        places: Places,
        launchable: Launching,
        records: list[Record],
    ) -> PreparedPairs:
        given: list[tuple[int, int, int]] = []
        received: list[tuple[int, int, int, int]] = []
        first, small = 0, self.small_bytes
        for call, nbytes, (send, recv) in zip(calls.calls, sizes, places, strict=True):
            if send is not None:
                given.append((first, 0, send))
            if recv is not None:
                given.append((first + 1, 1, recv))
                if nbytes > small and send is None:
                    received.append((first + 2, recv, call.peer, nbytes))
            first += GIVEN_EACH
        kept = tuple(given), first, tuple(received), max(sizes, default=0) > small
        return PreparedPairs(launchable, records, calls.timeout, *kept)

    def run(self, prepared: PreparedPairs, stream: int, send: int, recv: int) -> None:
        """Launch the messages of one call, on arrays at these addresses."""
        executor, given, starts = self.executor, [0] * prepared.addresses, (send, recv)
        executor.async_errors.check()
        self._publish(prepared.records, prepared.timeout)
        for place, side, offset in prepared.given:
            given[place] = starts[side] + offset
        if prepared.large:
            self.update_mappings()
            for place, offset, peer, nbytes in prepared.received:
                given[place] = self.mapped_address(peer, recv + offset, nbytes)
        executor.enqueue(prepared.launchable, stream, tuple(given))

    def launch_kept(self, own: Sequence[PairCalls]) -> bool:
        """Launch a group's messages as before if they are kept; False: nothing was done."""
        found = self._groups.get(tuple([id(call.calls) for call in own]))
        stream = own[0].stream
        if found is None or any(call.new or call.stream != stream for call in own):
            return False
        self.executor.async_errors.check()
        self._launch_group(own, (found.launchable, found.records), found.timeout)
        return True

    def launch_recounted(self, own: Sequence[PairCalls]) -> bool:
        """Launch the messages of one rank's group if their counts are new; False: nothing was done.

        A rank that shares its device with others may have to share the launch.
        """
        stream = own[0].stream
        if any(call.pairs is not self or call.stream != stream or call.copied for call in own):
            return False
        timeout = min(call.timeout for call in own)
        new = self._recounted.of_group(own, timeout) if self.launches_alone else None
        if new is None:
            return False
        self.executor.async_errors.check()
        self._launch_group(own, self._recounted.launch(new), timeout)
        return True

    def _launch_group(
        self, own: Sequence[PairCalls], launch: tuple[Launching, list[Record]], timeout: float
    ) -> None:
        """Enqueue the messages of a group of this rank alone on their one stream."""
        executor, (launchable, records) = self.executor, launch
        self._publish(records, timeout)
        addresses = Member(self, tuple(own)).addresses()
        executor.enqueue(launchable, own[0].stream, tuple(addresses))
        executor.stream_order.release(own[-1])

    def _publish(self, records: Sequence[Record], timeout: float) -> None:
        """Keep what errors and peers say of this rank's messages that are launched now."""
        executor = self.executor
        for shared_state, number, text in records:
            if shared_state is executor.shared_state:
                executor.async_errors.launched_message(number, timeout)
                if not shared_state.keeps_record(number):
                    shared_state.record_bytes(number, text)

    def update_mappings(self) -> None:
        """Before a launch with large messages: map what peers have made or registered."""
        self.executor.mappings.update()
        if self.executor.auto_register is not None:
            self.executor.auto_register.poll()

    def mapped_address(self, peer: int, address: int, nbytes: int) -> int:
        """The receive buffer of a large message as its sender maps it; 0: the message is staged.

        Symmetric memory is mapped; other memory is counted, and registered automatically.
        """
        executor = self.executor
        if not address or nbytes <= self.small_bytes or peer == self.rank:
            return 0
        found = executor.hello((0, 0), (address, nbytes), registered=False)[1]
        registry = executor.auto_register
        if found or registry is None or nbytes < MIN_BYTES:
            return found
        found = registry.mapped_address(address, nbytes, peer)
        if not found:
            registry.count_use(address)
        return found

    def tasks(self, calls: Sequence[PairCalls]) -> list[Task]:
        """The launches of :meth:`.PairCalls.tasks`; the first of the calls is this rank's."""
        if self.launch_kept(calls) or self.launch_recounted(calls):
            return []
        members: dict[int, list[PairCalls]] = {}
        for call in calls:
            members.setdefault(id(call.pairs), []).append(call.whole())
        launches: dict[int, list[Member]] = {}
        for of in members.values():
            shared_launch = of[0].pairs.executor.shared_launch
            launches.setdefault(id(shared_launch), []).append(of[0].pairs.member(of))
        groups = [sorted(group, key=lambda member: member.rank) for group in launches.values()]
        devices: dict[int, list[tuple[list[Member], Launching | None]]] = {}
        for group in groups:
            # Loaded before anything is launched: loading may wait for a device whose kernel waits.
            loaded = _launchable(group) if len(groups) > 1 else None
            ordinal = group[0].pairs.executor.device.ordinal
            devices.setdefault(ordinal, []).append((group, loaded))
        return [_in_order(of) for of in devices.values()]

    def task(self, calls: Sequence[PairCalls], _timeout: float) -> Task:
        """Launch all sends and receives of this rank at once."""
        for task in self.tasks(calls):
            yield from task

    def compare_running(self) -> None:
        """Does nothing: kernels compare the hellos."""

    def late(self, active: Bundle[Member]) -> str:
        """The message of a deadline before the launch: ranks of the same device made no call."""
        missing = [
            f"{'send to' if end.sends else 'recv from'} rank {end.other}"
            for end in self.executor.shared_launch.rendezvous.missing(active)
            if (end.sender if end.sends else end.receiver) == self.rank
        ]
        waited = max(paired.timeout for member in active.members for paired in member.paired)
        return (
            f"{', '.join(missing) or 'send and recv'} on rank {self.rank}: waited {waited:g} s for "
            f"the other end, which shares {self.executor.device} and the launch; each send needs "
            f"its recv, in one group or by the rank's own thread"
        )

    def absent(self, active: Bundle[Member]) -> list[int]:
        """The ranks without whose call a bundle cannot be launched."""
        missing = self.executor.shared_launch.rendezvous.missing(active)
        own = {member.rank for member in active.members}
        return sorted({end.other for end in missing} - own)

    def launchable(
        self, members: Sequence[Member], timeout: float
    ) -> tuple[Launching, list[Record]]:
        """The launch for some ranks of this device, until the next one, and its records."""
        found: tuple[Launching, list[Record]]
        alone = len(members) == 1 and not members[0].engines and self.launches_alone
        new = self._recounted.of_group(members[0].paired, timeout) if alone else None
        if new is not None:
            found = self._recounted.launch(new)
        else:
            key = (timeout, *(member.key() for member in members))
            found = self._keep(key, members, timeout)
            self._keep_group(members[0], *found, timeout)
        for member in members:
            member.pairs._publish(found[1], timeout)
        return found

    def _keep_group(
        self, member: Member, launchable: Launching, records: list[Record], timeout: float
    ) -> None:
        """Keep the launch of a rank that shares its device with no other for the next group."""
        paired = member.paired
        if not self.launches_alone or member.engines or len({p.stream for p in paired}) > 1:
            return
        # Others are made for one call, or of no shape that is found again.
        if all(each.key and each.addresses for each in paired):
            calls = tuple(each.calls for each in paired)
            key = tuple(map(id, calls))
            self._groups.pop(key, None)  # it is the newest
            evict(self._groups, KEPT)
            self._groups[key] = _KeptGroup(calls, launchable, records, timeout)

    def _keep(
        self, key: tuple[object, ...], members: Sequence[Member], timeout: float
    ) -> tuple[Launching, list[Record]]:
        """The launch for some ranks of this device, which is kept."""
        found = self._kept.pop(key, None)
        if found is None:
            evict(self._kept, KEPT)
            found = self._launches.launch(members, timeout)
        self._kept[key] = found
        return found


def _in_order(groups: Sequence[tuple[Sequence[Member], Launching | None]]) -> Task:
    """Launch those of several communicators on one device one after the other.

    A launch that waits on the host for ranks of its device would else come behind a later one on
    its stream, which may wait for a rank that has enqueued them in order.
    """
    for members, loaded in groups:
        yield from _task(members, loaded)


def _task(members: Sequence[Member], loaded: Launching | None) -> Task:
    """Launch for ranks of one device, once all ends that the launch waits for are in one.

    ``loaded``: the launch of these members alone, if it is known.
    """
    shared_launch = members[0].pairs.executor.shared_launch
    if len(shared_launch.ranks) == 1:
        _launch(members, loaded)
        return
    ends = [end for member in members for end in member.ends()]
    bundle = Bundle(tuple(members), tuple(ends))
    for member in members:
        member.pairs.running.append(bundle)
    shared_launch.rendezvous.submit(bundle, _launch)
    while not bundle.launched.is_set():
        yield Pause(bundle.launched.is_set)
    for member in members:
        member.pairs.running.remove(bundle)
    if bundle.error is not None:
        raise bundle.error


def _launchable(members: Sequence[Member]) -> Launching:
    """The launch of members, by the shortest of their timeouts."""
    timeout = min(paired.timeout for member in members for paired in member.paired)
    return members[0].pairs.launchable(members, timeout)[0]


def _launch(members: Sequence[Member], loaded: Launching | None = None) -> None:
    """Enqueue one kernel for ranks of one device, ordered behind all their streams."""
    members = sorted(members, key=lambda member: member.rank)
    for member in members:
        member.pairs.executor.async_errors.check()
    launchable = loaded or _launchable(members)
    ordinal = members[0].pairs.executor.device.ordinal
    streams = dict.fromkeys(paired.stream for member in members for paired in member.paired)
    *others, stream = streams
    for other in others:
        order(ordinal, other, stream)
    for member in members:
        member.pairs.executor.stream_order.switch_to(stream)
    addresses = [member.addresses() for member in members]
    longest = max(map(len, addresses))
    filled = (each + [0] * (longest - len(each)) for each in addresses)
    with on(ordinal):
        launchable.launch(stream, tuple(itertools.chain.from_iterable(filled)))
    for member in members:
        _count_copied(member, stream)
    for other in others:
        order(ordinal, stream, other)
    for member in members:
        # Its own stream: another rank's may be destroyed before this rank's next call.
        member.pairs.executor.stream_order.release(member.paired[-1])


def _count_copied(member: Member, stream: int) -> None:
    """Count the large messages of a launch, as their other ends do."""
    scratch, copied = member.pairs.executor.large_scratch, member.copied()
    if scratch is None or not copied:
        return
    if waiting_ends_capture(stream):
        scratch.captured = True
        return
    for peer, sends in copied:
        scratch.message_launched(peer, sends=sends)
