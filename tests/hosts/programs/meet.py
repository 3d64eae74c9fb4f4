"""Ranks of several hosts meet by an id, are connected, and send each other their numbers.

``python meet.py FILE RANK NRANKS``: rank 0 writes the id to the file; each prints what it has got.
"""

import json
import sys
import time
from pathlib import Path

import ringcoll
from ringcoll.bootstrap.tcp import id_bootstrap
from ringcoll.fabric.connect import connect
from ringcoll.fabric.links import Frame

SECONDS = 30.0


def main() -> None:
    """Meet."""
    file, rank, nranks = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    if rank == 0:
        part = file.with_suffix(".part")
        part.write_text(ringcoll.unique_id())
        part.rename(file)
    late = time.monotonic() + SECONDS
    while not file.exists() and time.monotonic() < late:
        time.sleep(0.01)
    bootstrap = id_bootstrap(file.read_text(), rank, nranks, SECONDS)
    links = connect(bootstrap, list(range(nranks)), SECONDS)
    for peer, link in links.items():
        link.send(Frame.GATHER, 1, f"{rank} to {peer}".encode())
    got: dict[int, str] = {}
    while len(got) < len(links) and time.monotonic() < late:
        for peer, link in links.items():
            link.pump()
            if link.inbox(1).gathers:
                got[peer] = bytes(link.inbox(1).gathers[0]).decode()
    parts = [part.decode() for part in bootstrap.allgather(b"%d" % rank)]
    bootstrap.close()
    print(json.dumps({"parts": parts, "got": got}))


main()
