"""``ringcoll kernels``: which compiled kernels there are, and compiling them ahead.

The machine need not have the GPU that they are compiled for.
"""

from __future__ import annotations

import argparse
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringcoll.cli.output import bold, check_target, progress, say_written, write_json
from ringcoll.config import from_environment
from ringcoll.errors import ArgumentError, MachineError
from ringcoll.version import __version__

if TYPE_CHECKING:
    from ringcoll.executors.cuda.cache import Compilation, KernelCache
    from ringcoll.executors.cuda.shipped import Manifest

EXAMPLES = """\
ringcoll kernels                                  what is there, and for which calls it was compiled
ringcoll kernels --json -                         the same, for programs
ringcoll kernels sm_90                            compile for H100 and H200
ringcoll kernels sm_80 sm_90 --out compiled       archives, as a wheel has them
"""

_RECENT = 20
_MOST = 64  # ranks


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``ringcoll kernels``."""
    parser.add_argument(
        "arch",
        nargs="*",
        metavar="ARCH",
        help="compile the common kernels for this architecture of a GPU, such as sm_90 for "
        "compute capability 9.0; without one, list what is there",
    )
    parser.add_argument(
        "--ranks",
        metavar="LIST",
        type=_ranks,
        default=None,
        help="compile for communicators of these numbers of ranks (default: 2,4,8)",
    )
    parser.add_argument(
        "--out", metavar="FOLDER", help="write what is compiled as archives of a wheel there, too"
    )
    parser.add_argument("--json", metavar="FILE", help="write the result as JSON; - is stdout")


def main(args: argparse.Namespace) -> int:
    """Run ``ringcoll kernels``."""
    from ringcoll.executors.cuda.cache import kernel_folder

    logging.basicConfig(format="ringcoll kernels: %(message)s")
    check_target("--json", args.json)
    _, settings = from_environment(os.environ)
    folder = kernel_folder(settings.cache_dir)
    if args.arch:
        found = _compile(args, folder)
    elif args.out is not None or args.ranks is not None:
        raise ArgumentError("--out and --ranks need an architecture; add one, such as sm_90")
    else:
        found = _list(folder, quiet=args.json == "-")
    write_json(args.json, found)
    say_written(args.json)
    return 0


def _ranks(text: str) -> list[int]:
    found = [int(word) if word.isdecimal() else 0 for word in text.split(",")]
    if not all(2 <= number <= _MOST for number in found):
        raise argparse.ArgumentTypeError(
            f"{text!r}: wanted numbers from 2 to {_MOST}, such as 2,4,8"
        )
    return found


def _list(folder: Path | None, *, quiet: bool) -> dict[str, Any]:
    """What the package and the cache folder have, and the last compilations."""
    from ringcoll.executors.cuda.cache import KernelCache, compilations
    from ringcoll.executors.cuda.shipped import ShippedKernels

    cache = KernelCache(None)
    shipped = list(ShippedKernels().manifests())
    kept = [] if folder is None else sorted(compilations(folder), key=lambda each: each.time)
    recent = kept[: -_RECENT - 1 : -1]
    if not quiet:
        _print_shipped(shipped, cache)
        _print_kept(folder, kept)
        _print_recent(recent)
    return {
        "version": __version__,
        "shipped": [
            {
                "arch": each.arch,
                "kernels": len(each.kernels),
                "bytes": each.nbytes,
                "archive_bytes": each.packed,
                "version": each.version,
                "nvrtc": "{}.{}".format(*each.nvrtc),
                "outdated": _outdated(each, cache),
            }
            for each in shipped
        ],
        "cache": None if folder is None else str(folder),
        "cached": [asdict(each) for each in reversed(kept)],
    }


def _outdated(manifest: Manifest, cache: KernelCache) -> bool:
    """Whether an archive was compiled from other sources, and serves nobody."""
    from ringcoll.executors.cuda.copy_gates import gate_text

    keys = (cache.key(gate_text(nranks), manifest.arch).hex() for nranks in range(2, _MOST + 1))
    return not any(key in manifest.kernels for key in keys)


def _print_shipped(shipped: Sequence[Manifest], cache: KernelCache) -> None:
    if not shipped:
        print("the package carries no compiled kernels\n")
        return
    print("in the package\n")
    print(bold(_row("arch", "kernels", "MiB", "archive MiB", "NVRTC")))
    for each in shipped:
        nvrtc = "{}.{}".format(*each.nvrtc)
        sizes = _mib(each.nbytes), _mib(each.packed)
        note = "  outdated: of other sources" if _outdated(each, cache) else ""
        print(_row(each.arch, str(len(each.kernels)), *sizes, nvrtc) + note)
    print()


def _print_kept(folder: Path | None, kept: Sequence[Compilation]) -> None:
    if not kept:
        print(f"in {folder}: none" if folder else "no cache folder: the user has no home")
        return
    print(f"in {folder}\n")
    print(bold(_row("arch", "kernels", "MiB", "seconds", "ringcoll")))
    groups = dict.fromkeys((each.arch, each.version) for each in kept)
    for arch, version in sorted(groups):
        own = [each for each in kept if (each.arch, each.version) == (arch, version)]
        seconds = f"{sum(each.seconds for each in own):.1f}"
        nbytes = sum(each.nbytes for each in own)
        print(_row(arch, str(len(own)), _mib(nbytes), seconds, version))
    print()


def _print_recent(recent: Sequence[Compilation]) -> None:
    if not recent:
        return
    print("compiled last, because neither the package nor the folder had them\n")
    print(bold(f"{'when':<18}{'arch':<8}{'seconds':>8}{'KiB':>7}  for"))
    for each in recent:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(each.time))
        print(
            f"{when:<18}{each.arch:<8}{each.seconds:>8.2f}{each.nbytes / 1024:>7.0f}  {each.call}"
        )


def _compile(args: argparse.Namespace, folder: Path | None) -> dict[str, Any]:
    """Fill the cache folder, a line for each architecture; archives of a wheel on request."""
    from ringcoll.executors.cuda.cache import KernelCache
    from ringcoll.executors.cuda.compile import check_archs, nvrtc_version
    from ringcoll.executors.cuda.shipped import ShippedKernels, write_archive
    from ringcoll.executors.cuda_nodes.standard import RANKS, standard_sources

    # A table that ends in an error would look like a beginning.
    check_archs(*args.arch)
    if KernelCache(folder).folder is None:
        raise MachineError(
            f"{folder}: cannot write kernels there; set RINGCOLL_CACHE_DIR to another folder"
        )
    show = partial(print, flush=True) if args.json != "-" else _silent
    sources = standard_sources(args.ranks or RANKS)
    show(f"{len(sources)} kernels, kept in {folder}\n")
    show(bold(_row("arch", "compiled", "found", "in package", "seconds", "MiB", "archive MiB")))
    rows = []
    for arch in args.arch:
        shipped = None if args.out is not None else ShippedKernels()
        cache = KernelCache(folder, shipped)
        start, cpu = time.perf_counter(), time.process_time()
        with progress(f"compiling for {arch}", len(sources), partial(_ready, cache)):
            cubins = cache.compile_all(sources, arch, f"ringcoll kernels {arch}")
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
        nbytes, packed = sum(map(len, cubins)), None
        if args.out is not None:
            keys = (cache.key(source, arch) for source in sources)
            kernels = list(zip(keys, cubins, strict=True))
            packed = write_archive(
                Path(args.out), arch, kernels, version=__version__, nvrtc=nvrtc_version()
            ).packed
        counts = cache.compiled, cache.found, cache.taken
        sizes = _mib(nbytes), "" if packed is None else _mib(packed)
        show(_row(arch, *map(str, counts), f"{seconds:.1f}", *sizes))
        rows.append(
            {
                "arch": arch,
                "kernels": len(sources),
                **dict(zip(("compiled", "found", "shipped"), counts, strict=True)),
                "seconds": round(seconds, 1),
                "cpu_seconds": round(cpu, 1),
                "bytes": nbytes,
                "largest_bytes": max(map(len, cubins), default=0),
                "archive_bytes": packed,
            }
        )
    return {"version": __version__, "nvrtc": "{}.{}".format(*nvrtc_version()), "archs": rows}


def _silent(*_: object) -> None:
    """Print nothing: the JSON alone goes to standard output."""


def _ready(cache: KernelCache) -> int:
    return cache.compiled + cache.found + cache.taken


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):.1f}"


def _row(arch: str, *cells: str) -> str:
    return f"{arch:<8}" + "".join(f"{cell:>13}" for cell in cells)
