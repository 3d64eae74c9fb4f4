"""What ``explain`` shows and the bench names is the choice that a call runs."""

from __future__ import annotations

import dataclasses
import itertools
import json
import types
from typing import Any

import pytest

import ringcoll
from ringcoll.algorithms import ALGORITHMS
from ringcoll.bench.cases import Section
from ringcoll.bench.library import Ringcoll
from ringcoll.collectives import COLLECTIVES
from ringcoll.communicator.cuda.state import CudaState
from ringcoll.communicator.explaining import call_of, reachable
from ringcoll.communicator.topology import Topology
from ringcoll.config import Config
from ringcoll.dtypes import dtype_of
from ringcoll.executors.cpu.binder import Binder
from ringcoll.executors.cuda.kernel_body import KernelFits, gpu_ranks
from ringcoll.executors.cuda.preparing import mapped_buffers
from ringcoll.executors.cuda.workspace import Workspace
from ringcoll.launch import ALL_MAPPED
from ringcoll.tuner import measured
from ringcoll.tuner.measurement import Measured
from ringcoll.tuner.table import parse
from tests.communicator.known import known
from tests.communicator.test_tuning_table import content, timed
from tests.communicator.test_tuning_table import entry as measured_for

NAMES = [name for name in COLLECTIVES if name != "send"]
SIZES = (96, 24 << 10, 96 << 10, 3 << 20)
OPTIONS: tuple[dict[str, Any], ...] = ({}, {"algorithm": "ring"}, {"slices": 3})


def arrays(comm, name, nbytes, *, symmetric):
    """The two buffers of a call of this size; None where this rank has none."""
    kind, n = COLLECTIVES[name], comm.nranks
    count = nbytes // 4 // (n if "all" in (kind.input, kind.output) else 1)
    found = []
    for side, segments in (("input", kind.input), ("output", kind.output)):
        size = count * (n if segments == "all" else 1)
        made = comm.empty(size, "float32") if symmetric else comm.xp.empty(size, "float32")
        made[:] = 1
        lacks = (kind.rooted == side and comm.rank) or (
            name == "exscan" and side == "output" and comm.rank == 0
        )
        found.append(None if lacks else made)
    return found


def section_of(comm, name, options):
    kind = COLLECTIVES[name]
    op, root = ("sum" if kind.reduces else None), (0 if kind.has_root else -1)
    return Section(name, comm.nranks, dtype_of("float32"), op, root, **options)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        (name, options)
        for name in NAMES
        for options in OPTIONS
        if "algorithm" not in options or "ring" in ALGORITHMS[name]
    ],
    ids=str,
)
def test_cpu_ranks_run_what_explain_and_the_bench_say(monkeypatch, name, options):
    bound: dict[tuple[int, int], Any] = {}
    bind = Binder.bind

    def recorded(self, active, choice, *rest):
        if active.prepared.call.collective == name:
            bound[self.rank, active.prepared.call.nbytes] = choice
        return bind(self, active, choice, *rest)

    monkeypatch.setattr(Binder, "bind", recorded)

    def work(comm):
        seen = []
        for nbytes in SIZES if name != "barrier" else (0,):
            for symmetric in (True, False):
                both = arrays(comm, name, nbytes, symmetric=symmetric) if nbytes else ()
                getattr(comm, name)(*both)
                said = comm.explain(name, nbytes).splitlines()
                case = section_of(comm, name, options).case(nbytes)
                named = Ringcoll(comm, symmetric=symmetric).algorithm(case)
                seen.append((symmetric, bound[comm.rank, nbytes], said, named))
        return seen

    for seen in ringcoll.spawn(work, 3, device="cpu", **options):
        for symmetric, choice, said, named in seen:
            kinds = "any kind", "comm.empty" if symmetric else "plain memory"
            titles = tuple(f"buffers of {kind}: " for kind in kinds)
            (line,) = (line.partition(": ")[2] for line in said if line.startswith(titles))
            launch = choice.launch
            assert line.startswith(f"{choice.algorithm}, S = {launch.slices}, ")
            assert ("staged" in line) == (not launch.mapped)
            assert all(buffer.name in line for buffer in launch.mapped)
            assert named.split()[0] == choice.algorithm


@pytest.mark.parametrize("name", NAMES)
def test_gpu_ranks_know_the_same_buffers_in_a_call_and_in_explain(name):
    call = call_of(name, 0 if name == "barrier" else 1 << 20, 4)
    hello = (1 << 48, 2 << 48) if call.count else (0, 0)
    assert mapped_buffers(call, hello) == reachable(call)


def gpu_state(nranks: int, config: Config, topology: Topology) -> Any:
    """Enough of a rank on a GPU to choose."""
    workspace = Workspace(nranks)
    machine = gpu_ranks(workspace, 132, nvlink=True, known=topology.machine)
    state = object.__new__(CudaState)
    state.config, state.topology = config, topology
    state.fabric = types.SimpleNamespace(nranks=nranks, rank=0, nodes=())  # type: ignore[assignment]
    fits = KernelFits(workspace)
    state.cuda = types.SimpleNamespace(  # type: ignore[assignment]
        machine=machine, fits=fits, alone=True, auto_register=None, large_scratch=None
    )
    return state


@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
def test_plain_memory_is_explained_as_staged_and_then_mapped(name):
    state = gpu_state(2, Config(), Topology(reason="a fake"))
    state.cuda.auto_register = object()
    call = call_of(name, 64 << 20, 2)
    staged, direct = state.choice(call, state.config, frozenset()).variants
    assert direct == state.choice(call, state.config, ALL_MAPPED)
    mapped, _, plain = state.explain(name, 64 << 20, state.config).partition(
        "buffers of plain memory:"
    )
    assert f"  {staged.algorithm} by Simple, " in plain
    assert f"registered automatically: {direct.algorithm}, S = " in plain
    assert "registered" not in mapped
    comm: Any = types.SimpleNamespace(rank=0, nranks=2, _state=state)
    case = section_of(comm, name, {}).case(64 << 20)
    assert Ringcoll(comm, symmetric=False).algorithm(case).split()[0] == direct.algorithm
    small = state.choice(call_of(name, 1 << 19, 2), state.config, frozenset())
    assert small.direct is None


@pytest.mark.parametrize(("nranks", "machine"), [(2, None), (4, None), (4, "dgx1-v100")])
@pytest.mark.parametrize("name", NAMES)
def test_gpu_ranks_choose_what_explain_and_the_bench_say(name, nranks, machine):
    topology = known(machine, *range(nranks)) if machine else Topology(reason="a fake")
    plans: list[dict[str, Any]] = [
        {},
        {"slices": 3},
        {"protocol": "Simple"},
        {"engine": "copy"},
        {"max_sms": 8},
    ]
    for options in plans if machine is None else plans[:1]:
        if options.get("engine") and COLLECTIVES[name].prefix:
            continue
        state = gpu_state(nranks, Config(**options), topology)
        for nbytes in (256, 1 << 20, 64 << 20) if name != "barrier" else (0,):
            call = call_of(name, nbytes, nranks)
            said = state.explain(name, nbytes, state.config)
            parts = said.partition("buffers of plain memory:")
            for symmetric, part in ((True, parts[0]), (False, parts[2] or parts[0])):
                mapped = reachable(call) if symmetric else frozenset()
                found = state.choice(call, state.config, mapped)
                launch, grid = found.launch, found.grid
                how = "copy engines" if found.engine == "copy" else launch.protocol
                rings = len(found.channels.rings) if found.channels else 1
                along = "" if rings == 1 else f" on {rings} rings"
                assert f"  {found.algorithm}{along} by {how}, S = {launch.slices}, " in part
                blocks = f"{grid.blocks} block" if grid.blocks else "no block"
                assert f"{blocks}" in part and f" of {grid.threads} threads" in part
                assert all(reason in part for reason in found.why)
                comm: Any = types.SimpleNamespace(rank=0, nranks=nranks, _state=state)
                section = section_of(comm, name, {"slices": options.get("slices")})
                named = Ringcoll(comm, symmetric=symmetric).algorithm(section.case(nbytes))
                means = "copy" if found.engine == "copy" else launch.protocol
                runs = found.variants[-1] if symmetric else found  # the root's own buffer, too
                assert named.split()[:2] == [runs.algorithm, means]


# -- the table -----------------------------------------------------------------------------------


def entries() -> dict[str, Measured[Any]]:
    found = {}
    for name, value in vars(measured).items():
        for key, entry in value.items() if isinstance(value, dict) else (("", value),):
            if isinstance(entry, Measured):
                found[f"{name} {key}".strip()] = entry
    return found


def test_every_figure_has_a_source_and_what_was_measured():
    table = entries()
    assert len(table) > 20
    for name, entry in table.items():
        assert entry.figures and entry.source.date, name
        assert ("assumed" in entry.source.machine) <= (not entry.source.record), name
        algorithms = {*itertools.chain.from_iterable(ALGORITHMS.values())}
        assert set(entry.by) <= {*COLLECTIVES, *algorithms}, name


def test_every_record_of_the_table_is_kept_and_of_that_machine(record_of):
    for entry in entries().values():
        if entry.source.record:
            record = record_of(entry.source.record)
            assert record["date"] == entry.source.date
            assert entry.source.machine.startswith(record["machine"]["gpus"])


@pytest.fixture
def record_of():
    from pathlib import Path

    folder = Path(__file__).parents[2] / "benchmarks" / "results"
    return lambda name: json.loads((folder / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize(("max_sms", "decides"), [(None, True), (132, True), (131, False)])
def test_a_table_decides_where_blocks_are_not_limited(max_sms, decides):
    """The GPU has 132 multiprocessors."""
    best = timed("ring", 1e-4, protocol="Simple", engine="sm", slices=2)
    table = parse(json.dumps(content(ranks=2, entries=[measured_for(64 << 20, best)])))
    state = gpu_state(2, Config(max_sms=max_sms), Topology(reason="a fake"))
    state.use_table(table)
    found = state.choice(call_of("all_reduce", 64 << 20, 2), state.config, frozenset())
    assert (found.algorithm == "ring") == decides


def test_a_threshold_divides_the_calls(monkeypatch):
    state = gpu_state(4, Config(), Topology(reason="a fake"))
    edge = measured.LL_BYTES.of("all_reduce")

    def protocol(nbytes: int) -> str:
        found = state.choice(call_of("all_reduce", nbytes, 4), Config(), ALL_MAPPED)
        return str(found.launch.protocol)

    assert (protocol(edge), protocol(edge + 4)) == ("LL", "LL128")
    assert dataclasses.replace(measured.LL_BYTES, by={}).of("all_reduce") == measured.LL_BYTES.value
