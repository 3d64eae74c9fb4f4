"""Whether the ranks can share memory at all: one host, one user, one version."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path

import ringcoll
from ringcoll.errors import MachineError, MismatchError

__all__ = ["compare", "identity"]

_ADVICE = {
    "boot": "CPU ranks must be processes of one host: start them with one host's mpiexec",
    "pidns": "CPU ranks must share a PID namespace: run all of them in one container",
    "uid": "CPU ranks must run as one user",
}
_NAMES = {"boot": "the boot id", "pidns": "the PID namespace", "uid": "the user id"}


def identity() -> dict[str, str]:
    """What the ranks compare when they meet."""
    return {
        "version": ringcoll.__version__,
        "host": platform.node(),
        "boot": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "pidns": str(Path("/proc/self/ns/pid").stat().st_ino),
        "uid": str(os.geteuid()),
    }


def compare(found: Sequence[Mapping[str, str]], what: str) -> None:
    """Refuse ranks that do not fit together; every rank reaches the same verdict.

    Raises:
        MismatchError: different versions of ringcoll.
        MachineError: different hosts, PID namespaces or users.

    """
    first = found[0]
    for rank, other in enumerate(found):
        if other.get("version") != first.get("version"):
            raise MismatchError(
                f"{what}: rank 0 runs ringcoll {first.get('version')} and rank {rank} runs "
                f"ringcoll {other.get('version')}; install one version for all ranks"
            )
    for key, name in _NAMES.items():
        for rank, other in enumerate(found):
            if other.get(key) != first.get(key):
                raise MachineError(
                    f"{what}: rank 0 (host {first.get('host')}) and rank {rank} (host "
                    f"{other.get('host')}) differ in {name}: {first.get(key)} and "
                    f"{other.get(key)}; {_ADVICE[key]}"
                )
