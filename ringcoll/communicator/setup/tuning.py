"""The table of ``ringcoll tune`` that the ranks of a communicator take alike: rank 0's.

Rank 0 reads the file that the setting ``tuning`` names, else the one in the user's cache folder for
this device and number of ranks, else one of the package. It sends the text, so that all ranks have
the same; a rank whose own file of that name differs raises. A file that others may write to is not
read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from ringcoll import log
from ringcoll.communicator.setup import tables
from ringcoll.config import Settings
from ringcoll.cuda.device import Device
from ringcoll.errors import ArgumentError, MachineError, MismatchError
from ringcoll.fabric import Fabric
from ringcoll.folders import contents, own_folder, user_folder, write_aside
from ringcoll.host.processes import cpu_name
from ringcoll.tuner import table
from ringcoll.tuner.table import Machine, Table

_WHAT = "init: the tuning table"


def machine_of(fabric: Fabric, device: Device | None) -> Machine:
    """What a table of these ranks is of."""
    ranks_are = "threads" if fabric.threads else "processes"
    if device is None:
        return Machine("cpu", cpu_name(), None, fabric.nranks, ranks_are)
    from ringcoll.topology.detect.sysfs import driver_version  # detection is slow to import

    return Machine("cuda", device.name, driver_version(Path("/")), fabric.nranks, ranks_are)


def file_name(machine: Machine) -> str:
    """The name of a machine's table in a folder."""
    words = machine.kind, machine.device, str(machine.ranks), machine.ranks_are
    return re.sub(r"[^a-z0-9]+", "-", " ".join(words).lower()).strip("-") + ".json"


def own_path(machine: Machine, cache_dir: str | None) -> Path | None:
    """Where the user's table of a machine is kept; None where the user has no home."""
    folder = user_folder(cache_dir, "tuning")
    return None if folder is None else folder / file_name(machine)


def write_table(path: Path, text: str, *, private: bool) -> None:
    """Write a table; a ``private`` folder is made if need be.

    Raises:
        ArgumentError: it cannot be written.

    """
    try:
        if private:
            own_folder(path.parent)
        write_aside(path, text.encode())
    except OSError as error:
        raise ArgumentError(f"the tuning table {path}: {error}") from None


def read_table(path: Path) -> Table | None:
    """A table that was written before; None where there is none that this version can use."""
    try:
        return table.parse(_read(path))
    except (OSError, ValueError):
        return None


def agree_on_table(fabric: Fabric, device: Device | None, settings: Settings) -> Table | None:
    """Rank 0's table, on all ranks; collective."""
    here, path = machine_of(fabric, device), settings.tuning
    if fabric.nodes:
        raise ArgumentError(
            f"init: tuning={path!r} is of ranks of one host, but these are on several; leave it out"
        )
    sent: dict[str, str] = {}
    if fabric.rank == 0:
        sent = _found(here, path, settings.cache_dir)
    elif path is not None:
        with contextlib.suppress(OSError, ValueError):  # without it rank 0's is taken
            sent = {"digest": _digest(_read(Path(path)))}
    gathered = fabric.allgather(json.dumps(sent).encode(), what=_WHAT)
    received = [_object(part, rank) for rank, part in enumerate(gathered)]
    if "refused" in received[0]:
        raise ArgumentError(received[0]["refused"])
    text = received[0].get("text", "")
    _compare(text, received, path)
    return _parsed(text, received[0].get("source", "")) if text else None


def _found(here: Machine, path: str | None, cache_dir: str | None) -> dict[str, str]:
    """What rank 0 sends: a table that has been parsed, or why init must fail."""
    if path is not None:
        try:
            return _checked(_read(Path(path)), here, f"measured, {Path(path).name},")
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            if isinstance(error, FileNotFoundError):
                why = f"{why}; make it by `ringcoll tune --ranks {here.ranks} --out {path}`"
            return {"refused": f"init: tuning={path!r}, read by rank 0: {why}"}
    own = own_path(here, cache_dir)
    shipped = tables.SHIPPED / file_name(here)
    read = own
    try:
        if own is not None and own.exists():
            return _checked(_read(own), here, "measured here")
        read = shipped
        if shipped.exists():  # as trustworthy as the package's code, whoever has installed it
            return _checked(shipped.read_text(encoding="utf-8"), here, "shipped table, measured")
    except (OSError, ValueError) as error:
        log.write(log.WARNING, "cannot use the tuning table %s: %s", read, error)
    return {}


def _checked(text: str, here: Machine, source: str) -> dict[str, str]:
    of = table.parse(text).machine
    if (of.kind, of.ranks) != (here.kind, here.ranks):
        raise ArgumentError(
            f"it is of {of.ranks} ranks on {of.kind}, these are {here.ranks} on {here.kind}; run "
            f"`ringcoll tune --ranks {here.ranks}`"
        )
    if of.device != here.device:
        log.write(
            log.WARNING,
            "init: the tuning table (%s) is of %s, these ranks are on %s; run `ringcoll tune "
            "--ranks %d`",
            *(source.strip(","), of.device, here.device, here.ranks),
        )
    return {"text": text, "source": source}


def _read(path: Path) -> str:
    return contents(path, table.MOST_BYTES).decode()


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _compare(text: str, received: Sequence[dict[str, str]], path: str | None) -> None:
    """Refuse a rank's table of the same name that is not rank 0's."""
    for rank, other in enumerate(received):
        if other.get("digest", _digest(text)) != _digest(text):
            raise MismatchError(
                f"init: tuning={path!r} of rank {rank} is another table than that of rank 0; copy "
                f"one of them to all hosts"
            )


@lru_cache(maxsize=16)
def _parsed(text: str, source: str) -> Table:
    """The table, parsed once for all ranks that are threads."""
    return table.parse(text, source)


def _object(part: bytes, rank: int) -> dict[str, Any]:
    try:
        found = json.loads(part)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not all(isinstance(each, str) for each in found.values()):
        raise MachineError(f"{_WHAT}: rank {rank} sent a malformed answer: {part[:80]!r}")
    return found
