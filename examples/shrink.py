"""Going on without a lost rank: python shrink.py.

One of four processes is killed; the others learn its rank, shrink the communicator and go on. They
meet by a bootstrap of their own: any object with ``rank``, ``nranks`` and ``allgather(bytes)``.
"""

import multiprocessing
import os
import signal

import numpy as np

import ringcoll

NRANKS, VICTIM = 4, 2


class Pipes:
    """A bootstrap by way of the parent process."""

    def __init__(self, rank, pipe):
        self.rank, self.nranks, self.pipe = rank, NRANKS, pipe

    def allgather(self, payload):
        """Every rank's payload, in rank order."""
        self.pipe.send_bytes(payload)
        return [self.pipe.recv_bytes() for _ in range(NRANKS)]


def work(rank, pipe):
    """Make calls until a rank is lost, then shrink."""
    comm = ringcoll.init(Pipes(rank, pipe), device="cpu", timeout=20)
    x = np.ones(1000)
    try:
        for call in range(100):
            if (rank, call) == (VICTIM, 50):
                os.kill(os.getpid(), signal.SIGKILL)
            x[:] = 1
            comm.all_reduce(x)
    except ringcoll.RankLostError as error:
        print(f"rank {rank}: {error}", flush=True)
        comm = comm.shrink()  # collective among the ranks that are left
        x[:] = 1  # after an error the buffers of a call are undefined
        comm.all_reduce(x)
        print(f"rank {rank} is rank {comm.rank} of {comm.nranks} now; sum {x[0]}", flush=True)
    comm.close()


if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(NRANKS)]
    ranks = [context.Process(target=work, args=(r, pipe)) for r, (_, pipe) in enumerate(pipes)]
    for process in ranks:
        process.start()
    while all(process.is_alive() for process in ranks):  # relay until the first one has ended
        if all(own.poll(0.05) for own, _ in pipes):
            payloads = [own.recv_bytes() for own, _ in pipes]
            for own, _ in pipes:
                for payload in payloads:
                    own.send_bytes(payload)
