"""SCRATCH of large calls: ranks that wait for nobody use it from the same call on."""

from __future__ import annotations

import os
import random
import threading
import time
import types
from typing import Any

import pytest

from ringcoll.cuda import quarantine
from ringcoll.errors import MachineError
from ringcoll.executors.cuda import large_scratch
from ringcoll.executors.cuda.large_scratch import LargeScratch
from ringcoll.executors.cuda.workspace import LARGE_SCRATCH_BYTES
from ringcoll.transports.handles import MemoryHandle
from ringcoll.tuner.measured import STAGED_CALLS

CALLS = 60
FREE = 1 << 40


class Memory:
    """Stands for an allocation."""

    def __init__(self, pointer: int) -> None:
        self.pointer, self.nbytes, self.freed = pointer, LARGE_SCRATCH_BYTES, False

    def free(self) -> None:
        self.freed = True


@pytest.fixture
def made(monkeypatch):
    """What all ranks have allocated; the device is a fake with as much free memory as ``free``."""
    found = types.SimpleNamespace(memory=[], free=FREE, unmapped=0, fails=lambda rank, peer: False)
    cuda = types.SimpleNamespace(
        memGetInfo=lambda: (found.free, FREE), ipcGetMemHandle=lambda pointer: b"i" * 64
    )

    class On:
        def __init__(self, _ordinal: int = 0) -> None: ...

        def __enter__(self):
            return cuda

        def __exit__(self, *_error: object) -> None: ...

    def allocate(ordinal, nbytes, *, what, waits):
        assert nbytes == LARGE_SCRATCH_BYTES
        assert not waits, "a kernel may wait for this thread"
        found.memory.append(Memory((ordinal + 1) << 32))
        return found.memory[-1]

    def handle_of(_cuda, ordinal, pointer, nbytes):
        return MemoryHandle(b"b" * 16, 10 + ordinal, pointer, nbytes, 0, ordinal, "0", "fake")

    def pointer_to(_cuda, handles, rank, peer, opened, _what):
        if found.fails(rank, peer):
            raise MachineError("no mapping")
        opened.append(lambda: None)
        return handles[peer].pointer + rank

    def unmap(_ordinal, opened):
        found.unmapped += len(opened)
        opened.clear()

    monkeypatch.setattr(large_scratch, "on", On)
    monkeypatch.setattr(large_scratch, "outside_capture", On)
    monkeypatch.setattr(large_scratch, "allocate", allocate)
    monkeypatch.setattr(large_scratch, "handle_of", handle_of)
    monkeypatch.setattr(large_scratch, "pointer_to", pointer_to)
    monkeypatch.setattr(large_scratch, "unmap", unmap)
    return found


def answers(together, nranks: int, seed: int, calls: int = CALLS, refused: float = 0):
    """What each rank is answered, call by call, and the addresses that it knows in the end.

    ``refused``: how often it makes a call that is not launched, or is captured, before another.
    """

    def run(fabric):
        rng = random.Random(seed * 100 + fabric.rank)
        scratch = LargeScratch(fabric, fabric.rank)
        found = []
        for _ in range(calls):
            if rng.random() < 0.2:
                time.sleep(rng.random() * 2e-3)
            while rng.random() < refused:
                scratch.number()
            found.append(scratch.number())
            assert scratch.in_use == found[-1]
            scratch.launched()
        fabric.allgather(b"", what="the end of a test")
        addresses = scratch.addresses if found[-1] else ()
        scratch.close()
        scratch.close()
        return found, addresses

    return together(nranks, run)


@pytest.mark.parametrize("refused", [0, 0.3])
@pytest.mark.parametrize("nranks", [2, 3])
def test_all_ranks_change_at_the_same_call(made, together, nranks, refused):
    changed = []
    for seed in range(12):
        found = answers(together, nranks, seed, refused=refused)
        calls = [answer for answer, _ in found]
        assert calls == calls[:1] * nranks
        first = calls[0].index(True) if True in calls[0] else CALLS
        assert not any(calls[0][:first])
        assert all(calls[0][first:])
        changed.append(first)
        if first < CALLS:
            for rank, (_, addresses) in enumerate(found):
                own = [((peer + 1) << 32) + (rank if peer != rank else 0) for peer in range(nranks)]
                assert list(addresses) == own
    assert min(changed) > 0, "the first call cannot know of its peers' memory"
    assert min(changed) < CALLS
    assert all(memory.freed for memory in made.memory)


def test_no_rank_waits_for_one_that_makes_no_call(made, together):
    def run(fabric):
        scratch = LargeScratch(fabric, fabric.rank)
        found = []
        for _ in range(20 * (fabric.rank == 0)):
            found.append(scratch.number())
            scratch.launched()
        fabric.allgather(b"", what="the end of a test")
        scratch.close()
        return found

    assert together(2, run) == [[False] * 20, []]


def test_calls_by_kernels_take_memory_if_enough_of_them_are_staged(made, together):
    def run(fabric):
        scratch, found, used = LargeScratch(fabric, fabric.rank), list[bool](), list[bool]()
        for call in range(2 * STAGED_CALLS + 5):
            for _ in range(2):  # the first one is refused, or captured
                # Rank 1 knows of no buffer that is not mapped, and takes memory when rank 0 has.
                used.append(scratch.number(staged=fabric.rank == 0 and call % 2 == 0))
            scratch.launched()
            fabric.allgather(b"", what="a large call")
            found.append(scratch.nbytes > 0)
            fabric.allgather(b"", what="the next one")
        scratch.unmap()
        fabric.allgather(b"", what="all have unmapped")
        scratch.free()
        fabric.allgather(b"", what="all have freed")
        scratch.number(staged=True)
        again = scratch.nbytes
        scratch.close()
        return found, used, again

    (first, used, again), (second, also, _) = together(2, run)
    staged = 2 * STAGED_CALLS - 1  # calls until so many were staged
    assert first == [False] * staged + [True] * 6
    # Both are in one call, so rank 1 may see the offer in this call or the next.
    assert second in (first, [False] * (staged + 1) + [True] * 5)
    assert used == also and used[-1] and used == sorted(used)
    assert again == 0, "what was staged before trim counts no more"


def test_calls_by_kernels_take_no_memory_where_all_buffers_are_mapped(made, together):
    def run(fabric):
        scratch = LargeScratch(fabric, fabric.rank)
        found = []
        for _ in range(CALLS):
            found.append(scratch.number(staged=False))
            scratch.launched()
        fabric.allgather(b"", what="the end of a test")
        scratch.close()
        return any(found), scratch.nbytes

    assert together(2, run) == [(False, 0)] * 2
    assert not made.memory


def test_all_do_without_if_a_rank_has_no_memory(made, together):
    made.free = 16 * LARGE_SCRATCH_BYTES - 1
    assert [calls for calls, _ in answers(together, 2, 1)] == [[False] * CALLS] * 2
    assert not made.memory


def test_nothing_is_allocated_where_a_rank_has_no_memory_for_it(made, together):
    def run(fabric):
        scratch = LargeScratch(fabric, fabric.rank)
        if fabric.rank == 1:
            made.free = 16 * LARGE_SCRATCH_BYTES - 1
            scratch.number()
            made.free = FREE
        fabric.allgather(b"", what="rank 1 has declined")
        found = scratch.number(), scratch.nbytes
        scratch.close()
        return found

    assert together(2, run) == [(False, 0)] * 2


def test_all_do_without_if_a_rank_cannot_map(made, together, caplog):
    made.fails = lambda rank, peer: rank == 1
    assert [calls for calls, _ in answers(together, 2, 1)] == [[False] * CALLS] * 2
    assert "large calls get no SCRATCH of their own: no mapping" in caplog.text
    assert all(memory.freed for memory in made.memory)


def test_a_leader_that_dies_in_the_middle_is_told(made, together):
    """The others wait for a few instructions of rank 0, but not for ever."""
    from ringcoll.errors import Error

    def run(fabric):
        scratch = LargeScratch(fabric, fabric.rank)
        if fabric.rank == 0:
            scratch._words[0][large_scratch._DECIDING] = 1
            fabric.allgather(b"", what="the leader closes")
            fabric.abort("rank 0 ends")
            return "gone"
        fabric.allgather(b"", what="the leader closes")
        with pytest.raises(Error):
            scratch.number()
        scratch.close()
        return "told"

    assert together(2, run) == ["gone", "told"]


def test_calls_of_a_group_have_numbers_of_their_own_before_they_are_launched(made, together):
    def run(fabric):
        scratch = LargeScratch(fabric, fabric.rank)
        scratch.number()
        fabric.allgather(b"", what="all have offered")
        scratch.number()  # the same call: it was refused before
        fabric.allgather(b"", what="all have mapped")
        if fabric.rank == 0:
            scratch.number()  # rank 0 decides: call 2 is the first by copy engines
        fabric.allgather(b"", what="rank 0 has decided")
        found = [scratch.number(before) for before in range(3)]
        scratch.close()
        return found

    assert together(2, run) == [[False, True, True]] * 2


def test_a_signal_handler_that_makes_a_call_in_the_middle_does_not_wait_for_itself(made, together):
    def run(fabric):
        scratch: Any = LargeScratch(fabric, fabric.rank)
        offer, inner = scratch._offer, []

        def interrupted():
            scratch._offer = offer
            inner.append(scratch.number())
            offer()

        scratch._offer = interrupted
        found = scratch.number()
        memories = len({memory.pointer for memory in made.memory})
        fabric.allgather(b"", what="the end of a test")
        scratch.close()
        return found, inner, memories <= 2

    assert together(2, run) == [(False, [False], True)] * 2
    assert len(made.memory) == 2, "an offer that is repeated takes no more memory"


def test_memory_that_is_given_back_is_taken_again(made, together):
    """All ranks change at the same call again, to memory that they map anew."""

    def run(fabric):
        scratch: Any = LargeScratch(fabric, fabric.rank)
        rounds = []
        for _ in range(3):
            found = []
            for _ in range(CALLS // 3):
                found.append(scratch.number())
                scratch.launched()
                if len(found) < 4:
                    fabric.allgather(b"", what="a call of all")
            held = scratch.nbytes, scratch.generation, len(scratch.addresses)
            scratch.unmap()
            fabric.allgather(b"", what="all have unmapped")
            scratch.free()
            fabric.allgather(b"", what="all have freed")
            rounds.append((found, held, scratch.nbytes, scratch.in_use))
        scratch.close()
        return rounds

    both = together(2, run)
    assert both[0] == both[1]
    for number, (found, held, after, in_use) in enumerate(both[0], 1):
        assert not found[0] and found[4:] == [True] * len(found[4:])
        assert held == (LARGE_SCRATCH_BYTES, number, 2)
        assert (after, in_use) == (0, False)
    assert len(made.memory) == 6 and all(memory.freed for memory in made.memory)
    assert made.unmapped == 6


def test_memory_is_freed_when_no_peer_has_it_mapped(made, together):
    """To free what another process has mapped is undefined, and copies of it may still be read."""

    def run(fabric):
        scratch = LargeScratch(fabric, fabric.rank)
        scratch.number()
        fabric.allgather(b"", what="all have offered")
        scratch.number()
        own: Any = scratch._memory
        fabric.allgather(b"", what="all have mapped")
        if fabric.rank == 1:
            scratch.close()
        fabric.allgather(b"", what="rank 1 has closed")
        found = own.freed
        fabric.allgather(b"", what="both have looked")
        if fabric.rank == 0:
            scratch.close()
        fabric.allgather(b"", what="rank 0 has closed")
        quarantine.sweep()
        fabric.allgather(b"", what="both have swept")
        return found, own.freed

    assert together(2, run) == [(False, True)] * 2
    assert made.unmapped == 2


def test_memory_of_a_rank_whose_peer_has_died_is_freed(made, together, monkeypatch):
    dead: set[int] = set()
    monkeypatch.setattr(large_scratch, "is_gone", dead.__contains__)

    def run(fabric):
        scratch = LargeScratch(fabric, fabric.rank)
        scratch.number()
        fabric.allgather(b"", what="all have offered")
        if fabric.rank == 1:
            scratch._words[1][large_scratch._PROCESS] = 4321
            fabric.allgather(b"", what="the number of a process")
            return None
        fabric.allgather(b"", what="the number of a process")
        own: Any = scratch._memory
        scratch.close()
        before = own.freed
        dead.add(4321)
        quarantine.sweep()
        return before, own.freed

    assert together(2, run)[0] == (False, True)


def test_a_forked_process_leaves_its_parents_memory_alone(made, together, monkeypatch):
    def run(fabric):
        scratch: Any = LargeScratch(fabric, fabric.rank)
        scratch.number()
        fabric.allgather(b"", what="all have offered")
        scratch.number()
        fabric.allgather(b"", what="all have mapped")
        with forked:
            scratch.close()
        fabric.allgather(b"", what="a child has closed")
        found = scratch._memory.freed, scratch._words[fabric.rank][large_scratch._UNMAPPED]
        fabric.allgather(b"", what="all have looked")
        scratch.close()
        return found

    class Forked:
        """Every process takes itself for a child meanwhile."""

        def __enter__(self) -> None:
            monkeypatch.setattr(large_scratch, "os", types.SimpleNamespace(getpid=lambda: -1))

        def __exit__(self, *_error: object) -> None:
            at_end.wait()
            monkeypatch.setattr(large_scratch, "os", os)

    forked, at_end = Forked(), threading.Barrier(2)
    assert together(2, run) == [(False, 0)] * 2
    assert made.unmapped == 2


@pytest.mark.parametrize("refused", [0, 0.3])
def test_both_ends_of_a_pair_change_at_the_same_message(made, together, refused):
    """Whatever other pairs do; each direction by itself, beside calls of all ranks."""
    numbered: dict[tuple[int, int], dict[int, list[bool]]] = {}

    def run(fabric):
        rank, rng = fabric.rank, random.Random(fabric.rank)
        scratch = LargeScratch(fabric, rank)
        ends = [(peer, sends) for peer in range(3) if peer != rank for sends in (False, True)]
        found: dict[tuple[int, bool], list[bool]] = {end: [] for end in ends}
        for _ in range(CALLS):
            rng.shuffle(ends)
            for peer, sends in ends:
                if rng.random() < 0.1:
                    time.sleep(rng.random() * 2e-3)
                while rng.random() < refused:
                    scratch.number_message(peer, sends=sends)
                if rng.random() < 0.2:
                    scratch.number()
                    scratch.launched()
                found[peer, sends].append(scratch.number_message(peer, sends=sends))
                scratch.message_launched(peer, sends=sends)
        fabric.allgather(b"", what="the end of a test")
        for (peer, sends), answers in found.items():
            pair = (rank, peer) if sends else (peer, rank)
            numbered.setdefault(pair, {})[rank] = answers
            if sends and answers[-1]:
                assert scratch.addresses[peer] == ((peer + 1) << 32) + rank
        scratch.close()

    together(3, run)
    assert len(numbered) == 6
    for pair, by_rank in numbered.items():
        first, second = by_rank.values()
        assert first == second, pair
        assert first == sorted(first)
        assert not first[0]
    assert sum(answers[0][-1] for answers in map(list, map(dict.values, numbered.values()))) > 0
