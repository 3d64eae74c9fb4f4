"""Calls without end, until some ranks are lost; the others then go on without them.

``python loss.py FILE TIMEOUT KIND WORD``: touches FILE when all are calling; KIND is "calls", or
"idle" where only the control plane is used. Beside FILE each rank leaves what it has seen. WORD
only marks the process.
"""

import json
import signal
import sys
import time
from pathlib import Path

import numpy as np

import ringcoll

BEGINNING = 60.0  # seconds


def main() -> None:
    # By which MPICH's launcher tells a rank that one beside it has died.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    file, timeout, kind = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
    # The timeout is one of calls: ranks may start further apart on a loaded machine.
    whole = ringcoll.init(timeout=BEGINNING)
    comm = whole.split(0, config=ringcoll.Config(timeout=timeout))
    rank, error = comm.rank, "none"
    large, small = np.ones(300_000, "float32"), np.ones(3, "float32")
    begun = time.monotonic()
    try:
        for number in range(1_000_000):
            early = number < 4  # then nothing is lost yet: only load could make a call late
            if kind == "calls":
                limit = BEGINNING if early else None
                comm.all_reduce(large, algorithm="hierarchical", timeout=limit)
                comm.all_reduce(small, timeout=limit)
                comm.barrier(timeout=limit)
            else:
                (whole if early else comm).empty(10)
            if rank == 0 and number == 3:
                file.touch()
            begun = time.monotonic()
    except ringcoll.Error as caught:
        error = f"{type(caught).__name__}: {caught}"
    took = time.monotonic() - begun
    rest, total = 0, 0.0
    for _ in range(20):
        try:
            with comm.shrink() as left:
                own = np.full(1000, rank + 1.0)
                left.all_reduce(own)
                rest, total = left.nranks, float(own[0])
            break
        except ringcoll.Error as caught:  # one more has been lost meanwhile
            error += f" | {type(caught).__name__}: {caught}"
            time.sleep(0.2)
    comm.close()
    whole.close()
    said = {"rank": rank, "error": error, "took": took, "rest": rest, "total": total}
    # A file: what is printed goes over the network that may be cut.
    unfinished = file.with_name(f"new.{rank}")
    unfinished.write_text(json.dumps(said))
    unfinished.rename(file.with_name(f"said.{rank}"))


if __name__ == "__main__":
    main()
