"""What a call on GPUs runs: algorithm, protocol, slices and how many CUDA blocks.

The thresholds are measured on 4 H200 over NVSwitch; :func:`choose` is pure and equal on all
ranks. An option of the call goes before them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from ringcoll.algorithms.channels import Channels
from ringcoll.arguments.calls import Call
from ringcoll.collectives import COLLECTIVES
from ringcoll.encode import Program, encode
from ringcoll.errors import ArgumentError, LaunchRefused
from ringcoll.executors.cuda.arena import Arena
from ringcoll.executors.cuda.copies import copied_blocks, crosses
from ringcoll.executors.cuda.crossover import compared
from ringcoll.executors.cuda.either import Variant, carried, fits
from ringcoll.executors.cuda.lines import WORKERS, line_bytes
from ringcoll.executors.cuda.places import LANES, Places
from ringcoll.executors.cuda.planned import Planned, planned
from ringcoll.executors.cuda.simple import THREADS, scratch_bytes
from ringcoll.launch import PROTOCOLS, Launch, Layout
from ringcoll.plan import Buffer, Plan
from ringcoll.timing.machine import Machine

__all__ = ["Chosen", "Resources", "Wishes", "choose"]

SYNC_THREADS = 32

HOP_BYTES = 650 << 10
"""Bytes that a link carries in the time that another hop takes, 1.8 µs at 364 GB/s: all_reduce goes
by one hop as long as that sends less more than two would. 4 H200: in lines of LL the two met at
128 KiB, in those of LL128 at 256 KiB."""

LL_BYTES = {"all_reduce": 64 << 10, "broadcast": 32 << 10, "reduce": 64 << 10}
"""Bytes of the larger buffer up to which LL is chosen where LL128 is legal; else 192 KiB. LL128
looks twice, for the flag and for the data, and sends half as much. 4 H200: all_reduce of 64 KiB
took 3.44 and 3.43 µs, 128 KiB 4.60 and 3.97; all_gather of 128 KiB 3.13 and 3.20, 256 KiB 3.64 and
3.57."""

LL128_BYTES = {"broadcast": 8 << 20}
"""Bytes up to which LL128 is chosen; else 4 MiB. 4 H200, 4 MiB, LL128 and Simple: all_reduce 24.0
and 28.7 µs, all_gather 13.7 and 17.8, reduce_scatter 13.9 and 20.1, broadcast 16.4 and 43.1."""

LINES_BYTES = {"all_reduce": 1 << 20}
"""Bytes up to which LL is chosen where LL128 is not legal; else 2 MiB. 4 H200, LL and Simple:
all_reduce of 1 MiB took 11.9 and 14.7 µs, 2 MiB 23.0 and 18.9; all_gather of 2 MiB 13.1 and
13.5."""

DIRECT_BYTES = {
    "LL": {"broadcast": 128 << 10, "reduce": 384 << 10},
    "LL128": {"broadcast": 320 << 10, "reduce": 600 << 10},
}
"""Bytes up to which the root talks to everyone itself. 4 H200, LL128, so and by scatter_gather:
broadcast of 256 KiB took 4.32 and 4.48 µs, 512 KiB 6.69 and 5.20; reduce of 512 KiB 4.87 and 5.38,
1 MiB 9.12 and 7.10."""

LINE_WORKERS = (32, 128, 256, WORKERS)
"""Threads of a block that carry lines: the fewest that do. Small blocks start sooner."""

CHAIN_BYTES = 8 << 20
"""Bytes of a slice of a chain, of which there are 4 to 64. Broadcast, 4 H200: 64 MiB took 272 µs
with 4 slices, 243 with 8, 254 with 16; 256 MiB 888 with 8, 829 with 16, 811 with 32. Several rings
side by side changed nothing (64 MiB, 8 slices: 246 by one, 251, 252 and 251 by 2, 4 and 8)."""

BLOCK_BYTES = 16 << 10
"""Bytes of a slice that a CUDA block moves at least."""

BESIDE_BLOCKS = 32
"""The most CUDA blocks for each block that reduces beside copy engines: it only reads memory of its
own GPU, which is much faster than the links."""

_WORD = 8
_WINDOW = 2
_LEAST_SLICES, _MOST_SLICES = 4, 64


@dataclass(frozen=True, slots=True)
class Resources:
    """What the ranks of a communicator have for a call, the same on all of them.

    Args:
        arena: what must hold lines and SCRATCH.
        blocks: CUDA blocks a rank that are sure to run at the same time.
        nvlink: whether all ranks reach each other over it: only there is LL128 right.
        together: ranks that may share a launch, at most.
        machine: whose links and rings are known; None: every pair is taken for alike.

    """

    arena: Arena
    blocks: int
    nvlink: bool
    together: int = 1
    machine: Machine | None = None

    @property
    def nranks(self) -> int:
        """Of the communicator."""
        return self.arena.nranks


@dataclass(frozen=True, slots=True)
class Wishes:
    """The options of a call that decide what runs; None leaves it to the library.

    Args:
        algorithm: a name.
        protocol: "LL", "LL128" or "Simple".
        slices: S.
        blocks: CUDA blocks a rank, at most.
        plan: of a user's algorithm.
        engine: "sm" or "copy".
        channels: rings side by side.
        ordered: only algorithms that sum in rank order.

    """

    algorithm: str | None = None
    protocol: str | None = None
    slices: int | None = None
    blocks: int | None = None
    plan: Plan | None = None
    engine: str | None = None
    channels: int | None = None
    ordered: bool = False


@dataclass(frozen=True, slots=True)
class Chosen:
    """What runs.

    Args:
        plan: the algorithm's.
        program: encoded.
        launch: protocol, slices, mapped buffers.
        layout: where the elements of INPUT and OUTPUT lie.
        replicas: CUDA blocks for each block of the program.
        blocks: CUDA blocks a rank.
        threads: of each.
        engine: "copy": lanes of copies go to copy engines; the CUDA blocks run the others.
        reached: what runs instead where peers reach the buffer that only the root has, as the
            root's hello says; None where that changes nothing.
        source: the plan with its name and its rings; None: the plan alone is known.
        why: what the clock says of it and of others, where a machine's links decide.

    """

    plan: Plan
    program: Program
    launch: Launch
    layout: Layout
    replicas: int
    blocks: int
    threads: int
    engine: str = "sm"
    reached: Chosen | None = None
    source: Planned | None = None
    why: tuple[str, ...] = field(default=(), compare=False)

    @property
    def variants(self) -> tuple[Chosen, ...]:
        """What may run: one of these, by a number that kernels say in their record."""
        return (self,) if self.reached is None else (self, self.reached)

    @property
    def sides(self) -> tuple[Variant, Variant]:
        """Both programs of a launch that carries two."""
        first, last = (
            Variant(found.program, found.layout, found.replicas)
            for found in (self.variants[0], self.variants[-1])
        )
        return first, last

    @property
    def total(self) -> bool:
        """Whether a rank ends only after all have entered, whatever runs."""
        return all(found.program.total for found in self.variants)


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
        lines = _by_size(call, resources.nvlink)
    usual = _DEFAULT[call.collective][bool(mapped)]
    if lines in LANES:
        usual = _by_lines(call, resources.nranks, lines)
    slices = wishes.slices or _slices(call, wishes, "chain")
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
        return _by_copies(call, resources, mapped, wishes)
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
        return _in_words(call, resources, mapped, wishes)
    if protocol:
        return _in_lines(call, resources, wishes, protocol)
    lines = _by_size(call, resources.nvlink)
    if lines:
        # A plan whose signals cannot ride, or too many lines for some other dtype or algorithm.
        with contextlib.suppress(LaunchRefused):
            return _in_lines(call, resources, wishes, lines)
    return _in_words(call, resources, mapped, wishes)


def _by_size(call: Call, nvlink: bool) -> str | None:
    """The lines to take before words; None where these are quicker."""
    name, nbytes = call.collective, call.nbytes
    if not nvlink or call.dtype.itemsize > _WORD:
        return "LL" if nbytes <= LINES_BYTES.get(name, 2 << 20) else None
    if nbytes <= LL_BYTES.get(name, 192 << 10):
        return "LL"
    return "LL128" if nbytes <= LL128_BYTES.get(name, 4 << 20) else None


def _plan(call: Call, resources: Resources, wishes: Wishes, default: str) -> Planned:
    if wishes.plan is not None:
        return Planned(wishes.plan)
    machine, algorithm, channels = resources.machine, wishes.algorithm, wishes.channels
    found = None if machine is None else machine.channels
    return planned(
        call, resources.nranks, algorithm, channels=channels, found=found, default=default
    )


def _in_place(call: Call) -> bool:
    """Whether the launch is in place; of a rooted call only the root could know, so none asks.

    In place only adds order to a plan that reduces, so it is right for all. The others copy the
    root's input to its output at most, which does no harm where both are one.
    """
    kind = COLLECTIVES[call.collective]
    return kind.reduces if kind.has_root else call.in_place


def _in_lines(call: Call, resources: Resources, wishes: Wishes, protocol: str) -> Chosen:
    nranks = resources.nranks
    source = _plan(call, resources, wishes, _by_lines(call, nranks, protocol))
    launch = Launch(protocol=protocol, mapped=frozenset(), in_place=_in_place(call))
    program, layout = encode(source.plan, launch), source.layout(call)
    places = Places(call.dtype, LANES[protocol])
    if places.lanes > 1 and call.dtype.itemsize > _WORD:
        raise LaunchRefused(
            f"{call.collective} on rank {call.rank}: protocol={protocol!r} carries elements of at "
            f"most 8 bytes, {call.dtype.name} has {call.dtype.itemsize}; use protocol='LL'"
        )
    need = line_bytes(program, layout, places)
    there = resources.arena.half_of(protocol)
    if need > there:
        raise LaunchRefused(
            f"{call.collective} on rank {call.rank}: protocol={protocol!r} would need {need} bytes "
            f"of lines, {there} are there; use protocol='Simple'"
        )
    pieces = max(1, places.number(layout))
    most = min(wishes.blocks or resources.blocks, resources.blocks)
    fitting = (width for width in LINE_WORKERS if -(-pieces // width) <= most)
    workers = next(fitting, WORKERS)
    blocks = min(most, -(-pieces // workers))
    threads = workers + SYNC_THREADS
    return Chosen(source.plan, program, launch, layout, 1, blocks, threads, source=source)


def _by_lines(call: Call, nranks: int, protocol: str) -> str:
    """The algorithm of a call whose signals ride in the data."""
    name, n = call.collective, nranks
    if name == "all_reduce":
        # One hop sends (n - 1) buffers, two send 2 (n - 1)/n; in lines of LL bytes count twice.
        extra = (2 if protocol == "LL" else 1) * call.nbytes * (n - 1) * (1 - 2 / n)
        return "one_shot_push" if extra <= HOP_BYTES else "all_pairs"
    direct = DIRECT_BYTES[protocol].get(name, call.nbytes)
    if n > 2 and call.nbytes > direct:
        return "scatter_gather" if name == "broadcast" else "scatter_gather_push"
    return "all_pairs"


def _in_words(
    call: Call, resources: Resources, mapped: frozenset[Buffer], wishes: Wishes
) -> Chosen:
    arena, nranks = resources.arena, resources.nranks
    default = _DEFAULT[call.collective][bool(mapped)]
    source = _plan(call, resources, wishes, default)
    slices = wishes.slices or _slices(call, wishes, default)
    launch, layout, program = _sliced(call, source, mapped, slices, arena.scratch_half)
    blocks = min(wishes.blocks or resources.blocks, resources.blocks)
    lanes = max(1, *(len(program.of(rank)) for rank in range(nranks)))
    if lanes > resources.blocks:  # a block would wait for one that cannot start
        raise LaunchRefused(
            f"{call.collective} on rank {call.rank}: this algorithm has {lanes} lanes on a rank, "
            f"and {resources.blocks} CUDA blocks are sure to run at once; use another algorithm"
        )
    scales = call.op is not None and call.op.scales
    together = resources.together
    if source.channels and not carried(source.plan, launch, scales=scales, together=together):
        raise LaunchRefused(
            f"{call.collective} on rank {call.rank}: a launch does not carry the steps of "
            f"{len(source.channels.rings)} rings; use fewer channels"
        )
    most = min(arena.replicas, max(1, blocks // lanes))
    nbytes = layout.width() * call.dtype.itemsize
    replicas = min(most, max(1, -(-nbytes // BLOCK_BYTES)))
    blocks = replicas * lanes
    found = Chosen(source.plan, program, launch, layout, replicas, blocks, THREADS, source=source)
    return _either(found, call, resources, mapped, wishes)


def _either(
    found: Chosen, call: Call, resources: Resources, mapped: frozenset[Buffer], wishes: Wishes
) -> Chosen:
    """The same with what runs where peers reach the root's own buffer, if that is another program.

    Only kernels that look at the hellos first can choose between two.
    """
    rooted = COLLECTIVES[call.collective].rooted
    every = mapped | {buffer for buffer in Buffer if buffer.name.lower() == rooted}
    if not mapped or every == mapped:
        return found
    with contextlib.suppress(LaunchRefused):
        if encode(found.plan, replace(found.launch, mapped=every)) == found.program:
            return found
        other = _in_words(call, resources, every, wishes)
        scales, together = call.op is not None and call.op.scales, resources.together
        if fits(found.program, other.program, scales=scales, together=together):
            return replace(found, blocks=max(found.blocks, other.blocks), reached=other)
    return found


def _slices(call: Call, wishes: Wishes, default: str) -> int:
    """How finely a chain is pipelined; elsewhere all ranks move data at once."""
    if wishes.plan is not None or (wishes.algorithm or default) != "chain":
        return 1
    return max(_LEAST_SLICES, min(_MOST_SLICES, call.nbytes // CHAIN_BYTES))


def _sliced(
    call: Call, source: Planned, mapped: frozenset[Buffer], slices: int, room: int
) -> tuple[Launch, Layout, Program]:
    """Launch, layout and program of at least so many slices: as many as SCRATCH asks for."""
    while True:
        launch = Launch(slices=slices, window=_WINDOW, mapped=mapped, in_place=_in_place(call))
        layout = source.layout(call, slices)
        program = encode(source.plan, launch)
        if scratch_bytes(program, layout, call.dtype) <= room:
            return launch, layout, program
        if layout.width() <= layout.align:
            raise LaunchRefused(
                f"{call.collective}: {program.scratch} SCRATCH chunks do not fit {room} bytes; "
                f"use another algorithm"
            )
        slices *= 2


def _by_copies(
    call: Call, resources: Resources, mapped: frozenset[Buffer], wishes: Wishes
) -> Chosen:
    arena, nranks = resources.arena, resources.nranks
    where = f"{call.collective} on rank {call.rank}: engine='copy'"
    if wishes.protocol not in (None, "Simple"):
        raise ArgumentError(
            f"{where} copies no signals inside the data; leave protocol={wishes.protocol!r} out"
        )
    if call.op is not None and call.op.scales:
        raise LaunchRefused(f"{where} serves no {call.op}: leave engine out")
    source = _plan(call, resources, wishes, _COPIED[call.collective][bool(mapped)])
    # Lanes that do different things are one block where there is nothing to overlap.
    slices = wishes.slices or (2 if COLLECTIVES[call.collective].reduces else 1)
    launch, layout, program = _sliced(call, source, mapped, slices, arena.copied)
    copied = copied_blocks(program)
    if not any(crosses(program.programs[number]) for number in copied):
        raise LaunchRefused(
            f"{where}: no lane of this algorithm only copies with slices={launch.slices}; use "
            f"algorithm={_COPIED[call.collective][bool(mapped)]!r} with slices=2 or more, or leave "
            f"engine out"
        )
    others = [number for number in range(len(program.blocks)) if number not in copied]
    lanes = max(sum(program.blocks[n].rank == rank for n in others) for rank in range(nranks))
    # Half of the multiprocessors are left for the gates that these blocks wait for.
    most = min(wishes.blocks or resources.blocks, resources.blocks) // (2 * max(1, lanes))
    nbytes = layout.width() * call.dtype.itemsize
    replicas = max(1, min(arena.replicas, most, BESIDE_BLOCKS, -(-nbytes // BLOCK_BYTES)))
    sizes = replicas, replicas * lanes, THREADS
    return Chosen(source.plan, program, launch, layout, *sizes, "copy", source=source)


_DEFAULT = {
    "all_reduce": ("all_pairs", "two_shot"),
    "broadcast": ("scatter_gather", "chain"),
    "reduce": ("all_pairs", "scatter_gather"),
    "all_gather": ("all_pairs", "all_pairs_fused"),
    "reduce_scatter": ("all_pairs", "one_shot"),
    "all_to_all": ("all_pairs", "all_pairs"),
    "gather": ("all_pairs", "one_shot"),
    "scatter": ("all_pairs", "all_pairs"),
    "barrier": ("all_pairs", "all_pairs"),
}
"""Algorithms of large messages: of plain buffers, and of those that all ranks can reach. 4 H200,
64 MiB: all_reduce took 308 µs by two_shot, 1023 by ring; broadcast 243 by chain, 398 by
scatter_gather; reduce 260 by scatter_gather (402 where the root's array is staged), 555 by
one_shot, 590 by chain."""

_COPIED = {
    **_DEFAULT,
    "all_reduce": ("all_pairs", "all_pairs"),
    "reduce": ("all_pairs", "all_pairs"),
    "all_gather": ("all_pairs", "all_pairs"),
    "reduce_scatter": ("all_pairs", "all_pairs"),
}
"""The same for copy engines: each copies to one peer after the other."""
