"""Calls whose count has not come often: the kernel of another call runs them.

Most counts that come once never come again: to choose, pack and keep a call of its own for each
costs more than its launch. Such a call takes the parameter of one that differs in the count alone.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ringcoll.arguments.calls import Call
from ringcoll.bounded import Seen
from ringcoll.executors.contract import Given
from ringcoll.executors.cuda.loader import Launchable
from ringcoll.executors.cuda.params import (
    GIVEN,
    HIGH_HALF,
    SIGNATURE_WORD,
    TIMEOUT_WORD,
    AddressWords,
    nanoseconds,
    number_word,
)
from ringcoll.executors.cuda.signature import CountedText
from ringcoll.executors.shared_state import RECORDS
from ringcoll.tuner.choice import Choice, Grid
from ringcoll.tuner.kept_gpu import Alike

if TYPE_CHECKING:  # whose field the recounter is
    from ringcoll.executors.cuda.cuda_call import CudaCall

COUNTS = 512
"""Counts that are known to have come, of calls that are alike."""

REPEATS = 4
"""Times that a count has come before a call of its own is prepared for it. µs of a call of a count
that comes for the first time beside those of one that is prepared, two ranks that share an H200,
medians of two runs: all_reduce 29-37 (in Python 55-58) and 145, all_gather_v 63-73 and 284,
all_to_all_v 74-83 and 568, sendrecv 59-61 and 417. One that is kept takes 6 to 12."""

_UNKNOWN: Given = (0,) * GIVEN


class Placed(Protocol):
    """Where the elements of one count lie."""

    @property
    def grid(self) -> Grid:
        """The CUDA blocks that move them."""

    def write(self, words: array[int], addresses: Given) -> None:
        """Write all words that the count decides, and the addresses that a launch is given."""


class Recounts(Protocol):
    """A packed parameter of one rank, and which of its words depend on the count."""

    @property
    def words(self) -> array[int]:
        """The packed parameter."""

    @property
    def held(self) -> AddressWords:
        """Where it holds the addresses that a launch is given."""

    def placed(self, count: int, counted: Call | None = None) -> Placed | None:
        """Where the elements of another count lie; None: another kernel runs it.

        ``counted``: a call with a count for each rank, of which this is the largest.
        """

    def table(self) -> tuple[Any, ...] | None:
        """What the compiled part needs for :meth:`placed` of one count; None: it does not do it."""


def parameter_like(recounts: Recounts, placed: Placed) -> tuple[array[int], AddressWords]:
    """A parameter of its own for a count, and where the addresses of a launch go."""
    words = recounts.words[:]
    placed.write(words, _UNKNOWN)
    held = tuple(tuple((word, words[word]) for word, _ in of) for of in recounts.held)
    return words, held


def sign(words: array[int], number_at: int, signature: int, number: int) -> None:
    """Write what tells a call from others; its number goes into the word ``number_at``."""
    words[SIGNATURE_WORD] = words[SIGNATURE_WORD] & HIGH_HALF | signature
    words[number_at] = words[number_at] & HIGH_HALF | number


class Recounter:
    """Launches calls like one that is prepared, of other counts, from one parameter.

    ``choice_of``: the choice of such a call with this grid. ``sizes``: in bytes, of calls that this
    kernel may run. ``record`` keeps the text of a call, of which it gives the digest and the
    number; ``prepared`` notes a call that may be launched.
    """

    def __init__(
        self,
        before: CudaCall,
        alike: Alike,
        recounts: Recounts,
        launchable: Launchable,
        choice_of: Callable[[Call, Grid], Choice],
        sizes: range,
        record: Callable[[str, Call, Choice], tuple[int, int]],
        prepared: Callable[[RecountedCall], None],
    ) -> None:
        call = before.call
        self.before, self.alike, self.recounts = before, alike, recounts
        self.launchable, self.choice_of, self.sizes = launchable, choice_of, sizes
        self._record, self._prepared = record, prepared
        self.each = call.nbytes // call.count  # of the call, for an element of its count
        self.text = CountedText(before.signature_text, call, before.choice.grid.blocks)
        self.total = before.total
        self.number_at = number_word(before.at)
        # By protocol Simple the words take as long as the preparation.
        often = REPEATS if before.choice.launch.in_band else 1
        self.seen = Seen(COUNTS, often=often)
        """The count, or the counts for each rank, of such calls."""
        for _ in range(often):  # a call of its own is prepared for that one
            self.seen.often(call.counts or call.count)
        self.taken = 0
        """See :meth:`.Launches.add_like`."""

    def holds(self, count: int, counted: Call | None) -> bool:
        """Whether the kernel runs a call of this count, and that has not come often before."""
        alike, nbytes = self.alike, self.each * count if counted is None else counted.nbytes
        if count not in alike.longest or not (counted is None or alike.holds(counted)):
            return False
        come = count if counted is None else counted.counts
        return nbytes in self.sizes and not self.seen.often(come)

    def begin(
        self, count: int, placed: Placed | None, grid: Grid, counted: Call | None = None
    ) -> RecountedCall:
        """A call that may be launched; ``counted``: with a count for each rank."""
        before = self.before
        if counted is None:
            text = self.text.of(count, grid.blocks)
        else:
            text = self.text.of_call(counted, grid.blocks)
        signature, number = self._record(text, before.call, before.choice)
        made = RecountedCall(
            *(self, count, placed, grid, text, signature, number, number % RECORDS),
            *(before.timeout, counted, before.large),
        )
        self._prepared(made)
        return made

    def begin_new(self, count: int, blocks: int, threads: int) -> RecountedCall | None:
        """The same of a call that the compiled part launches; None if its count has come often."""
        if self.seen.often(count):
            return None
        return self.begin(count, None, Grid(1, blocks, threads))

    def launch(self, call: RecountedCall, stream: int, addresses: Given) -> None:
        """Enqueue a call; the driver copies the parameter at once."""
        launchable, placed, grid = self.launchable, call.placed, call.grid
        if placed is None:
            raise RuntimeError("the compiled part launches this call")
        words = launchable.parameter.words
        placed.write(words, addresses)
        sign(words, self.number_at, call.signature, call.number)
        words[TIMEOUT_WORD] = nanoseconds(call.timeout)
        launchable.use_grid(grid.blocks, grid.threads)
        launchable.launch(stream)


@dataclass(slots=True, eq=False)
class RecountedCall:
    """Stands for a :class:`CudaCall` where errors and peers ask for it."""

    recounter: Recounter
    count: int
    placed: Placed | None  # None: the compiled part knows
    grid: Grid
    signature_text: str
    signature: int
    number: int
    slot: int
    timeout: float
    counted: Call | None = None  # with a count for each rank
    large: bool = False
    kernel: None = None  # the words of its parameter are written for each launch

    @property
    def launchable(self) -> RecountedCall:
        """What launches it."""
        return self

    def launch(self, stream: int, addresses: Given = ()) -> None:
        """Enqueue on a stream of the current device."""
        self.recounter.launch(self, stream, addresses)

    @property
    def timed(self) -> Mapping[float, CudaCall]:
        """With other timeouts it is not kept."""
        return {}

    @property
    def addresses(self) -> Given:
        """It was prepared for no arrays."""
        return 0, 0, 0, 0

    @property
    def total(self) -> bool:
        """Whether a rank ends only after all have entered."""
        return self.recounter.total

    @property
    def call(self) -> Call:
        """The call without arrays, made when it is asked for."""
        before, counted = self.recounter.before.call, self.counted
        return before.with_count(self.count) if counted is None else before.with_counts(counted)

    @property
    def choice(self) -> Choice:
        """What it runs, made when it is asked for."""
        return self.recounter.choice_of(self.call, self.grid)
