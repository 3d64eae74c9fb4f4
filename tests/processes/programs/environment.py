"""Options come from the environment where nobody names them; a call's own win."""

import time

import numpy as np

import ringcoll
from tests.processes.programs.collectives import folds_in_rank_order
from tests.processes.programs.verdict import Checks, error_of, say


def main() -> None:
    checks = Checks()
    comm = ringcoll.init()
    folds_in_rank_order(comm, checks)
    refused = error_of(comm.all_reduce, np.zeros(9, "float32"), algorithm="tree")
    checks.true(f"a tree has another order: {refused}", "deterministic" in refused)
    comm.barrier()
    if comm.rank == 0:
        time.sleep(3)
    late = error_of(comm.barrier)
    said = "waited 2 s" if comm.rank else "reported by"
    checks.true(f"the deadline is the environment's: {late}", said in late)
    comm.close()
    say(comm.rank, count=checks.count, failures=checks.failures)


if __name__ == "__main__":
    main()
