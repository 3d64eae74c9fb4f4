"""What one rank does with messages of MPI alone; for scenarios.py."""

import numpy as np

from tests.processes.programs.verdict import error_of

__all__ = ["mpi_truncated"]


def mpi_truncated():
    """More comes than fits; what else is under way is given up all the same."""
    from mpi4py import MPI

    from ringcoll.fabric.mpi import FIRST, PAIRS, Carrier

    carrier = Carrier(MPI.COMM_SELF, [0])
    tags = [carrier.reserve()]
    messages, late = carrier.messages(tags, 0), carrier.messages(tags, 0)
    short = messages.receive(np.zeros(8, np.uint8), 0, PAIRS)
    others = [np.zeros(64, np.uint8) for _ in range(12)]
    waiting = [messages.receive(array, 0, FIRST + n) for n, array in enumerate(others)]
    messages.send(np.ones(64, np.uint8), 0, PAIRS)
    error = "no error"
    while error == "no error" and short in messages.active:
        error = error_of(short.done)
    left = short in messages.active, short.done()
    given_up = messages.give_up(())
    for number in range(len(others)):
        late.send(np.ones(64, np.uint8), 0, FIRST + number).done()
    written = sum(bool(array.any()) for array in others)
    messages.close()
    return [error, left, given_up, written, all(transfer.done() for transfer in waiting)]
