"""From the algorithm to what runs: pure passes over a plan.

``alias`` and ``stage`` decide which memory a step really touches, ``network`` splits what crosses
nodes into a send and a receive, ``split`` and ``slices`` cut the steps into the pieces that are
pipelined, ``fuse`` joins lanes that cannot overlap, ``by_hops`` sorts the steps where signals ride
in the data or a launch asks for it, ``sync`` derives every wait and signal. Each pass keeps the
meaning of the order.
"""

from ringcoll.errors import LaunchRefused
from ringcoll.launch import Launch
from ringcoll.lower.alias import alias
from ringcoll.lower.in_band import by_hops, without_signals
from ringcoll.lower.network import check_messages, network
from ringcoll.lower.slices import fuse, slices, split
from ringcoll.lower.stage import stage
from ringcoll.lower.sync import sync
from ringcoll.plan import Plan, check_steps

__all__ = ["lower", "place", "synchronise", "without_signals"]


def place(plan: Plan, launch: Launch) -> Plan:
    """The plan in the launch's memory: aliased, staged, cut to single chunks; not yet sliced."""
    check_steps(plan)
    placed = split(stage(network(alias(plan, launch), launch), launch))
    if launch.slices > 1:
        return placed
    placed = fuse(placed, channels=launch.in_band)
    sort = launch.in_band or (launch.by_hops and not placed.synchronised)
    return by_hops(placed) if sort else placed


def lower(plan: Plan, launch: Launch) -> Plan:
    """The plan that runs: every slice spelt out, with the fewest waits and signals that order it.

    It has ``chunks · S`` chunks a segment: slice s of INPUT or OUTPUT chunk i is chunk ``i · S +
    s``, of SCRATCH chunk j it is slot ``j · W' + s mod W'``. Hand-written waits and signals are
    kept and nothing is added to them; such a plan has one slice.
    """
    return synchronise(place(plan, launch), launch)


def synchronise(placed: Plan, launch: Launch) -> Plan:
    """What :func:`lower` makes of a plan that :func:`place` has placed for the same launch."""
    if placed.synchronised:
        if launch.slices > 1:
            raise LaunchRefused(f"{placed.collective}: hand-written synchronisation has slices=1")
        return placed
    lowered = sync(slices(placed, launch), in_band=launch.in_band)
    if launch.nodes:
        check_messages(lowered, launch.nodes)
    return lowered
