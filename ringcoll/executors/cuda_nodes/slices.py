"""The slices of each collective that runs in two layers.

A slice has elements ``first`` to ``last`` of each segment; ``number`` is its number in the call.
:mod:`ringcoll.executors.cuda_nodes.layers` describes both layers of each collective.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from ringcoll.arguments.calls import Call
from ringcoll.errors import PlanError
from ringcoll.executors.cuda_nodes.exchange import RESULTS, Array, Enqueue, Slice
from ringcoll.executors.cuda_nodes.phases import LayeredCall, Phases
from ringcoll.views import start_of


def all_reduce(phases: Phases, layered: LayeredCall, number: int, first: int, last: int) -> Slice:
    """reduce_scatter in the node and on the rail, then all_gather on the rail and in the node."""
    call, (send, recv) = layered.call, _both(layered.call)
    share = (last - first) // phases.local_nranks
    piece = share // phases.nnodes
    own, whole = phases.node, recv[first:last]
    mine = whole[phases.local_rank * share : (phases.local_rank + 1) * share]
    before, partials, fold = phases.reduce_scatter(
        layered, number, send[first:last], mine[own * piece : (own + 1) * piece]
    )
    results = phases.exchanges.exchange(
        RESULTS,
        number,
        call,
        [(peer, mine[own * piece : (own + 1) * piece]) for peer in phases.rail_peers()],
        [(phases.rail[n], mine[n * piece : (n + 1) * piece]) for n in phases.other_nodes()],
    )
    after: tuple[Enqueue, ...] = ()
    if phases.local_nranks > 1:
        after = (phases.all_gather(whole, mine, layered, in_place=True),)
    return Slice(before, partials, fold, results, after)


def reduce(phases: Phases, layered: LayeredCall, number: int, first: int, last: int) -> Slice:
    """As all_reduce, but the results are gathered on the root's node and there on the root.

    The root, too, keeps its share in scratch memory: a kernel requires the same kind of memory on
    all ranks of a node.
    """
    call, own = layered.call, phases.node
    send, whole = _present(call, call.send), None if call.recv is None else call.recv[first:last]
    share = (last - first) // phases.local_nranks
    piece = share // phases.nnodes
    if whole is not None and phases.local_nranks == 1:
        mine = whole
    else:
        mine = phases.scratch(1, share, call.dtype, number)
    result = mine[own * piece : (own + 1) * piece]
    before, partials, fold = phases.reduce_scatter(layered, number, send[first:last], result)
    if call.root not in phases.members[own]:
        target = next(peer for peer in phases.rail_peers() if phases.same_node(peer, call.root))
        results = phases.exchanges.exchange(RESULTS, number, call, [(target, result)], [])
        return Slice(before, partials, fold, results)
    received = [(phases.rail[n], mine[n * piece : (n + 1) * piece]) for n in phases.other_nodes()]
    results = phases.exchanges.exchange(RESULTS, number, call, [], received)
    after = (phases.gather(whole, mine, layered),) if phases.local_nranks > 1 else ()
    return Slice(before, partials, fold, results, after)


def reduce_scatter(
    phases: Phases, layered: LayeredCall, number: int, first: int, last: int
) -> Slice:
    """Pack the segments by rail, then reduce_scatter in the node and along the rail."""
    call, (send, recv) = layered.call, _both(layered.call)
    length, item = last - first, call.dtype.itemsize
    packed = phases.scratch(1, len(send) // call.count * length, call.dtype)
    # By local rank, then by node: the segments of a rail lie together.
    copies = [
        (
            start_of(packed) + at * length * item,
            start_of(send) + (rank * call.count + first) * item,
        )
        for at, rank in enumerate(
            phases.members[n][k] for k in range(phases.local_nranks) for n in range(phases.nnodes)
        )
    ]
    pack = partial(phases.copies, tuple(copies), length * item)
    before, partials, fold = phases.reduce_scatter(layered, number, packed, recv[first:last])
    return Slice((pack, *before), partials, fold)


def all_gather(phases: Phases, layered: LayeredCall, number: int, first: int, last: int) -> Slice:
    """all_gather along the rail, then in the node; copies put the segments in rank order."""
    call, (send, recv) = layered.call, _both(layered.call)
    length, item = last - first, call.dtype.itemsize
    own = send[first:last]
    of_rail = phases.scratch(1, phases.nnodes * length, call.dtype)
    keep = partial(
        phases.copies,
        ((start_of(of_rail) + phases.node * length * item, start_of(own)),),
        length * item,
    )
    results = phases.exchanges.exchange(
        RESULTS,
        number,
        call,
        [(peer, own) for peer in phases.rail_peers()],
        [(phases.rail[n], of_rail[n * length : (n + 1) * length]) for n in phases.other_nodes()],
    )
    gathered = of_rail
    after: list[Enqueue] = [keep]
    if phases.local_nranks > 1:
        gathered = phases.scratch(0, phases.local_nranks * of_rail.size, call.dtype)
        after.append(phases.all_gather(gathered, of_rail, layered, in_place=False))
    copies = [
        (
            start_of(recv) + (rank * call.count + first) * item,
            start_of(gathered) + at * length * item,
        )
        for at, rank in enumerate(
            phases.members[n][k] for k in range(phases.local_nranks) for n in range(phases.nnodes)
        )
    ]
    after.append(partial(phases.copies, tuple(copies), length * item))
    return Slice(results=results, after=tuple(after))


def broadcast(phases: Phases, layered: LayeredCall, number: int, first: int, last: int) -> Slice:
    """Broadcast in the root's node, shares along the rails, all_gather in the other nodes."""
    call = layered.call
    send, recv = call.send, _present(call, call.recv)
    share = (last - first) // phases.local_nranks
    whole = recv[first:last]
    mine = whole[phases.local_rank * share : (phases.local_rank + 1) * share]
    peers = phases.rail_peers()
    if call.root in phases.members[phases.node]:
        before = phases.broadcast(None if send is None else send[first:last], whole, layered)
        results = phases.exchanges.exchange(
            RESULTS, number, call, [(peer, mine) for peer in peers], []
        )
        return Slice(before=before, results=results)
    source = next(peer for peer in peers if phases.same_node(peer, call.root))
    results = phases.exchanges.exchange(RESULTS, number, call, [], [(source, mine)])
    if phases.local_nranks == 1:
        return Slice(results=results)
    gather = phases.all_gather(whole, mine, layered, in_place=True)
    return Slice(results=results, after=(gather,))


def all_to_all(phases: Phases, layered: LayeredCall, number: int, first: int, last: int) -> Slice:
    """Ranks of different nodes exchange their segments; slice 0 exchanges those inside the node."""
    call, (send, recv) = layered.call, _both(layered.call)

    def part(array: Array, rank: int) -> Array:
        return array[rank * call.count + first : rank * call.count + last]

    results = phases.exchanges.exchange(
        RESULTS,
        number,
        call,
        [(peer, part(send, peer)) for peer in phases.remote_ranks(1)],
        [(peer, part(recv, peer)) for peer in phases.remote_ranks(-1)],
    )
    return Slice(results=results, after=(phases.all_to_all(layered),) if number == 0 else ())


def _both(call: Call) -> tuple[Array, Array]:
    """The buffers of a collective in which every rank has both."""
    return _present(call, call.send), _present(call, call.recv)


def _present(call: Call, buffer: Array | None) -> Array:
    """A buffer that every rank has."""
    if buffer is None:
        raise PlanError(f"{call.collective} on rank {call.rank}: a buffer is missing")
    return buffer


SLICE_MAKERS: Mapping[str, Callable[[Phases, LayeredCall, int, int, int], Slice]] = {
    "all_reduce": all_reduce,
    "reduce": reduce,
    "reduce_scatter": reduce_scatter,
    "all_gather": all_gather,
    "broadcast": broadcast,
    "all_to_all": all_to_all,
}
"""By collective: makes a slice from (phases, call, number, first, last)."""
