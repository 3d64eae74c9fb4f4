"""Ranks that make different calls: every rank is told what each of them has called."""

from __future__ import annotations

import numpy as np
import pytest

import ringcoll
from ringcoll import MismatchError
from ringcoll.executors.mismatch import different_calls

# What rank 1 does otherwise, by the collective that the others call.
DIFFERENT = {
    "count": (
        lambda c, n: c.all_reduce(np.ones(n)),
        lambda c, n: c.all_reduce(np.ones(n + 1)),
    ),
    "dtype": (
        lambda c, n: c.all_reduce(np.ones(n)),
        lambda c, n: c.all_reduce(np.ones(n, "int64")),
    ),
    "op": (
        lambda c, n: c.all_reduce(np.ones(n)),
        lambda c, n: c.all_reduce(np.ones(n), op="max"),
    ),
    "root": (
        lambda c, n: c.broadcast(np.ones(n), root=0),
        lambda c, n: c.broadcast(np.ones(n), root=1),
    ),
    "collective": (
        lambda c, n: c.all_reduce(np.ones(n)),
        lambda c, n: c.broadcast(np.ones(n)),
    ),
    "barrier": (lambda c, n: c.all_reduce(np.ones(n)), lambda c, n: c.barrier()),
    "gather": (
        lambda c, n: c.gather(np.ones(n), np.ones(3 * n) if c.rank == 0 else None),
        lambda c, n: c.gather(np.ones(n + 3), None),
    ),
    "scatter": (
        lambda c, n: c.scatter(np.ones(3 * n) if c.rank == 0 else None, np.ones(n)),
        lambda c, n: c.scatter(None, np.ones(n + 3)),
    ),
}


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("count", [4, 50_000])
@pytest.mark.parametrize("name", DIFFERENT)
def test_every_rank_is_told_both_sides(name, count, grouped):
    usual, other = DIFFERENT[name]
    told = {}

    def work(comm):
        call = other if comm.rank == 1 else usual
        try:
            with ringcoll.group() if grouped else np.errstate():
                call(comm, count)
            # Who only sends may return before the others have come.
            comm.barrier()
        except ringcoll.Error as error:
            told[comm.rank] = error
            raise

    with pytest.raises(MismatchError):
        ringcoll.spawn(work, 3)
    assert {rank: type(error) for rank, error in told.items()} == dict.fromkeys(
        range(3), MismatchError
    )
    for error in told.values():
        # A rank that comes last finds the others' quarrel; it has not entered yet.
        said = [line for line in str(error).splitlines() if line.startswith("  rank ")]
        sides = {line.split(": ", 1)[1] for line in said if "not entered" not in line}
        assert len(said) == 3
        assert len(sides) == 2, error


# Rooted calls; rank ODD makes the second, and these ranks would return with bytes of another.
ODD, ROOT = 1, 2
INTO_ROOT = {
    "reduce op": (
        lambda c, n, y: c.reduce(np.ones(n), y, root=ROOT),
        lambda c, n, y: c.reduce(np.ones(n), root=ROOT, op="max"),
    ),
    "reduce dtype": (
        lambda c, n, y: c.reduce(np.ones(n), y, root=ROOT),
        lambda c, n, y: c.reduce(np.ones(n, "int64"), root=ROOT),
    ),
    "reduce count": (
        lambda c, n, y: c.reduce(np.ones(n), y, root=ROOT),
        lambda c, n, y: c.reduce(np.ones(n + 1), root=ROOT),
    ),
    "gather dtype": (
        lambda c, n, y: c.gather(np.ones(n), None if y is None else np.ones(3 * n), root=ROOT),
        lambda c, n, y: c.gather(np.ones(n, "int64"), root=ROOT),
    ),
}
FROM_ROOT = {
    "broadcast dtype": (
        lambda c, n, y: c.broadcast(np.ones(n), root=ROOT),
        lambda c, n, y: c.broadcast(np.ones(n, "int64"), root=ROOT),
    ),
    "scatter dtype": (
        lambda c, n, y: c.scatter(None if y is None else np.ones(3 * n), np.ones(n), root=ROOT),
        lambda c, n, y: c.scatter(None, np.ones(n, "int64"), root=ROOT),
    ),
}


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(
    ("name", "algorithm"),
    [(name, None) for name in (*INTO_ROOT, *FROM_ROOT)]
    + [("reduce op", "tree"), ("reduce count", "tree"), ("broadcast dtype", "tree")],
)
def test_no_rank_returns_with_bytes_of_another_call(name, algorithm, grouped):
    usual, other = {**INTO_ROOT, **FROM_ROOT}[name]
    would_receive = ROOT if name in INTO_ROOT else ODD
    returned = []

    def work(comm):
        call = other if comm.rank == ODD else usual
        comm.barrier()
        with ringcoll.group() if grouped else np.errstate():
            call(comm, 4, np.empty(4) if comm.rank == ROOT else None)
        returned.append(comm.rank)
        comm.barrier()

    for _ in range(5):
        with pytest.raises(MismatchError):
            ringcoll.spawn(work, 3, algorithm=algorithm)
    assert would_receive not in returned


SAID = [
    (*DIFFERENT["count"], "in count: ", "4 on rank", "5 on rank 1"),
    (*DIFFERENT["dtype"], "in dtype: ", "float64 on rank", "int64 on rank 1"),
    (*DIFFERENT["collective"], "in the call: ", "all_reduce on rank", "broadcast on rank 1"),
    (*DIFFERENT["barrier"], "in the call: ", "all_reduce on rank", "barrier on rank 1"),
    (
        lambda c, n: c.all_reduce(np.ones(n)),
        lambda c, n: c.all_reduce(np.ones(n + 1, "f4"), op="max", slices=2),
        *("in count: ", ", and in dtype: ", ", and in op: ", "float32 on rank 1", "sum on rank"),
    ),
    (
        lambda c, n: c.all_reduce(np.ones(n), tag="a b=1"),
        lambda c, n: c.all_reduce(np.ones(n), slices=2),
        *("in slices: ", "none on rank", "2 on rank 1"),
    ),
]


@pytest.mark.parametrize("case", SAID, ids=range(len(SAID)))
def test_the_difference_comes_first(case):
    usual, other, *said = case
    first = []

    def work(comm):
        comm.barrier()
        try:
            (other if comm.rank == 1 else usual)(comm, 4)
            comm.barrier()
        except MismatchError as error:
            first.append(str(error).splitlines()[0])
            raise

    with pytest.raises(MismatchError):
        ringcoll.spawn(work, 3)
    assert first
    for line in first:
        assert ": the ranks made different calls; they differ in " in line
        assert [text for text in said if text not in line] == []


@pytest.mark.parametrize(
    ("one", "two", "said"),
    [
        ("all_gather_v dtype=f counts=1,2", "all_gather_v dtype=f counts=2,1", "in counts: 1,2 on"),
        (f"a counts={'1,' * 99}2", f"a counts={'1,' * 99}3", "in counts\n"),
        ("a count=1 by LL plan=x", "a count=2 by Simple plan=y", "in count: 1 on rank 0 and 2 on"),
        (
            "a count=1 by LL plan=x",
            "a count=1 by LL plan=y",
            "in plan: x on rank 0 and y on rank 1",
        ),
        ("a count=1", "has not entered it yet", None),
        ("a count=1", "a call whose record is gone", None),
    ],
)
def test_a_difference_is_read_from_the_texts_of_two_calls(one, two, said):
    text = str(different_calls("call 3 on rank 0", [(0, one), (1, two)]))
    assert ("they differ" in text) is (said is not None)
    assert f"they differ {said}" in text or said is None
    assert f"\n  rank 0: {one}\n  rank 1: {two}\n" in text


@pytest.mark.parametrize("count", [6, 60_000], ids=["staged", "after hellos"])
def test_in_place_on_some_ranks_only_is_a_mismatch_of_all_to_all(count):
    def work(comm):
        x = np.ones(count)
        comm.all_to_all(x, None if comm.rank else np.ones(count))
        comm.barrier()

    with pytest.raises(MismatchError, match="differ in in_place: False on rank 0 and True on rank"):
        ringcoll.spawn(work, 3)


def test_a_small_all_to_all_waits_for_no_hellos():
    """It may be in place: what it sends has left its buffer before the first byte comes."""

    def work(comm):
        x = np.arange(6) + 10 * comm.rank
        y = comm.rank * 2 + np.arange(2)
        comm.all_to_all(x)
        assert x.tolist() == [*y, *y + 10, *y + 20]
        return comm.explain("all_to_all", 48).splitlines()[0]

    assert {*ringcoll.spawn(work, 3)} == {
        "all_to_all, 48 bytes, 3 CPU ranks: staged, without a handshake"
    }


def test_ranks_that_ask_for_different_memory_are_told():
    def work(comm):
        with pytest.raises(MismatchError, match=r"24 bytes.*28 bytes|28 bytes.*24 bytes"):
            comm.empty(6 + (comm.rank == 2))
        x = comm.empty(3)
        x[:] = 1
        comm.all_reduce(x)
        return x[0]

    assert ringcoll.spawn(work, 3) == [3.0] * 3
