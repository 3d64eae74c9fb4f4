"""Ranks on GPUs: how a call goes from the caller's arrays and stream to a launch.

A call is enqueued on the caller's stream, in order with the rest of it, and returns. Between two
calls with the same arrays everything is kept; what is left is a look-up and the launch.
"""

from __future__ import annotations

import ctypes
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ringcoll.arguments.calls import Call, prepare
from ringcoll.communicator.explaining import explained
from ringcoll.communicator.group import current
from ringcoll.communicator.rank import RankState
from ringcoll.communicator.selection import Choice, prove, wished_plan
from ringcoll.communicator.work import Work
from ringcoll.config import Config, resolve
from ringcoll.dtypes import dtype_of
from ringcoll.errors import ArgumentError, Error, MachineError
from ringcoll.executors.cuda.arena import Arena
from ringcoll.executors.cuda.choose import Chosen, Wishes
from ringcoll.executors.cuda.executor import CudaExecutor, Enqueued, Ready
from ringcoll.executors.cuda.loader import Loader
from ringcoll.executors.cuda.recorder import Recorder
from ringcoll.executors.cuda.unpaired import Unpaired
from ringcoll.executors.cuda.watch import Watch
from ringcoll.executors.rows import TraceEntry
from ringcoll.fabric import Fabric
from ringcoll.transports.cuda.arena import Transport, make_arena
from ringcoll.transports.cuda.arrays import DeviceArray, device_array
from ringcoll.transports.cuda.device import Device
from ringcoll.transports.cuda.raw import RawArray
from ringcoll.transports.cuda.streams import stream_pointer
from ringcoll.transports.cuda.symmetric import CudaSymmetricMemory

__all__ = ["UNSERVED", "CudaState", "Enqueuer", "unserved"]

UNSERVED = (
    "all_gather_v",
    "reduce_scatter_v",
    "gather_v",
    "scatter_v",
    "all_to_all_v",
    "send",
    "recv",
    "sendrecv",
)
"""Calls that GPU ranks do not serve yet."""

KEPT = 128
"""Calls that a communicator keeps prepared; the oldest goes first."""


class CudaState(RankState):
    """What one rank of a communicator on GPUs holds.

    Args:
        fabric: the ranks on this host.
        config: the communicator's options.
        device: this rank's.
        loader: of kernels, shared by the communicators of a process.
        transport: "p2p", "host", or None where the devices decide; a parent's is its own.
        parent: the communicator's parent, whose symmetric memory it shares.
        ranks: the parent's rank of each of its ranks.

    """

    on_gpu = True

    def __init__(
        self,
        fabric: Fabric,
        config: Config,
        device: Device,
        loader: Loader,
        *,
        transport: Transport | None = None,
        parent: RankState | None = None,
        ranks: Sequence[int] = (),
    ) -> None:
        self.device, self.loader, self.transport = device, loader, transport
        super().__init__(fabric, config, parent=parent, ranks=ranks)

    def _equip(self, parent: RankState | None, ranks: Sequence[int]) -> None:
        above = None if parent is None else parent.symmetric
        fabric, device = self.fabric, self.device
        memory, self.transport = make_arena(
            fabric,
            device.ordinal,
            Arena(fabric.nranks).nbytes,
            what="the arena of a communicator",
            wanted=self.transport,
            tried=parent is not None,  # the parent's ranks have tried their pairs
        )
        self.symmetric = CudaSymmetricMemory(
            fabric, device.ordinal, above, ranks, reached=self.transport == "p2p"
        )
        self.cuda = CudaExecutor(
            fabric, device, self.symmetric, self.loader, memory, self.transport
        )
        self.executor, self.pairs = self.cuda, Unpaired()
        self._watch = Watch(self.fabric, self.cuda)

    def _child(self, fabric: Fabric, ranks: Sequence[int]) -> RankState:
        return CudaState(
            fabric,
            self.config,
            self.device,
            self.loader,
            transport=self.transport,
            parent=self,
            ranks=ranks,
        )

    def prepare(self, call: Call, config: Config) -> Ready:
        """Bind a checked call and its options to this rank's executor."""
        self.usable()
        where = f"{call.collective} on rank {self.fabric.rank}"
        for option, served in (("engine", ("sm", "copy")), ("channels", ())):
            given = getattr(config, option)
            if given not in (None, *served):
                raise ArgumentError(
                    f"{where}: {option}={given!r} is not served on GPU ranks yet; leave it out"
                )
        if config.accumulate == "dtype":
            call = replace(call, dtype=replace(call.dtype, wide=False))
        choice = Choice(
            self._algorithm(call, config),
            config.slices,
            None,
            bool(config.deterministic),
            "dtype" if config.accumulate == "dtype" else "wide",
            bool(config.verify),
        )
        timeout = config.timeout if config.timeout is not None else self.fabric.timeout
        plan = wished_plan(call, self.fabric.nranks, choice)
        algorithm = choice.algorithm if isinstance(choice.algorithm, str) else None
        wishes = Wishes(
            algorithm, config.protocol, config.slices, config.max_sms, plan, config.engine
        )
        ready = self.cuda.prepare(call, wishes, timeout)
        launch = ready.chosen.launch
        prove(ready.chosen.plan, replace(launch, slices=min(launch.slices, 6)), choice)
        return ready

    def run(self, prepared: Any, stream: int | None = None) -> None:
        """Enqueue one call of this rank alone."""
        self.usable()
        try:
            self.fabric.check()
            self.cuda.run(prepared, stream)
        except BaseException as error:
            self.fail(error)
            raise

    def register(self, array: object, *, undo: bool = False) -> bool:
        """Let peers reach an array that exists, or no longer; the first is collective."""
        self.usable()
        verb = "unregister" if undo else "register"
        where = f"{verb} on rank {self.fabric.rank}"
        ordinal = self.device.ordinal
        found = device_array(array, argument="array", where=where, ordinal=ordinal)
        if undo:
            self.symmetric.unregister(found)
            return False
        return bool(self.together(lambda: self.symmetric.register(found)))

    def explain(self, collective: str, nbytes: int) -> str:
        """What a call of so many bytes runs, how far that holds, and what runs beyond."""
        config, nranks = self.config, self.fabric.nranks
        call = Call(collective, self.fabric.rank, None, None, 0, dtype_of("float32"))
        choice = Choice(self._algorithm(call, config), deterministic=bool(config.deterministic))
        algorithm = choice.algorithm if isinstance(choice.algorithm, str) else None

        def check(chosen: Chosen) -> None:
            slices = min(chosen.launch.slices, 6)
            prove(chosen.plan, replace(chosen.launch, slices=slices), choice)

        return explained(
            collective,
            nbytes,
            self.cuda.resources,
            wishes=Wishes(
                algorithm,
                config.protocol,
                config.slices,
                config.max_sms,
                wished_plan(call, nranks, choice),
            ),
            check=check,
        )

    def synchronize(self) -> None:
        """Wait for what was enqueued; what has failed is for ``check`` to raise."""
        if self.inherited or self.closed:
            self.usable()
        try:
            self.cuda.synchronize()
        except MachineError as error:
            try:
                self.fabric.check()  # a peer that died takes its memory along
            except Error as news:
                self.fail(news)
                raise news from error
            self.fail(error)
            raise

    def start_trace(self) -> None:
        """Let kernels note the rows that they execute; before the first call."""
        self.cuda.recorder = Recorder(self.device.ordinal)

    def traced(self) -> list[TraceEntry]:
        """The rows of the last call, which must be the only one since this was last asked."""
        self.synchronize()
        recorder, last = self.cuda.recorder, self.cuda.last
        if recorder is None or last is None:
            return []
        return recorder.rows(self.fabric.rank, last.chosen, last.call.dtype)

    def fail(self, error: BaseException, *, begun: bool = False) -> None:
        """Remember that a call failed; kernels of this rank that wait are asked to stop."""
        super().fail(error, begun=begun)
        if self.broken is not None:
            self.cuda.give_up()

    def abort(self, reason: str) -> None:
        """Give up, and tell the others."""
        super().abort(reason)
        self.cuda.give_up()

    def close(self) -> None:
        """Let go of everything; not collective.

        Raises:
            Error: calls that nobody had waited for have failed.

        """
        try:
            if not (self.closed or self.inherited):
                # Until its kernels have ended a rank must hear of peers that died.
                self.synchronize()
                if self.broken is None and self.cuda.failure() is not None:
                    self.check()
        finally:
            self._watch.stop()
            super().close()
            if self.cuda.recorder is not None:
                self.cuda.recorder.close()


def unserved(name: str, rank: int) -> Callable[..., None]:
    """What stands for a call that GPU ranks do not serve: it says so."""

    def refuse(*_buffers: object, **_options: object) -> None:
        raise ArgumentError(
            f"{name} on rank {rank}: not served on GPU ranks yet; use a collective with equal "
            f"counts, or a communicator with device='cpu'"
        )

    return refuse


@dataclass(slots=True)
class _Kept:
    """A prepared call, and by what its buffers are known again."""

    send: Callable[[], Any]
    recv: Callable[[], Any]
    places: tuple[object, object]
    ready: Ready
    by_cupy: bool
    """Whether the arrays are CuPy's, whose current stream the call then takes."""

    def is_of(self, sendbuf: Any, recvbuf: Any, changes: int) -> bool:
        """Whether these buffers are the ones it was prepared for, where they were then."""
        return (
            (sendbuf is None or self.send() is sendbuf)
            and (recvbuf is None or self.recv() is recvbuf)
            and self.places == (_place(sendbuf), _place(recvbuf))
            and self.ready.changes == changes
        )


class Enqueuer:
    """Makes the calls of one communicator on GPUs."""

    def __init__(self, state: CudaState, nranks: int) -> None:
        from cupy.cuda import get_current_stream, runtime

        self._state, self._nranks, self._lock = state, nranks, state.lock
        self._rank, self._ordinal = state.fabric.rank, state.device.ordinal
        self._device: Callable[[], int] = runtime.getDevice
        self._stream: Callable[[], Any] = get_current_stream
        # The last call's stream is waited for later, and a handle is nothing once it is destroyed.
        self._owner: object = None
        self._kept: dict[tuple[object, ...], _Kept] = {}

    def __call__(
        self, name: str, sendbuf: Any, recvbuf: Any, op: Any, root: int, how: dict[str, Any]
    ) -> Work | None:
        """One call of a collective, as the communicator's methods take it."""
        state = self._state
        if not how:
            try:
                kept = self._kept.get((name, id(sendbuf), id(recvbuf), op, root))
            except TypeError:  # an argument that cannot be
                kept = None
            if (
                kept is not None
                and kept.by_cupy
                and kept.is_of(sendbuf, recvbuf, state.symmetric.changes)
                and self._device() == self._ordinal
                and current() is None
            ):
                stream = self._stream()
                with self._lock:
                    _before, self._owner = self._owner, stream
                    state.run(kept.ready, stream.ptr)
                return None
        return self._slowly(name, sendbuf, recvbuf, op, root, how)

    def _slowly(
        self, name: str, sendbuf: Any, recvbuf: Any, op: Any, root: int, how: dict[str, Any]
    ) -> Work | None:
        """A call with options, or one that has not been made before."""
        state, options = self._state, dict(how)
        stream, later = options.pop("stream", None), options.pop("async_op", False)
        where = f"{name} on rank {self._rank}"
        key = (name, id(sendbuf), id(recvbuf), op, root, *options.items())
        try:
            kept = self._kept.get(key)
        except TypeError:  # an argument that cannot be, or an option that is not hashed
            kept = None
        if kept is not None and kept.is_of(sendbuf, recvbuf, state.symmetric.changes):
            ready = kept.ready
        else:
            ready = self._prepared(key, name, sendbuf, recvbuf, op, root, options, where)
        like = sendbuf if sendbuf is not None else recvbuf
        ordinal = state.device.ordinal
        pointer = stream_pointer(stream, like, ordinal=ordinal, where=where)
        owner = stream if stream is not None else _current(like, ordinal)
        return self._enqueue(ready, pointer, (sendbuf, recvbuf), owner, later=later)

    def _enqueue(
        self, ready: Ready, stream: int, alive: tuple[Any, Any], owner: object, *, later: bool
    ) -> Work | None:
        group, state = current(), self._state
        if group is not None:
            group.add(state, Enqueued(ready, stream), None, (alive, owner, self._owner))
            self._owner = owner
            return group.work if later else None
        with state.lock:
            _before, self._owner = self._owner, owner
            state.run(ready, stream)
        return _DeviceWork(state, stream) if later else None

    def _prepared(
        self,
        key: tuple[object, ...],
        name: str,
        sendbuf: Any,
        recvbuf: Any,
        op: Any,
        root: int,
        options: dict[str, Any],
        where: str,
    ) -> Ready:
        call = prepare(
            name,
            rank=self._rank,
            nranks=self._nranks,
            sendbuf=self._view(sendbuf, "sendbuf", where),
            recvbuf=self._view(recvbuf, "recvbuf", where),
            op=op,
            root=root,
        )
        config = resolve(self._state.config, options.pop("config", None), options, where)
        ready = self._state.prepare(call, config)
        try:
            refs = [_absent if b is None else weakref.ref(b) for b in (sendbuf, recvbuf)]
            hash(key)
        except TypeError:
            return ready
        for old in [old for old, k in self._kept.items() if k.send() is None or k.recv() is None]:
            del self._kept[old]
        while len(self._kept) >= KEPT:
            self._kept.pop(next(iter(self._kept)))
        places = _place(sendbuf), _place(recvbuf)
        if None not in places:
            by_cupy = all(b is None or _is_cupy(b) for b in (sendbuf, recvbuf))
            self._kept[key] = _Kept(refs[0], refs[1], places, ready, by_cupy)
        return ready

    def _view(self, buffer: Any, argument: str, where: str) -> Any:
        """A buffer as the checks take it: a flat array whose memory nobody reads here."""
        if buffer is None or isinstance(buffer, (str, int, float, complex)):
            return buffer
        ordinal = self._state.device.ordinal
        return _flat(device_array(buffer, argument=argument, where=where, ordinal=ordinal))

    def forget(self) -> None:
        """Keep no call any more."""
        self._kept.clear()


def _current(like: Any, ordinal: int) -> object:
    """The stream object that a call on ``like`` goes to when it names none."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(like, torch.Tensor):
        return torch.cuda.current_stream(ordinal)
    from cupy.cuda import get_current_stream

    return get_current_stream(ordinal)


def _is_cupy(buffer: Any) -> bool:
    return type(buffer).__module__.partition(".")[0] == "cupy"


def _place(buffer: Any) -> object:
    """Where and how a buffer lies now; None where that is not known without looking closely."""
    if buffer is None:
        return 0
    place: object
    try:
        place = buffer.data.ptr  # CuPy's arrays keep their size and type
    except AttributeError:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(buffer, torch.Tensor):
            # resize_, set_ and t_ change a tensor in place.
            place = buffer.data_ptr(), buffer.numel(), buffer.dtype, buffer.is_contiguous()
        else:
            place = buffer.pointer if isinstance(buffer, RawArray) else None
    return place


def _flat(found: DeviceArray) -> npt.NDArray[Any]:
    """Device memory in the shape of a numpy array: address, length and type, not to be read."""
    if not found.nbytes:
        return np.empty(0, found.dtype.numpy)
    memory = (ctypes.c_char * found.nbytes).from_address(found.pointer)
    view: npt.NDArray[Any] = np.frombuffer(memoryview(memory).cast("B"), np.uint8)
    view = view.view(found.dtype.numpy)
    view.flags.writeable = not found.readonly
    return view


def _absent() -> bool:
    """Stands for a weak reference to None: never dead."""
    return True


class _DeviceWork(Work):
    """A call that was enqueued with ``async_op=True``."""

    def __init__(self, state: CudaState, stream: int) -> None:
        super().__init__()
        self._state = state
        self._event = state.cuda.record(stream)

    def wait(self, timeout: float | None = None) -> None:
        """Let the current stream come after the call; the host does not wait.

        Args:
            timeout: without meaning here: a call's kernels end by their own timeout.

        """
        error = self.exception()
        if error is not None:
            raise error
        self._event.order(stream_pointer(None, ordinal=self._state.device.ordinal))

    def done(self) -> bool:
        """Whether the call has finished, well or not."""
        return self._event.done()

    def exception(self) -> Error | None:
        """What the call's kernels found wrong, as far as is known."""
        self._seen = True
        return self._state.cuda.failure()
