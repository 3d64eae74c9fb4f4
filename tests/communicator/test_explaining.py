"""What GPU ranks say of their choice, without a GPU: it is the choice that a call makes."""

from __future__ import annotations

import re
import types
from dataclasses import replace
from typing import Any

import pytest

import ringcoll
from ringcoll import Block, Buffer, Chunk, Collective, Plan, Step, tuner
from ringcoll.arguments.calls import Call
from ringcoll.collectives import COLLECTIVES
from ringcoll.communicator.cuda.state import CudaState
from ringcoll.communicator.topology import Topology
from ringcoll.config import Config
from ringcoll.dtypes import dtype_of, op_of
from ringcoll.executors.cuda.kernel_body import KernelFits, gpu_ranks
from ringcoll.executors.cuda.workspace import Workspace
from ringcoll.launch import ALL_MAPPED
from ringcoll.tuner import Limits, choose
from tests.communicator.known import known

RANKS = 4
MACHINE = gpu_ranks(Workspace(RANKS), 132, nvlink=True)
NAMES = [name for name in COLLECTIVES if name != "send"]


NOWHERE = Topology(reason="these GPUs are a fake")


def explain(collective, nbytes, *, alone=True, topology=NOWHERE, **options):
    """As ``comm.explain`` of 4 ranks on GPUs with 132 multiprocessors."""
    state: Any = types.SimpleNamespace(
        config=Config(**options),
        fabric=types.SimpleNamespace(nranks=RANKS, rank=0),
        cuda=types.SimpleNamespace(
            machine=replace(MACHINE, known=topology.machine),
            fits=KernelFits(Workspace(RANKS)),
            large_scratch=None,
            alone=alone,
            auto_register=None,
        ),
        topology=topology,
    )
    state.choice = types.MethodType(CudaState.choice, state)
    return CudaState.explain(state, collective, nbytes, state.config)


def chosen(name, units, mapped=ALL_MAPPED, **options):
    wide = "all" in (COLLECTIVES[name].input, COLLECTIVES[name].output)
    nbytes = units * 4 * (RANKS if wide else 1)
    op = op_of("sum") if COLLECTIVES[name].reduces else None
    call = Call(name, 0, None, None, units, dtype_of("float32"), op, nbytes=nbytes)
    rooted = COLLECTIVES[name].rooted
    reached = frozenset(b for b in mapped if b.name.lower() != rooted)
    return choose(call, MACHINE, Limits(mapped=reached, **options), KernelFits(Workspace(RANKS)))


@pytest.mark.parametrize("nbytes", [0, 5, 256, 1 << 20, 512 << 20])
@pytest.mark.parametrize("name", NAMES)
def test_every_collective_has_an_answer(name, nbytes):
    text = explain(name, nbytes)
    assert text.startswith(f"{name}, {nbytes} bytes (as float32), 4 GPU ranks")
    assert "CPU" not in text and "refused" not in text and "without a name" not in text
    assert re.search(r" by (LL|LL128|Simple), S = \d+, \d+ blocks? of \d+ threads", text)


def test_the_answer_is_what_a_call_gets():
    found = chosen("all_reduce", 16 << 20)
    part = explain("all_reduce", 64 << 20).partition("buffers of plain")[0]
    launch, grid = found.launch, found.grid
    assert f"by {launch.protocol}, S = {launch.slices}, {grid.blocks} blocks" in part
    assert "peers reach INPUT and OUTPUT without a copy" in part


def test_an_edge_is_where_the_choice_changes():
    text = explain("all_gather", 4096)
    (edge,) = {int(found) for found in re.findall(r"to (\d+) bytes", text)}
    inside, beyond = chosen("all_gather", edge // 16), chosen("all_gather", edge // 16 + 1)
    first = chosen("all_gather", 256)
    assert inside.launch == first.launch and inside.plan == first.plan
    assert (beyond.launch, beyond.plan) != (first.launch, first.plan)
    assert f"above: all_pairs by {beyond.launch.protocol}" in text


def test_options_are_named_and_followed():
    text = explain("broadcast", 64 << 20, algorithm="chain", slices=8, max_sms=16)
    assert all(f"{option} is set" in text for option in ("algorithm='chain'", "slices=8"))
    assert "max_sms=16 is set" in text
    assert "chain by Simple, S = 8, 16 blocks" in text
    # An algorithm for all calls is left out where a collective has none of that name.
    assert "is set" not in explain("all_to_all", 4096, algorithm="chain")


def test_copy_engines_are_explained_where_they_are_asked_for():
    reduced = explain("all_reduce", 64 << 20, engine="copy")
    assert "engine='copy' is set" in reduced and " by Simple" not in reduced
    assert re.search(r"all_pairs by copy engines, S = \d+, \d+ blocks beside them", reduced)
    assert "all_pairs by copy engines, S = 1, no block beside" in explain(
        "all_gather", 64 << 20, engine="copy"
    )
    assert "copy engines" not in explain("barrier", 0, engine="copy")
    several = explain("all_gather", 64 << 20, engine="copy", alone=False)
    assert "refused: all_gather on rank 0: engine='copy' needs a process for each GPU" in several


def test_what_is_refused_says_why():
    assert "refused: all_gather on rank 0: protocol='LL'" in explain(
        "all_gather", 512 << 20, protocol="LL"
    )
    with pytest.raises(ringcoll.PlanError, match="rank order"):
        explain("all_reduce", 64 << 20, algorithm="ring", deterministic=True)
    assert "refused" not in explain("all_reduce", 64 << 20, deterministic=True)


def test_an_algorithm_of_the_users_own_is_no_riddle():
    def star(nranks):
        inputs = tuple(Chunk(rank, Buffer.INPUT, 0) for rank in range(nranks))
        outputs = [Chunk(rank, Buffer.OUTPUT, 0) for rank in range(nranks)]
        order = [(Block(0), Step(inputs, (outputs[0],)))]
        order += [(Block(r), Step((outputs[0],), (outputs[r],))) for r in range(1, nranks)]
        return Plan(Collective("all_reduce", nranks), tuple(order))

    on_host = ringcoll.spawn(lambda comm: comm.explain("all_reduce", 64), 2, algorithm=star)[0]
    assert f"\nalgorithm={star.__qualname__} is set; " in on_host
    text = explain("all_reduce", 64 << 20, algorithm=star)
    assert "algorithm='a function of yours' is set" in text and "your algorithm by" in text


def test_a_rooted_call_says_what_runs_where_the_root_is_reached():
    found = chosen("reduce", 16 << 20)
    part, _, plain = explain("reduce", 64 << 20).partition("buffers of plain")
    assert f"by Simple, S = {found.launch.slices}, {found.grid.blocks} blocks" in part
    (line,) = (line for line in part.splitlines() if "hello" in line)
    other = found.direct
    assert line.startswith("  if the root's OUTPUT is of comm.empty too, by its hello: S = 1,")
    blocks = other.grid.blocks
    assert f" {blocks} of the blocks; peers reach INPUT and OUTPUT without a copy" in line
    assert "hello" not in plain
    assert "hello" not in explain("broadcast", 64 << 20)
    line = explain("scatter", 64 << 20, algorithm="one_shot").partition("if the root's ")[2]
    assert line.startswith("INPUT is of comm.empty too")


@pytest.mark.parametrize(("name", "programs"), [("reduce", 2), ("all_reduce", 1)])
def test_all_that_may_run_is_proven(monkeypatch, name, programs):
    proven = []
    monkeypatch.setattr(tuner, "prove", lambda plan, launch, limits: proven.append(launch.mapped))
    found = chosen(name, 16 << 20, verify=True)
    assert proven == [kind.launch.mapped for kind in found.variants]
    assert len(set(proven)) == programs


def on_a_dgx1(collective, nbytes, **options):
    return explain(collective, nbytes, topology=known("dgx1-v100", 0, 1, 2, 3), **options)


def test_a_machine_of_unlike_pairs_says_why_a_call_goes_along_rings():
    text = on_a_dgx1("all_reduce", 64 << 20)
    lines = text.splitlines()
    assert lines[1] == "machine: dgx1-v100"
    assert re.fullmatch(r"ring and chain go along 4 rings, \d+ GB/s together:", lines[2])
    assert re.fullmatch(r"  0( [123]){3}, with \d of \d+ parts of the bytes", lines[3])
    assert "the clock on this machine's links:" in text
    assert re.search(r"\n  ring on 4 rings by Simple, S = \d+, ", text)
    assert re.search(
        r"\n    ring, S = 1: .* us, .* times its limit\n    \w+[,:] .*times as long\)\n", text
    )
    small = on_a_dgx1("all_reduce", 64)
    assert "one_shot_push by LL" in small and "in index order" in small
    one = on_a_dgx1("all_gather", 64 << 20, channels=1)
    assert "  ring by Simple" in one and "the clock" not in one


def test_a_switch_says_that_any_order_is_as_good():
    text = explain("all_reduce", 64 << 20, topology=known("dgx-h200", 0, 1, 2, 3))
    assert "all ranks reach each other alike" in text and "the clock" not in text
    plain = explain("all_reduce", 64 << 20)
    assert plain.splitlines()[1] == "the machine is not known: these GPUs are a fake"
    assert plain.splitlines()[2:] == text.splitlines()[3:]
