"""Paced links: right results, and when each rank began and ended every call."""

import time

import numpy as np

import ringcoll
from tests.processes.programs.reference import data
from tests.processes.programs.verdict import Checks, say

BANDWIDTH, ALPHA = 20e6, 2e-3  # bytes/s and s
COUNT = 1 << 18  # float32 elements: 1 MiB, 52 ms on a link
CHAINS = (1, 32)  # slices


def main() -> None:
    checks, times = Checks(), {}
    with ringcoll.init(timeout=20, pace=(BANDWIDTH, ALPHA)) as comm:
        n, rank = comm.nranks, comm.rank
        sent = data(1, 0, COUNT)
        total = sum(data(r, r, COUNT) for r in range(n))
        x = comm.empty(COUNT)
        plain = np.empty(COUNT, "float32")

        def timed(name, buffer, content, want, call) -> None:
            buffer[:] = content
            comm.barrier()
            began = time.monotonic()  # one clock for all processes of a host
            call(buffer)
            times[name] = [began, time.monotonic()]
            checks.equal(name, buffer, want)

        for slices in CHAINS:
            for kind, buffer in (("symmetric", x), ("plain", plain)):
                timed(
                    f"chain {slices} {kind}",
                    buffer,
                    sent if rank == 0 else -1,
                    sent,
                    lambda b, s=slices: comm.broadcast(b, algorithm="chain", slices=s),
                )
        for algorithm in ("ring", "two_shot"):
            timed(
                f"all_reduce {algorithm}",
                x,
                data(rank, rank, COUNT),
                total,
                lambda b, a=algorithm: comm.all_reduce(b, algorithm=a),
            )
        peer = (rank + n // 2) % n

        def exchange(buffer) -> None:
            comm.sendrecv(data(rank, rank, COUNT), peer, buffer, peer)

        timed("sendrecv", plain, -1, data(peer, peer, COUNT), exchange)
        child = comm.split(0)
        if child is not None:
            timed("split", x, sent if rank == 0 else -1, sent, child.broadcast)
            child.close()
    say(rank, failures=checks.failures, count=checks.count, times=times)


if __name__ == "__main__":
    main()
