"""CUDA blocks of Simple spread over the multiprocessors: lanes in turns, idle ones between."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable, Iterator

import pytest

from tests.kernels.harness import CPU, KERNELS
from tests.kernels.stand_in import compiler, needs_compiler

# ziglang, where it is the only compiler, builds its libraries at first use.
pytestmark = [needs_compiler, pytest.mark.timeout(300)]

SOURCE = """
#define RC_RANKS 2
#define RC_WORDS 1
#define RC_LOCAL 1
#include <simple.cuh>
extern "C" void place(rc::u32 index, rc::u32 grid, rc::u32 blocks, rc::u32 replicas, rc::u32* to) {
    const rc::simple::Place here(index, grid, blocks, replicas);
    to[0] = here.block;
    to[1] = here.replica;
}
"""

Places = Callable[[int, int, int], list[tuple[int, int] | None]]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Places]:
    """The block and the replica of each CUDA block of a grid; None: it runs none."""
    folder = tmp_path_factory.mktemp("places")
    source, library = folder / "places.cpp", folder / "places.so"
    source.write_text(SOURCE, encoding="utf-8")
    words = [*(compiler() or ()), "-std=c++17", "-fPIC", "-shared", f"-I{CPU}", f"-I{KERNELS}"]
    words += [str(source), str(CPU / "machine.cpp"), "-o", str(library)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    function = ctypes.CDLL(str(library)).place
    found = (ctypes.c_uint32 * 2)()

    def each(grid: int, blocks: int, replicas: int) -> list[tuple[int, int] | None]:
        everyone: list[tuple[int, int] | None] = []
        for index in range(grid):
            function(index, grid, blocks, replicas, found)
            everyone.append(None if found[0] == blocks else (found[0], found[1]))
        return everyone

    yield each


@pytest.mark.parametrize(
    ("grid", "blocks", "replicas"),
    [
        (132, 1, 64),
        (128, 1, 64),
        (132, 2, 32),
        (132, 2, 64),
        (132, 3, 44),
        (132, 3, 11),
        (64, 1, 64),
        (7, 2, 3),
    ],
)
def test_each_replica_of_each_block_has_one_cuda_block(places, grid, blocks, replicas):
    found = [place for place in places(grid, blocks, replicas) if place is not None]
    assert sorted(found) == [(b, r) for b in range(blocks) for r in range(replicas)]


def test_lanes_take_turns(places):
    assert places(4, 2, 2) == [(0, 0), (1, 0), (0, 1), (1, 1)]


def test_idle_ones_lie_between(places):
    assert places(6, 1, 2) == [(0, 0), None, None, (0, 1), None, None]
    assert [place is None for place in places(132, 2, 32)] == [False, True] * 64 + [True] * 4
    assert [place is None for place in places(128, 1, 64)] == [False, True] * 64


def test_a_program_of_more_than_half_of_the_grid_leaves_none_out(places):
    assert places(5, 1, 3) == [(0, 0), (0, 1), (0, 2), None, None]


def test_a_rank_without_blocks_runs_none(places):
    assert places(2, 0, 64) == [None, None]
