"""What a call on GPUs runs: algorithm, protocol, slices and how many CUDA blocks.

It goes one of three ways: in lines whose signals ride in the data, in words of their own, or by
copy engines. The thresholds between them are measured on 4 H200 over NVSwitch, and the clock says
what a machine's links make of it elsewhere; :func:`choose` is pure and equal on all ranks. An
option of the call goes before them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

from ringcoll.algorithms.channels import Channels
from ringcoll.arguments.calls import Call
from ringcoll.collectives import COLLECTIVES
from ringcoll.errors import ArgumentError, LaunchRefused
from ringcoll.executors.cuda.choose_copies import by_copies
from ringcoll.executors.cuda.choose_ll import in_lines, lines_algorithm, lines_by_size
from ringcoll.executors.cuda.choose_simple import USUAL, in_words, slices_of
from ringcoll.executors.cuda.chosen import Chosen
from ringcoll.executors.cuda.crossover import compared
from ringcoll.executors.cuda.limits import Resources, Wishes
from ringcoll.executors.cuda.ll_layout import LANES
from ringcoll.launch import PROTOCOLS
from ringcoll.model.machine import Machine
from ringcoll.plan import Buffer

__all__ = ["choose"]


def choose(
    call: Call, resources: Resources, *, mapped: frozenset[Buffer], wishes: Wishes
) -> Chosen:
    """The plan, launch and grid of a call.

    Args:
        call: checked.
        resources: what the ranks have.
        mapped: the buffers that all ranks can reach.
        wishes: the options.

    Raises:
        LaunchRefused: the options cannot carry the call.
        ArgumentError: an option that there is not.

    """
    machine = resources.machine
    if machine is None or (machine.all_pairs and machine.channels is None):
        return _choose(call, resources, mapped, wishes)
    asked, why = _by_machine(call, resources, machine, mapped, wishes)
    most = resources.blocks if wishes.blocks is None or wishes.channels else wishes.blocks
    for channels in _narrower(machine.channels):
        with contextlib.suppress(LaunchRefused):
            there = replace(resources, machine=replace(machine, channels=channels))
            found = _choose(call, there, mapped, asked)
            if found.blocks <= most or channels is None or len(channels.rings) == 1:
                return replace(found, why=why)
    return _choose(call, resources, mapped, wishes)


def _by_machine(
    call: Call, resources: Resources, machine: Machine, mapped: frozenset[Buffer], wishes: Wishes
) -> tuple[Wishes, tuple[str, ...]]:
    """The options with the algorithm that the machine's links ask for, and why."""
    kind = COLLECTIVES[call.collective]
    asked = (wishes.algorithm, wishes.plan, wishes.channels) != (None, None, None)
    if asked or wishes.engine == "copy" or (wishes.ordered and kind.reduces):
        return wishes, ()
    lines = wishes.protocol
    if lines is None and (wishes.slices or 1) == 1:
        lines = lines_by_size(call, resources.nvlink)
    usual = USUAL[call.collective][bool(mapped)]
    if lines in LANES:
        usual = lines_algorithm(call, resources.nranks, lines)
    slices = wishes.slices or slices_of(call, wishes, "chain")
    algorithm, why = compared(
        machine, call.collective, resources.nranks, call.nbytes, call.root, usual, slices
    )
    return wishes if algorithm == usual else replace(wishes, algorithm=algorithm), why


def _narrower(channels: Channels | None) -> Iterator[Channels | None]:
    """The rings of a machine, then fewer of them: blocks and what a launch carries are limited."""
    yield channels
    while channels is not None and len(channels.rings) > 1:
        channels = channels.first(len(channels.rings) // 2)
        yield channels


def _choose(call: Call, resources: Resources, mapped: frozenset[Buffer], wishes: Wishes) -> Chosen:
    name, protocol = call.collective, wishes.protocol
    where = f"{name} on rank {call.rank}"
    if protocol not in (None, *PROTOCOLS):
        raise ArgumentError(
            f"{where}: protocol={protocol!r}; GPU ranks run {', '.join(map(repr, PROTOCOLS))}"
        )
    if wishes.engine == "copy" and name != "barrier" and resources.nranks > 1:
        return by_copies(call, resources, mapped, wishes)
    if protocol == "LL128" and not resources.nvlink:
        raise LaunchRefused(
            f"{where}: protocol='LL128' needs NVLink between all ranks, or its lines come in "
            f"pieces; nvidia-ml-py tells of none here: leave protocol out"
        )
    sliced = (wishes.slices or 1) > 1
    if protocol in LANES and sliced and name != "barrier":
        raise ArgumentError(
            f"{where}: slices={wishes.slices}, but protocol={protocol!r} has one slice; leave "
            f"slices out or take protocol='Simple'"
        )
    if name == "barrier" or sliced or protocol == "Simple":
        return in_words(call, resources, mapped, wishes)
    if protocol:
        return in_lines(call, resources, wishes, protocol)
    lines = lines_by_size(call, resources.nvlink)
    if lines:
        # A plan whose signals cannot ride, or too many lines for some other dtype or algorithm.
        with contextlib.suppress(LaunchRefused):
            return in_lines(call, resources, wishes, lines)
    return in_words(call, resources, mapped, wishes)
