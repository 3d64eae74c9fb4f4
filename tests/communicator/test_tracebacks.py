"""What Python prints of an error that nobody catches, and what it does not hide."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import threading
import traceback
from pathlib import Path

import pytest

import ringcoll
from ringcoll.communicator import tracebacks
from ringcoll.errors import ArgumentError
from tests.launching import launch

ROOT = Path(__file__).parents[2]
PROGRAM = """
import contextlib
import os
import threading

import numpy as np

import ringcoll


def train(comm):
    for step in range(3):
        comm.all_reduce(np.ones(3))
    if comm.rank == comm.nranks - 1:
        {fault}
    comm.all_reduce(np.ones(3))


def main():
    with ringcoll.init(device="cpu", timeout=30) as comm:
        train(comm)


{run}
"""
OWN = "raise ValueError('the loss is nan')"
ARGUMENT = "comm.all_reduce(np.ones(3), op='summ')"
DEFECT = "comm._state.run = None"  # a TypeError inside the package
LOST = "os._exit(3)"
QUOTED = f"""{LOST}
    try:
        comm.all_reduce(np.ones(3))
    except ringcoll.RankLostError as error:
        raise RuntimeError(f'step 3: {{error}}') from error"""
CALLED_AGAIN = f"""{LOST}
    with contextlib.suppress(ringcoll.RankLostError):
        comm.all_reduce(np.ones(3))"""
CLOSED = "comm.close()"


@pytest.fixture
def shown(tmp_path):
    """Run a program; the functions of the frames of each traceback on stderr, and stderr."""

    def run(fault, how="main()", *, nranks=1, **environ):
        file = tmp_path / "program.py"
        file.write_text(PROGRAM.format(fault=fault, run=how), encoding="utf-8")
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            [*(launch(nranks) if nranks > 1 else []), sys.executable, str(file)],
            env={**os.environ, "PYTHONPATH": path, **environ},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        parts = re.split(r"^Traceback .*$", done.stderr, flags=re.MULTILINE)[1:]
        return [re.findall(r'File ".*", line \d+, in (\S+)', part) for part in parts], done.stderr

    return run


MAIN = ["<module>", "main", "train"]


def test_an_error_of_ringcoll_ends_at_the_call(shown):
    frames, text = shown(ARGUMENT)
    assert frames == [[*MAIN, "all_reduce"]]
    assert "ArgumentError: all_reduce on rank 0: op='summ' is not" in text


def test_an_error_of_an_option_ends_at_init(shown):
    frames, _ = shown(OWN, "ringcoll.init(device='cpu', slice=1)")
    assert frames == [["<module>", "init"]]


def test_an_error_of_the_program_shows_the_program(shown):
    frames, _ = shown(OWN, "ringcoll.spawn(train, 2, device='cpu')")
    assert frames == [["<module>", "spawn", "train"]]


def test_an_error_on_a_thread_is_shown_like_others(shown):
    frames, text = shown(ARGUMENT, "threading.Thread(target=main).start()")
    assert frames == [["_bootstrap_inner", "run", "main", "train", "all_reduce"]]
    assert text.count("Exception in thread") == 1


@pytest.mark.parametrize(("fault", "environ"), [(DEFECT, {}), (ARGUMENT, {"RINGCOLL_DEBUG": "1"})])
def test_all_frames_of_a_defect_are_shown_and_of_all_errors_with_debug(shown, fault, environ):
    (frames,), _ = shown(fault, **environ)
    assert frames[:4] == [*MAIN, "all_reduce"]
    assert "collective" in frames[4:]


def test_an_error_keeps_its_frames_and_its_causes():
    """A debugger that looks at it afterwards sees all."""
    with pytest.raises(ArgumentError) as caught:
        ringcoll.spawn(lambda comm: comm.barrier(), 0)
    error = caught.value
    error.__cause__ = cause = ArgumentError("nranks=0")
    whole = error.__traceback__
    with tracebacks._shortening(error):
        assert frames_of(error) == ["test_an_error_keeps_its_frames_and_its_causes", "spawn"]
        assert error.__cause__ is None  # its text is a part of the error's
    assert error.__cause__ is cause
    assert error.__traceback__ is whole


def test_threads_that_fail_at_once_are_all_shown(monkeypatch):
    """And ``sys.stderr`` is the program's afterwards, in whatever order they end."""
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    begun, both = threading.Event(), threading.Event()

    def first():
        with tracebacks._at_once(True):
            begun.set()
            both.wait(0.2)  # where nothing keeps the other from it
            print("first", file=sys.stderr)

    def second():
        begun.wait()
        with tracebacks._at_once(True):
            both.set()
            threads[0].join()
            print("second", file=sys.stderr)

    threads = [threading.Thread(target=target) for target in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sys.stderr is stream
    assert stream.getvalue() == "first\nsecond\n"


def frames_of(error):
    return [frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)]


def test_a_hook_of_the_program_gets_the_error_with_its_text(shown):
    how = "import sys; sys.excepthook = lambda *said: print(said[1], file=sys.stderr)\nmain()"
    frames, text = shown(ARGUMENT, how)
    assert frames == []
    assert text.startswith("all_reduce on rank 0: op='summ'")


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "first", "said", "other"),
    [
        (OWN, MAIN, "ValueError: the loss is nan", "rank 1 aborted: ValueError: the loss is nan"),
        (ARGUMENT, [*MAIN, "all_reduce"], "ArgumentError: all_reduce on rank 1: op='summ'", ""),
        (LOST, [*MAIN, "all_reduce"], "RankLostError: rank 1 died: its process", ""),
    ],
)
def test_two_ranks_show_one_cause(shown, fault, first, said, other):
    frames, text = shown(fault, nranks=2)
    assert sorted(frames) == sorted([first, [*MAIN, "all_reduce"]][: 1 if fault == LOST else 2])
    assert f"ringcoll.errors.{said}" in text or f"\n{said}" in text
    assert other in text
    assert text.count("ends: uncaught") == (1 if fault == OWN else 0)


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize("fault", [LOST, QUOTED, CALLED_AGAIN])
def test_a_survivor_shows_once_which_rank_was_lost(shown, fault):
    (frames,), text = shown(fault, nranks=2)
    assert frames[:3] == MAIN
    assert text.count("rank 1 died: its process") == 1


@pytest.mark.mpi
@pytest.mark.slow
def test_an_error_that_begins_with_its_rank_is_shown_once(shown):
    _, text = shown(CLOSED, nranks=2)
    assert "ClosedError: rank 1: the communicator is closed" in text
    assert "ends: uncaught" not in text
