"""Bus bandwidth of all_reduce over size: mpiexec -n 4 python bandwidth_sweep.py [FILE.png].

MPI runs beside it. `ringcoll bench` measures more and checks every element.
"""

import sys
import time
from functools import partial

import numpy as np
from mpi4py import MPI

import ringcoll

SIZES = [1 << power for power in range(10, 25, 2)]  # 1 KiB to 16 MiB


def seconds(call, world, calls=20):
    """The time of one call: the slowest rank's mean, after a warm-up."""
    for _ in range(3):
        call()
    world.Barrier()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    elapsed = np.array((time.perf_counter() - start) / calls)
    world.Allreduce(MPI.IN_PLACE, elapsed, MPI.MAX)  # mpi4py's lower-case calls would pickle
    return float(elapsed)


def sweep(comm, world):
    """The bus bandwidth in GB/s of both libraries at each size."""
    factor = 2 * (comm.nranks - 1) / comm.nranks  # nccl-tests': bytes over the busiest link
    rows = []
    for size in SIZES:
        x = comm.empty(size // 4, "float32")
        x[:] = 0
        ours = seconds(partial(comm.all_reduce, x), world)
        mpi = seconds(partial(world.Allreduce, MPI.IN_PLACE, x), world)
        rows.append((factor * size / ours / 1e9, factor * size / mpi / 1e9))
        if comm.rank == 0:
            print(
                f"{size >> 10:6} KiB  ringcoll {rows[-1][0]:.3f} GB/s  MPI {rows[-1][1]:.3f} GB/s"
            )
    return rows


if __name__ == "__main__":
    with ringcoll.init(MPI.COMM_WORLD, device="cpu") as comm:
        rows = sweep(comm, MPI.COMM_WORLD)
        if comm.rank == 0 and len(sys.argv) > 1:
            from matplotlib.figure import Figure

            axes = Figure().subplots()
            axes.plot([size >> 10 for size in SIZES], rows, marker="o", label=["ringcoll", "MPI"])
            axes.set(xscale="log", xlabel="size [KiB]", ylabel="bus bandwidth [GB/s]")
            axes.legend()
            axes.figure.savefig(sys.argv[1])
            print(f"wrote {sys.argv[1]}")
