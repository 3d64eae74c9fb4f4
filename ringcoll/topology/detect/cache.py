"""The detected document of this boot of this machine, in the user's cache folder.

One JSON file a host: a key of what the document depends on, and the document as XML, which is read
with the limits of any topology file. A file that cannot be read or trusted is a warning, and the
machine is detected again.
"""

from __future__ import annotations

import contextlib
import json
import platform
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from ringcoll import log, version
from ringcoll.errors import ArgumentError
from ringcoll.folders import contents, own_folder, user_folder, write_aside
from ringcoll.topology.detect.sysfs import driver_version, nvidia_gpus, text
from ringcoll.topology.document import Element, parse, write

_log = log.logger()

_MOST_BYTES = 1 << 22
_FORMAT = 1


def cache_key(root: Path, template: Path | None) -> Mapping[str, object]:
    """What a detected document depends on: cheap to read, and equal as long as it is valid.

    That is the boot, the driver, the GPUs and their MIG instances, the packages that read them, and
    the topology file that is completed (``template``).
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


def read_cached(key: Mapping[str, object], cache_dir: str | None) -> Element | None:
    """The cached document of that key; None if there is none."""
    path = _path(cache_dir)
    if path is None:
        return None
    try:
        content = json.loads(contents(path, _MOST_BYTES))
        if not isinstance(content, dict) or content.get("key") != key:
            return None
        document = content.get("document")
        if not isinstance(document, str):
            raise ArgumentError("it holds no document")
        found = parse(document.encode(), str(path))
        if found.tag != "system":
            found.refuse("the root of a topology file is <system>")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:  # ArgumentError is a ValueError
        _log.warning("cannot use %s, so the machine is detected again: %s", path, error)
        return None
    return found


def write_cached(key: Mapping[str, object], document: Element, cache_dir: str | None) -> None:
    """Write a document to the cache, in place of the host's older one."""
    path = _path(cache_dir)
    if path is None:
        return
    content = {"key": dict(key), "document": write(document)}
    try:
        own_folder(path.parent)
        write_aside(path, json.dumps(content, indent=1).encode() + b"\n")
    except OSError as error:
        _log.warning("cannot keep the detected topology in %s: %s", path.parent, error)


def _path(cache_dir: str | None) -> Path | None:
    folder = user_folder(cache_dir, "topology")
    host = re.sub(r"[^A-Za-z0-9.-]", "_", platform.node()) or "host"
    return None if folder is None else folder / f"{host}.json"


def _installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):  # put into sys.modules by hand
        return False
