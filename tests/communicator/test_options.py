"""The options of a call: which bits they decide, and what is said when they cannot be had."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

import ringcoll
from ringcoll import ArgumentError, ArgumentTypeError, Config, MismatchError, PlanError
from ringcoll.algorithms import ALGORITHMS, build
from ringcoll.dtypes import DTYPES, dtype_of
from ringcoll.launch import Launch, Layout
from ringcoll.lower import lower
from ringcoll.verifier import prover
from ringcoll.verifier.prover import verify
from tests.communicator.cases import (
    REDUCING,
    ROOTED,
    SCANS,
    SHAPES,
    Case,
    Memory,
    contribution,
    run_case,
)
from tests.definition import run


def in_rank_order(collective, algorithm, nranks, root):
    """By the proof: whether every result is the left fold in rank order."""
    return verify(lower(build(collective, algorithm, nranks, root=root), Launch())).rank_order


# -- deterministic -------------------------------------------------------------------------------


@pytest.mark.parametrize("nranks", [2, 3, 5])
def test_deterministic_gives_the_same_bits_by_every_algorithm_that_can(nranks):
    """Wild values against the left fold; the others are refused by name, on all ranks alike."""
    able: list[Case] = []
    refused: list[Case] = []
    for collective in REDUCING:
        for root in {0, nranks // 2, nranks - 1} if collective in ROOTED else {0}:
            for algorithm in (None, *ALGORITHMS[collective]):
                known = algorithm is None or in_rank_order(collective, algorithm, nranks, root)
                for count in (7, 9001):
                    case = Case(
                        collective,
                        count,
                        root=root,
                        wild=True,
                        in_place=count == 7,
                        options={"algorithm": algorithm, "deterministic": True},
                    )
                    (able if known else refused).append(case)
    names = {(c.collective, c.options["algorithm"]) for c in refused}
    if nranks > 2:
        assert {("all_reduce", "ring"), ("reduce_scatter", "ring"), ("reduce", "tree")} <= names
    assert ("all_reduce", "one_shot") not in names
    assert ("all_reduce", "two_shot_fused") not in names

    def work(comm):
        memory = Memory(comm)
        for case in able:
            inputs = [contribution(case, rank, nranks) for rank in range(nranks)]
            run_case(comm, memory, case, inputs)
        for case in refused:
            inputs = [contribution(case, rank, nranks) for rank in range(nranks)]
            with pytest.raises(PlanError, match="not deterministic"):
                run_case(comm, memory, case, inputs)
        comm.barrier()

    ringcoll.spawn(work, nranks)


def test_deterministic_bits_do_not_depend_on_position_size_or_place():
    rng = np.random.default_rng(5)
    values = rng.standard_normal((4, 20_000)).astype("float32")

    def work(comm):
        whole = values[comm.rank].copy()
        comm.all_reduce(whole, deterministic=True)
        for first, count in [(0, 1), (17, 300), (5000, 9001), (19_999, 1)]:
            piece = comm.empty(count)
            piece[:] = values[comm.rank, first : first + count]
            out = np.empty(count, "float32")
            comm.all_reduce(piece, out, deterministic=True)
            assert out.tobytes() == whole[first : first + count].tobytes()

    ringcoll.spawn(work, 4, deterministic=False)


def test_deterministic_of_the_communicator_holds_for_its_calls():
    def work(comm):
        x = np.ones(3, "float32")
        with pytest.raises(PlanError, match="not deterministic"):
            comm.all_reduce(x, algorithm="ring")
        comm.all_reduce(x, algorithm="ring", deterministic=False)
        comm.all_reduce(x)
        comm.broadcast(x)
        comm.all_gather(x, np.empty(9, "float32"))
        comm.barrier()
        return x[0]

    assert ringcoll.spawn(work, 3, deterministic=True) == [9.0] * 3


# -- accumulate ----------------------------------------------------------------------------------

NARROW = [d.name for d in DTYPES if d.accumulator != d.numpy]


@pytest.mark.parametrize("dtype", NARROW)
def test_accumulate_dtype_rounds_what_is_stored_at_every_hop(dtype):
    """A ring of 4 by hand: each partial is rounded before it is sent on."""
    kind, n, count = dtype_of(dtype).numpy, 4, 64
    rng = np.random.default_rng(3)
    inputs = [(rng.standard_normal(count) * 3).astype(kind) for _ in range(n)]

    def work(comm):
        narrow, wide = np.empty(count, kind), np.empty(count, kind)
        comm.reduce(
            inputs[comm.rank], narrow if comm.rank == 3 else None, root=3, algorithm="chain",
            accumulate="dtype",
        )  # fmt: skip
        comm.reduce(inputs[comm.rank], wide if comm.rank == 3 else None, root=3, algorithm="chain")
        return narrow, wide

    narrow, wide = ringcoll.spawn(work, n)[3]
    hops = inputs[0].astype("float32")
    for term in inputs[1:]:
        hops = (hops + term.astype("float32")).astype(kind).astype("float32")
    once = np.add.reduce([term.astype("float32") for term in inputs]).astype(kind)
    assert narrow.tobytes() == hops.astype(kind).tobytes()
    assert wide.tobytes() == once.tobytes()
    assert narrow.tobytes() != wide.tobytes()


@pytest.mark.parametrize("dtype", NARROW)
def test_accumulate_dtype_is_what_the_definition_says_for_every_algorithm(dtype):
    kind, n = dtype_of(dtype).numpy, 5
    todo = [
        (c, a, op)
        for c in REDUCING
        for a in ALGORITHMS[c]
        for op in ("sum", "max" if c in SCANS else "avg")
    ]
    rng = np.random.default_rng(1)
    inputs = [rng.standard_normal(5 * n).astype(kind) for _ in range(n)]
    align = 64 // kind.itemsize  # ranks do not share a cache line
    plans = [(build(c, a, n), 5 if c == "reduce_scatter" else 5 * n, op) for c, a, op in todo]
    wanted = [
        run(
            plan, inputs, op=op, accumulate="dtype",
            layout=Layout(plan.collective, (count,), align=align),
        )
        for plan, count, op in plans
    ]  # fmt: skip

    def work(comm):
        seen = []
        for collective, algorithm, op in todo:
            out = np.zeros(5 if collective == "reduce_scatter" else 5 * n, kind)
            mine = out if collective != "reduce" or comm.rank == 0 else None
            mine = None if (collective, comm.rank) == ("exscan", 0) else mine
            how = {"algorithm": algorithm, "accumulate": "dtype"}
            getattr(comm, collective)(inputs[comm.rank], mine, op=op, **how)
            seen.append(mine)
        return seen

    for rank, seen in enumerate(ringcoll.spawn(work, n)):
        for (collective, algorithm, op), mine, theirs in zip(todo, seen, wanted, strict=True):
            name = f"rank {rank}: {collective} by {algorithm}, {op}"
            right = theirs[rank]
            assert (mine is None) == (right is None)
            if right is not None:
                assert mine.tobytes() == right.tobytes(), name


def test_accumulate_dtype_changes_nothing_where_the_accumulator_is_the_dtype():
    case = Case("all_reduce", 9000, wild=True, options={"accumulate": "dtype"})

    def work(comm):
        inputs = [contribution(case, rank, 3) for rank in range(3)]
        out, same = np.empty_like(inputs[0]), np.empty_like(inputs[0])
        comm.all_reduce(inputs[comm.rank], out, accumulate="dtype", algorithm="ring")
        comm.all_reduce(inputs[comm.rank], same, algorithm="ring")
        return out.tobytes() == same.tobytes()

    assert ringcoll.spawn(work, 3) == [True] * 3


def test_accumulate_dtype_is_proven_as_such():
    """Rounded at every hop, a chain is no longer the left fold that is rounded once."""

    def work(comm):
        x = np.ones(4, "float16")
        how = {"algorithm": "chain", "root": 3, "deterministic": True}
        comm.reduce(x, **how)
        with pytest.raises(PlanError, match="not deterministic"):
            comm.reduce(x, **how, accumulate="dtype")
        comm.all_reduce(x, deterministic=True, accumulate="dtype", verify=True)
        comm.all_reduce(x, algorithm="ring", accumulate="dtype", verify=True)

    ringcoll.spawn(work, 4)


# -- algorithm, slices, channels, verify, timeout ------------------------------------------------


@pytest.mark.parametrize("channels", [1, 2, 3])
def test_channels_multiply_rings(channels):
    todo = [
        Case(collective, count, in_place=place, options={"algorithm": "ring", "channels": channels})
        for collective in ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce")
        for count in (0, 5, 9001)
        for place in (False, True)
    ]

    def work(comm):
        memory = Memory(comm)
        for case in todo:
            inputs = [contribution(case, rank, 4) for rank in range(4)]
            run_case(comm, memory, case, inputs)

    ringcoll.spawn(work, 4)


def test_channels_of_the_communicator_hold_where_there_are_rings():
    def work(comm):
        x = np.ones(1000)
        comm.barrier()
        comm.gather(x, np.empty(3000) if comm.rank == 0 else None)
        comm.all_reduce(x)
        comm.broadcast(x)
        with pytest.raises(ArgumentError, match="tree has no rings"):
            comm.all_reduce(x, algorithm="tree")
        with pytest.raises(ArgumentError, match="channels=3"):
            comm.gather(x, np.empty(3000), channels=3)
        return x[0]

    assert ringcoll.spawn(work, 3, channels=2) == [3.0] * 3


def test_verify_proves_a_built_in_plan(monkeypatch):
    proven = []
    honest = prover.Prover.prove
    prover.prove_launch.cache_clear()

    def prove_noted(self, plan):
        proven.append(plan.collective.name)
        return honest(self, plan)

    monkeypatch.setattr(prover.Prover, "prove", prove_noted)

    def work(comm):
        x = np.ones(12345, "float32")
        for _ in range(2):
            comm.all_reduce(x, algorithm="two_shot", slices=5, verify=True)
            comm.all_reduce(x, algorithm="two_shot", slices=5)

    ringcoll.spawn(work, 3)
    assert proven == ["all_reduce"]


def test_config_is_overridden_by_keywords_and_overrides_the_communicator():
    def work(comm):
        x = np.ones(4)
        with pytest.raises(ArgumentError, match="algorithm='bruck' is not one of"):
            comm.all_reduce(x, config=Config(algorithm="bruck"))
        comm.all_reduce(x, config=Config(algorithm="bruck"), algorithm="ring")
        with pytest.raises(PlanError):
            comm.all_reduce(x, config=Config(deterministic=True))
        return x[0]

    assert ringcoll.spawn(work, 3, algorithm="ring") == [3.0] * 3


def test_a_timeout_of_the_call_ends_it():
    def work(comm):
        if comm.rank == 0:
            comm.all_reduce(np.ones(3), timeout=0.05)
        else:
            with pytest.raises(ringcoll.Error, match="rank 0"):
                while True:
                    comm.check()

    with pytest.raises(ringcoll.DeadlineError, match=r"waited 0.05 s for rank 1"):
        ringcoll.spawn(work, 2)


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"algoritm": "ring"}, ArgumentTypeError, "did you mean 'algorithm'"),
        ({"algorithm": "rng"}, ArgumentError, "did you mean 'ring'"),
        ({"algorithm": "bruck"}, ArgumentError, "algorithm='bruck' is not one of ring"),
        ({"algorithm": 3}, ArgumentTypeError, "algorithm=3"),
        ({"slices": 0}, ArgumentError, "slices=0"),
        ({"slices": 1.5}, ArgumentTypeError, "slices=1.5"),
        ({"accumulate": "narrow"}, ArgumentError, "one of wide, dtype"),
        ({"deterministic": "yes"}, ArgumentTypeError, "deterministic='yes'"),
        ({"timeout": -1}, ArgumentError, "timeout=-1"),
        ({"protocol": "LL"}, ArgumentError, "protocol='LL' is for GPU ranks"),
        ({"engine": "copy"}, ArgumentError, "engine='copy' is for GPU ranks"),
        ({"max_sms": 4}, ArgumentError, "max_sms=4"),
        ({"stream": 7}, ArgumentError, "stream=7"),
        ({"config": {"slices": 2}}, ArgumentTypeError, "config is a dict"),
        ({"channels": 2, "algorithm": "tree"}, ArgumentError, "tree has no rings"),
        ({"cache_dir": "/tmp"}, ArgumentTypeError, "no option 'cache_dir'"),
    ],
)
def test_an_option_that_cannot_be_had_is_refused_before_anything_moves(options, kind, text):
    """On one rank only: it is told, the communicator and its buffers are as they were."""

    def work(comm):
        x = np.full(5, 2.0)
        if comm.rank == 1:
            with pytest.raises(kind, match="all_reduce on rank 1") as caught:
                comm.all_reduce(x, **options)
            assert text in str(caught.value)
        assert set(x) == {2.0}
        comm.all_reduce(x)
        return x[0]

    assert ringcoll.spawn(work, 3) == [6.0] * 3


def test_ranks_with_unequal_options_are_told():
    def work(comm):
        comm.all_reduce(np.ones(5), algorithm="ring" if comm.rank else "tree")
        comm.barrier()

    with pytest.raises(MismatchError, match="algorithm=ring") as caught:
        ringcoll.spawn(work, 3)
    assert "algorithm=tree" in str(caught.value)


def test_slices_of_the_communicator_leave_a_barrier_alone():
    """A barrier has nothing to slice."""

    def work(comm):
        x = np.ones(1000)
        comm.all_reduce(x)
        comm.barrier()
        comm.sendrecv(x, 1 - comm.rank, np.empty(1000), 1 - comm.rank)
        return x[0]

    assert ringcoll.spawn(work, 2, slices=4) == [2.0, 2.0]


def test_an_algorithm_of_the_communicator_holds_where_a_collective_has_it():
    def work(comm):
        x, out = np.ones(3), np.empty(3)
        comm.barrier()
        comm.all_to_all(x, out)
        comm.gather(x, np.empty(9) if comm.rank == 0 else None)
        comm.all_reduce(x)
        with pytest.raises(
            ArgumentError, match=r"barrier on rank .: algorithm='tree' is not one of"
        ):
            comm.barrier(algorithm="tree")
        assert "algorithm='ring' is set" in comm.explain("all_reduce", 24)
        return x[0]

    assert ringcoll.spawn(work, 3, algorithm="ring") == [3.0] * 3


def test_every_collective_is_tested_here():
    assert set(SHAPES) | {"send", "barrier"} == set(ALGORITHMS)


def test_what_is_asked_of_empty_and_explain_is_refused_by_name():
    with ringcoll.init(device="cpu") as comm:
        with pytest.raises(ArgumentTypeError, match="empty on rank 0: dtype='flot32'"):
            comm.empty(4, "flot32")
        with pytest.raises(
            ArgumentTypeError, match="explain on rank 0: nbytes='1M', wanted an int"
        ):
            comm.explain("all_reduce", "1M")  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match="explain on rank 0: nbytes=-1"):
            comm.explain("all_reduce", -1)


def test_gpu_is_no_device_but_a_hint():
    with pytest.raises(ArgumentError, match=r"one of auto, cpu, cuda; did you mean 'cuda'\?$"):
        ringcoll.init(device="gpu")


# -- tag and debug -------------------------------------------------------------------------------


def late_call(comm):
    if comm.rank == 0:
        comm.all_reduce(np.ones(3), timeout=0.05, tag="grads")
    while True:  # until the error of rank 0 is here
        comm.check()


def late_message(comm):
    if comm.rank == 0:
        comm.recv(np.ones(3), 1, timeout=0.05, tag="stage 2")
    while True:
        comm.check()


def unequal_calls(comm):
    comm.all_reduce(np.ones(3 + comm.rank), tag=f"layer {comm.rank}")
    comm.barrier()


@pytest.mark.parametrize(
    ("work", "kind", "texts"),
    [
        (late_call, ringcoll.DeadlineError, ["op=sum tag=grads"]),
        (late_message, ringcoll.DeadlineError, ["dtype=float64 tag=stage 2)"]),
        (unequal_calls, MismatchError, ["tag=layer 0", "tag=layer 1"]),
    ],
)
def test_errors_show_the_tag_of_a_call(work, kind, texts):
    """Ranks need not share it, and those of the other ranks are shown too."""
    with pytest.raises(kind) as caught:
        ringcoll.spawn(work, 2)
    assert [text for text in texts if text not in str(caught.value)] == []


def test_the_tag_of_a_communicator_is_its_name(caplog):
    caplog.set_level("DEBUG", "ringcoll")

    def work(comm):
        comm.close()
        with pytest.raises(ringcoll.ClosedError, match="rank 0 of 'dp': the communicator is"):
            comm.barrier()

    ringcoll.spawn(work, 1, tag="dp")
    with pytest.raises(ringcoll.DeadlineError, match="op=sum tag=grads"):
        ringcoll.spawn(late_call, 2, tag="dp")
    assert "rank 0 of 'dp': DeadlineError" in caplog.text


def test_debug_logs_what_is_chosen_once_for_each_new_call(caplog):
    caplog.set_level("DEBUG", "ringcoll")

    def work(comm):
        x = np.ones(1000)
        for _ in range(3):
            comm.all_reduce(x, tag="grads")
        comm.all_reduce(x, algorithm="ring", slices=2)
        comm.split(0).broadcast(x[:4])

    ringcoll.spawn(work, 2, debug=False)
    quiet = [record for record in caplog.records if record.levelname == "DEBUG"]
    ringcoll.spawn(work, 2, debug=True)
    said = [r.getMessage() for r in caplog.records if r.levelname == "DEBUG"]
    assert quiet == []
    assert 'agreed on {"accumulate": "wide"' in said[0]
    assert json.loads(f"[{said[0].partition('agreed on ')[2]}]")[1] == {"device": "auto"}
    assert [line.partition(",")[0] for line in said[1:]] == [
        "rank 0: all_reduce count=1000 dtype=float64 op=sum tag=grads",
        "rank 0: all_reduce count=1000 dtype=float64 op=sum",
        "rank 0: broadcast count=4 dtype=float64 root=0",
    ]
    assert "one_shot (the tuner's choice), S = 1, staged" in said[1]
    assert "ring (algorithm='ring'), S = 2" in said[2]


def test_debug_shows_its_lines_where_nothing_is_configured():
    code = "import ringcoll, numpy; ringcoll.init_all(1)[0].all_reduce(numpy.ones(4))"
    environ = {**os.environ, "RINGCOLL_DEBUG": "1", "RINGCOLL_DEVICE": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0
    assert "ringcoll: rank 0: all_reduce count=4 dtype=float64 op=sum, 32 bytes" in done.stderr
