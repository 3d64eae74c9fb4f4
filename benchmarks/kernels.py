"""How many kernels first calls need, and what compiling the common ones takes; needs no GPU.

::

    python -m benchmarks.kernels [ARCH ...] [--ranks 2,4,8] [--out FOLDER]

First calls are of ten collectives, of four sizes each, and a send with its recv, on plain arrays of
float32; their kernels differ by rank. Kernels are compiled for each ARCH into an empty folder, by a
thread for each core, and packed as a wheel has them. CPU seconds are of all threads.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.record import add_out, save
from ringcoll.collectives import COLLECTIVES
from ringcoll.executors.cuda.cache import KernelCache
from ringcoll.executors.cuda.compile import nvrtc_version
from ringcoll.executors.cuda.point_to_point import standard_pairs_text
from ringcoll.executors.cuda.shipped import write_archive
from ringcoll.executors.cuda_nodes.standard import RANKS, call_of, standard_sources, texts_of
from ringcoll.version import __version__

__all__ = ["main"]

BYTES = (256, 16 << 10, 1 << 20, 64 << 20)
NAMES = tuple(name for name in COLLECTIVES if name not in ("send", "barrier"))


def first_calls(nranks: int) -> dict[str, Any]:
    """The kernels of first calls: of the rank that needs the most, of all ranks, and shipped."""
    of_rank: list[set[str]] = [{standard_pairs_text(nranks)} for _ in range(nranks)]
    for name in NAMES:
        for nbytes in BYTES:
            texts = texts_of(call_of(nranks, name, "float32", nbytes), nranks)
            for own, text in zip(of_rank, texts, strict=True):
                own.add(text)
    every, there = set().union(*of_rank), set(standard_sources((nranks,)))
    return {
        "ranks": nranks,
        "calls": len(NAMES) * len(BYTES) + 1,
        "kernels_of_a_rank": max(map(len, of_rank)),
        "kernels_of_all_ranks": len(every),
        "of_these_shipped": len(every & there),
        "shipped": len(there),
    }


def compiled(arch: str, sources: list[str], folder: Path) -> dict[str, Any]:
    """Seconds and bytes of one architecture."""
    cache = KernelCache(folder / "cache")
    start, cpu = time.perf_counter(), time.process_time()
    cubins = cache.compile_all(sources, arch, "benchmarks.kernels")
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    kernels = [(cache.key(text, arch), cubin) for text, cubin in zip(sources, cubins, strict=True)]
    start = time.perf_counter()
    archive = write_archive(
        folder / "package", arch, kernels, version=__version__, nvrtc=nvrtc_version()
    )
    return {
        "arch": arch,
        "kernels": len(sources),
        "compiled": cache.compiled,
        "seconds": round(seconds, 1),
        "cpu_seconds": round(cpu, 1),
        "bytes": archive.nbytes,
        "largest_bytes": max(map(len, cubins)),
        "archive_bytes": archive.packed,
        "manifest_bytes": (folder / "package" / f"{arch}.json").stat().st_size,
        "packing_seconds": round(time.perf_counter() - start, 1),
    }


def main() -> None:
    """Count, compile, and write the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("arch", nargs="*", metavar="ARCH", help="such as sm_90")
    parser.add_argument("--ranks", default=",".join(map(str, RANKS)), help="of the compiled ones")
    add_out(parser)
    args = parser.parse_args()
    ranks = [int(word) for word in args.ranks.split(",")]
    counted = [first_calls(nranks) for nranks in RANKS]
    for row in counted:
        print(row, flush=True)
    rows = []
    sources = standard_sources(ranks) if args.arch else []
    for arch in args.arch:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(compiled(arch, sources, Path(folder)))
        print(rows[-1], flush=True)
    content = {
        "nvrtc": "{}.{}".format(*nvrtc_version()),
        "first_calls": counted,
        "compiled_for_ranks": ranks,
        "compiled": rows,
    }
    save(args.out, "kernels", content, ranks=max(ranks))


if __name__ == "__main__":
    main()
