"""Messages of lengths that have not come before: one parameter carries all of a kind.

Most lengths that come once never come again: those of sequences, or of what experts are sent. To
pack and keep a launch of its own for each costs several times its launch, so their lengths are
written into a parameter that was packed for messages between the same ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ringcoll.bounded import evict
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
    Form,
    Half,
    HalfWriter,
    Message,
    direct_replicas,
    forms_of,
    half_head,
    how_word,
    share_out,
    signature_of,
    writer_of,
)
from ringcoll.executors.cuda.simple import THREADS

if TYPE_CHECKING:
    from ringcoll.executors.cuda.executor import CudaExecutor
    from ringcoll.executors.cuda.sending import PairCalls

Peers = tuple[tuple[int, bool, bool], ...]
"""Of each message its peer, and whether it is sent and received."""

Places = tuple[tuple[int | None, int | None], ...]
"""Of each message its bytes into INPUT and OUTPUT; None where it has none."""

_TEMPLATES = 64
"""Parameters that a rank keeps for lengths that come once."""


@dataclass(slots=True, eq=False)
class NewCounts:
    """Messages that differ from others in their counts and their timeout alone.

    No two of them are of one half.
    """

    calls: PairCalls  # the others, with the timeout of these
    peers: Peers
    counts: tuple[int, ...]
    texts: tuple[str, ...]  # what errors say of each; "": its count and dtype
    places: Places

    @property
    def sizes(self) -> list[int]:
        """Bytes of each."""
        calls = self.calls.calls
        return [n * call.dtype.itemsize for n, call in zip(self.counts, calls, strict=True)]


@dataclass(frozen=True, slots=True)
class _Template:
    """A launch of one message for each half, whose lengths are written anew for each call."""

    launchable: Launchable
    heads: tuple[int, ...]  # the first word of each half
    writers: tuple[tuple[HalfWriter, ...], ...]  # of its blocks, staged and direct
    lengths: tuple[tuple[int, ...], ...]  # words of each


class RecountedMessages:
    """Launches messages of one rank whose lengths have not come before."""

    def __init__(self, executor: CudaExecutor, launches: MessageLaunches) -> None:
        self._executor, self._launches = executor, launches
        self._halves: dict[Peers, list[Half]] = {}
        self._templates: dict[tuple[object, ...], _Template] = {}

    def launch(self, new: NewCounts) -> tuple[Launchable, list[Record]]:
        """A launch that is good until the next one is asked for, and its records."""
        workspace, shared_state = self._executor.workspace, self._executor.shared_state
        calls, peers, sizes = new.calls, new.peers, new.sizes
        halves = self._halves.get(peers)
        if halves is None:
            evict(self._halves, _TEMPLATES)
            halves = self._halves[peers] = [*map(_half_of, range(len(peers)), peers)]
        forms = [forms_of(*of, workspace) for of in zip(halves, sizes, strict=True)]
        most = calls.most or self._executor.machine.blocks
        most = max(most, min(len(halves), self._executor.machine.blocks))
        wanted = [direct_replicas(nbytes, workspace) for nbytes in sizes]
        blocks = share_out(wanted, most, f"rank {self._executor.rank}")
        template = self._template(calls, peers, halves, sizes, forms)
        words, first = template.launchable.parameter.words, 0
        records: list[Record] = []
        words[TIMEOUT_WORD] = nanoseconds(calls.timeout)
        for number, (half, call, nbytes, of, given) in enumerate(
            zip(halves, calls.calls, sizes, forms, blocks, strict=True)
        ):
            at, lengths = template.heads[number], template.lengths[number]
            words[at] = half_head(half, first, given)
            first += given
            if not half.copies:
                record = next(shared_state.numbers)
                text = f"count={new.counts[number]} dtype={call.dtype.name}"
                records.append((shared_state, record, call.tagged(new.texts[number] or text)))
                words[at + 4] = signature_of(text) << 32 | record & 0xFFFFFFFF
            words[at + 5] = how_word(half, of, given, lengths)
            at += 7
            for writer, form, length in zip(template.writers[number], of, lengths, strict=True):
                writer.rewrite(words, at, nbytes, form.slices)
                at += length
        template.launchable.use_grid(max(1, first), THREADS)
        return template.launchable, records

    def _template(
        self,
        calls: PairCalls,
        peers: Peers,
        halves: Sequence[Half],
        sizes: Sequence[int],
        forms: Sequence[Sequence[Form]],
    ) -> _Template:
        """The parameter for messages of these kinds."""
        key = peers, tuple(form.kind for of in forms for form in of)
        found = self._templates.pop(key, None)
        if found is not None:
            self._templates[key] = found  # the newest
            return found
        whole = [
            replace(half, messages=(replace(half.messages[0], nbytes=nbytes),))
            for half, nbytes in zip(halves, sizes, strict=True)
        ]
        launchable = self._launches.alone(whole, [1] * len(whole), len(whole), calls.timeout)
        own = addresses_for_messages(self._executor)
        first, words = program_word(own), launchable.parameter.words
        writers = tuple(
            tuple(writer_of(self._executor.workspace, own, half, form) for form in of)
            for half, of in zip(halves, forms, strict=True)
        )
        found = _Template(
            launchable,
            tuple(first + words[first + number] for number in range(1, 1 + len(halves))),
            writers,
            tuple(tuple(writer.length for writer in of) for of in writers),
        )
        evict(self._templates, _TEMPLATES)
        self._templates[key] = found
        return found


def _half_of(number: int, peer: tuple[int, bool, bool]) -> Half:
    """The half of a message that is given all of its addresses, the ``number``-th of its call."""
    rank, sends, receives = peer
    source, target, mapped = (given_address(0, GIVEN_EACH * number + k) for k in range(GIVEN_EACH))
    if sends and receives:
        return Half(rank, True, (Message(source, 0, target=target),), copies=True)
    return Half(rank, sends, (Message(source if sends else target, 0, mapped=mapped),))
