"""Which algorithm a call on GPUs gets, asked from the executor's own choice."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ringcoll.arguments.calls import prepare
from ringcoll.collectives import Kind
from ringcoll.errors import ArgumentError, LaunchRefused
from ringcoll.executors.cuda.choose import choose
from ringcoll.executors.cuda.limits import CallOptions
from ringcoll.plan import Buffer

if TYPE_CHECKING:
    from ringcoll.bench.cases import Case
    from ringcoll.communicator.public import Communicator

__all__ = ["chosen_name"]


def chosen_name(
    comm: Communicator,
    case: Case,
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
    *,
    symmetric: bool,
) -> str:
    """Algorithm, protocol and slices of a call, as in ``"all_pairs LL"``.

    Args:
        comm: on GPUs.
        case: what is called.
        arguments: numpy arrays of the call's sizes, whose contents nobody reads.
        keywords: of the call: op and root.
        symmetric: peers reach the buffers.

    """
    from ringcoll.communicator.gpu import CudaState

    section, state = case.section, comm._state
    if section.collective == "sendrecv" or not isinstance(state, CudaState):
        return section.algorithm or "pair"
    send, recv = (*arguments, None, None)[:2]
    call = prepare(
        section.collective,
        rank=comm.rank,
        nranks=comm.nranks,
        sendbuf=send,
        recvbuf=recv,
        op=keywords.get("op", "sum"),
        root=keywords.get("root", 0),
    )
    config, cuda = state.config, state.cuda
    options = CallOptions(
        section.algorithm,
        config.protocol,
        section.slices,
        config.max_sms,
        engine=config.engine,
        channels=config.channels,
    )
    try:
        found = choose(
            call,
            cuda.resources,
            mapped=_mapped(section.kind) if symmetric and case.count else frozenset(),
            options=options,
        )
    except (ArgumentError, LaunchRefused):
        return section.algorithm or "none"  # the call itself will say why
    slices = found.variants[-1].launch.slices  # the root's own buffer is like the others
    how = "copy" if found.engine == "copy" else found.launch.protocol
    algorithm = found.source.algorithm if found.source is not None else ""
    name = f"{algorithm or 'unnamed'} {how}"
    return f"{name} S={slices}" if slices > 1 else name


def _mapped(kind: Kind) -> frozenset[Buffer]:
    """The buffers that all ranks know to be reachable: not those that only the root has."""
    sides = ((Buffer.INPUT, kind.input), (Buffer.OUTPUT, kind.output))
    return frozenset(
        buffer
        for buffer, segments in sides
        if segments != "none" and kind.rooted != buffer.name.lower()
    )
