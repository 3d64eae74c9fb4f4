"""The campaign of random calls: that it runs, and that it finds what is wrong."""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest

import ringcoll
from benchmarks.gpu import campaign
from benchmarks.gpu.campaign_arrays import Machine, kinds_of
from benchmarks.gpu.campaign_draw import COLLECTIVES, Setup, draw
from benchmarks.gpu.campaign_numbers import images

SEED, CALLS = 7, 40


def setup_of(nranks=2, **changed):
    known = {"seed": SEED, "device": "cpu", "most": 1 << 16, "calls": CALLS}
    return Setup(nranks=nranks, kinds=kinds_of("cpu"), **{**known, **changed})


class Among:
    """A link of ranks that are threads."""

    def __init__(self, nranks):
        self.values, self.barrier = [""] * nranks, threading.Barrier(nranks)
        self.rows = []

    def of(self, rank):
        class Link:
            def __init__(self, among):
                self.among, self.rank = among, rank

            def exchange(self, value):
                among = self.among
                among.values[rank] = value
                among.barrier.wait(20)
                found = list(among.values)
                among.barrier.wait(20)
                return found

            def send(self, message):
                if rank == 0:
                    self.among.rows.append(message)

        return Link(self)


def played(setup):
    """A campaign of threads; its rows of rank 0, and what it ended with on all ranks."""
    among = Among(setup.nranks)

    def work(comm):
        try:
            machine = Machine((comm, comm.split(0)), setup.most)
            campaign.play(among.of(comm.rank), machine, setup)
        except campaign.Failed as error:
            comm.abort()
            return str(error)
        except threading.BrokenBarrierError:
            return "after another rank"
        return ""

    return among.rows, ringcoll.spawn(work, setup.nranks, device="cpu")


def test_random_calls_of_processes_are_right(tmp_path, capsys):
    words = ["--device", "cpu", "--ranks", "2", "--calls", str(CALLS), "--seed", str(SEED)]
    assert campaign.main([*words, "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "cpu_campaign_2.json").read_text())
    assert (found["seed"], found["errors"]) == (SEED, {})
    assert sum(row["calls"] for row in found["rows"]) == CALLS
    assert sum(row["results"] for row in found["rows"]) > CALLS
    assert not any(row["wrong"] for row in found["rows"])
    assert f"seed {SEED}: {CALLS} of {CALLS} calls" in capsys.readouterr().out


def test_every_kind_of_call_is_drawn():
    for device in ("cpu", "cuda"):
        trials = [draw(setup_of(4, device=device), number) for number in range(1000)]
        calls = [call for trial in trials for call in trial.calls]
        assert {call.collective for call in calls} == set(COLLECTIVES)
        assert {"eager", "async"} <= {trial.way for trial in trials}
        assert ("graph" in {trial.way for trial in trials}) == (device == "cuda")
        assert {call.in_place for call in calls} == {"", "alone", "both"}
        assert {call.second for call in calls} == {trial.kept for trial in trials} == {True, False}


def test_calls_depend_on_seed_and_number_alone():
    assert draw(setup_of(), 5) == draw(setup_of(calls=1), 5) != draw(setup_of(), 6)
    (call, *_) = draw(setup_of(), 5).calls
    before = [images(call, 0, turn) for turn in (0, 0, 1)]
    equal = [
        all(np.array_equal(before[0][side][0], other[side][0]) for side in other)
        for other in before[1:]
    ]
    assert equal == [True, False]


@pytest.mark.parametrize("nranks", [1, 3])
def test_threads_play_it_too(nranks):
    rows, ends = played(setup_of(nranks, calls=150, seed=nranks))
    assert ends == [""] * nranks
    assert sum(row["calls"] for row in rows) == 150 and not any(row["wrong"] for row in rows)


def fault(patch, change, at=11):
    """Lets rank 1 change the arrays of a call after it was made."""
    make = campaign.make

    def made(machine, trial, given):
        make(machine, trial, given)
        if trial.calls[0].key[1] == at and machine.comms[0].rank == 1:
            change(next(a for a in given[0][0] if isinstance(a, np.ndarray) and a.size))

    patch.setattr(campaign, "make", made)


def one_bit(array):
    array.view(np.uint8)[-1] ^= 1


def beside(array):
    array.base[3] ^= 1


@pytest.mark.parametrize("change", [one_bit, beside])
def test_a_byte_that_is_wrong_is_found_and_named(monkeypatch, change):
    fault(monkeypatch, change)
    rows, (first, second) = played(setup_of())
    assert first == second
    assert first.startswith("rank 1, turn 0: 1 wrong, element ")
    call = draw(setup_of(), 11).calls[0]
    assert f"call 11 of seed {SEED}" in first and repr(call) in first
    assert f"--ranks 2 --device cpu --seed {SEED} --most 65536 --first 11 --calls 1" in first
    assert sum(row["calls"] for row in rows) == 12


def test_a_reference_that_is_wrong_is_found(monkeypatch):
    def other(call, rank, turn):
        found = images(call, rank, turn)
        changed = {side: (before, after.copy()) for side, (before, after) in found.items()}
        for _, after in changed.values():
            after.view(np.uint8)[:1] ^= 1
        return changed

    monkeypatch.setattr(campaign, "images", other)
    _, ends = played(setup_of(first=11))
    assert ends[0] == ends[1] and ends[0].count("1 wrong, element 0 of ") == 2


def test_a_call_that_fails_is_named(monkeypatch):
    def fail(_):
        raise RuntimeError("planted")

    fault(monkeypatch, fail)
    _, ends = played(setup_of())
    assert ends[1].startswith(f"rank 1: RuntimeError: planted\ncall 11 of seed {SEED}: Trial(")


def test_what_one_rank_alone_refuses_is_an_error(monkeypatch):
    trials = {number: draw(setup_of(), number) for number in range(CALLS)}
    at = next(n for n, t in trials.items() if t.turns == 1 and "slices" in t.calls[0].options)

    def refuse(_):
        raise ringcoll.ArgumentError("planted")

    fault(monkeypatch, refuse, at)
    _, ends = played(setup_of())
    assert all("refused by some ranks alone" in end and "planted" in end for end in ends)


def test_no_call_begins_after_the_time():
    rows, ends = played(setup_of(seconds=0.0))
    assert ends == ["", ""] and sum(row["calls"] for row in rows) == 1
