"""Communication hooks: DistributedDataParallel's gradients go through a ringcoll communicator.

::

    comm = ringcoll.init(...)                      # of the ranks of the process group, in its order
    ddp = DistributedDataParallel(model)           # over any process group: gloo, nccl, ...
    ddp.register_comm_hook(comm, hooks.all_reduce)  # or hooks.bf16_compress

    dist.init_process_group("ringcoll")            # or the communicator of such a group: the one
    ddp.register_comm_hook(None, hooks.all_reduce)  # that is named, and for None the default one

A bucket is made reachable for all ranks when it is met first (``comm.register``), so that later
steps take the zero-copy path where the memory allows it: torch's default pools and expandable
segments on GPUs, ranks that are threads on the CPU. Any other bucket is staged. Each rank must
meet the same buckets in the same order, which DDP sees to; if they do not, all get an error within
the communicator's timeout. A step that is captured in a CUDA graph registers nothing: run a few
steps before, as DDP asks for anyway.

On CPU ranks the calls run on the communicator's worker thread, on GPU ranks on a stream of the
hooks' own, so that both overlap with the rest of the backward pass. There DDP waits for a future by
ordering streams, long before a kernel can be late: a step whose call fails on the GPU ends as if it
had not. The log has the error at once, and the next call raises it, as does ``comm.synchronize()``:
call that before parameters are kept for good.
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
from ringcoll.torch.async_stream import Side
from ringcoll.torch.base import GroupBase
from ringcoll.torch.buckets import Buckets

__all__ = ["all_reduce", "bf16_compress"]

# One for each communicator on GPUs.
_sides: weakref.WeakKeyDictionary[Communicator, Side] = weakref.WeakKeyDictionary()


def all_reduce(state: Any, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    """Average a bucket of gradients over the ranks of a communicator, in the bucket's own memory.

    Gradients of float16 and bfloat16 are added in float32; the average is rounded once. DDP's own
    way divides each contribution before it is added.

    Args:
        state: the communicator, or a group of torch.distributed whose backend is ringcoll; None:
            the default group.
        bucket: torch's ``GradBucket``.

    Returns:
        torch's ``Future`` of the averaged tensor.

    Raises:
        ArgumentTypeError: no such state, or sparse gradients.
        ArgumentError: the gradients are on another device than the communicator's ranks.
        Error: the ranks do not agree, or an earlier call failed.

    """
    comm, buffer = _checked(state, bucket, "hooks.all_reduce")
    carrier = buffer if _capturing(buffer) else _registered.of(comm, bucket, buffer)
    return _started(comm, buffer, lambda: comm.all_reduce(carrier, op="avg"))


def bf16_compress(state: Any, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    """Average a bucket of gradients as :func:`all_reduce`, but send them in bfloat16.

    Each rank rounds its contribution to bfloat16; these are added in float32 on the way, and the
    average is rounded to bfloat16 once, whatever the number of ranks. It halves the bytes of
    float32 gradients. Copies in bfloat16 are kept in zero-copy memory, half a bucket's bytes each.

    Args:
        state: the communicator, or a group of torch.distributed whose backend is ringcoll; None:
            the default group.
        bucket: torch's ``GradBucket``; of bfloat16 gradients nothing is compressed.

    Returns:
        torch's ``Future`` of the averaged tensor, of the gradients' own type.

    Raises:
        ArgumentTypeError: no such state, or gradients that are sparse or no floats.
        ArgumentError: the gradients are on another device than the communicator's ranks.
        Error: the ranks do not agree, or an earlier call failed.

    """
    comm, buffer = _checked(state, bucket, "hooks.bf16_compress")
    if buffer.dtype == torch.bfloat16:
        return all_reduce(state, bucket)
    if not buffer.dtype.is_floating_point:
        raise ArgumentTypeError(f"hooks.bf16_compress: gradients of {buffer.dtype} are no floats")
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
        raise ArgumentTypeError(f"{where}: sparse gradients ({buffer.layout}) are not carried")
    if isinstance(state, Communicator):
        comm = state
    else:
        group = dist.group.WORLD if state is None else state
        if not isinstance(group, GroupBase):
            raise ArgumentTypeError(
                f"{where}: state is a {type(state).__name__}, wanted a communicator of ringcoll "
                f"or a group of its backend: ddp.register_comm_hook(ringcoll.init(...), {where})"
            )
        engine = group._engine(buffer)
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
    """What calls take: of CPU tensors the numpy view, by which a call is known again."""
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
    """Symmetric memory is free when its last view is gone."""


_registered: Buckets[Any] = Buckets(_register, _unregister)
_halves: Buckets[tuple[Any, Any]] = Buckets(_make_half, _drop_half)


def _started(comm: Communicator, buffer: Any, average: Callable[[], object]) -> Any:
    return (_on_stream if buffer.is_cuda else _on_worker)(comm, buffer, average)


def _on_worker(comm: Communicator, buffer: Any, average: Callable[[], object]) -> Any:
    """Run a call on the worker thread, in order with the calls before it.

    An exception in a future made by Python is an object that DDP takes for a tensor, and crashes.
    One that is raised by a callback arrives as an error.
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
    """Enqueue a call on the hooks' stream; who waits for the future lets its stream wait."""
    side = _sides.get(comm)
    if side is None:
        side = _sides[comm] = Side(buffer.device)
    with comm._state.lock, side.here():
        side.follow(torch._C._cuda_getCurrentRawStream(buffer.get_device()))
        before = side.enter()
        try:
            average()
        finally:
            side.leave(before)
        buffer.record_stream(side.stream)
        return side.future(buffer)
