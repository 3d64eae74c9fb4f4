"""What CPU ranks run for a size, and why: what the tuner looked at, on one node or several."""

from __future__ import annotations

from ringcoll.communicator.across import NETWORK
from ringcoll.communicator.selection import AGREED_BYTES, tuned
from ringcoll.communicator.topology import Topology
from ringcoll.config import Config

__all__ = ["explained"]


def explained(
    collective: str,
    nbytes: int,
    nranks: int,
    nodes: tuple[int, ...],
    topology: Topology,
    config: Config,
) -> str:
    """Which algorithm a size gets, in lines of text.

    Args:
        collective: its name.
        nbytes: of the larger buffer.
        nranks: of the communicator.
        nodes: the node of each rank where there are several; else empty.
        topology: what the ranks know of their machine.
        config: the communicator's options.

    """
    choice = tuned(
        collective,
        nranks,
        nbytes,
        deterministic=bool(config.deterministic),
        nodes=nodes,
        machine=topology.machine,
    )
    where = "staged at once" if nbytes <= AGREED_BYTES else "agreed first, zero-copy if it can be"
    ranks = f"{nranks} CPU ranks"
    if nodes:
        sizes = "+".join(str(nodes.count(node)) for node in range(max(nodes) + 1))
        ranks += f" on {max(nodes) + 1} nodes ({sizes}), messages between them by MPI"
    lines = [f"{collective}, {nbytes} bytes, {ranks}: {where}"]
    if topology.system is not None:
        lines += topology.gone_by(collective, config.channels)
    if nodes:
        lines.append(
            f"a network of {NETWORK.bandwidth / 1e9:g} GB/s a rank is assumed, not measured"
        )
    if config.algorithm is not None:
        lines.append(f"algorithm={config.algorithm!r} is set; the tuner would look at:")
    return "\n".join([*lines, *(f"  {reason}" for reason in choice.reasons)])
