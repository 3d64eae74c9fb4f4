"""Sends and receives by the kernel's own source on a CPU."""

from __future__ import annotations

import random
import time
from threading import Thread

import numpy as np
import pytest

from ringcoll.errors import LaunchRefused
from ringcoll.executors.cuda.point_to_point import (
    BLOCK_BYTES,
    Half,
    Message,
    direct_replicas,
    forms_of,
    longest_of_one_slice,
    pairs_text,
    shared_out,
    window_bytes,
)
from ringcoll.executors.cuda.workspace import Workspace
from tests.kernels.stand_in import needs_compiler
from tests.kernels.traffic import Traffic, side_by_side
from tests.kernels.world import World

pytestmark = needs_compiler

SIZES = [0, 1, 3, 16, 1000, 1024, 4096, 4097, 30_011]
"""Of a zone of 4 slices of 1 KiB: nothing, one slice, a window, many slices."""


@pytest.mark.parametrize("nranks", range(2, 17))
def test_messages_of_one_slice_are_alike_where_they_are_as_many_blocks_long(nranks):
    """So a rank keeps what a length decides by its blocks, whatever the other end does."""
    workspace, half = Workspace(nranks), Half(1, True, (Message(0, 0),))
    longest, chance = longest_of_one_slice(workspace), random.Random(nranks)
    assert 0 < longest % BLOCK_BYTES + longest <= window_bytes(workspace)
    ends = [end + shift for end in range(0, longest, BLOCK_BYTES) for shift in (0, 1)]
    for nbytes in (*ends, longest, *(chance.randrange(longest) for _ in range(200))):
        rounded = -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES
        assert forms_of(half, nbytes, workspace) == forms_of(half, rounded, workspace), nbytes
        assert direct_replicas(nbytes, workspace) == direct_replicas(rounded, workspace), nbytes
    assert forms_of(half, longest, workspace)[0].slices == 1
    assert forms_of(half, longest + BLOCK_BYTES, workspace)[0].slices == 2


def alone(world: World, traffic: Traffic, **how) -> None:
    """Every rank's launch by itself, all at once."""
    side_by_side([[traffic.ready(world, (rank,), **how)] for rank in range(world.nranks)])
    settled(world)
    traffic.check()


def merged(world: World, traffic: Traffic, **how) -> None:
    """One launch that carries all ranks."""
    side_by_side([[traffic.ready(world, range(world.nranks), **how)]])
    settled(world)
    traffic.check()


def settled(world: World) -> None:
    assert not any(world.reports())
    assert not any(world.broken(rank) for rank in range(world.nranks))


@pytest.mark.parametrize("run", [alone, merged])
@pytest.mark.parametrize("shift", [0, 1, 2, 4, 8])
def test_sizes_in_both_directions_at_once(run, shift):
    world = World(2)
    for seed, nbytes in enumerate(SIZES):
        nbytes -= nbytes % (shift or 1)
        run(world, Traffic([(0, 1, nbytes), (1, 0, nbytes + shift)], seed, shift))


@pytest.mark.parametrize("nranks", [1, 2, 3, 4])
@pytest.mark.parametrize("run", [alone, merged])
def test_a_ring(run, nranks):
    world = World(nranks)
    for seed, nbytes in enumerate((1, 5000, 0, 70)):
        ring = [(rank, (rank + 1) % nranks, nbytes) for rank in range(nranks)]
        run(world, Traffic(ring, seed))


@pytest.mark.parametrize("run", [alone, merged])
def test_everyone_to_everyone_with_lengths_of_their_own(run):
    rng = random.Random(4)
    world = World(3)
    for seed in range(4):
        pairs = [(a, b, rng.choice(SIZES)) for a in range(3) for b in range(3)]
        run(world, Traffic(pairs, seed, copies=seed % 2 == 0))


@pytest.mark.parametrize("run", [alone, merged])
@pytest.mark.parametrize("shift", [0, 1, 4, 16])
def test_large_messages_into_mapped_buffers_and_staged_ones(run, shift):
    """Of six slices in memory without halves, beside small messages and one another."""
    world = World(2, copied=64 << 10)
    for seed, nbytes in enumerate((4097, 30_011, 32_768, 200_000)):
        sizes = [nbytes, 70, nbytes + shift, nbytes, 0, nbytes]
        messages = [(number % 2, 1 - number % 2, n) for number, n in enumerate(sizes)]
        for mapped in ((), (0, 3), range(6)):
            run(world, Traffic(messages, seed, shift, mapped=mapped))


def test_a_direct_message_leaves_the_staging_memory_alone():
    world = World(2, copied=64 << 10)
    before = world.memory[: 2 * world.workspace.nbytes].copy()
    traffic = Traffic([(0, 1, 30_011)], mapped=(0,))
    alone(world, traffic)
    for rank in range(2):
        first = rank * world.workspace.nbytes + world.workspace.copies
        after = world.memory[first:][: world.workspace.copied]
        assert np.array_equal(after, before[first:][: world.workspace.copied])
        zones = rank * world.workspace.nbytes + world.workspace.zone(0)
        last = (rank + 1) * world.workspace.nbytes
        assert np.array_equal(world.memory[zones:last], before[zones:last])


@pytest.mark.parametrize("nranks", [2, 3])
def test_more_ranks_leave_the_memory_of_copy_engines_alone(nranks):
    """A third rank may still be copying from there what the receiver's last collective left."""
    world = World(nranks, copied=96 << 10)
    first = world.workspace.nbytes + world.workspace.copies
    before = world.memory[first:][: world.workspace.copied].copy()
    alone(world, Traffic([(0, 1, 30_011), (1, 0, 30_011)]))
    after = world.memory[first:][: world.workspace.copied]
    assert np.array_equal(before, after) == (nranks > 2)


def test_a_row_of_the_table_that_is_written_late():
    """The sender's launch was waiting while its rank made the symmetric memory."""
    world = World(2)
    traffic = Traffic([(0, 1, 30_011)], mapped=(0,))
    launches = [[traffic.ready(world, (rank,))] for rank in range(2)]
    table, traffic.table[:] = traffic.table.copy(), 0

    def write() -> None:
        time.sleep(0.3)
        traffic.table[:] = table

    writer = Thread(target=write)
    writer.start()
    side_by_side(launches)
    writer.join()
    settled(world)
    traffic.check()


def test_a_large_send_waits_for_its_receive():
    world = World(2, copied=64 << 10)
    large = window_bytes(world.workspace) + 1
    before = world.memory.copy()
    side_by_side([[Traffic([(0, 1, large)]).ready(world, (0,), timeout=0.2)]])
    assert world.reports()[0] is not None
    first = world.workspace.nbytes + world.workspace.copies
    length = world.workspace.copied
    assert np.array_equal(world.memory[first:][:length], before[first:][:length])


@pytest.mark.parametrize("blocks", [1, 2, 3, 8])
def test_replicas_whatever_each_end_has_of_blocks(blocks):
    """The receiver has as many blocks as replicas, the sender fewer; both take all of them."""
    world = World(2, zone=512 << 10)
    for seed, nbytes in enumerate((50_000, 300_001, 8_000)):
        traffic = Traffic([(0, 1, nbytes)], seed, shift=seed)
        first = traffic.ready(world, (0,), blocks=blocks, threads=3)
        second = traffic.ready(world, (1,), blocks=4, threads=3)
        assert second.blocks == (1 if nbytes < 16_000 else 4)
        assert first.blocks == min(blocks, second.blocks)
        side_by_side([[first], [second]])
        settled(world)
        traffic.check()


@pytest.mark.parametrize("run", [alone, merged])
def test_several_messages_of_a_pair_in_one_launch(run):
    world = World(2, zone=512 << 10)
    lengths = [3, 0, 200_000, 1, 70_001, 5, 90_000, 66_000]
    for seed in range(3):
        messages = [(number % 2, 1 - number % 2, n) for number, n in enumerate(lengths * 2)]
        run(world, Traffic(messages, seed), threads=3)


def test_messages_of_one_launch_and_of_several_are_the_same_calls():
    """One end makes all calls of a pair in one launch, the other each in its own."""
    world = World(2)
    for seed in range(3):
        lengths = [1000, 0, 9000, 1, 5000, 5001]
        traffic = Traffic([(0, 1, n) for n in lengths], seed)
        whole = traffic.ready(world, (1 - seed % 2,))
        single = [one.ready(world, (seed % 2,)) for one in traffic.apart()]
        side_by_side([[whole], single])
        settled(world)
        traffic.check()


def test_a_small_send_ends_before_its_receive_begins():
    world = World(2)
    small = window_bytes(world.workspace)
    traffic = Traffic([(0, 1, small)])
    side_by_side([[traffic.ready(world, (0,), timeout=5.0)]])
    traffic.sent[0][:], wanted = 0, traffic.sent[0].copy()
    side_by_side([[traffic.ready(world, (1,), timeout=5.0)]])
    settled(world)
    assert np.array_equal(traffic.arrived[0][1], wanted)


def test_the_same_launch_many_times():
    """As a captured graph: nothing that the host could renew belongs to one call alone."""
    world = World(3)
    traffic = Traffic([(a, b, n) for n in (5, 6000) for a in range(3) for b in range(3)])
    ready = [traffic.ready(world, (rank,), threads=3) for rank in range(3)]
    side_by_side([[one] * 30 for one in ready])
    settled(world)
    traffic.check()


@pytest.mark.parametrize("nranks", [2, 4])
def test_any_pattern_in_any_order(nranks):
    rng = random.Random(nranks)
    world = World(nranks)
    for round_ in range(12):
        messages = [
            (rng.randrange(nranks), rng.randrange(nranks), rng.choice(SIZES))
            for _ in range(rng.randrange(1, 9))
        ]
        run = rng.choice([alone, merged])
        run(world, Traffic(messages, round_, rng.randrange(3), copies=rng.random() < 0.5), blocks=9)


def test_too_many_halves_are_refused():
    world = World(2)
    halves = [Half(peer, False, (Message(0, 100_000),)) for peer in range(3)]
    assert shared_out(halves, world.workspace, 3, "rank 0") == [1, 1, 1]
    with pytest.raises(LaunchRefused, match=r"rank 0: 3 sends and receives .* 2 thread blocks"):
        shared_out(halves, world.workspace, 2, "rank 0")


def test_a_few_texts_serve_all_patterns():
    world = World(2)
    texts = {
        Traffic([(0, 1, nbytes)] * times).ready(world, (0,)).text
        for nbytes in SIZES
        for times in (1, 2, 3, 5)
    }
    assert texts == {pairs_text(2, 1, 256)}
