"""Whether the ranks can share memory at all: one host, one user, one version."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from ringcoll import version
from ringcoll.errors import MachineError, MismatchError

_MUST_MATCH = {
    "boot": ("the boot id", "ranks with one name for their node must be processes of one host"),
    "pidns": ("the PID namespace", "CPU ranks of a host must run in one container"),
    "uid": ("the user id", "CPU ranks of a host must run as one user"),
}


@cache
def boot_id() -> str:
    """The host's, which is the same in a forked child: it is read once, by a descriptor."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def identity() -> dict[str, str]:
    """What the ranks compare when they begin."""
    return {
        "version": version.__version__,
        "host": platform.node(),
        "boot": boot_id(),
        "pidns": str(Path("/proc/self/ns/pid").stat().st_ino),
        "uid": str(os.geteuid()),
    }


def nodes_of(found: Sequence[Mapping[str, str]]) -> list[int]:
    """The node of each rank, from 0 in the order of their first ranks.

    Ranks share a node if they were given the same name for it; without a name, if they run on one
    host, of one name, with one PID namespace.
    """
    numbers: dict[tuple[str | None, ...], int] = {}
    nodes = []
    for other in found:
        given = other.get("node")
        keys = ("host", "boot", "pidns")
        place = (given,) if given else (None, *(other.get(key) for key in keys))
        nodes.append(numbers.setdefault(place, len(numbers)))
    return nodes


def compare_versions(found: Sequence[Mapping[str, str]], what: str) -> None:
    """Refuse ranks of different versions of ringcoll, on every rank alike."""
    first = found[0]
    for rank, other in enumerate(found):
        if other.get("version") != first.get("version"):
            raise MismatchError(
                f"{what}: rank 0 runs ringcoll {first.get('version')} and rank {rank} runs "
                f"ringcoll {other.get('version')}; install one version for all ranks"
            )


def compare(
    found: Sequence[Mapping[str, str]], what: str, ranks: Sequence[int] | None = None
) -> None:
    """Refuse ranks of one node (None: all) that cannot share memory, on every rank alike."""
    compare_versions(found, what)
    members = range(len(found)) if ranks is None else ranks
    first = found[members[0]]
    for key, (name, advice) in _MUST_MATCH.items():
        for rank in members:
            other = found[rank]
            if other.get(key) != first.get(key):
                raise MachineError(
                    f"{what}: rank {members[0]} (host {first.get('host')}) and rank {rank} (host "
                    f"{other.get('host')}) differ in {name}: {first.get(key)} and "
                    f"{other.get(key)}; {advice}"
                )
