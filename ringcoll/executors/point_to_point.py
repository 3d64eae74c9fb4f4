"""Point-to-point: one two-rank plan for each ordered pair, staged through a landing zone.

A send's count or a gather_v's displacement is known to two ranks only, so a pair has its own epoch,
hello, flags and SCRATCH, and never touches the collectives' epoch. Call x of a pair may write when
both ranks have entered call x - 1, so a small send returns before the receive is posted, one call
ahead at most.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ringcoll.algorithms import build
from ringcoll.arguments.calls import Call
from ringcoll.collectives import Collective
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
from ringcoll.executors.shared_state import Hello, SharedState, Words
from ringcoll.fabric import Fabric
from ringcoll.fabric.mpi import PAIRS
from ringcoll.launch import Launch, Layout
from ringcoll.plan import Buffer

WINDOW = 2
MESSAGE_BYTES = 64 << 20
"""The longest message between nodes; MPI pipelines it."""

SENDER, RECEIVER = 0, 1


@dataclass(slots=True)
class ActivePairCall:
    """One half of a pair's call under way on this rank."""

    call: Call
    sends: bool
    epoch: int
    signature: int
    timeout: float


class Pairs:
    """One rank's halves of all its pairs; without a pacer links run free."""

    def __init__(
        self,
        fabric: Fabric,
        shared_state: SharedState,
        pacer: Pacer | None,
        node_signals: NodeSignals | None = None,
    ) -> None:
        self.fabric, self.shared_state, self.pacer, self.node_signals = (
            fabric,
            shared_state,
            pacer,
            node_signals,
        )
        self.rank = fabric.rank
        self.running: list[ActivePairCall] = []
        self.trace: list[TraceEntry] | None = None
        self._epochs: defaultdict[tuple[int, bool], int] = defaultdict(int)

    def enter(self, call: Call, timeout: float) -> ActivePairCall:
        """Publish this half's hello to the peer without waiting."""
        sends = call.send is not None
        self._epochs[call.peer, sends] += 1
        epoch = self._epochs[call.peer, sends]
        digest = hashlib.blake2b(self._signature_text(call).encode(), digest_size=8).digest()
        signature = int.from_bytes(digest, "little") or 1
        number = next(self.shared_state.numbers)
        self.shared_state.record(number, self._shown(call))
        hello = Hello(signature, number)
        self.shared_state.enter_pair(call.peer, epoch, hello, sends=sends)
        if self.node_signals is not None and call.peer in self.node_signals.remote:
            self.node_signals.announce_pair(call.peer, epoch, number, sends=sends)
        if self.fabric.notify is not None:
            self.fabric.notify(call.peer)
        active = ActivePairCall(call, sends, epoch, signature, timeout)
        self.running.append(active)
        return active

    def task(self, calls: Sequence[Call], timeout: float) -> Task:
        """Several calls of one pair and direction, one after the other.

        A send waits until the peer has entered the call before, when its landing zone is free; a
        receive waits for the sender's hello, before which no data arrive.
        """
        for call in calls:
            if call.send is not None and call.recv is not None:
                call.recv[...] = call.send  # a local copy, unknown to other ranks
                continue
            active = self.enter(call, timeout)
            epoch = active.epoch - 1 if active.sends else active.epoch
            yield from self._await(active, epoch)
            self.compare(active)
            yield from steps(self.lanes(active))
            self.compare(active)
            self.running.remove(active)

    def lanes(self, active: ActivePairCall) -> list[Lane]:
        """The lanes of this half."""
        call, base = active.call, active.epoch << 32
        me = SENDER if active.sends else RECEIVER
        ranks = (self.rank, call.peer) if active.sends else (call.peer, self.rank)
        remote = self.node_signals is not None and call.peer in self.node_signals.remote
        slot, launch = self._remote_launch(call) if remote else self._staged_launch(call)
        program = encode(build("send", "pair", 2), launch)
        layout = Layout(
            Collective("send", 2),
            (call.count,),
            launch.slices,
            align=max(1, 64 // call.dtype.itemsize),
        )
        zone = (
            self.shared_state.zones
            + (2 * ranks[SENDER] + (active.epoch & 1)) * self.shared_state.zone_bytes
        )
        landing = self.shared_state.bytes[ranks[RECEIVER]][
            zone : zone + self.shared_state.zone_bytes
        ]
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
            node_messages=NodeMessages(self.node_signals.messages, PAIRS)
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

    def compare(self, active: ActivePairCall) -> None:
        """Compare the peer's hello with this half's, if it has arrived."""
        peer, epoch = active.call.peer, active.epoch
        words, at = (
            self.shared_state.words[peer],
            self.shared_state.pair(self.rank, sends=not active.sends),
        )
        if words[at] < epoch << 32:
            return
        hello = self.shared_state.pair_hello(peer, self.rank, epoch, sends=not active.sends)
        if hello.signature != active.signature:
            mine = active.call.tagged(self._shown(active.call))
            theirs = self.shared_state.recorded(peer, hello.record)
            raise different_ends(self.rank, peer, epoch, mine, theirs, sends=active.sends)

    def absent(self, active: ActivePairCall) -> list[int]:
        """The peer, if it has not entered the call."""
        peer = active.call.peer
        words, at = (
            self.shared_state.words[peer],
            self.shared_state.pair(self.rank, sends=not active.sends),
        )
        return [peer] if words[at] < active.epoch << 32 and peer != self.rank else []

    def late(self, active: ActivePairCall) -> str:
        """The message of a deadline."""
        call, text = active.call, active.call.tagged(self._shown(active.call))
        verb, other = ("send to", "recv") if active.sends else ("recv from", "send")
        return (
            f"{verb} rank {call.peer} on rank {self.rank} (call {active.epoch} of this pair, "
            f"{text}): waited {active.timeout:g} s; rank {call.peer} made no matching {other}, or "
            f"stopped inside it"
        )

    def announced(self, peer: int) -> str | None:
        """The signature text of the next message from ``peer``; None if it has not sent it."""
        epoch = self._epochs[peer, False] + 1
        if (
            self.shared_state.words[peer][self.shared_state.pair(self.rank, sends=True)]
            < epoch << 32
        ):
            return None
        if self.fabric.fence is not None:
            self.fabric.fence()
        hello = self.shared_state.pair_hello(peer, self.rank, epoch, sends=True)
        return self.shared_state.recorded(peer, hello.record)

    @staticmethod
    def _signature_text(call: Call) -> str:
        return call.custom_signature or f"count={call.count} dtype={call.dtype.name}"

    def _shown(self, call: Call) -> str:
        return call.shown or self._signature_text(call)

    def _await(self, active: ActivePairCall, epoch: int) -> Task:
        peer = active.call.peer
        words, at = (
            self.shared_state.words[peer],
            self.shared_state.pair(self.rank, sends=not active.sends),
        )
        if words[at] < epoch << 32:
            yield Pause(lambda: words[at] >= epoch << 32)

    def compare_running(self) -> None:
        """Compare the hellos of all halves that wait."""
        for active in self.running:
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
            at = self.shared_state.pair_flags(ranks[1 - side], sends=side == SENDER)
            inside = blocks[src].rank == side
            return self.shared_state.words[ranks[side]], at + slots[src, dst] + (4 if inside else 0)

        return flag

    def _entered(self, ranks: tuple[int, int], side: int) -> tuple[Words, int]:
        at = self.shared_state.pair(ranks[1 - side], sends=side == SENDER)
        return self.shared_state.words[ranks[side]], at
