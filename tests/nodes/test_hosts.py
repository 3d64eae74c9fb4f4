"""CPU ranks on hosts that share nothing but a network: right results, and the end of a host."""

import json
import os
import signal
import sys
import time

import pytest

from tests.processes.conftest import NOTES, alive, command

pytestmark = pytest.mark.mpi

LOSS = "tests/nodes/programs/loss.py"
DEATHS = ("-disable-auto-cleanup",)


def verdicts(done):
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line["rank"]: line for line in said}


def seen(tmp_path):
    """What the ranks of loss.py have left; mpiexec may end before the last of them."""
    late = time.monotonic() + 20
    while running(tmp_path) and time.monotonic() < late:
        time.sleep(0.1)
    said = [json.loads(file.read_text()) for file in tmp_path.glob("said.*")]
    return {line["rank"]: line for line in said}


def running(tmp_path):
    """The ranks that are left, without mpiexec's own processes."""
    return [line for line in alive(str(tmp_path)) if line.startswith(f"{sys.executable} {LOSS}")]


def calling(world, ranks, tmp_path, timeout, kind="calls"):
    """The program, when its ranks are in the middle of their calls."""
    file = tmp_path / "calling"
    # The launcher's own children live on: it ends the others when one of them is killed.
    argv = [sys.executable, "-IS", "-c", NOTES, str(tmp_path), sys.executable]
    argv += [LOSS, str(file), str(timeout), kind, str(tmp_path)]
    run = world.start(ranks, argv, flags=DEATHS)
    late = time.monotonic() + 60
    while not file.exists():
        assert time.monotonic() < late
        assert run.process.poll() is None
        time.sleep(0.02)
    return run


@pytest.mark.slow
def test_every_collective(hosts):
    ranks = (1, 2, 1)
    with hosts(len(ranks), rate=1e9) as world:
        # In all sizes and by every algorithm on nodes that share a network: test_collectives.py.
        # Two and two are there too.
        done = world.mpiexec(ranks, command("collectives", "fewest", "word"))
    assert done.stderr == ""
    assert done.returncode == 0
    found = verdicts(done)
    assert {rank: said["failures"] for rank, said in found.items()} == {
        rank: [] for rank in range(sum(ranks))
    }


def test_the_ranks_of_a_killed_host_are_named_and_the_others_go_on(hosts, tmp_path):
    with hosts(3) as world:
        run = calling(world, (1, 2, 1), tmp_path, 20)
        assert len(world.kill(1)) >= 2
        run.finish()
        found = seen(tmp_path)
    assert sorted(found) == [0, 3]
    for said in found.values():
        assert said["error"].startswith("RankLostError: ")
        assert "rank 1 died: its process" in said["error"] or "rank 2 died" in said["error"]
        assert "on host host1" in said["error"]
        assert said["took"] < 10
        assert (said["rest"], said["total"]) == (2, 1.0 + 4.0)
    assert alive(str(tmp_path)) == []


def test_one_dead_rank_is_named_on_both_hosts(hosts, tmp_path):
    with hosts(2) as world:
        run = calling(world, (1, 2), tmp_path, 20)
        lines = world[1].pids().items()
        victim = max(pid for pid, line in lines if line.startswith(f"{sys.executable} {LOSS}"))
        os.kill(victim, signal.SIGKILL)
        run.finish()
        found = seen(tmp_path)
    (dead,) = {0, 1, 2} - set(found)
    assert dead in (1, 2)
    for said in found.values():
        assert f"rank {dead} died: its process" in said["error"]
        assert said["rest"] == 2
    assert alive(str(tmp_path)) == []


def test_a_pulled_cable_ends_in_an_error_on_every_rank(hosts, tmp_path):
    """By calls and without any, each on hosts of its own: both wait for a cable in vain."""
    folders = [tmp_path / kind for kind in ("calls", "idle")]
    with hosts(2) as calls, hosts(2) as idle:
        worlds = dict(zip(folders, (calls, idle), strict=True))
        runs = []
        for folder, world in worlds.items():
            folder.mkdir()
            runs.append(calling(world, (2, 1), folder, 2, folder.name))
        for world in worlds.values():
            world.link(1, "down")
        late = time.monotonic() + 30
        while any(map(running, folders)) and time.monotonic() < late:
            time.sleep(0.2)
        still = [line for folder in folders for line in running(folder)]
        for world in worlds.values():
            world.link(1, "up")
        for run in runs:
            run.finish()
        found = {folder.name: seen(folder) for folder in folders}
    for said in found.values():
        assert sorted(said) == [0, 1, 2]
        for line in said.values():
            assert line["error"].startswith(("DeadlineError", "RankLostError"))
    assert still == []
