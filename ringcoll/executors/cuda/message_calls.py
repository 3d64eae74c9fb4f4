"""Sends and receives of GPU ranks: the checked messages of a call, and those of a rank's launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ringcoll.arguments.calls import Call
from ringcoll.executors.contract import GroupCall
from ringcoll.executors.cuda.message_launch import GIVEN_EACH, addresses_of
from ringcoll.executors.cuda.recounted_messages import NewCounts
from ringcoll.executors.cuda.rendezvous import End
from ringcoll.executors.drive import Task
from ringcoll.views import device_view

if TYPE_CHECKING:
    from ringcoll.executors.cuda.sending import CudaPairs

IN_SCRATCH = " scratch=large"
"""What the signature of a message says that is staged in the large SCRATCH of its receiver."""


@dataclass(slots=True, eq=False)
class PairCalls(GroupCall):
    """Sends and receives of one rank that are launched together.

    Only who makes it writes to it, and to other records of a launch: frozen ones take 1.2 µs to
    make, not 0.24.
    """

    pairs: CudaPairs
    calls: tuple[Call, ...]  # their arrays are views of device memory, never read here
    stream: int
    timeout: float  # seconds that a wait of their kernel may take
    owned: bool = True  # whether the caller keeps the stream alive until the next call
    most: int | None = None  # CUDA blocks; None: what the device has for a rank
    copied: int = 0  # bytes from which copy engines may send a message; 0: none of these
    addresses: tuple[tuple[int, int], ...] = ()  # of each call; (): those of its arrays
    key: tuple[object, ...] = ()  # what a kernel depends on of the calls
    new: NewCounts | None = None  # counts of their own; the calls have those of others

    def on(
        self,
        stream: int,
        addresses: tuple[tuple[int, int], ...],
        *,
        owned: bool,
        new: NewCounts | None = None,
    ) -> PairCalls:
        """The same calls on a stream, of arrays at other addresses, and of new counts."""
        kept = self.pairs, self.calls, stream, self.timeout, owned, self.most, self.copied
        return PairCalls(*kept, addresses, () if new else self.key, new)

    def whole(self) -> PairCalls:
        """The same without new counts, which are those of calls of its own."""
        new = self.new
        if new is None:
            return self
        calls = []
        for call, count, nbytes, (before, dtype, _), at in zip(
            self.calls, new.counts, new.sizes, new.texts, self.addresses, strict=True
        ):
            send, recv = (
                None if buffer is None else device_view(start, nbytes, call.dtype.numpy)
                for buffer, start in zip((call.send, call.recv), at, strict=True)
            )
            own = call.on(send, recv)
            own.count, own.nbytes = count, nbytes
            if call.shown:
                own.shown = f"{before.decode()}{count}{dtype.decode()}"
            calls.append(own)
        made = self.on(self.stream, self.addresses, owned=self.owned)
        made.calls = tuple(calls)
        return made

    @staticmethod
    def tasks(calls: Sequence[GroupCall]) -> list[Task]:
        """Launches of all ranks of this process: ranks that share a GPU share a launch.

        No task is left where one rank's have been launched as those of an earlier group.
        """
        own = [call for call in calls if isinstance(call, PairCalls)]
        return own[0].pairs.tasks(own)


@dataclass(slots=True, eq=False)
class Member:
    """What one rank does in a launch."""

    pairs: CudaPairs
    paired: tuple[PairCalls, ...]
    engines: tuple[str, ...] = ()  # what the signature of each call says of copy engines

    @property
    def rank(self) -> int:
        """The rank's number."""
        return self.pairs.rank

    @property
    def calls(self) -> list[Call]:
        """Its calls, in order."""
        return [call for paired in self.paired for call in paired.calls]

    @property
    def most(self) -> int:
        """The most CUDA blocks."""
        return min(p.most or self.pairs.executor.machine.blocks for p in self.paired)

    def key(self) -> tuple[object, ...]:
        """What a kernel's parameter depends on, beside the addresses that a launch is given."""
        calls = tuple(paired.key or shapes_of(paired.calls) for paired in self.paired)
        return self.rank, self.most, calls, self.engines

    def in_scratch(self, number: int) -> bool:
        """Whether a call's message is staged in the large SCRATCH of its receiver."""
        return bool(self.engines) and self.engines[number].endswith(IN_SCRATCH)

    def copied(self) -> list[tuple[int, bool]]:
        """The pairs and directions of the large messages that copy engines may send."""
        calls = zip(self.calls, self.engines, strict=False)
        return [(call.peer, call.send is not None) for call, engine in calls if engine]

    def addresses(self) -> list[int]:
        """The addresses that a launch is given for each call."""
        pairs, updated, small = self.pairs, False, self.pairs.small_bytes
        found: list[int] = []
        for paired in self.paired:
            calls, new = paired.calls, paired.new
            given = paired.addresses or [*map(addresses_of, calls)]
            sizes = new.sizes if new else [call.nbytes for call in calls]
            for call, nbytes, (send, recv) in zip(calls, sizes, given, strict=True):
                mapped = 0
                if nbytes > small:
                    if not updated:
                        pairs.update_mappings()
                        updated = True
                    if not self.in_scratch(len(found) // GIVEN_EACH):
                        mapped = pairs.mapped_address(call.peer, recv, nbytes)
                found += send, recv, mapped
        return found

    def ends(self) -> list[End]:
        """The ends of messages whose other end shares the device."""
        executor, most = self.pairs.executor, self.pairs.small_bytes
        return [
            End(self.rank, call.peer, True, call.nbytes > most)
            if call.send is not None
            else End(call.peer, self.rank, False)
            for call in self.calls
            if call.peer in executor.shared_launch.ranks
            and (call.send is None or call.recv is None)
        ]


def shapes_of(calls: Sequence[Call]) -> tuple[object, ...]:
    """What a kernel depends on of calls."""
    return tuple(
        (c.peer, c.count, c.dtype.name, c.send is not None, c.recv is not None, c.shown, c.tag)
        for c in calls
    )
