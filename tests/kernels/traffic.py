"""Messages between ranks on the stand-in of a GPU: their memory, their launches."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Thread

import numpy as np

from ringcoll.executors.cuda.params import Header, pack
from ringcoll.executors.cuda.point_to_point import Half, Message, pairs_body, shared_out
from tests.kernels.cases import POISON, Array
from tests.kernels.stand_in import KERNELS, compile_all, library
from tests.kernels.world import GUARD, Ready, World

Sent = tuple[int, int, int]
"""Sender, receiver and bytes of a message."""


def guarded(nbytes: int, shift: int) -> tuple[Array, Array]:
    """Memory full of poison, and bytes in its middle that miss an aligned address by ``shift``."""
    whole = np.full(nbytes + shift + 2 * GUARD + 128, POISON, np.uint8)
    first = GUARD + -(whole.ctypes.data + GUARD) % 128 + shift
    return whole, whole[first : first + nbytes]


@dataclass(eq=False)
class Traffic:
    """Messages of one round, in the order in which each pair makes them.

    Args:
        messages: sender, receiver and bytes.
        seed: of what is sent.
        shift: bytes by which arrays miss an aligned address.
        terms: of single messages and ends (number, sends) that do not agree.
        copies: whether what a rank sends to itself is a plain copy.
        world: in whose memory the arrays lie; None: in this process.
        mapped: the numbers of the messages whose senders have mapped the receive buffer.

    """

    messages: Sequence[Sent]
    seed: int = 0
    shift: int = 0
    terms: Mapping[tuple[int, bool], str] = field(default_factory=dict)
    copies: bool = False
    world: World | None = None
    mapped: Collection[int] = ()

    def __post_init__(self) -> None:
        rng = np.random.default_rng([self.seed, len(self.messages)])
        self.sent, self.arrived = [], []
        for sender, _, nbytes in self.messages:
            _, data = self._place(nbytes, self.shift and 2 * self.shift + sender)
            data[:] = rng.integers(0, 256, nbytes)
            self.sent.append(data)
            self.arrived.append(self._place(nbytes, self.shift))
        self.table = np.zeros((1 + len(self.messages), 8), np.uint64)

    def _mapped(self, number: int, receiver: int, nranks: int) -> int:
        """A receive buffer in mapping 1 + number at some offset, and its row of the table."""
        offset = 16 * (number + 1)
        row = self.table.reshape(-1)[(1 + number) * nranks :]
        row[receiver] = self._seen(self.arrived[number][1]) - offset
        return (1 + number) << 48 | offset

    def _place(self, nbytes: int, shift: int) -> tuple[Array, Array]:
        if self.world is None:
            return guarded(nbytes, shift)
        taken = self.world.take(nbytes, shift)
        return taken, taken

    def _seen(self, array: Array) -> int:
        return array.ctypes.data if self.world is None else self.world.seen(array)

    def halves(self, rank: int, nranks: int = 2) -> list[Half]:
        """All that a rank has to do with them."""
        found: dict[tuple[int, bool, bool], list[Message]] = {}
        for number, (sender, receiver, nbytes) in enumerate(self.messages):
            target = self._seen(self.arrived[number][1])
            if self.copies and sender == receiver:
                if rank == sender:
                    copied = Message(self._seen(self.sent[number]), nbytes, target=target)
                    found.setdefault((rank, True, True), []).append(copied)
                continue
            for sends, end, peer in ((True, sender, receiver), (False, receiver, sender)):
                if end == rank:
                    address = self._seen(self.sent[number]) if sends else target
                    terms = self.terms.get((number, sends), f"nbytes={nbytes}")
                    # Numbers that show in a report which message and which end it is.
                    named = not sends and number in self.mapped
                    mapped = self._mapped(number, rank, nranks) if named else 0
                    record = 100 + 2 * number + sends
                    made = Message(address, nbytes, terms, record, mapped=mapped)
                    found.setdefault((peer, sends, False), []).append(made)
        return [Half(peer, sends, tuple(m), copies) for (peer, sends, copies), m in found.items()]

    def apart(self) -> Iterator[Traffic]:
        """Each message as traffic of its own."""
        for number, message in enumerate(self.messages):
            one = Traffic([message], mapped=(0,) if number in self.mapped else ())
            one.sent, one.arrived = [self.sent[number]], [self.arrived[number]]
            yield one

    def ready(
        self,
        world: World,
        ranks: Sequence[int],
        *,
        blocks: int = 8,
        timeout: float = 60.0,
        threads: int = 3,
    ) -> Ready:
        """One launch of some ranks."""
        table = self._seen(self.table) if self.mapped else 0
        at = [replace(world.place(rank), mappings=table) for rank in ranks]
        halves = [self.halves(rank, world.nranks) for rank in ranks]
        given = [
            shared_out(own, world.workspace, blocks, f"rank {r}")
            for r, own in zip(ranks, halves, strict=True)
        ]
        body = pairs_body(world.workspace, at, halves, given)
        header = Header(timeout, 0, False, False, world.workspace.pair_replicas)
        parameter = pack(body, header, world.workspace.progress, at)
        return Ready(body.text, parameter, max(1, *map(sum, given)), len(at), threads)

    def check(self) -> None:
        """Every message has come, and nothing beside it was touched."""
        for message, data, (whole, seen) in zip(
            self.messages, self.sent, self.arrived, strict=True
        ):
            if not np.array_equal(data, seen):
                raise AssertionError(f"{message}: {np.flatnonzero(data != seen)[:5]} differ")
            if (whole != POISON).sum() != (seen != POISON).sum():
                raise AssertionError(f"{message}: stray bytes")


def side_by_side(
    launches: Sequence[Sequence[Ready]], kernels: Path = KERNELS, late: float = 0.0
) -> None:
    """Run launches in a row for every rank, all ranks at once.

    Args:
        launches: of each rank.
        kernels: the source.
        late: seconds by which the last rank begins after the others.

    """
    if kernels is KERNELS:
        compile_all(ready.text for own in launches for ready in own)
    for own in launches:
        for ready in own:
            library(ready.text, kernels)

    def run(own: Sequence[Ready]) -> None:
        if own is launches[-1]:
            time.sleep(late)
        for ready in own:
            ready(kernels)

    threads = [Thread(target=run, args=(own,)) for own in launches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
