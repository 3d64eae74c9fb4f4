"""Ranks that wait to be killed: ``python wait.py FOLDER SECONDS``.

Each makes a file of its number in the folder when it is there, and adds ".done" when it has waited.
"""

import sys
import time
from pathlib import Path

from mpi4py import MPI

folder, rank = Path(sys.argv[1]), MPI.COMM_WORLD.rank
late = time.monotonic() + float(sys.argv[2])
(folder / str(rank)).touch()
while time.monotonic() < late and not (folder / "go").exists():
    time.sleep(0.01)
(folder / f"{rank}.done").touch()
