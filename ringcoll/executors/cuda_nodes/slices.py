"""A slice of each collective that runs in two layers: elements ``first`` to ``last`` of a segment.

See :mod:`ringcoll.executors.cuda_nodes.layers` for what happens where.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from ringcoll.arguments.calls import Call
from ringcoll.errors import PlanError
from ringcoll.executors.cuda.params import start_of
from ringcoll.executors.cuda_nodes.carry import Exchange
from ringcoll.executors.cuda_nodes.steps import Array, Enqueue, LayeredCall, Steps


@dataclass(frozen=True, slots=True)
class Slice:
    """A part of a call, in the order in which a stream is given it."""

    inside: tuple[Enqueue, ...] = ()  # of the node, before the first exchange
    partials: Exchange | None = None
    fold: tuple[Enqueue, ...] = ()
    results: Exchange | None = None  # along the rail, or with all ranks of other nodes
    outside: tuple[Enqueue, ...] = ()  # of the node, after the last exchange


def all_reduce(steps: Steps, layered: LayeredCall, number: int, first: int, last: int) -> Slice:
    """Shares go round in the node, along the rail, and both ways back."""
    call, (send, recv) = layered.call, _both(layered.call)
    share = (last - first) // steps.width
    piece = share // steps.nodes
    own, whole = steps.node, recv[first:last]
    mine = whole[steps.local * share : (steps.local + 1) * share]
    inside, partials, folded = steps.folded(
        layered, number, send[first:last], mine[own * piece : (own + 1) * piece]
    )
    results = steps.exchanges.exchange(
        1,
        number,
        call,
        [(peer, mine[own * piece : (own + 1) * piece]) for peer in steps.peers()],
        [(steps.rail[n], mine[n * piece : (n + 1) * piece]) for n in steps.others()],
    )
    outside: tuple[Enqueue, ...] = ()
    if steps.width > 1:
        outside = (steps.gathered(whole, mine, layered, in_place=True),)
    return Slice(inside, partials, folded, results, outside)


def reduce(steps: Steps, layered: LayeredCall, number: int, first: int, last: int) -> Slice:
    """The same, but what is done goes to the root's node alone, and there to the root.

    What a rank has of it lies in scratch memory also where it is the root's: kernels want the same
    kind of memory of all ranks of a node.
    """
    call, own = layered.call, steps.node
    send, whole = _sent(call), None if call.recv is None else call.recv[first:last]
    share = (last - first) // steps.width
    piece = share // steps.nodes
    if whole is not None and steps.width == 1:
        mine = whole
    else:
        mine = steps.scratch(1, share, call.dtype, number)
    done = mine[own * piece : (own + 1) * piece]
    inside, partials, folded = steps.folded(layered, number, send[first:last], done)
    if call.root not in steps.members[own]:
        target = next(peer for peer in steps.peers() if steps.near(peer, call.root))
        results = steps.exchanges.exchange(1, number, call, [(target, done)], [])
        return Slice(inside, partials, folded, results)
    come = [(steps.rail[n], mine[n * piece : (n + 1) * piece]) for n in steps.others()]
    results = steps.exchanges.exchange(1, number, call, [], come)
    outside = (steps.collected(whole, mine, layered),) if steps.width > 1 else ()
    return Slice(inside, partials, folded, results, outside)


def reduce_scatter(steps: Steps, layered: LayeredCall, number: int, first: int, last: int) -> Slice:
    """What is for the ranks of one rail lies together, and goes there."""
    call, (send, recv) = layered.call, _both(layered.call)
    length, item = last - first, call.dtype.itemsize
    packed = steps.scratch(1, len(send) // call.count * length, call.dtype)
    # Of rank l of a node: what is for rank l of every node.
    moves = [
        (
            start_of(packed) + at * length * item,
            start_of(send) + (rank * call.count + first) * item,
        )
        for at, rank in enumerate(
            steps.members[n][k] for k in range(steps.width) for n in range(steps.nodes)
        )
    ]
    pack = partial(steps.copies, tuple(moves), length * item)
    inside, partials, folded = steps.folded(layered, number, packed, recv[first:last])
    return Slice((pack, *inside), partials, folded)


def all_gather(steps: Steps, layered: LayeredCall, number: int, first: int, last: int) -> Slice:
    """The rail's segments come first, then those of the node's other ranks."""
    call, (send, recv) = layered.call, _both(layered.call)
    length, item = last - first, call.dtype.itemsize
    own = send[first:last]
    into = steps.scratch(1, steps.nodes * length, call.dtype)
    keep = partial(
        steps.copies,
        ((start_of(into) + steps.node * length * item, start_of(own)),),
        length * item,
    )
    results = steps.exchanges.exchange(
        1,
        number,
        call,
        [(peer, own) for peer in steps.peers()],
        [(steps.rail[n], into[n * length : (n + 1) * length]) for n in steps.others()],
    )
    spread = into
    outside: list[Enqueue] = [keep]
    if steps.width > 1:
        spread = steps.scratch(0, steps.width * into.size, call.dtype)
        outside.append(steps.gathered(spread, into, layered, in_place=False))
    moves = [
        (
            start_of(recv) + (rank * call.count + first) * item,
            start_of(spread) + at * length * item,
        )
        for at, rank in enumerate(
            steps.members[n][k] for k in range(steps.width) for n in range(steps.nodes)
        )
    ]
    outside.append(partial(steps.copies, tuple(moves), length * item))
    return Slice(results=results, outside=tuple(outside))


def broadcast(steps: Steps, layered: LayeredCall, number: int, first: int, last: int) -> Slice:
    """The root's node has all of it, and sends each rail its share."""
    call, (send, recv) = layered.call, (layered.call.send, _received(layered.call))
    share = (last - first) // steps.width
    whole = recv[first:last]
    mine = whole[steps.local * share : (steps.local + 1) * share]
    peers = steps.peers()
    if call.root in steps.members[steps.node]:
        inside = steps.spread(None if send is None else send[first:last], whole, layered)
        results = steps.exchanges.exchange(1, number, call, [(peer, mine) for peer in peers], [])
        return Slice(inside=inside, results=results)
    source = next(peer for peer in peers if steps.near(peer, call.root))
    results = steps.exchanges.exchange(1, number, call, [], [(source, mine)])
    if steps.width == 1:
        return Slice(results=results)
    gathered = steps.gathered(whole, mine, layered, in_place=True)
    return Slice(results=results, outside=(gathered,))


def all_to_all(steps: Steps, layered: LayeredCall, number: int, first: int, last: int) -> Slice:
    """Ranks of different nodes exchange segments directly; the node's own go whole meanwhile."""
    call, (send, recv) = layered.call, _both(layered.call)

    def part(array: Array, rank: int) -> Array:
        return array[rank * call.count + first : rank * call.count + last]

    results = steps.exchanges.exchange(
        1,
        number,
        call,
        [(peer, part(send, peer)) for peer in steps.foreign(1)],
        [(peer, part(recv, peer)) for peer in steps.foreign(-1)],
    )
    return Slice(results=results, outside=(steps.swapped(layered),) if number == 0 else ())


def _sent(call: Call) -> Array:
    """What a rank gives to a call; every rank does."""
    return _there(call, call.send)


def _received(call: Call) -> Array:
    """Where a call's result goes; every rank has it."""
    return _there(call, call.recv)


def _both(call: Call) -> tuple[Array, Array]:
    return _sent(call), _received(call)


def _there(call: Call, buffer: Array | None) -> Array:
    if buffer is None:
        raise PlanError(f"{call.collective} on rank {call.rank}: a buffer is missing")
    return buffer


SLICE_MAKERS: Mapping[str, Callable[[Steps, LayeredCall, int, int, int], Slice]] = {
    "all_reduce": all_reduce,
    "reduce": reduce,
    "reduce_scatter": reduce_scatter,
    "all_gather": all_gather,
    "broadcast": broadcast,
    "all_to_all": all_to_all,
}
"""By collective: makes a slice, by its number in the call."""
