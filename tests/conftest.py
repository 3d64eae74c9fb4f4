"""What all tests share: reproducible examples, a clean environment, tests that need a GPU."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from tests.launching import AS_MPICH

if TYPE_CHECKING:
    from tests.hosts.network import Hosts

# The same examples in every run, and no verdict by the clock: the machine may be busy.
settings.register_profile(
    "ringcoll",
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("ringcoll")

SHM = Path("/dev/shm")
EARLIER = frozenset(SHM.glob("mpich_shm_*"))
"""Memory of MPICH that is there before the first test, and not ours to remove."""

# Set where hosts made of namespaces must work: their tests fail there instead of being skipped.
NET_ADMIN = "CI_NET_ADMIN"
HOSTS_WANTED = pytest.StashKey[bool]()

ALONE = {"OPENBLAS_NUM_THREADS": "1", "MPIR_CVAR_POLLS_BEFORE_YIELD": "1"}
"""Programs of tests multiply no matrices: a thread a core for that is a tenth of their start. And
ranks of MPICH that wait give way at once: there are more of them than cores."""

# Which devices a marker needs.
DEVICES = {"gpu": 1, "multi_gpu": 2}

LONG = ("nodes", "processes", "kernels", "bench", "docs", "fabric", "gpu", "lower", "model")
"""Folders with files that take longest: they begin first, and no core waits for one at the end."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--mutants",
        choices=("sample", "all"),
        default="sample",
        help="which mutants of plans the verifier must reject: a seeded sample, or all of them",
    )


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until all tests are collected
    # A shell starts what runs in its background deaf to Ctrl-C, and children inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Tests start hundreds of processes: without bytecode each compiles the package anew, which
    # doubles the work of its start. Shells set this, and workers inherit it.
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # Without a buffer print writes a line and its end apart, and ranks share a pipe: the line of
    # one came between another's and its end.
    os.environ.pop("PYTHONUNBUFFERED", None)
    _share_stand_ins(config)
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(FailuresByName(config), "failures-by-name")
    config.stash[HOSTS_WANTED] = os.environ.get(NET_ADMIN) == "1"
    for name, value in {**AS_MPICH, **ALONE}.items():
        os.environ.setdefault(name, value)
    # A developer's settings must not decide what the tests see; debug output is welcome.
    for name in [n for n in os.environ if n.startswith("RINGCOLL_")]:
        if not name.startswith("RINGCOLL_DEBUG"):
            del os.environ[name]
    if Path("/dev/nvidiactl").exists():  # tests of a call's kernel run that kernel
        os.environ["RINGCOLL_KERNEL_WAIT"] = "inf"


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """No test leaves a variable of the package to the next: benchmarks set some."""
    before = {name: os.environ[name] for name in os.environ if name.startswith("RINGCOLL_")}
    yield
    for name in [n for n in os.environ if n.startswith("RINGCOLL_") and n not in before]:
        del os.environ[name]
    os.environ.update(before)


class FailuresByName:
    """Names a test at once when it fails: workers' letters F have no names until all have ended."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        reporter = self.config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and reporter is not None:
            reporter.write_line(f"\nFAILED {report.nodeid} ({report.when})")


def _share_stand_ins(config: pytest.Config) -> None:
    """Have the processes of this run compile each kernel for the CPU once between them.

    What they have compiled stays in pytest's cache, for later runs.
    """
    from tests.kernels.stand_in import FOLDER, forget

    if hasattr(config, "workerinput") or FOLDER in os.environ:
        return

    def drop() -> None:
        os.environ.pop(FOLDER, None)

    if found := _kept(config, "stand-ins"):
        forget(found)
        os.environ[FOLDER] = str(found)
    else:
        folder = tempfile.TemporaryDirectory(prefix="ringcoll-stand-in-")
        config.add_cleanup(folder.cleanup)
        os.environ[FOLDER] = folder.name
    config.add_cleanup(drop)


def _kept(config: pytest.Config, name: str) -> Path | None:
    """A folder of pytest's cache; None: it has none, or it cannot be written."""
    if cache := getattr(config, "cache", None):
        with contextlib.suppress(OSError):
            found: Path = cache.mkdir(name)
            return found if os.access(found, os.W_OK) else None
    return None


@pytest.fixture(scope="session")
def kept(
    pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Makes folders for what later runs can use again, where they can be kept."""
    return lambda name: _kept(pytestconfig, name) or tmp_path_factory.mktemp(name)


@pytest.fixture(scope="session")
def mutants(pytestconfig: pytest.Config) -> str:
    return pytestconfig.getoption("--mutants")


@pytest.fixture(autouse=True)
def cpu_ranks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests without a GPU's marker mean CPU ranks, on a machine with GPUs too."""
    if Path("/dev/nvidiactl").exists() and not _markers(request.node):
        monkeypatch.setenv("RINGCOLL_DEVICE", "cpu")


@pytest.fixture
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine has no GPU, for tests of what is chosen without one, here and in programs."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name in ("RINGCOLL_DEVICE", "RINGCOLL_KERNEL_WAIT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("ringcoll.cuda.device._probe", lambda: ((), "a test says so"))


@pytest.fixture
def hosts(pytestconfig: pytest.Config) -> Callable[..., AbstractContextManager[Hosts]]:
    """Makes hosts on this machine, see tests/hosts/network.py: ``with hosts(2, rate=125e6) as h``.

    A test that takes it starts mpiexec and has the marker mpi.
    """
    from tests.hosts import network

    if reason := network.missing():
        if pytestconfig.stash[HOSTS_WANTED]:
            pytest.fail(f"{NET_ADMIN}=1, but {reason}")
        pytest.skip(reason)
    return network.hosts


@pytest.fixture(autouse=True)
def no_memory_of_mpich(request: pytest.FixtureRequest) -> Iterator[None]:
    """MPICH's named memory outlives a killed rank, 3 MB a time, where 64 may be all there are."""
    yield
    if request.node.get_closest_marker("mpi") is not None:
        _remove_memory_of_mpich(older=10.0)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput"):
        _remove_memory_of_mpich(older=0.0)


def _remove_memory_of_mpich(*, older: float) -> None:
    """``older``, in seconds, than what a rank that begins beside this test has not mapped yet."""
    for path in set(SHM.glob("mpich_shm_*")) - EARLIER:
        with contextlib.suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime >= older and not _mapped(path.name):
                path.unlink()


def _mapped(name: str) -> bool:
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            if name in maps.read_text(errors="replace"):
                return True
    return False


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        turns = {name: turn for turn, name in enumerate(LONG)}
        items.sort(key=lambda item: turns.get(item.path.parent.name, len(LONG)))
    needs = {item: max(map(DEVICES.__getitem__, _markers(item)), default=0) for item in items}
    if not any(needs.values()):
        return
    devices = _count_devices()
    beyond = [item for item in items if needs[item] > devices]
    config.hook.pytest_deselected(items=beyond)
    items[:] = [item for item in items if needs[item] <= devices]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Keep Python's collector of cycles from looking at all tests again and again.

    Plans are made of many small objects, few of them in cycles: with the usual threshold, and with
    the tests themselves among the objects, the collector takes a third of the time; with 20,000
    still a tenth. What imports have left behind is frozen too: to free those few MB takes longer.
    """
    gc.freeze()
    gc.set_threshold(300_000, 10, 10)
    gc.enable()


def _markers(item: pytest.Item) -> set[str]:
    return {mark.name for mark in item.iter_markers() if mark.name in DEVICES}


def _count_devices() -> int:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    # In a process of its own: a process that has started CUDA can no longer fork safely.
    code = "import cupy; print(cupy.cuda.runtime.getDeviceCount())"
    probe = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    return int(probe.stdout) if probe.returncode == 0 else 0
