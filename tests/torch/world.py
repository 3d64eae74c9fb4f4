"""A world of rank processes that outlives a test, and the end of each process in it."""

from __future__ import annotations

import ast
import importlib
import multiprocessing
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

NRANKS = 4
PRELOADED = [
    "ringcoll.torch.composite",
    "torch._dynamo",
    "torch._functorch.aot_autograd",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.nn.parallel",
    "torch.utils.data",
    "torch.profiler",
]
LONGEST = 100.0  # seconds for a function on all ranks
CHECKS = Path(__file__).parent / "on_ranks"


def names_of(module: str) -> list[str]:
    """The functions of a module of ``on_ranks``, without loading it."""
    tree = ast.parse((CHECKS / f"{module}.py").read_text(encoding="utf-8"))
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    return [f"{module}.{name}" for name in functions if not name.startswith("_")]


def serve(
    rank: int, nranks: int, store: str, pipe: Connection, backend: str, cuda: bool, named: bool
) -> None:
    """A rank: joins the group, then runs what it is told."""
    import torch
    import torch.distributed as dist

    from ringcoll.torch_entry import register

    torch.set_num_threads(1)
    register()
    if cuda:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=nranks,
        timeout=timedelta(seconds=60),
        device_id=torch.device("cuda", rank) if named else None,
    )
    while True:
        name, arguments = pipe.recv()
        if not name:
            dist.destroy_process_group()
            return
        module, _, function = name.partition(".")
        try:
            found = getattr(importlib.import_module(f"tests.torch.on_ranks.{module}"), function)
            pipe.send((True, found(rank, nranks, *arguments)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


class World:
    """Some ranks, and pipes to them.

    Args:
        nranks: how many.
        backend: of their group.
        cuda: each has a GPU, of which the first ranks share none.
        named: which is named when the group is made.

    """

    def __init__(
        self, nranks: int, backend: str = "ringcoll", *, cuda: bool = False, named: bool = False
    ) -> None:
        # Torch is loaded once, by the server from which the ranks are forked; but a process that
        # has so much as counted GPUs leaves none to its children.
        context: Any = multiprocessing.get_context("spawn" if cuda else "forkserver")
        if not cuda:
            context.set_forkserver_preload(PRELOADED)
        self.folder = tempfile.TemporaryDirectory()
        self.pipes, self.processes = [], []
        for rank in range(nranks):
            here, there = context.Pipe()
            store = f"{self.folder.name}/store"
            process = context.Process(
                target=serve, args=(rank, nranks, store, there, backend, cuda, named)
            )
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def run(self, name: str, *arguments: object) -> list:
        for pipe in self.pipes:
            pipe.send((name, arguments))
        answers: dict[Any, Any] = {}
        failures: dict[int, Any] = {}
        deadline = time.monotonic() + LONGEST
        while len(answers) < len(self.pipes) and time.monotonic() < deadline:
            # Where one has failed the others only wait for it.
            left = [pipe for pipe in self.pipes if pipe not in answers]
            for ready in wait(left, 1.0):
                rank = next(q for q, pipe in enumerate(self.pipes) if pipe is ready)
                try:
                    well, answer = self.pipes[rank].recv()
                except (EOFError, OSError):
                    well, answer = False, f"its process ended: {self.processes[rank].exitcode}"
                answers[ready] = answer
                if not well:
                    failures[rank] = answer
                    deadline = min(deadline, time.monotonic() + 5.0)
        missing = [rank for rank, pipe in enumerate(self.pipes) if pipe not in answers]
        if failures or missing:
            said = "\n".join(f"rank {rank}: {text}" for rank, text in failures.items())
            raise AssertionError(f"{name}: ranks {missing} did not answer\n{said}")
        return [answers[pipe] for pipe in self.pipes]

    def close(self, *, kill: bool = False) -> list:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            if kill:
                process.kill()
            else:
                pipe.send(("", ()))
        for process in self.processes:
            process.join(20)
        codes = [process.exitcode for process in self.processes]
        for process in self.processes:
            process.kill()
            process.join()
            process.close()
        for pipe in self.pipes:
            pipe.close()
        self.folder.cleanup()
        return codes


class Worlds:
    """The world of the session, made when it is needed."""

    def __init__(self) -> None:
        self.world: World | None = None

    def run(self, name: str, *arguments: object) -> list:
        if self.world is None:
            self.world = World(NRANKS)
        try:
            return self.world.run(name, *arguments)
        except BaseException:
            self.drop()
            raise

    def drop(self) -> None:
        """End this world by force: the next test gets another."""
        world, self.world = self.world, None
        if world is not None:
            world.close(kill=True)

    def close(self) -> None:
        if self.world is not None:
            assert self.world.close() == [0] * NRANKS
