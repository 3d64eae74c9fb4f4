"""A group of torch.distributed: its communicators, its messages and its end.

The first call on tensors of a kind of device opens its communicator; all ranks of the group take
part, under a prefix of the store that only they use. A barrier opens the one of GPU ranks too, if
each rank has a GPU. Messages between two ranks open one of these two only.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ringcoll.bootstrap import ending
from ringcoll.bootstrap.contract import named
from ringcoll.bootstrap.store import StoreBootstrap
from ringcoll.communicator.cpu.rank_calls import without_kernel_options
from ringcoll.communicator.public import Communicator
from ringcoll.communicator.setup.start import communicator_on
from ringcoll.config import Config, starting
from ringcoll.errors import ArgumentError, ArgumentTypeError, Error, UsageError
from ringcoll.fabric import open_fabric
from ringcoll.torch.backend import Backend, Blocks
from ringcoll.torch.barriers import Barriers
from ringcoll.torch.device import Device
from ringcoll.torch.failures import as_torch_error, closed, desynchronizes, prefixed, raise_from
from ringcoll.torch.host import Host
from ringcoll.torch.lifetime import EXIT_GRACE, PolledStore, leave_at_exit, reachable
from ringcoll.torch.messages import Messages, pair_prefix
from ringcoll.torch.point_to_point import Pairs, in_batch
from ringcoll.torch.presence import Presence
from ringcoll.torch.tensors import check_writable, single, wrong_device
from ringcoll.torch.tracing import compile_disabled, profiler, profiler_event

__all__ = ["MAX_SMS", "ProcessGroupRingcoll"]

MAX_SMS = 32
"""``max_sms`` of a group's calls on GPUs unless an option sets it: training computes meanwhile. A
step of a GPT by FSDP2 on 2 H200 took 121 ms without a limit, 109 with 32, 114 with 48 and 110 by
NCCL."""

_LEFT, _LEFT_RANK = "left", "left/{}"  # keys of the store: whether a rank has left, and which


@compile_disabled
class ProcessGroupRingcoll(Barriers):
    """The ranks of a group.

    Args:
        store: torch's, shared by all ranks.
        rank: this rank in the group.
        size: the number of ranks.
        timeout: of every wait.
        given: options of :class:`ringcoll.Config` and settings of ``init`` by their names, or a
            Config; None: those of the environment.

    """

    __slots__ = ("_device", "_failure", "_pairs")  # that the bridge reads

    def __init__(
        self, store: Any, rank: int, size: int, timeout: timedelta, given: object = None
    ) -> None:
        super().__init__(rank, size)
        self._rank, self._nranks, self._timeout = rank, size, timeout
        self._config, self._options = _options(given)
        # A store outlives groups, and torch reuses their names, also for other ranks. So each rank
        # counts the groups of one size: all members of a group reach the same number.
        generation = store.add(f"ringcoll/group/{size}/{rank}", 1)
        self._store = dist.PrefixStore(f"ringcoll/{size}/{generation}", store)
        self._name, self._desc = "", "undefined"
        self._backend = Backend(rank, size, timeout, self._allocate)
        self._failure: BaseException | None = None
        self._ended = ""
        self._opening = threading.RLock()
        self._host: Host | None = None
        self._device: Device | None = None
        self._blocks: dict[str, Blocks] = {}
        self._messages: Messages | None = None
        self._pairs: Pairs | None = None
        self._gpus_decided = size == 1  # one rank opens it alone
        self._process = os.getpid()
        self._presence = Presence(self._store, rank) if size > 1 else None
        leave_at_exit(self)

    # -- engines --------------------------------------------------------------------------------

    def _engine(self, tensor: Any, name: str) -> Any:
        if self._failure is not None:
            raise self._after_failure()
        device = self._device
        if device is not None and self._pairs is None and tensor.get_device() == device.ordinal:
            return device
        if tensor.is_cpu:
            return self._host or self._open_host(name)
        if tensor.is_cuda:
            if self._pairs is not None:
                self._pairs.flush()
            ordinal = tensor.get_device()
            device = self._device or self._open_device(ordinal, name)
            if ordinal != device.ordinal:  # kept calls of its kind would take it
                raise wrong_device(tensor, f"cuda:{device.ordinal}")
            return device
        raise ArgumentTypeError(
            f"ringcoll: cannot use a tensor on {tensor.device}: pass a cpu or cuda tensor"
        )

    def start_sum(
        self, address: int, count: int, kind: torch.dtype, ordinal: int
    ) -> tuple[int, ...] | None:
        """Start an all_reduce for the bridge: a sum of a dense tensor, in place, asynchronous.

        Args:
            address: of the tensor's elements.
            count: of them.
            kind: what they are.
            ordinal: the number of the tensor's GPU, -1 on the CPU.

        Returns:
            The id, as ``torch.Stream`` has it, of the stream behind whose work the sum is there;
            None if nothing was done and ``allreduce`` is to make the call.

        """
        device = self._device
        if device is None or self._failure is not None or self._pairs is not None:
            return None
        return device.start_sum(address, count, kind) if ordinal == device.ordinal else None

    def keep_started(self, tensor: Any) -> None:
        """Keep the memory of a tensor for which :meth:`start_sum` has raised: it may run."""
        if self._device is not None:
            self._device.keep(tensor)

    def check_started(self) -> None:
        """Raise the error that a kernel has reported, if any: the bridge's waits do."""
        if self._device is not None:
            self._device.check()

    def _open_host(self, name: str) -> Host:
        with self._opening:
            if self._host is None:
                comm = self._open("cpu", "cpu", range(self._nranks), name)
                self._host = Host(comm, self._failed)
            return self._host

    def _open_device(self, ordinal: int, name: str) -> Device:
        self._after_barrier()
        return self._open_now(ordinal, name)

    def _open_now(self, ordinal: int, name: str) -> Device:
        with self._opening:
            if self._device is None:
                if self._pairs is not None:
                    self._pairs.flush()  # torch/point_to_point.py says why first
                comm = self._open("cuda", "cuda", range(self._nranks), name, ordinal=ordinal)
                device = Device(comm, ordinal, self._failed)
                device.batch.launch = self._launch
                self._device = device
            return self._device

    def _open(
        self,
        key: str,
        device: str,
        members: Sequence[int],
        name: str,
        *,
        ordinal: int | None = None,
        poll: Callable[[], None] | None = None,
        who: str = "",
    ) -> Communicator:
        """Open a communicator for a call ``name``; collective among ``members``, by ``key``.

        With ``poll``, which is called while it waits, the others may take as long as they like.
        ``who`` prefixes its errors if its ranks are not the group's.
        """
        self._usable()
        seconds = self._timeout.total_seconds()
        try:
            config, settings = starting(self._config, seconds, device, self._options)
            if device == "cpu":  # options of a group are for its tensors on GPUs too
                config = without_kernel_options(config)
            elif config.max_sms is None:
                config = replace(config, max_sms=MAX_SMS)
            store = PolledStore(dist.PrefixStore(key, self._store), poll or self._usable)
            patience = seconds if poll is None else math.inf
            where = StoreBootstrap(store, members.index(self._rank), len(members), patience)
            where.left = partial(self._left, members, name)
            if who:  # messages alone
                settings = replace(settings, register=False)
            with ending(where):
                fabric = open_fabric(where, timeout=seconds, node=settings.node)
            return communicator_on(fabric, config, settings, ordinal)
        except Error as error:
            raise_from(self._failed(prefixed(error, who)), error)
        finally:
            if self._presence is not None:
                self._presence.forget()

    def _open_messages(self) -> Messages:
        with self._opening:
            if self._messages is None:
                self._messages = Messages(
                    self._rank,
                    self._nranks,
                    self._timeout.total_seconds(),
                    self._open_pair,
                    self._failed,
                )
            return self._messages

    def _open_pair(self, source: int, dest: int, poll: Callable[[], None]) -> Communicator:
        key, who = f"messages/{source}/{dest}", pair_prefix(source, dest)
        call = "send" if source == self._rank else "recv"
        return self._open(key, "cpu", (source, dest), call, poll=poll, who=who)

    def _open_two(self, low: int, high: int, ordinal: int) -> Device:
        """Open GPU ranks for messages between two ranks, or of one with itself."""
        key, who = f"messages of GPUs/{low}/{high}", pair_prefix(low, high)
        members = (low,) if low == high else (low, high)
        comm = self._open(key, "cuda", members, "send or recv", ordinal=ordinal, who=who)
        return Device(comm, ordinal, lambda error: self._failed(prefixed(error, who)))

    # -- what goes wrong ------------------------------------------------------------------------

    def _failed(self, error: BaseException) -> BaseException:
        """Record an error that leaves the ranks out of step; returns the one to raise."""
        error = prefixed(error, self._who())
        if isinstance(error, Exception) and desynchronizes(error) and self._failure is None:
            self._failure = error
        return as_torch_error(error)

    def _who(self) -> str:
        """The prefix of errors in a group whose ranks are not those of the default group."""
        try:
            ranks = dist.get_process_group_ranks(self)
        except (KeyError, RuntimeError, ValueError):  # not registered with torch, or no more
            return ""
        plain = ranks == list(range(dist.get_world_size()))
        return "" if plain else f"in the group of {named(ranks)}"

    def _after_failure(self) -> BaseException:
        return closed(
            f"this group is out of step since an earlier call failed; destroy it and make "
            f"another: {self._failure}"
        )

    def _usable(self) -> None:
        if self._process != os.getpid():
            raise closed("this process was forked from a rank of the group; make a new group")
        if self._ended:
            raise closed(f"{self._ended}; make a new one")
        if self._failure is not None:
            raise self._after_failure()

    def _left(self, members: Sequence[int], name: str) -> dict[int, str]:
        """Members that have left the group, and why a first call of these cannot run."""
        # Who is dead may have noted before that it leaves: the notes are read after.
        dead = {} if self._presence is None else self._presence.dead(members)
        ends = {rank: f"rank {rank} died (process {pid})" for rank, pid in dead.items()}
        if self._store.check([_LEFT]):
            keys = {rank: _LEFT_RANK.format(rank) for rank in members if rank != self._rank}
            noted = {rank: key for rank, key in keys.items() if self._store.check([key])}
            ends |= {rank: self._store.get(key).decode() for rank, key in noted.items()}
        return {
            members.index(rank): f"{end}, without making call 1, {name}"
            for rank, end in ends.items()
        }

    def _note_leaving(self, how: str) -> None:
        """Let ranks that wait for this one to open a communicator know that it has left."""
        with contextlib.suppress(Exception):  # of a store that has ended meanwhile
            if self._nranks > 1 and reachable(self._store):
                text = f"rank {self._rank} {how}"
                self._store.set(_LEFT_RANK.format(self._rank), text.encode())
                self._store.set(_LEFT, b"")

    # -- messages -------------------------------------------------------------------------------

    def send(self, tensors: Sequence[Any], dstRank: int, tag: int) -> Any:  # noqa: N803
        """Send a tensor to a rank; its receive matches by tag, in order."""
        if not profiler._is_profiler_enabled:
            return self._message("send", tensors, dstRank, tag)
        with profiler_event("send"):
            return self._message("send", tensors, dstRank, tag)

    def recv(self, tensors: Sequence[Any], srcRank: int, tag: int) -> Any:  # noqa: N803
        """Receive a tensor from a rank."""
        if not profiler._is_profiler_enabled:
            return self._message("recv", tensors, srcRank, tag)
        with profiler_event("recv"):
            return self._message("recv", tensors, srcRank, tag)

    def recv_anysource(self, tensors: Sequence[Any], tag: int) -> Any:
        """Receive a tensor from any rank: the first that sends one."""
        if not profiler._is_profiler_enabled:
            return self._message("recv", tensors, None, tag)
        with profiler_event("recvAnySource"):
            return self._message("recv", tensors, None, tag)

    def _message(self, name: str, tensors: Sequence[Any], peer: int | None, tag: int) -> Any:
        tensor = single(tensors, name)
        self._usable()
        if name == "recv":
            check_writable(tensor, name)
        if tensor.is_cuda:
            if peer is None:
                raise ArgumentError(
                    "ringcoll: recv of a CUDA tensor needs a source: a kernel cannot wait for any "
                    "rank; pass src, or receive into a CPU tensor"
                )
            return self._post(name, tensor, peer)
        messages = self._messages or self._open_messages()
        if name == "send" and peer is not None:
            return messages.send(tensor, peer, tag)
        return messages.recv(tensor, peer, tag)

    def _post(self, name: str, tensor: Any, peer: int) -> Any:
        """Post a message of a CUDA tensor; it is launched later."""
        if self._device is None:
            self._choose_communicator(name, peer, tensor.get_device())
        pairs = self._pairs
        if pairs is not None and peer in pairs:
            return pairs.post(name, tensor, peer)
        device = self._device or self._open_device(tensor.get_device(), name)
        return device.batch.post(name, tensor, peer)

    def _choose_communicator(self, name: str, peer: int, ordinal: int) -> None:
        """Choose the communicator of messages with a peer, while the group's is not open.

        torch requires that all ranks take part in a batch that is the group's first call: so it
        opens the group's. Behind a barrier a batch may be of some ranks, since NCCL's barrier has
        opened the communicator: where ours could not, a batch goes as single messages do.
        """
        if self._last_barrier is None and in_batch():
            self._open_device(ordinal, name)
        if self._pairs is not None and peer in self._pairs:
            return
        self._after_barrier()
        with self._opening:
            ends = 1 if peer == self._rank else 2
            if self._device is not None or self._nranks == ends:
                return
            if self._pairs is None:
                self._pairs = Pairs(self._rank, self._open_two, self._launch)
            if peer not in self._pairs:  # another thread may have begun meanwhile
                self._pairs.begin(peer, ordinal)

    def _launch(self) -> None:
        """Launch the posted messages of CUDA tensors."""
        if self._pairs is not None:
            self._pairs.flush()
        if self._device is not None:
            self._device.flush()

    # -- memory ---------------------------------------------------------------------------------

    def _get_backend(self, device: Any) -> Any:
        return self._backend

    def _allocate(self, count: int, dtype: Any, device: Any) -> Any:
        """A flat tensor in symmetric memory of the device's communicator."""
        self._usable()
        if device.type == "cpu":
            comm, stream = (self._host or self._open_host("empty")).comm, 0
        else:
            ordinal = torch.cuda.current_device() if device.index is None else device.index
            engine = self._device or self._open_device(ordinal, "empty")
            comm, stream = engine.comm, engine.current()
        with self._opening:
            blocks = self._blocks.setdefault(device.type, Blocks(comm))
        try:
            return blocks.tensor(count, dtype, stream)
        except Error as error:
            raise_from(self._failed(error), error)

    # -- the end --------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Wait for running calls, and close everything; not collective. Idempotent."""
        began, self._ended = self._ended, self._ended or "the group was destroyed"
        if self._process != os.getpid():
            return  # threads and communicators are the parent's
        if not began:
            self._note_leaving("destroyed its group")
        self._blocks.clear()
        for part in (self._messages, self._pairs, self._host, self._device):
            if part is not None:
                with contextlib.suppress(Exception):
                    part.close()

    def abort(self) -> None:
        """Abort: running calls fail, here and on the other ranks. Idempotent."""
        if not self._ended:
            self._ended = "the group was aborted"
            self._note_leaving("aborted its group")
            for part in (self._host, self._device, self._pairs, self._messages):
                if part is not None:
                    part.abort("the group of torch.distributed was aborted")
        self.shutdown()

    def leave(self, why: str) -> None:
        """End the threads at exit; a ``why`` that is not empty aborts the other ranks."""
        if self._ended:
            return
        self._ended = "the process ends"
        if self._process == os.getpid():
            self._note_leaving(f"ended ({why})" if why else "ended")
        for part in (self._host, self._device, self._pairs, self._messages):
            if part is not None and why:
                part.abort(why)
        if self._pairs is not None:
            self._pairs.leave()
        if self._messages is not None:
            self._messages.close()
        if self._host is not None:
            self._host.leave(EXIT_GRACE)


def _options(given: object) -> tuple[Config | None, dict[str, Any]]:
    """The Config and the settings in ``pg_options``.

    Raises:
        ArgumentTypeError: neither a Config nor a mapping of its fields, or an unknown field.
        ArgumentError: an option has an invalid value.

    """
    if given is None or isinstance(given, Config):
        return given, {}
    if isinstance(given, Mapping) and all(isinstance(name, str) for name in given):
        try:
            starting(None, None, "auto", given)  # refused here, not by the group's first call
        except UsageError as error:
            raise type(error)(f"init_process_group, pg_options: {error}") from None
        return None, dict(given)
    raise ArgumentTypeError(
        f"init_process_group: pg_options is a {type(given).__name__}; for ringcoll pass a "
        f"ringcoll.Config, or its fields by name in a dict"
    )
