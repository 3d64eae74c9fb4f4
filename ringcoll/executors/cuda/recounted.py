"""Calls by LL or LL128 whose count has not come before: the kernel of another call runs them.

Most counts that come once never come again: to choose, pack and keep a call of its own for each
costs more than its launch. Such a call takes the parameter of one that differs in the count alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ringcoll.arguments.calls import Call
from ringcoll.bounded import Seen
from ringcoll.executors.contract import Given
from ringcoll.executors.cuda.loader import Launchable
from ringcoll.executors.cuda.params import TIMEOUT_WORD, nanoseconds
from ringcoll.executors.cuda.recounts import Placed, Recounts
from ringcoll.executors.cuda.signature import CountedText
from ringcoll.tuner.choice import Choice, Grid
from ringcoll.tuner.kept_gpu import Alike, layout_for, with_count, with_counts

if TYPE_CHECKING:  # whose field the recounter is
    from ringcoll.executors.cuda.cuda_call import CudaCall

COUNTS = 512
"""Counts that are known to have come, of calls that are alike."""


class Recounter:
    """Launches calls like one that is prepared, of other counts, from one parameter."""

    def __init__(
        self, before: CudaCall, alike: Alike, recounts: Recounts, launchable: Launchable
    ) -> None:
        self.before, self.alike = before, alike
        self.recounts, self.launchable = recounts, launchable
        self.text = CountedText(before.signature_text, before.call, before.choice.grid.blocks)
        self.total, self.timeout = before.total, before.timeout
        self.seen = Seen(COUNTS, often=1)
        """The count, or the counts for each rank, of such calls."""

    def launch(self, call: RecountedCall, stream: int, addresses: Given) -> None:
        """Enqueue a call; the driver copies the parameter at once."""
        launchable, recounts = self.launchable, self.recounts
        words = launchable.parameter.words
        recounts.write(words, call.placed)
        recounts.sign(words, call.signature, call.number)
        recounts.fill(words, call.placed, addresses)
        if call.timeout != self.timeout:
            self.timeout = call.timeout
            words[TIMEOUT_WORD] = nanoseconds(call.timeout)
        launchable.use_grid(call.grid.blocks, call.grid.threads)
        launchable.launch(stream)


@dataclass(slots=True, eq=False)
class RecountedCall:
    """Stands for a :class:`CudaCall` where errors and peers ask for it."""

    recounter: Recounter
    count: int
    placed: Placed
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
        return with_count(before, self.count) if counted is None else with_counts(before, counted)

    @property
    def choice(self) -> Choice:
        """What it runs, made when it is asked for."""
        choice = self.recounter.before.choice
        return choice.on(self.grid, layout_for(choice.layout, self.call))
