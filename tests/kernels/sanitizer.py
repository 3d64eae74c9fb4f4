"""ThreadSanitizer, where it runs: it sees every access that no signal orders."""

from __future__ import annotations

import functools
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.kernels.stand_in import compiler

THREADS = ("-fsanitize=thread",)

RACE = """
#include <pthread.h>
int shared;
void* thread(void*) { ++shared; return nullptr; }
int main() {
    pthread_t all[2];
    for (auto& each : all) pthread_create(&each, nullptr, thread, nullptr);
    for (auto& each : all) pthread_join(each, nullptr);
}
"""


@functools.cache
def why_not() -> str:
    """Why ThreadSanitizer does not serve here; nothing if it does."""
    with tempfile.TemporaryDirectory(prefix="ringcoll-sanitizer-") as folder:
        source, built = Path(folder) / "race.cpp", Path(folder) / "race"
        source.write_text(RACE)
        command = [*(compiler() or ("g++",)), *THREADS, "-pthread", "-o", str(built), str(source)]
        try:
            made = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            return "there is no C++ compiler"
        if made.returncode:
            return f"{command[0]} does not build with it: {_first(made.stderr)}"
        said = subprocess.run([built], capture_output=True, text=True, check=False).stderr
    return "" if "data race" in said else f"it misses a race: {_first(said)}"


def _first(said: str) -> str:
    return said.strip().partition("\n")[0]


# Not skipif: each worker would build a program to collect tests that another one runs.
needs_sanitizer = pytest.mark.usefixtures("sanitizer")
