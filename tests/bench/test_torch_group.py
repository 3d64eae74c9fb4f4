"""Where torch's ranks meet: the files stay until the last has left, and then they go."""

from __future__ import annotations

import atexit
import itertools
import os
import tempfile
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import ringcoll
from ringcoll.bench import torch_group
from ringcoll.errors import MachineError

NRANKS = 3


class FakeDist:
    """torch.distributed of one rank; at its end it looks which files there are, and their modes."""

    def __init__(self, folder: Path, *, fails: bool = False) -> None:
        self.folder, self.fails = folder, fails
        self.options: dict[str, Any] = {}
        self.seen: list[int] = []

    def FileStore(self, path: str, nranks: int) -> tuple[str, int]:  # noqa: N802
        return path, nranks

    def init_process_group(self, backend: str, **options) -> None:
        self.options = {"backend": backend, **options}

    def is_initialized(self) -> bool:
        return bool(self.options)

    def destroy_process_group(self) -> None:
        self.seen = [path.stat().st_mode & 0o777 for path in self.folder.iterdir()]
        if self.fails:
            raise RuntimeError("a peer has closed its connection")


@pytest.fixture
def ends(tmp_path, monkeypatch) -> dict[str, partial[None]]:
    """What each thread leaves for its exit, by the thread's name; files are made in tmp_path."""
    found: dict[str, partial[None]] = {}

    def register(function, *arguments):
        name = threading.current_thread().name
        assert name not in found
        found[name] = partial(function, *arguments)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(atexit, "register", register)
    return found


def met(folder: Path, ends, fails: int | None = None) -> list[tuple[FakeDist, partial[None]]]:
    """Each rank's torch, and how it ends."""

    def rank(comm):
        dist = FakeDist(folder, fails=comm.rank == fails)
        torch_group.join(comm, dist, "gloo", timeout=7)
        return dist, ends[threading.current_thread().name]

    return ringcoll.spawn(rank, NRANKS, device="cpu")


def test_all_have_one_store(tmp_path, ends):
    ranks = met(tmp_path, ends)
    (store,) = {dist.options["store"] for dist, _ in ranks}
    assert store[1] == NRANKS
    assert Path(store[0]).parent == tmp_path  # a folder of its own would go before the store
    assert [dist.options for dist, _ in ranks] == [
        {"backend": "gloo", "store": store, "rank": rank, "world_size": NRANKS, "timeout": 7}
        for rank in range(NRANKS)
    ]


@pytest.mark.parametrize("fails", [None, *range(NRANKS)])
@pytest.mark.parametrize("order", [*itertools.permutations(range(NRANKS))], ids=str)
def test_files_go_with_the_last_rank(tmp_path, ends, order, fails):
    ranks = met(tmp_path, ends, fails)
    for rank in order:
        dist, end = ranks[rank]
        end()
        assert dist.seen == [0o600, 0o600]
    assert [*tmp_path.iterdir()] == []


def test_files_go_where_all_leave_at_once(tmp_path, ends):
    for _ in range(20):
        ends.clear()
        ranks = met(tmp_path, ends)
        threads = [threading.Thread(target=end) for _, end in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [dist.seen for dist, _ in ranks] == [[0o600, 0o600]] * NRANKS
        assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("killed", range(NRANKS))
def test_a_killed_rank_is_not_waited_for(tmp_path, ends, killed):
    """The kernel gives up its lock as it closes what the process had open."""
    ranks = met(tmp_path, ends)
    _, lock, _ = ranks.pop(killed)[1].args
    os.close(lock)
    for dist, end in ranks:
        end()
        assert dist.seen == [0o600, 0o600]
    assert [*tmp_path.iterdir()] == []


def test_what_torch_has_removed_is_not_missed(tmp_path, ends):
    ranks = met(tmp_path, ends)
    Path(ranks[0][0].options["store"][0]).unlink()
    for _, end in ranks:
        end()
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("rank", range(NRANKS))
def test_a_rank_that_cannot_come_is_named_by_all(tmp_path, ends, monkeypatch, rank):
    plain = torch_group._hold
    lost: set[str] = set()
    said: list[str] = []

    def hold(dist, files):
        there = threading.current_thread().name not in lost
        return plain(dist, files if there else ["", "/nowhere/lock"])

    def come(comm):
        if comm.rank == rank:
            lost.add(threading.current_thread().name)
        with pytest.raises(MachineError) as caught:
            torch_group.join(comm, FakeDist(tmp_path), "gloo")
        said.append(str(caught.value))

    monkeypatch.setattr(torch_group, "_hold", hold)
    ringcoll.spawn(come, NRANKS, device="cpu")
    (line,) = {*said}
    assert len(said) == NRANKS
    assert line.startswith(f"--peer gloo: rank {rank}: no file for torch's store: ")
    assert line.endswith("'/nowhere/lock'")
    assert [*tmp_path.iterdir()] == []
    assert len(ends) == NRANKS - 1
    for end in ends.values():
        end()
