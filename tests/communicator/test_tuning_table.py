"""Tables of ``ringcoll tune``: validated, agreed by all ranks, and what calls then run."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ringcoll
from ringcoll.arguments.calls import prepare
from ringcoll.arguments.vector import prepare_all_gather_v
from ringcoll.communicator.explaining import call_of
from ringcoll.communicator.setup import tables as places
from ringcoll.communicator.setup import tuning
from ringcoll.communicator.setup.start import communicator_on
from ringcoll.communicator.vector import as_collective
from ringcoll.config import Config, Settings
from ringcoll.executors.cpu.binder import HostFits
from ringcoll.fabric import Fabric, each, thread_fabrics
from ringcoll.launch import ALL_MAPPED
from ringcoll.tuner import CpuRanks, Limits, choose, measured
from ringcoll.tuner import table as tables
from ringcoll.tuner.kept import KeptChoices
from ringcoll.tuner.simple import may_copy
from ringcoll.tuner.table import Table, parse

NBYTES = 1 << 20
GATHER = {"collective": "all_gather"}


def timed(algorithm: str, seconds: float, slices: int = 1, **more: Any) -> dict[str, Any]:
    made = {"algorithm": algorithm, "protocol": "Simple", "engine": "host", "slices": slices}
    return {**made, "blocks": None, "seconds": seconds, "predicted": 2e-4, **more}


def entry(nbytes: int, *found: dict[str, Any], mapped: bool = False, **more: Any) -> dict[str, Any]:
    made = {"collective": "all_reduce", "nbytes": nbytes, "mapped": mapped, "timed": [*found]}
    return {**made, "date": "2026-01-02T03:04:05", **more}


def content(ranks: int = 2, **more: Any) -> dict[str, Any]:
    machine = {"kind": "cpu", "device": "A CPU", "driver": None, "ranks": ranks}
    entries = [
        entry(NBYTES, timed("tree", 1e-4, 4), timed("ring", 3e-4)),
        entry(NBYTES, timed("recursive_doubling", 1e-4), mapped=True),
        entry(1 << 12, timed("recursive_doubling", 1e-5)),
    ]
    about: dict[str, Any] = {
        "date": "2026-01-02T03:04:05",
        "versions": {},
        "command": "c",
        "commit": None,
    }
    machine["ranks_are"] = "threads"
    return {"format": 2, "machine": machine, **about, "entries": entries, **more}


def written(path: Path, found: dict[str, Any]) -> str:
    path.write_text(json.dumps(found))
    path.chmod(0o600)
    return str(path)


@pytest.fixture
def given(tmp_path):
    """The path of a table."""
    return written(tmp_path / "t.json", content())


# -- a table ---------------------------------------------------------------------------------------


def changed(*path: Any, to: Any) -> dict[str, Any]:
    found: Any = copy.deepcopy(content())
    place = found
    for step in path[:-1]:
        place = place[step]
    if to is None:
        del place[path[-1]]
    else:
        place[path[-1]] = to
    return found


TIMED = "entries", 0, "timed", 0
WRONG = [
    (("format",), 1, "format is 1"),
    (("machine",), None, "the table is"),
    (("machine", "ranks"), True, "ranks is True"),
    (("machine", "kind"), "tpu", "kind is 'tpu'"),
    (("versions",), {"numpy": 2}, "versions is"),
    (("date",), "x" * 3000, "date is"),
    (("more",), 1, "the table is"),
    (("entries", 0, "collective"), "barrier", "collective is 'barrier'"),
    (("entries", 0, "nbytes"), 0, "nbytes is 0"),
    (("entries", 0, "nbytes"), 1 << 12, "two of all_reduce, 4096 bytes"),
    (("entries", 0, "date"), 7, "date is 7"),
    (("entries", 0, "mapped"), 1, "mapped is 1"),
    (("entries", 0, "timed"), [], "timed is 'no candidate'"),
    (("entries",), {}, "entries is dict"),
    ((*TIMED, "algorithm"), "__import__('os')", "algorithm is"),
    ((*TIMED, "algorithm"), "bruck", "algorithm is 'bruck'"),
    ((*TIMED, "algorithm"), ["ring"], "algorithm is"),
    ((*TIMED, "protocol"), "LL256", "protocol is"),
    ((*TIMED, "engine"), "dma", "engine is 'dma'"),
    ((*TIMED, "slices"), 5000, "slices is 5000"),
    ((*TIMED, "slices"), 1.0, "slices is 1.0"),
    ((*TIMED, "blocks"), 0, "blocks is 0"),
    ((*TIMED, "seconds"), -1, "seconds is -1"),
    ((*TIMED, "seconds"), 10**400, "seconds is 1000"),
    ((*TIMED, "protocol"), "LL", "protocol is {"),  # in 4 slices
    ((*TIMED, "predicted"), "fast", "predicted is 'fast'"),
]


@pytest.mark.parametrize(
    ("path", "to", "message"), WRONG, ids=[f"{n}: {w[2]}" for n, w in enumerate(WRONG)]
)
def test_a_field_that_is_wrong_is_named(path, to, message):
    with pytest.raises(ringcoll.ArgumentError) as error:
        parse(json.dumps(changed(*path, to=to)))
    assert message in str(error.value)


@pytest.mark.parametrize("text", ["", "[1", "[" * 100_000, '{"format": NaN}', "1", '"\udcff"'])
def test_text_that_is_no_table_is_refused(text):
    with pytest.raises(ringcoll.ArgumentError, match="a tuning table"):
        parse(text)


def test_what_is_written_is_read_again():
    first = parse(json.dumps(content()))
    entries = [each for found in first.entries.values() for each in found]
    again = parse(tables.as_json(first.machine, first.about, entries))
    assert again.entries == first.entries
    assert again.machine == first.machine and again.about == first.about
    assert again != first  # by its text


def test_entries_of_earlier_runs_stay_beside_what_is_measured():
    earlier = parse(json.dumps(content()))
    measured = [replace(earlier.entries["all_reduce", False][-1], date="2026-02-03")]
    kept = earlier.besides(earlier.machine, measured)
    assert sorted((each.nbytes, each.mapped) for each in kept) == [(1 << 12, False), (NBYTES, True)]
    machine = earlier.machine
    for other in (replace(machine, ranks=3), replace(machine, driver="580.1")):
        assert earlier.besides(other, measured) == []
    both = parse(tables.as_json(earlier.machine, earlier.about, [*kept, *measured]))
    for mapped, date in ((False, "2026-02-03"), (True, "2026-01-02")):
        found = both.entries["all_reduce", mapped][-1]
        assert found.nbytes == NBYTES
        assert f"on {date}," in both.reasons(found)[0]


@pytest.mark.parametrize(
    ("nbytes", "wanted"),
    [(1, 1 << 12), (1 << 12, 1 << 12), (1 << 15, 1 << 12), (1 << 17, NBYTES), (NBYTES + 1, NBYTES)],
)
def test_the_nearest_size_decides(nbytes, wanted):
    found = parse(json.dumps(content())).entry("all_reduce", nbytes, mapped=False)
    assert found is not None and found.nbytes == wanted


def test_far_beyond_the_largest_size_nothing_is_known():
    found = parse(json.dumps(content()))
    assert found.entry("all_reduce", 4 * NBYTES, mapped=False) is not None
    assert found.entry("all_reduce", 4 * NBYTES + 1, mapped=False) is None
    assert found.entry("broadcast", NBYTES, mapped=False) is None


def test_far_below_the_smallest_size_nothing_is_known_unless_it_is_small():
    found = parse(json.dumps(content()))
    assert found.entry("all_reduce", 1, mapped=False) is not None
    assert found.entry("all_reduce", NBYTES // 4, mapped=True) is not None
    assert found.entry("all_reduce", NBYTES // 8, mapped=True) is None


# -- what calls run --------------------------------------------------------------------------------


def chosen(comm: Any, nbytes: int = NBYTES, *, mapped: bool = False, **options: Any) -> Any:
    """The algorithm and slices of a call that is made, and whether its result is right."""
    count = nbytes // 4
    x = comm.empty(count, "float32") if mapped else np.empty(count, "float32")
    x[:] = comm.rank + 1
    comm._engine.forget()
    seen: list[Any] = []
    log = comm._state._host.prepare

    def prepare(*args: Any, **how: Any) -> Any:
        return log(*args, **{**how, "chosen": lambda _call, choice: seen.append(choice)})

    comm._state._host.prepare = prepare
    comm.all_reduce(x, **options)
    comm._state._host.prepare = log
    assert [*np.unique(x)] == [sum(range(1, comm.nranks + 1))]
    return seen[-1].algorithm, seen[-1].launch.slices


def test_calls_without_options_run_what_was_fastest(given):
    def work(comm):
        plain, mapped = chosen(comm), chosen(comm, mapped=True)
        return plain, mapped, chosen(comm, 1 << 12), chosen(comm, algorithm="ring")[0]

    found = ringcoll.spawn(work, 2, device="cpu", tuning=given)
    wanted = ("tree", 4), ("recursive_doubling", 1), ("recursive_doubling", 1), "ring"
    assert found == [wanted] * 2


def test_calls_of_many_counts_are_right(given):
    def work(comm):
        for count in (1, 1000, 200_000, 262_144, 300_000, 2_000_003, 262_144):
            x = np.full(count, comm.rank + 1.0, "float32")
            comm.all_reduce(x)
            comm.all_reduce(x, op="max")
            assert [*np.unique(x)] == [3.0]
        return True

    assert ringcoll.spawn(work, 2, device="cpu", tuning=given) == [True] * 2


def test_calls_of_other_sizes_have_slices_of_the_measured_size(given):
    def work(comm):
        return [chosen(comm, nbytes) for nbytes in (NBYTES // 2, 2 * NBYTES, 4 * NBYTES)]

    found = ringcoll.spawn(work, 2, device="cpu", tuning=given)
    assert found == [[("tree", 2), ("tree", 8), ("tree", 16)]] * 2


def test_deterministic_calls_and_collectives_without_an_entry_do_without(given):
    def work(comm):
        x = np.ones(1000)
        comm.broadcast(x)
        return chosen(comm, deterministic=True) == alone[comm.rank]

    alone = ringcoll.spawn(lambda comm: chosen(comm, deterministic=True), 2, device="cpu")
    assert ringcoll.spawn(work, 2, device="cpu", tuning=given) == [True] * 2


@pytest.mark.parametrize("first", [0, 1])
def test_a_table_decides_calls_of_one_count_alone(first):
    """A call with a count for each rank has the same collective, type and size, and no entry."""
    table = parse(json.dumps(content(entries=[entry(1 << 13, timed("bruck", 1e-5)) | GATHER])))
    machine, fits, limits = CpuRanks(2, table=table), HostFits(1 << 20), Limits()
    kept, sent, whole = KeptChoices(machine, fits), np.zeros(500), np.zeros(1000)
    even = prepare("all_gather", rank=0, nranks=2, sendbuf=sent, recvbuf=whole)
    counted = prepare_all_gather_v(sent[:400], whole, [400, 600], rank=0, nranks=2)
    calls = [even, as_collective(counted)]
    for call in (calls[first], calls[1 - first]):
        assert kept.choose(call, limits) == choose(call, machine, limits, fits)
    assert [kept.choose(call, limits).algorithm == "bruck" for call in calls] == [True, False]


def test_a_candidate_that_the_call_cannot_run_leaves_it_to_the_others(tmp_path):
    """A table may be of another release: chunks that fit no SCRATCH, more slices than elements."""
    found = changed("entries", 0, "timed", 0, to=timed("hierarchical", 1e-4, 64))
    path = written(tmp_path / "t.json", found)

    def work(comm):
        for count in (3, 1 << 16, NBYTES // 4):
            x = np.ones(count, "float32")
            comm.all_reduce(x)
            assert (x == 2).all()
        return True

    assert ringcoll.spawn(work, 2, device="cpu", tuning=path) == [True] * 2


def test_explain_shows_what_was_measured_beside_what_is_predicted(given):
    text = ringcoll.spawn(lambda c: c.explain("all_reduce", NBYTES), 2, device="cpu", tuning=given)
    lines = text[0].splitlines()
    assert lines[1] == "a tuning table decides; the timing model says:"
    at = next(n for n, line in enumerate(lines) if line.startswith("buffers of plain memory"))
    assert "tree, S = 4" in lines[at]
    assert lines[at + 1] == "  measured, t.json, on 2026-01-02, A CPU, 1 MiB:"
    assert lines[at + 2] == "    tree, S = 4: measured 100 us, predicted 200 us"
    assert lines[at + 3] == "    ring, S = 1: measured 300 us, predicted 200 us"
    other = ringcoll.spawn(lambda c: c.explain("broadcast", NBYTES), 2, device="cpu", tuning=given)
    assert "measured, t.json" not in other[0] and "tuning table" not in other[0]


def test_a_communicator_of_all_ranks_keeps_the_table(given):
    def work(comm):
        whole, part = comm.split(0), comm.split(comm.rank)
        return chosen(whole), part._state.table is None

    found = ringcoll.spawn(work, 2, device="cpu", tuning=given)
    assert found == [(("tree", 4), True)] * 2


# -- where it comes from ---------------------------------------------------------------------------


def table_of(comms: list[Any]) -> list[Table | None]:
    found = [comm._state.table for comm in comms]
    for comm in comms:
        comm.close()
    return found


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The user's cache folder."""
    monkeypatch.setenv("RINGCOLL_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tuning"


def name() -> str:
    here = tuning.machine_of(_Fabric(), None)  # type: ignore[arg-type]
    return tuning.file_name(here)


class _Fabric:
    threads, nranks, rank, nodes = True, 2, 0, ()


def test_the_users_own_table_is_found_unless_it_is_turned_off(folder):
    assert table_of(ringcoll.init_all(2, device="cpu")) == [None] * 2
    found = json.dumps(content())
    tuning.write_table(folder / name(), found, private=True)
    first, second = table_of(ringcoll.init_all(2, device="cpu"))
    assert first is not None and first is second and first.source == "measured here"
    assert table_of(ringcoll.init_all(2, device="cpu", tuning="off")) == [None] * 2
    assert table_of(ringcoll.init_all(3, device="cpu")) == [None] * 3
    assert table_of(ringcoll.init_all(2, device="cpu", pace=1e9)) == [None] * 2


def test_the_environment_names_a_table(given, monkeypatch):
    monkeypatch.setenv("RINGCOLL_TUNING", given)
    assert None not in table_of(ringcoll.init_all(2, device="cpu"))
    monkeypatch.setenv("RINGCOLL_TUNING", "off")
    assert table_of(ringcoll.init_all(2, device="cpu")) == [None] * 2


def test_a_table_of_the_package_comes_after_the_users(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(places, "SHIPPED", tmp_path)
    (tmp_path / name()).write_text(json.dumps(content()))
    first, _ = table_of(ringcoll.init_all(2, device="cpu"))
    assert first is not None and first.source == "shipped table, measured"
    tuning.write_table(folder / name(), json.dumps(content()), private=True)
    first, _ = table_of(ringcoll.init_all(2, device="cpu"))
    assert first is not None and first.source == "measured here"


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_table_that_others_may_write_to_is_not_read(folder, given, mode, caplog):
    Path(given).chmod(mode)
    with pytest.raises(
        ringcoll.ArgumentError, match=r"tuning='.*, read by rank 0: others may write"
    ):
        ringcoll.init_all(2, device="cpu", tuning=given)
    tuning.write_table(folder / name(), json.dumps(content()), private=True)
    (folder / name()).chmod(mode)
    assert table_of(ringcoll.init_all(2, device="cpu")) == [None] * 2
    assert "cannot use the tuning table" in caplog.text


def test_a_folder_that_cannot_be_looked_into_has_no_table():
    assert table_of(ringcoll.init_all(2, device="cpu", cache_dir="x" * 5000)) == [None] * 2


def test_a_table_is_not_looked_for_where_links_are_others(folder, monkeypatch):
    tuning.write_table(folder / name(), json.dumps(content()), private=True)
    here: Any = _Fabric()
    settings = Settings(cache_dir=str(folder.parent))
    assert places.maybe_tuned(here, settings)
    assert not places.maybe_tuned(here, replace(settings, transport="host"))


def test_a_table_of_another_device_is_a_warning(given, caplog):
    assert None not in table_of(ringcoll.init_all(2, device="cpu", tuning=given))
    [message] = caplog.messages
    assert message.startswith("init: the tuning table (measured, t.json) is of A CPU, these ranks")


def test_a_damaged_table_of_the_user_is_a_warning(folder, caplog):
    tuning.write_table(folder / name(), "{", private=True)
    assert table_of(ringcoll.init_all(2, device="cpu")) == [None] * 2
    assert "cannot use the tuning table" in caplog.text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"ranks": 4},
            "it is of 4 ranks on cpu, these are 2 on cpu; run `ringcoll tune --ranks 2`",
        ),
        ({"kind": "cuda"}, "it is of 2 ranks on cuda, these are 2 on cpu"),
    ],
)
def test_a_named_table_of_other_ranks_is_refused(tmp_path, change, message):
    found = content()
    found["machine"].update(change)
    with pytest.raises(ringcoll.ArgumentError) as error:
        ringcoll.init_all(2, device="cpu", tuning=written(tmp_path / "t.json", found))
    assert message in str(error.value)


@pytest.mark.parametrize("what", ["missing", "folder", "link"])
def test_a_named_table_that_cannot_be_read_is_refused(tmp_path, given, what):
    path = tmp_path / what
    if what == "folder":
        path.mkdir()
    elif what == "link":
        path.symlink_to(given)
    with pytest.raises(ringcoll.ArgumentError, match=r"tuning=.*, read by rank 0: ") as error:
        ringcoll.init_all(2, device="cpu", tuning=str(path))
    remedy = f"make it by `ringcoll tune --ranks 2 --out {path}`"
    assert (remedy in str(error.value)) == (not path.exists())


def test_another_table_of_that_name_on_a_rank_names_the_rank(given, monkeypatch):
    """Ranks of one host have one file, unless each sees a file system of its own."""
    own, read = threading.local(), tuning._read

    def run(fabric: Fabric) -> str:
        own.rank = fabric.rank
        with pytest.raises(ringcoll.MismatchError) as error:
            tuning.agree_on_table(fabric, None, Settings(tuning=given))
        return str(error.value)

    monkeypatch.setattr(tuning, "_read", lambda path: read(path) + " " * own.rank)
    message = f"init: tuning={given!r} of rank 1 is another table than that of rank 0"
    assert all(message in text for text in on_threads(run))


def test_a_rank_without_the_file_takes_rank_0s(given, monkeypatch):
    own, read = threading.local(), tuning._read

    def missing(path: Path) -> str:
        if own.rank:
            raise FileNotFoundError(path)
        return read(path)

    def run(fabric: Fabric) -> Table | None:
        own.rank = fabric.rank
        return tuning.agree_on_table(fabric, None, Settings(tuning=given))

    monkeypatch.setattr(tuning, "_read", missing)
    first, second = on_threads(run)
    assert first is not None and first == second


def on_threads(run: Callable[[Fabric], Any]) -> list[Any]:
    """What two ranks return, each with a thread and a fabric."""
    fabrics = thread_fabrics(2, 10.0)
    try:
        return each(fabrics, run)
    finally:
        for fabric in fabrics:
            fabric.close()


def test_ranks_that_name_other_tables_are_told_apart(given, tmp_path):
    other = written(tmp_path / "u.json", content())

    def run(fabric: Fabric) -> str:
        settings = Settings(device="cpu", tuning=given if fabric.rank == 0 else other)
        with pytest.raises(ringcoll.MismatchError) as error:
            communicator_on(fabric, Config(timeout=10.0), settings, None)
        return str(error.value)

    assert all("rank 1" in text and "u.json" in text for text in on_threads(run))


def test_where_a_table_was_measured_out_of_place_it_leaves_calls_in_place_alone():
    best = timed("all_pairs_output", 1e-4, engine="sm", slices=64)
    found = entry(64 << 20, best, collective="reduce_scatter", mapped=True)
    table = parse(json.dumps(content(entries=[found])))
    call, limits = call_of("reduce_scatter", 64 << 20, 2), Limits(mapped=ALL_MAPPED)
    chosen = table.options(call, limits)
    assert chosen is not None and chosen.algorithm == "all_pairs_output"
    call.in_place = True
    assert table.options(call, limits) is None


@pytest.mark.parametrize("name", ["gather", "scatter", "all_gather", "broadcast", "all_reduce"])
def test_no_table_gives_copy_engines_what_goes_by_ll128(name):
    """Such a call is found again without the number that large ones have."""
    edge = measured.LL128_BYTES.of(name)
    assert not may_copy(call_of(name, edge, 2), 2)
    assert may_copy(call_of(name, 2 * edge, 2), 2)
