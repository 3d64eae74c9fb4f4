"""What a call of copy engines gives to streams and events, by a CUDA that only takes notes."""

# Methods and constants are CuPy's, and so are their names.
# ruff: noqa: N802, N815

from __future__ import annotations

import struct
import types
from itertools import pairwise

import pytest

from ringcoll.arguments.calls import Call
from ringcoll.dtypes import dtype_of, op_of
from ringcoll.errors import ArgumentError
from ringcoll.executors.cuda.copy_launch import StreamPool, copy_launch
from ringcoll.executors.cuda.params import Addresses, Header
from ringcoll.executors.cuda.signature import OFFSET_BITS, copied_buffers, signature_text
from ringcoll.executors.cuda.workspace import Workspace
from ringcoll.launch import ALL_MAPPED
from tests.kernels.chosen import chosen

CALLER = 77
GATE, BESIDE = 1, 2
"""Functions: of gates, and of the kernel beside them."""


class Notes:
    """CUDA's runtime and driver, as far as a launch uses them."""

    streamNonBlocking, eventDisableTiming, memcpyDeviceToDevice = 1, 2, 3

    def __init__(self) -> None:
        self.made, self.capturing = 100, False
        self.destroyed: list[int] = []
        self.notes: list[tuple] = []
        self.streams: list[StreamPool] = []

    def take(self) -> StreamPool:
        self.streams.append(StreamPool(0))
        return self.streams[-1]

    def getDevice(self):
        return 0

    def setDevice(self, ordinal):
        assert ordinal == self.getDevice()

    def _make(self) -> int:
        self.made += 1
        return self.made

    def streamCreateWithPriority(self, flags, priority):
        assert flags == self.streamNonBlocking
        assert priority < 0
        return self._make()

    def eventCreateWithFlags(self, flags):
        assert flags == self.eventDisableTiming
        return self._make()

    def streamDestroy(self, stream):
        self.destroyed.append(stream)

    eventDestroy = streamDestroy

    def streamIsCapturing(self, stream):
        assert stream == CALLER
        return self.capturing

    def eventRecord(self, event, stream):
        self.notes.append(("record", stream, event))

    def streamWaitEvent(self, stream, event, flags):
        assert flags == 0
        self.notes.append(("after", stream, event))

    def memcpyAsync(self, dst, src, nbytes, kind, stream):
        assert kind == self.memcpyDeviceToDevice
        self.notes.append(("copy", stream, dst, src, nbytes))

    def launchKernel(self, function, *rest):
        grid, stream = rest[:3], rest[7]
        self.notes.append(("gate" if function == GATE else "beside", stream, grid))


@pytest.fixture
def cuda(monkeypatch):
    pytest.importorskip("cupy")
    notes = Notes()
    monkeypatch.setattr("cupy.cuda.runtime", notes)
    monkeypatch.setattr("cupy.cuda.driver", types.SimpleNamespace(launchKernel=notes.launchKernel))
    yield notes
    for streams in notes.streams:
        streams.close()


def call_of(name: str, *, in_place: bool = False) -> Call:
    op = op_of("sum") if "reduce" in name else None
    return Call(name, 0, None, None, 1000, dtype_of("float32"), op, 0, in_place, 4000)


def prepared(cuda, name, ranks=(0,), nranks=2, *, streams=None, in_place=False, **options):
    """A call of 1000 elements of 4 bytes a segment; rank r has its buffers at 10 + r and 20 + r."""
    workspace, call = Workspace(nranks), call_of(name, in_place=in_place)
    choice = chosen(call, nranks, mapped=ALL_MAPPED, engine="copy", **options)
    send, recv = (tuple((10 * k + r) << 32 for r in range(nranks)) for k in (1, 2))
    if in_place:
        send = tuple(at + 4000 * rank for rank, at in enumerate(recv))
    workspaces = tuple(rank << 40 for rank in range(1, nranks + 1))
    local = [
        Addresses(rank, workspaces, 0, user=(send[rank], recv[rank]), peer_buffers=(send, recv))
        for rank in ranks
    ]
    header = Header(60.0, 1, False, True, choice.grid.replicas)
    return copy_launch(
        choice,
        call,
        header,
        workspace,
        local,
        lambda text: GATE if "copy_gates.cuh" in text else BESIDE,
        cuda.take() if streams is None else streams,
    )


def test_one_lane_goes_to_the_callers_stream(cuda):
    prepared(cuda, "all_gather", nranks=3, in_place=True).launch(CALLER)
    kinds = [note[0] for note in cuda.notes]
    assert kinds == ["gate", "copy", "copy", "gate"]
    assert {note[1] for note in cuda.notes} == {CALLER}
    copies = [note[2:] for note in cuda.notes if note[0] == "copy"]
    assert copies == [(21 << 32, 20 << 32, 4000), (22 << 32, 20 << 32, 4000)]


def test_what_nobody_waits_for_is_copied_aside(cuda):
    prepared(cuda, "all_gather", nranks=3).launch(CALLER)
    copies = {note[2]: note[1] for note in cuda.notes if note[0] == "copy"}
    assert copies.pop(20 << 32) != CALLER
    assert copies == {21 << 32: CALLER, 22 << 32: CALLER}


def test_streams_part_from_the_callers_and_join_it(cuda):
    launch = prepared(cuda, "all_reduce", slices=4)
    launch.launch(CALLER)
    notes = cuda.notes
    lanes = {note[1] for note in notes} - {CALLER}
    assert len(lanes) == 2  # of the copies that gather, and of the kernel
    rows = [k for k, note in enumerate(notes) if note[0] in ("gate", "copy", "beside")]
    first, last = rows[0], rows[-1]
    assert notes[first][:2] == notes[last][:2] == ("gate", CALLER)
    beside = [k for k in rows if notes[k][0] == "beside"]
    assert beside == [rows[1]], "a kernel that runs holds up nobody, so it comes first"
    for lane in lanes:
        mine = [k for k in rows if notes[k][1] == lane]
        forked = [k for k, note in enumerate(notes) if note[:2] == ("after", lane)]
        assert len(forked) == 1
        assert notes[forked[0] - 1][0] in ("record", "after")
        event = notes[forked[0]][2]
        recorded = notes.index(("record", CALLER, event))
        assert first < recorded < forked[0] < mine[0]
        (joined,) = [k for k, note in enumerate(notes) if note[:2] == ("record", lane)]
        assert mine[-1] < joined
        assert notes[joined + 1] == ("after", CALLER, notes[joined][2])
        assert joined + 1 < last


def test_streams_are_made_once_and_not_by_a_launch(cuda):
    streams = cuda.take()
    launches = [prepared(cuda, "all_reduce", streams=streams, slices=s) for s in (2, 4)]
    made = cuda.made
    for launch in launches:
        launch.launch(CALLER)
        launch.launch(CALLER)
    assert cuda.made == made == 104  # two streams, each with its event
    streams.close()
    assert sorted(cuda.destroyed) == [101, 102, 103, 104]
    streams.close()
    assert len(cuda.destroyed) == 4


def test_a_captured_call_of_ranks_that_share_a_gpu_has_one_stream(cuda):
    launch = prepared(cuda, "all_gather", ranks=(0, 1))
    launch.launch(CALLER)
    eager = list(cuda.notes)
    assert len({note[1] for note in eager}) == 3  # a lane a rank, and one aside
    cuda.notes.clear()
    cuda.capturing = True
    launch.launch(CALLER)
    work = ("gate", "copy")
    flat = [note for note in eager if note[0] in work]
    assert [(n[0], *n[2:]) for n in cuda.notes] == [(n[0], *n[2:]) for n in flat]
    assert {note[1] for note in cuda.notes} == {CALLER}


def test_ranks_that_share_a_gpu_say_hello_before_they_wait(cuda):
    prepared(cuda, "all_gather", ranks=(0, 1)).launch(CALLER)
    assert [note[:2] for note in cuda.notes[:4]] == [("gate", CALLER)] * 4


def test_a_capture_that_could_not_be_replayed_is_refused_before_anything_is_enqueued(cuda):
    launch = prepared(cuda, "all_reduce", ranks=(0, 1))
    cuda.capturing = True
    with pytest.raises(ArgumentError, match=r"all_reduce on rank 0: engine='copy'.*captured"):
        launch.launch(CALLER)
    assert not cuda.notes


def test_the_kernel_carries_every_rank_of_the_gpu(cuda):
    prepared(cuda, "all_reduce", ranks=(0, 1)).launch(CALLER)
    (beside,) = [note for note in cuda.notes if note[0] == "beside"]
    assert beside[2][1] == 2


def test_a_thread_of_several_gpus_serves_them_slice_by_slice(cuda):
    streams, options = cuda.take(), {"algorithm": "chain", "slices": 5}
    whole, parted = (prepared(cuda, "broadcast", streams=streams, **options) for _ in range(2))
    whole.launch(CALLER)
    notes = list(cuda.notes)
    cuda.notes.clear()
    sizes = []
    for part in parted.parts(CALLER):
        part()
        sizes.append(len(cuda.notes))
    assert cuda.notes == notes
    # Gates that enter, one slice after the other, and what leaves.
    assert len(sizes) == 1 + 5 + 1
    assert sizes == sorted(sizes)
    assert max(b - a for a, b in pairwise(sizes[:-1])) <= 4


def terms(known_at: int, **options) -> str:
    call = call_of("all_gather")
    choice = chosen(call, 2, mapped=ALL_MAPPED, **options)
    send, recv = copied_buffers(choice, (3 << OFFSET_BITS | 64, 5 << OFFSET_BITS | known_at))
    assert send == 0, "nobody reads a peer's sendbuf"
    return signature_text(choice, call, (send, recv))


def test_ranks_agree_on_where_their_peers_copy_to():
    assert terms(128, engine="copy") != terms(256, engine="copy")
    assert "recvbuf=byte 128 of symmetric array 5" in terms(128, engine="copy")
    assert terms(128, protocol="Simple") == terms(256, protocol="Simple")
    assert "engine" not in terms(128)


def test_the_parameter_of_a_gate_is_that_of_every_kernel(cuda):
    from ringcoll.executors.cuda.copy_gates import CopyGate, gate_body
    from ringcoll.executors.cuda.params import pack

    at = Addresses(1, (1 << 40, 2 << 40), 9)
    body = gate_body(CopyGate(0, at, (5, 6, 7)), 2)
    packed = pack(body, Header(60.0, 1, True, False, 3), 4096, [at])
    assert struct.unpack_from("<3Q", packed, len(packed) - 8 * len(body.words[0])) == (5, 6, 7)
    assert f"#define RC_WORDS {len(body.words[0])}" in body.text
