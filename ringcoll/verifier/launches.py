"""The proof of an algorithm in every launch that may run it: what a user asks for.

A plan says only what moves where. The launch decides how it runs: in place or not, with
buffers that peers reach (mapped) or through SCRATCH (staged), in S slices, with signals in words of
their own or inside the data. :func:`prove` lowers the plan for each of these and proves what comes
out, so that a plan that it accepts is right wherever it runs.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

from ringcoll.algorithms import Algorithm, build, name_of, options, own_plan, rooted_form
from ringcoll.dtypes import Accumulate
from ringcoll.encode import encode
from ringcoll.errors import ArgumentError, ArgumentTypeError, LaunchRefused, PlanError
from ringcoll.launch import ALL_MAPPED, IN_BAND, Launch
from ringcoll.lower import lower
from ringcoll.plan import HELLO, Block, Buffer, Plan, check_types, walk
from ringcoll.verifier.calls import verify_calls
from ringcoll.verifier.induction import verify_slices
from ringcoll.verifier.prover import Proof, prove_launch


@dataclass(frozen=True, slots=True)
class ProvenLaunch:
    """What was proven of one way to run a plan, or why it cannot run so.

    ``slices`` are the S that were proven, empty for every S; ``proof`` and ``signals`` (how many
    there are) are of the fewest slices. Where the launch cannot carry the plan there is no proof,
    and ``refusal`` says why.
    """

    launch: Launch
    slices: tuple[int, ...] = ()
    proof: Proof | None = None
    signals: int = 0
    refusal: str = ""

    def __str__(self) -> str:
        launch = self.launch
        protocol = ", ".join(IN_BAND) if launch.in_band else launch.protocol
        buffers = "mapped" if launch.mapped == ALL_MAPPED else "staged"
        if self.proof is None:
            place = "in place" if launch.in_place else "out of place"
            return f"refused: {protocol}, {buffers}, {place}: {self.refusal}"
        text = f"{protocol:<11}{buffers:<9}{'yes' if launch.in_place else 'no':<10}"
        slices = ",".join(map(str, self.slices)) or "every S"
        return f"{text}{slices:<9}{self.proof.steps:>5}{self.signals:>9}"


@dataclass(frozen=True, slots=True)
class ProofReport:
    """What :func:`prove` has proven; ``print`` it.

    ``hops`` is the longest way of a contribution, in transfers between ranks. ``proof`` is of the
    plan as it is written: mapped, out of place, one slice. ``launches`` are all ways to run it,
    those that cannot carry it too. ``calls``: calls in a row were proven.
    """

    plan: Plan
    hops: int
    proof: Proof
    launches: tuple[ProvenLaunch, ...]
    calls: bool

    def __str__(self) -> str:
        plan, proof = self.plan, self.proof
        own = "its own waits and signals" if plan.synchronised else "waits and signals derived"
        lines = [
            f"proven: {plan.collective}",
            f"{len(plan.order)} steps in {len(plan.steps)} blocks, {self.hops} hops, {own}",
        ]
        if plan.collective.reduces:
            order = "in rank order" if proof.rank_order else "in an order of the plan's own"
            often = "once" if proof.roundings == 1 else f"up to {proof.roundings} times"
            lines.append(f"every rank gets the same bits: reduced {order}, rounded {often}")
        ends = "only after all ranks have entered" if proof.total else "without waiting for all"
        proven = [str(launch) for launch in self.launches if launch.proof is not None]
        refused = [str(launch) for launch in self.launches if launch.proof is None]
        lines += [f"a rank returns {ends}", "", _HEAD, *proven, *refused, ""]
        lines += ["steps and signals: of all ranks, for the first number of slices"]
        if self.calls:
            lines += ["calls in a row: proven, also after and before another collective"]
        return "\n".join(lines)


_HEAD = f"{'protocol':<11}{'buffers':<9}{'in place':<10}{'slices':<9}{'steps':>5}{'signals':>9}"


def prove(
    algorithm: Algorithm | Plan,
    nranks: int | None = None,
    *,
    collective: str | None = None,
    root: int = 0,
    nodes: Sequence[int] = (),
    slices: Sequence[int] | None = None,
    window: int = 2,
    deterministic: bool = False,
    accumulate: Accumulate = "wide",
) -> ProofReport:
    """Lower an algorithm for every launch that may run it, and prove each.

    Proven are launches in place and out of place, with mapped and with staged buffers, in every
    number of slices, with signals of their own (Simple) and inside the data (LL, LL128), and calls
    in a row. A launch that cannot carry the plan is listed with the reason.

    Args:
        algorithm: a function of ``nranks`` (and ``root``) that returns a Plan, a Plan, or the name
            of a built-in algorithm together with ``collective``.
        nranks: how many ranks take part; not needed for a Plan.
        collective: wanted with a name; else what the plan must implement, if given.
        root: the root's rank, handed to a function that takes it.
        nodes: the node of each rank, where there are several: what crosses goes by message.
        slices: numbers of slices to prove; None: every number, by induction.
        window: W, how many slices of a SCRATCH chunk exist at once.
        deterministic: whether results must be left folds in rank order.
        accumulate: "wide" rounds once, "dtype" rounds every partial that is stored.

    Returns:
        What was proven; its text is a table.

    Raises:
        PlanError: the plan is wrong; the message says rank, block, step, seen, wanted, and the
            launch if the plan is right as it is written.
        ArgumentError: the plan is one of another collective, root or number of ranks.

    Example:
        >>> print(ringcoll.prove(star, 4))  # doctest: +SKIP
        proven: all_reduce of 4 ranks, 1 chunks
        4 steps in 4 blocks, 2 hops, waits and signals derived
        ...

    """
    plan = _plan_of(algorithm, nranks, collective, root)
    written = Launch(nodes=tuple(nodes), window=window)
    # As it is written first: errors then name the plan's own chunks.
    proof = prove_launch(plan, written, deterministic=deterministic, accumulate=accumulate)
    ways = [*every_launch((1,), window, written.nodes), *(() if nodes else _in_band(window))]
    if plan.collective.name == "barrier":
        ways = [written]  # which has no buffers
    launches = tuple(_prove(plan, way, slices, deterministic, accumulate) for way in ways)
    return ProofReport(plan, hops(plan), proof, launches, prove_calls(plan, written.nodes))


def _plan_of(
    algorithm: Algorithm | Plan, nranks: int | None, collective: str | None, root: int
) -> Plan:
    if isinstance(algorithm, Plan):
        check_types(algorithm)
        plan, wanted = algorithm, (nranks, collective, root or None)
    elif nranks is None:
        raise ArgumentError("prove: nranks is missing: for how many ranks is the plan to be built?")
    elif collective is not None:
        return build(collective, algorithm, nranks, root=root)
    elif isinstance(algorithm, str):
        raise ArgumentError(f"prove: {algorithm!r} is a name: collective= is missing")
    elif callable(algorithm):
        takes = "root" in options("", algorithm)
        plan = own_plan(algorithm, nranks, **({"root": root} if takes else {}))
        if root and not takes:
            form = rooted_form(algorithm, plan.collective.name)
            raise ArgumentError(
                f"prove: root={root}, but {name_of(algorithm)} does not take root; {form}"
            )
        wanted = nranks, None, root
    else:
        raise ArgumentTypeError(
            f"prove: seen a {type(algorithm).__name__}, wanted a function, a Plan or a name"
        )
    seen = plan.nranks, plan.collective.name, plan.collective.root
    if any(w is not None and w != s for w, s in zip(wanted, seen, strict=True)):
        raise ArgumentError(
            f"prove: seen a plan of {plan.collective}, wanted "
            + ", ".join(f"{name}={w}" for name, w in zip(_WANTED, wanted, strict=True) if w)
        )
    return plan


_WANTED = ("nranks", "collective", "root")


def every_launch(
    slices: Sequence[int], window: int, nodes: tuple[int, ...] = ()
) -> Iterator[Launch]:
    """Mapped or staged, out of place or in place, with every S, signals in words of their own."""
    staged: frozenset[Buffer] = frozenset()
    for count, mapped, in_place in product(slices, (ALL_MAPPED, staged), (False, True)):
        yield Launch("Simple", count, window, mapped, in_place, nodes)


def _in_band(window: int) -> Iterator[Launch]:
    """The launches of LL and LL128, which are one to a proof."""
    for in_place in (False, True):
        yield Launch("LL", 1, window, frozenset(), in_place)


def describe(launch: Launch) -> str:
    """A launch as messages name it."""
    memory = "mapped" if launch.mapped == ALL_MAPPED else "staged"
    place = "in place" if launch.in_place else "out of place"
    protocol = f"{launch.protocol}, " if launch.in_band else ""
    return f"{protocol}{memory}, {place}, S={launch.slices}, W={launch.window}"


def _prove(
    plan: Plan,
    launch: Launch,
    slices: Sequence[int] | None,
    deterministic: bool,
    accumulate: Accumulate,
) -> ProvenLaunch:
    once = plan.synchronised or launch.in_band or plan.collective.name == "barrier"
    counts = (1,) if once else tuple(slices or ())
    first = replace(launch, slices=counts[0]) if counts else launch
    how = {"deterministic": deterministic}
    try:
        if launch.in_band:
            encode(plan, launch)  # refuses a plan that needs signals beside the data
        proofs = [
            prove_launch(plan, replace(launch, slices=count), accumulate=accumulate, **how)
            for count in counts
        ] or [*verify_slices(plan, launch, accumulate=accumulate, **how)]
        if not once and not launch.nodes:  # as CPU ranks run what is not cut
            whole = replace(launch, slices=1, by_hops=True)
            prove_launch(plan, whole, accumulate=accumulate, **how)
        lowered = lower(plan, first)
    except LaunchRefused as error:
        # After the collective, which the report names at its head.
        reason = str(error).partition(f"{plan.collective.chunks} chunks")[2] or str(error)
        return ProvenLaunch(launch, refusal=reason.removeprefix(", in place").lstrip(": "))
    except PlanError as error:
        raise type(error)(f"{error} ({describe(launch)})") from None
    signals = sum(len(step.signals) for _, step in lowered.order)
    return ProvenLaunch(first, counts, proofs[0], signals)


def prove_calls(plan: Plan, nodes: tuple[int, ...] = ()) -> bool:
    """Prove calls in a row, five of a plan and with a total and a rooted call about it.

    Returns whether the plan can be staged, as calls that are proven in a row are.
    """
    try:
        own = lower(plan, Launch(mapped=frozenset(), nodes=nodes))
    except LaunchRefused:
        return False
    ends, starts = _neighbours(plan.nranks)
    for calls in ((own,) * 5, (own, ends, own), (own, starts, own), (starts, own, ends)):
        verify_calls(calls)
    return True


@lru_cache(maxsize=8)
def _neighbours(nranks: int) -> tuple[Plan, Plan]:
    """A total call and a rooted one, to stand before and after others."""
    staged = Launch(mapped=frozenset())
    return (
        lower(build("all_reduce", "one_shot", nranks), staged),
        lower(build("broadcast", "chain", nranks), staged),
    )


def hops(plan: Plan) -> int:
    """How many transfers between ranks lie on the longest way of a contribution.

    Of a plan without data, such as a barrier, the longest chain of signals between ranks.
    """
    silent = not any(step.dsts for _, step in plan.order)
    cell = plan.collective.cell
    moved: dict[tuple[int, str, int], int] = {}
    heard: dict[Block, int] = {}
    sent: defaultdict[tuple[Block, Block], deque[int]] = defaultdict(deque)
    for block, step in walk(plan):
        for wait in step.waits if silent else ():
            if wait.channel != HELLO:
                far = wait.rank != block.rank
                heard[block] = max(heard.get(block, 0), sent[wait, block].popleft() + far)
        for signal in step.signals if silent else ():
            sent[block, signal].append(heard.get(block, 0))
        here = max(
            (
                moved.get(cell(unit), 0) + (src.rank != block.rank)
                for src in step.srcs
                for unit in src.units()
            ),
            default=0,
        )
        for dst in step.dsts:
            for unit in dst.units():
                moved[cell(unit)] = here + (dst.rank != block.rank)
    return max((heard if silent else moved).values(), default=0)
