"""The bridge from torch to a group: all_reduces on GPUs by C++, buckets of DDP above all.

DDP calls a group from C++. For a group written in Python torch converts the arguments, calls the
method, and asks the Work that this returns for its future by another call. In a backward pass all
of that code has left the processor's caches: a group of CPU ranks that did nothing cost the host
145 µs a bucket so, and 61 by a bridge that calls one method, where torch's own group in C++ that
does nothing cost 82 (``cpu_buckets_2.json``). An all_reduce by LL or LL128 that is like an earlier
one is found in C++ and launched as the communicator's own, in C where that has been built.

The bridge is a C++ extension of torch, ``bridge.cpp`` with its headers, and no group needs it. It
is compiled by choice, for one release of torch and of Python; processes that begin after that use
it::

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
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ringcoll import log
from ringcoll.errors import MachineError
from ringcoll.folders import contents, own_folder, user_folder, write_aside

__all__ = ["compiled", "start"]

_NAME = "ringcoll_bridge"
_SOURCE = Path(__file__).with_suffix(".cpp")
_PARTS = "bridge*.[ch]pp"  # of the source, which is one file with its headers
_FLAGS = ("-O2", "-DNDEBUG", "-fvisibility=hidden")


class Bridged(NamedTuple):
    """What the bridge needs of a group's GPU to launch a call, and of its :class:`.FastPath`.

    ``bridge_calls.hpp`` names the parts in the same order.
    """

    report: object
    records: object
    errors: object
    ordinal: int
    batch: object
    current: object  # tells the caller's stream
    own_streams: set[int]  # torch's, which live until the process ends
    record: object  # an event on a stream
    wait: object  # of a stream for an event
    event: int
    stream: int  # of asynchronous calls
    stream_id: tuple[int, int, int]
    launch: object  # as FastPath.launch
    kept: dict[int, Any]  # calls by a number that says what they depend on; None: Python makes it


AllReduce = Callable[[Any, Any, Any], Any]
"""An all_reduce of a group, its tensors and options: the Work, or None if nothing was done."""


def start(group: Any, rank: int, size: int) -> AllReduce | None:
    """Make torch's C++ half of a group: of the bridge's class if that is compiled.

    Returns what the group's all_reduce tries first; None without the bridge.
    """
    extension = compiled()
    if extension is None:
        dist.ProcessGroup.__init__(group, rank, size)
        return None
    extension.init(group, rank, size)
    found: AllReduce = extension.all_reduce
    return found


@functools.lru_cache(maxsize=1)
def compiled() -> Any:
    """The extension, or None if it was not compiled for this torch and this Python."""
    path = _path()
    if path is None or not path.exists():
        return None
    try:
        own_folder(path.parent)
        contents(path)  # which only this user can have written
        loader = ExtensionFileLoader(_NAME, str(path))
        module = module_from_spec(spec_from_loader(_NAME, loader))  # type: ignore[arg-type]
        loader.exec_module(module)
    except (OSError, ImportError) as error:
        log.logger().warning("torch's calls go without the bridge %s: %s", path, error)
        return None
    return module


def _path() -> Path | None:
    """Where the bridge for this torch and this Python lies; None: this user has no place for it.

    A folder relative to the working directory is none: it may hold what others have brought there.
    """
    given = os.environ.get("RINGCOLL_CACHE_DIR") or None
    folder = user_folder(given, "torch")
    if folder is None or (given is not None and not Path(given).is_absolute()):
        return None
    python = sysconfig.get_config_var("SOABI") or sys.implementation.cache_tag
    parts = sorted(_SOURCE.parent.glob(_PARTS))
    source = b"".join(part.read_bytes() for part in parts) + " ".join(_FLAGS).encode()
    digest = hashlib.sha256(source).hexdigest()[:12]
    return folder / f"bridge-{torch.__version__}-{python}-{platform.machine()}-{digest}.so"


def _compile() -> Path:
    """Compile the bridge, once in a process; returns where it lies.

    Raises:
        MachineError: there is no folder, no compiler or no ninja, or this torch differs too much.

    """
    path = _path()
    if path is None:
        raise MachineError(
            "there is no folder for the bridge: set RINGCOLL_CACHE_DIR to an absolute path"
        )
    try:
        own_folder(path.parent)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            from torch.utils import cpp_extension

            where: Any = {"build_directory": folder, "extra_cflags": [*_FLAGS]}
            cpp_extension.load(_NAME, [str(_SOURCE)], **where)
            write_aside(path, (Path(folder) / f"{_NAME}.so").read_bytes())
    except (ImportError, RuntimeError) as error:
        raise MachineError(
            f"the bridge of torch {torch.__version__} cannot be compiled: {error}\nIt needs a C++ "
            f"compiler, Python's headers, setuptools and ninja; groups work without it"
        ) from error
    except OSError as error:
        raise MachineError(f"the bridge cannot be written to {path}: {error}") from error
    return path


def main() -> int:
    """Compile the bridge from the command line."""
    # torch looks for ninja on the path; pip has put it beside this Python, which may not be there.
    os.environ["PATH"] = os.pathsep.join(
        [os.environ.get("PATH", os.defpath), sysconfig.get_path("scripts")]
    )
    try:
        print(_compile())
    except MachineError as error:
        print(f"ringcoll.torch.bridge: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
