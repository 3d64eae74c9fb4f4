"""Choose algorithm and grid of a call by LL or LL128; thresholds of 4 H200 over NVSwitch."""

from __future__ import annotations

from ringcoll.arguments.calls import Call
from ringcoll.collectives import COLLECTIVES
from ringcoll.encode import encode
from ringcoll.errors import LaunchRefused
from ringcoll.executors.cuda.kernel_choice import KernelChoice, in_place, named_plan
from ringcoll.executors.cuda.limits import KernelOptions, Resources
from ringcoll.executors.cuda.ll import WORKERS, ll_scratch_bytes
from ringcoll.executors.cuda.ll_layout import LANES, LLLayout
from ringcoll.launch import Launch

SYNC_THREADS = 32

HOP_BYTES = 650 << 10
"""Bytes that a link carries in the time of another hop, 1.8 µs at 364 GB/s: all_reduce takes one
hop while that sends fewer bytes more than two hops would. 4 H200: with LL the two were equal at 128
KiB, with LL128 at 256 KiB."""

LL_BYTES = {"all_reduce": 64 << 10, "broadcast": 32 << 10, "reduce": 64 << 10}
LL_BYTES_ELSE = 192 << 10
"""Bytes of the larger buffer up to which LL is chosen where LL128 is legal. LL128 loads twice, for
the flag and for the data, and sends half as much. 4 H200: all_reduce of 64 KiB took 3.44 and 3.43
µs, 128 KiB 4.60 and 3.97; all_gather of 128 KiB 3.13 and 3.20, 256 KiB 3.64 and 3.57."""

LL128_BYTES = {"broadcast": 8 << 20}
LL128_BYTES_ELSE = 4 << 20
"""Bytes up to which LL128 is chosen. 4 H200, 4 MiB, LL128 and Simple: all_reduce 24.0 and 28.7 µs,
all_gather 13.7 and 17.8, reduce_scatter 13.9 and 20.1, broadcast 16.4 and 43.1."""

LL_ALONE_BYTES = {"all_reduce": 1 << 20}
LL_ALONE_BYTES_ELSE = 2 << 20
"""Bytes up to which LL is chosen where LL128 is not legal. 4 H200, LL and Simple: all_reduce of
1 MiB took 11.9 and 14.7 µs, 2 MiB 23.0 and 18.9; all_gather of 2 MiB 13.1 and 13.5."""

DIRECT_BYTES = {
    "LL": {"broadcast": 128 << 10, "reduce": 384 << 10},
    "LL128": {"broadcast": 320 << 10, "reduce": 600 << 10},
}
"""Bytes up to which the root sends to or receives from all itself. 4 H200, LL128, direct and
by scatter_gather, in µs: broadcast of 256 KiB 4.32 and 4.48, 512 KiB 6.69 and 5.20; reduce of
512 KiB 4.87 and 5.38, 1 MiB 9.12 and 7.10."""

LL_WORKERS, LL_BLOCKS = (64, 128, 256, WORKERS), 72
"""Threads of a block that move data: the fewest that suffice in so many blocks. 2 H200, all_reduce
by LL in blocks of 32, 64, 128, 256 and 480: 4 KiB took 2.31, 2.27, 2.25, 2.38 and 2.52 µs,
32 KiB 2.74, 2.67, 2.69, 2.71 and 2.81, 128 KiB 3.36, 3.36, 3.31, 3.28 and 3.36; of LL128 64 KiB
3.25, 3.07, 3.12, 3.17 and 3.27, 256 KiB 3.86, 3.84, 3.85, 3.72 and 3.85."""

_WORD = 8


def ll_protocol(call: Call, nvlink: bool) -> str | None:
    """LL or LL128; None where Simple is faster."""
    name, nbytes = call.collective, call.nbytes
    if not nvlink or call.dtype.itemsize > _WORD:
        return "LL" if nbytes <= LL_ALONE_BYTES.get(name, LL_ALONE_BYTES_ELSE) else None
    if nbytes <= LL_BYTES.get(name, LL_BYTES_ELSE):
        return "LL"
    return "LL128" if nbytes <= LL128_BYTES.get(name, LL128_BYTES_ELSE) else None


def choose_ll(
    call: Call, resources: Resources, options: KernelOptions, protocol: str
) -> KernelChoice:
    """The choice for LL or LL128; arguments and errors are those of ``choose``."""
    nranks = resources.nranks
    default = ll_algorithm(call, nranks, protocol, ordered=options.ordered)
    source = named_plan(call, resources, options, default)
    launch = Launch(protocol=protocol, mapped=frozenset(), in_place=in_place(call))
    program, layout = encode(source.plan, launch), source.layout(call)
    ll_layout = LLLayout(call.dtype, LANES[protocol])
    if ll_layout.lanes > 1 and call.dtype.itemsize > _WORD:
        raise LaunchRefused(
            f"{call.collective} on rank {call.rank}: protocol={protocol!r} carries elements of at "
            f"most 8 bytes, {call.dtype.name} has {call.dtype.itemsize}; use protocol='LL'"
        )
    need = ll_scratch_bytes(program, layout, ll_layout)
    there = resources.workspace.half_of(protocol)
    if need > there:
        raise LaunchRefused(
            f"{call.collective} on rank {call.rank}: protocol={protocol!r} would need {need} bytes "
            f"of lines, {there} are there; use protocol='Simple'"
        )
    pieces = max(1, ll_layout.packs(layout))
    most = min(options.blocks or resources.blocks, resources.blocks)
    few = min(most, LL_BLOCKS)
    fitting = (width for width in LL_WORKERS if -(-pieces // width) <= few)
    workers = next(fitting, WORKERS)
    blocks = min(most, -(-pieces // workers))
    threads = workers + SYNC_THREADS
    return KernelChoice(source.plan, program, launch, layout, 1, blocks, threads, source=source)


def ll_algorithm(call: Call, nranks: int, protocol: str, *, ordered: bool = False) -> str:
    """The default algorithm of LL or LL128; ``ordered``: one that sums in rank order."""
    name, n = call.collective, nranks
    if COLLECTIVES[name].prefix:
        return "chain" if ordered else "recursive_doubling"
    if name == "all_reduce":
        # One hop sends (n - 1) buffers, two send 2 (n - 1)/n; in lines of LL bytes count twice.
        extra = (2 if protocol == "LL" else 1) * call.nbytes * (n - 1) * (1 - 2 / n)
        return "one_shot_push" if extra <= HOP_BYTES else "all_pairs"
    direct = DIRECT_BYTES[protocol].get(name, call.nbytes)
    if n > 2 and call.nbytes > direct:
        return "scatter_gather" if name == "broadcast" else "scatter_gather_push"
    return "all_pairs"
