"""One rank's replica of a model, by DDP or FSDP2 over one of the ways to communicate."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.models import gpt, resnet
from benchmarks.models.task import Task
from ringcoll.torch import hooks

__all__ = ["MODELS", "WAYS", "Batches", "Replica", "Way"]

MODELS = {"resnet50": resnet.task, "gpt": gpt.task}


@dataclass(frozen=True, slots=True)
class Way:
    """How gradients are averaged.

    Args:
        backend: of the group, "ringcoll" or "peer": NCCL on GPUs, gloo on CPUs.
        hook: of DDP; None: DDP's own all_reduce.
        sharded: by FSDP2 and not DDP.
        options: of ringcoll's group on GPUs.

    """

    backend: str
    hook: Any = None
    sharded: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)


ALL_SMS, COPIES = {"max_sms": 1 << 10}, {"engine": "copy"}

WAYS: Mapping[str, Way] = {
    "peer": Way("peer"),
    "peer-bf16": Way("peer", default_hooks.bf16_compress_hook),
    "peer-none": Way("peer", debugging_hooks.noop_hook),
    "ringcoll": Way("ringcoll"),
    "ringcoll-hook": Way("ringcoll", hooks.all_reduce),
    "ringcoll-bf16": Way("ringcoll", hooks.bf16_compress),
    "ringcoll-all-sms": Way("ringcoll", options=ALL_SMS),
    "ringcoll-copy": Way("ringcoll", options=COPIES),
    "peer-fsdp": Way("peer", sharded=True),
    "ringcoll-fsdp": Way("ringcoll", sharded=True),
    "ringcoll-fsdp-all-sms": Way("ringcoll", sharded=True, options=ALL_SMS),
    "ringcoll-fsdp-copy": Way("ringcoll", sharded=True, options=COPIES),
}
"""By the names of ``--ways``.

The hooks of ringcoll register buckets, which are then zero-copy. ``peer-none`` communicates
nothing, so that its replicas differ: what DDP itself takes.
"""


WARM = 12
"""Steps before a capture: DDP has rebuilt its buckets then, and times no more steps by events."""


class Batches:
    """A few batches of one rank, in the memory of its device, taken in turns.

    Reading data is no part of the measurement.

    Args:
        task: whose data.
        batch: samples of a batch.
        rank: has data of its own.
        device: where they lie.

    """

    COUNT = 4

    def __init__(self, task: Task, batch: int, rank: int, device: Any) -> None:
        generator = torch.Generator().manual_seed(1000 + rank)
        self._all = [
            tuple(self._there(part, task, device) for part in task.sample(batch, generator))
            for _ in range(self.COUNT)
        ]

    @staticmethod
    def _there(part: Any, task: Task, device: Any) -> Any:
        if task.channels_last and part.dim() == 4:
            part = part.contiguous(memory_format=torch.channels_last)
        return part.to(device)

    def __getitem__(self, step: int) -> Sequence[Any]:
        """Inputs and targets of a step."""
        return self._all[step % self.COUNT]


class Replica:
    """A model under training; all begin with the same weights.

    Args:
        task: the model, made just now: it is this replica's own.
        way: how it communicates.
        group: of that way's backend.
        batches: of this rank.
        device: of this rank.
        bucket_mb: the size of DDP's buckets of gradients, in MiB.
        captured: steps will be captured in a CUDA graph, on the stream that is current now.

    """

    def __init__(
        self,
        task: Task,
        way: Way,
        group: Any,
        batches: Batches,
        device: Any,
        bucket_mb: float,
        *,
        captured: bool = False,
    ) -> None:
        self._task, self._batches, self._device, self._captured = task, batches, device, captured
        module = task.module.to(device)
        if task.channels_last:
            module = module.to(memory_format=torch.channels_last)
        self._module = module
        if way.sharded:
            self._parallel = sharded(module, group, device)
        else:
            self._parallel = DistributedDataParallel(
                module, process_group=group, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True
            )
        if way.hook is not None:
            self._parallel.register_comm_hook(group, way.hook)
        self._optimizer = task.optimizer(module.parameters())
        for options in self._optimizer.param_groups if captured else ():
            if "capturable" in options:
                options["capturable"] = True
        self._steps = 0

    def step(self, *, synchronized: bool = True) -> Any:
        """One step of training in bfloat16, the weights in float32.

        Args:
            synchronized: gradients are averaged over the ranks; else each rank keeps its own, by
                DDP alone.

        Returns:
            The loss of this rank's batch, a tensor on its device.

        """
        inputs, targets = self._batches[self._steps]
        self._steps += 1
        self._optimizer.zero_grad(set_to_none=True)
        with contextlib.nullcontext() if synchronized else self._parallel.no_sync():
            # A graph must make its copies of the weights in bfloat16 itself.
            with torch.autocast(
                self._device.type, torch.bfloat16, cache_enabled=not self._captured
            ):
                loss = self._task.loss(self._parallel(inputs), targets)
            loss.backward()
        self._optimizer.step()
        return loss.detach()

    def capture(self, *, synchronized: bool = True) -> Callable[[], None]:
        """What replays a step, always on the same batch: to the host it is a single launch.

        Args:
            synchronized: as for :meth:`step`.

        """
        for _ in range(WARM):
            self.step(synchronized=synchronized)
        graph = torch.cuda.CUDAGraph()
        # What threads of the backends do meanwhile is none of this capture's business.
        stream = torch.cuda.current_stream()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            self.step(synchronized=synchronized)
        replay: Callable[[], None] = graph.replay
        return replay

    def digest(self) -> str:
        """Of all weights, to the bit."""
        found = hashlib.sha256()
        for parameter in self._module.parameters():
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            found.update(whole.detach().cpu().contiguous().numpy().tobytes())
        return found.hexdigest()


def sharded(module: Any, group: Any, device: Any) -> Any:
    """The module by FSDP2, each layer of its Sequentials by itself."""
    how = {
        "mesh": DeviceMesh.from_group(group, device.type),
        "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    }
    for part in module.children():
        for layer in part if isinstance(part, torch.nn.Sequential) else ():
            fully_shard(layer, **how)
    return fully_shard(module, **how)
