"""Choose algorithm, protocol, slices and grid of a call on GPUs.

Protocols LL and LL128 carry small calls, Simple or copy engines large ones. Options come first;
then thresholds measured on 4 H200 over NVSwitch; on other machines the timing model compares the
result with rings. :func:`choose` is pure and equal on all ranks.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from ringcoll.algorithms.channels import Channels
from ringcoll.arguments.calls import Call
from ringcoll.collectives import COLLECTIVES
from ringcoll.errors import ArgumentError, LaunchRefused
from ringcoll.executors.cuda.choose_copies import choose_copies
from ringcoll.executors.cuda.choose_ll import choose_ll, ll_algorithm, ll_protocol
from ringcoll.executors.cuda.choose_simple import DEFAULT_ALGORITHMS, choose_simple, slices_of
from ringcoll.executors.cuda.kernel_choice import KernelChoice
from ringcoll.executors.cuda.limits import KernelOptions, Resources
from ringcoll.executors.cuda.ll_layout import LANES
from ringcoll.launch import PROTOCOLS
from ringcoll.model import tuner
from ringcoll.model.machine import Machine
from ringcoll.plan import Buffer

HOP = 1.8e-6
"""Seconds of one more hop between GPUs: the difference of all_reduce in two hops and in one on 4
H200. The size from which rings are faster depends on it."""

_COMPARING = threading.Lock()
"""Held to compare: of ranks that are threads, one compares and the others use its result."""

_RINGED = {
    "all_reduce": "ring",
    "all_gather": "ring",
    "reduce_scatter": "ring",
    "broadcast": "chain",
    "reduce": "chain",
}


def choose(
    call: Call, resources: Resources, *, mapped: frozenset[Buffer], options: KernelOptions
) -> KernelChoice:
    """The plan, launch and grid of a call; LaunchRefused if the options cannot carry it."""
    machine = resources.machine
    if machine is None or (machine.all_pairs and machine.channels is None):
        return _choose(call, resources, mapped, options)
    compared, why = _by_machine(call, resources, machine, mapped, options)
    most = resources.blocks if options.blocks is None or options.channels else options.blocks
    for channels in _narrower(machine.channels):
        with contextlib.suppress(LaunchRefused):
            there = replace(resources, machine=replace(machine, channels=channels))
            found = _choose(call, there, mapped, compared)
            if found.blocks <= most or channels is None or len(channels.rings) == 1:
                return replace(found, why=why)
    return _choose(call, resources, mapped, options)


def _by_machine(
    call: Call,
    resources: Resources,
    machine: Machine,
    mapped: frozenset[Buffer],
    options: KernelOptions,
) -> tuple[KernelOptions, tuple[str, ...]]:
    """The options with the faster algorithm on the machine's links, and the reasons."""
    kind = COLLECTIVES[call.collective]
    chosen = (options.algorithm, options.plan, options.channels) != (None, None, None)
    if chosen or options.engine == "copy" or (options.ordered and kind.reduces):
        return options, ()
    lines = options.protocol
    if lines is None and (options.slices or 1) == 1:
        lines = ll_protocol(call, resources.nvlink)
    default = DEFAULT_ALGORITHMS[call.collective][bool(mapped)]
    if lines in LANES:
        default = ll_algorithm(call, resources.nranks, lines)
    slices = options.slices or slices_of(call, options, "chain")
    algorithm, why = faster_algorithm(
        machine, call.collective, resources.nranks, call.nbytes, call.root, default, slices
    )
    return options if algorithm == default else replace(options, algorithm=algorithm), why


def _narrower(channels: Channels | None) -> Iterator[Channels | None]:
    """The rings of a machine, then fewer: blocks and the parameters of a launch are limited."""
    yield channels
    while channels is not None and len(channels.rings) > 1:
        channels = channels.first(len(channels.rings) // 2)
        yield channels


def _choose(
    call: Call, resources: Resources, mapped: frozenset[Buffer], options: KernelOptions
) -> KernelChoice:
    name, protocol = call.collective, options.protocol
    where = f"{name} on rank {call.rank}"
    if protocol not in (None, *PROTOCOLS):
        raise ArgumentError(
            f"{where}: protocol={protocol!r}; GPU ranks run {', '.join(map(repr, PROTOCOLS))}"
        )
    if options.engine == "copy" and name != "barrier" and resources.nranks > 1:
        return choose_copies(call, resources, mapped, options)
    if protocol == "LL128" and not resources.nvlink:
        raise LaunchRefused(
            f"{where}: protocol='LL128' needs NVLink between all ranks, which keeps its lines "
            f"whole; nvidia-ml-py reports none here: leave protocol out"
        )
    sliced = (options.slices or 1) > 1
    if protocol in LANES and sliced and name != "barrier":
        raise ArgumentError(
            f"{where}: slices={options.slices}, but protocol={protocol!r} has one slice; leave "
            f"slices out or take protocol='Simple'"
        )
    if name == "barrier" or sliced or protocol == "Simple":
        return choose_simple(call, resources, mapped, options)
    if protocol:
        return choose_ll(call, resources, options, protocol)
    lines = ll_protocol(call, resources.nvlink)
    if lines:
        # A user's plan may need signals of its own, and some dtypes need too many lines.
        with contextlib.suppress(LaunchRefused):
            return choose_ll(call, resources, options, lines)
    return choose_simple(call, resources, mapped, options)


def faster_algorithm(
    machine: Machine,
    collective: str,
    nranks: int,
    nbytes: int,
    root: int,
    default: str,
    slices: int,
) -> tuple[str, tuple[str, ...]]:
    """The algorithm that the timing model finds faster on these links, and why.

    Args:
        nbytes: bytes of the larger buffer; rounded up to a power of two.

    Returns:
        ``default``, or the algorithm along rings; the reasons, none where there is no other.

    """
    ringed = _RINGED.get(collective, default)
    if ringed == default or machine.all_pairs:
        return default, ()
    size = 1 << max(0, nbytes - 1).bit_length()
    with _COMPARING:
        return _faster_algorithm(machine, collective, nranks, size, root, default, slices)


@lru_cache(maxsize=1024)
def _faster_algorithm(
    machine: Machine,
    collective: str,
    nranks: int,
    nbytes: int,
    root: int,
    default: str,
    slices: int,
) -> tuple[str, tuple[str, ...]]:
    candidates = tuple(
        tuner.candidate_for(
            collective,
            algorithm,
            nranks,
            root=root,
            channels=machine.channels,
            slices=slices if algorithm == "chain" else 1,
        )
        for algorithm in (default, _RINGED[collective])
    )
    found = tuner.choose(
        collective, nranks, nbytes, links=machine.links, root=root, candidates=candidates
    )
    return found.algorithm, found.reasons
