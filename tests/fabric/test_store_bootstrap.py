"""Ranks that meet over a key-value store; a dictionary stands in for torch's."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import ringcoll
from ringcoll.bootstrap import StoreBootstrap, bootstrap_of
from ringcoll.errors import (
    AbortedError,
    ArgumentError,
    ArgumentTypeError,
    DeadlineError,
    MachineError,
)


class Kept:
    """A store without ``delete_key`` and without any call that waits."""

    def __init__(self):
        self.values = {}
        self.lock = threading.Lock()

    def set(self, key, value):
        self.values[key] = value

    def get(self, key):
        return self.values[key]

    def check(self, keys):
        return all(key in self.values for key in keys)

    def add(self, key, amount):
        with self.lock:
            self.values[key] = self.values.get(key, 0) + amount
            return self.values[key]


class Emptied(Kept):
    """A store that can delete."""

    def delete_key(self, key):
        del self.values[key]


class Undeletable(Kept):
    """A store that has the method, and cannot."""

    def delete_key(self, key):
        raise RuntimeError("deleteKey not implemented")


def together(nranks, work):
    with ThreadPoolExecutor(nranks) as pool:
        return list(pool.map(work, range(nranks)))


PAYLOADS = [[b"", b"\0\xff" * 9], [b"x" * 100_000, b"\x80\n"], [b"", b""]]


@pytest.mark.parametrize("kind", [Kept, Emptied, Undeletable])
def test_all_get_every_ranks_bytes_as_they_are(kind):
    store = kind()

    def work(rank):
        bootstrap = StoreBootstrap(store, rank, 2, 30)
        return [bootstrap.allgather(said[rank]) for said in PAYLOADS]

    assert together(2, work) == [PAYLOADS, PAYLOADS]


def test_what_all_have_read_is_deleted():
    store = Emptied()

    def work(rank):
        StoreBootstrap(store, rank, 3, 30).allgather(b"x" * rank)

    together(3, work)
    assert set(store.values) == {f"ringcoll/generation/{rank}" for rank in range(3)}


def test_keys_of_a_former_communicator_are_not_read_again():
    store = Kept()
    for said in (b"first", b"second"):
        answers = together(
            2, lambda rank, said=said: StoreBootstrap(store, rank, 2, 30).allgather(said)
        )
        assert answers == [[said, said]] * 2


def test_parts_of_the_ranks_go_their_own_ways():
    """Two exchanges of one part for one of the other, and all of them once more among all."""
    store = Kept()

    def work(rank):
        whole = StoreBootstrap(store, rank, 5, 30)
        members = [0, 2, 4] if rank % 2 == 0 else [1, 3]
        part = whole.part(members, 30)
        said = [part.allgather(b"%d" % rank) for _ in range(1 + rank % 2)]
        return part.rank, said, whole.allgather(b"%d" % rank)

    even, odd = [b"0", b"2", b"4"], [b"1", b"3"]
    for rank, (number, said, all_of_them) in enumerate(together(5, work)):
        assert number == rank // 2
        assert said == ([odd, odd] if rank % 2 else [even])
        assert all_of_them == [b"%d" % other for other in range(5)]


def test_absent_ranks_are_named_and_the_bootstrap_is_broken():
    store = Kept()
    StoreBootstrap(store, 2, 4, 30)  # came, but exchanges nothing
    bootstrap = StoreBootstrap(store, 0, 4, 0.05)
    with pytest.raises(DeadlineError, match=r"rank 0 of 4 waited 0.05 s .* ranks 1, 2, 3: did"):
        bootstrap.allgather(b"")
    with pytest.raises(MachineError, match="an earlier exchange"):
        bootstrap.allgather(b"")


@pytest.mark.parametrize("value", [b"", b"1234567", b"\0" * 9, b"\1" + b"\0" * 7])
def test_a_value_of_another_length_is_refused(value):
    store = Kept()
    store.values["ringcoll/1/1/1"] = value
    with pytest.raises(MachineError, match="the store's value for rank 1"):
        StoreBootstrap(store, 0, 2, 1).allgather(b"")


def test_a_store_that_fails_is_the_machines_fault():
    class Lost(Kept):
        def check(self, keys):
            raise RuntimeError("Connection reset by peer\nframe #0: c10::Error")

    with pytest.raises(MachineError, match=r"cannot use the store \(.* by peer\): has the process"):
        StoreBootstrap(Lost(), 0, 2, 1).allgather(b"")


def test_what_is_no_store_is_refused():
    with pytest.raises(ArgumentTypeError, match="set, get, check, add"):
        StoreBootstrap(dict[str, bytes](), 0, 1, 1)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="no rank 2 of 2"):
        StoreBootstrap(Kept(), 2, 2, 1)


def test_a_rank_out_of_range_ends_the_wait_of_the_others():
    store = Kept()
    with pytest.raises(ArgumentError, match="no rank 2 of 2"):
        StoreBootstrap(store, 2, 2, 30)
    with pytest.raises(AbortedError, match="rank 2 aborted: ArgumentError: there is no rank 2"):
        StoreBootstrap(store, 0, 2, 30).allgather(b"")


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("RANK", "2", "WORLD_SIZE is 2, but RANK is '2'"),
        ("RANK", "-1", "RANK is '-1'"),
        ("RANK", "", "WORLD_SIZE is 2, but RANK is ''"),
        ("WORLD_SIZE", "two", "WORLD_SIZE is 'two'"),
    ],
)
def test_a_wrong_number_of_the_environment_ends_the_wait_of_the_others(
    name, value, text, monkeypatch
):
    store = Kept()
    for variable, word in {"RANK": "1", "WORLD_SIZE": "2", name: value}.items():
        monkeypatch.setenv(variable, word)
    with pytest.raises(ringcoll.Error, match=text):
        bootstrap_of(store, timeout=30)
    with pytest.raises(AbortedError, match=f"process .* aborted: .*{text}"):
        StoreBootstrap(store, 0, 2, 30).allgather(b"")


def test_init_takes_a_store_and_the_rank_from_the_environment(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    store = Kept()
    with pytest.raises(ArgumentError, match="set RANK and WORLD_SIZE"):
        bootstrap_of(store, timeout=1)
    assert StoreBootstrap(store, 0, 1, 1).allgather(b"x") == [b"x"]  # as the error says
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    bootstrap = bootstrap_of(Kept(), timeout=math.inf)
    assert (bootstrap.rank, bootstrap.nranks) == (1, 3)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with ringcoll.init(Kept(), device="cpu") as comm:
        assert (comm.rank, comm.nranks) == (0, 1)


def test_a_bootstrap_that_also_keeps_is_taken_as_it_is():
    class Both(Kept):
        rank, nranks = 0, 1

        def allgather(self, payload):
            return [payload]

    assert bootstrap_of(Both(), timeout=1).allgather(b"x") == [b"x"]
