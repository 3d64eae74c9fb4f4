"""Point-to-point: one two-rank plan for each ordered pair, staged through a landing zone.

A send's count or a gather_v's displacement is known to two ranks only, so a pair has its own epoch,
hello, flags and SCRATCH, and never touches the collectives' epoch. Call x of a pair may write when
both ranks have entered call x - 1, so a small send returns before the receive is posted, one call
ahead at most.

The sender's hello says how many elements come; a pair's hello has the dtype and, above it, the
digest of the tag where the end's buffer would be. A receive that takes fewer than its buffer holds
waits for it and enters with the sender's count, so that both ends run the same plan.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ringcoll.algorithms import build
from ringcoll.arguments.calls import Call
from ringcoll.bounded import Seen, evict
from ringcoll.collectives import Collective
from ringcoll.dtypes import DTYPES, DType
from ringcoll.encode import Program, encode
from ringcoll.executors.binding import Binding, Pacer, TraceEntry
from ringcoll.executors.drive import Lane, Pause, Task, post, steps
from ringcoll.executors.message_lane import MessageLane
from ringcoll.executors.mismatch import SENDERS_WAIT, different_ends
from ringcoll.executors.node_signals import NodeSignals
from ringcoll.executors.pair_calls import ActivePairCall, Landing, PreparedPair, shape_of
from ringcoll.executors.rows import (
    NodeMessages,
    Row,
    Wiring,
    flag_slots,
    lane_rows,
    lane_templates,
    senders,
)
from ringcoll.executors.shared_state import (
    HELLO_WORDS,
    MESSAGES,
    RECORDS,
    Hello,
    SharedState,
    Words,
    digest,
)
from ringcoll.fabric import Fabric
from ringcoll.fabric.mpi import PAIRS
from ringcoll.fabric.poll import polls
from ringcoll.launch import Launch, Layout
from ringcoll.plan import Buffer

WINDOW = 2
MESSAGE_BYTES = 64 << 20
"""The longest message between nodes; MPI pipelines it."""

SENDER, RECEIVER = 0, 1

Array = npt.NDArray[Any]

_DTYPE_NUMBERS = {row.name: number for number, row in enumerate(DTYPES)}

PREPARED = 256
"""Shapes of messages that come often whose preparation a rank keeps: the oldest goes first."""


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
        self.epochs: defaultdict[tuple[int, bool], int] = defaultdict(int)
        """By the peer, and whether this rank sends, the calls that the rank has entered."""
        self._prepared: dict[tuple[object, ...], PreparedPair] = {}
        self._seen = Seen(4 * PREPARED)
        self._landings: dict[tuple[int, bool], list[Landing | None]] = {}
        self._slot_bytes = shared_state.zone_bytes // WINDOW // 64 * 64
        shared_state.bound += self._prepared.clear, self._landings.clear

    def enter(self, active: ActivePairCall) -> PreparedPair:
        """Publish this half's hello to the peer without waiting."""
        call, state = active.call, self.shared_state
        sends = call.send is not None
        prepared = active.prepared = self._prepare(call, sends=sends)
        number = prepared.hello.record
        if state.record_numbers[number % RECORDS] != number:
            state.record(number, prepared.text)
        pair = call.peer, sends
        epoch = active.epoch = self.epochs[pair] = self.epochs[pair] + 1
        self.running.append(active)
        state.enter(epoch, prepared.hello, prepared.own)
        if self.node_signals is not None and self._is_remote(call.peer):
            self.node_signals.announce_pair(call.peer, prepared.own, epoch, number)
        if self.fabric.notify is not None:
            self.fabric.notify(call.peer)
        return prepared

    def _prepare(self, call: Call, *, sends: bool) -> PreparedPair:
        """What is kept for messages of this shape."""
        dtype, key = call.dtype.name, shape_of(call, sends=sends)
        found = self._prepared.get(key)
        if found is None:
            text = self.text(call)
            shown, label = call.shown or text, 0
            if call.matched:
                shown, label = call.tagged(shown), (digest(call.tag) >> 8 or 1) << 8
            number = next(self.shared_state.numbers)
            landings: list[Landing | None] = []
            if call.count * call.dtype.itemsize <= self._slot_bytes and self._is_staged(call.peer):
                landings = self._landings.setdefault((call.peer, sends), [None, None])
            found = PreparedPair(
                Hello(digest(text), number, call.count, _DTYPE_NUMBERS[dtype] | label),
                shown,
                self._at(call.peer, sends=sends),
                self._at(self.rank, sends=not sends),
                landings,
            )
            if self._seen.often(key):
                evict(self._prepared, PREPARED)
                self._prepared[key] = found
        return found

    def known(self, call: Call, *, sends: bool) -> tuple[PreparedPair, list[Landing]] | None:
        """What is kept for messages of this shape, and both landings; None before these are."""
        found = self._prepared.get(shape_of(call, sends=sends))
        if found is None or not found.landings:
            return None
        landings = [landing for landing in found.landings if landing is not None]
        return (found, landings) if len(landings) == len(found.landings) else None

    def resume(
        self, calls: Sequence[Call], halves: Sequence[tuple[int, bool]], timeout: float
    ) -> list[ActivePairCall]:
        """What is left to be ended of calls that the compiled part has entered.

        ``halves`` are their epochs, and whether they have ended.
        """
        left = []
        for call, (epoch, has_ended) in zip(calls, halves, strict=True):
            prepared = self._prepare(call, sends=call.send is not None)
            active = ActivePairCall(call, timeout, epoch, prepared)
            if not has_ended or self.differs(active):
                self.running.append(active)
                left.append(active)
        return left

    def task(self, calls: Sequence[Call], timeout: float) -> Task:
        """Several calls of one pair and direction, one after the other."""
        for call in calls:
            if call.send is not None and call.recv is not None:
                call.recv[...] = call.send  # a local copy, unknown to other ranks
                continue
            yield from self.half(ActivePairCall(call, timeout))

    def half(self, active: ActivePairCall) -> Task:
        """One half from its entry to its end; it may have been entered before.

        A send waits until the peer has entered the call before, when its landing zone is free; a
        receive waits for the sender's hello, before which no data arrive.
        """
        call, peer = active.call, active.call.peer
        if not call.exact:
            if not self.has_arrived(peer):
                self.running.append(active)
                yield Pause(lambda: self.has_arrived(peer))
                self.running.remove(active)
            count, dtype = self.arrived(peer)
            if call.recv is not None and count <= call.count and dtype.name == call.dtype.name:
                recv = call.recv[:count]
                active.call = replace(call, recv=recv, count=count, nbytes=recv.nbytes, exact=True)
        prepared = active.prepared or self.enter(active)
        if prepared.landings and self.trace is None:
            while not self._try(active, prepared):
                yield Pause(lambda: self._is_ready(active, prepared))
            return
        wanted = self._credit(active)
        words, at = self.shared_state.words[peer], prepared.other
        if words[at] < wanted:
            yield Pause(lambda: words[at] >= wanted)
        self.compare(active)
        yield from steps(self.lanes(active))
        self.compare(active)
        self.running.remove(active)

    def finish(self, active: ActivePairCall) -> bool:
        """Whether a half that was entered could be run to its end without waiting."""
        prepared = active.prepared
        if prepared is None or not prepared.landings or self.trace is not None:
            return False
        return self._try(active, prepared)

    def is_small(self, active: ActivePairCall) -> bool:
        """Whether a half was entered, and moves in one piece."""
        return active.prepared is not None and bool(active.prepared.landings)

    def may_finish(self, active: ActivePairCall) -> bool:
        """Whether a small half can end now; very cheap."""
        prepared = active.prepared
        return prepared is not None and self._is_ready(active, prepared)

    def spin(
        self, left: list[ActivePairCall], has_ended: Callable[[ActivePairCall], bool]
    ) -> list[ActivePairCall]:
        """Poll for the ends of halves for some microseconds; returns the rest."""
        if not all(map(self.is_small, left)):
            return left
        for _ in polls(self.fabric.spins):
            if any(map(self.may_finish, left)):
                left = [half for half in left if not has_ended(half)]
                if not left:
                    break
        return left

    @staticmethod
    def _credit(active: ActivePairCall) -> int:
        """What the peer's entered word must have reached before data move."""
        return (active.epoch if active.call.send is None else active.epoch - 1) << 32

    def _is_ready(self, active: ActivePairCall, prepared: PreparedPair) -> bool:
        """Whether the row of a half can run: it is polled."""
        if active.landing is None:
            landing = prepared.landings[active.epoch & 1] or self._landing(active, prepared)
            peer, base = self.shared_state.words[active.call.peer], active.epoch << 32
            awaited = [(peer, prepared.other, self._credit(active))]
            for words, at, count in landing.waits:
                awaited.append((words, at, base + count))
            active.awaited, active.landing = awaited, landing
        for words, at, wanted in active.awaited:  # noqa: SIM110 (half of the time of all())
            if words[at] < wanted:
                return False
        return True

    def _try(self, active: ActivePairCall, prepared: PreparedPair) -> bool:
        """Run the one row of a half, if its signals are there."""
        if not self._is_ready(active, prepared):
            return False
        if self.differs(active):
            self.compare(active)
        landing, call = active.landing or self._landing(active, prepared), active.call
        array = call.recv if call.send is None else call.send
        fence = self.fabric.fence
        if array is not None and array.size:
            if fence is not None:
                fence()
            data = array.view(np.uint8)
            landed = landing.zone[: data.size]
            if call.send is None:
                data[...] = landed
            else:
                landed[...] = data
        post(landing.signals, active.epoch << 32, self.fabric.notify, fence)
        if call.recv is None and self.differs(active):  # a receiver has had the hello before
            self.compare(active)
        self.running.remove(active)
        return True

    def _landing(self, active: ActivePairCall, prepared: PreparedPair) -> Landing:
        """The one row of a half that fits the landing zone of its epoch."""
        found = prepared.landings[active.epoch & 1]
        if found is None:
            launch = self._staged_launch(active.call)[1]
            wiring, numbers = self._wiring(active, launch)
            ((waits, _, signals, *_),) = lane_templates(wiring, numbers[0])
            found = Landing(waits, signals, self._zone(active, wiring.ranks))
            prepared.landings[active.epoch & 1] = found
        return found

    def lanes(self, active: ActivePairCall) -> list[Lane]:
        """The lanes of this half."""
        remote = self._is_remote(active.call.peer)
        base, notify, fence = active.epoch << 32, self.fabric.notify, self.fabric.fence
        kind = MessageLane if remote else Lane
        return [kind(rows, base, notify, fence) for rows in self._rows(active, remote=remote)]

    def _rows(self, active: ActivePairCall, *, remote: bool) -> list[Iterator[Row]]:
        """The rows of each lane of this half."""
        call = active.call
        slot, launch = self._remote_launch(call) if remote else self._staged_launch(call)
        align = max(1, 64 // call.dtype.itemsize)
        layout = Layout(Collective("send", 2), (call.count,), launch.slices, align=align)
        user: dict[tuple[int, Buffer], Any] = {}
        if call.send is not None:
            user[SENDER, Buffer.INPUT] = call.send
        if call.recv is not None:
            user[RECEIVER, Buffer.OUTPUT] = call.recv
        wiring, numbers = self._wiring(active, launch)
        landing = self._zone(active, wiring.ranks)
        binding = Binding(layout, user, (landing, landing), slot, (), self.pacer, self.trace)
        return [lane_rows(wiring, number, binding) for number in numbers]

    def _wiring(self, active: ActivePairCall, launch: Launch) -> tuple[Wiring, list[int]]:
        """What no count and no address changes, and the numbers of this half's blocks."""
        call, signals = active.call, self.node_signals
        me = SENDER if active.sends else RECEIVER
        ranks = (self.rank, call.peer) if active.sends else (call.peer, self.rank)
        program = encode(build("send", "pair", 2), launch)
        wiring = Wiring(
            program=program,
            slices=launch.slices,
            ranks=ranks,
            flag=self._flags(program, ranks),
            entered=[self._entered(ranks, side) for side in (SENDER, RECEIVER)],
            dtype=call.dtype,
            op=None,
            nodes=launch.nodes,
            node_messages=NodeMessages(signals.messages, PAIRS + self.context) if signals else None,
            senders=senders(program),
        )
        programs = enumerate(program.programs)
        return wiring, [number for number, block in programs if block.block.rank == me]

    def _zone(self, active: ActivePairCall, ranks: Sequence[int]) -> Array:
        """The bytes of the receiver in which a call lands."""
        zone = self.shared_state.zone(ranks[SENDER], active.epoch, self.context)
        return self.shared_state.bytes[ranks[RECEIVER]][zone]

    def differs(self, active: ActivePairCall) -> bool:
        """Whether the peer's hello has arrived and is not this half's; very cheap."""
        prepared, epoch = active.prepared, active.epoch
        words = self.shared_state.words[active.call.peer]
        if prepared is None or words[prepared.other] < epoch << 32:
            return False
        at = prepared.other + 8 + (epoch & 3) * HELLO_WORDS
        hello = prepared.hello
        if words[at] != hello.signature:
            return True
        return hello.recv > 0xFF and words[at + 3] > 0xFF and hello.recv != words[at + 3]

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
        epoch = active.epoch or self.epochs[peer, active.sends] + 1
        return self.shared_state.words[peer][at] >= epoch << 32

    def late(self, active: ActivePairCall) -> str:
        """The message of a deadline."""
        call, text = active.call, active.call.tagged(self._shown(active.call))
        number = active.epoch or self.epochs[call.peer, active.sends] + 1
        verb, other = ("send to", "recv") if active.sends else ("recv from", "send")
        return (
            f"{verb} rank {call.peer} on rank {self.rank} (call {number} of this pair, "
            f"{text}): waited {active.timeout:g} s; rank {call.peer} made no matching {other}, or "
            f"stopped inside it{SENDERS_WAIT if active.sends else ''}"
        )

    def has_arrived(self, peer: int) -> bool:
        """Whether the next message from ``peer`` has been sent: its hello is here."""
        at = self._at(self.rank, sends=True)
        return self.shared_state.words[peer][at] >= (self.epochs[peer, False] + 1) << 32

    def arrived(self, peer: int) -> tuple[int, DType]:
        """Count and dtype of the next message from ``peer``, whose hello is here."""
        said = self._next_hello(peer)
        return said.send, DTYPES[said.recv & 0xFF]

    def unreceived(self) -> list[str]:
        """The next message of each rank that has sent one, for log lines."""
        senders = filter(self.has_arrived, range(self.fabric.nranks))
        found = [(peer, *self.arrived(peer)) for peer in senders]
        return [f"({count} {dtype.name} from rank {peer})" for peer, count, dtype in found]

    def announced(self, peer: int) -> str | None:
        """The signature text of the next message from ``peer``; None if it has not sent it."""
        if not self.has_arrived(peer):
            return None
        return self.shared_state.recorded(peer, self._next_hello(peer).record)

    def _next_hello(self, peer: int) -> Hello:
        if self.fabric.fence is not None:
            self.fabric.fence()
        at = self._at(self.rank, sends=True)
        return self.shared_state.hello(peer, self.epochs[peer, False] + 1, at)

    def _at(self, peer: int, *, sends: bool) -> int:
        """The index, in a rank's words, of its pair with ``peer``; ``sends``: it is the sender."""
        return self.shared_state.pair(peer, sends=sends, context=self.context)

    def _is_remote(self, peer: int) -> bool:
        return self.node_signals is not None and peer in self.node_signals.remote

    def _is_staged(self, peer: int) -> bool:
        """Whether messages to and from a rank go through landing zones, as fast as they can."""
        return self.pacer is None and not self._is_remote(peer)

    @staticmethod
    def text(call: Call) -> str:
        """What both ends must agree on."""
        if call.custom_signature:
            return call.custom_signature
        part = f"{call.shown.partition(':')[0]} " if call.shown else ""
        return f"{part}count{'=' if call.exact else '<='}{call.count} dtype={call.dtype.name}"

    def _shown(self, call: Call) -> str:
        return call.shown or self.text(call)

    def compare_running(self) -> None:
        """Compare the hellos of all halves that wait."""
        for active in list(self.running):
            self.compare(active)

    def _staged_launch(self, call: Call) -> tuple[int, Launch]:
        """Bytes of a slot, and slices such that a window of them fits the landing zone."""
        per_slot = self._slot_bytes // call.dtype.itemsize
        slices = max(1, -(-call.count // per_slot))
        return self._slot_bytes, Launch(slices=slices, window=WINDOW, mapped=frozenset())

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
