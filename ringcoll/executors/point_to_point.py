"""Point-to-point: one two-rank plan for each ordered pair, staged through a landing zone.

A send's count or a gather_v's displacement is known to two ranks only, so a pair has its own epoch,
hello, flags and SCRATCH, and never touches the collectives' epoch. Call x of a pair may write when
both ranks have entered call x - 1, so a small send returns before the receive is posted, one call
ahead at most.

The sender's hello says how many elements come. A receive that takes fewer than its buffer holds
waits for it and enters with the sender's count, so that both ends run the same plan.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ringcoll.algorithms import build
from ringcoll.arguments.calls import Call
from ringcoll.collectives import Collective
from ringcoll.dtypes import DTYPES, DType
from ringcoll.encode import Program, encode
from ringcoll.executors.drive import Lane, Pause, Task, steps
from ringcoll.executors.message_lane import MessageLane
from ringcoll.executors.mismatch import different_ends
from ringcoll.executors.node_signals import NodeSignals
from ringcoll.executors.rows import (
    Binding,
    NodeMessages,
    Pacer,
    TraceEntry,
    flag_slots,
    lane_rows,
    senders,
)
from ringcoll.executors.shared_state import HELLO_WORDS, MESSAGES, Hello, SharedState, Words
from ringcoll.fabric import Fabric
from ringcoll.fabric.mpi import PAIRS
from ringcoll.launch import Launch, Layout
from ringcoll.plan import Buffer

WINDOW = 2
MESSAGE_BYTES = 64 << 20
"""The longest message between nodes; MPI pipelines it."""

SENDER, RECEIVER = 0, 1

_DTYPE_NUMBERS = {row.name: number for number, row in enumerate(DTYPES)}


@dataclass(slots=True)
class ActivePairCall:
    """One half of a pair's call under way on this rank; its epoch is 0 before it has entered."""

    call: Call
    timeout: float
    epoch: int = 0
    signature: int = 0

    @property
    def sends(self) -> bool:
        """Whether this rank is the sender."""
        return self.call.send is not None


class Pairs:
    """One rank's halves of all its pairs in one context; without a pacer links run free."""

    def __init__(
        self,
        fabric: Fabric,
        shared_state: SharedState,
        pacer: Pacer | None,
        node_signals: NodeSignals | None = None,
        context: int = MESSAGES,
    ) -> None:
        self.fabric, self.shared_state, self.pacer = fabric, shared_state, pacer
        self.node_signals, self.context = node_signals, context
        self.rank = fabric.rank
        self.running: list[ActivePairCall] = []
        self.trace: list[TraceEntry] | None = None
        self._epochs: defaultdict[tuple[int, bool], int] = defaultdict(int)

    def enter(self, active: ActivePairCall) -> None:
        """Publish this half's hello to the peer without waiting."""
        call, sends = active.call, active.sends
        self._epochs[call.peer, sends] += 1
        epoch = active.epoch = self._epochs[call.peer, sends]
        text = self.text(call)
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        active.signature = int.from_bytes(digest, "little") or 1
        number = next(self.shared_state.numbers)
        self.shared_state.record(number, self._shown(call))
        at = self._at(call.peer, sends=sends)
        hello = Hello(active.signature, number, call.count, _DTYPE_NUMBERS[call.dtype.name])
        self.shared_state.enter(epoch, hello, at)
        if self._is_remote(call.peer) and self.node_signals is not None:
            self.node_signals.announce_pair(call.peer, at, epoch, number)
        if self.fabric.notify is not None:
            self.fabric.notify(call.peer)

    def task(self, calls: Sequence[Call], timeout: float) -> Task:
        """Several calls of one pair and direction, one after the other."""
        for call in calls:
            if call.send is not None and call.recv is not None:
                call.recv[...] = call.send  # a local copy, unknown to other ranks
                continue
            yield from self.half(ActivePairCall(call, timeout))

    def half(self, active: ActivePairCall) -> Task:
        """One half from its entry to its end.

        A send waits until the peer has entered the call before, when its landing zone is free; a
        receive waits for the sender's hello, before which no data arrive.
        """
        call, peer = active.call, active.call.peer
        self.running.append(active)
        if not call.exact:
            if not self.has_arrived(peer):
                yield Pause(lambda: self.has_arrived(peer))
            count, dtype = self.arrived(peer)
            if call.recv is not None and count <= call.count and dtype.name == call.dtype.name:
                recv = call.recv[:count]
                active.call = replace(call, recv=recv, count=count, nbytes=recv.nbytes, exact=True)
        self.enter(active)
        yield from self._await(active, active.epoch - 1 if active.sends else active.epoch)
        self.compare(active)
        yield from steps(self.lanes(active))
        self.compare(active)
        self.running.remove(active)

    def lanes(self, active: ActivePairCall) -> list[Lane]:
        """The lanes of this half."""
        call, base = active.call, active.epoch << 32
        me = SENDER if active.sends else RECEIVER
        ranks = (self.rank, call.peer) if active.sends else (call.peer, self.rank)
        remote = self._is_remote(call.peer)
        slot, launch = self._remote_launch(call) if remote else self._staged_launch(call)
        program = encode(build("send", "pair", 2), launch)
        layout = Layout(
            Collective("send", 2),
            (call.count,),
            launch.slices,
            align=max(1, 64 // call.dtype.itemsize),
        )
        zone = self.shared_state.zone(ranks[SENDER], active.epoch, self.context)
        landing = self.shared_state.bytes[ranks[RECEIVER]][zone]
        user: dict[tuple[int, Buffer], Any] = {}
        if call.send is not None:
            user[SENDER, Buffer.INPUT] = call.send
        if call.recv is not None:
            user[RECEIVER, Buffer.OUTPUT] = call.recv
        binding = Binding(
            layout=layout,
            user=user,
            scratch=(landing, landing),
            slot_bytes=slot,
            slots=program.slots,
            ranks=ranks,
            flag=self._flags(program, ranks),
            entered=[self._entered(ranks, side) for side in (SENDER, RECEIVER)],
            dtype=call.dtype,
            op=None,
            loads=(),
            pacer=self.pacer,
            trace=self.trace,
            nodes=launch.nodes,
            node_messages=NodeMessages(self.node_signals.messages, PAIRS + self.context)
            if remote and self.node_signals
            else None,
            senders=senders(program),
        )
        return [
            (MessageLane if block.messages else Lane)(
                lane_rows(program, number, binding), base, self.fabric.notify, self.fabric.fence
            )
            for number, block in enumerate(program.programs)
            if block.block.rank == me
        ]

    def differs(self, active: ActivePairCall) -> bool:
        """Whether the peer's hello has arrived and is not this half's; very cheap."""
        at, epoch = self._at(self.rank, sends=not active.sends), active.epoch
        words = self.shared_state.words[active.call.peer]
        if not epoch or words[at] < epoch << 32:
            return False
        return words[at + 8 + (epoch & 3) * HELLO_WORDS] != active.signature

    def compare(self, active: ActivePairCall) -> None:
        """Compare the peer's hello with this half's, if it has arrived."""
        if self.differs(active):
            peer, epoch = active.call.peer, active.epoch
            at = self._at(self.rank, sends=not active.sends)
            hello = self.shared_state.hello(peer, epoch, at)
            mine = active.call.tagged(self._shown(active.call))
            theirs = self.shared_state.recorded(peer, hello.record)
            raise different_ends(self.rank, peer, epoch, mine, theirs, sends=active.sends)

    def absent(self, active: ActivePairCall) -> list[int]:
        """The peer, if the call cannot end once it has left.

        On one node that is so whatever it has entered: what it has written is there already.
        """
        peer = active.call.peer
        if peer == self.rank:
            return []
        return [peer] if not self._is_remote(peer) or not self.has_entered(active) else []

    def has_entered(self, active: ActivePairCall) -> bool:
        """Whether the peer has entered the call."""
        at, peer = self._at(self.rank, sends=not active.sends), active.call.peer
        epoch = active.epoch or self._epochs[peer, active.sends] + 1
        return self.shared_state.words[peer][at] >= epoch << 32

    def late(self, active: ActivePairCall) -> str:
        """The message of a deadline."""
        call, text = active.call, active.call.tagged(self._shown(active.call))
        number = active.epoch or self._epochs[call.peer, active.sends] + 1
        verb, other = ("send to", "recv") if active.sends else ("recv from", "send")
        return (
            f"{verb} rank {call.peer} on rank {self.rank} (call {number} of this pair, "
            f"{text}): waited {active.timeout:g} s; rank {call.peer} made no matching {other}, or "
            f"stopped inside it"
        )

    def has_arrived(self, peer: int) -> bool:
        """Whether the next message from ``peer`` has been sent: its hello is here."""
        at = self._at(self.rank, sends=True)
        return self.shared_state.words[peer][at] >= (self._epochs[peer, False] + 1) << 32

    def arrived(self, peer: int) -> tuple[int, DType]:
        """Count and dtype of the next message from ``peer``, whose hello is here."""
        said = self._next_hello(peer)
        return said.send, DTYPES[said.recv]

    def announced(self, peer: int) -> str | None:
        """The signature text of the next message from ``peer``; None if it has not sent it."""
        if not self.has_arrived(peer):
            return None
        return self.shared_state.recorded(peer, self._next_hello(peer).record)

    def _next_hello(self, peer: int) -> Hello:
        if self.fabric.fence is not None:
            self.fabric.fence()
        at = self._at(self.rank, sends=True)
        return self.shared_state.hello(peer, self._epochs[peer, False] + 1, at)

    def _at(self, peer: int, *, sends: bool) -> int:
        """The index, in a rank's words, of its pair with ``peer``; ``sends``: it is the sender."""
        return self.shared_state.pair(peer, sends=sends, context=self.context)

    def _is_remote(self, peer: int) -> bool:
        return self.node_signals is not None and peer in self.node_signals.remote

    @staticmethod
    def text(call: Call) -> str:
        """What both ends must agree on."""
        if call.custom_signature:
            return call.custom_signature
        part = f"{call.shown.partition(':')[0]} " if call.shown else ""
        return f"{part}count{'=' if call.exact else '<='}{call.count} dtype={call.dtype.name}"

    def _shown(self, call: Call) -> str:
        return call.shown or self.text(call)

    def _await(self, active: ActivePairCall, epoch: int) -> Task:
        words = self.shared_state.words[active.call.peer]
        at = self._at(self.rank, sends=not active.sends)
        if words[at] < epoch << 32:
            yield Pause(lambda: words[at] >= epoch << 32)

    def compare_running(self) -> None:
        """Compare the hellos of all halves that wait."""
        for active in list(self.running):
            self.compare(active)

    def _staged_launch(self, call: Call) -> tuple[int, Launch]:
        """Bytes of a slot, and slices such that a window of them fits the landing zone."""
        slot = self.shared_state.zone_bytes // WINDOW // 64 * 64
        per_slot = slot // call.dtype.itemsize
        slices = max(1, -(-call.count // per_slot))
        return slot, Launch(slices=slices, window=WINDOW, mapped=frozenset())

    def _remote_launch(self, call: Call) -> tuple[int, Launch]:
        """The same to another node: no landing zone, and slices of at most one MPI message."""
        slices = max(1, -(-call.nbytes // MESSAGE_BYTES))
        return 0, Launch(slices=slices, window=WINDOW, mapped=frozenset(), nodes=(0, 1))

    def _flags(
        self, program: Program, ranks: tuple[int, int]
    ) -> Callable[[int, int], tuple[Words, int]]:
        slots, blocks = flag_slots(program), program.blocks

        def flag(src: int, dst: int) -> tuple[Words, int]:
            # The words lie with the side that waits, in its set for this pair and direction.
            side = blocks[dst].rank
            pair = self._at(ranks[1 - side], sends=side == SENDER)
            at = self.shared_state.pair_flags(pair)
            inside = blocks[src].rank == side
            return self.shared_state.words[ranks[side]], at + slots[src, dst] + (4 if inside else 0)

        return flag

    def _entered(self, ranks: tuple[int, int], side: int) -> tuple[Words, int]:
        at = self._at(ranks[1 - side], sends=side == SENDER)
        return self.shared_state.words[ranks[side]], at
