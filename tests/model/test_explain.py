"""The space-time table and its picture."""

from __future__ import annotations

import re
import sys

import pytest

from ringcoll.algorithms import ALGORITHMS, build
from ringcoll.errors import ArgumentError, MachineError
from ringcoll.model.explain import space_time
from ringcoll.model.links import Links
from ringcoll.model.picture import draw_transfers, plot_space_time
from ringcoll.model.plot import plot_curves
from ringcoll.model.predict import Clock
from ringcoll.plan import Buffer

N = 1 << 20


def table(collective, algorithm, nranks, slices=1, links=None, width=100):
    clock = Clock(build(collective, algorithm, nranks), links or Links(1e9))
    return space_time(clock.trace(N, slices), nranks, width=width)


def test_a_chain_is_a_staircase():
    assert table("broadcast", "chain", 4, slices=4) == (
        "time / t  0     1     2     3     4     5\n"
        "rank 0    s0>1  s1>1  s2>1  s3>1\n"
        "rank 1          s0>2  s1>2  s2>2  s3>2\n"
        "rank 2                s0>3  s1>3  s2>3  s3>3\n"
        "rank 3\n"
    )


def test_a_ring_sends_another_chunk_each_time():
    assert table("all_reduce", "ring", 3) == (
        "time / t  0     1      2      3\n"
        "rank 0    c2>1  c1+>1  c0+>1  c2>1\n"
        "rank 1    c0>2  c2+>2  c1+>2  c0>2\n"
        "rank 2    c1>0  c0+>0  c2+>0  c1>0\n"
    )


def test_reads_reductions_and_signals_have_signs_of_their_own():
    assert "rank 0    all+<1,2\n" in table("all_reduce", "one_shot", 3)
    assert "rank 0    all+<7ranks\n" in table("all_reduce", "one_shot", 8)
    assert "c0-1>" in table("all_gather", "recursive_doubling", 4)
    assert "rank 2    !3  !0\n" in table(
        "barrier", "dissemination", 4, links=Links(1e9, 1e-6, 1e-6)
    )


@pytest.mark.parametrize("name", ["ring", "one_shot", "hierarchical"])
def test_the_legend_of_a_printed_plan_has_every_sign(name):
    """Of SCRATCH too, which only the hierarchical one has."""
    shown, legend = str(build("all_reduce", name, 4)).rsplit("\n", 1)
    signs = set(re.findall(r"[a-z+!<>](?=\d)", shown.partition("rank 0")[2]))
    assert signs - {word[0] for word in legend.split(", ")} == set()
    assert ("x" in signs) == (name == "hierarchical")


def test_times_that_are_no_multiples_are_in_microseconds():
    text = table("broadcast", "chain", 3, links=Links(1e9, 0, 1e-5))
    assert text.splitlines()[0].split() == ["time", "/", "us", "0", "1059"]


def test_a_narrow_table_has_panels():
    lines = table("broadcast", "chain", 4, slices=16, width=60).splitlines()
    assert max(map(len, lines)) <= 60
    assert sum(line.startswith("time / t") for line in lines) > 1
    assert sum(line.count(">") for line in lines) == 3 * 16


def test_one_rank_moves_nothing():
    assert table("broadcast", "chain", 1) == "nothing moves between ranks\n"


def test_copies_within_a_rank_show_where_they_take_time():
    assert "all" in table("broadcast", "chain", 1, links=Links(1e9, local_bandwidth=1e9))


def drawn(collective, algorithm, nranks, slices=1):
    clock = Clock(build(collective, algorithm, nranks), Links(1e9))
    return draw_transfers(clock.trace(N, slices))


def test_a_drawing_knows_chunks_sums_and_directions():
    bars, held = drawn("all_reduce", "ring", 4)
    first = next(bar for bar in bars if bar.timed.block.rank == 1)
    assert (first.chunks, first.sources, first.targets) == ((0,), (), (2,))
    assert first.contributions == {1}
    onwards = [bar for bar in bars if bar.chunks == (0,)]
    ranks = [bar.timed.block.rank for bar in onwards]
    assert ranks == [1, 2, 3, 0, 1, 2]
    assert [len(bar.contributions) for bar in onwards] == [1, 2, 3, 4, 4, 4]
    outputs = {part: has for (part, _), has in held.items() if part.buffer is Buffer.OUTPUT}
    assert len(outputs) == 16 and set(outputs.values()) == {frozenset(range(4))}


def test_a_drawing_follows_a_chunk_through_scratch_and_names_slices():
    bars, _ = drawn("all_reduce", "hierarchical", 4, slices=2)
    assert {bar.timed.slice for bar in bars} == {0, 1}
    assert {bar.chunks for bar in bars} == {(0,), (1,), (2,), (3,)}
    reading = [bar for bar in bars if bar.sources]
    assert {(bar.timed.block.rank, *bar.sources) for bar in reading} == {
        (0, 1),
        (1, 0),
        (2, 3),
        (3, 2),
    }


def test_what_is_only_moved_is_no_sum():
    bars, _ = drawn("all_to_all", "bruck", 5)
    assert all(len(bar.contributions) <= 1 for bar in bars)


def test_a_picture_says_what_it_shows_and_is_the_same_every_time(tmp_path, monkeypatch):
    import matplotlib as mpl

    monkeypatch.setitem(mpl.rcParams, "svg.fonttype", "none")
    clock = Clock(build("all_reduce", "ring", 4), Links(1e9))
    pictures = []
    for name in ("a.svg", "b.svg"):
        plot_space_time(clock.trace(N), 4, "all_reduce by ring", tmp_path / name)
        pictures.append((tmp_path / name).read_text(encoding="utf-8"))
    assert pictures[0] == pictures[1]
    for said in ("all_reduce by ring", "rank 3", "chunk 0", "0+1+2+3", "of rank 1", "input"):
        assert f">{said}<" in pictures[0], said


@pytest.mark.parametrize("collective", ALGORITHMS)
def test_every_algorithm_has_a_picture(tmp_path, collective):
    nranks = 2 if collective == "send" else 5
    for algorithm in ALGORITHMS[collective]:
        bars, _ = drawn(collective, algorithm, nranks)
        assert all(bar.sources or bar.targets for bar in bars)
        assert bool(bars) == (collective != "barrier")
    clock = Clock(build(collective, algorithm, nranks), Links(1e9))
    plot_space_time(clock.trace(N, 1), nranks, "title", tmp_path / "a.svg")
    assert (tmp_path / "a.svg").stat().st_size > 1000


@pytest.mark.parametrize("name", ["a.png", "a.svg"])
def test_pictures_are_files_of_their_kind(tmp_path, name):
    head = {"a.png": b"\x89PNG", "a.svg": b"<?xml"}[name]
    clock = Clock(build("all_reduce", "two_shot", 4), Links(1e9))
    plot_space_time(clock.trace(N, 2), 4, "title", tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(head)
    (tmp_path / name).unlink()
    plot_curves({"one": [(1, 2.0), (2, 1.0)]}, "title", tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(head)


def test_pictures_of_no_kind_or_nowhere_are_refused(tmp_path):
    with pytest.raises(ArgumentError, match=r"\.png"):
        plot_curves({}, "title", tmp_path / "a.doc")
    with pytest.raises(ArgumentError, match="No such file"):
        plot_curves({}, "title", tmp_path / "nowhere" / "a.png")


def test_without_matplotlib_the_remedy_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MachineError, match=r"\[plot\]"):
        plot_curves({}, "title", tmp_path / "a.png")
