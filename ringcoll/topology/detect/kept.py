"""The detected document of this boot of this machine, kept in the user's cache folder.

One JSON file a host: what it was detected under, and the document as XML, which is read with the
limits of any topology file. Nothing about the folder is ever an error: what cannot be read or
trusted is detected again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import platform
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from ringcoll import version
from ringcoll.errors import ArgumentError
from ringcoll.folders import contents, own_folder, user_folder, write_aside
from ringcoll.topology.detect.sysfs import driver_version, nvidia_gpus, text
from ringcoll.topology.document import Element, parse, write

__all__ = ["keep", "kept", "under"]

_log = logging.getLogger("ringcoll")

_MOST_BYTES = 1 << 22
_FORMAT = 1


def under(root: Path, template: Path | None) -> Mapping[str, object]:
    """What a detected document depends on; cheap to read, and equal as long as it holds.

    That is the boot, the driver, the GPUs and their MIG instances, the packages that read them, and
    the file that completes them.

    Args:
        root: of the tree of /sys and /proc.
        template: the file that is completed, None if there is none.

    """
    instances = (root / "proc/driver/nvidia/capabilities").glob("gpu*/mig/gi*")
    stamp: list[object] = []
    if template is not None:
        with contextlib.suppress(OSError):
            status = template.stat()
            stamp = [str(template.absolute()), status.st_mtime_ns, status.st_size]
    return {
        "format": _FORMAT,
        "version": version.__version__,
        "root": str(root),
        "boot": text(root / "proc/sys/kernel/random/boot_id"),
        "driver": driver_version(root),
        "gpus": list(nvidia_gpus(root)),
        "mig": sorted("/".join(path.parts[-3:]) for path in instances),
        "packages": [name for name in ("cupy", "pynvml") if _installed(name)],
        "template": stamp,
    }


def kept(key: Mapping[str, object], cache_dir: str | None) -> Element | None:
    """The document that was kept under the same circumstances; None if there is none.

    Args:
        key: of :func:`under`.
        cache_dir: the setting.

    """
    path = _path(cache_dir)
    if path is None:
        return None
    try:
        said = json.loads(contents(path, _MOST_BYTES))
        if not isinstance(said, dict) or said.get("key") != key:
            return None
        document = said.get("document")
        if not isinstance(document, str):
            raise ArgumentError("it holds no document")
        found = parse(document.encode(), str(path))
        if found.tag != "system":
            found.refuse("a topology begins with <system>")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:  # ArgumentError is a ValueError
        _log.warning("%s is left out, the machine is detected again: %s", path, error)
        return None
    return found


def keep(key: Mapping[str, object], document: Element, cache_dir: str | None) -> None:
    """Keep a document; it replaces the host's older one.

    Args:
        key: of :func:`under`.
        document: what was detected.
        cache_dir: the setting.

    """
    path = _path(cache_dir)
    if path is None:
        return
    said = {"key": dict(key), "document": write(document)}
    try:
        own_folder(path.parent)
        write_aside(path, json.dumps(said, indent=1).encode() + b"\n")
    except OSError as error:
        _log.warning("the detected topology is not kept in %s: %s", path.parent, error)


def _path(cache_dir: str | None) -> Path | None:
    folder = user_folder(cache_dir, "topology")
    host = re.sub(r"[^A-Za-z0-9.-]", "_", platform.node()) or "host"
    return None if folder is None else folder / f"{host}.json"


def _installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):  # put into sys.modules by hand
        return False
