"""What goes wrong reaches every rank as the right error, and leaves nothing behind.

The ranks are processes that meet over sockets; the programs are in ``programs/faults.py``.
"""

import re

import pytest

from tests.processes.conftest import once

pytestmark = pytest.mark.slow

SIZES = (10, 200_000)

HEALTHY = (
    "unlike_options",  # before any init, which takes the launcher's words away
    "never_comes",
    "never_comes_to_empty",
    "disagree",
    "control_against_data",
    "bytes_of_another",
    "disagree_late",
    "pairs_disagree",
    "aborts",
    "closes",
    "between_enter_and_finish",
)
"""Scenarios after which the ranks are still healthy: one start runs them all."""


@pytest.fixture
def healthy(request, ranks):
    """What the ranks saw of a scenario, by its name."""
    return once(request, HEALTHY, lambda: ranks("faults", 3, ",".join(HEALTHY))).of


def test_a_rank_that_never_comes_is_named(healthy):
    outcome = healthy("never_comes")
    assert outcome.statuses == [0, 0, 0]
    absent, waiting = outcome.verdicts[1], [outcome.verdicts[0], outcome.verdicts[2]]
    for name in ("all_reduce", "all_reduce large", "broadcast", "reduce_scatter", "barrier"):
        call = name.split()[0]
        for verdict in (*waiting, absent):
            assert verdict[name].startswith("DeadlineError: ")
            pattern = rf"{call} \(call 1\) on rank [02]: waited 0.3 s for rank 1, which made no "
            assert re.search(pattern, verdict[name])
        assert re.match("DeadlineError: reported by rank [02]: ", absent[name])
    for name, call in (("recv", "recv from"), ("send large", "send to")):
        for verdict in (*waiting, absent):
            pattern = rf"{call} rank 1 on rank [02] \(call 1 of this pair, count=\d+ dtype=float32"
            assert verdict[name].startswith("DeadlineError: ")
            assert re.search(pattern, verdict[name])


def test_a_rank_that_never_comes_to_empty_is_named(healthy):
    for verdict in healthy("never_comes_to_empty").verdicts.values():
        assert re.match(
            r"DeadlineError: (reported by rank \d: )?empty: rank \d waited 2(\.\d+)? s for rank 1",
            verdict["error"],
        )
        assert verdict["after"].startswith("ClosedError: ")
        assert "broken by an earlier error, DeadlineError" in verdict["after"]


def test_deaths_are_noticed_wherever_ranks_wait_and_survivors_go_on(ranks):
    outcome = ranks("faults", 7, "killed")
    assert outcome.statuses == [0, 0, 137, 137, 137, 137, 137]
    for verdict in (outcome.verdicts[0], outcome.verdicts[1]):
        for dead, name in zip(
            (6, 5, 4, 3, 2), ("all_reduce", "broadcast", "recv", "empty", "barrier"), strict=True
        ):
            error, took, refused, works = verdict[name]
            assert re.match(rf"RankLostError: (reported by rank \d: )?rank {dead} died: its", error)
            assert took < 10  # 0.02 s on an idle machine
            assert refused.startswith("ClosedError: ")
            assert f"rank {dead} died" in refused
            assert works


def test_ranks_that_disagree_all_see_all_sides(healthy):
    outcome = healthy("disagree")
    assert outcome.statuses == [0, 0, 0]
    sides = {
        "small and large": ("count=10 ", "count=200000 "),
        "barrier": ("barrier", "all_reduce"),
    }
    for size in SIZES:
        sides |= {
            f"collective {size}": (f"all_reduce count={size}", f"broadcast count={size}"),
            f"count {size}": (f"count={size} ", f"count={size + 1} "),
            f"dtype {size}": ("dtype=float32", "dtype=float64"),
            f"op {size}": ("op=sum", "op=max"),
            f"root {size}": ("root=0", "root=2"),
            f"algorithm {size}": ("algorithm=ring", "algorithm=tree"),
            f"counts {size}": (f"counts={size},{size},{size} ", f"counts=1,{size},0 "),
        }
    for verdict in outcome.verdicts.values():
        for name, (others, first) in sides.items():
            error = verdict[name]
            assert re.match(r"MismatchError: (reported by rank \d: )?call 1 on rank \d: ", error)
            assert re.search(f"rank 1: .*{first}", error)
            assert re.search(f"rank [02]: .*{others}", error)
        assert verdict["empty"].startswith("MismatchError: empty: rank 0 asks for (10,) float32")
        assert "rank 1 for (20,) float32 (80 bytes)" in verdict["empty"]
        assert set(verdict) == {*sides, "empty", "rank"}


def test_a_control_call_against_a_data_call_is_told_at_once(healthy):
    verdicts = healthy("control_against_data").verdicts
    assert len(verdicts) == 3
    for verdict in verdicts.values():
        for case in set(verdict) - {"rank"}:
            control, data, *_ = case.split()
            error, took = verdict[case]
            assert re.match(r"MismatchError: (reported by rank \d: )?call 2 on rank \d: ", error)
            assert f"rank 1: {control}" in error
            assert re.search(rf"rank [02]: {data} count=", error)
            assert took < 10  # where the deadline is 20


def test_no_rank_returns_with_bytes_of_another_call(healthy):
    verdicts = healthy("bytes_of_another").verdicts
    for case, rank in (
        ("reduce op", 2),
        ("gather dtype", 2),
        ("broadcast dtype", 1),
        ("scatter dtype", 1),
    ):
        assert verdicts[rank][case].startswith("MismatchError: "), case


def test_a_disagreement_that_shows_late_is_raised_at_the_end(healthy):
    outcome = healthy("disagree_late")
    assert outcome.statuses == [0, 0, 0]
    for verdict in outcome.verdicts.values():
        for end in ("check", "synchronize", "close", "block"):
            assert verdict[end].startswith("MismatchError: ")
            assert "broadcast count=10 dtype=float32 root=0" in verdict[end]
            assert "broadcast count=11 dtype=float32 root=0" in verdict[end]


def test_ranks_that_begin_with_different_options_show_them(healthy):
    outcome = healthy("unlike_options")
    assert outcome.statuses == [0, 0, 0]
    for verdict in outcome.verdicts.values():
        assert verdict["error"].startswith("MismatchError: init: rank 0 was given {")
        assert '"slices": 1' in verdict["error"]
        assert re.search(r'and rank 1 \{.*"slices": 2', verdict["error"])
        assert verdict["sum"] == 3


def test_pairs_that_disagree_show_both_sides_to_all(healthy):
    outcome = healthy("pairs_disagree")
    assert outcome.statuses == [0, 0, 0]
    for verdict in outcome.verdicts.values():
        for size in SIZES:
            sent = f"count={size} dtype=float32"
            for name, taken in (
                (f"count {size}", f"count={size + 1} dtype=float32"),
                (f"dtype {size}", f"count={size} dtype=int32"),
            ):
                assert verdict[name].startswith("MismatchError: ")
                assert re.search(rf"send on rank 0\b.*: {sent}", verdict[name])
                assert re.search(rf"recv on rank 1\b.*: {taken}", verdict[name])


def test_a_rank_that_raises_is_named_with_its_reason(ranks):
    outcome = ranks("faults", 2, "raises", plain=True)
    assert outcome.statuses == [0, 1]
    assert outcome.word("error") == {0: "AbortedError: rank 1 aborted: ValueError: no such file"}
    assert "ValueError: no such file" in outcome.errors


def test_abort_reaches_all_and_is_no_error_for_who_called_it(healthy):
    verdicts = healthy("aborts").verdicts
    for case in range(3):
        assert verdicts[0][f"end {case}"] == "silent"
        assert f"rank 0 aborted: case {case}" in verdicts[0][f"call {case}"]
        for rank in (1, 2):
            assert verdicts[rank][f"call {case}"] == f"AbortedError: rank 0 aborted: case {case}"
            assert verdicts[rank][f"end {case}"] == "AbortedError"


def test_who_waits_for_a_rank_that_has_closed_is_told(healthy):
    outcome = healthy("closes")
    assert outcome.statuses == [0, 0, 0]
    for name in ("all_reduce", "large", "recv", "empty", "split", "group"):
        for rank in (0, 1):
            assert re.match(
                r"RankLostError: (reported by rank \d: )?rank 2 closed its communicator",
                outcome.verdicts[rank][name],
            )
        assert outcome.verdicts[2][name].startswith("ClosedError: rank 2: the communicator is clo")


def test_an_interrupted_rank_and_its_peers_go_on_after_shrink(ranks):
    outcome = ranks("faults", 3, "interrupted")
    assert outcome.statuses == [0, 0, 0]
    verdict = outcome.verdicts[1]
    assert verdict["error"] == "KeyboardInterrupt"
    for word in ("after", "checked"):
        assert "broken by an earlier error, KeyboardInterrupt;" in verdict[word]
    for rank in (0, 2):
        assert outcome.verdicts[rank]["error"] == "AbortedError: rank 1 aborted: KeyboardInterrupt"


def test_an_interrupt_that_nobody_catches_ends_the_rank_and_is_told(ranks):
    outcome = ranks("faults", 2, "uncaught_interrupt", plain=True)
    assert outcome.statuses == [0, 130]
    assert outcome.word("error") == {0: "AbortedError: rank 1 aborted: KeyboardInterrupt"}


def test_an_unforeseen_error_inside_a_call_is_told(healthy):
    outcome = healthy("between_enter_and_finish")
    assert outcome.statuses == [0, 0, 0]
    for rank, verdict in outcome.verdicts.items():
        for size in SIZES:
            aborted = "" if rank == 1 else "AbortedError: rank 1 aborted: "
            ended = (
                "rank 1: an allocation failed inside the call: no room for the rows; free memory"
            )
            assert verdict[f"call {size}"] == f"{aborted}OutOfMemory: {ended}"
            assert verdict[f"after {size}"].startswith("ClosedError: ")
            assert "no room for the rows" in verdict[f"after {size}"]
