"""An all_reduce among the ranks that the launcher has started: mpiexec -n 4 python ten_lines.py."""

import ringcoll

with ringcoll.init() as comm:  # under mpiexec or torchrun one rank a process, alone a world of one
    x = comm.empty(1 << 20, "float32")  # symmetric memory: all ranks reach it without a copy
    x[:] = comm.rank
    comm.all_reduce(x)  # in place, sum
    comm.synchronize()  # on GPUs the call above has only been enqueued
    print(f"rank {comm.rank} of {comm.nranks}: {x[0]}")
