"""Kernels broken on purpose, a line each: what the stand-in shows of it."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from ringcoll.algorithms import build
from ringcoll.launch import Launch
from tests.kernels.apart import run_apart
from tests.kernels.cases import LL, LL128, STAGED, Case
from tests.kernels.sanitizer import THREADS, needs_sanitizer
from tests.kernels.stand_in import CPU, KERNELS, needs_compiler

pytestmark = [needs_compiler, pytest.mark.slow]

RING = Case(build("all_reduce", "ring", 3), LL, 203)
PAIRS = Case(build("all_reduce", "all_pairs", 3), LL, 203)
WIDE = Case(build("all_reduce", "all_pairs", 3), LL128, 1800, replicas=2)
BROADCAST = Case(build("broadcast", "all_pairs", 3), LL, 203)
MEAN = Case(build("all_reduce", "ring", 3), LL, 203, op="avg")
STAGED_RING = Case(build("all_reduce", "ring", 3), STAGED, 1300, replicas=2)
STAGED_MEAN = Case(build("all_reduce", "ring", 3), STAGED, 1300, op="avg")
STAGED_CHAIN = Case(build("broadcast", "chain", 3), STAGED, 1300)
STAGED_PAIRS = Case(build("all_reduce", "all_pairs", 3), STAGED, 1300)
FACTORS = Case(build("all_reduce", "all_pairs", 3), LL, 203, op="premul_sum", scalars=(0.5, 3, -2))
STAGED_FACTORS = Case(
    build("all_reduce", "ring", 3), STAGED, 1300, op="premul_sum", scalars=(0.5, 3, -2)
)
REPLICAS = Case(build("broadcast", "chain", 3), STAGED, 4000, replicas=2)
SHORT_LAST = Case(build("broadcast", "chain", 3), STAGED, 5140, replicas=2)
MAPPED = Case(build("all_reduce", "two_shot", 3), Launch(), 4096, replicas=2)
SHIFTED = Case(build("all_reduce", "two_shot", 3), Launch(), 4096, shift=3, replicas=2)
SHIFTED_WORDS = Case(build("broadcast", "chain", 3), STAGED, 1300, shift=2)

ATTEMPTS = 8
"""How often a wrong kernel runs until it is seen to be wrong."""

SLOW = (
    "__atomic_store_n(halves + 1, high",
    "pause(); pause(); pause(); __atomic_store_n(halves + 1, high",
)
"""A machine on which half a line arrives late."""


@dataclass(frozen=True)
class Mutant:
    """A kernel that is wrong.

    Args:
        name: what is wrong.
        file: of the kernels.
        old: the text that is right; it stands there once.
        new: in its place.
        case: a call that suffers.
        calls: how many of them in a row.
        machine: a change of the stand-in that the right kernel bears.

    """

    name: str
    file: str
    old: str
    new: str
    case: Case
    calls: int = 1
    machine: tuple[str, str] | None = None


LINES = "ld_relaxed_sys_v4_u32_if_missing(lines[r][s][i], line(t, words, r, s, i)"

WRONG = [
    Mutant("half a line is enough", "cpu/machine.cpp", " && line.w == flag", "", PAIRS, 1, SLOW),
    Mutant(
        "the other half is read",
        "ll.cuh",
        LINES,
        f"{LINES} + t.call.args.half - 2 * t.call.half()",
        PAIRS,
    ),
    Mutant(
        "a line is taken before its flag",
        "ll.cuh",
        "if (!warp_any(missing != 0)) break;",
        "warp_any(missing != 0); break;",
        WIDE,
    ),
    Mutant(
        "the flag's place is data",
        "ll.cuh",
        "const u32 most = LANES > 1 && last() ? MOST / 2 : MOST;",
        "const u32 most = MOST;",
        WIDE,
    ),
    Mutant(
        "a line's last word is another's first",
        "ll.cuh",
        "pack / LANES * LINE_WORDS * 8",
        "pack / LANES * LANES * 16",
        WIDE,
    ),
    Mutant(
        "one half for all calls",
        "call.cuh",
        "(epoch & 1) * args.half",
        "0 * args.half",
        BROADCAST,
        500,
    ),
    Mutant(
        "a partial has one line",
        "ll.cuh",
        "pack / LANES * lines + i",
        "pack / LANES + 0 * lines + i",
        RING,
    ),
    Mutant(
        "the last place is full",
        "ll.cuh",
        "if (count <= first) return 0;",
        "return Pack<T>::COUNT;",
        PAIRS,
    ),
    Mutant(
        "nobody waits for the last",
        "call.cuh",
        "if (unlikely(known + 1 < epoch)) {",
        "if (false) {",
        BROADCAST,
        500,
    ),
    Mutant(
        "all have entered a rooted call",
        "call.cuh",
        "(known + 1 >= epoch ? known : epoch - 1)",
        "epoch",
        BROADCAST,
        500,
    ),
    Mutant(
        "a mean is a sum",
        "ll.cuh",
        "FINAL ? Op::finish(total.acc[i], RC_RANKS) : total.acc[i]",
        "total.acc[i]",
        MEAN,
    ),
    Mutant(
        "a mean is a sum in words",
        "move.cuh",
        "FINAL ? Op::finish(total, RC_RANKS) : total",
        "total",
        STAGED_MEAN,
    ),
    Mutant(
        "elements for bytes",
        "move.cuh",
        "words[0] + first * bytes",
        "words[0] + (bytes ? first : 0)",
        REPLICAS,
    ),
    Mutant(
        "a slice stands still",
        "move.cuh",
        "return at + slice * stride;\n        }",
        "return at;\n        }",
        STAGED_RING,
    ),
    Mutant(
        "threads take one vector twice",
        "move.cuh",
        "chunks[s], (at + u * threads) * COUNT, s)",
        "chunks[s], (at + u) * COUNT, s)",
        MAPPED,
    ),
    Mutant(
        "the tail is left out",
        "move.cuh",
        "part == 0 ? first : count - first - done",
        "part == 0 ? first : 0",
        STAGED_CHAIN,
    ),
    Mutant(
        "the head is left out",
        "move.cuh",
        "part == 0 ? first :",
        "part == 0 ? 0 :",
        SHIFTED,
    ),
    Mutant(
        "the last vectors are left out",
        "move.cuh",
        "move<Whole<LANES>>((count - first) / LANES)",
        "move<Whole<LANES>>((count - first) / LANES / 2)",
        SHIFTED,
    ),
    Mutant(
        "the last words are left out",
        "move.cuh",
        "move<Whole<EACH>>(count / EACH)",
        "move<Whole<EACH>>(count / EACH / 2)",
        SHIFTED_WORDS,
    ),
    Mutant(
        "the reader's own factor",
        "ll.cuh",
        "static_cast<u32>(owners[s])",
        "(owners[s] ? call.local.rank : call.local.rank)",
        FACTORS,
    ),
    Mutant(
        "the first rank's factor in words",
        "move.cuh",
        "factor<Acc>(words[2 * (SRCS + DSTS) + s])",
        "factor<Acc>(0)",
        STAGED_FACTORS,
    ),
]

RACES = [
    Mutant(
        "no credit",
        "simple.cuh",
        "const bool guard = slice >= window;",
        "const bool guard = false;",
        STAGED_CHAIN,
    ),
    Mutant(
        "posted before all have written",
        "simple.cuh",
        "barrier_sync(ENDED + odd, movers() + WARP);",
        "for (u32 k = 0; k < count; ++k) post(words + 2 * k, slice);\n"
        "        barrier_sync(ENDED + odd, movers() + WARP);",
        STAGED_RING,
    ),
    Mutant(
        "slots without end", "simple.cuh", "slot = slice % window", "slot = slice", STAGED_PAIRS
    ),
    Mutant(
        "replicas share a flag",
        "simple.cuh",
        "const u64 at = words[0] + replica * 8;",
        "const u64 at = words[0];",
        REPLICAS,
    ),
    Mutant(
        "a short slice is shared in its own way",
        "simple.cuh",
        "(width + replicas - 1) / replicas",
        "(count + replicas - 1) / replicas",
        SHORT_LAST,
    ),
    Mutant(
        "signals of the last call",
        "simple.cuh",
        "call.epoch << 32 | count",
        "count",
        STAGED_RING,
        6,
    ),
    Mutant(
        "moved before all has come",
        "simple.cuh",
        "barrier_sync(BEGUN + odd, block_threads());\n        const bool",
        "if (head.srcs != 0) work<T, Program>(head, row, slice);\n"
        "        barrier_sync(BEGUN + odd, block_threads());\n        const bool",
        STAGED_RING,
    ),
]


def changed(folder: Path, file: str, old: str, new: str) -> None:
    path = folder / file
    text = path.read_text()
    assert text.count(old) == 1, f"{file} has {text.count(old)} times {old!r}"
    path.write_text(text.replace(old, new))


def copied(folder: Path) -> Path:
    """The kernels in a folder where they may be changed."""
    shutil.copytree(KERNELS, folder)
    shutil.copytree(CPU, folder / "cpu")
    return folder


def kernels_of(mutant: Mutant, folder: Path, *, wrong: bool) -> Path:
    """The kernels on the mutant's machine, right or wrong."""
    kernels = copied(folder / f"kernels-{wrong}")
    if mutant.machine is not None:
        changed(kernels, "cpu/machine.cpp", *mutant.machine)
    if wrong:
        changed(kernels, mutant.file, mutant.old, mutant.new)
    return kernels


@pytest.mark.parametrize("mutant", WRONG, ids=lambda mutant: mutant.name)
def test_a_wrong_kernel_is_seen(mutant: Mutant, tmp_path: Path) -> None:
    kernels = kernels_of(mutant, tmp_path, wrong=True)
    verdicts: list[str] = []
    # What threads do when depends on the machine's load; to be seen once is enough.
    while len(verdicts) < ATTEMPTS and not {"wrong", "report"}.intersection(verdicts):
        outcome = run_apart(mutant.case, tmp_path, kernels=kernels, calls=mutant.calls, timeout=0.5)
        verdicts.append(outcome.verdict())
    assert verdicts[-1] in {"wrong", "report"}


def test_an_access_at_a_misaligned_address_ends_the_process(tmp_path: Path) -> None:
    """As it ends a kernel on a GPU: here the alignment of the first array counts for all."""
    mutant = Mutant(
        "the first array's alignment",
        "move.cuh",
        "found && chunks[k] % bytes == 0",
        "found && (k > 0 || chunks[k] % bytes == 0)",
        SHIFTED_WORDS,
    )
    verdicts = [
        run_apart(
            mutant.case, tmp_path, kernels=kernels_of(mutant, tmp_path, wrong=wrong)
        ).verdict()
        for wrong in (False, True)
    ]
    assert verdicts == ["right", "crash"]


@needs_sanitizer
@pytest.mark.parametrize("mutant", RACES, ids=lambda mutant: mutant.name)
def test_a_race_is_seen(mutant: Mutant, tmp_path: Path) -> None:
    kernels = kernels_of(mutant, tmp_path, wrong=True)
    outcome = run_apart(
        mutant.case, tmp_path, *THREADS, kernels=kernels, calls=mutant.calls, timeout=5.0
    )
    assert outcome.verdict() in {"race", "wrong", "report"}


@pytest.mark.parametrize(
    "mutant",
    # Once for each machine and call that test_collectives.py and test_factors.py do not make.
    {
        (m.machine, str(m.case), m.calls): m
        for m in WRONG
        if m.machine is not None or m.calls > 1 or m.case in (WIDE, MAPPED, REPLICAS)
    }.values(),
    ids=lambda mutant: mutant.name,
)
def test_the_right_kernel_bears_it(mutant: Mutant, tmp_path: Path) -> None:
    kernels = KERNELS if mutant.machine is None else kernels_of(mutant, tmp_path, wrong=False)
    outcome = run_apart(mutant.case, tmp_path, kernels=kernels, calls=mutant.calls)
    assert outcome.verdict() == "right"
