"""``ringcoll tune``: what is measured, what is refused, and the table that comes of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

import ringcoll
from ringcoll.bench import candidates as listed
from ringcoll.bench.candidates import Candidate, Candidates
from ringcoll.bench.cases import Section
from ringcoll.bench.compared import Checked, checked_of, ranked_of, seconds_of_blocks, summary
from ringcoll.bench.tune import COLLECTIVES, Sweep, about, tune
from ringcoll.bench.worlds import World
from ringcoll.cli import main
from ringcoll.dtypes import dtype_of
from ringcoll.tuner.table import as_json, parse

RANKS = 2
WORLD = World(RANKS, "cpu")


def tuned(sweep: Sweep) -> tuple[Any, list[str]]:
    """What rank 0 found, and the cases that it named."""
    named: list[str] = []

    @contextmanager
    def shown(total: int) -> Iterator[Any]:
        yield named.append
        assert len(named) <= total

    return tune(WORLD, sweep, shown), named


def test_every_case_is_measured_and_becomes_an_entry(monkeypatch):
    monkeypatch.setattr("ringcoll.bench.tune._ROUNDS", 1)
    found, named = tuned(Sweep(COLLECTIVES, (1 << 12, 1 << 17), 500.0))
    assert found.wrong == 0 and not found.checked and not found.left
    assert len(named) == len(found.entries) == len(COLLECTIVES) * 3  # the large size twice
    assert "all_reduce, 131072 bytes, mapped" in named
    machine = found.machine
    assert (machine.kind, machine.ranks, machine.ranks_are) == ("cpu", RANKS, "threads")
    table = parse(as_json(machine, about("a command"), found.entries))
    for name in COLLECTIVES:
        assert [entry.nbytes for entry in table.entries[name, False]] == [1 << 12, 1 << 17]
        assert [entry.nbytes for entry in table.entries[name, True]] == [1 << 17]
        for entry in table.entries[name, False]:
            assert all(timed.engine == "host" and timed.seconds > 0 for timed in entry.timed)
            assert all(timed.predicted for timed in entry.timed)


def test_a_wrong_result_is_counted_and_never_chosen(monkeypatch):
    """The element is wrong in what the algorithm gives that would have been fastest."""
    compare = listed.Candidates.first

    def first(self: Candidates) -> list[Candidate]:
        found = compare(self)
        return [each for each in found if each.choice.algorithm in ("ring", "tree")]

    def check(self: Any, _case: Any, entrants: Any) -> list[int]:
        return [3 * (each.library.options["algorithm"] == "ring") for each in entrants]

    monkeypatch.setattr(listed.Candidates, "first", first)
    monkeypatch.setattr("ringcoll.bench.tune.Session._check", check)
    found, _ = tuned(Sweep(("all_reduce",), (1 << 12,), 0.2))
    assert found.wrong == 3
    assert {timed.algorithm for timed in found.entries[0].timed} == {"tree"}


def test_a_table_is_compared_with_what_it_has_not_seen(tmp_path, monkeypatch):
    monkeypatch.setattr("ringcoll.bench.tune._ROUNDS", 2)
    first, _ = tuned(Sweep(("all_reduce",), (1 << 16,), 500.0))
    path = tmp_path / "t.json"
    path.write_text(as_json(first.machine, about("c"), first.entries))
    path.chmod(0o600)
    found, _ = tuned(Sweep(("all_reduce",), (3 << 14,), 500.0, str(path)))
    best = {entry.mapped: str(entry.timed[0]).partition(":")[0] for entry in first.entries}
    assert {row.mapped: row.runs for row in found.checked} == best
    for row in found.checked:
        assert min(row.least, row.ratio, row.noise) > 0
    assert not found.entries


def test_a_machine_that_is_too_slow_gets_every_other_size_first():
    found, named = tuned(Sweep(("broadcast", "reduce"), (1 << 10, 1 << 11, 1 << 12), 1e-9))
    assert named == [] and found.left == {"broadcast": 3, "reduce": 3}
    found, named = tuned(Sweep(("broadcast",), (1 << 10, 1 << 11, 1 << 12), 0.3))
    assert named[:1] == ["broadcast, 1024 bytes, plain"]
    assert [entry.nbytes for entry in found.entries] == [1 << 10, 1 << 12, 1 << 11][: len(named)]


def test_candidates_are_different_and_named_by_options_that_make_them():
    [comm, other] = ringcoll.init_all(RANKS, device="cpu")
    section = Section("all_reduce", RANKS, dtype_of("float32"), "sum")
    for nbytes, mapped in ((1 << 10, False), (1 << 20, False), (1 << 20, True)):
        both = [
            Candidates(each._state, section.case(nbytes), mapped=mapped) for each in (comm, other)
        ]
        first, same = (each.first() for each in both)
        assert [each.options for each in first] == [each.options for each in same]
        assert [each.usual for each in first] == [True] + [False] * (len(first) - 1)
        assert len({each.key for each in first}) == len(first) > 3
        near = both[0].near(first[0])
        assert bool(near) == (nbytes > 1 << 10)
        for each in [*first, *near]:
            again = Candidates(comm._state, section.case(nbytes), mapped=mapped)
            (found,) = again._found([each.options])
            assert found.key == each.key
    comm.close()
    other.close()


def blocks(*seconds: float, usual: bool = False, key: str = "") -> Any:
    timed = lambda seconds, predicted: f"{key}: {seconds}"  # noqa: E731
    return SimpleNamespace(blocks=[*seconds], usual=usual, key=key, timed=timed)


def test_the_time_of_a_candidate_is_that_of_its_lowest_quarter():
    assert seconds_of_blocks(blocks(1.0, 9.0, 3.0, 50.0, 60.0)) == 2.0
    assert seconds_of_blocks(blocks(5.0)) == 5.0


def test_a_ratio_has_a_lower_bound():
    case = Section("all_reduce", RANKS, dtype_of("float32"), "sum").case(1 << 10)
    usual = blocks(*(2.0 + 0.01 * n for n in range(40)), usual=True, key="a")
    twin = blocks(*(2.0 + 0.01 * n for n in range(40)), key="a")
    slow, fast = blocks(*[4.0] * 40, key="b"), blocks(*[1.0] * 40, key="c")
    row = checked_of(case, False, [usual, twin, slow, fast])
    assert (row.runs, row.best, row.noise) == ("a", "c", 1.0)
    assert 2.0 < row.least <= row.ratio < 2.2
    alone = checked_of(case, False, [usual, twin])
    assert (alone.best, alone.ratio) == ("a", 1.0)


def test_what_calls_run_is_replaced_only_by_what_is_faster_for_sure():
    def ranked(*seconds: float) -> list[object]:
        usual = blocks(*(2.0 + 0.1 * n for n in range(20)), usual=True, key="usual")
        return [each.key for each in ranked_of([blocks(*seconds, key="other"), usual])]

    assert ranked(*[1.0] * 20) == ["other", "usual"]
    assert ranked(*(1.99 + 0.1 * n for n in range(20))) == ["usual", "other"]
    assert ranked(*[9.0] * 20) == ["usual", "other"]


def test_the_summary_counts_what_is_slower_for_sure():
    def row(ratio: float, least: float) -> Checked:
        return Checked("all_reduce", 1, False, "a", 1.0, "b", 1.0, ratio, least, 0.98)

    found = summary([row(1.0, 0.9), row(1.2, 1.01), row(1.3, 1.1)])
    assert found["points"] == 3
    assert found["ratio at most 1.05"] == 1
    assert found["ratio above 1.05 beyond noise"] == 1
    assert found["median noise"] == 0.02


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--collectives", "barrier"], "--collectives barrier: one of all_reduce"),
        (["--collectives", "reduce,allreduce"], "all_to_all; did you mean all_reduce?"),
        (["--ranks", "1"], "--ranks 1: at least 2"),
        (["--factor", "1"], "--factor 1: at least 1 and 2"),
        (["--out", "/nowhere/t.json"], "--out /nowhere/t.json: No such file"),
        (["--out", "."], "--out .: Is a directory"),
        (["--min", "1M", "--max", "1K"], "--min 1048576: more than --max 1024"),
    ],
)
def test_words_that_make_no_sense_are_refused(words, message, capsys, monkeypatch):
    monkeypatch.setenv("RINGCOLL_DEVICE", "cpu")
    given = words if "--ranks" in words else [*words, "--member", "2"]
    assert main(["tune", *given]) == 2
    assert message in capsys.readouterr().err


def test_the_table_is_there_although_nobody_reads_the_rows(tmp_path):
    read, write = os.pipe()
    os.close(read)
    words = "tune --ranks 2 --device cpu --collectives all_reduce --max 4K --factor 4 --seconds 0.1"
    path = tmp_path / "table.json"
    command = [sys.executable, "-m", "ringcoll", *words.split(), "--out", str(path)]
    at_once = {**os.environ, "PYTHONUNBUFFERED": "1"}  # the first row already is in vain
    subprocess.run(command, stdout=write, stderr=subprocess.DEVNULL, env=at_once, check=False)
    os.close(write)
    assert json.loads(path.read_text())["entries"]


def test_the_command_writes_a_table_that_the_next_init_takes(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("RINGCOLL_CACHE_DIR", str(tmp_path))
    words = "tune --ranks 2 --device cpu --collectives all_reduce --max 4K --factor 4 --seconds 0.1"
    assert main(words.split()) == 0
    (path,) = (tmp_path / "tuning").iterdir()
    shown = capfd.readouterr()
    assert f"wrote {path}" in shown.err
    assert 2 <= len(shown.out.splitlines()) <= 3  # the second size only where there is time
    text = path.read_text()
    assert json.loads(text)["command"] == f"ringcoll {words}"
    assert path.stat().st_mode & 0o777 == 0o600
    parse(text)
    assert path.name.endswith("-2-processes.json")
    more = "tune --ranks 2 --device cpu --collectives broadcast --max 1K --seconds 0.1"
    assert main(more.split()) == 0
    assert "entries of earlier runs stay in it" in capfd.readouterr().err
    earlier = json.loads(text)["entries"]
    found = json.loads(path.read_text())["entries"]
    assert [each for each in found if each["collective"] == "all_reduce"] == earlier
    assert [each["nbytes"] for each in found if each["collective"] == "broadcast"] == [1 << 10]
    path.write_text(text)
    other = tmp_path / "t.json"
    other.write_text("{}")
    assert main([*more.split(), "--out", str(other)]) == 0
    assert f"no entries of {other} stay: no table of this version" in capfd.readouterr().err
    words = (
        f"tune --ranks 2 --device cpu --collectives all_reduce --max 4K --factor 4 --check {path}"
    )
    assert main([*words.split(), "--seconds", "0.1", "--json", str(tmp_path / "c.json")]) == 0
    found = json.loads((tmp_path / "c.json").read_text())
    assert [row["nbytes"] for row in found["rows"]] == [1536]
    assert found["table"] == json.loads(text) and found["summary"]["points"] == 1


def test_the_command_says_what_the_time_was_too_short_for(tmp_path, capfd):
    words = "tune --ranks 2 --device cpu --collectives all_reduce,reduce --seconds 0.05 --out"
    assert main([*words.split(), str(tmp_path / "t.json")]) == 0
    last = capfd.readouterr().err.splitlines()[-1]
    assert last.startswith("ringcoll: 0.05 s were too short for ") and "cases of reduce" in last


@pytest.mark.parametrize(("name", "value"), [("MAX_SMS", "4"), ("PACE", "1e9"), ("SLICES", "2")])
def test_options_of_the_environment_that_leave_out_tables_are_refused(
    monkeypatch, capsys, name, value
):
    monkeypatch.setenv(f"RINGCOLL_{name}", value)
    assert main(["tune", "--ranks", "2", "--device", "cpu"]) != 0
    assert f"RINGCOLL_{name} is set, but calls with it take no table" in capsys.readouterr().err


def test_a_misspelt_collective_is_refused_before_ranks_start(monkeypatch, capsys):
    monkeypatch.setattr("ringcoll.cli.tune.supervise", lambda *_, **__: pytest.fail("they start"))
    assert main(["tune", "--ranks", "2", "--device", "cpu", "--collectives", "allreduce"]) == 2
    assert "--collectives allreduce: one of all_reduce" in capsys.readouterr().err


def test_a_collective_named_twice_is_measured_once(monkeypatch):
    swept: list[Sweep] = []

    def measured(_world: World, sweep: Sweep, _shown: Any) -> Any:
        swept.append(sweep)
        raise ringcoll.ArgumentError("enough")

    monkeypatch.setattr("ringcoll.bench.tune.tune", measured)
    words = "tune --device cpu --member 2 --collectives reduce,reduce"
    assert main(words.split()) == 2
    assert [each.collectives for each in swept] == [("reduce",)]
