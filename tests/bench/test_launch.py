"""How the ranks come to be, decided from flags and environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ringcoll.bench import launch
from ringcoll.bench.launch import Start, decide, is_first, opened, own_command
from ringcoll.bench.settings import Settings
from ringcoll.errors import ArgumentError

ROOT = Path(__file__).parents[2]
UNDER_MPI = {"PMI_SIZE": "3", "PMI_RANK": "1"}


def decided(settings=None, environ=None, *, member=False, **machine) -> Start:
    machine = {"ncores": 8, "launcher": "/bin/mpiexec", "has_mpi": True, **machine}
    return decide(settings or Settings(), environ or {}, member=member, **machine)


@pytest.mark.parametrize(("ncores", "ranks"), [(1, 2), (2, 2), (3, 3), (4, 4), (64, 4)])
@pytest.mark.usefixtures("no_gpus")
def test_plain_command_becomes_mpiexec(ncores, ranks):
    assert decided(ncores=ncores) == Start("mpiexec", ranks, "/bin/mpiexec")


@pytest.mark.usefixtures("no_gpus")
def test_without_mpi_the_ranks_meet_over_sockets():
    assert decided(has_mpi=False) == Start("sockets", 4)
    assert decided(launcher="") == Start("sockets", 4)
    assert decided(Settings(ranks=1), has_mpi=False) == Start("here", 1)


def test_number_of_ranks_can_be_given():
    assert decided(Settings(ranks=7)).ranks == 7
    assert decided(Settings(ranks=7), has_mpi=False) == Start("sockets", 7)


CUDA = {"RINGCOLL_DEVICE": "cuda"}


@pytest.mark.parametrize(
    ("device", "environ", "ngpus", "ranks"),
    [
        ("auto", {}, 0, 4),
        ("auto", {}, 3, 3),
        ("cuda", {}, 3, 3),
        ("cuda", {}, 0, 1),
        ("auto", CUDA, 3, 3),
        ("auto", CUDA, 0, 1),
        ("cpu", CUDA, 3, 4),
        ("auto", {"RINGCOLL_DEVICE": "cpu"}, 3, 4),
    ],
)
def test_a_rank_for_each_gpu(device, environ, ngpus, ranks):
    start = decided(Settings(device=device), environ, ngpus=ngpus)
    assert start == Start("mpiexec", ranks, "/bin/mpiexec")


@pytest.mark.parametrize(("device", "environ"), [("auto", {}), ("cuda", {}), ("auto", CUDA)])
def test_a_lone_gpu_is_shared(device, environ):
    assert decided(Settings(device=device), environ, ngpus=1) == Start("here", 4)


def test_a_rank_measures_here():
    assert decided(environ=UNDER_MPI) == Start("here", 1)
    assert decided(member=True) == Start("here", 1)
    assert decided(Settings(ranks=3), UNDER_MPI) == Start("here", 1)


def test_threads_are_here():
    assert decided(Settings(threads=3)) == Start("here", 3)
    assert decided(Settings(threads=3), {"PMI_SIZE": "1"}) == Start("here", 3)


@pytest.mark.parametrize(
    ("settings", "environ", "machine", "says"),
    [
        (Settings(threads=2), UNDER_MPI, {}, "either processes or threads"),
        (Settings(threads=2), {}, {"member": True}, "either processes or threads"),
        (Settings(threads=2, peer="mpi"), {}, {}, "each rank to be a process"),
        (Settings(ranks=4), UNDER_MPI, {}, "started 3 processes"),
        (Settings(peer="mpi"), {}, {"has_mpi": False}, "no mpi4py.*pip install"),
        (Settings(peer="mpi"), {}, {"launcher": ""}, "no mpiexec.*pip install"),
    ],
)
def test_refusals(settings, environ, machine, says):
    with pytest.raises(ArgumentError, match=says):
        decided(settings, environ, **machine)


def test_first_rank():
    assert is_first({})
    assert is_first({"PMI_RANK": "0"})
    assert not is_first(UNDER_MPI)
    assert not is_first({"OMPI_COMM_WORLD_RANK": "2"})


def test_command_is_run_again_as_it_was(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["/lib/ringcoll/__main__.py", "bench"])
    assert own_command(["-b", "8"]) == [sys.executable, "-m", "ringcoll", "bench", "-b", "8"]
    script = tmp_path / "ringcoll"
    script.write_text("")
    monkeypatch.setattr(sys, "argv", [str(script), "bench"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    assert own_command(["x"]) == [sys.executable, str(script), "bench", "x"]


def test_becoming_mpiexec_keeps_the_standard_output(monkeypatch, tmp_path):
    # The standard streams are files here, and the program that would follow is only looked at.
    seen: dict[str, Any] = {}

    def execve(path, line, environ):
        status = os.fstat(1)
        seen.update(path=path, line=line, environ=environ, stdout=status.st_ino)

    monkeypatch.setattr(os, "execve", execve)
    saved = os.dup(1), os.dup(2)
    with (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as err:
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        monkeypatch.setattr(sys, "stdout", os.fdopen(1, "w", closefd=False))
        monkeypatch.setattr(sys, "stderr", os.fdopen(2, "w", closefd=False))
        try:
            launch.become_mpiexec(Start("mpiexec", 3, "/bin/mpiexec"), ["python", "x"])
        finally:
            for number, copy in zip((1, 2), saved, strict=True):
                os.dup2(copy, number)
                os.close(copy)
        assert seen["stdout"] == os.fstat(err.fileno()).st_ino
        assert seen["line"][:-1] == ["/bin/mpiexec", "-n", "3", "python", "x", "--output"]
        with opened(seen["line"][-1]) as stream:
            stream.write("a row\n")
    os.close(int(seen["line"][-1].split(":")[1]))
    assert (tmp_path / "out").read_text() == "a row\n"


@pytest.mark.parametrize("kind", ["pipe", "file"])
def test_output_that_the_launcher_has_closed_in_its_ranks(kind, tmp_path):
    if kind == "pipe":
        reading, writing = os.pipe()
    else:
        writing = os.open(tmp_path / "rows", os.O_WRONLY | os.O_CREAT)
        os.write(writing, b"what was there\n")
    status = os.fstat(writing)
    marker = f"{os.getpid()}:{writing}:{status.st_dev}:{status.st_ino}"
    code = (
        "import sys; from ringcoll.bench.launch import opened\n"
        "with opened(sys.argv[1]) as stream: stream.write('a row\\n')"
    )
    # subprocess closes what is above the standard streams.
    subprocess.run([sys.executable, "-c", code, marker], cwd=ROOT, check=True, timeout=60)
    os.close(writing)
    if kind == "pipe":
        with os.fdopen(reading) as stream:
            assert stream.read() == "a row\n"
    else:
        assert (tmp_path / "rows").read_text() == "what was there\na row\n"


@pytest.mark.parametrize("marker", [None, "", "1:2", "1:999:1:1", "1:1:0:0", "0:9:1:2"])
def test_lost_output_falls_back(marker):
    assert opened(marker) is sys.stdout
