"""Virtual memory, such as torch's expandable segments, is registered piece by piece."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from ringcoll.cuda import quarantine
from ringcoll.cuda.driver import allocation_of
from ringcoll.cuda.memory import allocate
from ringcoll.cuda.virtual_memory import Piece, export, map_pieces, pieces_of
from ringcoll.errors import MachineError
from ringcoll.transports import vmm
from ringcoll.transports.peers import expose
from ringcoll.transports.vmm import export_pieces
from tests.gpu.stand_in import read, write
from tests.gpu.stand_in_driver import PIECE

pytest.importorskip("cupy")

SIZES = (PIECE, 2 * PIECE, PIECE)
INSIDE = PIECE - 100
"""Where an array begins that ends in the third piece."""
NBYTES = 2 * PIECE + 200


def descriptors():
    return len([*Path("/proc/self/fd").iterdir()])


def exposed(fabric, pointer, nbytes=NBYTES):
    return expose(fabric, fabric.rank, pointer, nbytes, None, what="register")


def exchanged(fabric, memory):
    """What every rank reads of every part's ends after its owner has written there."""
    own = memory.pointers[fabric.rank]
    write(own, bytes([fabric.rank + 1]))
    write(own + memory.nbytes - 1, bytes([fabric.rank + 11]))
    fabric.allgather(b"", what="written")
    seen = [(read(at, 1), read(at + memory.nbytes - 1, 1)) for at in memory.pointers]
    fabric.allgather(b"", what="read")
    return seen


def wanted(nranks):
    return [(bytes([r + 1]), bytes([r + 11])) for r in range(nranks)]


def test_pieces_are_the_mappings_around_a_range(stand_in):
    driver = stand_in(1).driver
    start = driver.make(*SIZES)
    first, second, third = Piece(start, PIECE), Piece(start + PIECE, 2 * PIECE), None
    third = Piece(start + 3 * PIECE, PIECE)
    assert pieces_of(start + INSIDE, NBYTES) == [first, second, third]
    assert pieces_of(start + INSIDE, 100) == [first]
    assert pieces_of(start + PIECE, 1) == [second]
    assert not allocation_of(start).exportable
    assert not driver.handles
    with pytest.raises(MachineError, match="cuMemRetainAllocationHandle"):
        pieces_of(start + INSIDE, 4 * PIECE)  # beyond its end
    with pytest.raises(MachineError, match="cuMemRetainAllocationHandle"):
        pieces_of(allocate(0, 1).pointer, 1)


def test_ranks_of_other_processes_map_it(apart, stand_in):
    driver = stand_in(3).driver
    starts = [driver.make(*SIZES) for _ in range(3)]
    before = descriptors()

    def work(fabric):
        memory = exposed(fabric, starts[fabric.rank] + INSIDE)
        assert memory is not None
        assert memory.pointers[fabric.rank] == starts[fabric.rank] + INSIDE
        peers = [p for r, p in enumerate(memory.pointers) if r != fabric.rank]
        assert not any(s <= p < s + sum(SIZES) for p in peers for s in starts)
        seen = exchanged(fabric, memory)
        memory.close()
        fabric.allgather(b"", what="closed")
        return seen

    assert apart(3, work) == [wanted(3)] * 3
    quarantine.sweep()
    assert sorted(driver.reserved) == sorted(starts)
    assert len(driver.mappings) == 9
    assert not driver.handles
    assert descriptors() == before
    assert {tuple(ordinals) for *_, ordinals in driver.granted} == {(0,), (1,), (2,)}


def test_beside_memory_of_another_kind(apart, stand_in):
    runtime = stand_in(2)
    start = runtime.driver.make(*SIZES)

    def work(fabric):
        own = allocate(fabric.rank, NBYTES) if fabric.rank else None
        memory = exposed(fabric, own.pointer if own else start)
        assert memory is not None
        seen = exchanged(fabric, memory)
        memory.close()
        fabric.allgather(b"", what="closed")
        return seen

    assert apart(2, work) == [wanted(2)] * 2
    quarantine.sweep()
    assert not +runtime.opened
    assert len(runtime.driver.mappings) == 3


@pytest.mark.parametrize("broken", ["export", "access", "size"])
def test_what_cannot_be_passed_stays_what_it_was(apart, stand_in, broken, monkeypatch, caplog):
    driver = stand_in(2).driver
    starts = [driver.make(*SIZES) for _ in range(2)]
    before = descriptors()
    if broken == "export":
        driver.exportable = False
    elif broken == "access":
        driver.locked.add(1)
    else:
        monkeypatch.setattr(
            "ringcoll.transports.vmm.pieces_of",
            lambda *range_: [Piece(p.start, p.nbytes + PIECE) for p in pieces_of(*range_)],
        )
    with caplog.at_level(logging.INFO, logger="ringcoll"):
        assert apart(2, lambda fabric: exposed(fabric, starts[fabric.rank])) == [None, None]
    assert "register: " in caplog.text
    assert sorted(driver.reserved) == sorted(starts)
    assert len(driver.mappings) == 6
    assert not driver.handles
    assert descriptors() == before


def test_other_devices_of_a_process_are_let_in(together, stand_in):
    driver = stand_in(2).driver
    starts = [driver.make(*SIZES) for _ in range(2)]

    def work(fabric):
        memory = exposed(fabric, starts[fabric.rank])
        return exchanged(fabric, memory), memory.pointers == tuple(starts)

    assert together(2, work) == [(wanted(2), True)] * 2
    assert sorted(driver.granted) == sorted(
        (piece.start, piece.nbytes, [1 - rank])
        for rank, start in enumerate(starts)
        for piece in pieces_of(start, NBYTES)
    )


def test_memory_of_a_pool_stays_what_it_was(together, stand_in, monkeypatch):
    """Other devices have no access to it, and nobody but its pool can give them some."""
    stand_in(2)
    monkeypatch.setattr(
        "ringcoll.transports.peers.allocation_of",
        lambda _pointer: type("Pooled", (), {"exportable": False}),
    )
    assert together(2, lambda f: exposed(f, allocate(f.rank, NBYTES).pointer)) == [None, None]


@pytest.mark.parametrize(
    "answer", [7, "ab", ["name", []], ["name", [0]], ["name", [1.5]], [3, [PIECE]], ["name", [8]]]
)
def test_a_malformed_offer_is_refused(answer, apart, stand_in, monkeypatch):
    driver = stand_in(2).driver
    starts = [driver.make(*SIZES) for _ in range(2)]
    monkeypatch.setattr(vmm.ExportedPieces, "encode", lambda _self: answer)
    assert apart(2, lambda fabric: exposed(fabric, starts[fabric.rank])) == [None, None]
    assert len(driver.mappings) == 6


def test_descriptors_of_an_offer_are_closed(stand_in):
    driver = stand_in(1).driver
    start, before = driver.make(*SIZES), descriptors()
    made = export_pieces(start + INSIDE, NBYTES)
    assert (made.sizes, made.offset) == (SIZES, INSIDE)
    made.close()
    assert descriptors() == before


def test_a_mapping_that_fails_half_way_is_undone(stand_in):
    driver = stand_in(1).driver
    pieces = pieces_of(driver.make(*SIZES), sum(SIZES))
    fds = [export(piece) for piece in pieces]
    with pytest.raises(MachineError, match="cuMemMap"):
        map_pieces(fds, (PIECE, 2 * PIECE, 2 * PIECE), 0)
    assert len(driver.mappings) == 3
    assert len(driver.reserved) == 1
    for fd in fds:
        os.close(fd)


@pytest.mark.gpu
def test_on_devices(scenario):
    """Kernels of every rank reach every rank's pieces."""
    assert scenario("virtual", 2) == [[True, [1, 2], [1, 2], True, False]] * 2


@pytest.mark.gpu
@pytest.mark.multi_gpu
def test_calls_on_it_are_zero_copy(scenario):
    assert scenario("registered_calls", 2) == [[True, [3.0]]] * 2
