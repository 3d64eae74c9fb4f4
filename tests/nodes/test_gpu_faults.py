"""What goes wrong among fake GPUs on several nodes, under the interpreter's mpiexec."""

import re

import pytest

from tests.kernels.stand_in import folder, needs_compiler
from tests.processes.conftest import Outcome, once

pytest.importorskip("cupy")
pytestmark = [pytest.mark.mpi, pytest.mark.slow, needs_compiler]


@pytest.fixture(autouse=True)
def built_once():
    """Ranks find what others have built."""
    folder()


HEALTHY = {
    "a,b,a": ("never_comes", "disagree", "late", "aborted", "captured"),
    "a,a,b,b": ("layers", "short", "elsewhere"),
}
"""Scenarios after which the ranks are still healthy: one start runs all of a placement."""


@pytest.fixture
def healthy(request, nodes):
    """What the ranks saw of a scenario, by its name."""

    def seen(scenario: str) -> Outcome:
        names = next(names for names, those in HEALTHY.items() if scenario in those)
        words = ",".join(HEALTHY[names])
        outcome = once(request, names, lambda: nodes("gpu_faults", names, words)).of(scenario)
        assert outcome.statuses == [0], outcome.errors
        assert not outcome.errors, outcome.errors
        assert len(outcome.verdicts) == len(names.split(","))
        return outcome

    return seen


def test_a_rank_that_never_comes_is_named(healthy):
    outcome = healthy("never_comes")
    for name in ("all_reduce", "all_reduce large", "broadcast", "barrier"):
        call = name.split()[0]
        pattern = rf"DeadlineError: .*{call} \(call 1\) on rank [02]: waited 0.5 s for rank 1, "
        for verdict in outcome.verdicts.values():
            assert re.match(pattern, verdict[name])
    for verdict in outcome.verdicts.values():
        pattern = r"DeadlineError: .*recv from rank 1 on rank [02] \(call 1 of this pair, count=10 "
        assert re.match(pattern, verdict["recv"])


def test_ranks_that_disagree_see_both_sides(healthy):
    outcome = healthy("disagree")
    sides = {
        "count": ("count=100001 ", "count=100000 "),
        "op": ("op=max", "op=sum"),
        "collective": ("barrier", "all_reduce"),
        "root": ("root=2", "root=0"),
    }
    for verdict in outcome.verdicts.values():
        for name, (one, others) in sides.items():
            # The broadcast may have failed for another rank before the barrier that follows it.
            before = "(ClosedError: .* broken by an earlier error, )?" if name == "root" else ""
            assert re.match(f"{before}MismatchError: ", verdict[name])
            assert re.search(f"rank 1: .*{one}", verdict[name])
            assert re.search(f"rank [02]: .*{others}", verdict[name])
        assert verdict["empty"].startswith("MismatchError: empty: ")
        assert "rank 1: 80" in verdict["empty"]
    for rank in (0, 1):
        pair = outcome.verdicts[rank]["pair"]
        assert pair.startswith("MismatchError: ")
        assert "count=100000 dtype=float32" in pair
        assert "count=100001 dtype=float32" in pair


def test_what_goes_wrong_in_two_layers(healthy):
    outcome = healthy("layers")
    sides = {
        "differs": ("all_reduce count=100000 .*deterministic=True", "all_reduce .* in two layers"),
        "other buffers": ("reduce_scatter count=25000 ", "all_reduce count=100000 "),
        "other segments": ("all_to_all count=25001 ", "all_to_all count=25000 "),
        "other place": ("all_to_all .* in_place=False", "all_to_all .* in_place=True"),
        "other root": ("reduce count=100000 .* root=1 ", "reduce count=100000 .* root=2 "),
    }
    for verdict in outcome.verdicts.values():
        for name, (one, others) in sides.items():
            # Whoever finds it first may have told the others before they compare.
            assert re.match("(AbortedError: .*)?MismatchError: ", verdict[name])
            assert re.search(f"rank 1: {one}", verdict[name])
            assert re.search(f"rank [023]: {others}", verdict[name])
        for name in ("never comes", "no segments"):
            assert re.match(r"DeadlineError: .* for ranks? [\d, ]*1, which", verdict[name])


def test_what_one_rank_lacks_is_told_to_all(healthy):
    outcome = healthy("short")
    for rank, verdict in outcome.verdicts.items():
        for name in ("slots", "slices", "pairs"):
            own = "OutOfMemory: no memory is left"
            wanted = own if rank == 1 else f"AbortedError: rank 1 aborted: {own}"
            assert verdict[name] == wanted
            assert verdict[f"{name}, seconds"] < 15
    assert outcome.verdicts[1]["half made"] == "OutOfMemory: no memory is left"
    assert outcome.verdicts[1]["left"] == 0


def test_a_disagreement_that_shows_late_is_raised_at_the_end(healthy):
    outcome = healthy("late")
    for verdict in outcome.verdicts.values():
        for end in ("check", "synchronize", "close"):
            assert verdict[end].startswith("MismatchError: ")
            assert "broadcast count=10 dtype=float32 root=0" in verdict[end]
            assert "broadcast count=11 dtype=float32 root=0" in verdict[end]
            assert verdict[f"{end}, then close"] == "no error"


def test_a_rank_that_gives_up_releases_all(healthy):
    outcome = healthy("aborted")
    for rank, verdict in outcome.verdicts.items():
        kind = "AbortedError" if rank else "ClosedError"
        for name in ("in the call", "before the stream comes"):
            assert verdict[name] == f"{kind}: rank 0 aborted: enough"


def test_a_capture_outlasts_a_close_that_comes_too_early(healthy):
    outcome = healthy("captured")
    for rank, verdict in outcome.verdicts.items():
        pattern = rf"LaunchRefused: rank {rank}: .*close cannot wait for a stream .* captured"
        assert re.match(pattern, verdict["before"])
        assert verdict["kept"]
        assert verdict["call"] == verdict["again"] == "no error"
        assert re.match(rf"LaunchRefused: rank {rank}: .* captured", verdict["meanwhile"])
        assert verdict["pinned"]
        assert verdict["the rest"]


def test_a_capture_of_a_stream_of_former_calls_is_no_matter(healthy):
    outcome = healthy("elsewhere")
    for rank, verdict in outcome.verdicts.items():
        said = {"large": "no error", "close": "no error", "inside": True}
        assert verdict == {"rank": rank, **said}


@pytest.mark.parametrize(
    ("names", "scenario", "deaths"),
    [
        ("a,b,a,b", "killed", {"all_reduce": 3, "recv": 2}),
        ("a,b,c,d", "cut_off", {"all_reduce": 3, "reduce": 2}),
    ],
)
def test_deaths_are_noticed_and_survivors_go_on(nodes, names, scenario, deaths):
    outcome = nodes("gpu_faults", names, scenario, deaths=True, plain=True)
    lost = len(deaths)
    codes = [128 - code if code < 0 else code for code in outcome.statuses]
    assert codes == [0] * (len(codes) - lost) + [137] * lost
    for rank in range(len(codes) - lost):
        for name, dead in deaths.items():
            error, took, refused, works = outcome.verdicts[rank][name]
            assert re.match(rf"RankLostError: (reported by rank \d: )?rank {dead} died: its", error)
            assert took < 10
            assert refused.startswith("ClosedError: ")
            assert works
