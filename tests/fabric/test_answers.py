"""What ranks send over a user's bootstrap is checked, and ends in an error of this library."""

from __future__ import annotations

import json
import os
import random

import numpy as np
import pytest

import ringcoll
from ringcoll.bootstrap import bootstrap_of
from ringcoll.bootstrap.contract import Failure
from ringcoll.errors import ArgumentError, ArgumentTypeError, MismatchError

WORDS = [
    b"",
    b"\xff\xfe",
    b"null",
    b"[]",
    b"{}",
    b"[" * 100_000,
    b'{"failure": 1, "text": 2}',
    b'{"failure": "KeyboardInterrupt", "text": "x"}',
    b'{"value": {}}',
    b'{"value": []}',
    b'{"value": "[1, 2, 3, null]"}',
    b'{"value": "[-1, -1, -1, \\"x\\"]"}',
    b'{"value": [1.5]}',
    b'{"value": [99]}',
    b'{"error": null}',
    b"9" * 5000,
    b"NaN",
    json.dumps({"value": json.dumps([1, 1, 4096, "é" * 48])}).encode(),
    json.dumps({"value": json.dumps([1, 1, 1 << 70, "0" * 48])}).encode(),
    json.dumps({"value": "[" * 90_000}).encode(),
]
# Of the exchanges the third is a list of descriptors, and an empty one is right.
PAIRS = [
    (a, w) for a in range(4) for w in range(len(WORDS)) if (a, WORDS[w]) != (2, b'{"value": []}')
]


class Mirror:
    """Rank 0 of two: what rank 1 answers is rank 0's own, until one exchange, where it is this.

    Rank 1 says that it is another process, or a ``thread`` of this one.
    """

    rank, nranks = 0, 2

    def __init__(self, at, change, *, thread=False):
        self.at, self.change, self.number = at, change, -1
        own = f'"pid": "{os.getpid()}"'.encode()
        self.pids = own, own if thread else b'"pid": "1"'

    def allgather(self, payload):
        self.number += 1
        other = payload.replace(b'"rank": "0"', b'"rank": "1"').replace(*self.pids)
        return [payload, self.change(other) if self.number == self.at else other]


def error_at(at, change, **how):
    """How far an init comes whose n-th exchange is changed, and its error if it has one.

    Rank 0 has its own memory in rank 1's place, so that it meets itself.
    """
    mirror = Mirror(at, change, **how)
    try:
        ringcoll.init(mirror, device="cpu", timeout=0.02).close()
    except ringcoll.Error as error:
        return mirror.number, error
    return mirror.number, None


def test_without_a_change_all_exchanges_pass():
    assert error_at(-1, None) == (3, None)


@pytest.mark.parametrize(("at", "word"), PAIRS)
def test_another_rank_sends_something_else(at, word):
    number, error = error_at(at, lambda _: WORDS[word])
    assert number == at
    assert isinstance(error, ringcoll.Error)
    assert "rank 1" in str(error) or "malformed" in str(error)


@pytest.mark.parametrize("word", range(len(WORDS)))
def test_another_thread_sends_something_else(word):
    number, error = error_at(1, lambda _: WORDS[word], thread=True)
    assert number == 1
    assert isinstance(error, ringcoll.Error)
    assert "rank 1" in str(error) or "malformed" in str(error)


def mutated(text, mixed):
    """A text with a few bytes changed, left out or doubled."""
    found = bytearray(text)
    for _ in range(mixed.randrange(1, 4)):
        at = mixed.randrange(len(found)) if found else 0
        how = mixed.randrange(3)
        if how == 0:
            found[at : at + 1] = bytes([mixed.randrange(256)])
        elif how == 1:
            del found[at : at + mixed.randrange(1, 20)]
        else:
            found[at:at] = found[at : at + mixed.randrange(1, 20)]
    return bytes(found)


@pytest.mark.parametrize("at", range(4))
def test_bytes_that_were_changed_on_the_way(at):
    mixed = random.Random(at)
    ends = [error_at(at, lambda other: mutated(other, mixed)) for _ in range(60)]
    assert sum(error is not None for _, error in ends) > 20  # the rest changed nothing that matters


def changed(**fields):
    return lambda other: json.dumps({**json.loads(other), **fields}).encode()


def test_two_processes_of_one_rank_are_named():
    _, error = error_at(0, changed(rank="0", pid="7", host="there"))
    assert isinstance(error, MismatchError)
    assert str(error).startswith("init: two processes are rank 0: process ")
    assert str(error).endswith("and process 7 on host there")


def test_ranks_at_wrong_places_are_named():
    _, error = error_at(0, changed(rank="5", pid="7"))
    assert isinstance(error, MismatchError)
    assert "rank 5 (process 7 on host " in str(error)
    assert "is at place 1 of the bootstrap's answer" in str(error)


def test_different_numbers_of_ranks_are_shown():
    _, error = error_at(0, changed(nranks="3"))
    assert isinstance(error, MismatchError)
    assert "rank 0 was given nranks=2 and rank 1 (process " in str(error)
    assert "nranks=3" in str(error)


def test_an_error_of_another_rank_is_raised():
    failure = Failure.of(ArgumentError("environment variable RINGCOLL_SLICES='x'"), 1)
    _, error = error_at(0, lambda _: failure.encode())
    assert type(error) is ringcoll.AbortedError
    assert str(error).startswith("rank 1 aborted: ArgumentError: environment variable")


class Numbered:
    def __init__(self, rank, nranks, answer=None):
        self.rank, self.nranks, self.answer = rank, nranks, answer

    def allgather(self, payload):
        return [payload] if self.answer is None else self.answer


@pytest.mark.parametrize("kind", [int, np.int64, np.uint8])
def test_integers_of_any_kind_number_ranks(kind):
    found = bootstrap_of(Numbered(kind(0), kind(1)), timeout=1)
    assert (type(found.rank), found.rank, found.nranks) == (int, 0, 1)


@pytest.mark.parametrize("rank", [True, 0.0, "0", None, np.bool_(False)])
def test_what_is_no_integer_numbers_nobody(rank):
    with pytest.raises(ArgumentTypeError, match="rank, nranks \\(integers\\)"):
        bootstrap_of(Numbered(rank, 2), timeout=1)


@pytest.mark.parametrize("answer", [7, "ab", {}, [b"a"], [b"a", 1], [bytearray(b"a"), b"b"]])
def test_what_is_no_list_of_bytes_is_refused(answer):
    with pytest.raises(ArgumentTypeError, match="must return 2 bytes objects"):
        bootstrap_of(Numbered(0, 2, answer), timeout=1).allgather(b"a")


def test_an_answer_in_another_order_is_refused():
    with pytest.raises(ArgumentError, match="at place 0 are not those of this rank"):
        bootstrap_of(Numbered(0, 2, [b"b", b"a"]), timeout=1).allgather(b"a")
