"""``ringcoll tune`` as every rank runs it: candidates timed in turns, checked, and kept as a table.

Candidates of a case are timed block by block in turns, so that a slow moment of the machine hits
all; those that are clearly slower drop out after each round. All ranks decide by the same numbers:
the slowest rank's of each block, and rank 0's clock.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringcoll.bench import environment
from ringcoll.bench.candidates import Candidate, Candidates
from ringcoll.bench.cases import Case, Section
from ringcoll.bench.compared import Checked, checked_of, ranked_of, seconds_of_blocks
from ringcoll.bench.devices import Device, device_of
from ringcoll.bench.library import Buffers, Place, Ringcoll, allocate
from ringcoll.bench.report import Report
from ringcoll.bench.session import Entrant, Session
from ringcoll.bench.settings import Settings
from ringcoll.bench.timing import Timing
from ringcoll.bench.worlds import World, agree, gather_numbers
from ringcoll.collectives import COLLECTIVES as COLLECTIVES_BY_NAME
from ringcoll.communicator.setup.tuning import machine_of, own_path
from ringcoll.config import from_environment
from ringcoll.dtypes import dtype_of
from ringcoll.errors import ArgumentError
from ringcoll.tuner.measured import AGREED_BYTES, STAGED_CALLS
from ringcoll.tuner.table import Entry, Machine

if TYPE_CHECKING:
    from ringcoll.communicator.public import Communicator

Shown = Callable[[int], AbstractContextManager[Callable[[str], None]]]
"""Shows how far so many cases have come: what it enters is called with the name of each."""

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all")

_BLOCK_SECONDS, _MOST_CALLS = 1e-3, 50
_KEPT = (*((4.0, 16),) * 6, *((2.0, 10),) * 8, *((1.3, 6),) * 10, (1.15, 4))
"""Before each round: candidates that took no longer than so many times the best, and how many."""
_FEWEST, _ROUNDS = 5, 400
_CLIMBING = 0.5
"""The part of a case's time after which no more candidates come."""
_FIRST, _CLIMBS, _TOP = 4, 3, 3
"""First blocks of a candidate; how often those near the best so many are tried."""
_COMPARED = 5
"""Candidates that are timed to the end where a table is checked."""
_COPY_CALLS = 4
"""Calls by copy engines until all ranks have mapped their SCRATCH."""
_LISTED = 6
_LOADING = 5.0  # seconds that a call's own kernel may take to compile


@dataclass(frozen=True, slots=True)
class Sweep:
    """What to measure, in so many seconds; ``table``: check its choices, and find none."""

    collectives: tuple[str, ...]
    sizes: tuple[int, ...]
    seconds: float
    table: str | None = None


@dataclass(frozen=True, slots=True)
class Tuned:
    """What was measured; ``path``: where the user's table of the machine is kept.

    ``left``: collectives whose cases the time was too short for, and how many of each.
    """

    rank: int
    machine: Machine
    path: Path | None
    entries: tuple[Entry, ...]
    checked: tuple[Checked, ...]
    wrong: int
    left: Mapping[str, int]


def tune(world: World, sweep: Sweep, shown: Shown) -> Tuned:
    """Measure on all ranks; rank 0 enters ``shown`` and gives it each case. Collective."""

    def run(control: Communicator, comm: Communicator) -> Tuned:
        device = device_of(comm, 4 if comm.device != "cpu" else 0)
        with device.active():
            return _Tuner(control, comm, device, sweep, shown).run()

    # Plain buffers stay plain, kernels compile side by side, only what is checked takes a table.
    options = {"register": False, "kernel_wait": 1e-3, "tuning": sweep.table or "off"}
    return world.run(run, **options)[0]


class _Tuner(Session):
    """One rank's part."""

    def __init__(
        self,
        control: Communicator,
        comm: Communicator,
        device: Device,
        sweep: Sweep,
        shown: Shown,
    ) -> None:
        settings = Settings(seed=agree(control, time.time_ns() % (1 << 48)))
        report = Report(settings, sys.stdout, sys.stderr)
        super().__init__(control, comm, settings, report, device)
        self._sweep, self._shown, self._wrong = sweep, shown, 0
        self._entrants_of: dict[Candidate, Entrant] = {}

    def run(self) -> Tuned:
        """Measure every case in its share of the time that is left."""
        if self.comm.nranks < 2:
            raise ArgumentError("one rank has nothing to choose; pass --ranks")
        cases = list(self._cases())
        if self.comm.rank:
            return self._measure_all(cases, lambda _case: None)
        with self._shown(len(cases)) as step:
            return self._measure_all(cases, step)

    def _measure_all(
        self, cases: Sequence[tuple[Case, bool]], step: Callable[[str], None]
    ) -> Tuned:
        most = max((case.nbytes for case, _ in cases), default=0)
        buffers = {
            mapped: allocate(self.comm, most, register=2 * mapped, device=self.device)
            for mapped in (False, True)
        }
        end = time.monotonic() + self._sweep.seconds
        entries, checked = [], []
        left: Sequence[tuple[Case, bool]] = ()
        for number, (case, mapped) in enumerate(cases):
            if agree(self.control, time.monotonic() > end):
                left = cases[number:]
                break
            kind = "mapped" if mapped else "plain"
            step(f"{case.section.collective}, {case.nbytes} bytes, {kind}")
            share = (end - time.monotonic()) / (len(cases) - number)
            candidates = Candidates(self.comm._state, case, mapped=mapped)
            self._entrants_of.clear()
            ranked = self._measured(case, buffers[mapped], candidates, share)
            if ranked and self._sweep.table is not None:
                checked.append(checked_of(case, mapped, ranked))
            elif ranked:
                entries.append(_entry(case, mapped, candidates, ranked))
        counted = Counter(case.section.collective for case, _ in left)
        found = tuple(entries), tuple(checked)
        return Tuned(self.comm.rank, *self._place(), *found, self._wrong, counted)

    def _place(self) -> tuple[Machine, Path | None]:
        state: Any = self.comm._state
        machine = machine_of(state.fabric, state.device if state.on_gpu else None)
        _, settings = from_environment(os.environ)
        return machine, own_path(machine, settings.cache_dir)

    def _cases(self) -> Iterator[tuple[Case, bool]]:
        """Every case, and whether peers reach its buffers; the small ones once.

        Every other size comes first: where time is short, they stand for the rest.
        """
        for sizes in (self._sweep.sizes[::2], self._sweep.sizes[1::2]):
            yield from self._cases_of(sizes)

    def _cases_of(self, sizes: Sequence[int]) -> Iterator[tuple[Case, bool]]:
        dtype, n, on_gpu = dtype_of("float32"), self.comm.nranks, self.comm._state.on_gpu
        for name in self._sweep.collectives:
            kind = COLLECTIVES_BY_NAME[name]
            op = "sum" if kind.reduces else None
            section = Section(name, n, dtype, op, 0 if kind.has_root else -1)
            for nbytes in sizes:
                case = section.case(nbytes)
                if case.count:
                    yield case, False
                if case.count and (on_gpu or case.nbytes > AGREED_BYTES.value):
                    yield case, True

    def _measured(
        self, case: Case, buffers: Buffers, candidates: Candidates, share: float
    ) -> list[Candidate]:
        """The candidates that were timed to the end, the fastest first."""
        place = buffers.place(case, in_place=False)
        if place is None:
            return []
        self._fill(case, place)
        started = time.monotonic()

        def late(part: float) -> bool:
            return bool(agree(self.control, time.monotonic() - started > part * share))

        everyone = self._admit(case, place, self._contest(candidates.first()))
        for climb in range(_CLIMBS):
            if climb and late(_CLIMBING):
                break
            best = sorted(everyone, key=seconds_of_blocks)[:_TOP]
            near = [near for each in best for near in candidates.near(each)]
            everyone += self._admit(case, place, near)
        usual = [each for each in everyone if each.usual]
        twins = [each for each in everyone if usual and each.key == usual[0].key]
        left = everyone
        for turn in range(_ROUNDS):
            if len(left) < 2 or (turn >= _FEWEST and late(1)):
                break
            left = sorted(left, key=seconds_of_blocks)
            factor, most = _KEPT[min(turn, len(_KEPT) - 1)]
            limit = factor * seconds_of_blocks(left[0])
            kept = [each for each in left[:most] if seconds_of_blocks(each) <= limit]
            if self._sweep.table is not None:
                kept = left[: max(len(kept), _COMPARED)]
            left = kept + [each for each in twins if each not in kept]
            for candidate in left:
                self._block(candidate)
        return ranked_of(left)

    def _admit(self, case: Case, place: Place, more: Sequence[Candidate]) -> list[Candidate]:
        """Those whose results are right, with their first blocks."""
        for candidate in more:
            library = Ringcoll(self.comm, options=candidate.options)
            operation = library.operation(case, place)
            watch = self.device.watch(self.control.barrier, Timing())
            entrant = Entrant(library, place, operation, watch, False, self.device)
            self._entrants_of[candidate] = entrant
            self._warm(entrant, 1)  # its kernel is compiled meanwhile
        for candidate in more:
            self._ready(self._entrants_of[candidate], candidate)
        wrong = self._check(case, [self._entrants_of[candidate] for candidate in more])
        right = []
        for candidate, count in zip(more, wrong, strict=True):
            self._wrong += count or 0
            if not count:
                right.append(candidate)
        for _ in range(_FIRST):
            for candidate in right:
                self._block(candidate)
        return right

    def _contest(self, candidates: list[Candidate]) -> list[Candidate]:
        """With a table to check, its choice a second time, which shows the noise.

        Options take the host time, so that all are timed with them.
        """
        if self._sweep.table is None:
            return candidates
        return [Candidate(each.options, each.choice) for each in candidates[:1]] + candidates

    def _ready(self, entrant: Entrant, candidate: Candidate) -> None:
        """Call until the call's own kernel is loaded and all ranks have mapped their SCRATCH."""
        calls = _COPY_CALLS if candidate.choice.engine == "copy" else 1
        if candidate.choice.large_scratch:
            calls = _COPY_CALLS + STAGED_CALLS
        self._warm(entrant, calls)
        end = time.monotonic() + _LOADING
        while any(row[0] for row in gather_numbers(self.control, [self._loading(end)])):
            time.sleep(0.05)
            self._warm(entrant, 1)

    def _loading(self, end: float) -> bool:
        """Whether the last call has run by a generic kernel, as others will not."""
        state: Any = self.comm._state
        if not state.on_gpu or time.monotonic() > end or state.cuda.async_errors.last is None:
            return False
        return bool(getattr(state.cuda.async_errors.last.launchable, "waits", False))

    def _block(self, candidate: Candidate) -> None:
        """Time a block of calls."""
        entrant = self._entrants_of[candidate]
        before = candidate.blocks[-1] if candidate.blocks else self._warm(entrant, 1)
        calls = int(max(1, min(_MOST_CALLS, _BLOCK_SECONDS / max(before, 1e-7))))
        entrant.watch.block(entrant.operation.call, calls)
        rows = gather_numbers(self.control, [entrant.watch.blocks[-1]])
        candidate.blocks.append(max(row[0] for row in rows))


def _entry(case: Case, mapped: bool, candidates: Candidates, ranked: list[Candidate]) -> Entry:
    timed = [
        each.timed(round(seconds_of_blocks(each), 9), candidates.predicted(each))
        for each in ranked[:_LISTED]
    ]
    return Entry(case.section.collective, case.nbytes, mapped, tuple(timed), environment.now())


def about(command: str) -> dict[str, Any]:
    """What a table says of itself beside its machine."""
    from ringcoll.version import __version__

    return {
        "date": environment.now(),
        "versions": environment.versions(__version__),
        "command": command,
        "commit": environment.commit(),
    }
