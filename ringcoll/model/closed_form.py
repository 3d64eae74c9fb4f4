"""The timing model on paper: the pipelined chain, and other algorithms in one slice.

N bytes go down a chain of k ranks in S slices over links of B bytes a second. Each slice holds a
link for t = N/(S·B) + α. The first one needs k - 1 such times to reach the end, the others follow
t apart, and each hop adds a flight of L that the link does not notice::

    T = (S + k - 2)·(N/(S·B) + α) + (k - 1)·L

This is the pipelined broadcast of Watts and van de Geijn, *A pipelined broadcast for
multidimensional meshes* (1995), with the parameters of LogGP (Alexandrov et al., 1995): α is its
o, B is 1/G. Multiplied out, T has four terms, see :class:`Terms`. T is least where
N/B·(k - 2)/S² = α, hence at S = √((k - 2)·N/(α·B)).

:func:`ringcoll.model.predict.predict` gives the same numbers from the plan itself. What is here
is for paper, and what tests hold the clock against.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ringcoll.errors import ArgumentError


def chain_time(
    nranks: int,
    nbytes: float,
    slices: int,
    bandwidth: float,
    alpha: float = 0.0,
    latency: float = 0.0,
) -> float:
    """Seconds until the last rank of a pipelined chain has everything.

    Each slice occupies a link for ``alpha`` seconds besides its bytes, and flies ``latency`` a hop;
    ``bandwidth`` is bytes a second. A chain of one rank takes no time.
    """
    _check(nranks, nbytes, slices)
    if nranks == 1:
        return 0.0
    slice_time = nbytes / slices / bandwidth + alpha
    return (slices + nranks - 2) * slice_time + (nranks - 1) * latency


def chain_best_slices(nranks: int, nbytes: float, bandwidth: float, alpha: float) -> float:
    """The real S ≥ 1 at which T is least: √((k - 2)·N/(α·B)); from k = 3 on infinite without α."""
    _check(nranks, nbytes, 1)
    if nranks <= 2 or nbytes == 0:
        return 1.0
    if alpha == 0:
        return math.inf
    return max(1.0, math.sqrt((nranks - 2) * nbytes / (alpha * bandwidth)))


@dataclass(frozen=True, slots=True)
class Limits:
    """T where α = L = 0, in seconds: ``one`` for S = 1, ``many`` for S → ∞."""

    one: float
    many: float


def chain_limits(nranks: int, nbytes: float, bandwidth: float) -> Limits:
    """Without α and L: (k - 1)·N/B store-and-forward for S = 1, and N/B for S → ∞."""
    _check(nranks, nbytes, 1)
    if nranks == 1:
        return Limits(0.0, 0.0)
    return Limits((nranks - 1) * nbytes / bandwidth, nbytes / bandwidth)


@dataclass(frozen=True, slots=True)
class Terms:
    """The parts of a time, in seconds; they add up to it.

    ``bandwidth`` is the bytes through the busiest link at full rate, which no schedule of the plan
    beats, for a chain N/B; ``ramp`` fills and drains the pipeline, (k - 2)·N/(S·B); ``overhead`` is
    what α adds a slice and hop, (S + k - 2)·α, and ``latency`` what L adds a hop, (k - 1)·L.
    """

    bandwidth: float
    ramp: float
    overhead: float
    latency: float

    @property
    def total(self) -> float:
        """Seconds in all."""
        return self.bandwidth + self.ramp + self.overhead + self.latency


def _check(nranks: int, nbytes: float, slices: int) -> None:
    if nranks < 1 or nbytes < 0 or slices < 1:
        raise ArgumentError(
            f"nranks={nranks}, nbytes={nbytes}, slices={slices}: "
            f"nranks and slices are at least 1, nbytes at least 0"
        )


@dataclass(frozen=True, slots=True)
class Form:
    """A time with one slice: messages·α + share·N/B + hops·L."""

    messages: int
    share: float
    hops: int

    def seconds(
        self, nbytes: float, bandwidth: float, alpha: float = 0.0, latency: float = 0.0
    ) -> float:
        """The time of N bytes on links of B, α and L."""
        return self.messages * alpha + self.share * nbytes / bandwidth + self.hops * latency


def _log(n: int) -> int:
    """⌈log2 n⌉."""
    return (n - 1).bit_length()


def _direct(n: int) -> Form:
    """Everyone exchanges a segment with everyone, one after the other."""
    return Form(n - 1, (n - 1) / n, 1)


def _whole(n: int) -> Form:
    """A whole buffer from each of the other ranks through one port."""
    return Form(n - 1, n - 1, 1)


def _chain(n: int) -> Form:
    return Form(n - 1, n - 1, n - 1)


def _around(n: int) -> Form:
    return Form(n - 1, (n - 1) / n, n - 1)


def _twice(form: Callable[[int], Form]) -> Callable[[int], Form]:
    def doubled(n: int) -> Form:
        once = form(n)
        return Form(2 * once.messages, 2 * once.share, 2 * once.hops)

    return doubled


def _read_then_write(n: int) -> Form:
    """Two direct exchanges; a block that has read goes on at once, so only one flight shows."""
    return Form(2 * (n - 1), 2 * (n - 1) / n, 1)


def _exchange(n: int) -> Form:
    """Recursive doubling with whole buffers: ⌊log2 n⌋ rounds, two more to fold in the odd ranks."""
    odd = n & (n - 1) != 0
    rounds = n.bit_length() - 1 + 2 * odd
    return Form(rounds, rounds, rounds)


CLOSED_FORMS: Mapping[tuple[str, str], Callable[[int], Form]] = {
    ("broadcast", "chain"): _chain,
    ("broadcast", "ring"): _chain,
    ("reduce", "chain"): _chain,
    ("reduce", "ring"): _chain,
    **{(name, "chain"): _chain for name in ("scan", "exscan")},
    ("broadcast", "one_shot"): _whole,
    ("reduce", "one_shot"): _whole,
    ("all_reduce", "one_shot"): _whole,
    # Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters (2009).
    ("all_reduce", "ring"): _twice(_around),
    ("all_gather", "ring"): _around,
    ("reduce_scatter", "ring"): _around,
    ("all_reduce", "two_shot"): _read_then_write,
    ("all_reduce", "all_pairs"): _twice(_direct),
    ("all_gather", "one_shot"): _direct,
    ("all_gather", "all_pairs"): _direct,
    ("reduce_scatter", "one_shot"): _direct,
    ("reduce_scatter", "all_pairs"): _direct,
    ("all_to_all", "one_shot"): _direct,
    ("all_to_all", "all_pairs"): _direct,
    ("gather", "one_shot"): _direct,
    ("scatter", "one_shot"): _direct,
    ("send", "pair"): lambda n: Form(1, 1.0, 1),
}
"""One-slice times on a switch, by collective and algorithm, where a formula is this simple."""


CHAINS = frozenset(
    {
        *((name, "chain") for name in ("broadcast", "reduce", "scan", "exscan")),
        *((name, "ring") for name in ("broadcast", "reduce")),
    }
)
"""What :func:`chain_time` is exact for, by collective and algorithm."""


def closed_form(collective: str, algorithm: str, nranks: int) -> Form | None:
    """The one-slice time of an algorithm on a switch; None where no simple formula is known."""
    make = CLOSED_FORMS.get((collective, algorithm))
    if make is None:
        return None
    return make(nranks) if nranks > 1 else Form(0, 0.0, 0)


def bus_factor(collective: str, nranks: int) -> float:
    """What busbw is of algbw, by the convention of nccl-tests: the share of N each link carries."""
    if collective == "all_reduce":
        return 2 * (nranks - 1) / nranks
    if collective in ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"):
        return (nranks - 1) / nranks
    return 1.0


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement of a pipelined chain."""

    nranks: int
    nbytes: float
    slices: int
    seconds: float
