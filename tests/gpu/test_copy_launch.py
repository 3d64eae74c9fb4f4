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
from ringcoll.errors import ArgumentError, LaunchRefused
from ringcoll.executors.cuda.copy_launch import StreamPool, copy_launch
from ringcoll.executors.cuda.params import Addresses, Header, given_address
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
        self.captured: set[int] = set()  # streams of an open capture
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
        return self.capturing if stream == CALLER else stream in self.captured

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


def prepared(
    cuda,
    name,
    ranks=(0,),
    nranks=2,
    *,
    streams=None,
    in_place=False,
    given=False,
    mapped=ALL_MAPPED,
    **options,
):
    """A call of 1000 elements of 4 bytes a segment; rank r has its buffers at 10 + r and 20 + r.

    With ``given`` the launch is given their addresses.
    """
    workspace, call = Workspace(nranks), call_of(name, in_place=in_place)
    choice = chosen(call, nranks, mapped=mapped, engine="copy", **options)
    send, recv = (tuple((10 * k + r) << 32 for r in range(nranks)) for k in (1, 2))
    number = given_address if given else lambda address, _: address
    if in_place:
        send = tuple(at + 4000 * rank for rank, at in enumerate(recv))
    workspaces = tuple(rank << 40 for rank in range(1, nranks + 1))
    local = [
        Addresses(
            rank,
            workspaces,
            0,
            user=(number(send[rank], 0), number(recv[rank], 1)),
            peer_buffers=(send, recv) if mapped else ((), ()),
        )
        for rank in ranks
    ]
    header = Header(60.0, 1, False, True, choice.grid.replicas)
    return copy_launch(
        choice,
        call,
        header,
        workspace,
        local,
        lambda text: GATE,
        lambda body, made: made(body, BESIDE),
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


def happens_before(notes) -> list[set[int]]:
    """For each note those that end before it begins: of its stream, and by events."""
    before: list[set[int]] = []
    last: dict[int, int] = {}
    recorded: dict[int, set[int]] = {}
    ordered: dict[int, set[int]] = {}
    for number, note in enumerate(notes):
        stream = note[1]
        known = ordered.setdefault(stream, set())
        if stream in last:
            known |= before[last[stream]] | {last[stream]}
        if note[0] == "record":
            recorded[note[2]] = set(known)
        elif note[0] == "after":
            known |= recorded[note[2]]
        before.append(set(known))
        last[stream] = number
    return before


def test_streams_part_from_the_callers_and_join_it(cuda):
    launch = prepared(cuda, "all_reduce", slices=4)
    launch.launch(CALLER)
    notes = cuda.notes
    rows = [k for k, note in enumerate(notes) if note[0] in ("gate", "copy", "beside")]
    first, last = rows[0], rows[-1]
    assert notes[first][:2] == notes[last][:2] == ("gate", CALLER)
    beside = [k for k in rows if notes[k][0] == "beside"]
    assert beside == [rows[1]], "a kernel that runs holds up nobody, so it comes first"
    copies = {notes[k][1] for k in rows if notes[k][0] == "copy"}
    assert len(copies) == 2, "a lane of the copies that scatter, and one of those that gather"
    before = happens_before(notes)
    for k in rows[1:-1]:
        assert first in before[k], "nothing begins before all ranks have entered"
        assert k in before[last], "nothing is left when the call ends"


def test_no_gate_stands_between_two_copies_of_a_lane(cuda):
    prepared(cuda, "all_reduce", slices=4).launch(CALLER)
    notes = cuda.notes
    before = happens_before(notes)
    gates = [k for k, note in enumerate(notes) if note[0] == "gate"]
    for lane in {note[1] for note in notes if note[0] == "copy"}:
        copies = [k for k, note in enumerate(notes) if note[:2] == ("copy", lane)]
        assert len(copies) == 4
        for one, two in pairwise(copies):
            between = [k for k in gates if one < k < two and notes[k][1] == lane]
            assert not between
            # What signals the first copy begins after it; what the second waits for ends before.
            assert any(one in before[k] for k in gates)
            waits = [k for k in gates if k in before[two] and k not in before[one]]
            signals = [k for k in gates if one in before[k] and two not in before[k]]
            # The lane that scatters says what has come, the one that gathers waits for sums.
            assert signals if lane == CALLER else waits


def test_addresses_are_those_of_the_launch(cuda):
    launch = prepared(cuda, "all_reduce", slices=2, mapped=frozenset(), given=True)
    moved = []
    for send, recv in ((1 << 50, 2 << 50), (5 << 50, 3 << 50)):
        cuda.notes.clear()
        launch.launch(CALLER, (send, recv, 0, 0))
        pairs = [note[2:4] for note in cuda.notes if note[0] == "copy"]
        assert not {at for pair in pairs for at in pair if 10 << 32 <= at < 30 << 32}
        moved.append([at % (1 << 50) for _, at in pairs])
    assert moved[0] == moved[1]
    assert moved[0][0] == 2000, "from here on lies what the peer sums"


def test_streams_are_made_once_and_not_by_a_launch(cuda):
    streams = cuda.take()
    launches = [prepared(cuda, "all_reduce", streams=streams, slices=s) for s in (2, 4)]
    made = cuda.made
    for launch in launches:
        launch.launch(CALLER)
        launch.launch(CALLER)
    assert cuda.made == made
    streams.close()
    assert sorted(cuda.destroyed) == list(range(101, made + 1))
    streams.close()
    assert len(cuda.destroyed) == made - 100


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


def test_a_call_beside_an_open_capture_is_refused_before_anything_is_enqueued(cuda):
    """Copies of an eager call on streams of a capture would end that capture by an error."""
    launch = prepared(cuda, "all_reduce")
    cuda.capturing = True
    launch.launch(CALLER)
    cuda.captured = {note[1] for note in cuda.notes} - {CALLER}
    cuda.notes.clear()
    launch.launch(CALLER)  # in the same capture
    assert cuda.notes
    cuda.notes.clear()
    cuda.capturing = False
    with pytest.raises(LaunchRefused, match=r"all_reduce on rank 0: .*end that capture first"):
        launch.launch(CALLER)
    assert not cuda.notes
    cuda.captured = set()
    launch.launch(CALLER)
    assert cuda.notes


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


def test_ranks_agree_on_which_scratch_copies_go_through():
    """Else one rank would copy from where no other has written."""
    call = call_of("all_reduce")
    staged = chosen(call, 2, mapped=frozenset(), engine="copy")
    texts = [signature_text(staged, call, (0, 0), large_scratch=large) for large in (False, True)]
    assert texts[1] == texts[0].replace(" engine=copy", " engine=copy scratch=large")
    assert texts[1] != texts[0]
    call = call_of("all_gather")
    direct = chosen(call, 2, mapped=ALL_MAPPED, engine="copy")
    assert not direct.program.scratch
    texts = [signature_text(direct, call, (0, 0), large_scratch=large) for large in (False, True)]
    assert texts[0] == texts[1], "a call without SCRATCH is the same with any"


def test_the_parameter_of_a_gate_is_that_of_every_kernel(cuda):
    from ringcoll.executors.cuda.copy_gates import CopyGate, gate_body
    from ringcoll.executors.cuda.params import pack

    at = Addresses(1, (1 << 40, 2 << 40), 9)
    body = gate_body(CopyGate(0, at, (5, 6, 7)), 2)
    packed = pack(body, Header(60.0, 1, True, False, 3), 4096, [at])
    assert struct.unpack_from("<3Q", packed, len(packed) - 8 * len(body.words[0])) == (5, 6, 7)
    assert f"#define RC_WORDS {len(body.words[0])}" in body.text
