"""A predicted time beside its limit: how far it is from it, and which term costs that.

Two limits stand in every answer. N/B is what one link needs for the message; no broadcast is
faster. An algorithm's own limit is what its busiest port needs for its bytes at full rate, such as
2(k - 1)/k·N/B of a ring all_reduce among k ranks: no number of slices beats it. What a time is
above that is ramp, overhead and latency: see :class:`ringcoll.model.closed_form.Terms`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ringcoll.model.closed_form import Terms
from ringcoll.model.predict import Clock
from ringcoll.units import format_seconds


@dataclass(frozen=True, slots=True)
class Answer:
    """A predicted time in seconds, beside its limits; ``print`` it.

    ``wire`` is N/B; ``busiest`` is the port that the algorithm's own limit is of.
    """

    nranks: int
    slices: int
    terms: Terms
    wire: float
    busiest: str

    @property
    def seconds(self) -> float:
        """The predicted time."""
        return self.terms.total

    @property
    def limit(self) -> float:
        """The algorithm's own limit in seconds."""
        return self.terms.bandwidth

    @property
    def times(self) -> float:
        """How many times its limit the time is; infinite where nothing but signals move."""
        return self.seconds / self.limit if self.limit else math.inf

    @property
    def costs(self) -> str:
        """The term that costs most above the limit; "" where the time is the limit."""
        above = ("ramp", "overhead", "latency")
        name = max(above, key=lambda term: float(getattr(self.terms, term)))
        return name if getattr(self.terms, name) > 0 else ""

    @property
    def costs_text(self) -> str:
        """The same with its share of the time, as tables have it."""
        if not self.costs:
            return "-"
        share = getattr(self.terms, self.costs) / self.seconds
        return f"{self.costs} ({share:.0%})" if share >= 0.01 else f"{self.costs} (<1%)"

    @property
    def limit_text(self) -> str:
        """Both limits in a line."""
        if not self.limit:
            return "no bytes move between ranks"
        share = share_text(self.limit / self.wire, self.nranks)
        text = f"{share} = {format_seconds(self.limit)}, {self.busiest} at full rate"
        return text if share == "N/B" else f"{text}; N/B = {format_seconds(self.wire)}"

    def __str__(self) -> str:
        text = f"S = {self.slices} takes {format_seconds(self.seconds)}"
        if not self.seconds:
            return text
        if self.limit:
            text += f", {self.times:.2f} times its limit of {self.limit_text}"
        return text + (f"; most costs {self.costs_text}" if self.costs else "")


def answer(clock: Clock, nbytes: float, slices: int = 1) -> Answer:
    """Predict a call and name its limits; N is bytes of the collective's larger buffer.

    Example:
        >>> from ringcoll.algorithms import build
        >>> from ringcoll.model.links import Links
        >>> ring = Clock(build("all_reduce", "ring", 4), Links(10e9, alpha=1e-6))
        >>> print(answer(ring, 64e6))  # doctest: +ELLIPSIS
        S = 1 takes 9.606 ms, 1.00 times its limit of 2(k-1)/k*N/B = 9.6 ms, ...

    """
    prediction = clock.predict(nbytes, slices)
    return Answer(
        clock.plan.nranks,
        slices,
        clock.terms(nbytes, slices),
        nbytes / clock.links.bandwidth,
        prediction.busiest,
    )


def share_text(share: float, nranks: int) -> str:
    """How often N passes a port, as a formula in k where it is a simple one.

    >>> share_text(1.5, 4), share_text(3, 4), share_text(0.4, 4)
    ('2(k-1)/k*N/B', '(k-1)*N/B', '0.4*N/B')
    """
    k = nranks
    known = {
        "N/B": 1.0,
        "(k-1)/k*N/B": (k - 1) / k,
        "2(k-1)/k*N/B": 2 * (k - 1) / k,
        "(k-1)*N/B": k - 1,
        "2(k-1)*N/B": 2 * (k - 1),
        "N/(k*B)": 1 / k,
        "2*N/(k*B)": 2 / k,
        "N/((k-1)*B)": 1 / max(1, k - 1),
    }
    found = (text for text, value in known.items() if math.isclose(share, value, rel_tol=1e-9))
    return next(found, f"{share:.4g}*N/B")
