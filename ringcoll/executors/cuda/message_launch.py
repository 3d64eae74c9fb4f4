"""Launches of messages: the kernel that moves the halves of some ranks, with its parameter.

Messages of other lengths come with almost every call of some programs. What no message decides of a
parameter is packed once, and of the words of a half only its lengths are written anew, so a launch
is made in some 10 us a message.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ringcoll.arguments.calls import Call
from ringcoll.executors.cuda.copy_gates import GATE_THREADS, CopyGate
from ringcoll.executors.cuda.copy_launch import CopyLaunch
from ringcoll.executors.cuda.loader import Launchable
from ringcoll.executors.cuda.loading import Launching
from ringcoll.executors.cuda.message_copies import lane_of, message_gate_body, message_schedule
from ringcoll.executors.cuda.params import (
    TIMEOUT_WORD,
    Addresses,
    Header,
    address_words,
    given_address,
    given_words,
    nanoseconds,
    pack,
    program_word,
)
from ringcoll.executors.cuda.point_to_point import (
    Half,
    Message,
    empty_body,
    pairs_body,
    rank_words,
    shared_out,
    width_of,
)
from ringcoll.executors.cuda.simple import THREADS
from ringcoll.executors.shared_state import SharedState
from ringcoll.views import start_of

if TYPE_CHECKING:
    from ringcoll.executors.cuda.executor import CudaExecutor
    from ringcoll.executors.cuda.message_calls import Member

GIVEN_EACH = 3
"""Addresses that a launch is given for each call: INPUT, OUTPUT, OUTPUT as its sender maps it."""

_DIRECT_RANKS = 4
"""Ranks of a GPU whose large messages to each other may be written directly: the words for both
ways, of more ranks, do not fit the parameter of their one launch."""

Record = tuple[SharedState, int, bytes]
"""The number and text of a message, under which its host keeps it."""


@dataclass(frozen=True, slots=True)
class _Base:
    """A kernel, and its parameter without messages."""

    function: int
    words: array[int]


@dataclass(slots=True, eq=False)
class PreparedPairs:
    """The launch of the messages of one call, for all arrays of their shape."""

    launchable: Launching
    records: list[Record]
    timeout: float
    given: tuple[tuple[int, int, int], ...]
    """Addresses of its messages: which of the launch, 0 or 1 for INPUT or OUTPUT, and bytes."""
    addresses: int  # that a launch is given
    received: tuple[tuple[int, int, int, int], ...]
    """Large ones: which address, bytes into OUTPUT, peer, and bytes."""
    large: bool  # whether any is large


class MessageLaunches:
    """Makes the launches of one rank's messages, and of ranks that share its GPU."""

    def __init__(self, executor: CudaExecutor) -> None:
        self._executor = executor
        self._bases: dict[int, _Base] = {}  # by the words for messages

    def launch(self, members: Sequence[Member], timeout: float) -> tuple[Launching, list[Record]]:
        """The launch of some ranks of this device, and its records."""
        executor, records = self._executor, list[Record]()
        halves = [_halves(member, records) for member in members]
        if len(members) == 1 and not members[0].engines:
            (member,), (own,) = members, halves
            blocks = self._blocks(member, own)
            return self.alone(own, blocks, len(member.calls), timeout), records
        load, where = self._loads(timeout), self._where
        header = Header(timeout, 0, False, False, executor.workspace.pair_replicas)
        scratch: tuple[int, ...] = ()
        if executor.large_scratch is not None and any(member.engines for member in members):
            scratch = executor.large_scratch.addresses
        local = [addresses_for_messages(member.pairs.executor, scratch) for member in members]
        lane = lane_of(halves[0]) if len(members) == 1 else None
        if lane is None:
            return self._together(members, halves, local, header, load), records
        halves[0].remove(lane)

        def gate(row: CopyGate) -> Launchable:
            body = message_gate_body(executor.workspace, lane, row)
            parameter = pack(body, header, executor.workspace.progress, local)
            return Launchable(load(body.text), 1, 1, GATE_THREADS, parameter)

        found = message_schedule(executor.workspace, local[0], lane)
        beside = self._together(members, halves, local, header, load) if halves[0] else None
        return CopyLaunch(found, gate, beside, executor.streams, shared=False, where=where), records

    def _together(
        self,
        members: Sequence[Member],
        halves: Sequence[Sequence[Half]],
        local: Sequence[Addresses],
        header: Header,
        load: Callable[[str], int],
    ) -> Launchable:
        """The kernel of the halves of some ranks."""
        workspace = self._executor.workspace
        blocks = [self._blocks(*of) for of in zip(members, halves, strict=True)]
        body = pairs_body(workspace, local, halves, blocks)
        parameter = pack(body, header, workspace.progress, local)
        grid = max(1, *map(sum, blocks))
        words = address_words(body, local, GIVEN_EACH * max(len(each.calls) for each in members))
        return Launchable(load(body.text), grid, len(local), THREADS, parameter, words)

    def alone(
        self, halves: Sequence[Half], blocks: Sequence[int], calls: int, timeout: float
    ) -> Launchable:
        """The kernel of one rank's halves, none of them for copy engines.

        Args:
            halves: of so many ``calls`` together.
            blocks: CUDA blocks of each half.
            calls: how many have addresses that a launch is given.
            timeout: seconds that a wait may take.

        """
        workspace, at = self._executor.workspace, addresses_for_messages(self._executor)
        own = rank_words(workspace, at, halves, blocks)
        width = width_of([own], workspace.nranks)
        base = self._bases.get(width)
        if base is None:
            base = self._base(timeout, width, at)
        first, words = program_word(at), base.words[:]
        words[TIMEOUT_WORD] = nanoseconds(timeout)
        words[first : first + len(own)] = array("Q", own)
        held = given_words(own, first, GIVEN_EACH * calls)
        return Launchable(base.function, max(1, sum(blocks)), 1, THREADS, words, held)

    def _base(self, timeout: float, width: int, at: Addresses) -> _Base:
        """The kernel for so many words, kept."""
        workspace = self._executor.workspace
        body = empty_body(workspace, width)
        header = Header(timeout, 0, False, False, workspace.pair_replicas)
        packed = array("Q", pack(body, header, workspace.progress, (at,)))
        found = _Base(self._loads(timeout)(body.text), packed)
        self._bases[width] = found
        return found

    def _loads(self, timeout: float) -> Callable[[str], int]:
        """What loads a kernel."""
        return partial(self._executor.kernels.function, timeout=timeout, where=self._where)

    @property
    def _where(self) -> str:
        return f"send and recv on rank {self._executor.rank}"

    def _blocks(self, member: Member, halves: Sequence[Half]) -> list[int]:
        """The CUDA blocks of each half.

        A root has more sends and receives than the others. If max_sms refused it alone, they would
        wait for it.
        """
        most = max(member.most, min(len(halves), self._executor.machine.blocks))
        return shared_out(halves, self._executor.workspace, most, f"rank {member.rank}")


def addresses_for_messages(executor: CudaExecutor, scratch: tuple[int, ...] = ()) -> Addresses:
    """What a kernel of messages needs of a rank; ``scratch`` of copy engines."""
    memory, report = executor.memory, executor.report.device
    mappings = executor.mappings.pointer
    return Addresses(executor.rank, memory.pointers, report, mappings, scratch=scratch)


def _halves(member: Member, records: list[Record]) -> list[Half]:
    """The calls of a rank by peer and direction; their signature texts go to ``records``."""
    shared_state = member.pairs.executor.shared_state
    sharing = member.pairs.executor.shared_launch.ranks
    staging = sharing if len(sharing) > _DIRECT_RANKS else ()
    found: dict[tuple[int, bool, bool], list[Message]] = {}
    for at, call in enumerate(member.calls):
        copies = call.send is not None and call.recv is not None
        text = f"count={call.count} dtype={call.dtype.name}"
        if member.engines:
            text += member.engines[at]
        source, target = (
            given_address(address, GIVEN_EACH * at + end) if address else 0
            for end, address in enumerate(addresses_of(call))
        )
        if copies:
            message = Message(source, call.nbytes, target=target)
        else:
            address = target if call.send is None else source
            number = next(shared_state.numbers)
            records.append((shared_state, number, call.tagged(call.shown or text).encode()))
            stages = call.recv is None or call.peer in staging
            mapped = 0 if stages else given_address(0, GIVEN_EACH * at + 2)
            message = Message(
                address, call.nbytes, text, number, mapped=mapped, scratch=member.in_scratch(at)
            )
        found.setdefault((call.peer, call.send is not None, copies), []).append(message)
    return [
        Half(peer, sends, tuple(messages), copies, peer in staging and not copies)
        for (peer, sends, copies), messages in found.items()
    ]


def addresses_of(call: Call) -> tuple[int, int]:
    """Where INPUT and OUTPUT of a call begin; 0: it has none."""
    return start_of(call.send), start_of(call.recv)
