"""Which communicator carries CUDA tensors, and what barriers open: on CPU ranks.

The tensors lie on the CPU, and so do the ranks that are opened for them: launching a message waits
for its other end. All that is chosen before a launch is the real thing.
"""

from __future__ import annotations

import contextlib
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ringcoll.errors import MachineError
from ringcoll.torch import barriers
from ringcoll.torch import device as module
from ringcoll.torch.barriers import SETTLED
from ringcoll.torch.batch import Batch
from ringcoll.torch.device import Device
from ringcoll.torch.tensors import memory

GROUP = "cuda"


def _pair(low, high):
    return f"messages of GPUs/{low}/{high}"


class _Stream:
    def record_event(self):
        return mock.Mock()

    def wait_event(self, event):
        pass


class _AsyncStream:
    """Stands for a stream beside the caller's."""

    def __init__(self, where):
        self.stream, self.handle = _Stream(), 1

    def is_here(self):
        return True

    def device_guard(self):
        return contextlib.nullcontext()

    def wait_stream(self, stream):
        pass

    def record_event(self):
        return "event"

    def block(self, event, stream):
        assert event == "event"


class _Group:
    """A group that takes CPU tensors for CUDA tensors, and notes what it opens and launches."""

    def __init__(self, ranks=None, timeout=20.0):
        self.group = dist.new_group(ranks, timeout=timedelta(seconds=timeout))
        self.opened: list[str] = []
        self.launched: list[tuple[str | None, str]] = []
        self._keys: dict[object, str] = {}

    def __enter__(self):
        self._held = contextlib.ExitStack()
        here = contextlib.nullcontext
        fakes: dict[object, dict[str, object]] = {
            torch.cuda: {
                "stream": lambda stream: here(),
                "device": lambda where: here(),
                "current_stream": lambda where=None: _Stream(),
            },
            torch.Tensor: {"record_stream": lambda *_: None, "get_device": lambda _: 0},
            module: {"AsyncStream": _AsyncStream},
            Device: {
                "buffer": lambda _, tensor, name: memory(tensor, name, reduces=False),
                "async_options": lambda _: {},
                "check": lambda _: None,
            },
            Batch: {"_flush": self._noted(Batch._flush)},
        }
        for owner, patches in fakes.items():
            for name, fake in patches.items():
                self._held.enter_context(mock.patch.object(owner, name, fake))
        raw = mock.patch.object(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, create=True)
        self._held.enter_context(raw)
        if self.group is not dist.GroupMember.NON_GROUP_MEMBER:
            self._open, self.group._open = self.group._open, self._noting
            self.group._message = lambda name, tensors, peer, tag: self.group._post(
                name, tensors[0], peer
            )
        return self

    def __exit__(self, *_):
        if self.group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(self.group)
        self._held.close()

    def _noting(self, key, device, members, name, *, ordinal=None, poll=None, who=""):
        comm = self._open(key, "cpu", members, name, poll=poll, who=who)
        if device == "cuda":
            self.opened.append(key)
            self._keys[comm] = key
        return comm

    def _noted(self, flush):
        def noting(batch):
            key = self._keys.get(batch._device.comm)
            self.launched += [(key, name) for name, *_ in batch.posts]
            flush(batch)

        return noting

    def engine(self):
        """What any collective of CUDA tensors begins with."""
        tensor = SimpleNamespace(is_cpu=False, is_cuda=True, get_device=lambda: 0)
        return self.group._engine(tensor, "send")

    def send(self, value, peer):
        return dist.isend(torch.full((3,), float(value)), peer, group=self.group)

    def recv(self, peer):
        x = torch.zeros(3)
        return x, dist.irecv(x, peer, group=self.group)

    def batch(self, *parts):
        operations = [dist.P2POp(end, x, peer, group=self.group) for end, x, peer in parts]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    def swap(self, rank, peer):
        """A batch of two ranks."""
        x = torch.zeros(3)
        self.batch((dist.irecv, x, peer), (dist.isend, torch.full((3,), float(rank)), peer))
        assert x.tolist() == [float(peer)] * 3


def two_ranks_of_a_group_need_nobody_else(rank, n):
    with _Group() as fake:
        if rank == 0:
            fake.send(5, 1).wait()
            x, work = fake.recv(1)
            work.wait()
            assert x.tolist() == [6] * 3
        elif rank == 1:
            x, work = fake.recv(0)
            work.wait()
            assert x.tolist() == [5] * 3
            fake.send(6, 0).wait()
        assert fake.opened == ([_pair(0, 1)] if rank < 2 else [])


def oneself_needs_nobody_else(rank, n):
    with _Group() as fake:
        if rank == 2:
            x, received = fake.recv(2)
            sent = fake.send(7, 2)
            received.wait()
            sent.wait()
            assert x.tolist() == [7] * 3
            assert fake.opened == [_pair(2, 2)]


def a_ring_that_receives_first(rank, n):
    after, before = (rank + 1) % n, (rank - 1) % n
    with _Group() as fake:
        x, received = fake.recv(before)
        sent = fake.send(rank, after)
        # The stand-in of a launch waits for its other end, which the stream of a GPU would do.
        ends = [(received, before), (sent, after)]
        pairs = fake.group._pairs._by_peer
        for pair in pairs.values():
            pair.join()
        assert {*fake.opened} == {_pair(*sorted((rank, peer))) for peer in (before, after)}
        for work, peer in sorted(ends, key=lambda end: sorted((rank, end[1]))):
            pairs[peer].flush()
            work.wait()
        assert x.tolist() == [before] * 3


def what_began_between_two_stays_there(rank, n):
    with _Group() as fake:
        if rank == 0:
            fake.send(1, 1).wait()
        elif rank == 1:
            fake.recv(0)[1].wait()
        fake.engine()
        fake.launched.clear()
        for turn in range(2):
            peer = rank ^ 1 if turn == 0 else rank ^ 2
            fake.swap(rank, peer)
        mine = _pair(0, 1) if rank < 2 else GROUP
        ends = ["recv", "send"]
        assert fake.launched == [(key, end) for key in (mine, GROUP) for end in ends]


def what_was_posted_goes_before_the_group_opens(rank, n):
    """Else its other end, which receives first, would never come to open the group."""
    for batched in (False, True):
        with _Group() as fake:
            if rank == 0:
                work = fake.send(3, 1)
            elif rank == 1:
                x, work = fake.recv(0)
                work.wait()
                assert x.tolist() == [3] * 3
            if batched:
                fake.swap(rank, rank ^ 2)
            else:
                fake.engine()
            assert fake.opened == ([_pair(0, 1), GROUP] if rank < 2 else [GROUP])
            if rank == 0:
                assert work.event == "event"


def a_batch_as_the_first_call_opens_the_group(rank, n):
    with _Group() as fake:
        fake.swap(rank, rank ^ 1)
        assert fake.opened == [GROUP]
        assert fake.group._pairs is None


def batches_behind_a_barrier_may_be_of_some_ranks(rank, n):
    """Also where the barrier could open nothing: nobody has a GPU here."""
    with _Group() as fake:
        dist.barrier(group=fake.group)
        if rank == 0:
            x = torch.zeros(3)
            fake.batch((dist.irecv, x, 0), (dist.isend, torch.ones(3), 0))
            assert x.tolist() == [1] * 3
        if rank in (1, 2):
            fake.swap(rank, 3 - rank)
        assert fake.opened == [[_pair(0, 0)], [_pair(1, 2)], [_pair(1, 2)], []][rank]


def of_two_ranks_there_is_one_communicator(rank, n):
    with _Group([0, 1]) as fake:
        if rank == 0:
            fake.send(1, 1).wait()
        if rank == 1:
            fake.recv(0)[1].wait()
        assert fake.opened == ([GROUP] if rank < 2 else [])


def nobody_comes_to_open_the_pair(rank, n):
    with _Group(timeout=1.0) as fake:
        if rank == 0:
            work = fake.send(1, 1)
            with pytest.raises(RuntimeError, match=r" Timed out .*rank 1"):
                work.wait()
            with pytest.raises(RuntimeError, match=" Timed out "):
                work.wait()
            with pytest.raises(RuntimeError, match=r"(?s) closed .*out of step"):
                fake.engine()
        dist.barrier()  # the others stay in the group, and make no call of it


def the_other_end_of_the_pair_has_left_the_group(rank, n):
    with _Group() as fake:
        if rank == 0:
            work = fake.send(1, 1)
            why = " closed .*rank 1 destroyed its group, without making"
            with pytest.raises(RuntimeError, match=why):
                work.wait()


def a_group_ends_before_its_pair_is_open(rank, n):
    with _Group() as fake:
        work = fake.recv(rank ^ 1)[1] if rank == 0 else None
    if work is not None:
        assert not fake.group._pairs._by_peer[1]._thread.is_alive()
        with pytest.raises(RuntimeError, match=" closed "):
            work.wait()
    dist.barrier()


def _places(said):
    """What each rank says at a barrier, in turn."""
    left = list(said)
    return mock.patch.multiple(
        barriers, device_key=lambda ordinal: left.pop(0), device_of=lambda named, bound: 0
    )


def a_barrier_opens_what_every_rank_could(rank, n):
    for later in (False, True):
        with _Group() as fake, _places([f"GPU {rank}"]):
            work = dist.barrier(group=fake.group, async_op=later)
            if rank in (1, 2):
                fake.swap(rank, 3 - rank)  # behind the barrier, if it has not ended
                assert {key for key, _ in fake.launched} == {GROUP}
            if work is not None:
                work.wait()
            assert fake.opened == [GROUP]
            for _ in range(3):
                dist.barrier(group=fake.group)  # nothing is said any more


def barriers_ask_until_every_rank_has_a_device(rank, n):
    said = ["later" if rank == 1 else "GPU", "later" if rank == 2 else "GPU", f"GPU {rank}"]
    with _Group() as fake, _places(said):
        for turn in range(5):
            dist.barrier(group=fake.group)
            assert fake.opened == ([GROUP] if turn > 1 else [])


def barriers_do_not_ask_for_ever(rank, n):
    with _Group() as fake, _places(["later"] * 8):
        for _ in range(10):
            dist.barrier(group=fake.group)


def barriers_ask_once_where_it_can_never_be(rank, n):
    never = (["GPU"], [SETTLED if rank == 3 else f"GPU {rank}"])  # one for all; one has none
    for said in never:
        with _Group() as fake, _places(said):
            for _ in range(3):
                dist.barrier(group=fake.group)
            assert fake.opened == []


def a_barrier_asks_nothing_of_a_rank_that_is_open(rank, n):
    with _Group() as fake, _places([]):
        fake.engine()
        for _ in range(2):
            dist.barrier(group=fake.group)
        assert fake.opened == [GROUP]


def a_barrier_goes_well_where_gpus_cannot_be_opened(rank, n):
    def refused(key, device, *_, **__):
        raise dist.DistBackendError("ringcoll: MachineError: no link") from MachineError("no link")

    with _Group() as fake, _places([f"GPU {rank}"]):
        dist.all_reduce(torch.ones(1), group=fake.group)
        fake.group._open = refused
        dist.barrier(group=fake.group)
        dist.barrier(group=fake.group)
        assert fake.group._failure is None
