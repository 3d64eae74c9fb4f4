"""The processes of a group's ranks before its first call: which are watched, and how often."""

import json
import os
import subprocess
import sys
from pathlib import Path

from ringcoll.torch.presence import Presence, _started
from tests.fabric.test_store_bootstrap import Kept


class Counted(Kept):
    """A store that counts what is asked."""

    asked = 0

    def check(self, keys):
        self.asked += 1
        return super().check(keys)


def noted(pid, **changed):
    """What a rank has written whose process is ``pid``."""
    store = Kept()
    Presence(store, 0)
    found = {**json.loads(store.get("process/0")), "pid": str(pid), **changed}
    return json.dumps(found).encode()


def test_a_process_of_this_host_is_seen_to_end():
    store, clock = Kept(), [0.0]
    presence = Presence(store, 0, clock=lambda: clock[0])
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        store.set("process/1", noted(process.pid, started=_started(process.pid)))
        assert presence.dead([0, 1]) == {}
        process.kill()
        process.wait()
        assert presence.dead([0, 1]) == {1: process.pid}
        assert presence.dead([0, 2]) == {}  # it is of another pair of ranks


def test_no_descriptor_is_kept_for_processes_that_nobody_waits_for():
    store, open_files = Kept(), Path("/proc/self/fd")
    presence = Presence(store, 0)
    before = len(list(open_files.iterdir()))
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        store.set("process/1", noted(process.pid, started=_started(process.pid)))
        store.set("process/2", noted(process.pid, boot="another host"))
        for _ in range(3):
            assert presence.dead([0, 1, 2]) == {}
            assert len(list(open_files.iterdir())) > before
            presence.forget()
        process.kill()
        process.wait()
        assert presence.dead([0, 1, 2]) == {1: process.pid}
        presence.forget()
    assert len(list(open_files.iterdir())) == before


def test_a_number_that_another_process_has_by_now_is_a_death():
    store = Kept()
    presence = Presence(store, 0)
    store.set("process/1", noted(os.getpid(), started="1"))
    assert presence.dead([1]) == {1: os.getpid()}


def test_a_process_whose_start_cannot_be_read_is_no_death(monkeypatch):
    def read(*_args, **_how):
        raise OSError(24, "Too many open files")

    for written in (noted(os.getpid(), started=""), noted(os.getpid())):
        store = Kept()
        presence = Presence(store, 0)
        store.set("process/1", written)
        with monkeypatch.context() as patched:
            patched.setattr(Path, "read_text", read)
            assert presence.dead([1]) == {}
    assert json.loads(noted(os.getpid()))["started"] == _started(os.getpid())


def test_what_cannot_be_watched_is_no_death():
    for written in (
        noted(2**22 + 7, boot="another host"),
        noted(2**22 + 7, pidns="another container"),
        noted("x"),
        noted(10**30),
        b"[]",
        b"junk",
        b"[" * 100_000,
    ):
        store = Kept()
        presence = Presence(store, 0)
        store.set("process/1", written)
        assert presence.dead([0, 1]) == {}


def test_the_store_is_asked_seldom_while_a_rank_is_missing_and_not_at_all_afterwards():
    store, now = Counted(), [0.0]
    presence = Presence(store, 0, clock=lambda: now[0])
    for step in range(1000):
        now[0] = step * 0.01
        presence.dead([0, 1, 2])
    few = store.asked
    assert 3 <= few <= 40
    for rank in (1, 2):
        store.set(f"process/{rank}", noted(os.getpid()))
    now[0] += 10
    presence.dead([0, 1, 2])
    assert store.asked == few + 1
    now[0] += 10
    presence.dead([0, 1, 2])
    assert store.asked == few + 1
