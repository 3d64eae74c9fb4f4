"""The clock's inner loop: run a graph of steps on its ports, in the order of events.

There are no plans and no seconds here: nodes, ports and ticks are integers.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from ringcoll.model.graph import Graph

NEVER = -1
"""When a step ends that waits for a signal that never comes."""

Costs = list[tuple[tuple[int, int], ...]]
"""Of each step the ports that it occupies, each with the ticks."""


def fold(graph: Graph, costs: Costs, slices: int) -> list[int]:
    """When each node ends: step t of slice s is number s · steps + t.

    Nodes are taken in the order in which they become ready; those of one number within their
    ranks that become ready together are taken together, so that it does not matter which rank
    comes first. Each port is free again when it has served them all.
    """
    count = len(graph.steps)
    indices, strides, edges = graph.indices, graph.strides, graph.edges
    missing = _missing(graph, slices)
    total = len(missing)
    ended = [NEVER] * total
    ready = [0] * total
    free = [0] * len(graph.ports)

    def turn(node: int) -> int:
        """Among the nodes that are ready together: those that occupy no port go first."""
        at = node % count
        return node // count * strides[at] + indices[at] if costs[at] else -1

    heap = [(0, turn(node), node) for node in range(total) if not missing[node]]
    heapify(heap)
    while heap:
        now, key, node = heappop(heap)
        batch = [node]
        while heap and heap[0][0] == now and heap[0][1] == key:
            batch.append(heappop(heap)[2])
        for node in batch:
            for port, ticks in costs[node % count]:
                busy = free[port]
                free[port] = (busy if busy > now else now) + ticks
        for node in batch:
            at = node % count
            end = now
            for port, _ in costs[at]:
                if free[port] > end:
                    end = free[port]
            ended[node] = end
            base = node - at
            for then, ahead, flight in edges[at]:
                later = base + then + ahead * count
                if later < total:
                    if end + flight > ready[later]:
                        ready[later] = end + flight
                    missing[later] -= 1
                    if not missing[later]:
                        heappush(heap, (ready[later], turn(later), later))
    return ended


def _missing(graph: Graph, slices: int) -> list[int]:
    """Of each node, how many edges lead to it from slices that exist."""
    count = len(graph.steps)
    by_ahead = {0: [0] * count}
    for after in graph.edges:
        for then, ahead, _ in after:
            if ahead not in by_ahead:
                by_ahead[ahead] = [0] * count
            by_ahead[ahead][then] += 1
    missing: list[int] = []
    for number in range(slices):
        rows = [row for ahead, row in by_ahead.items() if ahead <= number]
        missing += map(sum, zip(*rows, strict=True))
    return missing


def arrivals(graph: Graph, ended: list[int], nranks: int) -> list[int]:
    """When each rank's last step has ended and its last data have arrived; NEVER if not."""
    count = len(graph.steps)
    if NEVER in ended:
        return [NEVER] * nranks
    ends = [0] * nranks
    for end, lands in zip(ended[len(ended) - count :], graph.lands, strict=True):
        for rank, flight in lands:
            if end + flight > ends[rank]:
                ends[rank] = end + flight
    return ends if graph.shared == 1 else [max(ends)] * nranks


def port_totals(graph: Graph, costs: Costs) -> list[int]:
    """For how many ticks a slice occupies each port."""
    totals = [0] * len(graph.ports)
    for cost in costs:
        for port, ticks in cost:
            totals[port] += ticks
    return totals


def stretch(
    graph: Graph, costs: Costs, slices: int, window: int, nranks: int
) -> tuple[list[int], int]:
    """When each rank ends, and how many nodes were folded.

    Slices are a pipeline: once it is full, what one period of slices does the next one repeats,
    the same number of ticks later. Fewer slices are folded until all steps are seen to do so; the
    periods that are left out are a multiplication. Without a period all slices are folded.
    """
    count = len(graph.steps)
    folded, short = 0, 6 * max(2, window)
    while 2 * short < slices:
        ended = fold(graph, costs, short)
        folded += len(ended)
        found = _period(ended, costs, short)
        if found is not None:
            period, ticks = found
            rest = (slices - short) % period
            if rest:
                ended = fold(graph, costs, short + rest)
                folded += len(ended)
            times = (slices - short) // period
            last = ended[len(ended) - count :]
            late = [end + times * more for end, more in zip(last, ticks, strict=True)]
            return arrivals(graph, late, nranks), folded
        short *= 2
    return arrivals(graph, fold(graph, costs, slices), nranks), folded + slices * count


def _period(ended: list[int], costs: Costs, slices: int) -> tuple[int, list[int]] | None:
    """After how many slices every step repeats, and how many ticks later; None if they do not.

    They must do so for two periods of the middle third, between filling and draining. Those that
    occupy a port must agree on the ticks: else one lane runs ahead, and the other one has the ports
    to itself in the end.
    """
    count = len(costs)
    low, high = slices // 3 * count, (2 * slices // 3 + 1) * count
    for period in range(1, slices // 6 + 1):
        back = period * count
        ticks = [ended[at + back] - ended[at] for at in range(low, low + count)]
        if len({more for more, cost in zip(ticks, costs, strict=True) if cost}) > 1:
            continue
        columns = range(low + back, high - count + 1, count)
        if all(
            ended[row + at] - ended[row - back + at] == ticks[at]
            for row in columns
            for at in range(count)
        ):
            return period, ticks
    return None
