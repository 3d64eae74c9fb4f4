"""A tiny interpreter of plans that shares nothing with the library's own.

It runs ``order`` one step at a time over memories of expressions: a leaf is (rank, index) of an
INPUT chunk, a sum is a pair of expressions, nested to the left.
"""

from __future__ import annotations

from typing import Any

from ringcoll.plan import Buffer


class Leaf(tuple):
    __slots__ = ()


def need(condition, why):
    """An assertion that python -O keeps."""
    if not condition:
        raise AssertionError(why)


def units(chunk):
    return [(chunk.rank, chunk.buffer, chunk.index + i) for i in range(chunk.size)]


def interpret(plan):
    """Run a plan; return what each rank's OUTPUT chunks hold, as {(rank, index): expression}."""
    collective = plan.collective
    wanted = {
        (rank, Buffer.OUTPUT, i): tuple(Leaf(leaf) for leaf in contributions)
        for rank in range(plan.nranks)
        for i, contributions in collective.after(rank).items()
    }
    memory: dict[tuple, Any] = {
        (rank, Buffer.INPUT, i): Leaf(leaf)
        for rank in range(plan.nranks)
        for i, leaf in collective.before(rank).items()
    }
    flat: dict[Any, tuple[Leaf, ...]] = {leaf: (leaf,) for leaf in memory.values()}
    unread: set[tuple] = set()
    ended: set[tuple] = set()

    def final_of(cell, result):
        return sorted(flat[result]) == sorted(wanted[cell])

    def is_raw(result, final):
        """Whether OUTPUT may hold it for a while: a contribution that is not all of the result."""
        return isinstance(result, Leaf) and not final

    for block, step in plan.order:
        where = f"{block}: {step}"
        need(block.rank in {chunk.rank for chunk in (*step.srcs, *step.dsts)}, where)
        need(not step.waits and not step.signals, where)
        need(len({chunk.size for chunk in (*step.srcs, *step.dsts)}) == 1, where)
        need(collective.reduces or len(step.srcs) == 1, where)
        results = []
        for cells in zip(*map(units, step.srcs), strict=True):
            unread.difference_update(cells)
            need(all(cell in memory for cell in cells), f"{where}: reads what nobody has written")
            values = [memory[cell] for cell in cells]
            result = values[0]
            for value in values[1:]:
                both = flat[result] + flat[value]
                result = (result, value)
                flat[result] = both
            need(len(set(flat[result])) == len(flat[result]), f"{where}: counted twice")
            results.append(result)
        targets = [cell for dst in step.dsts for cell in units(dst)]
        need(len(set(targets)) == len(targets), where)
        for dst in step.dsts:
            for cell, result in zip(units(dst), results, strict=True):
                need(dst.buffer is not Buffer.INPUT, f"{where}: writes to INPUT")
                final = dst.buffer is Buffer.OUTPUT and final_of(cell, result)
                if dst.buffer is Buffer.SCRATCH or (collective.reduces and is_raw(result, final)):
                    need(cell not in unread, f"{where}: {cell} is written over unread")
                    need(cell not in ended, f"{where}: {cell} is written twice")
                    unread.add(cell)
                else:
                    need(cell not in ended, f"{where}: {cell} is written twice")
                    need(final, f"{where}: not final")
                    ended.add(cell)
                memory[cell] = result
    need(not unread, "chunks that nobody reads")
    need(ended == wanted.keys(), "OUTPUT chunks that nobody writes")
    outputs = {cell: value for cell, value in memory.items() if cell[1] is Buffer.OUTPUT}
    return {(rank, index): value for (rank, _, index), value in outputs.items()}
