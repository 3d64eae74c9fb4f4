"""split and shrink: who is in a child, what memory it shares, how long it lives."""

from __future__ import annotations

import numpy as np
import pytest

import ringcoll
from ringcoll import ArgumentError, ArgumentTypeError, ClosedError, MismatchError
from ringcoll.executors.cpu import executor
from ringcoll.fabric.thread import ThreadFabric


def test_split_by_color_and_key():
    def work(comm):
        halves = comm.split(comm.rank % 2, key=-comm.rank)
        alone = comm.split(comm.rank)
        some = comm.split(7 if comm.rank in (1, 4) else None)
        x = np.array([float(comm.rank)])
        out = np.empty(halves.nranks)
        halves.all_gather(x, out)
        alone.all_reduce(x)
        assert (alone.rank, alone.nranks, x[0]) == (0, 1, comm.rank)
        assert (some is None) == (comm.rank not in (1, 4))
        if some is not None:
            some.all_reduce(x)
            assert x[0] == 5.0
        return out.tolist(), halves.rank

    seen = ringcoll.spawn(work, 5)
    even, odd = [4.0, 2.0, 0.0], [3.0, 1.0]
    assert seen == [(even, 2), (odd, 1), (even, 1), (odd, 0), (even, 0)]


def test_nested_splits_and_calls_of_all_generations_in_turn():
    def work(comm):
        child = comm.split(comm.rank // 3)
        grandchild = child.split(child.rank % 2, key=1)
        seen = []
        for number in range(4):
            x = np.full(5000 * number + 1, 10.0**comm.rank)
            comm.all_reduce(x)
            seen.append(x[0])
            x[:] = 10.0**comm.rank
            child.all_reduce(x)
            seen.append(x[0])
            x[:] = 10.0**comm.rank
            grandchild.all_reduce(x)
            seen.append(x[0])
        return seen

    families = [[0, 2], [1], [3, 5], [4]]
    for rank, seen in enumerate(ringcoll.spawn(work, 6)):
        child = 111.0 if rank < 3 else 111_000.0
        (family,) = [f for f in families if rank in f]
        assert seen == [111_111.0, child, sum(10.0**r for r in family)] * 4


def test_a_child_has_options_of_its_own():
    """What its config leaves out is the parent's; a call's own options still win."""

    def work(comm):
        config = ringcoll.Config(algorithm="tree", timeout=3.5, tag="rows")
        child = comm.split(comm.rank % 2, config=config)
        plain = comm.split(0)
        settings = child._state.config
        assert (settings.algorithm, settings.slices, settings.timeout) == ("tree", 2, 3.5)
        assert (child._state.fabric.timeout, comm._state.fabric.timeout) == (3.5, 20)
        assert plain._state.config == comm._state.config
        assert "tag 'rows'" in repr(child)
        x = np.ones(50)
        child.all_reduce(x)
        child.all_reduce(x, algorithm="ring")
        assert set(x) == {4.0}
        with pytest.raises(ArgumentTypeError, match=r"split on rank \d: config is a dict"):
            comm.split(0, config={})

    ringcoll.spawn(work, 4, slices=2, timeout=20)


def test_ranks_of_a_child_that_disagree_about_its_options_are_told():
    def work(comm):
        config = ringcoll.Config(slices=3 if comm.rank == 2 else 4)
        if comm.rank % 2:
            return comm.split(1, config=config).nranks
        with pytest.raises(MismatchError, match=r'rank 0 .*"slices": 4.* rank 2 .*"slices": 3'):
            comm.split(0, config=config)
        return None

    assert ringcoll.spawn(work, 4) == [None, 2, None, 2]


@pytest.fixture
def mapped(monkeypatch):
    """Whether each large call could reach the peers' INPUT and OUTPUT."""
    found = []
    honest = vars(executor)["agreed"]

    def agreed(call, hellos, **ranks):
        buffers, in_place = honest(call, hellos, **ranks)
        if hellos:
            found.append(sorted(buffer.value for buffer in buffers))
        return buffers, in_place

    monkeypatch.setattr(executor, "agreed", agreed)
    return found


def test_children_share_symmetric_memory_without_a_copy(mapped):
    def work(comm):
        outer = comm.empty(30_000)
        child = comm.split(comm.rank % 2)
        middle = child.empty(30_000)
        grandchild = child.split(0, key=-child.rank)
        inner = grandchild.empty(30_000)
        for used, arrays in [
            (comm, [outer]),
            (child, [outer, middle]),
            (grandchild, [outer, middle, inner]),
        ]:
            for array in arrays:
                array[:] = comm.rank
                used.all_reduce(array)
                wanted = 6 if used is comm else 2 if comm.rank % 2 == 0 else 4
                assert set(array) == {wanted}
        comm.barrier()

    ringcoll.spawn(work, 4)
    assert mapped == [["I", "O"]] * (4 * 6)


def test_memory_of_a_child_is_staged_for_its_parent_and_right(mapped):
    def work(comm):
        child = comm.split(comm.rank % 2)
        middle = child.empty(30_000)
        middle[:] = comm.rank
        comm.all_reduce(middle)
        return middle[-1]

    assert ringcoll.spawn(work, 4) == [6.0] * 4
    assert mapped == [[]] * 4


def test_a_child_and_its_arrays_outlive_the_parent():
    def work(comm):
        array = comm.empty(20_000)
        child = comm.split(0)
        comm.barrier()
        comm.close()
        array[:] = 1
        child.all_reduce(array)
        more = child.empty(5)
        more[:] = array[0]
        child.all_reduce(more)
        child.close()
        array[:] += 1
        with pytest.raises(ClosedError):
            comm.barrier()
        with pytest.raises(ClosedError):
            child.barrier()
        return array[0], more[0]

    assert ringcoll.spawn(work, 3) == [(4.0, 9.0)] * 3


def test_children_inherit_options():
    def work(comm):
        child = comm.split(0)
        with pytest.raises(ringcoll.PlanError, match="not deterministic"):
            child.all_reduce(np.ones(3), algorithm="ring")
        child.barrier()

    ringcoll.spawn(work, 3, deterministic=True)


def test_shrink_leaves_ranks_out():
    def work(comm):
        array = comm.empty(20_000)
        array[:] = comm.rank
        if comm.rank in (0, 3):
            return None
        rest = comm.shrink([0, np.int64(3)])
        rest.all_reduce(array)
        return rest.rank, rest.nranks, array[-1]

    assert ringcoll.spawn(work, 5) == [None, (0, 3, 7.0), (1, 3, 7.0), None, (2, 3, 7.0)]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, MemoryError, ringcoll.DeadlineError])
def test_a_shrink_that_is_interrupted_closes_its_child(monkeypatch, kind):
    children = []

    def interrupted(fabric, what):
        raise kind(what)

    def work(comm):
        state = comm._state
        honest = state._child

        def recorded(*given):
            children.append(honest(*given))
            return children[-1]

        state._child = recorded
        with pytest.raises(kind):
            comm.shrink([])

    monkeypatch.setattr(ThreadFabric, "conclude", interrupted)
    ringcoll.spawn(work, 2)
    assert [child.closed for child in children] == [True] * 2


def test_shrink_after_an_error_goes_on_without_the_one_that_left():
    def work(comm):
        if comm.rank == 1:
            comm.abort("I give up")
            return None
        with pytest.raises(ringcoll.AbortedError, match="I give up"):
            while True:
                comm.barrier()
        rest = comm.shrink([1])
        x = np.ones(3)
        rest.all_reduce(x)
        return x[0]

    assert ringcoll.spawn(work, 3) == [2.0, None, 2.0]


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (lambda c: c.split(-1), ArgumentError, "split on rank 1: color=-1"),
        (lambda c: c.split("red"), ArgumentTypeError, "split on rank 1: color='red'"),
        (lambda c: c.split(True), ArgumentTypeError, "color=True"),
        (lambda c: c.split(1 << 70), ArgumentError, "color="),
        (lambda c: c.split(0, key="a"), ArgumentTypeError, "split on rank 1: key='a'"),
        (lambda c: c.split(0, key=1 << 70), ArgumentError, "key="),
        (lambda c: c.shrink([3]), ArgumentError, "shrink on rank 1: exclude=3"),
        (lambda c: c.shrink(2), ArgumentTypeError, "shrink on rank 1: exclude=2"),
        (lambda c: c.shrink(["x"]), ArgumentTypeError, "exclude='x'"),
        (lambda c: c.shrink([1]), ArgumentError, "this rank itself"),
        (lambda c: c.empty(-3), ArgumentError, "empty on rank 1: the shape (-3,) has a negative"),
        (lambda c: c.empty((2, -3)), ArgumentError, "empty on rank 1: the shape (2, -3) has"),
        (lambda c: c.empty(2.5), ArgumentTypeError, "empty on rank 1: shape=2.5, wanted an int"),
        (lambda c: c.empty("23"), ArgumentTypeError, "empty on rank 1: shape='23', wanted an"),
        (lambda c: c.empty(3, "float12"), ArgumentTypeError, "float12"),
    ],
)
def test_bad_arguments_are_refused_on_the_rank_that_gives_them(call, kind, text):
    def work(comm):
        if comm.rank == 1:
            with pytest.raises(kind) as caught:
                call(comm)
            assert text in str(caught.value)
        child = comm.split(0)
        x = np.ones(3)
        child.all_reduce(x)
        return x[0]

    assert ringcoll.spawn(work, 3) == [3.0] * 3
