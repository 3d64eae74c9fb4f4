"""Select what a call of CPU ranks runs: the algorithm's plan, its launch and its layout.

Pure: ranks with the same call, options and knowledge of each other's buffers select the same
without communication.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from ringcoll.algorithms import ALGORITHMS, Algorithm, build, name_of
from ringcoll.algorithms.channels import Channels, channelled
from ringcoll.arguments.calls import Call
from ringcoll.collectives import COLLECTIVES
from ringcoll.communicator.across import HOST, MESSAGE_BYTES, across, tuned_across
from ringcoll.dtypes import Accumulate
from ringcoll.encode import encode
from ringcoll.errors import ArgumentError, LaunchRefused, WrongResult
from ringcoll.executors.binder import slot_bytes
from ringcoll.executors.cpu_call import CpuChoice
from ringcoll.launch import ALL_MAPPED, Launch, Layout
from ringcoll.lower import place
from ringcoll.model import tuner
from ringcoll.plan import Buffer, Plan, format_plan

if TYPE_CHECKING:
    from ringcoll.model.machine import Machine

__all__ = [
    "AGREED_BYTES",
    "HOST",
    "Algorithm",
    "PlanOptions",
    "agrees",
    "format_selection",
    "prove",
    "select",
    "tuned",
    "user_plan",
]

AGREED_BYTES = 32 << 10
"""Bytes from which ranks wait for all hellos, which name the buffers that peers can reach."""

_ONE_HOP = ("one_shot", "all_pairs")
"""Algorithms of one hop. 4 ranks, 16 KiB: all_reduce by one_shot took 27 µs, by two_shot_fused,
which staged has three, 48 µs."""

_SLICE_BYTES = 128 << 10
"""Bytes of a staged slice: it is still in the writer's cache when the others read it."""

_WINDOW = 2

_MAKING = threading.RLock()
"""Held to make a plan: of ranks that are threads, one makes it and the others find it."""


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """The options of a call that decide which plan runs; None leaves one to the library."""

    algorithm: Algorithm | None = None
    slices: int | None = None
    channels: int | None = None
    deterministic: bool = False
    accumulate: Accumulate = "wide"
    verify: bool = False

    def signature(self, call: Call, nranks: int) -> str:
        """The options as text, which must be equal on all ranks; "" if none is set."""
        texts = {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if field.name != "verify" and getattr(self, field.name) != field.default
        }
        if callable(self.algorithm):
            with _MAKING:
                plan = build(call.collective, self.algorithm, nranks, root=call.root)
            texts["algorithm"] = f"{name_of(self.algorithm)} (plan {_digest(plan)})"
        return " ".join(f"{name}={value}" for name, value in texts.items())


def agrees(call: Call) -> bool:
    """Whether the ranks must know each other's hellos before they choose a launch."""
    scaled = call.op is not None and call.op.scalar is not None
    return call.nbytes > AGREED_BYTES or scaled or call.collective == "all_to_all"


def select(
    call: Call,
    mapped: frozenset[Buffer],
    in_place: bool,
    half: int,
    *,
    nranks: int,
    options: PlanOptions,
    nodes: tuple[int, ...] = (),
    machine: Machine | None = None,
) -> CpuChoice:
    """The plan, launch and layout of a call whose counts are equal on all ranks.

    ``half`` is the bytes of SCRATCH that one call may use; calls take the two halves by turns.
    """
    with _MAKING:
        plan, channels = _plan(call, nranks, options, nodes, machine)
        return _selected(call, mapped, in_place, half, plan, channels, options, nodes)


def _selected(
    call: Call,
    mapped: frozenset[Buffer],
    in_place: bool,
    half: int,
    plan: Plan,
    channels: Channels | None,
    options: PlanOptions,
    nodes: tuple[int, ...],
) -> CpuChoice:
    if callable(options.algorithm):
        # Before lowering, so that an error names the user's own chunks.
        prove(plan, Launch(), options)
    align = max(1, 64 // call.dtype.itemsize)
    counts, displs = call.counts or (call.count,), call.displs or None
    shares = (1,) if channels is None else channels.shares
    layout = Layout(plan.collective, counts, align=align, displs=displs, shares=shares)
    # A barrier has nothing to slice, even if the communicator's options set slices.
    slices = options.slices or 1 if plan.collective.name != "barrier" else 1
    if options.slices is None and (mapped != ALL_MAPPED or nodes):
        longest = MESSAGE_BYTES if nodes else _SLICE_BYTES
        slices = max(1, -(-layout.width() * call.dtype.itemsize // longest))
    while True:
        launch = Launch("Simple", slices, _WINDOW, mapped, in_place, nodes)
        layout = replace(layout, slices=slices)
        program = encode(plan, launch)
        if program.scratch * program.slots * slot_bytes(call, layout) <= half:
            break
        if layout.width() <= align:
            raise LaunchRefused(
                f"{call.collective}: {program.scratch} SCRATCH chunks do not fit {half} bytes; "
                f"use another algorithm"
            )
        slices *= 2
    prove(plan, replace(launch, slices=min(slices, 2 * _WINDOW + 2)), options)
    return CpuChoice(plan, launch, layout)


def _plan(
    call: Call, nranks: int, options: PlanOptions, nodes: tuple[int, ...], machine: Machine | None
) -> tuple[Plan, Channels | None]:
    name = call.collective
    if callable(options.algorithm):
        return build(name, options.algorithm, nranks, root=call.root), None
    where = f"{name} on rank {call.rank}"
    if options.algorithm is not None and options.algorithm not in ALGORITHMS[name]:
        raise ArgumentError(
            f"{where}: algorithm={options.algorithm!r} is not one of {', '.join(ALGORITHMS[name])}"
        )
    algorithm, channels = options.algorithm, options.channels
    if algorithm is None and channels is None:
        algorithm = _tuned_for(call, nranks, options, nodes, machine)
    found = None if machine is None else machine.channels
    algorithm, along = channelled(where, name, algorithm, nranks, channels, found)
    rings = None if along is None else along.rings
    if nodes:
        ordered = options.deterministic and COLLECTIVES[name].reduces
        return across(name, algorithm, nodes, root=call.root, rings=rings, ordered=ordered), along
    return build(name, algorithm, nranks, root=call.root, rings=rings), along


def _tuned_for(
    call: Call, nranks: int, options: PlanOptions, nodes: tuple[int, ...], machine: Machine | None
) -> str:
    """The tuner's algorithm for a call that leaves it open."""
    return tuned(
        call.collective,
        nranks,
        call.nbytes,
        deterministic=options.deterministic,
        accumulate=options.accumulate,
        nodes=nodes,
        machine=machine,
    ).algorithm


def format_selection(
    call: Call,
    found: CpuChoice,
    *,
    nranks: int,
    options: PlanOptions,
    nodes: tuple[int, ...] = (),
    machine: Machine | None = None,
) -> str:
    """What a call runs, as one line for the log."""
    given, channels = options.algorithm, options.channels
    if callable(given):
        by = f"{getattr(given, '__qualname__', 'a function')} (algorithm= is a function)"
    elif given is not None or channels is not None:
        by = f"ring (channels={channels})" if given is None else f"{given} (algorithm={given!r})"
    else:
        by = f"{_tuned_for(call, nranks, options, nodes, machine)} (the tuner's choice)"
    launch = found.launch
    reached = " and ".join(sorted(buffer.name for buffer in launch.mapped))
    data = f"peers reach {reached}" if reached else "staged"
    return (
        f"{call.tagged(call.signature())}, {call.nbytes} bytes: {by}, S = {launch.slices}, {data}"
    )


def tuned(
    collective: str,
    nranks: int,
    nbytes: int,
    *,
    deterministic: bool = False,
    accumulate: Accumulate = "wide",
    nodes: tuple[int, ...] = (),
    machine: Machine | None = None,
) -> tuner.Choice:
    """The algorithm that the model finds fastest for a size, rounded up to a power of 2.

    ``accumulate`` matters because only rounding at every hop shows the order of a sum.
    """
    size = 1 << max(0, nbytes - 1).bit_length()
    ordered = deterministic and COLLECTIVES[collective].reduces
    rounding = accumulate if ordered else "wide"
    with _MAKING:
        if nodes:
            return tuned_across(collective, nodes, size, ordered, rounding)
        return _tuned(collective, nranks, size, ordered, rounding, machine)


@lru_cache(maxsize=1024)
def _tuned(
    collective: str,
    nranks: int,
    nbytes: int,
    deterministic: bool,
    accumulate: Accumulate,
    machine: Machine | None,
) -> tuner.Choice:
    links, channels = (HOST, None) if machine is None else (machine.links, machine.channels)

    def refuse(algorithm: str) -> str:
        plan = tuner.plan_for(collective, algorithm, nranks, channels=channels)
        if not deterministic:
            return ""
        from ringcoll.verifier.prover import prove_launch

        if prove_launch(plan, Launch(), accumulate=accumulate).rank_order:
            return ""
        return "it does not sum in rank order, which deterministic=True asks for"

    if nbytes > AGREED_BYTES:
        candidates = tuner.candidates_for(collective, nranks, channels=channels, refuse=refuse)
    else:
        # A small call is staged whatever its buffers are, so the model times its staged plans; a
        # wake-up costs more than its bytes, so it takes one hop.
        candidates = tuple(
            tuner.Candidate(name, _staged(collective, name, nranks), 1, refuse(name))
            for name in ALGORITHMS[collective]
            if name in _ONE_HOP
        )
    return tuner.choose(collective, nranks, nbytes, links=links, candidates=candidates)


@lru_cache(maxsize=256)
def _staged(collective: str, algorithm: str, nranks: int) -> Callable[[], Plan]:
    """Makes the plan of a small call; the same function each time: it is the tuner's cache key."""
    launch = Launch(mapped=frozenset(), in_place=COLLECTIVES[collective].reduces)
    return lambda: place(build(collective, algorithm, nranks), launch)


@lru_cache(maxsize=64)
def _digest(plan: Plan) -> str:
    """A digest, by which ranks compare the plans that their users' functions have made."""
    return hashlib.blake2b(format_plan(plan).encode(), digest_size=6).hexdigest()


def user_plan(call: Call, nranks: int, options: PlanOptions) -> Plan | None:
    """The proven plan of a user's function; None where the algorithm is a built-in one."""
    kind, algorithm = COLLECTIVES[call.collective], options.algorithm
    plan: Plan | None = None
    with _MAKING:
        if callable(algorithm):
            plan = build(call.collective, algorithm, nranks, root=call.root)
            prove(plan, Launch(), options)
        elif algorithm is not None and options.deterministic and kind.reduces:
            prove(build(call.collective, algorithm, nranks, root=call.root), Launch(), options)
    return plan


def prove(plan: Plan, launch: Launch, options: PlanOptions) -> None:
    """Prove a user's plan, or a built-in one with ``verify=True`` or ``deterministic=True``."""
    if callable(options.algorithm) or options.verify or options.deterministic:
        from ringcoll.verifier.prover import prove_launch

        ordered, accumulate = options.deterministic, options.accumulate
        if isinstance(options.algorithm, str) and ordered and plan.collective.reduces:
            if not prove_launch(plan, launch, accumulate=accumulate).rank_order:
                raise WrongResult(_not_deterministic(plan, options.algorithm, accumulate))
            return
        prove_launch(plan, launch, deterministic=ordered, accumulate=accumulate)


def _not_deterministic(plan: Plan, algorithm: str, accumulate: Accumulate) -> str:
    """What is wrong with a built-in algorithm that does not sum in rank order, and which do."""
    from ringcoll.verifier.prover import prove_launch

    name, nranks = plan.collective.name, plan.collective.nranks
    right = []
    for other in ALGORITHMS[name]:
        with contextlib.suppress(ArgumentError):  # not for so many ranks
            made = build(name, other, nranks, root=plan.collective.root)
            if prove_launch(made, Launch(), accumulate=accumulate).rank_order:
                right.append(other)
    way = f"pass one of {', '.join(right)}, or leave algorithm out" if right else "leave one out"
    return (
        f"{name}: algorithm={algorithm!r} is not deterministic on {nranks} ranks: it does not sum "
        f"in rank order, as deterministic=True asks; {way}"
    )
