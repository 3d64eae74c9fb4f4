"""``ringcoll kernels``: compile ahead, also for GPUs that this machine does not have."""

from __future__ import annotations

import argparse
import logging
import os
import time
from functools import partial
from typing import TYPE_CHECKING

from ringcoll.cli.output import bold, progress
from ringcoll.config import from_environment
from ringcoll.errors import MachineError

if TYPE_CHECKING:
    from ringcoll.executors.cuda.cache import KernelCache

EXAMPLES = """\
ringcoll kernels sm_90                            for H100 and H200
ringcoll kernels sm_80 sm_90 sm_100
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``ringcoll kernels``."""
    parser.add_argument(
        "arch",
        nargs="+",
        metavar="ARCH",
        help="architecture of a GPU, such as sm_90 for compute capability 9.0",
    )


def main(args: argparse.Namespace) -> int:
    """Run ``ringcoll kernels``: fill the cache folder, a line for each architecture."""
    from ringcoll.executors.cuda.cache import KernelCache, kernel_folder
    from ringcoll.executors.cuda_nodes.standard import standard_sources

    logging.basicConfig(format="ringcoll kernels: %(message)s")
    _, settings = from_environment(os.environ)
    folder = kernel_folder(settings.cache_dir)
    sources = standard_sources()
    print(f"{len(sources)} kernels, kept in {folder}\n")
    print(bold(_row("arch", "compiled", "found", "seconds")), flush=True)
    for arch in args.arch:
        cache = KernelCache(folder)
        if cache.folder is None:
            raise MachineError(
                f"{folder}: cannot write kernels there; set RINGCOLL_CACHE_DIR to another folder"
            )
        start = time.perf_counter()
        with progress(f"compiling for {arch}", len(sources), partial(_ready, cache)):
            cache.compile_all(sources, arch)
        seconds = f"{time.perf_counter() - start:.1f}"
        print(_row(arch, str(cache.compiled), str(cache.found), seconds), flush=True)
    return 0


def _ready(cache: KernelCache) -> int:
    return cache.compiled + cache.found


def _row(arch: str, *cells: str) -> str:
    return f"{arch:<8}" + "".join(f"{cell:>10}" for cell in cells)
