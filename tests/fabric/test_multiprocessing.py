"""Ranks that multiprocessing has started: they leave by os._exit, yet in order."""

import multiprocessing

import pytest

from ringcoll.errors import RankLostError
from ringcoll.fabric import process_fabric


class Pipes:
    """A user's bootstrap: two ranks and a pipe."""

    nranks = 2

    def __init__(self, rank, pipe):
        self.rank, self.pipe = rank, pipe

    def allgather(self, payload):
        self.pipe.send_bytes(payload)
        other = self.pipe.recv_bytes()
        return [other, payload] if self.rank else [payload, other]


KEPT: list = []


def rank_one(pipe, how):
    KEPT.append(process_fabric(Pipes(1, pipe), timeout=20))
    if how == "raises":
        raise ValueError("in a child")


@pytest.mark.parametrize(
    ("how", "message", "status"),
    [
        ("returns", "rank 1 ended with its communicator open", 0),
        # From 3.13 on its exit functions run after the error was shown and forgotten.
        ("raises", "rank 1 (aborted: uncaught ValueError: in a child|ended with)", 1),
    ],
)
def test_the_end_of_a_child_is_told(how, message, status):
    context = multiprocessing.get_context("spawn")
    own, theirs = context.Pipe()
    child = context.Process(target=rank_one, args=(theirs, how))
    child.start()
    with own, theirs:
        fabric = process_fabric(Pipes(0, own), timeout=20)
        with pytest.raises(RankLostError, match=message):
            fabric.allgather(b"", what="any")
        fabric.close()
        child.join()
    assert child.exitcode == status
