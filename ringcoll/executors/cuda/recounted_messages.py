"""Messages of lengths that have not come before: one parameter carries all of a kind.

Most lengths that come once never come again: those of sequences, or of what experts are sent. To
pack and keep a launch of its own for each costs several times its launch, so their lengths are
written into a parameter that was packed for messages between the same ranks.
"""

from __future__ import annotations

import itertools
import zlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from ringcoll.arguments.calls import Call
from ringcoll.bounded import Seen, evict
from ringcoll.executors.cuda.loader import Launchable
from ringcoll.executors.cuda.message_launch import (
    GIVEN_EACH,
    MessageLaunches,
    Record,
    addresses_for_messages,
)
from ringcoll.executors.cuda.params import (
    TIMEOUT_WORD,
    given_address,
    nanoseconds,
    program_word,
)
from ringcoll.executors.cuda.point_to_point import (
    BLOCK_BYTES,
    Form,
    Half,
    Kind,
    Message,
    direct_replicas,
    forms_of,
    half_head,
    how_word,
    longest_of_one_slice,
    share_out,
    signature_of,
    writer_of,
)
from ringcoll.executors.cuda.recounted import COUNTS
from ringcoll.executors.cuda.simple import THREADS

if TYPE_CHECKING:
    from ringcoll.executors.cuda.executor import CudaExecutor
    from ringcoll.executors.cuda.message_calls import PairCalls

Peer = tuple[int, bool, bool]
"""The other end of a message, and whether it is sent and received."""

Peers = tuple[Peer, ...]

Places = tuple[tuple[int | None, int | None], ...]
"""Of each message its bytes into INPUT and OUTPUT; None where it has none."""

AroundCount = tuple[bytes, bytes, bytes]
"""What errors say of a message: before its count, its dtype behind it, and its tag."""

_TEMPLATES = 64
"""Parameters that a rank keeps for lengths that come once."""

_PEERS = 64
"""Groups of peers of which a rank knows what their messages have in common."""

_SHAPES = 512
"""Lengths of which a rank keeps what they decide: of messages, or of those of one slice alike."""


@dataclass(slots=True, eq=False)
class NewCounts:
    """Messages that differ from others in their counts and their timeout alone.

    No two of them are of one half.
    """

    calls: PairCalls  # the others, with the timeout of these
    peers: Peers
    counts: tuple[int, ...]
    texts: tuple[AroundCount, ...]
    places: Places
    sizes: list[int] = field(init=False)  # bytes of each

    def __post_init__(self) -> None:
        calls = self.calls.calls
        self.sizes = [n * call.dtype.itemsize for n, call in zip(self.counts, calls, strict=True)]


def around_count(call: Call) -> AroundCount:
    """The text of a message without its count."""
    if not call.shown:
        return _around_count(call.dtype.name, call.tagged(""))
    before, dtype = call.shown.split(f"={call.count} dtype=", 1)
    return f"{before}=".encode(), f" dtype={dtype}".encode(), call.tagged("").encode()


@lru_cache(maxsize=256)
def _around_count(dtype: str, tag: str) -> AroundCount:
    """The text of a message that is no part of a larger call."""
    return b"count=", f" dtype={dtype}".encode(), tag.encode()


class _Shape(NamedTuple):
    """What a message's length decides of its launch."""

    kind: int  # the number of the kinds of its forms, staged and direct
    how: int  # the word with their replicas, without their lengths
    blocks: int  # that it would have
    slices: tuple[int, ...]


@dataclass(slots=True, eq=False)
class _Lane:
    """The words of one half of a template, and what writes them."""

    at: int  # its first word
    head: int  # that word, without CUDA blocks
    copies: bool
    lengths: int  # of its blocks, as the word of a call has them
    forms: tuple[tuple[int, Callable[[array[int], int, int, int], None]], ...]
    """Of its blocks, the first word and what rewrites them."""


@dataclass(frozen=True, slots=True)
class _Template:
    """A launch of one message for each half, whose lengths are written anew for each call."""

    launchable: Launchable
    lanes: tuple[_Lane, ...]


@dataclass(frozen=True, slots=True)
class _Alike:
    """What messages between the same ranks have in common, and its number, a short key."""

    number: int
    halves: tuple[Half, ...]


_BEFORE_COUNT = signature_of("count=")


class RecountedMessages:
    """Launches messages of one rank whose lengths have not come before."""

    def __init__(self, executor: CudaExecutor, launches: MessageLaunches) -> None:
        self._executor, self._launches = executor, launches
        self._alike: dict[Peers, _Alike] = {}
        self._shapes: dict[tuple[int, bool], _Shape] = {}  # by bytes, and whether they are copied
        self._kinds: dict[tuple[Kind, ...], int] = {}
        self._templates: dict[tuple[int, ...], _Template] = {}  # by peers and kinds
        self._numbers = itertools.count()
        self._groups: dict[object, Seen] = {}  # by what is no count of a group's messages
        self._rounded = longest_of_one_slice(executor.workspace)

    def of_group(self, own: Sequence[PairCalls], timeout: float) -> NewCounts | None:
        """Messages of a group that differ from others in their counts; None: others are kept.

        Counts of which many others have come since are new again, though their launch is kept.
        """
        calls: list[Call] = []  # a list[Call]() takes 0.7 us longer
        peers: list[Peer] = []
        counts: list[int] = []
        texts: list[AroundCount] = []
        for paired in own:
            new = paired.new
            calls += paired.calls
            if new is None:
                peers += [(c.peer, c.send is not None, c.recv is not None) for c in paired.calls]
                counts += [call.count for call in paired.calls]
                texts += map(around_count, paired.calls)
            else:
                peers += new.peers
                counts += new.counts
                texts += new.texts
        if len({*peers}) < len(peers):  # two messages share a half
            return None
        most = min(paired.most or self._executor.machine.blocks for paired in own)
        key = most, *peers, *[(call.dtype.name, call.tag) for call in calls]
        like, come = self._groups.get(key), (timeout, *counts)
        if like is None:
            evict(self._groups, _PEERS)
            like = self._groups[key] = Seen(COUNTS, often=1)
            like.often(come)  # these are kept
            return None
        if like.often(come):
            return None
        made = own[0].on(0, (), owned=True)
        made.calls, made.timeout, made.most = tuple(calls), timeout, most
        return NewCounts(made, tuple(peers), tuple(counts), tuple(texts), ())

    def launch(self, new: NewCounts) -> tuple[Launchable, list[Record]]:
        """A launch that is good until the next one is asked for, and its records."""
        calls, peers, sizes, known = new.calls, new.peers, new.sizes, self._shapes
        shared_state, rounded = self._executor.shared_state, self._rounded
        alike = self._alike.get(peers) or self._between(peers)
        shapes: list[_Shape] = []
        blocks: list[int] = []
        kinds: list[int] = []
        records: list[Record] = []
        for half, nbytes in zip(alike.halves, sizes, strict=True):
            # Lengths of one slice are alike where they are as many blocks long.
            like = -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES if nbytes <= rounded else nbytes
            shape = known.get((like, half.copies)) or self._shape_of(half, like)
            shapes.append(shape)
            blocks.append(shape.blocks)
            kinds.append(shape.kind)
        most, machine = calls.most, self._executor.machine.blocks
        if sum(blocks) > (most or machine):
            most = max(most or machine, min(len(blocks), machine))
            blocks = share_out(blocks, most, f"rank {shared_state.rank}")
        key = (alike.number, *kinds)
        template = self._templates.pop(key, None) or self._packed(alike, new)
        self._templates[key] = template  # the newest
        launchable, first = template.launchable, 0
        words = launchable.parameter.words
        words[TIMEOUT_WORD] = nanoseconds(calls.timeout)
        for lane, shape, nbytes, count, text, given in zip(
            template.lanes, shapes, sizes, new.counts, new.texts, blocks, strict=True
        ):
            at, how = lane.at, shape.how
            words[at] = lane.head | first << 32 | given << 48
            first += given
            if lane.copies:
                how = given
            else:
                number, digits = next(shared_state.numbers), b"%d" % count
                before, dtype, tag = text
                records.append((shared_state, number, b"".join((before, digits, dtype, tag))))
                signature = zlib.crc32(digits + dtype, _BEFORE_COUNT)
                words[at + 4] = signature << 32 | number & 0xFFFFFFFF
            words[at + 5] = how | lane.lengths
            for (place, rewrite), slices in zip(lane.forms, shape.slices, strict=True):
                rewrite(words, place, nbytes, slices)
        launchable.use_grid(first or 1, THREADS)
        return launchable, records

    def _between(self, peers: Peers) -> _Alike:
        """What is kept of messages between these ranks."""
        evict(self._alike, _PEERS)
        halves = tuple(map(_half_of, range(len(peers)), peers))
        found = self._alike[peers] = _Alike(next(self._numbers), halves)
        return found

    def _shape_of(self, half: Half, nbytes: int) -> _Shape:
        """What a length decides of a half's launch."""
        workspace = self._executor.workspace
        forms = forms_of(half, nbytes, workspace)
        kinds, slices = tuple(form.kind for form in forms), tuple(form.slices for form in forms)
        kind, how = self._kinds.setdefault(kinds, len(self._kinds)), how_word(half, forms, 0, (0,))
        found = _Shape(kind, how, direct_replicas(nbytes, workspace), slices)
        evict(self._shapes, _SHAPES)
        self._shapes[nbytes, half.copies] = found
        return found

    def _packed(self, alike: _Alike, new: NewCounts) -> _Template:
        """The parameter for messages of the kinds of these."""
        halves, workspace = alike.halves, self._executor.workspace
        whole = [
            replace(half, messages=(replace(half.messages[0], nbytes=nbytes),))
            for half, nbytes in zip(halves, new.sizes, strict=True)
        ]
        ones, own = [1] * len(whole), addresses_for_messages(self._executor)
        launchable = self._launches.alone(whole, ones, len(whole), new.calls.timeout)
        first, words, lanes = program_word(own), launchable.parameter.words, list[_Lane]()
        for number, (half, nbytes) in enumerate(zip(halves, new.sizes, strict=True), 1):
            at = first + words[first + number]
            lanes.append(self._lane(at, half, forms_of(half, nbytes, workspace)))
        evict(self._templates, _TEMPLATES)
        return _Template(launchable, tuple(lanes))

    def _lane(self, at: int, half: Half, forms: Sequence[Form]) -> _Lane:
        """The half whose words begin ``at``, of messages of these forms."""
        workspace, own = self._executor.workspace, addresses_for_messages(self._executor)
        rewriters: list[tuple[int, Callable[[array[int], int, int, int], None]]] = []
        place, lengths = at + 7, list[int]()
        for form in forms:
            writer = writer_of(workspace, own, half, form)
            rewriters.append((place, writer.rewrite))
            lengths.append(writer.length)
            place += writer.length
        of = lengths[0] << 32 | sum(lengths) << 48
        return _Lane(at, half_head(half, 0, 0), half.copies, of, tuple(rewriters))


def _half_of(number: int, peer: Peer) -> Half:
    """The half of a message that is given all of its addresses, the ``number``-th of its call."""
    rank, sends, receives = peer
    source, target, mapped = (given_address(0, GIVEN_EACH * number + k) for k in range(GIVEN_EACH))
    if sends and receives:
        return Half(rank, True, (Message(source, 0, target=target),), copies=True)
    return Half(rank, sends, (Message(source if sends else target, 0, mapped=mapped),))
