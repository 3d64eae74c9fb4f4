"""Hosts made of namespaces are what they are taken for, and leave nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.hosts import network

pytestmark = pytest.mark.mpi

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).with_name("programs")
SAYS = "from tests.hosts.network import missing; print(missing())"
MAKES = """
import sys, time
from tests.hosts.network import hosts
with hosts(2, rate=1e6) as world:
    print(*(host.holder.pid for host in (*world.members, world.switch)), flush=True)
    time.sleep(600)
"""


def introduced(world, tmp_path, ranks, *words: str, env=None) -> dict:
    file = tmp_path / "said.json"
    argv = [sys.executable, str(PROGRAMS / "introduce.py"), str(file), *words]
    done = world.mpiexec(ranks, argv, env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text())


def wait_for(happened) -> None:
    late = time.monotonic() + 30
    while not happened():
        assert time.monotonic() < late
        time.sleep(0.02)


def spaces(*pids: int) -> set[int]:
    """The network namespaces of these processes, or of all."""
    found = set()
    for name in pids or (path.name for path in Path("/proc").glob("[0-9]*")):
        with contextlib.suppress(OSError):
            found.add(Path(f"/proc/{name}/ns/net").stat().st_ino)
    return found


@pytest.mark.parametrize("ranks", [(2, 2), (1, 2, 1)])
def test_ranks_share_memory_and_a_name_within_a_host_only(hosts, tmp_path, ranks):
    with hosts(len(ranks)) as world:
        said = introduced(world, tmp_path, ranks)["ranks"]
    names = [f"host{host}" for host, count in enumerate(ranks) for _ in range(count)]
    assert [one["host"] for one in said] == names
    groups = [[r for r, name in enumerate(names) if name == own] for own in names]
    assert [one["together"] for one in said] == groups
    assert [one["address"] for one in said] == [f"10.77.0.{int(n[4:]) + 1}" for n in names]


def test_memory_and_process_numbers_are_those_of_the_host(hosts, tmp_path):
    with hosts(2) as world:
        world.run(0, ["touch", "/dev/shm/only_here"])
        said = introduced(world, tmp_path, 1)["ranks"]
    assert "only_here" in said[0]["memory"]
    assert "only_here" not in said[1]["memory"]
    assert not Path("/dev/shm/only_here").exists()
    assert max(one["pid"] for one in said) < 1000


def test_the_rate_is_what_was_asked_for(hosts, tmp_path):
    for rate, nbytes in ((10e6, 4 << 20), (50e6, 16 << 20)):
        with hosts(2, rate=rate) as world:
            seconds = introduced(world, tmp_path, 1, str(nbytes))["seconds"]
            told = world.run(0, ["tc", "qdisc", "show", "dev", "eth0"]).stdout
        assert f"rate {rate * 8 / 1e6:.0f}Mbit" in told
        # No bound above, as the machine may be busy; a burst passes at once.
        assert seconds > 0.8 * nbytes / rate


def test_a_delay(hosts, tmp_path):
    if reason := network.no_delay():
        pytest.skip(reason)
    with hosts(2, delay=20e-3) as world:
        assert introduced(world, tmp_path, 1, "1")["seconds"] > 35e-3


def test_a_pulled_cable(hosts):
    with hosts(2) as world:
        reach = ["python3", "-c", "import socket; socket.create_connection(('host1', 9), 1)"]
        for state, said in (
            ("up", "ConnectionRefusedError"),
            ("down", "TimeoutError"),
            ("up", "ConnectionRefusedError"),
        ):
            world.link(1, state)
            wait_for(lambda said=said: said in world.run(0, reach, check=False).stderr)


def test_the_ranks_of_a_host_are_killed_and_the_others_live(hosts, tmp_path):
    program = [sys.executable, str(PROGRAMS / "wait.py"), str(tmp_path), "60"]
    with hosts(2) as world:
        run = world.start(2, program, flags=["-disable-auto-cleanup"])
        wait_for(lambda: all((tmp_path / str(rank)).exists() for rank in range(4)))
        assert len(world.kill(1)) == 2
        wait_for(lambda: not any("wait.py" in line for line in world[1].pids().values()))
        assert sum("wait.py" in line for line in world[0].pids().values()) == 2
        (tmp_path / "go").touch()
        wait_for(lambda: (tmp_path / "0.done").exists() and (tmp_path / "1.done").exists())
        run.close()
    assert not (tmp_path / "2.done").exists()


def test_a_killed_host_ends_the_launcher(hosts, tmp_path):
    program = [sys.executable, str(PROGRAMS / "wait.py"), str(tmp_path), "60"]
    with hosts(2) as world:
        run = world.start(1, program)
        wait_for(lambda: all((tmp_path / str(rank)).exists() for rank in range(2)))
        world.kill(1, launcher=True)
        assert run.finish(30).returncode != 0
        wait_for(lambda: not world[1].pids())


def test_nothing_is_left_after_an_error(hosts, tmp_path):
    made: set[int] = set()
    program = [sys.executable, str(PROGRAMS / "wait.py"), str(tmp_path), "60"]
    with pytest.raises(ZeroDivisionError), hosts(2) as world:
        made |= spaces(*(host.holder.pid for host in (*world.members, world.switch)))
        run = world.start(1, program)
        wait_for(lambda: (tmp_path / "0").exists())
        raise ZeroDivisionError
    assert run.process.poll() is not None
    assert all(host.holder.poll() is not None for host in (*world.members, world.switch))
    assert len(made) == 3
    wait_for(lambda: not made & spaces())


def test_nothing_is_left_when_the_maker_is_killed(hosts):
    maker = subprocess.Popen(
        [sys.executable, "-c", MAKES],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    with maker:
        assert maker.stdout is not None
        made = spaces(*map(int, maker.stdout.readline().split()))
        assert len(made) == 3
        assert made <= spaces()
        maker.send_signal(signal.SIGKILL)
    wait_for(lambda: not made & spaces())


def test_what_is_missing_is_said(hosts, monkeypatch):
    without = ["setpriv", "--bounding-set=-net_admin,-sys_admin", sys.executable, "-c", SAYS]
    said = subprocess.run(
        without,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert said.startswith("hosts of namespaces need CAP_NET_ADMIN and CAP_SYS_ADMIN: unshare")
    monkeypatch.setenv("PATH", "")
    assert "there is no ip; install iproute2" in network.missing.__wrapped__()


def test_what_cannot_be_made_is_said(hosts):
    with pytest.raises(network.HostsError, match="tbf rate 0bit"), hosts(1, rate=0.0):
        pass
    with hosts(1) as world, pytest.raises(network.HostsError, match="ip link set nothing"):
        world.run(0, ["ip", "link", "set", "nothing", "up"])


def test_ranks_of_hosts_that_have_ipv6_alone_meet_by_an_id(hosts, tmp_path):
    file, addresses = tmp_path / "id", ["fd77::1", "fd77::2"]
    with hosts(2) as world:
        if world.run(0, ["test", "-e", "/proc/net/if_inet6"], check=False).returncode:
            pytest.skip("this kernel has no IPv6")
        for host, address in enumerate(addresses):
            ip = ["ip", "address"]
            world.run(host, [*ip, "add", f"{address}/64", "dev", "eth0", "nodad"])
            world.run(host, [*ip, "del", f"10.77.0.{host + 1}/24", "dev", "eth0"])
        program = [sys.executable, str(PROGRAMS / "meet.py"), str(file)]
        ranks = [
            subprocess.Popen(
                world[rank].words([*program, str(rank), "2"]),
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        said = [json.loads(rank.communicate(timeout=100)[0] or "null") for rank in ranks]
    assert file.read_text().startswith(f"[{addresses[0]}]:")
    assert said[0] == {"parts": ["0", "1"], "got": {"1": "1 to 0"}}
    assert said[1] == {"parts": ["0", "1"], "got": {"0": "0 to 1"}}
