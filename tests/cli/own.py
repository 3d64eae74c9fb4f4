"""A person's own algorithm, for the tests of what commands make of it."""

STAR = '''
from ringcoll import Block, Buffer, Chunk, Collective, Plan, Step


def star(nranks):
    """Rank 0 sums all inputs, the others fetch the sum."""
    inputs = tuple(Chunk(rank, Buffer.INPUT, 0) for rank in range(nranks))
    outputs = [Chunk(rank, Buffer.OUTPUT, 0) for rank in range(nranks)]
    order = [(Block(0), Step(inputs, (outputs[0],)))]
    order += [(Block(r), Step((outputs[0],), (outputs[r],))) for r in range(1, nranks)]
    return Plan(Collective("all_reduce", nranks), tuple(order))


def twice(nranks):
    """Wrong: rank 0 adds the input of rank 1 a second time."""
    right = star(nranks)
    (block, step), *rest = right.order
    step = Step((*step.srcs, step.srcs[1]), step.dsts)
    return Plan(right.collective, ((block, step), *rest))
'''
