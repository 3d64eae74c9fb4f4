"""The figures by which calls are chosen: one table, each with where and when it was measured.

No other module of the tuner has a threshold. Records lie in ``benchmarks/results``; figures of a
source without one stand in the entry alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ringcoll.model.links import Links, Wire
from ringcoll.tuner.measurement import BySize, Measured, Source

ANY_BYTES = 1 << 62
"""A threshold that no call exceeds."""
MOST_BLOCKS = 1 << 16
"""More CUDA blocks than a rank has."""

SWITCH = Source("4 NVIDIA H200 over NVSwitch", "2026-11-21", "gpu_choices_4.json")
BLOCKS = Source("2 and 4 NVIDIA H200 over NVSwitch", "2026-11-22")
OPTIONS = Source("2 and 4 NVIDIA H100 80GB HBM3 over NVSwitch", "2026-11-28", "gpu_options.json")
PUSHES = Source(
    "2 and 4 NVIDIA H100 80GB HBM3 and 2 NVIDIA H200 over NVSwitch", "2026-11-28", "gpu_pushes.json"
)
CHAINS = Source("4 NVIDIA H200 over NVSwitch", "2026-11-28", "gpu_reduce_4.json")
BESIDE = Source("2 NVIDIA H200 over NVSwitch", "2026-11-28", "gpu_beside_2.json")
LARGE = Source("2 and 4 NVIDIA H200 over NVSwitch", "2026-11-30", "gpu_large_scratch.json")
ASKED = Source("2 NVIDIA H200 over NVSwitch", "2026-11-29", "gpu_asked_copies_2.json")
FEW = Source("2 and 4 NVIDIA H200 over NVSwitch", "2026-11-28", "gpu_few_blocks.json")
XEON = Source("4 CPU ranks on a 4-core Xeon at 2.5 GHz", "2026-11-21")
ASSUMED = Source("assumed, not measured", "2026-11-21")

# -- GPU ranks: protocols LL and LL128 -------------------------------------------------------------

LL_BYTES = Measured(
    192 << 10,
    SWITCH,
    "LL and LL128 in µs: all_reduce of 64 KiB 3.44 and 3.43, 128 KiB 4.60 and 3.97; all_gather of "
    "128 KiB 3.13 and 3.20, 256 KiB 3.64 and 3.57",
    {"all_reduce": 64 << 10, "broadcast": 32 << 10, "reduce": 64 << 10},
)
"""Bytes of the larger buffer up to which LL is chosen where LL128 is legal. LL128 loads twice, for
the flag and for the data, and sends half as much."""

LL128_BYTES = Measured(
    16 << 20,
    OPTIONS,
    "LL128 and Simple in µs, 16 MiB on 2 GPUs: all_reduce 57.1 and 64.4, all_gather 31.5 and 37.7, "
    "reduce_scatter 31.1 and 40.9, broadcast 52.6 and 60.9, reduce 52.9 and 77.9, all_to_all 31.2 "
    "and 40.7; 8 MiB on 4: 42.2 and 56.9, 23.0 and 34.3, 23.1 and 38.0, 29.1 and 51.8, 40.8 and "
    "46.3, 23.1 and 37.5",
)
"""Bytes up to which LL128 is chosen where its lines have room for the call: on 4 GPUs for 8 MiB of
all_reduce and reduce, 12 of broadcast and chains, 16 of the others."""

LL_ALONE_BYTES = Measured(
    2 << 20,
    SWITCH,
    "LL and Simple in µs: all_reduce of 1 MiB 11.9 and 14.7, 2 MiB 23.0 and 18.9; all_gather of "
    "2 MiB 13.1 and 13.5",
    {"all_reduce": 1 << 20},
)
"""Bytes up to which LL is chosen where LL128 is not legal."""


PROTOCOL_SIZES = {
    "LL": BySize(LL_BYTES, (4 << 10,)),
    "LL128": BySize(LL128_BYTES, (256 << 10, 4 << 20, 1 << 20)),  # in one hop, by chain, in two
}
"""The protocols that size chooses, in the order of their sizes; larger calls are Simple's."""

FEW_BLOCKS = Measured(
    48,
    FEW,
    "all_reduce of mapped buffers by at most 32 blocks, by two_shot_fused, two_shot, one_shot and "
    "all_pairs_fused, in µs: 25 MiB 99, 100, 106 and 102, 64 MiB 223, 243, 248 and 253, 256 MiB "
    "829, 925, 944 and 977; by at most 48 by two_shot and all_pairs_fused 803 and 907, by "
    "two_shot_fused not timed. On 4 GPUs by at most 32 by two_shot_fused and two_shot 64 MiB 330 "
    "and 351, 512 MiB 2577 and 2667",
)
"""CUDA blocks a rank up to which FEW_LL128_BYTES and FEW_ALGORITHMS hold."""

FEW_LL128_BYTES = Measured(
    4 << 20,
    FEW,
    "2 GPUs, mapped buffers, by at most 32 blocks, in µs: all_reduce by LL128 and by "
    "two_shot_fused of Simple 1 MiB 10.6 and 14.3, 4 MiB 32.9 and 23.2, 8 MiB 61.5 and 36.6; by "
    "LL128 8 MiB and by Simple 32 MiB all_gather 30.3 and 61.5, reduce_scatter 32.9 and 79.3, "
    "broadcast 34.5 and 102.6, reduce 41.9 and 121.3",
    {"all_reduce": 2 << 20},
)
"""Bytes up to which LL128 is chosen for few blocks, whose threads it takes for longer. Where not
both were timed at one size, a quarter of Simple's time at 32 MiB and some µs are less than LL128's
at 8."""

DIRECT_BYTES = {
    "LL": Measured(
        ANY_BYTES, SWITCH, "as with LL128", {"broadcast": 128 << 10, "reduce": 384 << 10}
    ),
    "LL128": Measured(
        ANY_BYTES,
        SWITCH,
        "all_pairs and scatter_gather in µs: broadcast of 256 KiB 4.32 and 4.48, 512 KiB 6.69 and "
        "5.20; reduce of 512 KiB 4.87 and 5.38, 1 MiB 9.12 and 7.10",
        {"broadcast": 320 << 10, "reduce": 600 << 10},
    ),
}
"""By protocol: bytes up to which the root sends to or receives from all itself."""

CHAIN_BYTES = Measured(
    ANY_BYTES,
    CHAINS,
    "reduce by scatter_gather_push and by chain, of bfloat16 with accumulate='dtype', in µs: 2 MiB "
    "10.2 and 10.5, 4 MiB 22.7 and 16.8, 8 MiB 41.3 and 29.5 (NCCL 37.2)",
    {"reduce": 2 << 20},
)
"""Bytes up to which LL128 gathers pieces at their owners; of more a chain carries partial results,
unless they are wider than the elements. Beyond 8 MiB it was not timed."""

CHAIN_RANKS = 4
"""The most ranks of such a chain: more have more hops. Three have not been timed."""

HOP = Measured(1.8e-6, SWITCH, "all_reduce in two hops took 1.8 µs more than in one")
"""Seconds of one more hop between GPUs. The size from which rings are faster depends on it."""

HOP_BYTES = Measured(
    650 << 10,
    SWITCH,
    "all_reduce in one hop and in two took equally long with LL at 128 KiB, with LL128 at 256 KiB",
)
"""Bytes that a link carries in the time of another hop, at 364 GB/s: all_reduce takes one hop while
that sends fewer bytes more than two hops would."""

LL_WORKERS = Measured(
    (64, 128, 256),
    BLOCKS,
    "2 GPUs, all_reduce by LL in blocks of 32, 64, 128, 256 and 480 threads, in µs: 4 KiB 2.31, "
    "2.27, 2.25, 2.38 and 2.52, 32 KiB 2.74, 2.67, 2.69, 2.71 and 2.81, 128 KiB 3.36, 3.36, 3.31, "
    "3.28 and 3.36; by LL128 64 KiB 3.25, 3.07, 3.12, 3.17 and 3.27, 256 KiB 3.86, 3.84, 3.85, "
    "3.72 and 3.85",
)
"""Threads of a block that move data: the fewest that suffice in LL_BLOCKS blocks, else as many as
the kernel has."""

LL_BLOCKS = Measured(72, BLOCKS, LL_WORKERS.figures)
"""CUDA blocks of a rank up to which blocks of fewer threads are taken."""

# -- GPU ranks: protocol Simple and copy engines ---------------------------------------------------

SIMPLE_ALGORITHMS = Measured(
    ("all_pairs", "all_pairs"),
    SWITCH,
    "64 MiB: all_reduce took 308 µs by two_shot, 1023 by ring; reduce 247 by scatter_gather (402 "
    "with the root's array staged), 555 by one_shot, 750 by chain in 64 slices; pushing to the "
    "reducing rank's SCRATCH instead of reading, which plain buffers need, took 345 to 438 in 8 to "
    "32 slices by 64 and by 132 blocks, all_pairs of plain ones 553; broadcast of plain buffers of "
    "512 MiB by scatter_gather 4985 on 4 H100 (gpu_options.json), where the timing model says "
    "3800; by tree 1998 (gpu_pushes.json), where it says 1900",
    {
        "all_reduce": ("all_pairs", "two_shot"),
        "broadcast": ("tree", "chain"),
        "reduce": ("scatter_gather_push", "scatter_gather"),
        "all_gather": ("all_pairs", "all_pairs_fused"),
        "reduce_scatter": ("all_pairs", "one_shot"),
        "gather": ("all_pairs", "one_shot"),
        **dict.fromkeys(("scan", "exscan"), ("chain", "chain")),
    },
)
"""Algorithms of Simple: of plain buffers, and of buffers mapped by all ranks."""

PAIR_ALGORITHMS = Measured(
    SIMPLE_ALGORITHMS.value,
    PUSHES,
    "2 GPUs, in µs: reduce of 512 MiB by one_shot of mapped buffers and by all_pairs of plain ones "
    "1493 and 1692; all_gather by all_pairs, whose own segment is a lane, in 128 blocks and by "
    "all_pairs_fused 64 MiB 108 and 109, 512 MiB 744 and 776; in the 64 of CALL_BLOCKS it was "
    "timed on another machine alone",
    {
        "reduce": ("all_pairs", "one_shot"),
        "broadcast": ("scatter_gather", "chain"),
        "all_gather": ("all_pairs", "all_pairs"),
    },
)
"""The same for two ranks, where others are faster for two."""

ROOT_ALGORITHMS: Measured[str | None] = Measured(
    None,
    PUSHES,
    "2 GPUs, broadcast by one_shot and by chain, in µs: 32 MiB 105 and 106, 64 MiB 196 and 201, "
    "128 MiB 376 and 387, 512 MiB 1456 and 1515 (NCCL 1460); on H200 (gpu_reads_2.json) 64 MiB 191 "
    "and 194, 128 MiB 393 and 373 (on other machines 381 to 401 and 385), 256 MiB 730 and 736",
    {"broadcast": "one_shot"},
)
"""The same where the root's own buffer is mapped as well, from which the other rank can read."""

PUSHED_BYTES = Measured(
    64 << 20,
    PUSHES,
    "2 GPUs, all_reduce by all_pairs_fused with 16 MiB of SCRATCH, and by two_shot in 64 and in "
    "128 blocks, in µs: 32 MiB 115, 112 and 111, 64 MiB 204, 211 and 207, 128 MiB 388, 407 and "
    "396, 512 MiB 1490, 1577 and 1533; with 8 MiB 207, 393 and 1518 of the last three; on H200 "
    "with 16 64 MiB 203, 512 MiB 1493, in 64 blocks 222 and 1650, 256 MiB in 16 blocks 1476, by "
    "two_shot on H100 1671. On 4 GPUs, with 32 MiB, 64 MiB 328 and 313 by two_shot, 512 MiB 2370 "
    "and 2387. reduce_scatter by all_pairs with 8 MiB, and by one_shot in 128 blocks: 64 MiB 126 "
    "and 117, 512 MiB 885 and 815; on H200 512 MiB by one_shot 813, by all_pairs with 8 and 16 MiB "
    "977 and 801, by one lane that writes and sums 1697 and 1082, by two that write beside one "
    "that sums 1235 and 904; by all_pairs_output and by one_shot (gpu_outputs_2.json) 32 MiB 70 "
    "and 67, 64 MiB 121 and 123, 128 MiB 217 and 222, 512 MiB 775 and 825, 1 GiB 1512 and 1630",
)
"""Bytes from which two ranks run PUSH_ALGORITHMS: where both read from each other, their requests
take a part of the links, which carry 316 GB/s to both so and 365 where both write. Its two lanes
have 64 CUDA blocks each."""

PUSH_ALGORITHMS = Measured(
    SIMPLE_ALGORITHMS.value,
    PUSHES,
    PUSHED_BYTES.figures,
    {
        "all_reduce": ("all_pairs", "all_pairs_fused"),
        "reduce_scatter": ("all_pairs", "all_pairs_output"),
    },
)
"""Algorithms that read nothing of a peer, of plain buffers and of mapped ones."""

FEW_ALGORITHMS = Measured(
    SIMPLE_ALGORITHMS.value,
    FEW,
    FEW_BLOCKS.figures,
    {"all_reduce": ("all_pairs", "two_shot_fused")},
)
"""Algorithms for few blocks of mapped buffers, plain ones have those for any number: of one lane,
since of few blocks half would often wait for the others."""

COPY_ALGORITHMS = Measured(
    SIMPLE_ALGORITHMS.value,
    SWITCH,
    "engine='copy' of 64 MiB: all_reduce by all_pairs 719 µs in 2 slices; reduce of 512 MiB on 2 "
    "H100 by scatter_gather_pull 1443 (gpu_options.json)",
    {
        "all_reduce": ("all_pairs_pull", "all_pairs"),
        "broadcast": ("scatter_gather_pull", "chain"),
        "reduce": ("scatter_gather_pull", "scatter_gather_pull"),
        "all_gather": ("all_pairs_pull", "all_pairs"),
        "all_to_all": ("all_pairs_pull", "all_pairs"),
        "gather": SIMPLE_ALGORITHMS.of("gather"),
    },
)
"""Algorithms of copy engines: of plain buffers, and of buffers mapped by all ranks."""

PAIR_SLOTS = Measured(
    4,
    OPTIONS,
    "all_reduce on 2 GPUs in 2, 4 and 6 slots, in µs: staged by kernels 64 MiB 257, 240 and 331, "
    "512 MiB 1833, 1763 and 2522; by copy engines with 256 MiB of SCRATCH, 512 MiB on mapped "
    "buffers in 4 slices 1511 in 2 slots and 1417 in 4, staged in 8 slices 1817 and 1508",
)
"""Slots of a chunk's slices in SCRATCH of two GPU ranks: a signal and the credit back take as long
as 2 MiB. With more slots, or with more ranks, slices would be too short for the blocks: others have
WINDOW of ``tuner/candidates.py``."""

COPIED_BYTES = Measured(
    16 << 20,
    ASKED,
    "engine='copy' without a large SCRATCH and with one, in µs: plain buffers, all_reduce of 8 MiB "
    "97 and 118, 16 MiB 292 and 114, 25 MiB 550 and 134; reduce of 16 MiB 292 and 119; broadcast "
    "102 and 85; all_gather of 20 MiB 75 and 91, 25 MiB 170 and 90, reduce_scatter 71 and 87, 168 "
    "and 88; symmetric ones, all_gather of 25 MiB 66 and 76, reduce_scatter 181 and 91. Kernels: "
    "all_reduce of 16 MiB 67, of 25 MiB 94",
    {"all_gather": 24 << 20, "reduce_scatter": 24 << 20, "all_to_all": 24 << 20},
)
"""Bytes of the larger buffer from which calls with engine="copy" are given a large SCRATCH. Without
being asked copy engines run no call: staged by them 512 MiB took as long as by kernels from where
they lie (gpu_pushes.json), and of eight communicators with calls in opposite orders copies of one
filled the queues that others waited in, until the deadline."""

LARGE_BYTES = Measured(
    64 << 20,
    LARGE,
    "staged with the SCRATCH of a workspace and with 256 MiB, in µs: 4 GPUs 64 MiB all_reduce 429 "
    "and 354, all_gather 244 and 211, 512 MiB 2989 and 2458 (NCCL 2315), 1703 and 1267 (1273); 2 "
    "GPUs 64 MiB all_reduce 246 and 207, 512 MiB 1798 and 1500 (1692)",
)
"""Bytes of the larger buffer from which kernels have the SCRATCH of large calls, once all ranks
have mapped it. Smaller calls were not compared."""

STAGED_CALLS = 8
"""Large calls that a rank stages by kernels before one allocates memory for them. Peers map an
array by its fourth use, so with one or two that come again nothing is allocated."""

LARGE_SLICES: Measured[tuple[int, int, int] | None] = Measured(
    None,
    LARGE,
    "4 GPUs, staged in 128 MiB, in 8, 16 and 32 slices, in µs: all_reduce 64 MiB 350, 407 and 465, "
    "512 MiB 2594, 2603 and 2486; all_gather 64 MiB in 8 and 16 212 and 246, 512 MiB 1380 and "
    "1312; in 256 MiB broadcast by chain 512 MiB in 16 and 32 1701 and 1592",
    {
        **dict.fromkeys(("all_reduce", "reduce", "broadcast"), (16 << 20, 8, 32)),
        **dict.fromkeys(("all_gather", "reduce_scatter", "all_to_all"), (16 << 20, 8, 16)),
    },
)
"""Bytes of a slice, the fewest and the most slices of such calls that use SCRATCH."""

LARGE_ALGORITHMS = Measured(
    SIMPLE_ALGORITHMS.value,
    LARGE,
    "4 GPUs, staged, in µs: broadcast by tree and by chain 64 MiB 276 and 273, 512 MiB 1763 (2294 "
    "in another process) and, in 32 slices, 1592; reduce by scatter_gather_push and by "
    "scatter_gather 64 MiB 305 and 275, 512 MiB 2211 and 1733",
    {"broadcast": ("chain", "chain"), "reduce": ("scatter_gather", "scatter_gather")},
)
"""Algorithms of such calls on plain buffers, of 3 and 4 ranks that are joined alike; reduce sums in
the order that it has without."""

LARGE_CHAIN_BYTES = Measured(
    ANY_BYTES,
    LARGE,
    "4 GPUs, reduce of float32 by scatter_gather and by chain, of mapped and of plain buffers, in "
    "µs: 128 MiB 473 and 484, 474 and 489; 256 MiB 932 and 857, 935 and 854; 512 MiB 1846 and "
    "1594, 1845 and 1593 (NCCL 1501), by chain with the SCRATCH of a workspace 1919",
    {"reduce": 256 << 20},
)
"""Bytes from which a chain reduces where :func:`~ringcoll.tuner.simple.may_chain` allows it."""

LARGE_CHAINS = Measured(
    SIMPLE_ALGORITHMS.value, LARGE, LARGE_CHAIN_BYTES.figures, {"reduce": ("chain", "chain")}
)
"""The algorithm of such a reduce."""

MESSAGE_COPY_BYTES: Measured[int] = Measured(
    ANY_BYTES, ASSUMED, "messages by copy engines have not been timed"
)
"""Bytes from which a copy engine sends a message without being asked for, once its two ranks use a
large SCRATCH: none."""

ASKED_MESSAGE_BYTES = Measured(
    32 << 20,
    ASKED,
    "sendrecv of plain buffers by kernels and by copy engines, in µs: 8 MiB 120 and 276, 31 MiB "
    "107 and 177, 40 MiB 132 and 178; most of it was the host's time, of which 60 to 100 went to "
    "reading hellos before each message then",
)
"""The same with engine="copy" at both ends."""

LEAST_COPIED = min((COPIED_BYTES.value, *COPIED_BYTES.by.values()))
"""Bytes from which any collective may be large by the option or a table."""

COPY_SLICE_BYTES = Measured(
    32 << 20,
    PUSHES,
    "engine='copy', all_reduce on mapped buffers in 2, 4, 8 and 16 slices, in µs: 128 MiB 422, "
    "394, 446 and 493; 256 MiB 795, 737, 769 and 859; 512 MiB in 4, 8 and 16 1419, 1454 and 1571, "
    "on plain ones 1501, 1498 and 1563; reduce_scatter of 128 MiB in 2, 4, 8 and 16 309, 277, 265 "
    "and 281, 512 MiB in 4, 8 and 16 988, 922 and 898",
)
"""Bytes of the larger buffer in a slice of copy engines."""

COPY_SLICES = Measured(
    4,
    BESIDE,
    "256 MiB each way in 1, 4, 8, 16 and 32 copies, in µs: on one stream 688, 701, 717, 747 and "
    "790, on two in turns 689, 700, 716, 746 and 789; with kernels of one warp beside each 2 to 12 "
    "more",
    {"reduce_scatter": 8},
)
"""The most slices; more if SCRATCH is too small for them: a copy costs the link 4 µs, which another
stream does not hide."""

FUSED_BYTES = Measured(
    128 << 20,
    SWITCH,
    "scatter_gather_fused and chain in µs: 16 MiB 75 and 94, 32 MiB 128 and 148, 64 MiB 229 and "
    "247, 128 MiB 431 and 429, 512 MiB 1622 and 1556",
)
"""A broadcast of fewer bytes runs scatter_gather_fused where all pairs are alike and each lane of
the root has FUSED_BLOCKS CUDA blocks."""

FUSED_BLOCKS = Measured(32, SWITCH, FUSED_BYTES.figures)

PIPELINED: Measured[tuple[int, int, int] | None] = Measured(
    None,
    SWITCH,
    "broadcast by chain, in µs: 16 MiB 97.8 with 4 slices, 94.7 with 8; 64 MiB 250 with 8, 248 "
    "with 16, 266 with 32; 512 MiB 1566 with 64, 1590 with 128; several rings side by side changed "
    "nothing. By scatter_gather_fused: 16 MiB 76.2 with 4, 75.2 with 8, 80.2 with 16; 64 MiB 233 "
    "with 8, 232 with 16, 229 with 24. reduce_scatter of 2 H200 by all_pairs_output "
    "(gpu_outputs_2.json): 64 MiB 123 with 8, 121 with 16, 135 with 32; 256 MiB 409 with 16, 405 "
    "with 32, 407 with 64; 512 MiB 779 with 16, 775 with 64, 802 with 128",
    {
        "chain": (4 << 20, 8, 64),
        "scatter_gather_fused": (2 << 20, 4, 24),
        "all_pairs_output": (8 << 20, 16, 64),
    },
)
"""By algorithm, of those that are pipelined: bytes of a slice, the fewest and the most slices."""

PAIR_SLICES: Measured[int | None] = Measured(
    None,
    OPTIONS,
    "2 GPUs, in 1 and 2 slices, in µs: all_to_all of 64 MiB 139.2 and 107.2, 512 MiB 1010 and 748; "
    "on 4 GPUs 64 MiB took 178 in 1 and on another day 183 in 2 (gpu_bars_4.json); broadcast by "
    "chain in 1 slice and in those of PIPELINED: 64 MiB 204.5 and 209.8, 512 MiB 1547 and 1559; "
    "all_gather of 512 MiB by all_pairs in 2 and 4 slices 744 and 745 (gpu_pushes.json)",
    {"all_to_all": 2, "broadcast": 1, "all_gather": 2},
)
"""Slices of calls of two ranks, who relay nothing, by their default algorithms. Lanes of one slice
become one block: with two slices the lane that copies a rank's own segment of all_to_all or
all_gather runs beside the one that sends."""

BLOCK_BYTES = Measured(
    16 << 10,
    BLOCKS,
    "all_reduce on 4 GPUs by 48, 64, 96 and 128 blocks, in µs: 8 MiB 48.6, 48.2, 49.0 and 50.8, "
    "64 MiB 320, 313, 307 and 309, 512 MiB 2470, 2388, 2368 and 2345",
)
"""Bytes of a slice that a CUDA block moves at least."""

REPLICAS = Measured(
    64,
    PUSHES,
    "2 GPUs, by 64 and by 128 blocks, in µs: reduce of 64 MiB 200 and 196, 512 MiB 1493 and 1454 "
    "(NCCL 1456); reduce_scatter 847 and 815; all_reduce by two_shot 64 MiB 211 and 207, on 4 "
    "GPUs 512 MiB 2414 and 2354 (gpu_slices_4.json); broadcast by one_shot 1456 and 1541. On "
    "H200, beside a GEMM of 8192^3, that took with all_reduce of 256 MiB by 64 blocks 1.18 times "
    "as long, by 128 1.30 times, and the all_reduce 1537 and 1656",
    {"reduce": 128},
)
"""The most CUDA blocks of each block of a program. More make sums up to 4 % faster alone and a
broadcast slower, and leave fewer multiprocessors to what a program computes meanwhile, and to other
communicators."""

CALL_BLOCKS = Measured(
    MOST_BLOCKS,
    PUSHES,
    "2 H200, all_gather by all_pairs in 64 and in 128 blocks, in µs: 32 MiB 57.2 and 56.5, 64 MiB "
    "107 and 102, 128 MiB 212 and 194, 512 MiB 794 and 743; by all_pairs_fused in 64 on H100 62.7, "
    "109, 206 and 776",
    {"all_gather": 64},
)
"""The most CUDA blocks of all lanes of a call on mapped buffers together: an all_gather by 64 takes
up to 9 % longer, and leaves multiprocessors to what a program computes meanwhile."""

BESIDE_BLOCKS = Measured(
    32,
    BESIDE,
    "512 MiB by engine='copy' in 8 slices with 32, 64 and 96 blocks beside, in µs: reduce_scatter "
    "818, 786 and 778, all_reduce 1453 each; reduce_scatter by 128 blocks without copy engines 813",
)
"""The most CUDA blocks for each block that reduces beside copy engines: as fast as kernels alone by
a quarter of their blocks, and a program that asks for copy engines computes meanwhile."""

# -- CPU ranks -------------------------------------------------------------------------------------

ONE_HOP = Measured(
    ("one_shot", "all_pairs"),
    XEON,
    "16 KiB: all_reduce by one_shot took 27 µs, by two_shot_fused, which staged has three hops, 48",
)
"""The candidates of calls up to AGREED_BYTES: algorithms of one hop. A wake-up costs more than the
bytes."""

AGREED_BYTES = Measured(32 << 10, XEON, ONE_HOP.figures)
"""Bytes from which CPU ranks wait for all hellos, which name the buffers that peers can reach."""

SLICE_BYTES = Measured(128 << 10, XEON, "it is still in the writer's cache when the others read it")
"""Bytes of a staged slice."""

HOST = Measured(
    Links(bandwidth=12e9, alpha=0.7e-6, latency=4e-6, topology="memory", local_bandwidth=4e9),
    XEON,
    "bytes that all ranks and that one rank copies a second, seconds of a call into numpy and of a "
    "wake-up",
)
"""CPU ranks of one host; only the order of the algorithms depends on it."""

# -- ranks on several nodes ------------------------------------------------------------------------

NETWORK = Measured(
    Wire(bandwidth=1e9, alpha=10e-6, latency=30e-6), ASSUMED, "slower than a host's memory"
)
"""What a rank sends to and receives from other nodes; only the order of the algorithms depends on
it."""


def links_of(nodes: Sequence[int]) -> Links:
    """The wires between the ranks of these nodes."""
    if not nodes:
        return HOST.value
    return replace(HOST.value, nodes=tuple(nodes), network=NETWORK.value)


MESSAGE_BYTES = Measured(256 << 10, ASSUMED, "a message's overhead is small beside its bytes")
"""Bytes of a slice between nodes."""

COMPARED_RANKS = Measured(16, ASSUMED, "predicting takes longer with more ranks")
"""Ranks on several nodes up to which all algorithms are compared; beyond, hierarchical runs."""

LAYERS_BYTES = Measured(1 << 20, ASSUMED, "below, latency dominates")
"""Bytes of the larger buffer from which calls of GPU ranks on several nodes run in two layers."""
