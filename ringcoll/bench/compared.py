"""What calls run by a table beside the fastest candidate, and how sure that is."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ringcoll.bench.candidates import Candidate
from ringcoll.bench.cases import Case

Array = npt.NDArray[np.float64]

_RESAMPLED = 500


@dataclass(frozen=True, slots=True)
class Checked:
    """What calls without options run, beside the fastest candidate; times in seconds.

    ``ratio`` is the time of what calls run, divided by the best candidate's, and ``least`` its
    lower bound, exceeded with 95 % confidence; ``noise`` is the ratio to itself, timed once more.
    """

    collective: str
    nbytes: int
    mapped: bool
    runs: str
    seconds: float
    best: str
    best_seconds: float
    ratio: float
    least: float
    noise: float


def seconds_of_blocks(candidate: Candidate) -> float:
    """The time of a candidate's calls."""
    return _lowest(np.array(candidate.blocks))


def _lowest(blocks: Array) -> float:
    """The mean of the lowest quarter: what else runs on a machine only adds time."""
    return float(np.sort(blocks)[: -(-blocks.size // 4)].mean())


def ranked_of(candidates: Sequence[Candidate]) -> list[Candidate]:
    """By time, but what runs without a table first where it is not slower for sure."""
    ranked = sorted(candidates, key=seconds_of_blocks)
    usual = next((each for each in ranked if each.usual), None)
    if usual is not None and _least(usual, ranked[0], max(1, len(ranked) - 1)) <= 1:
        ranked.remove(usual)
        ranked.insert(0, usual)
    return ranked


def checked_of(case: Case, mapped: bool, ranked: list[Candidate]) -> Checked:
    """What was compared for a case."""
    usual = next(each for each in ranked if each.usual)
    others = [each for each in ranked if not each.usual]

    def ratio(other: Candidate) -> float:
        return seconds_of_blocks(usual) / seconds_of_blocks(other)

    twins = [ratio(each) for each in others if each.key == usual.key]
    rivals = [each for each in others if each.key != usual.key]
    best = max(rivals, key=ratio, default=usual)
    return Checked(
        case.section.collective,
        case.nbytes,
        mapped,
        _name(usual),
        seconds_of_blocks(usual),
        _name(best),
        seconds_of_blocks(best),
        ratio(best),
        _least(usual, best, max(1, len(rivals))),
        twins[0] if twins else 1.0,
    )


def _least(usual: Candidate, best: Candidate, rivals: int) -> float:
    """The lower bound of a ratio by resampling blocks, as ``best`` is one of so many."""
    draw = np.random.default_rng(0)
    mine, theirs = np.array(usual.blocks), np.array(best.blocks)
    ratios = [
        _lowest(draw.choice(mine, mine.size)) / _lowest(draw.choice(theirs, theirs.size))
        for _ in range(_RESAMPLED)
    ]
    return float(np.quantile(ratios, 0.05 / rivals))


def _name(candidate: Candidate) -> str:
    return str(candidate.timed(0, None)).partition(":")[0]


def summary(rows: Sequence[Checked]) -> Mapping[str, float]:
    """How far calls are from the best candidate, and how far equal calls are from each other."""
    ratios, least = [row.ratio for row in rows], [row.least for row in rows]
    noise = [abs(row.noise - 1) for row in rows]
    return {
        "points": len(rows),
        "ratio at most 1.05": sum(ratio <= 1.05 for ratio in ratios),
        "ratio above 1.05 beyond noise": sum(bound > 1.05 for bound in least),
        "median ratio": round(statistics.median(ratios), 3),
        "largest ratio": round(max(ratios), 3),
        "largest lower bound": round(max(least), 3),
        "median noise": round(statistics.median(noise), 3),
    }
