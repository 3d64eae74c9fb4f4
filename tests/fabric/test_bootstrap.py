"""Which world a process belongs to, by what it was given and by its environment."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from ringcoll import finalize
from ringcoll.bootstrap import bootstrap_of, mpi, mpi_world, overlap, torchrun
from ringcoll.bootstrap.launcher import (
    Launcher,
    TorchWorld,
    check_library,
    check_world,
    launcher_of,
    torch_world,
)
from ringcoll.errors import ArgumentError, ArgumentTypeError, LauncherError, MachineError
from ringcoll.fabric import open_fabric
from tests.launching import is_open_mpi, launch

LAUNCHERS = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in (*LAUNCHERS, "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)


def test_alone_is_a_world_of_one():
    bootstrap = bootstrap_of(None, timeout=1)
    assert (bootstrap.rank, bootstrap.nranks) == (0, 1)
    assert bootstrap.allgather(b"x") == [b"x"]
    fabric = open_fabric(bootstrap, timeout=1)
    assert fabric.allgather(b"x", what="any") == [b"x"]
    assert len(fabric.share(100, what="any")) == 1


@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_launcher_is_known_by_its_variable(name):
    assert launcher_of({name: "4", "SLURM_NTASKS": "9"}) == Launcher(name, 4)


def test_a_job_of_many_tasks_is_no_launcher():
    assert launcher_of({"SLURM_NTASKS": "9"}) is None
    # mpiexec that srun has started, one proxy a node
    both = {"SLURM_STEP_NUM_TASKS": "2", "PMI_SIZE": "8"}
    assert launcher_of(both) == Launcher("PMI_SIZE", 8)


def test_a_launcher_of_one_needs_no_mpi(monkeypatch):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    assert bootstrap_of(None, timeout=1).nranks == 1


TORCHRUN = {"WORLD_SIZE": "4", "RANK": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def test_torchrun_is_recognised():
    by_hand = TorchWorld(2, 4, "127.0.0.1", 29500, agent=False, attempt="0")
    assert torch_world(TORCHRUN, None) == by_hand
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "3"}
    by_torchrun = replace(by_hand, agent=True, attempt="3")
    assert torch_world({**TORCHRUN, **agent}, None) == by_torchrun
    assert torch_world({**TORCHRUN, "MASTER_ADDR": ""}, None) is None
    for rank in ("0", ""):
        assert torch_world({**TORCHRUN, "WORLD_SIZE": "1", "RANK": rank}, None) is None
    of_mpi = {"WORLD_SIZE": "1", "RANK": "3"}  # a wrapper of mpiexec has left the size out
    assert torch_world({**TORCHRUN, **of_mpi}, Launcher("PMI_SIZE", 4)) is None


WRONG = [
    *(("WORLD_SIZE", value) for value in ("x", "-2", "0", "2.0", "²", "1" * 5000)),
    *(("RANK", value) for value in ("-1", "4", "1.0", "²", "1" * 5000)),
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_number_of_torchrun_that_is_wrong_is_named_and_the_others_learn_it(
    name, value, monkeypatch
):
    posted = []
    monkeypatch.setattr(torchrun, "post_torch_refusal", lambda environ, *rest: posted.append(rest))
    for variable, word in {**TORCHRUN, name: value}.items():
        monkeypatch.setenv(variable, word)
    with pytest.raises(LauncherError, match=f"{name} is {value!r}: set") as caught:
        bootstrap_of(None, timeout=1)
    assert posted == [(caught.value, 1)]


def test_a_rank_beyond_a_world_of_one_is_named():
    with pytest.raises(LauncherError, match="WORLD_SIZE is 1, but RANK is '2'"):
        torch_world({**TORCHRUN, "WORLD_SIZE": "1"}, None)


@pytest.mark.parametrize("name", ["RANK", "MASTER_PORT"])
@pytest.mark.parametrize("value", ["", "x", "70000"])
def test_a_word_of_torchrun_that_is_missing_or_wrong_is_named(name, value):
    with pytest.raises(LauncherError, match=f"{name} is '{value}'"):
        torch_world({**TORCHRUN, name: value}, None)


def test_two_launchers_must_agree():
    assert torch_world(TORCHRUN, Launcher("PMI_SIZE", 4)) is not None
    assert torch_world(TORCHRUN, Launcher("SLURM_STEP_NUM_TASKS", 1)) is not None
    with pytest.raises(LauncherError, match=r"SLURM_STEP_NUM_TASKS=2 and WORLD_SIZE=4; unset"):
        torch_world(TORCHRUN, Launcher("SLURM_STEP_NUM_TASKS", 2))


def test_torchrun_without_torch_says_what_to_install():
    code = "import sys; sys.modules['torch'] = None\nbootstrap_of(None, timeout=1)"
    said = run(code, **TORCHRUN)
    assert "MachineError: ranks started by torchrun (WORLD_SIZE=4) need torch's store" in said
    assert "pip install torch" in said


def test_a_world_that_the_launcher_did_not_start_is_refused():
    check_world(None, 1, "MPI 9")
    launcher = launcher_of({"PMI_SIZE": "4"})
    check_world(launcher, 4, "MPI 9")
    with pytest.raises(LauncherError) as caught:
        check_world(launcher, 1, "MPI 9")
    for word in ("PMI_SIZE=4", "a world of 1", "MPI 9", "mpiexec", "MPI4PY_LIBMPI"):
        assert word in str(caught.value)


def test_a_library_of_another_kind_than_open_mpis_launcher_is_refused():
    launcher, other = launcher_of({"OMPI_COMM_WORLD_SIZE": "2"}), launcher_of({"PMI_SIZE": "2"})
    for library in ("MPICH Version:      5.0.2", "Intel(R) MPI Library 2021.13", "MVAPICH 4.0"):
        with pytest.raises(LauncherError, match=r"OMPI_COMM_WORLD_SIZE=2.*start with .*mpiexec"):
            check_library(launcher, library, {})
        check_library(launcher, library, {"MPIR_CVAR_PMI_VERSION": "x"})
        check_library(other, library, {})
        check_library(None, library, {})
    check_library(launcher, "Open MPI v5.0.11", {})


class Given:
    """A user's own bootstrap."""

    def __init__(self, rank, nranks, answer):
        self.rank, self.nranks, self.answer = rank, nranks, answer

    def allgather(self, payload):
        return self.answer


def test_a_users_bootstrap_is_looked_at():
    assert bootstrap_of(Given(1, 2, [b"a", b""]), timeout=1).allgather(b"") == [b"a", b""]
    for answer in ([b"a"], [b"a", "b"], [b"a", None]):
        with pytest.raises(ArgumentTypeError, match="2 bytes objects"):
            bootstrap_of(Given(1, 2, answer), timeout=1).allgather(b"")
    with pytest.raises(ArgumentError, match="rank 2 of 2"):
        bootstrap_of(Given(2, 2, []), timeout=1)
    with pytest.raises(ArgumentTypeError, match="not str"):
        bootstrap_of("world", timeout=1)


@pytest.mark.parametrize("timeout", [0, -1, math.nan])
def test_a_timeout_is_positive(timeout):
    with pytest.raises(ArgumentError, match="positive"):
        bootstrap_of(None, timeout=timeout)


def run(code, **environ):
    script = f"from ringcoll.bootstrap import bootstrap_of\n{code}"
    # Nothing of a launcher, but where MPI's library is.
    library = ("MPI4PY_LIBMPI", "LD_LIBRARY_PATH", "OPAL_PREFIX")
    kept = {name: os.environ[name] for name in library if name in os.environ}
    answer = subprocess.run(
        [sys.executable, "-c", script],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path), **kept, **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return answer.stdout + answer.stderr


def test_no_mpi4py_gives_the_pip_line():
    code = "import sys; sys.modules['mpi4py'] = None\nbootstrap_of(None, timeout=1)"
    assert "[mpi]' for mpi4py with" in run(code, PMI_SIZE="2")


def test_no_mpi_library_gives_the_pip_line():
    code = "bootstrap_of(None, timeout=1)"
    said = run(code, OMPI_COMM_WORLD_SIZE="2", MPI4PY_LIBMPI="/nowhere/libmpi.so")
    assert "MachineError: cannot load MPI through mpi4py" in said
    assert "[mpi]' for mpi4py with" in said


@pytest.mark.mpi
def test_a_foreign_launcher_is_refused():
    code = (
        "try:\n    bootstrap_of(None, timeout=1)\n"
        "finally:\n    from mpi4py import MPI\n    print('begun:', MPI.Is_initialized())"
    )
    said = run(code, OMPI_COMM_WORLD_SIZE="4")
    assert f"begun: {is_open_mpi(launch(1)[0])}" in said
    assert "LauncherError: the launcher started 4 processes (OMPI_COMM_WORLD_SIZE=4)" in said
    code = "from mpi4py import MPI\nMPI.Finalize()\nbootstrap_of(MPI.COMM_WORLD, timeout=1)"
    assert "MPI is finalized" in run(code)


def test_beginning_alone_loads_neither_mpi_nor_torch():
    code = "bootstrap_of(None, timeout=1)\nimport sys; print({'mpi4py', 'torch'} & {*sys.modules})"
    assert run(code) == "set()\n"


class Said:
    """Two ranks that have met over something, of which the other says this."""

    rank, nranks = 0, 2

    def __init__(self, other):
        self.other = other

    def allgather(self, payload):
        return [payload, json.dumps(self.other).encode()]


def test_ranks_without_mpi_cannot_be_on_several_nodes(monkeypatch):
    monkeypatch.setattr(mpi_world, "mpi_running", lambda: None)
    with pytest.raises(
        MachineError, match=r"rank 0 has none: no MPI launcher .*start with mpiexec"
    ):
        mpi_world.in_mpi_world(Said([1, 2, "", []]), 1)
    with pytest.raises(MachineError, match=r"rank 1 has none: no mpi4py"):
        monkeypatch.setattr(mpi_world, "_own_number", lambda *_: 0)
        mpi_world.in_mpi_world(Said([-1, 0, "no mpi4py", []]), 1)


def test_ranks_of_several_mpi_worlds_are_refused(monkeypatch):
    monkeypatch.setattr(mpi_world, "_own_number", lambda *_: 0)
    monkeypatch.setattr(mpi_world, "_size", lambda: 1)
    with pytest.raises(MachineError, match=r"not processes of one MPI world \(numbers \[0, 0\]\)"):
        mpi_world.in_mpi_world(Said([0, 1, "", []]), 1)
    with pytest.raises(MachineError, match="not processes of one MPI world"):
        mpi_world.in_mpi_world(Said([1, 2, "", []]), 1)


def test_a_thread_that_has_made_a_communicator_of_mpi_keeps_no_other_from_it(monkeypatch):
    group = SimpleNamespace(Incl=tuple)
    everybody = SimpleNamespace(Get_group=lambda: group, Create_group=lambda members, _: members)
    mpi = SimpleNamespace(Query_thread=lambda: 2, THREAD_MULTIPLE=3, COMM_WORLD=everybody)
    monkeypatch.setattr(mpi_world, "load_mpi", lambda: mpi)
    monkeypatch.setattr(mpi_world, "_own", {})
    mpi_world._communicator((4, 7), math.inf, lambda: None)
    assert mpi_world._own == {(4, 7): (4, 7)}
    assert not overlap._beginning


def test_a_rank_that_ends_after_others_does_not_call_them_dead(monkeypatch):
    class Ended(Exception):
        pass

    def leave():
        raise Ended

    said: list[str] = []
    meeting = finalize.Exit(announce=lambda: None, ready=lambda: False, dead=lambda: [1, 0])
    monkeypatch.setattr(finalize, "_exits", {frozenset[object](): meeting})
    monkeypatch.setattr(finalize, "mpi_running", object)
    monkeypatch.setattr(mpi, "left_behind", tuple)
    monkeypatch.setattr(finalize, "uncaught", lambda: None)
    monkeypatch.setattr(finalize, "_leave", leave)
    monkeypatch.setattr(finalize, "_say", said.append)
    with pytest.raises(Ended):
        finalize._finalizing()
    assert said == [
        "ends without MPI_Finalize: ranks that have ended without it: 0, 1 (of those that the "
        "launcher started)"
    ]
