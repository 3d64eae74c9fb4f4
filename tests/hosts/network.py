"""Hosts on one machine: namespaces with names of their own, joined by a switch of given bandwidth.

A host is a process that holds a network, a host name, System V memory, /dev/shm, mounts and process
numbers of its own; it ends when its standard input does. So nothing outlives the process that made
it, however that ends: no file names a namespace, and with the last process in it the kernel takes
away all that it holds. ::

    with hosts(2, rate=125e6) as world:
        done = world.mpiexec(2, [sys.executable, "program.py"])
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from ringcoll.bootstrap.launcher import mpiexec

ENTER = Path(__file__).with_name("enter.sh")
TOOLS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}
SUBNET = "10.77.0"  # of networks that nobody else can see
SWITCH = f"{SUBNET}.254"

# Runs as the first process of a host or of the switch: prepares it, says so, and holds it.
HOLD = """
set -e
[ -z "$1" ] || echo "$1" >/proc/sys/kernel/hostname
mount -t sysfs sysfs /sys
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount --bind "$2" /etc/hosts
ip link set lo up
trap '' CHLD
echo ready
exec cat
"""
APART = ("--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--mount-proc")


class HostsError(Exception):
    """This machine makes no hosts, or not such ones."""


@dataclass
class Host:
    """A host, or the switch.

    ``holder`` has its namespaces; its only child is the first process inside.
    """

    name: str
    number: int
    holder: subprocess.Popen[str]

    @property
    def address(self) -> str:
        return f"{SUBNET}.{self.number + 1}"

    @property
    def port(self) -> str:
        """The switch's end of the cable; the host's own end is eth0."""
        return f"port{self.number}"

    def words(self, argv: Sequence[str]) -> list[str]:
        """The command that runs ``argv`` inside."""
        ns = f"/proc/{self.holder.pid}/ns"
        spaces = [f"--{kind}={ns}/{kind}" for kind in ("net", "uts", "ipc")]
        return [
            *("nsenter", *spaces, f"--mount={ns}/mnt", f"--pid={ns}/pid_for_children"),
            *("--", *argv),
        ]

    def pids(self) -> dict[int, str]:
        """Its processes but the first one: numbers outside of it, and command lines."""
        space = Path(f"/proc/{self.holder.pid}/ns/pid_for_children").stat().st_ino
        found = {}
        for folder in Path("/proc").iterdir():
            if not folder.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                status = (folder / "stat").read_text().rsplit(")", 1)[1].split()
                same = (folder / "ns" / "pid").stat().st_ino == space
                if same and status[0] != "Z" and int(status[1]) != self.holder.pid:
                    line = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
                    found[int(folder.name)] = line.decode(errors="replace").strip()
        return found

    def close(self) -> None:
        """End the host and, with its first process, every other one."""
        if self.holder.stdin is not None:
            self.holder.stdin.close()
        try:
            self.holder.wait(10)
        except subprocess.TimeoutExpired:
            self.holder.kill()
            self.holder.wait()
        for pipe in (self.holder.stdout, self.holder.stderr):
            if pipe is not None:
                pipe.close()


@dataclass
class Run:
    """An mpiexec that has been started."""

    process: subprocess.Popen[str]

    def finish(self, timeout: float = 100) -> subprocess.CompletedProcess[str]:
        """Wait for it; what it has said.

        Raises:
            subprocess.TimeoutExpired: it is still there after so many seconds, and is killed.

        """
        try:
            out, err = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.close()
            raise
        return subprocess.CompletedProcess(self.process.args, self.process.returncode, out, err)

    def close(self) -> None:
        """Kill it and what it has started on this side of the hosts."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        with self.process:  # closes its pipes, whoever has read them or not
            pass


@dataclass
class Hosts:
    """Hosts on one switch; :func:`hosts` makes them."""

    switch: Host
    members: list[Host] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)

    def __getitem__(self, number: int) -> Host:
        return self.members[number]

    def __len__(self) -> int:
        return len(self.members)

    def run(
        self, host: int, argv: Sequence[str], *, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run a command inside a host."""
        return _run(self.members[host].words(argv), check=check)

    def start(
        self,
        ranks: int | Sequence[int],
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        flags: Sequence[str] = (),
    ) -> Run:
        """Start ``argv`` under mpiexec: ranks are numbered host by host.

        Args:
            ranks: of each host.
            argv: the program.
            env: what is added to the environment.
            flags: of mpiexec, such as ``-disable-auto-cleanup``.

        """
        counts = [ranks] * len(self) if isinstance(ranks, int) else list(ranks)
        places = ",".join(f"{h.name}:{n}" for h, n in zip(self.members, counts, strict=True) if n)
        launcher = mpiexec()
        if launcher is None:
            raise HostsError("no mpiexec beside the interpreter")
        words = [launcher, "-launcher", "ssh", "-launcher-exec", str(ENTER)]
        words += ["-localhost", SWITCH, "-hosts", places, "-n", str(sum(counts)), *flags, *argv]
        inside = ["nsenter", f"--net=/proc/{self.switch.holder.pid}/ns/net", "--", *words]
        table = " ".join(f"{host.name}={host.holder.pid}" for host in self.members)
        process = subprocess.Popen(
            inside,
            env={**os.environ, "TEST_HOSTS": table, "UCX_NET_DEVICES": "eth0", **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.runs.append(Run(process))
        return self.runs[-1]

    def mpiexec(
        self,
        ranks: int | Sequence[int],
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        flags: Sequence[str] = (),
        timeout: float = 100,
    ) -> subprocess.CompletedProcess[str]:
        """Run ``argv`` to its end: :meth:`start` and :meth:`Run.finish`."""
        return self.start(ranks, argv, env=env, flags=flags).finish(timeout)

    def link(self, host: int, state: str) -> None:
        """Pull the cable of a host, or plug it in again: "down" or "up".

        mpiexec ends when all hosts have told it that they are done: with the cable pulled it waits.
        """
        port = self.members[host].port
        _run(self.switch.words(["ip", "link", "set", port, state]))

    def kill(self, host: int, *, launcher: bool = False) -> list[int]:
        """Kill the processes of a host; which, by their numbers outside.

        Args:
            host: its number.
            launcher: mpiexec's own process on that host too, upon which mpiexec ends all others.

        """
        spared = () if launcher else ("hydra_pmi_proxy",)
        chosen = [
            pid
            for pid, line in self.members[host].pids().items()
            if not any(word in line for word in spared)
        ]
        for pid in chosen:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return chosen

    def close(self) -> None:
        """End everything."""
        for run in self.runs:
            run.close()
        for host in (*self.members, self.switch):
            host.close()


@contextlib.contextmanager
def hosts(count: int, *, rate: float | None = None, delay: float = 0.0) -> Iterator[Hosts]:
    """Hosts host0, host1, … on one switch.

    Args:
        count: how many.
        rate: bytes a second that each host sends at most, and receives at most; None: no limit.
        delay: seconds that a packet takes from each host to the switch.

    Raises:
        HostsError: this machine makes no such hosts; the message says why.

    """
    with contextlib.ExitStack() as stack:
        names = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "hosts"
        lines = ["127.0.0.1 localhost", f"{SWITCH} switch"]
        lines += [f"{SUBNET}.{number + 1} host{number}" for number in range(count)]
        names.write_text("\n".join(lines) + "\n")
        switch = _hold("switch", 253, names)
        world = Hosts(switch)
        stack.callback(world.close)
        inside = switch.words
        _run(inside(["ip", "link", "add", "br0", "type", "bridge"]))
        _run(inside(["ip", "address", "add", f"{SWITCH}/24", "dev", "br0"]))
        _run(inside(["ip", "link", "set", "br0", "up"]))
        for number in range(count):
            host = _hold(f"host{number}", number, names)
            world.members.append(host)
            _cable(switch, host)
            _queue(host, "eth0", rate, delay)
            _queue(switch, host.port, rate, 0.0)
        yield world


@cache
def missing() -> str:
    """Why this machine makes no hosts; "" if it does."""
    for tool, package in TOOLS.items():
        if shutil.which(tool) is None:
            return f"hosts of namespaces: there is no {tool}; install {package}"
    if mpiexec() is None:
        return "hosts of namespaces: no mpiexec beside the interpreter"
    try:
        with hosts(1, rate=1e9):
            return ""
    except HostsError as error:
        return f"hosts of namespaces need CAP_NET_ADMIN and CAP_SYS_ADMIN: {error}"


@cache
def no_delay() -> str:
    """Why links here have no delay; "" if they can have one."""
    try:
        with hosts(1, delay=1e-3):
            return ""
    except HostsError as error:
        return f"links with a delay need the kernel's netem: {error}"


def _hold(name: str, number: int, names: Path) -> Host:
    """A process that has namespaces of its own, ready for use."""
    holder = subprocess.Popen(
        ["unshare", *APART, "--", "sh", "-c", HOLD, "sh", name, str(names)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    host = Host(name, number, holder)
    ready = holder.stdout.readline() if holder.stdout else ""
    if ready != "ready\n":
        said = holder.stderr.read() if holder.stderr else ""
        host.close()
        raise HostsError(f"unshare: {said.strip()}")
    return host


def _cable(switch: Host, host: Host) -> None:
    """Join a host to the switch."""
    pid = str(host.holder.pid)
    pair = ["type", "veth", "peer", "name", "eth0", "netns", pid]
    # Numbers of processes are those outside: only the network is the switch's.
    net = ["nsenter", f"--net=/proc/{switch.holder.pid}/ns/net", "--"]
    _run([*net, "ip", "link", "add", host.port, *pair])
    _run([*net, "ip", "link", "set", host.port, "master", "br0", "up"])
    _run(host.words(["ip", "address", "add", f"{host.address}/24", "dev", "eth0"]))
    _run(host.words(["ip", "link", "set", "eth0", "up"]))


def _queue(host: Host, device: str, rate: float | None, delay: float) -> None:
    """Let a device send so many bytes a second, each so many seconds later."""
    add = ["tc", "qdisc", "add", "dev", device]
    place = ["root"]
    if delay:
        later = ["netem", "delay", f"{delay * 1e6:.0f}us", "limit", "100000"]
        _run(host.words([*add, *place, "handle", "1:", *later]))
        place = ["parent", "1:1"]
    if rate is not None:
        # The bucket holds 2 ms, and the largest packet that the kernel builds; the queue 50 ms.
        burst = max(256 << 10, int(rate * 2e-3))
        bucket = ["tbf", "rate", f"{rate * 8:.0f}bit", "burst", str(burst), "latency", "50ms"]
        _run(host.words([*add, *place, *bucket]))


def _run(argv: Sequence[str], *, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    if check and done.returncode:
        inner = " ".join(argv[argv.index("--") + 1 :] if "--" in argv else argv)
        raise HostsError(f"{inner}: {(done.stderr or done.stdout).strip()}")
    return done
