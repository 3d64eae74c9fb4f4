"""What could run a call: algorithms, protocols, engines, slices and CUDA blocks, as options."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ringcoll.algorithms import ALGORITHMS, FOR_COPY_ENGINES
from ringcoll.arguments.calls import Call
from ringcoll.bench.cases import Case
from ringcoll.communicator.explaining import reachable
from ringcoll.errors import Error
from ringcoll.launch import PROTOCOLS
from ringcoll.model import fastest as model
from ringcoll.plan import Buffer
from ringcoll.tuner.choice import MAKING, Choice
from ringcoll.tuner.measured import links_of
from ringcoll.tuner.simple import may_copy
from ringcoll.tuner.table import Timed

_RANGE = {"LL": (0, 1 << 20), "Simple": (64 << 10, 1 << 60)}
"""Bytes for which a protocol of GPU ranks is a candidate."""

_OTHERS = 0, 16 << 20
"""Bytes for which a protocol without a range of its own is, as LL128."""

_SLICED = 256 << 10
"""Bytes from which other numbers of slices are candidates."""


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """Options of a call, and what runs with them; ``usual``: what runs without."""

    options: Mapping[str, Any]
    choice: Choice
    usual: bool = False
    blocks: list[float] = field(default_factory=list)  # seconds of a call, of each block

    @property
    def key(self) -> object:
        """What tells two candidates apart."""
        found = self.choice
        return found.plan, found.launch, found.grid, found.engine

    def timed(self, seconds: float, predicted: float | None) -> Timed:
        """The candidate as a table has it."""
        found = self.choice
        return Timed(
            found.algorithm,
            found.launch.protocol,
            found.engine,
            found.launch.slices,
            self.options.get("max_sms"),
            seconds,
            predicted,
        )


class Candidates:
    """Those of one case on one rank's communicator; the same on all ranks.

    ``mapped``: peers reach the buffers.
    """

    def __init__(self, state: Any, case: Case, *, mapped: bool) -> None:
        section = case.section
        self._state, self._mapped_all = state, mapped
        self.call = Call(
            section.collective,
            state.fabric.rank,
            None,
            None,
            case.count,
            section.dtype,
            None if section.op is None else section.operator(0),
            max(section.root, 0),
            nbytes=case.nbytes,
        )
        self._mapped = reachable(self.call) if mapped else frozenset[Buffer]()
        self._seen: set[object] = set()

    def _found(
        self, options: Iterable[Mapping[str, Any]], *, usual: bool = False
    ) -> list[Candidate]:
        """The candidates of options that do something new."""
        found = []
        for each in options:
            try:
                config = replace(self._state.config, **each)
                choice = self._state.choice(self.call, config, self._mapped)
            except Error:
                continue  # not for this collective, number of ranks, type or memory
            if self._mapped:
                choice = choice.variants[-1]  # the root's own buffer is mapped, too
            candidate = Candidate(_named(each, choice), choice, usual)
            if candidate.key not in self._seen:
                self._seen.add(candidate.key)
                found.append(candidate)
        return found

    def first(self) -> list[Candidate]:
        """What runs without options, and every algorithm by every protocol and engine."""
        names, nbytes = ALGORITHMS[self.call.collective], self.call.nbytes
        alone = [name for name in names if name not in FOR_COPY_ENGINES]
        options: list[dict[str, Any]] = [{"algorithm": name} for name in alone]
        if self._state.on_gpu:
            options = [
                {"algorithm": name, "protocol": protocol, "engine": "sm"}
                for protocol in PROTOCOLS
                for least, most in [_RANGE.get(protocol, _OTHERS)]
                if least <= nbytes <= most
                for name in alone
            ]
            nranks, scratch = self._state.fabric.nranks, self._state.cuda.large_scratch
            if scratch is not None and may_copy(self.call, nranks) and not self._mapped_all:
                options += [{"algorithm": name, "engine": "copy"} for name in names]
        return [*self._found([{}], usual=True), *self._found(options)]

    def near(self, candidate: Candidate) -> list[Candidate]:
        """The same in other slices and, on GPUs, on other numbers of CUDA blocks."""
        launch, grid = candidate.choice.launch, candidate.choice.grid
        if launch.in_band or self.call.nbytes < _SLICED:
            return []
        slices = {max(1, launch.slices // part) for part in (8, 4, 2)} | {2 * launch.slices}
        options = [{**candidate.options, "slices": each} for each in sorted(slices)]
        if candidate.choice.engine == "sm":
            blocks = {max(1, grid.blocks // 2), 2 * grid.blocks}
            options += [{**candidate.options, "max_sms": each} for each in sorted(blocks)]
        return self._found(options)

    def predicted(self, candidate: Candidate) -> float | None:
        """What the timing model says of a candidate; None where it knows no links."""
        state, found, call = self._state, candidate.choice, self.call
        machine = state.cuda.machine if state.on_gpu else state.machine
        known, collective, nranks = machine.known, call.collective, machine.nranks
        if known is not None:
            links, channels = known.links, known.channels
        elif state.on_gpu:
            return None
        else:
            links, channels = links_of(state.machine.nodes), None
        with MAKING:
            timed = model.candidate_for(
                collective,
                found.algorithm,
                nranks,
                root=call.root,
                channels=channels,
                slices=found.launch.slices,
            )
            how = collective, nranks, call.nbytes
            return model.fastest(*how, links=links, candidates=(timed,)).seconds


def _named(options: Mapping[str, Any], choice: Choice) -> dict[str, Any]:
    """Options that name what a choice runs, whatever a table says."""
    named = {"algorithm": choice.algorithm, "slices": choice.launch.slices, **options}
    if choice.engine != "host":
        named["engine"] = choice.engine
        if choice.engine == "sm":
            named["protocol"] = choice.launch.protocol
    return named
