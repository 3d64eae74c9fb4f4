"""Fences, limits, handles, and descriptors that are passed."""

import json
import os
import select
import socket
import threading
import time

import pytest

from ringcoll.errors import DeadlineError, MachineError, OutOfMemory
from ringcoll.host import fence, limits, shm
from ringcoll.host.fd_passing import FdServer, receive


@pytest.mark.parametrize("machine", ["x86_64", "AMD64"])
def test_x86_needs_no_fence(machine):
    assert fence.fence_of(machine) is None


@pytest.mark.parametrize("machine", ["aarch64", "ppc64le", "riscv64", "i686"])
def test_other_processors_get_a_real_fence_or_are_refused(machine, monkeypatch):
    orders = []

    class Library:
        def __init__(self, name):
            assert name == "libatomic.so.1"

        @staticmethod
        def atomic_thread_fence(order):
            orders.append(order)

    monkeypatch.setattr("ringcoll.host.fence.ctypes.CDLL", Library)
    call = fence.fence_of(machine)
    assert call is not None
    call()
    assert orders == [5]
    monkeypatch.undo()
    with pytest.raises(MachineError, match="install libatomic"):
        fence.fence_of(machine, "libatomic-that-is-not-there.so")


def test_the_machine_is_asked_by_default(monkeypatch):
    monkeypatch.setattr("ringcoll.host.fence.platform.machine", lambda: "mips")
    with pytest.raises(MachineError, match="'mips'"):
        fence.fence_of(None, "libatomic-that-is-not-there.so")


def tree(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


MEMINFO = {"proc/meminfo": "MemTotal: 9000000 kB\nMemAvailable:    4194304 kB\n"}
V2 = {
    **MEMINFO,
    "proc/self/cgroup": "0::/job/step\n",
    "proc/self/mountinfo": "30 24 0:26 / /sys/fs/cgroup rw shared:9 - cgroup2 cgroup2 rw\n",
}
V1 = {
    **MEMINFO,
    "proc/self/cgroup": "5:cpu,cpuacct:/other\n4:memory:/docker/abc\n0::/\n",
    "proc/self/mountinfo": (
        "31 24 0:27 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
        "32 24 0:28 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
    ),
}
GIB, RESERVE = 1 << 30, 32 << 20


def test_without_control_groups_the_machine_counts(tmp_path):
    tree(tmp_path, MEMINFO)
    room = limits.available(tmp_path)
    assert room.nbytes == 4 * GIB - RESERVE
    assert "MemAvailable" in room.source


def test_nothing_known_is_no_limit(tmp_path):
    assert limits.available(tmp_path).nbytes >= 1 << 60


def test_the_tightest_group_above_counts(tmp_path):
    group = "sys/fs/cgroup"
    tree(
        tmp_path,
        {
            **V2,
            f"{group}/job/step/memory.max": "max\n",
            f"{group}/job/step/memory.current": "0\n",
            f"{group}/job/memory.max": f"{3 * GIB}\n",
            f"{group}/job/memory.current": f"{2 * GIB}\n",
            f"{group}/job/memory.stat": f"anon 5\ninactive_file {GIB // 2}\nactive_file 0\n",
        },
    )
    room = limits.available(tmp_path)
    assert room.nbytes == GIB + GIB // 2 - RESERVE
    assert room.source.endswith("cgroup/job")


def test_mounts_that_could_not_be_read_once_are_read_again(tmp_path):
    files = dict(V2)
    mounts = files.pop("proc/self/mountinfo")
    group = "sys/fs/cgroup/job/step"
    tree(tmp_path, {**files, f"{group}/memory.max": f"{GIB}\n", f"{group}/memory.current": "0\n"})
    assert limits.available(tmp_path).nbytes == 4 * GIB - RESERVE
    tree(tmp_path, {"proc/self/mountinfo": mounts})
    assert limits.available(tmp_path).nbytes == GIB - RESERVE


def test_a_container_sees_its_own_group_at_the_mount(tmp_path):
    group = "sys/fs/cgroup/memory"
    tree(
        tmp_path,
        {
            **V1,
            f"{group}/memory.limit_in_bytes": f"{GIB}\n",
            f"{group}/memory.usage_in_bytes": f"{GIB // 4}\n",
            f"{group}/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB // 8}\n",
        },
    )
    room = limits.available(tmp_path)
    assert room.nbytes == GIB - GIB // 4 + GIB // 8 - RESERVE
    assert "memory.limit_in_bytes" in room.source


def test_a_group_that_is_full_has_nothing_left(tmp_path):
    tree(
        tmp_path,
        {
            **V2,
            "sys/fs/cgroup/job/memory.max": "1000\n",
            "sys/fs/cgroup/job/memory.current": "2000\n",
        },
    )
    (tmp_path / "sys/fs/cgroup/job/step").mkdir()
    assert limits.available(tmp_path).nbytes == 0


def test_a_process_that_was_moved_asks_its_new_group(tmp_path):
    room = {"memory.max": f"{GIB}\n", "memory.current": "0\n"}
    narrow = {f"sys/fs/cgroup/narrow/{name}": text for name, text in room.items()}
    tree(tmp_path, {**V2, **narrow})
    (tmp_path / "sys/fs/cgroup/job/step").mkdir(parents=True)
    assert limits.available(tmp_path).nbytes == 4 * GIB - RESERVE
    tree(tmp_path, {"proc/self/cgroup": "0::/narrow\n"})
    assert limits.available(tmp_path).nbytes == GIB - RESERVE


def test_need_and_available_are_named():
    room = limits.Available(5 << 20, "a test")
    limits.require(5 << 20, room, "empty")
    with pytest.raises(OutOfMemory, match=r"empty needs 6.0 MiB .* 5.0 MiB .* \(a test\)"):
        limits.require(6 << 20, room, "empty")


def test_a_segment_is_private_sealed_and_marked():
    segment = shm.create(5000, "test")
    try:
        status = os.fstat(segment.fd)
        assert status.st_mode & 0o777 == 0o600
        assert len(segment.body) == segment.handle.nbytes == 8192
        with pytest.raises(OSError, match="not permitted"):
            os.ftruncate(segment.fd, 0)
        other = shm.attach(shm.SegmentHandle.decode(segment.handle.encode()), "test")
        segment.body[17] = 5
        assert other[17] == 5
        wrong = shm.SegmentHandle(os.getpid(), segment.fd, 8192, "00" * 24)
        with pytest.raises(MachineError, match="random bytes"):
            shm.attach(wrong, "test")
        with pytest.raises(MachineError, match="not 1052672"):
            shm.attach(
                shm.SegmentHandle(os.getpid(), segment.fd, 1 << 20, segment.handle.nonce), "test"
            )
    finally:
        segment.seal()
        segment.seal()
    with pytest.raises(shm.ProcAccessDenied):
        shm.attach(segment.handle, "test")


@pytest.mark.parametrize(
    "text",
    ["", "7", "[1, 2]", '[1, -2, 3, "00"]', '["1", 2, 3, "00"]', json.dumps([1, 2, 3, "0"])],
)
def test_a_malformed_handle_is_refused(text):
    with pytest.raises(MachineError, match="malformed"):
        shm.SegmentHandle.decode(text)


def test_any_number_of_seconds_is_one_that_can_be_waited():
    """By sockets, polls and locks; those that cannot are waited for ever."""
    assert [limits.waitable(seconds) for seconds in (0.0, 2e6)] == [0.0, 2e6]
    poll, lock = select.poll(), threading.Lock()
    own, other = socket.socketpair()
    with own, other:
        poll.register(own, select.POLLOUT)
        for seconds in (2_147_482, 2_147_484, 4_294_968, 1e10, 1e300, float("inf")):
            left = limits.waitable(seconds)
            own.settimeout(left)
            assert poll.poll(None if left is None else left * 1e3)
            assert lock.acquire(timeout=-1 if left is None else left)
            lock.release()


@pytest.mark.parametrize("seconds", [20, 1e10, float("inf")])
def test_descriptors_pass_through_doors_in_a_ring(seconds):
    """Every rank calls at its neighbour's server and serves at its own, in one thread each."""
    servers = [FdServer() for _ in range(3)]
    pipes = [os.pipe() for _ in range(3)]
    got = {}

    def rank(index):
        names = [servers[(index + 1) % 3].name]
        deadline = time.monotonic() + seconds
        ((got[index],),) = receive(names, deadline, servers[index], [pipes[index][1]], 1)

    threads = [threading.Thread(target=rank, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, fd in got.items():
        os.write(fd, b"%d" % index)
        assert os.read(pipes[(index + 1) % 3][0], 1) == b"%d" % index
        assert not os.get_inheritable(fd)
        os.close(fd)
    for server in servers:
        server.close()
    for pair in pipes:
        for fd in pair:
            os.close(fd)


def test_a_peer_that_never_calls_is_a_deadline():
    server = FdServer()
    try:
        with pytest.raises(DeadlineError, match="1 peers did not answer"):
            receive([], time.monotonic() + 0.1, server, [0], 1)
    finally:
        server.close()
