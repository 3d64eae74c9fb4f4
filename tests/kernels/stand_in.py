"""The kernels' own source on a CPU: g++ compiles it, a CUDA thread is an OS thread."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import ringcoll

KERNELS = Path(ringcoll.__file__).parent / "kernels"

RUNNER = """
#include <thread>
#include <vector>

#pragma GCC diagnostic ignored "-Wunused-function"

namespace {
struct Run {
    const rc::Args* args;
    rc::Where where;
};
void thread(Run run) {
    rc::where = run.where;
    ringcoll_kernel(*run.args);
}
}  // namespace

extern "C" unsigned args_bytes() { return sizeof(rc::Args); }

extern "C" void launch(const rc::Args* args, unsigned blocks, unsigned locals, unsigned threads) {
    std::vector<rc::Group> groups(blocks * locals);
    std::vector<std::thread> all;
    for (unsigned local = 0; local < locals; ++local)
        for (unsigned block = 0; block < blocks; ++block) {
            rc::Group* group = &groups[local * blocks + block];
            group->votes[0] = group->votes[1] = 0;
            pthread_barrier_init(&group->barrier, nullptr, threads);
            for (unsigned at = 0; at < threads; ++at)
                all.emplace_back(thread, Run{args, {at, threads, block, blocks, local, group, 0}});
        }
    for (auto& each : all) each.join();
    for (auto& group : groups) pthread_barrier_destroy(&group.barrier);
}
"""


@functools.cache
def compiler() -> tuple[str, ...] | None:
    """A C++ compiler of this machine; None if there is none."""
    for name in ("g++", "clang++"):
        if found := shutil.which(name):
            return (found,)
    if importlib.util.find_spec("ziglang") is not None:
        return (sys.executable, "-m", "ziglang", "c++")
    return None


@functools.cache
def folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="ringcoll-stand-in-"))


@functools.cache
def library(text: str, *flags: str, kernels: Path = KERNELS) -> ctypes.CDLL:
    """The generated text and the runner as a shared library."""
    name = hashlib.blake2b(repr((text, flags, str(kernels))).encode(), digest_size=8).hexdigest()
    built, written = folder() / f"{name}.so", folder() / f"{name}.cpp"
    written.write_text(text + RUNNER)
    command = [*(compiler() or ()), "-std=c++17", "-O1", "-fPIC", "-shared", "-pthread"]
    command += ["-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", *flags]
    command += [f"-I{kernels / 'cpu'}", f"-I{kernels}", "-o", str(built), str(written)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
    return ctypes.CDLL(str(built))
