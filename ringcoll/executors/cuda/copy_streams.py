"""On which streams the rows of a schedule run, and which rows on other streams they await.

A lane's own stream has its copies, and the gates before the first and after the last of them. A
gate between two copies would keep the link idle while it starts, polls and ends, some 8 us: the
part of it that waits runs on a second stream while the copy before it moves, the part that signals
on a third while the copy after it does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ringcoll.executors.cuda.copies import Copy
from ringcoll.executors.cuda.copy_gates import CopyGate, parts


@dataclass(frozen=True, slots=True)
class Placed:
    """A row on a stream; it begins when the rows of these numbers have ended, too."""

    row: CopyGate | Copy
    stream: int  # 0 is the caller's
    after: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Placing:
    """All rows, in the order in which they are enqueued; ``ends``: streams that nobody awaits."""

    streams: int
    rows: tuple[Placed, ...]
    ends: tuple[int, ...]

    @property
    def awaited(self) -> list[int]:
        """The numbers of the rows that rows on other streams await."""
        return sorted({number for placed in self.rows for number in placed.after})


def place_on_streams(rows: Sequence[CopyGate | Copy], lanes: int) -> Placing:
    """The rows of a schedule of so many lanes on streams; lanes keep their numbers."""
    placed = tuple(_placed(rows, lanes))
    used = {stream: k for k, stream in enumerate(sorted({*range(lanes), *_streams(placed)}))}
    placed = tuple(Placed(each.row, used[each.stream], each.after) for each in placed)
    last = {each.stream: number for number, each in enumerate(placed)}
    awaited = {number for each in placed for number in each.after}
    ends = (stream for stream, number in sorted(last.items()) if number not in awaited)
    return Placing(len(used), placed, tuple(ends))


def _streams(placed: Sequence[Placed]) -> set[int]:
    return {each.stream for each in placed}


def _placed(rows: Sequence[CopyGate | Copy], lanes: int) -> Iterator[Placed]:
    left = Counter(row.lane for row in rows if isinstance(row, Copy))
    copied: dict[int, int] = {}  # by lane the number of its last copy
    waited: dict[int, int] = {}  # of its last gate beside that waits, if no copy awaits it yet
    signalled: dict[int, int] = {}  # of its last gate beside that signals
    number = 0
    for row in rows:
        lane = row.lane
        if isinstance(row, Copy):
            awaits = (waited.pop(lane),) if lane in waited else ()
            found = [Placed(row, lane, awaits)]
            copied[lane], left[lane] = number, left[lane] - 1
        elif lane not in copied or not left[lane]:
            # Signals of a lane are counted: none may overtake those before it.
            awaits = (signalled.pop(lane),) if lane in signalled else ()
            found = [Placed(row, lane, awaits)]
        else:
            signals, waits = parts(row)
            found = []
            if signals is not None:
                signalled[lane] = number
                found.append(Placed(signals, 2 * lanes + lane, (copied[lane],)))
            if waits is not None:
                waited[lane] = number + len(found)
                found.append(Placed(waits, lanes + lane))
        number += len(found)
        yield from found
