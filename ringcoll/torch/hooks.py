"""Communication hooks: DistributedDataParallel averages gradients over a ringcoll communicator.

::

    comm = ringcoll.init(...)                      # of the ranks of the process group, in its order
    ddp = DistributedDataParallel(model)           # over any process group: gloo, nccl, ...
    ddp.register_comm_hook(comm, hooks.all_reduce)  # or hooks.bf16_compress

    dist.init_process_group("ringcoll")            # or the communicator of a ringcoll group:
    ddp.register_comm_hook(None, hooks.all_reduce)  # None is the default group

The first use of a bucket registers it (``comm.register``), so that later steps run zero-copy where
the memory allows it: torch's default pools and expandable segments on GPUs, ranks that are threads
on the CPU. Any other bucket is staged. Each rank must use the same buckets in the same order, as
DDP does; otherwise all ranks raise an error within the communicator's timeout. A step that is
captured in a CUDA graph registers nothing: run a few steps before, as DDP requires anyway.

On CPU ranks the calls run on the communicator's worker thread, on GPU ranks on a stream of the
hooks' own, so that both overlap with the rest of the backward pass. On GPUs DDP waits for a future
by ordering streams, before a kernel can time out: a step whose call fails on the GPU ends without
an error. The error is logged at once, and raised by the next call or by ``comm.synchronize()``:
call that before saving parameters.
"""

# Not annotations as text: DDP compares those of a hook with its own types.

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

from ringcoll.arguments.buffers import flat
from ringcoll.communicator.public import Communicator
from ringcoll.errors import ArgumentError, ArgumentTypeError
from ringcoll.torch.async_stream import AsyncStream
from ringcoll.torch.base import GroupBase
from ringcoll.torch.buckets import Buckets
from ringcoll.torch.tracing import runs_outside_graphs

__all__ = ["all_reduce", "bf16_compress"]

# One for each communicator on GPUs.
_streams: weakref.WeakKeyDictionary[Communicator, AsyncStream] = weakref.WeakKeyDictionary()


@runs_outside_graphs
def all_reduce(state: Any, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    """Average a bucket of gradients over the ranks of a communicator, in the bucket's own memory.

    Gradients of float16 and bfloat16 are added in float32; the average is rounded once. DDP
    without a hook divides each contribution before it is added.

    Args:
        state: the communicator, or a group of torch.distributed whose backend is ringcoll; None:
            the default group.
        bucket: torch's ``GradBucket``.

    Returns:
        torch's ``Future`` of the averaged tensor.

    Raises:
        ArgumentTypeError: ``state`` is neither, or the gradients are sparse.
        ArgumentError: the gradients are on another device than the communicator's ranks.
        Error: the ranks do not agree, or an earlier call failed.

    """
    comm, buffer = _checked(state, bucket, "hooks.all_reduce")
    carrier = buffer if _capturing(buffer) else _registered.of(comm, bucket, buffer)
    return _started(comm, buffer, lambda: comm.all_reduce(carrier, op="avg"))


@runs_outside_graphs
def bf16_compress(state: Any, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    """Average a bucket of gradients as :func:`all_reduce`, but send them in bfloat16.

    Each rank rounds its contribution to bfloat16; these are added in float32 on the way, and the
    average is rounded to bfloat16 once, whatever the number of ranks. It halves the bytes of
    float32 gradients. Copies in bfloat16 stay in symmetric memory, half a bucket's bytes each.

    Args:
        state: the communicator, or a group of torch.distributed whose backend is ringcoll; None:
            the default group.
        bucket: torch's ``GradBucket``; bfloat16 gradients are sent as they are.

    Returns:
        torch's ``Future`` of the averaged tensor, of the gradients' own type.

    Raises:
        ArgumentTypeError: ``state`` is neither, or the gradients are sparse or no floats.
        ArgumentError: the gradients are on another device than the communicator's ranks.
        Error: the ranks do not agree, or an earlier call failed.

    """
    comm, buffer = _checked(state, bucket, "hooks.bf16_compress")
    if buffer.dtype == torch.bfloat16:
        return all_reduce(state, bucket)
    if not buffer.dtype.is_floating_point:
        raise ArgumentTypeError(
            f"hooks.bf16_compress: cannot compress gradients of {buffer.dtype}: pass floats"
        )
    known = None if _capturing(buffer) else _halves.of(comm, bucket, buffer)

    def average() -> None:
        # Memory that is taken here belongs to the stream of the call.
        half, carrier = known or 2 * (torch.empty_like(buffer, dtype=torch.bfloat16),)
        half.copy_(buffer)
        comm.all_reduce(carrier, op="avg")
        buffer.copy_(half)

    return _started(comm, buffer, average)


def _checked(state: Any, bucket: Any, where: str) -> tuple[Communicator, Any]:
    """The communicator, and the bucket's memory."""
    buffer = bucket.buffer()
    if buffer.layout is not torch.strided:
        raise ArgumentTypeError(
            f"{where}: cannot reduce sparse gradients ({buffer.layout}); use "
            f"layers with sparse=False"
        )
    if isinstance(state, Communicator):
        comm = state
    else:
        group = dist.group.WORLD if state is None else state
        if not isinstance(group, GroupBase):
            raise ArgumentTypeError(
                f"{where}: state is a {type(state).__name__}, pass a communicator of ringcoll "
                f"or a group of its backend: ddp.register_comm_hook(ringcoll.init(...), {where})"
            )
        engine = group._engine(buffer, where)
        engine.flush()
        comm = engine.comm
    kind = "cuda" if buffer.is_cuda else "cpu"
    here = f"cuda:{buffer.get_device()}" if buffer.is_cuda else kind
    if comm.device != here:
        raise ArgumentError(
            f"{where}: gradients on {buffer.device}, and the communicator's rank {comm.rank} is "
            f"on {comm.device}; make it with device={kind!r}, on the device of the model"
        )
    return comm, buffer


def _capturing(buffer: Any) -> bool:
    return bool(buffer.is_cuda and torch.cuda.is_current_stream_capturing())


def _carrier(buffer: Any) -> Any:
    """The argument of calls: for CPU tensors one numpy view, under which calls are cached."""
    if buffer.is_cuda:
        return buffer
    return flat(buffer, argument="bucket", where="hooks", writable=True)


def _register(comm: Communicator, buffer: Any) -> Any:
    comm.register(buffer)
    return _carrier(buffer)


def _unregister(comm: Communicator, buffer: Any, _carrier: Any) -> None:
    comm.unregister(buffer)


def _make_half(comm: Communicator, buffer: Any) -> tuple[Any, Any]:
    half = comm.empty(buffer.numel(), "bfloat16", like="torch")
    return half, _carrier(half)


def _drop_half(_comm: Communicator, _buffer: Any, _half: Any) -> None:
    """Symmetric memory is freed with its last view."""


_registered: Buckets[Any] = Buckets(_register, _unregister)
_halves: Buckets[tuple[Any, Any]] = Buckets(_make_half, _drop_half)


def _started(comm: Communicator, buffer: Any, average: Callable[[], object]) -> Any:
    return (_on_stream if buffer.is_cuda else _on_worker)(comm, buffer, average)


def _on_worker(comm: Communicator, buffer: Any, average: Callable[[], object]) -> Any:
    """Run a call on the worker thread, in order with the calls before it.

    DDP reads an exception that Python sets in a future as a tensor, and crashes. An exception that
    a callback raises arrives as an error.
    """
    finished = Future()
    failures: list[BaseException] = []

    def run() -> None:
        try:
            average()
        except BaseException as error:
            failures.append(error)
        finished.set_result(buffer)

    def result(done: Any) -> Any:
        if failures:
            raise failures[0]
        return done.value()

    future = finished.then(result)
    comm._state.submit(run, (buffer,))
    return future


def _on_stream(comm: Communicator, buffer: Any, average: Callable[[], object]) -> Any:
    """Enqueue a call on the hooks' stream; waiting for the future orders streams."""
    own = _streams.get(comm)
    if own is None:
        own = _streams[comm] = AsyncStream(buffer.device)
    with comm._state.lock, own.device_guard():
        own.wait_stream(torch._C._cuda_getCurrentRawStream(buffer.get_device()))
        before = own.set_current()
        try:
            average()
        finally:
            own.restore(before)
        buffer.record_stream(own.stream)
        return own.future(buffer)
