"""Plain memory that calls use again, by whole communicators whose kernels run on the CPU."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import ringcoll
from ringcoll.executors.cuda import auto_register
from tests.gpu.ranks import close, program_of, together
from tests.gpu.test_auto_register import memory, of, place
from tests.kernels.stand_in import needs_compiler

__all__ = ["memory"]

pytest.importorskip("cupy")

from tests.gpu.fake_gpus import FakeBuffer, fake

pytestmark = needs_compiler

COUNT = 3000
STAGED, DIRECT = 0, 1
LATER = [STAGED] * 2 + [DIRECT] * 2
"""Of five uses all but the third: a rank that comes last to the second may map memory then."""


def clear(found: list[int | None]) -> list[int | None]:
    """The uses of which is known what they run."""
    return [program for use, program in enumerate(found) if use % 5 != 2]


@pytest.fixture
def world(monkeypatch, memory):
    """Makes communicators whose calls of 4 KiB are large ones."""
    monkeypatch.setattr("ringcoll.communicator.cuda.state.MIN_BYTES", 4096)
    monkeypatch.setattr(auto_register, "_PATIENCE", 9.0)
    gpus, made = fake(monkeypatch, 3, sms=24), []

    def make(devices: Any, **options: Any) -> Any:
        options = {"protocol": "Simple", "debug": "trace", **options}
        comms = ringcoll.init_all(devices, device="cuda", timeout=30, **options)
        together(comms, lambda comm: comm._settle())
        made.extend(comms)
        return comms

    yield make
    close(made, failed=True)
    gpus.close()


def which(comm: Any) -> int | None:
    """The program that the last call ran, None if it had one; the ranks wait for each other."""
    comm.synchronize()
    state = comm._state
    choice = state.cuda.async_errors.last.choice
    number = program_of(comm)
    state.fabric.allgather(b"", what="ended")
    return None if choice.direct is None else number


def numbers(comm: Any, seed: int, count: int = COUNT) -> list[np.ndarray]:
    """What each rank contributes."""
    return [
        np.random.default_rng([seed, rank]).integers(-1000, 1000, count, np.int32)
        for rank in range(comm.nranks)
    ]


def reduced(comm: Any, buffer: Any, seed: int) -> int | None:
    """One all_reduce in place, compared; which program has run."""
    contributions = numbers(comm, seed, buffer.shape)
    buffer._values()[:] = contributions[comm.rank]
    comm.all_reduce(buffer.array)
    found = which(comm)
    buffer.check(np.sum(contributions, axis=0))
    return found


def placed(comm: Any, memory: Any, count: int = COUNT, **how: Any) -> Any:
    buffer = FakeBuffer(comm, count, **how)
    memory.made(buffer)
    return buffer


@pytest.mark.parametrize("devices", [[0, 1, 2], [0, 0]], ids=str)
def test_the_fourth_use_runs_zero_copy(world, memory, devices):
    def work(comm):
        buffer = placed(comm, memory)
        assert of(comm).mapped_address(*place(buffer)) == 0
        found = [reduced(comm, buffer, seed) for seed in range(5)]
        assert of(comm).mapped_address(*place(buffer)) != 0
        held = comm.memory()
        assert held["workspace"] > held["large calls"] == held["symmetric"] == 0
        assert held["mapped"] >= (comm.nranks - 1) * COUNT * 4
        return clear(found)

    assert together(world(devices), work) == [LATER] * len(devices)


def segments(name: str, comm: Any, sent: list[np.ndarray]) -> np.ndarray:
    """The result of a call on this rank."""
    if name == "all_gather":
        return np.concatenate(sent)
    part = slice(comm.rank * COUNT, (comm.rank + 1) * COUNT)
    if name == "reduce_scatter":
        return np.sum(sent, axis=0)[part]
    return np.concatenate([each[part] for each in sent])


@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter", "all_to_all"])
def test_so_do_the_other_collectives_once_both_buffers_have_been_used(world, memory, name):
    """Fresh arrays of one allocation are the same memory."""

    def work(comm):
        whole, found = COUNT * comm.nranks, []
        counts = {"all_gather": (COUNT, whole), "reduce_scatter": (whole, COUNT)}
        sends, receives = counts.get(name, (whole, whole))
        send, recv = placed(comm, memory, sends), placed(comm, memory, receives)
        for seed in range(5):
            sent = numbers(comm, seed, send.shape)
            send._values()[:] = sent[comm.rank]
            recv._values()[:] = -1
            getattr(comm, name)(send.array, recv.array)
            found.append(which(comm))
            recv.check(segments(name, comm, sent))
        return clear(found)

    assert together(world([0, 1, 2]), work) == [LATER] * 3


@pytest.mark.parametrize("name", ["all_gather_v", "reduce_scatter_v"])
@pytest.mark.parametrize("empty", [False, True])
def test_calls_with_a_count_for_each_rank(world, memory, name, empty):
    """A rank without elements has no buffer to map: then all ranks stage theirs."""
    counts = [1000, 0 if empty else 500, 1500]
    whole = sum(counts)

    def work(comm):
        found = []
        sizes = (counts[comm.rank], whole)
        large, small = placed(comm, memory, whole), placed(comm, memory, counts[comm.rank])
        begin = sum(counts[: comm.rank])
        for seed in range(5):
            sent = numbers(comm, seed, whole)
            if name == "all_gather_v":
                small._values()[:], large._values()[:] = sent[comm.rank][: sizes[0]], -1
                comm.all_gather_v(small.array, large.array, counts)
                parts = [each[:count] for each, count in zip(sent, counts, strict=True)]
                found.append(which(comm))
                large.check(np.concatenate(parts))
            else:
                large._values()[:], small._values()[:] = sent[comm.rank], -1
                comm.reduce_scatter_v(large.array, small.array, counts)
                found.append(which(comm))
                small.check(np.sum(sent, axis=0)[begin : begin + sizes[0]])
        return clear(found)

    wanted = [STAGED] * 4 if empty else LATER
    assert together(world([0, 1, 2]), work) == [wanted] * 3


def test_whatever_lies_in_one_allocation_counts_as_the_same_memory(world, memory):
    """Two arrays of one pool block, and an array object made anew for each call."""

    def work(comm):
        both = placed(comm, memory, 2 * COUNT)
        found = []
        for seed in range(5):
            begin = COUNT * (seed % 2)
            sent = numbers(comm, seed)
            both._values()[begin : begin + COUNT] = sent[comm.rank]
            at = both.array.pointer + begin * 4
            comm.all_reduce(ringcoll.from_pointer(at, COUNT, "int32", ordinal_of(comm)))
            found.append(which(comm))
            assert (both._values()[begin : begin + COUNT] == np.sum(sent, axis=0)).all()
        return clear(found)

    assert together(world([0, 1, 2]), work) == [LATER] * 3


def ordinal_of(comm: Any) -> int:
    return int(comm.device.partition(":")[2])


def test_a_new_allocation_at_a_known_address_is_staged_and_mapped_anew(world, memory):
    def work(comm):
        buffer, found = placed(comm, memory), []
        for turn in range(3):
            found += [reduced(comm, buffer, seed + 10 * turn) for seed in range(5)]
            memory.free(buffer)
            memory.made(buffer)
        return clear(found)

    assert together(world([0, 1, 2]), work) == [LATER * 3] * 3


def test_one_rank_that_passes_other_memory_stages_the_call(world, memory):
    def work(comm):
        known, found = placed(comm, memory), []
        for seed in range(8):
            new = comm.rank == 1 and seed == 5
            found.append(reduced(comm, placed(comm, memory) if new else known, seed))
        return clear(found)

    wanted = [*LATER, STAGED, DIRECT]
    assert together(world([0, 1, 2]), work) == [wanted] * 3


@pytest.mark.parametrize("why", ["expandable", "full"])
def test_memory_that_cannot_be_registered_stays_staged(world, memory, monkeypatch, caplog, why):
    """Said once for all such allocations of a rank, which are tried once each."""
    caplog.set_level(logging.INFO, "ringcoll")
    if why == "full":
        monkeypatch.setattr(auto_register, "MAX_REGISTRATIONS", 1)
    else:
        plain = memory.allocation_of
        there = lambda at: replace(plain(at), exportable=False)  # noqa: E731
        monkeypatch.setattr(auto_register, "allocation_of", there)

    def work(comm):
        before, first, second = (placed(comm, memory) for _ in range(3))
        if why == "full":
            assert of(comm).register(before.array.pointer)
        return [
            reduced(comm, buffer, seed)
            for seed, buffer in enumerate((first, second, first, second, first, second, first))
        ]

    assert together(world([0, 1, 2]), work) == [[STAGED] * 7] * 3
    said = [line for line in caplog.messages if "stays staged" in line]
    assert sorted(line.partition(":")[0] for line in said) == [f"rank {r}" for r in range(3)]
    wanted = "has registered 1 allocations" if why == "full" else "no CUDA IPC handle"
    assert all(wanted in line and "use comm.empty" in line for line in said)


def test_a_forked_rank_marks_no_memory_as_freed(world, memory, monkeypatch):
    """A fork has no CUDA, which would know its parent's allocations; the log is its parent's."""
    comms = world([0, 1])
    together(comms, lambda comm: [reduced(comm, placed(comm, memory), seed) for seed in range(2)])
    buffer = placed(comms[0], memory)
    assert of(comms[0]).register(buffer.array.pointer)
    words = bytes(of(comms[0])._words[0])
    with monkeypatch.context() as patch:
        patch.setattr(comms[0]._state, "inherited", True)
        patch.setattr(auto_register, "number_of", lambda _at: 0)
        for _ in range(16):
            with pytest.raises(ringcoll.UsageError, match="fork"):
                comms[0].all_reduce(buffer.array)
    assert bytes(of(comms[0])._words[0]) == words


def test_calls_by_copy_engines_look_at_the_logs(world, memory, monkeypatch):
    """Else memory that smaller calls have had mapped would never be unmapped."""

    def work(comm):
        state, buffer = comm._state, placed(comm, memory)
        found = [reduced(comm, buffer, seed) for seed in range(5)]
        memory.free(buffer)
        of(comm)._find_freed(1)
        comm._state.fabric.allgather(b"", what="freed")
        before = len(of(comm)._mapped)
        monkeypatch.setattr(state, "_large_engine", lambda *_: "copy")
        monkeypatch.setattr(state, "_number_large", lambda *_: True)
        for _ in range(2):
            state.memory_class(None, state.config, (1 << 30, 1 << 26), (1 << 31, 1 << 26))
        return clear(found), before, len(of(comm)._mapped)

    assert together(world([0, 1]), work) == [(LATER, 1, 0)] * 2


def test_what_peers_have_unmapped_makes_room(world, memory, monkeypatch, caplog):
    """Four allocations in turn, where a log has room for two; what is mapped is said."""
    caplog.set_level(logging.DEBUG, "ringcoll")
    monkeypatch.setattr(auto_register, "MAX_REGISTRATIONS", 2)

    def work(comm):
        buffer, found = placed(comm, memory), []
        for turn in range(4):
            found += [reduced(comm, buffer, seed + 10 * turn) for seed in range(5)]
            memory.free(buffer)
            memory.made(buffer)
            of(comm)._find_freed(2)  # as every 16 polls
            for _ in range(3):  # no call is running: unmapped at once
                comm._state.fabric.allgather(b"", what="freed")
                of(comm).poll()
            comm._state.fabric.allgather(b"", what="unmapped")
        assert not of(comm)._mapped and not of(comm).mapped_bytes
        return clear(found)

    assert together(world([0, 1, 2]), work) == [LATER * 4] * 3
    said = [line for line in caplog.messages if "registered automatically" in line]
    assert len([line for line in said if " mapped memory of rank " in line]) == 4 * 6
    assert len([line for line in said if " unmapped memory of rank " in line]) == 4 * 6
    assert said[-1].endswith("of all ranks it maps 0 B now")


def test_memory_that_captured_calls_may_use_stays_mapped(world, memory):
    """A graph keeps the places that its calls were captured with."""

    def work(comm):
        kept, freed = placed(comm, memory), placed(comm, memory)
        for seed in range(4):
            reduced(comm, kept, seed)
            reduced(comm, freed, seed)
        comm._state.cuda.stream_order._replayed = True  # as by a captured call
        row = of(comm).mapped_address(*place(freed))
        memory.free(freed)
        of(comm)._find_freed(2)
        comm._state.fabric.allgather(b"", what="freed")
        found = [reduced(comm, kept, seed) for seed in range(3)]
        mapped = of(comm)._mapped
        assert len(mapped) == 2 * (comm.nranks - 1) and len(of(comm)._stale) == comm.nranks - 1
        again = placed(comm, memory)
        reduced(comm, again, 0)
        reduced(comm, again, 1)
        reduced(comm, again, 2)
        found.append(reduced(comm, again, 3))
        assert of(comm).mapped_address(*place(again)) not in (0, row)
        return found

    assert together(world([0, 1, 2]), work) == [[DIRECT] * 4] * 3


def test_nothing_is_registered_while_a_stream_is_captured(world, memory, monkeypatch):
    capturing = [False]
    monkeypatch.setattr(
        "tests.gpu.fake_gpus.Gpus.streamIsCapturing", lambda _self, _stream: capturing[0]
    )
    comms = world([0, 1, 2])
    buffers = [placed(comm, memory) for comm in comms]

    def counted(uses: int) -> set[int]:
        """How many registrations the ranks have after more uses of the same buffers."""
        for comm, buffer in zip(comms, buffers, strict=True):
            for _ in range(uses):
                extent = place(buffer)
                comm._state.cuda.counted_hello(extent, extent, (0, 0))
        return {len(of(comm)._own) for comm in comms}

    assert counted(1) == {0}
    capturing[0] = True
    assert counted(5) == {0}
    capturing[0] = False
    assert counted(1) == {1}


def test_a_captured_call_is_noted_while_another_thread_polls(world, memory, monkeypatch):
    """Else what its graph uses would be unmapped when nothing else runs."""
    [comm, other] = world([0, 1])
    together([comm, other], lambda comm: reduced(comm, placed(comm, memory), 0))
    monkeypatch.setattr("tests.gpu.fake_gpus.Gpus.streamIsCapturing", lambda *_: True)
    for each in (comm, other):
        assert not each._state.cuda.stream_order._replayed
        with of(each)._polling:
            of(each).poll()
        assert each._state.cuda.stream_order._replayed


def test_nothing_of_small_calls_is_counted(world, memory, monkeypatch):
    """Nor of lines, of calls with a root, of scans and copies."""
    comms = world([0, 1], protocol=None, debug=None)
    asked: list[int] = []

    def counted(at: int) -> int:
        asked.append(at)
        return 0

    monkeypatch.setattr(auto_register, "number_of", counted)
    monkeypatch.setattr(auto_register.AutoRegister, "poll", lambda _self: counted(0))

    def work(comm):
        n, rank = comm.nranks, comm.rank
        small, large = FakeBuffer(comm, 1000), FakeBuffer(comm, COUNT)
        there = FakeBuffer(comm, COUNT, symmetric=True)
        more = FakeBuffer(comm, n * COUNT)
        for _ in range(3):
            comm.all_reduce(small.array, protocol="Simple")
            comm.broadcast(large.array, protocol="Simple")
            comm.reduce(large.array, protocol="Simple")
            comm.gather(large.array, more.array if rank == 0 else None, protocol="Simple")
            comm.scan(large.array, protocol="Simple")
            comm.all_reduce(there.array, protocol="Simple")
        comm.all_reduce(large.array, protocol="LL")
        asked.clear()
        comm._state.fabric.allgather(b"", what="counted")
        comm.all_reduce(large.array, protocol="LL")
        comm.synchronize()

    together(comms, work)
    assert asked == []


def test_symmetric_memory_has_one_program_and_half_of_it_two(world, memory):
    def work(comm):
        symmetric = FakeBuffer(comm, COUNT, symmetric=True)
        whole = [reduced(comm, symmetric, seed) for seed in range(2)]
        plain, half = placed(comm, memory), []
        for seed in range(5):
            sent = numbers(comm, seed)
            symmetric._values()[:], plain._values()[:] = sent[comm.rank], -1
            comm.all_reduce(symmetric.array, plain.array)
            half.append(which(comm))
            plain.check(np.sum(sent, axis=0))
        return whole, clear(half)

    assert together(world([0, 1, 2]), work) == [([None] * 2, LATER)] * 3


@pytest.mark.parametrize("options", [{"register": False}, {"transport": "host"}], ids=str)
def test_ranks_without_it_stage_plain_memory_for_ever(world, memory, options):
    def work(comm):
        assert of(comm) is None
        buffer = placed(comm, memory)
        return [reduced(comm, buffer, seed) for seed in range(4)]

    assert together(world([0, 1, 2], **options), work) == [[None] * 4] * 3


def test_the_environment_turns_it_off(world, memory, monkeypatch):
    monkeypatch.setenv("RINGCOLL_REGISTER", "0")
    assert [of(comm) for comm in world([0, 1])] == [None] * 2


def test_children_register_for_themselves(world, memory):
    def work(comm):
        child = comm.split(int(comm.rank == 2))
        assert (of(child) is None) == (comm.rank == 2)  # alone
        if comm.rank == 2:
            return None
        child._state.start_trace()
        buffer = placed(child, memory)
        found = [reduced(child, buffer, seed) for seed in range(5)]
        child.close()
        return clear(found)

    assert together(world([0, 1, 2]), work) == [LATER, LATER, None]


def test_calls_of_other_counts_take_what_is_mapped(world, memory):
    """Prepared like the first, for counts of one power of two."""

    def work(comm):
        whole, found = placed(comm, memory), []
        for seed, count in enumerate((3000, 3000, 3000, 3000, 2999, 2500, 2048, 1500, 3000)):
            sent = numbers(comm, seed, count)
            whole._values()[:count] = sent[comm.rank]
            comm.all_reduce(ringcoll.from_pointer(*whole_of(whole, count), ordinal_of(comm)))
            found.append(which(comm))
            assert (whole._values()[:count] == np.sum(sent, axis=0)).all()
        return found[3:]

    assert together(world([0, 1, 2]), work) == [[DIRECT] * 6] * 3


def whole_of(buffer: Any, count: int) -> tuple[int, int, str]:
    """The first elements of a buffer."""
    return buffer.array.pointer, count, "int32"
