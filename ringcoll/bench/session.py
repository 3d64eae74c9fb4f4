"""The measurement itself, as every rank runs it."""

from __future__ import annotations

import itertools
import json
import os
import platform
import secrets
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ringcoll.bench import checking, environment, osu, table
from ringcoll.bench.cases import Case, Section, find_of, sections, sizes
from ringcoll.bench.devices import Device, device_of
from ringcoll.bench.library import Buffers, Library, Operation, Place, Ringcoll, allocate
from ringcoll.bench.paced import (
    Forecast,
    announce,
    describe_pace,
    forecast,
    free_seconds,
    measuring_seconds,
    roughly,
)
from ringcoll.bench.report import Report
from ringcoll.bench.settings import Settings
from ringcoll.bench.table import Result
from ringcoll.bench.timing import (
    Stopwatch,
    Timing,
    blocks_of,
    iterations_for,
    over_ranks_by_block,
    spread,
)
from ringcoll.bench.worlds import World, agree, gather_bytes, gather_numbers
from ringcoll.errors import ArgumentError
from ringcoll.units import format_bytes

if TYPE_CHECKING:
    from ringcoll.communicator.public import Communicator


_WARM_SECONDS, _WARM_CALLS = 0.2, 200  # of the first row, the fewer of both


def measure(world: World, settings: Settings, report: Report) -> bool:
    """Measure everything that the settings ask for; whether it was right. Collective."""
    begun = False
    right = True
    rounds = itertools.count() if settings.cycles == 0 else range(settings.cycles)
    for _ in rounds:
        for algorithm, slices in itertools.product(settings.algorithms, settings.slices):

            def sweep(
                control: Communicator,
                comm: Communicator,
                algorithm: str | None = algorithm,
                slices: int | None = slices,
                begun: bool = begun,
            ) -> int:
                device = device_of(comm, settings.graphs)
                if not begun:
                    introduce(control, comm, device, settings, report)
                with device.active():
                    session = Session(control, comm, settings, report, device)
                    return session.sweep(algorithm, slices)

            builder = None if algorithm is None else find_of(settings.collective, algorithm)
            wrong = world.run(sweep, algorithm=builder, slices=slices, pace=settings.pace)
            right = right and not any(wrong)
            begun = True
    return right


def introduce(
    control: Communicator,
    comm: Communicator,
    device: Device,
    settings: Settings,
    report: Report,
) -> None:
    """Print the ranks, complete the report, refuse graphs on a shared GPU; collective."""
    from ringcoll.bootstrap.mpi import load_mpi
    from ringcoll.version import __version__

    address = device.address
    me = json.dumps([os.getpid(), platform.node(), address.name, address.ordinal, address.bus])
    everyone = [json.loads(said) for said in gather_bytes(control, me.encode())]
    kind = comm.device.partition(":")[0]
    shared = kind != "cpu" and len({(said[1], said[4]) for said in everyone}) < len(everyone)
    if shared and settings.graphs:
        raise ArgumentError(
            "-G: ranks that share a GPU share each launch, which no single "
            "rank's stream can capture; give each rank a GPU, or leave -G out"
        )
    if settings.peer == "mpi":
        load_mpi()  # the report names its version before the peer begins
    if comm.rank != 0:
        return
    threads = settings.threads > 1
    machine = environment.machine(comm.nranks, threads=threads, device=kind)
    report.machine = {**machine, **device.facts()}
    report.versions = {**environment.versions(__version__), **device.versions()}
    if settings.peer == "nccl":
        from ringcoll.bench.torch_peers import nccl_version

        report.versions = {**report.versions, "nccl": nccl_version() or "missing"}
    ranks = [table.rank_line(rank, *said) for rank, said in enumerate(everyone)]
    report.begin(__version__, ranks)
    if settings.device == "auto":
        report.say(f"# Device: auto is {kind}")
    if kind == "cpu" and settings.pace is None:
        remark = environment.overcommitted(sum(said[1] == platform.node() for said in everyone))
        if remark is not None:
            report.crowded = True
            report.say(f"# {remark}")
    if shared:
        report.crowded = True
        report.say("# Ranks share a GPU: a simulation, whose times say nothing of real links")
    if settings.pace is not None:
        report.say(f"# {describe_pace(settings.pace)}")
        if settings.register != 2:
            report.say("# Nothing is predicted: without -R 2 calls are staged, which adds copies")


@dataclass(slots=True)
class Entrant:
    """One library on one side of a case."""

    library: Library
    place: Place
    operation: Operation
    watch: Stopwatch
    clears: bool
    device: Device

    def clear(self) -> None:
        """Make an in-place input zero: its sum would grow from call to call, to infinity."""
        for array in (self.place.whole, self.place.input) if self.clears else ():
            if array is not None:
                self.device.clear(array)


class Session:
    """One communicator's part of the measurement; ``control`` is plain, for barriers and talk."""

    def __init__(
        self,
        control: Communicator,
        comm: Communicator,
        settings: Settings,
        report: Report,
        device: Device,
    ) -> None:
        self.control, self.comm, self.device = control, comm, device
        self.settings, self.report = settings, report
        self.libraries: list[Library] = [Ringcoll(comm, symmetric=settings.register > 0)]
        if settings.peer is not None:
            self.libraries.append(device.peer(settings.peer, control))
        seed = secrets.randbits(48) if settings.seed is None else settings.seed
        self.seeds = itertools.count(agree(control, seed))
        self.free: Buffers | None = None  # of calls that are not paced, where others are
        self.cold = True  # until the first row of a table is measured

    def sweep(self, algorithm: str | None, slices: int | None) -> int:
        """Every table of one choice of algorithm and slices; how many elements were wrong."""
        settings, comm = self.settings, self.comm
        every = sections(settings, comm.nranks)
        wanted = [s for s in every if (s.algorithm, s.slices) == (algorithm, slices)]
        buffers = allocate(
            comm,
            settings.max_bytes
            if settings.layout == "nccl"
            else osu.most_bytes(settings, comm.nranks),
            shift=settings.unalign,
            register=settings.register,
            device=self.device,
        )
        if settings.pace is not None and settings.register == 2:
            self.free = allocate(self.control, settings.max_bytes, shift=settings.unalign)
        return sum(self._table(section, buffers) for section in wanted)

    def _table(self, section: Section, buffers: Buffers) -> int:
        libraries, remarks = [self.libraries[0]], []
        self.cold = True
        case = section.case(self.settings.max_bytes)
        if section.algorithm is not None or section.slices is not None:
            remarks.append(f"Algorithm: {libraries[0].algorithm(case)}")
        for library in self.libraries[1:]:
            reason = library.unable(case)
            if reason is None:
                libraries.append(library)
                sides = ", out of place and in place" if self.settings.layout == "nccl" else ""
                remarks.append(
                    f"Rows of {library.name} begin with #; at their end its time divided by "
                    f"ringcoll's{sides}: above 1.00x ringcoll is faster"
                )
            else:
                remarks.append(f"Without {library.name}: {reason}")
        if self.comm.rank == 0:
            self.report.begin_section(section, remarks)
        steps = (0,) if section.collective == "barrier" else sizes(self.settings)
        cases = [
            section.case(nbytes) if self.settings.layout == "nccl" else osu.case_of(section, nbytes)
            for nbytes in steps
        ]
        long = self._announce(cases, buffers)
        wrong = 0
        for case in cases:
            if long:
                self._say(f"ringcoll bench: {format_bytes(case.nbytes)}, about {long[case]}")
            wrong += self.measure(case, buffers, libraries)
        return wrong

    def _announce(self, cases: Sequence[Case], buffers: Buffers) -> Mapping[Case, str]:
        """Say on rank 0 how long a table over slow links takes; the share of each case."""
        if self.settings.pace is None or self.comm.rank != 0:
            return {}
        sides = (False, True) if self.settings.layout == "nccl" else (False,)
        expected = []
        for case in cases:
            count = sum(buffers.place(case, side) is not None for side in sides)
            name = self.libraries[0].algorithm(case)
            expected.append((case, measuring_seconds(case, name, self.settings, count)))
        text = announce(expected)
        if text is None:
            return {}
        self._say(text)
        return {case: roughly(seconds) for case, seconds in expected}

    def _say(self, text: str) -> None:
        print(f"{text}\n", end="", file=self.report.stderr, flush=True)

    def measure(self, case: Case, buffers: Buffers, libraries: Sequence[Library]) -> int:
        """Time and check one case, and report it; how many elements were wrong on all ranks."""
        entrants = self._entrants(case, buffers, libraries)
        if self.settings.layout == "nccl":
            self._time(entrants)
        else:
            self._time_like_omb(case, entrants)
        wrong = self._check(case, entrants)
        total = 0
        for library in libraries:
            own = [at for at, entrant in enumerate(entrants) if entrant.library is library]
            results = [self._result(case, entrants[at], wrong[at]) for at in own]
            total += sum(wrong[at] or 0 for at in own)
            said = (
                self._forecast(case, library.algorithm(case)) if library is libraries[0] else None
            )
            if self.comm.rank == 0:
                self.report.add(case, library.name, library.algorithm(case), results, said)
        return total

    def _forecast(self, case: Case, algorithm: str) -> Forecast | None:
        """What the model says of a paced call, and how long it takes unpaced; collective."""
        pace, section = self.settings.pace, case.section
        if self.free is None or pace is None:
            return None
        algorithm = algorithm.partition(" S=")[0]
        made = forecast(case, algorithm, pace)
        place = self.free.place(case, section.op is not None)
        if made is None or place is None:
            return None
        how = {"algorithm": find_of(section.collective, algorithm), "slices": section.slices}
        free = Ringcoll(self.control, options=how).operation(case, place)
        return replace(made, free=free_seconds(self.control, free))

    def _entrants(
        self, case: Case, buffers: Buffers, libraries: Sequence[Library]
    ) -> list[Entrant]:
        settings, entrants = self.settings, []
        timing = Timing(
            settings.aggregate,
            settings.per_iteration,
            settings.blocking == 1,
            settings.cpu_time,
        )
        nccl = settings.layout == "nccl"
        for in_place in (False, True) if nccl else osu.sides(case.section.collective):
            place = buffers.place(case, in_place)
            if place is None:
                continue
            self._fill(case, place)
            for library in libraries:
                operation = library.operation(case, place)
                if operation is None:
                    continue
                watch = self.device.watch(self.control.barrier, timing)
                clears = in_place and case.section.op is not None
                entrants.append(Entrant(library, place, operation, watch, clears, self.device))
        return entrants

    def _fill(self, case: Case, place: Place) -> None:
        """Give an out-of-place call numbers of the kind that it will be checked with."""
        if place.input is not None and not place.in_place:
            inputs = checking.Inputs(case, 0)
            self.device.write(place.input, checking.given(inputs, self.comm.rank, place.input.size))

    def _time(self, entrants: Sequence[Entrant]) -> None:
        iterations = []
        warmup = 1 if self.settings.warmup is None else self.settings.warmup
        for entrant in entrants:
            # The first call binds what later ones find bound: it says nothing of their time.
            slowest = self._warm(entrant, warmup + (self.settings.iterations is None))
            if self.cold and self.settings.warmup is None and self.settings.iterations is None:
                # Cores that slept and memory not yet touched would make the first row slower.
                calls = int(_WARM_SECONDS / max(slowest, 1e-6))
                slowest = self._warm(entrant, min(_WARM_CALLS, calls)) or slowest
            iterations.append(blocks_of(iterations_for(slowest, self.settings.iterations)))
        self.cold = False
        for turn in range(max(map(len, iterations), default=0)):
            for entrant, blocks in zip(entrants, iterations, strict=True):
                if turn < len(blocks):
                    entrant.clear()
                    entrant.watch.block(entrant.operation.call, blocks[turn])

    def _warm(self, entrant: Entrant, calls: int) -> float:
        """Make calls; seconds of the last one on the slowest rank. Collective."""
        entrant.clear()
        seconds = 0.0
        self.control.barrier()
        for _ in range(calls):
            started = time.perf_counter()
            entrant.operation.call()
            self.device.finish()
            seconds = time.perf_counter() - started
        return float(max(row[0] for row in gather_numbers(self.control, [seconds])))

    def _time_like_omb(self, case: Case, entrants: Sequence[Entrant]) -> None:
        """One library after the other: OMB knows no turns."""
        loop = osu.loop_of(case, self.settings)
        clock = Timing(cpu_time=self.settings.cpu_time).clock
        for entrant in entrants:
            call = entrant.operation.call
            if self.comm.device != "cpu":
                call = _finished(call, self.device)
            entrant.clear()
            self.control.barrier()
            entrant.watch.blocks.append(osu.time_calls(call, self.control.barrier, loop, clock))

    def _check(self, case: Case, entrants: Sequence[Entrant]) -> list[int | None]:
        """Of each entrant the wrong elements of all ranks; None: it was not checked."""
        if self.settings.checks == 0 or case.section.collective == "barrier":
            return [None] * len(entrants)
        counts = [0] * len(entrants)
        for _ in range(self.settings.checks):
            inputs = checking.Inputs(case, next(self.seeds))
            source = wanted = None
            for at, entrant in enumerate(entrants):
                place, output = entrant.place, entrant.operation.output
                if place.input is not None and source is None:
                    source = checking.given(inputs, self.comm.rank, place.input.size)
                if output is not None and wanted is None:
                    wanted = checking.answer(inputs, self.comm.rank, output.size)
                counts[at] += self._run_checked(case, entrant, source, wanted)
        totals = zip(*gather_numbers(self.control, counts), strict=True)
        return [int(sum(over_ranks)) for over_ranks in totals]

    def _run_checked(self, case: Case, entrant: Entrant, source: Any, wanted: Any) -> int:
        place, output = entrant.place, entrant.operation.output
        for array in (place.output, output):
            if array is not None:
                self.device.poison(array)
        if place.input is not None:
            self.device.write(place.input, source)
        self.control.barrier()
        self.device.once(entrant.operation.call)
        wrong = 0
        if output is not None:
            moved = case.section.op is None
            found = checking.compare(self.device.read(output), wanted, bits=moved)
            wrong += self._report_wrong(case, entrant, "output", found)
        if place.input is not None and not place.in_place:
            found = checking.compare(self.device.read(place.input), source, bits=True)
            wrong += self._report_wrong(case, entrant, "input", found)
        return wrong

    def _report_wrong(
        self, case: Case, entrant: Entrant, what: str, found: checking.Wrong | None
    ) -> int:
        if found is None:
            return 0
        section = case.section
        how = "in place" if entrant.place.in_place else "out of place"
        print(  # in one piece with its newline: other ranks may write at the same time
            f"{entrant.library.name}: {section.collective} of {case.nbytes} bytes, "
            f"{section.dtype}, {section.op_name}, {how}: rank {self.comm.rank} has {found.count} "
            f"wrong elements in its {what}; element {found.index} is {found.seen}, not "
            f"{found.wanted}\n",
            end="",
            file=sys.stderr,
            flush=True,
        )
        return found.count

    def _result(self, case: Case, entrant: Entrant, wrong: int | None) -> Result:
        watch, settings = entrant.watch, self.settings
        if settings.layout == "osu":
            means = [found[0] for found in gather_numbers(self.control, watch.blocks)]
            mean, over_ranks = osu.over_ranks(means, osu.loop_of(case, settings))
            return Result(entrant.place.in_place, mean, wrong, over_ranks=over_ranks)
        blocks = over_ranks_by_block(gather_numbers(self.control, watch.blocks), settings.average)
        seconds, ends = statistics.median(blocks), (min(blocks), max(blocks))
        place = entrant.place.in_place
        if not settings.per_iteration:
            return Result(place, seconds, wrong, ends=ends)
        singles = gather_numbers(self.control, watch.singles)
        skip = min(settings.per_iteration_skip, len(singles[0]) - 1)
        return Result(place, seconds, wrong, spread(singles, skip), ends=ends)


def _finished(call: Callable[[], object], device: Device) -> Callable[[], object]:
    """The call to its end: GPU ranks' calls return before it."""

    def both() -> None:
        call()
        device.finish()

    return both
