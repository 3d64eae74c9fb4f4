"""What GPU ranks run by a table of ``ringcoll tune``, and its candidates, without a GPU."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from ringcoll.algorithms import ALGORITHMS
from ringcoll.arguments.calls import Call
from ringcoll.bench.candidates import Candidates
from ringcoll.bench.cases import Section
from ringcoll.dtypes import dtype_of, op_of, premul_sum
from ringcoll.executors.cuda.kernel_body import KernelFits, gpu_ranks
from ringcoll.executors.cuda.workspace import LARGE_SCRATCH_BYTES, Workspace
from ringcoll.launch import ALL_MAPPED, IN_BAND
from ringcoll.tuner import Choice, Limits, choose
from ringcoll.tuner.kept_gpu import calls_alike
from ringcoll.tuner.simple import large_engine
from ringcoll.tuner.table import parse
from tests.communicator.test_tuning_table import content, entry, timed

SMALL, MIDDLE, LARGE = 1 << 14, 4 << 20, 256 << 20
BARE = replace(gpu_ranks(Workspace(2), 132, nvlink=True), large_scratch=True)
FITS = KernelFits(Workspace(2))


def on_gpu(algorithm: str, protocol: str = "Simple", engine: str = "sm", **more: Any) -> Any:
    return timed(algorithm, 1e-4, **{"protocol": protocol, "engine": engine, **more})


MACHINE = replace(
    BARE,
    table=parse(
        json.dumps(
            content(
                entries=[
                    entry(SMALL, on_gpu("all_pairs", "LL128")),
                    entry(SMALL, on_gpu("one_shot_push", "LL"), mapped=True),
                    entry(MIDDLE, on_gpu("ring", slices=2)),
                    entry(MIDDLE, on_gpu("two_shot", blocks=24), mapped=True),
                    entry(LARGE, on_gpu("all_pairs_pull", engine="copy", slices=4)),
                    entry(LARGE, on_gpu("one_shot"), mapped=True),
                ]
            )
        )
    ),
)


def call(nbytes: int, dtype: str = "float32") -> Call:
    row = dtype_of(dtype)
    count = nbytes // row.itemsize
    return Call("all_reduce", 0, None, None, count, row, op_of("sum"), nbytes=nbytes)


def chosen(nbytes: int, dtype: str = "float32", **limits: Any) -> Choice:
    return choose(call(nbytes, dtype), MACHINE, Limits(**limits), FITS)


def kind(found: Choice) -> tuple[str, str, int]:
    return found.algorithm, found.launch.protocol, found.launch.slices


def test_the_table_decides_by_size_and_memory():
    assert kind(chosen(SMALL)) == ("all_pairs", "LL128", 1)
    assert kind(chosen(SMALL, mapped=ALL_MAPPED)) == ("one_shot_push", "LL", 1)
    assert kind(chosen(MIDDLE)) == ("ring", "Simple", 2)
    found = chosen(MIDDLE, mapped=ALL_MAPPED)
    assert kind(found) == ("two_shot", "Simple", 1) and found.grid.blocks == 24
    assert found.why[0].startswith("measured here on 2026-01-02, A CPU, 4 MiB")
    assert found.why[1].startswith("  two_shot by Simple, S = 1, at most 24 blocks: measured")


@pytest.mark.parametrize(
    "options",
    [
        {"algorithm": "two_shot"},
        {"protocol": "Simple"},
        {"engine": "sm"},
        {"blocks": 9},
        {"slices": 3},
    ],
    ids=str,
)
def test_options_come_before_the_table(options):
    limits = Limits(**options)
    assert kind(choose(call(MIDDLE), MACHINE, limits, FITS)) == kind(
        choose(call(MIDDLE), BARE, limits, FITS)
    )


def test_of_a_call_whose_hellos_decide_each_program_has_its_entry():
    found = chosen(MIDDLE, hellos_decide=True)
    assert found.direct is not None
    assert (kind(found), kind(found.direct)) == (("ring", "Simple", 2), ("two_shot", "Simple", 1))


def test_what_the_table_names_and_a_type_cannot_is_chosen_without():
    assert chosen(SMALL, "complex128").launch.protocol == "LL"  # LL128 carries 8 bytes at most


def test_calls_by_copy_engines_begin_when_all_ranks_have_scratch():
    assert large_engine(call(LARGE), MACHINE, Limits()) == "copy"
    assert large_engine(call(MIDDLE), MACHINE, Limits()) is None
    assert large_engine(call(LARGE), BARE, Limits()) != "copy"
    before = chosen(LARGE, mapped=ALL_MAPPED)
    assert before.engine == "sm" and before.algorithm == "one_shot"
    plain = chosen(LARGE)
    assert plain.engine == "sm" and plain.why[:1] != before.why[:1]
    fits = KernelFits(Workspace(2), LARGE_SCRATCH_BYTES)
    for mapped in (frozenset[Any](), ALL_MAPPED):
        limits = Limits(large_scratch="copy", mapped=mapped)
        found = choose(call(LARGE), MACHINE, limits, fits)
        assert (found.engine, found.algorithm, found.launch.slices) == ("copy", "all_pairs_pull", 4)


def test_kernels_with_scratch_of_large_calls_have_the_entries_of_their_memory():
    fits = KernelFits(Workspace(2), LARGE_SCRATCH_BYTES)
    found = choose(call(LARGE), MACHINE, Limits(large_scratch="sm", mapped=ALL_MAPPED), fits)
    assert (found.engine, found.algorithm) == ("sm", "one_shot")


def by_copies(nranks: int, collective: str, nbytes: int, op: Any = "sum", at: int = LARGE) -> bool:
    copied = entry(at, on_gpu("all_pairs_pull", engine="copy"), collective=collective)
    table = parse(json.dumps(content(ranks=nranks, entries=[copied])))
    bare = gpu_ranks(Workspace(nranks), 132, nvlink=True)
    machine = replace(bare, table=table, large_scratch=True)
    found = replace(call(nbytes), collective=collective, op=op and op_of(op))
    large = large_engine(found, machine, Limits())
    fits = KernelFits(Workspace(nranks), LARGE_SCRATCH_BYTES if large else 0)
    return choose(found, machine, Limits(large_scratch=large), fits).engine == "copy"


def test_calls_that_copy_engines_cannot_run_are_left_to_kernels():
    assert by_copies(2, "all_reduce", LARGE)
    assert not by_copies(2, "all_reduce", LARGE, premul_sum(2.0))
    assert not by_copies(2, "all_reduce", 1 << 20, at=64 << 20)


@pytest.mark.parametrize(("seconds", "copies"), [(1.1e-4, True), (0.9e-4, False)])
def test_copies_are_not_chosen_where_kernels_on_mapped_memory_are_faster(seconds, copies):
    direct = {**on_gpu("one_shot"), "seconds": seconds}
    plain = entry(LARGE, on_gpu("all_pairs_pull", engine="copy"))
    table = parse(json.dumps(content(entries=[plain, entry(LARGE, direct, mapped=True)])))
    machine = replace(BARE, table=table)
    for mapped in (frozenset[Any](), ALL_MAPPED):
        assert (large_engine(call(LARGE), machine, Limits(mapped=mapped)) == "copy") == copies


def test_copies_that_begin_at_some_call_change_no_order_of_sums():
    assert not by_copies(4, "all_reduce", LARGE)
    assert by_copies(4, "all_gather", LARGE, None)


def test_copies_run_the_tables_algorithm_also_where_hellos_decide():
    fits = KernelFits(Workspace(2), LARGE_SCRATCH_BYTES)
    found = choose(call(LARGE), MACHINE, Limits(large_scratch="copy", hellos_decide=True), fits)
    assert (found.engine, found.algorithm, found.launch.slices) == ("copy", "all_pairs_pull", 4)


def test_a_table_of_mapped_memory_alone_is_not_the_same_for_other_counts():
    table = parse(
        json.dumps(content(entries=[entry(4 * MIDDLE, on_gpu("two_shot", blocks=24), mapped=True)]))
    )
    machine, limits = replace(BARE, table=table), Limits(hellos_decide=True)
    found = choose(call(4 * MIDDLE), machine, limits, FITS)
    assert found.direct is not None and found.direct.grid.blocks == 24
    assert calls_alike(found, call(4 * MIDDLE), machine, limits, FITS).longest == range(0)


def test_a_call_by_the_table_is_not_the_same_for_other_counts():
    found = chosen(MIDDLE)
    assert calls_alike(found, call(MIDDLE), MACHINE, Limits(), FITS).longest == range(0)
    bare = choose(call(MIDDLE), BARE, Limits(), FITS)
    assert len(calls_alike(bare, call(MIDDLE), BARE, Limits(), FITS).longest) > 1


class State:
    """Stands for a rank's state: what calls run, as the tuner says."""

    on_gpu = True

    def __init__(self, *, scratch: bool) -> None:
        from types import SimpleNamespace

        from ringcoll.config import DEFAULTS

        self.config, self.fabric = DEFAULTS, SimpleNamespace(rank=0, nranks=2)
        held = object() if scratch else None
        self.cuda = SimpleNamespace(machine=BARE, large_scratch=held)

    def choice(self, call: Call, config: Any, mapped: Any) -> Choice:
        from ringcoll.tuner.choice import limits_of

        limits = replace(limits_of(call, config, self.config), mapped=mapped)
        large = "copy" if limits.engine == "copy" else None
        fits = KernelFits(Workspace(2), LARGE_SCRATCH_BYTES) if large else FITS
        return choose(call, BARE, replace(limits, large_scratch=large), fits)


@pytest.mark.parametrize("name", ["all_reduce", "broadcast", "all_to_all"])
@pytest.mark.parametrize("mapped", [False, True])
def test_candidates_of_every_protocol_and_engine(name, mapped):
    op = "sum" if name == "all_reduce" else None
    section = Section(name, 2, dtype_of("float32"), op, 0 if name == "broadcast" else -1)

    def ways(nbytes: int, **how: Any) -> set[tuple[str, str]]:
        found = Candidates(State(scratch=True), section.case(nbytes), mapped=mapped).first()
        assert len({each.key for each in found}) == len(found)
        assert all(each.choice.algorithm in ALGORITHMS[name] for each in found)
        return {(each.choice.engine, each.choice.launch.protocol) for each in found}

    lines = {("sm", protocol) for protocol in IN_BAND}
    assert ways(1 << 12) == lines
    assert ways(1 << 20) == lines | {("sm", "Simple")}
    copies = set() if mapped else {("copy", "Simple")}
    assert ways(64 << 20) == {("sm", "Simple")} | copies


def test_candidates_near_another_have_other_slices_and_blocks():
    section = Section("broadcast", 2, dtype_of("float32"), None, 0)
    found = Candidates(State(scratch=False), section.case(16 << 20), mapped=True)
    first = found.first()
    near = found.near(first[0])
    before = first[0].choice
    assert {each.choice.launch.slices for each in near} > {2 * before.launch.slices}
    assert any(each.choice.grid.blocks < before.grid.blocks for each in near)
    assert all(each.choice.algorithm == before.algorithm for each in near)


def test_a_candidate_is_what_runs_where_the_root_is_mapped_too():
    section = Section("broadcast", 2, dtype_of("float32"), None, 0)
    found = Candidates(State(scratch=False), section.case(64 << 20), mapped=True)
    usual, *others = found.first()
    assert usual.usual and usual.options.items() >= {"algorithm": "one_shot", "slices": 1}.items()
    assert usual.choice.algorithm == "one_shot" and usual.choice.launch.slices == 1
    assert usual.choice.algorithm not in {each.choice.algorithm for each in others}
    assert {each.choice.launch.slices for each in found.near(usual)} == {1, 2}
