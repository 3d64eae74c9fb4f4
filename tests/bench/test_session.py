"""The measurement on ranks that are threads, and on communicators that make mistakes."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np
import pytest

import ringcoll
from ringcoll.bench import checking, paced, peers
from ringcoll.bench.cases import Section
from ringcoll.bench.library import Operation, allocate
from ringcoll.bench.report import Report
from ringcoll.bench.session import measure
from ringcoll.bench.settings import COLLECTIVES, Settings
from ringcoll.bench.worlds import World, agree, gather_bytes, gather_numbers
from ringcoll.dtypes import dtype_of
from ringcoll.errors import ArgumentError

QUICK: dict[str, Any] = {"iterations": 2, "min_bytes": 256, "max_bytes": 256, "seed": 1}


class Faulty:
    """A communicator that spoils what ``spoil`` says, after an all_reduce or broadcast."""

    def __init__(self, comm, spoil) -> None:
        self._comm, self._spoil = comm, spoil

    def __getattr__(self, name):
        return getattr(self._comm, name)

    def all_reduce(self, send, recv=None, **how) -> None:
        self._comm.all_reduce(send, recv, **how)
        self._spoil(self._comm.rank, send, send if recv is None else recv)


class FaultyWorld(World):
    """Its communicators to be measured are faulty, those for control are not."""

    def __init__(self, spoil, threads=2) -> None:
        super().__init__(threads)
        self.__dict__["spoil"] = spoil

    def run(self, function, **options):
        spoil = self.__dict__["spoil"]
        return super().run(lambda control, comm: function(control, Faulty(comm, spoil)))


def run(world=None, **settings) -> tuple[bool, Any]:
    made = Settings(**{**QUICK, "threads": 2, **settings})
    report = Report(made, io.StringIO(), io.StringIO())
    right = measure(world or World(made.threads), made, report)
    report.end()
    return right, report


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("threads", [2, 3])
def test_every_collective_is_right(collective, threads):
    right, report = run(collective=collective, threads=threads)
    assert right
    sides = [row.result.in_place for row in report.rows]
    assert sides == ([False] if collective in ("sendrecv", "barrier") else [False, True])
    if collective != "barrier":
        assert {row.result.wrong for row in report.rows} == {0}
    assert all(row.result.seconds > 0 for row in report.rows)


def test_every_operator_dtype_and_root():
    right, report = run(collective="reduce", ops=("all",), dtypes=("half", "int8"), roots=None)
    assert right
    cases = {
        (r.case.section.op, r.case.section.dtype.name, r.case.section.root) for r in report.rows
    }
    assert ("avg", "float16", 1) in cases
    assert ("premul_sum", "int8", 0) in cases


def test_one_wrong_element_on_one_rank(capfd):
    def spoil(rank, send, recv) -> None:
        if rank == 1 and recv.size == 64 and recv.any():
            recv[17] += 1

    right, report = run(FaultyWorld(spoil))
    assert not right
    assert [row.result.wrong for row in report.rows] == [1, 1]
    assert "Out of bounds values : 2 FAILED" in report.stdout.getvalue()
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 2
    assert "rank 1 has 1 wrong elements in its output; element 17 is" in said[0]


def test_output_that_nobody_wrote(monkeypatch):
    right, report = run(FaultyWorld(lambda rank, send, recv: recv.view(np.uint8).fill(0xA5)))
    assert not right
    assert [row.result.wrong for row in report.rows] == [128, 128]


def test_input_that_was_written():
    def spoil(rank, send, recv) -> None:
        if rank == 0 and send is not recv:
            send[3] += 1

    right, report = run(FaultyWorld(spoil))
    assert not right
    assert [row.result.wrong for row in report.rows] == [1, 0]


def test_without_check_nothing_is_known():
    right, report = run(FaultyWorld(lambda rank, send, recv: recv.fill(7)), checks=0)
    assert right
    assert [row.result.wrong for row in report.rows] == [None, None]
    assert json.loads(report.as_json())["rows"][0]["wrong"] is None


def test_inputs_of_every_size_and_check_are_fresh(monkeypatch):
    seen = []
    plain = checking.Inputs

    def recorded(case, seed):
        if seed:  # 0 is for what is timed, not checked
            seen.append(seed)
        return plain(case, seed)

    monkeypatch.setattr(checking, "Inputs", recorded)
    run(max_bytes=512, step_factor=2, checks=2)
    assert len(seen) == 2 * 2 * 2  # sizes, checks, ranks
    assert len(set(seen)) == 4


def test_algorithms_slices_and_cycles():
    right, report = run(
        collective="broadcast", algorithms=("chain", "one_shot"), slices=(1, 2), cycles=2
    )
    assert right
    names = [row.algorithm for row in report.rows if not row.result.in_place]
    assert names == ["chain S=1", "chain S=2", "one_shot S=1", "one_shot S=2"] * 2
    assert report.stdout.getvalue().count("# Algorithm: chain S=1") == 2
    assert report.stdout.getvalue().count("# Using devices") == 1


@pytest.mark.parametrize("register", [0, 1, 2])
@pytest.mark.parametrize("unalign", [0, 1])
def test_kinds_of_buffers(register, unalign):
    right, report = run(collective="all_gather", register=register, unalign=unalign)
    assert right
    assert len(report.rows) == 2


def test_per_iteration_times():
    _, report = run(per_iteration=True, iterations=3, per_iteration_skip=1)
    spread = report.rows[0].result.spread
    assert 0 < spread.least <= spread.p99 <= spread.most
    row = [line for line in report.stdout.getvalue().splitlines() if not line.startswith("#")]
    assert len(row[0].split()) == 21


def test_paced_links_are_slow(monkeypatch):
    how = {"collective": "broadcast", "pace": (1e6, 0.0), "min_bytes": 20_000, "max_bytes": 20_000}
    _, report = run(**how)
    assert report.stderr.getvalue() == ""
    monkeypatch.setattr(paced, "LONG", 0.01)
    _, report = run(**how)
    first, second = report.stderr.getvalue().splitlines()
    assert first.startswith("ringcoll bench: broadcast takes about 0 s to measure over these links")
    assert second == "ringcoll bench: 19.5 KiB, about 0 s"
    assert all(row.result.seconds >= 0.02 for row in report.rows)
    text = report.stdout.getvalue()
    assert "# Links are paced: 1e+06 B/s and 0 s a message; switch: each rank has one" in text
    # One hop of two ranks: N/B is all there is.
    assert "#   predicted over a switch: S = 1 takes 20 ms, 1.00 times its limit of N/B" in text
    assert "#   measured +" in text
    assert " times the limit of " in text
    for row in json.loads(report.as_json())["rows"]:
        assert row["predicted_us"] == row["limit_us"] == pytest.approx(20_000)
        assert 0 < row["free_us"] < row["time_us"]


@pytest.mark.parametrize(("links", "seconds"), [((), 0.02), (("pairs",), 0.01)])
def test_paced_and_predicted_links_are_the_same(links, seconds):
    _, report = run(
        collective="reduce_scatter",
        algorithms=("one_shot",),
        threads=3,
        pace=(1e6, 0.0, *links),
        min_bytes=30_000,
        max_bytes=30_000,
    )
    for row in report.rows:
        # Two segments of 10,000 bytes through one ingress port, or each over its own link. Parts
        # of a call end at whole lines of memory, so that one may be a little shorter.
        assert row.forecast.answer.seconds == pytest.approx(seconds, rel=0.01)
        assert row.result.seconds >= 0.97 * seconds


def test_what_is_staged_is_not_predicted():
    _, report = run(pace=(1e6, 0.0), register=0)
    assert "# Nothing is predicted: without -R 2" in report.stdout.getvalue()
    assert report.rows[0].forecast is None


STAR = """
from ringcoll.algorithms import build

def star(nranks):
    return build("all_reduce", "one_shot", nranks)
"""


def test_an_algorithm_of_the_users_own(tmp_path):
    file = tmp_path / "star_bench.py"
    file.write_text(STAR)
    name = f"{file}:star"
    right, report = run(algorithms=(name,), pace=(1e6, 0.0))
    assert right
    assert {row.algorithm for row in report.rows} == {name}
    assert report.rows[0].forecast.answer.seconds == pytest.approx(256e-6)


def test_an_algorithm_that_the_collective_lacks():
    with pytest.raises(ArgumentError, match="chain"):
        run(algorithms=("chain",))


def test_interruption_leaves_the_rows(monkeypatch):
    made = Settings(**{**QUICK, "threads": 2, "max_bytes": 1024, "step_factor": 2})
    report: Any = Report(made, io.StringIO(), io.StringIO())
    plain = report.add

    def add(case, *rest) -> None:
        plain(case, *rest)
        if case.nbytes == 512:
            raise KeyboardInterrupt

    monkeypatch.setattr(Report, "add", lambda self, *rest: add(*rest))
    with pytest.raises(KeyboardInterrupt):
        measure(World(2), made, report)
    report.end()
    assert [row.case.nbytes for row in report.rows] == [256, 256, 512, 512]
    assert "Avg bus bandwidth" in report.stdout.getvalue()


def test_a_peer_works_in_turns_on_the_same_buffers(monkeypatch):
    events = []

    class Peer:
        name = "peer"

        def __init__(self, comm) -> None:
            self.comm = comm

        def algorithm(self, case) -> str:
            return "peer"

        def unable(self, case):
            return None

        def operation(self, case, place):
            def call() -> None:
                if self.comm.rank == 0:
                    events.append("peer")
                self.comm.all_reduce(place.input, place.output)

            return None if place.in_place else Operation(call, place.output)

    class Counting(Faulty):
        def all_reduce(self, send, recv=None, **how) -> None:
            if self._comm.rank == 0 and recv is not None:
                events.append("own")
            self._comm.all_reduce(send, recv, **how)

    class Counted(World):
        def run(self, function, **options):
            return super().run(lambda control, comm: function(control, Counting(comm, None)))

    monkeypatch.setattr(peers, "open_peer", lambda name, comm: Peer(comm))
    right, report = run(Counted(2), peer="peer", iterations=4)
    assert right
    assert [row.lib for row in report.rows] == ["ringcoll", "ringcoll", "peer"]
    assert report.rows[2].result.wrong == 0
    turns = [name for name, last in zip(events, [None, *events], strict=False) if name != last]
    assert turns == ["own", "peer"] * 6  # the warm-up, four blocks, the check


def test_a_peer_that_cannot_is_left_out(monkeypatch):
    class Peer:
        name = "peer"

        def unable(self, case) -> str:
            return "peer has no such thing"

    monkeypatch.setattr(peers, "open_peer", lambda name, comm: Peer())
    right, report = run(peer="peer")
    assert right
    assert {row.lib for row in report.rows} == {"ringcoll"}
    assert "# Without peer: peer has no such thing" in report.stdout.getvalue()


def test_ranks_tell_each_other():
    def tell(comm):
        words = gather_bytes(comm, b"x" * comm.rank)
        return gather_numbers(comm, [comm.rank, 0.5]), words, agree(comm, 10 + comm.rank)

    for found in ringcoll.spawn(tell, 3):
        assert found == ([[0.0, 0.5], [1.0, 0.5], [2.0, 0.5]], [b"", b"x", b"xx"], 10)


def test_in_place_buffers_follow_the_rules():
    def places(comm):
        buffers: Any = allocate(comm, 1024)
        gather = buffers.place(Section("all_gather", 3, dtype_of("int8")).case(96), True)
        scatter = buffers.place(Section("reduce_scatter", 3, dtype_of("int8")).case(96), True)
        return [
            (place.input.ctypes.data - place.whole.ctypes.data, place.input.size, place.output.size)
            for place in (gather, scatter)
        ]

    assert ringcoll.spawn(places, 3)[1] == [(32, 32, 96), (0, 96, 32)]
