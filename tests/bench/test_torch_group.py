"""Who removes the file in which torch's ranks have met, without torch."""

import fcntl
import os
import threading
from types import SimpleNamespace

import pytest

from ringcoll.bench import torch_group


@pytest.fixture
def files(tmp_path):
    """The store and its lock."""
    made = [str(tmp_path / name) for name in ("store", "store.lock")]
    for file in made:
        os.close(os.open(file, os.O_CREAT | os.O_EXCL, 0o600))
    return made


def held(files):
    lock = os.open(files[1], os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_SH)
    return lock


GROUP = SimpleNamespace(is_initialized=lambda: False)


def test_a_rank_waits_for_the_lock_of_one_that_is_ending(files):
    """Of a killed process connections may be closed, from which others know, and locks not yet."""
    other = held(files)
    ending = threading.Timer(0.02, os.close, [other])
    ending.start()
    torch_group._leave(GROUP, held(files), files)
    ending.join()
    assert not any(map(os.path.exists, files))


def test_the_last_rank_removes_what_another_needed(files):
    other = held(files)
    torch_group._leave(GROUP, held(files), files)
    assert all(map(os.path.exists, files))
    torch_group._leave(GROUP, other, files)
    assert not any(map(os.path.exists, files))
