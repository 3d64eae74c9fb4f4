"""How a call of device memory is cut: every byte once, in order, in slots that are large enough."""

from dataclasses import replace

import numpy as np
import pytest

from ringcoll.arguments.calls import Call
from ringcoll.collectives import COLLECTIVES, Collective
from ringcoll.dtypes import dtype_of
from ringcoll.executors.cuda_nodes.pieces import ALIGN, cut, piece_of

MOST = 1 << 12


def call_of(name, rank, nranks, count, dtype, counts=(), displs=()):
    """A call, its arrays and how many bytes each of them has."""
    row = dtype_of(dtype)
    collective = Collective(name, nranks, root=nranks - 1)
    arrays = []
    for side in ("INPUT", "OUTPUT"):
        width = collective.segments(side)
        size = width * count
        if counts:
            size = sum(counts) if width > 1 else counts[rank]
            if displs and width > 1:
                size = max(at + length for at, length in zip(displs, counts, strict=True))
        arrays.append(np.zeros(size, row.numpy) if collective.has(side, rank) else None)
    send, recv = arrays
    call = Call(name, rank, send, recv, max(counts, default=count), row, root=nranks - 1)
    return replace(call, counts=counts, displs=displs)


def covered(array, moves):
    """How often each byte of an array is moved."""
    times = np.zeros(array.nbytes, int)
    for move in moves:
        start = move.device - array.ctypes.data
        assert 0 <= start <= start + move.nbytes <= array.nbytes
        times[start : start + move.nbytes] += 1
    return times


def pieces_of(call, nranks):
    slot = np.zeros(2 * MOST + 2 * ALIGN, np.uint8)
    found = [piece_of(call, nranks, *ends, slot) for ends in cut(call, nranks, MOST)]
    for piece in found:
        for array, moves in ((piece.call.send, piece.to_host), (piece.call.recv, piece.to_device)):
            if array is None:
                assert moves == ()
                continue
            # The call's array is what is moved, packed in the slot.
            assert sum(move.nbytes for move in moves) == array.nbytes
            start = array.ctypes.data - slot.ctypes.data if array.size else 0
            assert 0 <= start <= start + array.nbytes <= slot.nbytes
            assert all(
                start <= m.offset <= m.offset + m.nbytes <= start + array.nbytes for m in moves
            )
        both = (piece.call.send, piece.call.recv)
        if all(array is not None and array.size for array in both):
            assert not np.may_share_memory(*both)
    return found


@pytest.mark.parametrize("dtype", ["int8", "bfloat16", "complex128"])
@pytest.mark.parametrize("name", [name for name in COLLECTIVES if name not in ("send", "barrier")])
def test_every_byte_goes_once(name, dtype, monkeypatch):
    monkeypatch.setattr("ringcoll.executors.cuda_nodes.pieces._SHORT", 1 << 10)
    for nranks in (2, 3, 5):
        for count in (0, 1, 63, 3001):
            numbers = set()
            for rank in range(nranks):
                call = call_of(name, rank, nranks, count, dtype)
                found = pieces_of(call, nranks)
                numbers.add(
                    tuple((p.call.count, p.call.nbytes, p.call.custom_signature) for p in found)
                )
                for array, side in ((call.send, "to_host"), (call.recv, "to_device")):
                    if array is not None:
                        moves = [move for piece in found for move in getattr(piece, side)]
                        assert (covered(array, moves) == 1).all()
            # All ranks cut alike, and say so alike.
            assert len(numbers) == 1


def test_counts_of_each_rank_and_gaps_between_them(monkeypatch):
    monkeypatch.setattr("ringcoll.executors.cuda_nodes.pieces._SHORT", 1 << 10)
    counts, displs = (0, 3000, 17), (4, 20, 3100)
    for rank in range(3):
        call = call_of("all_gather", rank, 3, 0, "float32", counts, displs)
        found = pieces_of(call, 3)
        times = covered(call.recv, [move for piece in found for move in piece.to_device]).reshape(
            -1, 4
        )
        wanted = np.zeros(len(times), int)
        for at, length in zip(displs, counts, strict=True):
            wanted[at : at + length] = 1
        assert (times == wanted[:, None]).all()
        assert [piece.call.counts for piece in found][-1][0] == 0


def test_a_barrier_is_one_piece():
    call = Call("barrier", 0, None, None, 0, dtype_of("uint8"))
    (piece,) = pieces_of(call, 4)
    assert piece.to_host == piece.to_device == ()
    assert piece.call.signature() == call.signature()
