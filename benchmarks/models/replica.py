"""One rank's replica of a model: DDP over one of the ways to communicate, and its steps."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
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

    """

    backend: str
    hook: Any = None


WAYS: Mapping[str, Way] = {
    "peer": Way("peer"),
    "peer-bf16": Way("peer", default_hooks.bf16_compress_hook),
    "ringcoll": Way("ringcoll"),
    "ringcoll-hook": Way("ringcoll", hooks.all_reduce),
    "ringcoll-bf16": Way("ringcoll", hooks.bf16_compress),
}
"""By the names of ``--ways``; the hooks of ringcoll register buckets, which are then zero-copy."""


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

    """

    def __init__(
        self, task: Task, way: Way, group: Any, batches: Batches, device: Any, bucket_mb: float
    ) -> None:
        self._task, self._batches, self._device = task, batches, device
        module = task.module.to(device)
        if task.channels_last:
            module = module.to(memory_format=torch.channels_last)
        self._module = module
        self._ddp = DistributedDataParallel(
            module, process_group=group, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True
        )
        if way.hook is not None:
            self._ddp.register_comm_hook(group, way.hook)
        self._optimizer = task.optimizer(module.parameters())
        self._steps = 0

    def step(self, *, synchronized: bool = True) -> Any:
        """One step of training in bfloat16, the weights in float32.

        Args:
            synchronized: gradients are averaged over the ranks; else each rank keeps its own.

        Returns:
            The loss of this rank's batch, a tensor on its device.

        """
        inputs, targets = self._batches[self._steps]
        self._steps += 1
        self._optimizer.zero_grad(set_to_none=True)
        with contextlib.nullcontext() if synchronized else self._ddp.no_sync():
            with torch.autocast(self._device.type, torch.bfloat16):
                loss = self._task.loss(self._ddp(inputs), targets)
            loss.backward()
        self._optimizer.step()
        return loss.detach()

    def digest(self) -> str:
        """Of all weights, to the bit."""
        found = hashlib.sha256()
        for parameter in self._module.parameters():
            found.update(parameter.detach().cpu().contiguous().numpy().tobytes())
        return found.hexdigest()
