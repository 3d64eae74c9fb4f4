"""What GPU ranks run by protocol Simple: by kernels, or copy engines with kernels beside them.

Kernels run one program, or two of which the hellos select one.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace

from ringcoll.algorithms import Algorithm
from ringcoll.arguments.calls import Call
from ringcoll.collectives import COLLECTIVES
from ringcoll.encode import BlockProgram, Program, encode
from ringcoll.errors import ArgumentError, LaunchRefused
from ringcoll.launch import ALL_MAPPED, Launch
from ringcoll.plan import Buffer
from ringcoll.tuner import measured
from ringcoll.tuner.candidates import WINDOW, candidate_of, fitted
from ringcoll.tuner.choice import Choice, Fits, GpuRanks, Grid, Limits
from ringcoll.tuner.measurement import Measured


def in_place(call: Call) -> bool:
    """Whether the launch is in place.

    Of a rooted call only the root could know, of exscan not rank 0. In place adds order to a plan
    that reduces, which is right for all ranks; the other plans at most copy the root's input to its
    output, which does no harm where both are one.
    """
    kind = COLLECTIVES[call.collective]
    return kind.reduces if kind.uneven != "none" else call.in_place


def alike(machine: GpuRanks) -> bool:
    """Whether one ring is as good as any, so that nothing is predicted for a call."""
    known = machine.known
    return known is None or (known.all_pairs and known.channels is None)


def may_chain(call: Call, machine: GpuRanks, limits: Limits) -> bool:
    """Whether a chain was timed for such ranks, and carries no more bytes than the elements have.

    It sums in the order of its hops.
    """
    few = machine.most(limits) <= measured.FEW_BLOCKS.value
    timed = machine.nranks <= measured.CHAIN_RANKS and alike(machine) and not few
    narrow = call.dtype.partial.itemsize == call.dtype.itemsize
    return timed and narrow and not limits.deterministic


def choose_simple(call: Call, machine: GpuRanks, limits: Limits, fits: Fits) -> Choice:
    """The choice where kernels move all data."""
    if limits.hellos_decide:
        return _choose_dual(call, machine, limits, fits)
    default = default_algorithm(call, machine, limits)
    why: tuple[str, ...] = ()
    if limits.algorithm is None and limits.channels is None and call.collective != "barrier":
        kind = "mapped" if limits.mapped else "plain"
        source = _algorithms(call, machine, limits).source
        why = (f"{default} for large {kind} buffers: by figures of {source}",)
    slices = slices_of(call, limits.algorithm or default, machine.nranks)
    found = _launched(call, machine, limits, fits, "sm", default, slices, why)
    where = f"{call.collective} on rank {call.rank}"
    lanes = _lanes(found, machine)
    if lanes > machine.blocks:  # a block would wait for one that cannot start
        raise LaunchRefused(
            f"{where}: this algorithm needs {lanes} CUDA blocks on a rank, {machine.blocks} are "
            f"resident at once; use another algorithm"
        )
    if found.channels and not fits.parameters(call, (found,), machine.together):
        raise LaunchRefused(
            f"{where}: the parameters of a launch do not hold the steps of "
            f"{len(found.channels.rings)} rings; use fewer channels"
        )
    found = found.on(simple_grid(found, call, machine, limits))
    return _with_direct(found, call, machine, limits, fits)


def choose_copies(call: Call, machine: GpuRanks, limits: Limits, fits: Fits) -> Choice:
    """The choice for ``engine="copy"``: which blocks copy engines carry, and the rest."""
    kind, where = COLLECTIVES[call.collective], f"{call.collective} on rank {call.rank}"
    where += ": engine='copy'"
    if limits.protocol not in (None, "Simple"):
        raise ArgumentError(
            f"{where} runs with protocol='Simple' only, because copy engines cannot poll flags "
            f"inside the data; leave protocol={limits.protocol!r} out"
        )
    if call.op is not None and (call.op.scales or kind.prefix):
        what = call.op if call.op.scales else call.collective
        raise LaunchRefused(f"{where} does not support {what}: leave engine out")
    default = measured.COPY_ALGORITHMS.of(call.collective)[bool(limits.mapped)]
    # Lanes that do different things are one block where there is nothing to overlap.
    slices = 1 if limits.mapped and not kind.reduces else 2
    if limits.large_scratch and slices > 1:
        most = measured.COPY_SLICES.of(call.collective)
        slices = max(slices, min(most, call.nbytes // measured.COPY_SLICE_BYTES.value))
    found = _launched(call, machine, limits, fits, "copy", default, slices)
    program = found.program
    copied = copied_blocks(program)
    if not any(crosses(program.programs[number]) for number in copied):
        raise LaunchRefused(
            f"{where}: with slices={found.launch.slices} no block of this algorithm only copies to "
            f"or from peers, so there is nothing for copy engines; use algorithm={default!r} with "
            f"slices=2 or more, or leave engine out"
        )
    others = [block for number, block in enumerate(program.blocks) if number not in copied]
    lanes = max(sum(block.rank == rank for block in others) for rank in range(machine.nranks))
    # Half of the multiprocessors stay free for the gates that these blocks wait for.
    most = min(machine.most(limits) // 2, measured.BESIDE_BLOCKS.value * max(1, lanes))
    nbytes = found.layout.width() * call.dtype.itemsize
    return found.on(_at_most(found, call, machine, lanes, most).grid(nbytes))


def least_large(machine: GpuRanks, engine: str | None) -> int:
    """Bytes from which :func:`large_engine` may name one for a call with this option."""
    if not machine.large_scratch:
        return measured.ANY_BYTES
    copied, large = measured.LEAST_COPIED, measured.LARGE_BYTES.value
    if engine == "copy":
        return copied
    return large if machine.table is None else min(copied, large)


def sizes_like(call: Call, machine: GpuRanks, engine: str | None, *, large: bool) -> range:
    """In bytes, calls like one that kernels run that are large, or are not, with this option."""
    if large:
        return range(measured.LARGE_BYTES.value, measured.ANY_BYTES)
    return range(measured.ANY_BYTES if call.counts else least_large(machine, engine))


def large_engine(call: Call, machine: GpuRanks, limits: Limits) -> str | None:
    """What runs a call with the SCRATCH of large calls, once all ranks have mapped that.

    Copy engines ("copy") or kernels ("sm"); None: the call is not large. The same on all ranks,
    whatever memory they pass.
    """
    if call.nbytes < least_large(machine, limits.engine):
        return None
    if limits.engine == "copy":
        return "copy" if call.nbytes >= measured.COPIED_BYTES.of(call.collective) else None
    if machine.table is not None:
        if machine.table.copies(call, limits) and may_copy(call, machine.nranks):
            return "copy"
        if machine.table.in_band(call, limits):
            return None
    timed = call.collective in measured.LARGE_SLICES.by and not call.counts
    large = call.nbytes >= measured.LARGE_BYTES.value and limits.protocol in (None, "Simple")
    return "sm" if timed and large else None


def needs_scratch(call: Call, machine: GpuRanks, limits: Limits) -> bool:
    """Whether a large call by kernels uses SCRATCH on buffers that all peers reach as well.

    Others may too, but need no more of it than a workspace has.
    """
    named = limits.algorithm or limits.channels
    algorithm = named or default_algorithm(call, machine, limits)
    return call.collective == "reduce" and algorithm == "chain"


def may_copy(call: Call, nranks: int) -> bool:
    """Whether a table may choose copy engines for a call.

    Which call is the first by copies depends on time, and more than two ranks would sum in another
    order from then on: results would differ from run to run. Calls by LL128 are found again without
    the number that large ones have.
    """
    kind, scales = COLLECTIVES[call.collective], call.op is not None and call.op.scales
    ordered = kind.reduces and (nranks > 2 or kind.prefix)
    long = call.nbytes > measured.LL128_BYTES.of(call.collective)
    copied = long and call.nbytes >= measured.COPIED_BYTES.of(call.collective)
    return copied and not (ordered or scales)


def copied_blocks(program: Program) -> frozenset[int]:
    """The numbers of the blocks that are lanes of copies or only signal; the same on all ranks.

    A block of local copies alone is not among them: a kernel is faster there.
    """
    return frozenset(
        number
        for number, block in enumerate(program.programs)
        if all(len(row.srcs) <= 1 and not row.labels.reduces for row in block.rows)
        and (crosses(block) or not any(row.dsts for row in block.rows))
    )


def crosses(block: BlockProgram) -> bool:
    """Whether a block touches memory of other ranks."""
    return any(
        chunk.rank != block.block.rank for row in block.rows for chunk in (*row.srcs, *row.dsts)
    )


def default_algorithm(call: Call, machine: GpuRanks, limits: Limits) -> str:
    """The algorithm without an option."""
    lanes, known = machine.nranks - 1, machine.known
    alike = limits.channels is None and (known is None or known.all_pairs)
    many = lanes > 1 and machine.most(limits) >= measured.FUSED_BLOCKS.value * lanes
    short = many and call.nbytes < measured.FUSED_BYTES.value
    if call.collective == "broadcast" and limits.mapped and alike and short:
        return "scatter_gather_fused"
    if machine.nranks == 2 and limits.mapped == ALL_MAPPED:
        with_root = measured.ROOT_ALGORITHMS.of(call.collective)
        if with_root is not None:
            return with_root
    return _algorithms(call, machine, limits).of(call.collective)[bool(limits.mapped)]


def _algorithms(call: Call, machine: GpuRanks, limits: Limits) -> Measured[tuple[str, str]]:
    """The figures from which the default follows: those for few blocks, two ranks, or any."""
    few = machine.most(limits) <= measured.FEW_BLOCKS.value
    if few and limits.mapped and call.collective in measured.FEW_ALGORITHMS.by:
        return measured.FEW_ALGORITHMS
    if machine.nranks != 2:
        return _algorithms_of_more(call, machine, limits)
    pushed = call.collective in measured.PUSH_ALGORITHMS.by
    if pushed and call.nbytes >= measured.PUSHED_BYTES.value:
        # In place OUTPUT has no room for contributions; of fewer blocks, half would be too few.
        room = Buffer.OUTPUT in limits.mapped and not in_place(call)
        both = machine.most(limits) >= 2 * measured.REPLICAS.of(call.collective)
        if call.collective != "reduce_scatter" or (room and both):
            return measured.PUSH_ALGORITHMS
    return _pair_algorithms(call)


def _pair_algorithms(call: Call) -> Measured[tuple[str, str]]:
    """The same of two ranks that do not push."""
    pairs = measured.PAIR_ALGORITHMS
    return pairs if call.collective in pairs.by else measured.SIMPLE_ALGORITHMS


def _algorithms_of_more(call: Call, machine: GpuRanks, limits: Limits) -> Measured[tuple[str, str]]:
    """The same of more than two ranks.

    From which call on ranks have the SCRATCH of large calls depends on time, so it may choose none
    that sums in another order.
    """
    name = call.collective
    # A chain has an order of its own, so it is chosen whatever memory is given.
    long = machine.large_scratch and call.nbytes >= measured.LARGE_CHAIN_BYTES.of(name)
    if long and may_chain(call, machine, limits):
        return measured.LARGE_CHAINS
    large = limits.large_scratch == "sm" and name in measured.LARGE_ALGORITHMS.by
    timed = machine.nranks <= measured.CHAIN_RANKS and alike(machine)
    return measured.LARGE_ALGORITHMS if large and timed else measured.SIMPLE_ALGORITHMS


def slices_of(call: Call, algorithm: Algorithm, nranks: int) -> int:
    """Slices of a pipelined algorithm; in the others all ranks move data at once.

    They hold where nothing goes through SCRATCH, or through that of a workspace.
    """
    if nranks == 2 and algorithm in _pair_algorithms(call).of(call.collective):
        slices = measured.PAIR_SLICES.of(call.collective)
        if slices is not None:
            return slices
    pipelined = None if callable(algorithm) else measured.PIPELINED.of(algorithm)
    if pipelined is None:
        return 1
    nbytes, least, most = pipelined
    return max(least, min(most, call.nbytes // nbytes))


def _launched(
    call: Call,
    machine: GpuRanks,
    limits: Limits,
    fits: Fits,
    engine: str,
    default: str,
    slices: int,
    why: tuple[str, ...] = (),
) -> Choice:
    """The choice without a grid; algorithm and slices of the options go first."""
    candidate = candidate_of(call, machine, limits, default)
    slots = measured.PAIR_SLOTS.value if machine.nranks == 2 else WINDOW
    launch = Launch("Simple", limits.slices or slices, slots, limits.mapped, in_place(call))
    large, timed = limits.large_scratch == "sm", measured.LARGE_SLICES.of(call.collective)
    if large and timed and limits.slices is None and encode(candidate.plan, launch).scratch:
        nbytes, least, most = timed
        if machine.nranks > measured.CHAIN_RANKS:  # so many have not been timed
            least = most
        launch = replace(launch, slices=max(least, min(most, call.nbytes // nbytes)))
    return fitted(call, candidate, launch, fits, engine, why, large=large)


def _lanes(found: Choice, machine: GpuRanks) -> int:
    """Blocks of the program on the rank that has most."""
    return max(1, *(len(found.program.of(rank)) for rank in range(machine.nranks)))


@dataclass(frozen=True, slots=True)
class Lanes:
    """The blocks of a program on the rank that has most, and CUDA blocks of each at most."""

    lanes: int
    most: int
    threads: int

    def grid(self, nbytes: int) -> Grid:
        """The CUDA blocks for slices of so many bytes: equally many for each lane of a rank."""
        replicas = max(1, min(self.most, -(-nbytes // measured.BLOCK_BYTES.value)))
        return Grid(replicas, replicas * self.lanes, self.threads)


def lanes_of(found: Choice, call: Call, machine: GpuRanks, limits: Limits) -> Lanes:
    """What decides the CUDA blocks of Simple for any count."""
    return _at_most(found, call, machine, _lanes(found, machine), machine.most(limits))


def _at_most(found: Choice, call: Call, machine: GpuRanks, lanes: int, most: int) -> Lanes:
    """Lanes that have at most ``most`` CUDA blocks together."""
    if found.launch.mapped:
        most = min(most, measured.CALL_BLOCKS.of(call.collective))
    each = min(machine.replicas, measured.REPLICAS.of(call.collective))
    return Lanes(lanes, min(each, most // max(1, lanes)), machine.threads)


def simple_grid(found: Choice, call: Call, machine: GpuRanks, limits: Limits) -> Grid:
    """The CUDA blocks of Simple, of a new choice and of one that is kept for other counts."""
    nbytes = found.layout.width() * call.dtype.itemsize
    return lanes_of(found, call, machine, limits).grid(nbytes)


def _with_direct(
    found: Choice, call: Call, machine: GpuRanks, limits: Limits, fits: Fits
) -> Choice:
    """The same with the program for a mapped buffer of the root, if that is another program.

    Only kernels that read the hellos first can choose between two.
    """
    mapped, rooted = limits.mapped, COLLECTIVES[call.collective].rooted
    every = mapped | {buffer for buffer in Buffer if buffer.name.lower() == rooted}
    if not mapped or every == mapped:
        return found
    with contextlib.suppress(LaunchRefused):
        other = choose_simple(call, machine, replace(limits, mapped=every), fits)
        if other.program != found.program:
            return _combined(found, other, call, machine, fits)
    return found


def _choose_dual(call: Call, machine: GpuRanks, limits: Limits, fits: Fits) -> Choice:
    """The programs for unmapped and for mapped buffers, if there are both; the hellos select one.

    The unmapped one has the blocks that it would have alone: some memory can never be mapped.
    """
    limits = replace(limits, hellos_decide=False, mapped=frozenset())
    staged = _choose_variant(call, machine, limits, fits)
    with contextlib.suppress(LaunchRefused):
        direct = _choose_variant(call, machine, replace(limits, mapped=ALL_MAPPED), fits)
        return _combined(staged, direct, call, machine, fits)
    return staged


def _choose_variant(call: Call, machine: GpuRanks, limits: Limits, fits: Fits) -> Choice:
    """One of two programs, by the table's entry for its memory if there is one."""
    if machine.table is not None:
        with contextlib.suppress(LaunchRefused):
            return choose_simple(call, machine, machine.table.simple(call, limits), fits)
    return choose_simple(call, machine, limits, fits)


def _combined(staged: Choice, direct: Choice, call: Call, machine: GpuRanks, fits: Fits) -> Choice:
    """Both programs in one launch if they fit; else the first."""
    if not fits.parameters(call, (staged, direct), machine.together):
        return staged
    return combined(staged, direct)


def combined(staged: Choice, direct: Choice) -> Choice:
    """Both programs in one launch."""
    blocks = max(staged.grid.blocks, direct.grid.blocks)
    return replace(staged, grid=staged.grid._replace(blocks=blocks), direct=direct)
