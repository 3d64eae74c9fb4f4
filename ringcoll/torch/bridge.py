"""The bridge from torch's C++ to a group: buckets of DDP without torch's way into Python.

DDP calls a group from C++. For a group written in Python torch makes Python's tensors and options,
calls the method, and asks the Work that this returns for its future by another call. In a backward
pass all of that code has left the processor's caches: a group that did nothing cost the host 134 µs
a bucket so, and 60 by this bridge (``cpu_buckets_2.json``).

The bridge is a C++ extension of torch, ``bridge.cpp``, and no group needs it. It is compiled by
choice, for one release of torch and of Python, and from then on every group on GPUs uses it::

    python -m ringcoll.torch.bridge
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ringcoll import log
from ringcoll.errors import MachineError
from ringcoll.folders import own_folder, user_folder, write_aside

if TYPE_CHECKING:
    from ringcoll.torch.device import Device

__all__ = ["compile_bridge", "compiled", "join", "leave", "start", "take"]

_NAME = "ringcoll_bridge"
_SOURCE = Path(__file__).with_suffix(".cpp")


def _path() -> Path | None:
    """The compiled bridge for this torch and this Python; None where the user has no home."""
    folder = user_folder(os.environ.get("RINGCOLL_CACHE_DIR"), "torch")
    if folder is None:
        return None
    digest = hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:12]
    python = sys.implementation.cache_tag
    return folder / f"bridge-{torch.__version__}-{python}-{platform.machine()}-{digest}.so"


@functools.lru_cache(maxsize=1)
def compiled() -> Any:
    """The extension, or None if it was not compiled for this torch and this Python."""
    try:
        path = _path()
        if path is None or not path.is_file():
            return None
        own_folder(path.parent)
        loader = ExtensionFileLoader(_NAME, str(path))
        module = module_from_spec(spec_from_loader(_NAME, loader))  # type: ignore[arg-type]
        loader.exec_module(module)
    except (OSError, ImportError) as error:
        log.logger().warning("torch's calls go without the bridge: %s", error)
        return None
    return module


def compile_bridge() -> Path:
    """Compile the bridge, which takes half a minute; returns where it lies.

    Raises:
        MachineError: there is no folder, no compiler or no ninja, or this torch differs too much.

    """
    from torch.utils import cpp_extension

    path = _path()
    try:
        if path is None:
            raise OSError("there is no home for it; set RINGCOLL_CACHE_DIR")
        own_folder(path.parent)
        with tempfile.TemporaryDirectory() as folder:
            where: Any = {"build_directory": folder, "extra_cflags": ["-O2"]}
            cpp_extension.load(_NAME, [str(_SOURCE)], **where)
            write_aside(path, (Path(folder) / f"{_NAME}.so").read_bytes())
    except (OSError, RuntimeError) as error:
        raise MachineError(
            f"the bridge of torch {torch.__version__} cannot be compiled: {error}\nIt needs g++ "
            f"and ninja (pip install ninja), and groups work without it"
        ) from error
    compiled.cache_clear()
    return path


def start(group: Any, rank: int, size: int) -> bool:
    """Make the C++ half of a group; whether the bridge has made it."""
    extension = compiled()
    if extension is None:
        dist.ProcessGroup.__init__(group, rank, size)
        return False
    extension.init(group, rank, size)
    return True


def join(group: Any, device: Device) -> None:
    """Let C++ start the calls that a device has kept, until :func:`leave`."""
    if group.is_bridged and device.start_kept is not None:
        where = torch.device("cuda", device.ordinal)
        take(group, device.start_kept, where, device.async_stream.stream)


def take(group: Any, start: Callable[[Any], bool], device: Any, stream: Any) -> None:
    """Have C++ call ``start(tensor)`` for each all_reduce, a sum, of one tensor of a device.

    It returns True once that is enqueued on ``stream``, which waits for the caller's by then; False
    has the group's method make the call. ``start`` is referred to weakly. A ``stream`` of None is
    for CPU ranks, where the call has ended.
    """
    where = stream and (stream.stream_id, stream.device_index, stream.device_type)
    compiled().take(group, start, device, where)


def leave(group: Any) -> None:
    """Have all calls made in Python again, which says why none can be made."""
    if group.is_bridged:
        compiled().drop(group)


def main() -> int:
    """Compile the bridge from the command line."""
    # torch looks for ninja on the path; pip has put it beside this Python, which may not be there.
    os.environ["PATH"] = os.pathsep.join([os.environ["PATH"], sysconfig.get_path("scripts")])
    try:
        print(compile_bridge())
    except MachineError as error:
        print(f"ringcoll.torch.bridge: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
