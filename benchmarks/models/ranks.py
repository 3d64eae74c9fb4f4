"""What one rank of the benchmark of training does, in a process of its own."""

from __future__ import annotations

import gc
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.processes import Link
from benchmarks.models.figures import ALONE
from benchmarks.models.on_nodes import Lines
from benchmarks.models.replica import MODELS, WAYS, Batches, Replica, Way
from ringcoll.torch_entry import register

__all__ = ["Plan", "measure", "repeat"]


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured.

    Args:
        cases: models, and samples of a batch of each rank.
        ways: names of :data:`benchmarks.models.replica.WAYS`.
        device: "cuda" or "cpu".
        tiny: small stand-ins for the models.
        curve: steps of training before anything is timed, whose losses are kept.
        steps: of a round that is timed.
        rounds: of every way, in turns.
        buckets: sizes of DDP's buckets in MiB; the first is what is timed.
        store: file of the rendezvous.
        graphs: what is timed are replays of a step that was captured in a CUDA graph.

    """

    cases: tuple[tuple[str, int], ...]
    ways: tuple[str, ...]
    device: str
    tiny: bool
    curve: int
    steps: int
    rounds: int
    buckets: tuple[float, ...]
    store: str
    graphs: bool = False


def measure(link: Link | Lines, plan: Plan) -> None:
    """Losses and times of all cases by all ways.

    Sends ``{"curve": losses, "digest": of the weights after them}`` for each way of a case, and
    ``{"seconds": of a step}`` for each round; all with ``case`` and ``way``. Of graphs the weights
    after the last round, too: ``{"after": digest}``.
    """
    device, groups = _begin(link, plan, deterministic=False)
    if plan.graphs:  # what is captured must have been made on the same stream
        torch.cuda.set_stream(torch.cuda.Stream(device))
    for case, (model, batch) in enumerate(plan.cases):
        batches = Batches(MODELS[model](tiny=plan.tiny), batch, link.rank, device)

        def replica(way: str, model: str = model, batches: Batches = batches) -> Replica:
            return _replica(plan, model, way, groups, batches, device, plan.buckets[0])

        replicas = {way: replica(way) for way in plan.ways}
        for way, trained in replicas.items():
            losses = _curve(trained, plan.curve)
            said = {"case": case, "way": way, "curve": losses, "digest": trained.digest()}
            link.send(said)
        replicas[ALONE] = replica("peer")
        _curve(replicas[ALONE], 2)
        steps = {
            way: trained.capture(synchronized=way != ALONE)
            if plan.graphs
            else partial(trained.step, synchronized=way != ALONE)
            for way, trained in replicas.items()
        }
        for turn in range(plan.rounds):
            # In an order of its own, the same on all ranks: what a way comes after matters.
            for way, step in random.Random(turn).sample([*steps.items()], len(steps)):
                seconds = _timed(link, device, step, plan.steps)
                link.send({"case": case, "way": way, "seconds": seconds})
        for way in plan.ways if plan.graphs else ():
            link.send({"case": case, "way": way, "after": replicas[way].digest()})
        del replicas, trained, batches, steps, step
        gc.collect()
    _end(link)


def repeat(link: Link | Lines, plan: Plan) -> None:
    """Train each case by each way with every size of buckets, and send the weights' digests.

    Sends ``{"digest", "curve", "bucket"}`` with ``case`` and ``way``.
    """
    device, groups = _begin(link, plan, deterministic=True)
    for case, (model, batch) in enumerate(plan.cases):
        batches = Batches(MODELS[model](tiny=plan.tiny), batch, link.rank, device)
        for way in plan.ways:
            for bucket in plan.buckets:
                trained = _replica(
                    plan, model, way, groups, batches, device, bucket, repeatable=True
                )
                losses = _curve(trained, plan.curve)
                said = {"case": case, "way": way, "bucket": bucket, "curve": losses}
                link.send({**said, "digest": trained.digest()})
                del trained
                gc.collect()
    _end(link)


def _begin(link: Link | Lines, plan: Plan, *, deterministic: bool) -> tuple[Any, dict[str, Any]]:
    """This rank's device, and a group for each kind of backend."""
    torch.use_deterministic_algorithms(deterministic)  # only to warn lets attention differ
    torch.backends.cudnn.benchmark = not deterministic
    torch.backends.cudnn.deterministic = deterministic
    device = torch.device(plan.device)
    if plan.device == "cuda":
        device = torch.device("cuda", link.rank)
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)  # ranks and their threads are more than cores already
    register()
    peer = "nccl" if plan.device == "cuda" else "gloo"
    dist.init_process_group(
        peer, init_method=f"file://{plan.store}", rank=link.rank, world_size=link.nranks
    )
    groups: dict[str, Any] = {"peer": dist.group.WORLD}
    for options in {str(way.options): way.options for way in _ringcoll(plan)}.values():
        given = dict(options) if plan.device == "cuda" else {}  # CPU ranks have none of these
        if deterministic:
            given["deterministic"] = True
        groups[f"ringcoll{options}"] = dist.new_group(backend="ringcoll", pg_options=given)
    return device, groups


def _ringcoll(plan: Plan) -> list[Way]:
    return [WAYS[way] for way in plan.ways if WAYS[way].backend == "ringcoll"]


def _end(link: Link | Lines) -> None:
    """Let nobody leave while others may still need it."""
    link.barrier()
    dist.destroy_process_group()


def _replica(
    plan: Plan,
    model: str,
    way: str,
    groups: dict[str, Any],
    batches: Batches,
    device: Any,
    bucket: float,
    *,
    repeatable: bool = False,
) -> Replica:
    torch.manual_seed(0)
    task = MODELS[model](tiny=plan.tiny, repeatable=repeatable)
    kind = WAYS[way]
    group = groups["peer" if kind.backend == "peer" else f"ringcoll{kind.options}"]
    return Replica(task, kind, group, batches, device, bucket, captured=plan.graphs)


def _curve(replica: Replica, steps: int) -> list[float]:
    """Train; the loss of every step, averaged over the ranks."""
    losses = torch.stack([replica.step() for _ in range(steps)]).double()
    dist.all_reduce(losses)
    return [float(loss) / dist.get_world_size() for loss in losses]


def _timed(link: Link | Lines, device: Any, step: Callable[[], object], steps: int) -> float:
    """Seconds of a step on this rank; all begin together."""
    wait = torch.cuda.synchronize if device.type == "cuda" else os.sched_yield
    wait()
    link.barrier()
    begun = time.perf_counter()
    for _ in range(steps):
        step()
    wait()
    return (time.perf_counter() - begun) / steps
