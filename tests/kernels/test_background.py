"""The end of a program waits for no compilation, and does not crash one."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ringcoll.executors.cuda.background import Compilers

ROOT = Path(__file__).parents[2]

STAND_IN = """
import os, sys, threading, time
from ringcoll.executors.cuda import background, cache, compile
from ringcoll.executors.cuda.cache import KernelCache
from ringcoll.executors.cuda.loader import Loader
running = threading.Event()

def compile_kernel(source, arch, **_):
    running.set()
    while not compile._stop.value:  # what NVRTC looks at
        time.sleep(0.001)
    os.write(1, b"stopped\\n")
    raise ValueError("stopped")

def stop():
    compile.stop_compiling()
    time.sleep(0.05)  # for a thread to begin another text, were one left
    if "late" in sys.argv:  # a daemon thread's
        loader.compile_ahead("late", (9, 0))

background.stop_compiling = stop
background.cores = lambda: 4  # a thread each
cache.compile_kernel, cache.nvrtc_version = compile_kernel, lambda: (13, 0)
loader = Loader(KernelCache(None))
texts = [loader.compile_ahead(str(number), (9, 0)) for number in range(50)]
running.wait()
"""

ENDS = {
    "return": "",
    "exit": "sys.exit(0)",
    "another thread": "threading.Thread(target=running.wait).start()",
    "after rest": "loader.rest()",
    "in a fork": "child = os.fork()\nif child: os.waitpid(child, 0)\nelse: os.write(1, b'fork\\n')",
}


def run(program: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-c", program, *words]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=200
    )


@pytest.mark.parametrize("end", ENDS)
def test_a_program_ends_while_kernels_are_compiled(end):
    done = run(STAND_IN + ENDS[end])
    assert (done.returncode, done.stderr) == (0, "")
    said = done.stdout.split()
    assert said.count("fork") == (end == "in a fork")
    assert 1 <= said.count("stopped") <= 4  # one a thread: no other text has been begun


def test_a_program_ends_though_its_daemon_threads_still_compile():
    done = run(STAND_IN, "late")
    assert (done.returncode, done.stderr) == (0, "")


def test_an_error_of_the_program_stays_its_status():
    done = run(STAND_IN + "raise SystemExit(3)")
    assert done.returncode == 3


FORK = """
import os, threading
from ringcoll.executors.cuda import cache
from ringcoll.executors.cuda.cache import KernelCache
from ringcoll.executors.cuda.loader import Loader
parent, running, gate = os.getpid(), threading.Event(), threading.Event()

def compile_kernel(source, arch, **_):
    if os.getpid() == parent:
        running.set()
        gate.wait()
    return source.encode()

cache.compile_kernel, cache.nvrtc_version = compile_kernel, lambda: (13, 0)
loader = Loader(KernelCache(None))
first, *_, last = [loader.compile_ahead(str(number), (9, 0)) for number in range(9)]
running.wait()
child = os.fork()
if not child:
    found = [loader.compile_ahead(text, (9, 0)).result(20) for text in "08"]
    loader.compile("1", (9, 0))
    os.write(1, b"fork %s %s\\n" % tuple(found))
else:
    status = os.waitpid(child, 0)[1]
    gate.set()
    os.write(1, b"parent %s %s %d\\n" % (first.result(20), last.result(20), status))
"""


def test_a_fork_compiles_what_its_parent_is_compiling():
    done = run(FORK)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["fork 0 8", "parent 0 8 0"]


NVRTC = """
import pathlib, sys
from ringcoll.executors.cuda.cache import KernelCache
from ringcoll.executors.cuda.compile import nvrtc_version
from ringcoll.executors.cuda.generic import generic_texts
from ringcoll.executors.cuda.loader import Loader
nvrtc_version()
loader = Loader(KernelCache(pathlib.Path(sys.argv[1])))
texts = [text for nranks in range(2, 10) for text in generic_texts(nranks)]
loader.compile_ahead(texts[0], (9, 0)).result()
for text in texts:
    loader.compile_ahead(text, (9, 0))
print(len(texts))
"""


def test_nvrtc_is_stopped_and_does_not_crash(tmp_path):
    pytest.importorskip("cupy", reason="NVRTC is reached through CuPy")
    done = run(NVRTC, str(tmp_path / "cache"))
    assert (done.returncode, done.stderr) == (0, "")
    kept = [path.name for path in (tmp_path / "cache").iterdir()]
    assert 1 <= len(kept) < int(done.stdout)
    assert all(name.endswith(".cubin") for name in kept)


def test_threads_end_and_begin_anew():
    compilers = Compilers()
    began, gate = threading.Event(), threading.Event()

    def work() -> bytes:
        began.set()
        return b"done" if gate.wait(20) else b"late"

    first = [compilers.submit(work) for _ in range(20)]
    assert began.wait(20)
    compilers.rest()
    assert first[-1].cancelled()
    gate.set()
    assert first[0].result() == b"done"
    for number in range(50):
        assert compilers.submit(lambda: b"more").result(20) == b"more"
        if number % 2:
            compilers.rest()
    failed = compilers.submit(lambda: bytes(1 // 0))
    with pytest.raises(ZeroDivisionError):
        failed.result(20)
    compilers.rest()


def test_what_a_call_waits_for_comes_before_all_else():
    """In a thread more where all compile: nothing that runs is stopped for it."""
    compilers, gate = Compilers(), threading.Event()
    held = [compilers.submit(lambda: b"held" * gate.wait(20)) for _ in range(20)]
    wanted = compilers.submit(lambda: b"wanted")
    compilers.hurry(wanted)
    assert wanted.result(20) == b"wanted"
    assert not any(future.done() for future in held)
    compilers.hurry(wanted)  # it is done
    gate.set()
    assert held[-1].result(20) == b"held"
    compilers.rest()
