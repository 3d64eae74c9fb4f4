"""The parts of the measurement on GPUs that need none: choices, clocks, NCCL's calls."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ringcoll.algorithms import ALGORITHMS
from ringcoll.bench import flags, gpu, torch_peers
from ringcoll.bench.cases import Section
from ringcoll.bench.devices import Address, device_of
from ringcoll.bench.gpu import EventWatch
from ringcoll.bench.launch import Start, decide
from ringcoll.bench.library import Buffers, Ringcoll
from ringcoll.bench.settings import Settings
from ringcoll.bench.timing import Timing
from ringcoll.bench.torch_peers import Nccl
from ringcoll.bench.worlds import World
from ringcoll.communicator.cuda.state import CudaState
from ringcoll.config import Config
from ringcoll.dtypes import dtype_of
from ringcoll.errors import ArgumentError, MachineError
from ringcoll.executors.cuda.kernel_body import KernelFits, gpu_ranks
from ringcoll.executors.cuda.workspace import Workspace
from tests.bench.test_flags import settings

ROOTED = ("broadcast", "reduce", "gather", "scatter")
UNDER_MPI = {"PMI_SIZE": "3", "PMI_RANK": "1"}


# -- flags and launch ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        (["--device", "cuda"], "device", "cuda"),
        (["--device", "3", "-g", "8"], "device", "3"),
        (["--device", "cuda", "-G", "2"], "graphs", 2),
        (["--peer", "mpi"], "device", "cpu"),
        (["--pace", "1G"], "device", "cpu"),
    ],
)
def test_flags(words, field, value):
    assert getattr(settings(*words), field) == value


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--device", "cuda", "--pace", "1G"], "needs CPU ranks"),
        (["--device", "0", "--peer", "mpi"], "needs CPU ranks"),
        (["--device", "cpu", "-G", "1"], "no CUDA graphs"),
        (["--device", "cuda", "-G", "1", "-I", "1"], "leave one of them out"),
    ],
)
def test_flags_that_exclude_each_other(words, says):
    with pytest.raises(ArgumentError, match=says):
        settings(*words)


@pytest.mark.usefixtures("no_gpus")
def test_graphs_need_gpus(monkeypatch):
    monkeypatch.setattr(flags, "gpus", lambda: 2)
    assert settings("-G", "3").graphs == 3
    monkeypatch.setenv("RINGCOLL_DEVICE", "cpu")
    with pytest.raises(ArgumentError, match="no CUDA graphs"):
        settings("-G", "3")


@pytest.mark.usefixtures("no_gpus")
def test_nccl_needs_gpus_and_torch(monkeypatch):
    monkeypatch.setattr(flags, "gpus", lambda: 2)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert settings("--peer", "nccl").device == "auto"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ArgumentError, match="--peer nccl needs torch"):
        settings("--peer", "nccl")
    monkeypatch.setattr(flags, "gpus", lambda: 0)
    with pytest.raises(ArgumentError, match="--peer nccl works on GPUs"):
        settings("--peer", "nccl")


def test_no_such_device(capsys):
    with pytest.raises(SystemExit):
        settings("--device", "gpu")
    assert "auto, cpu, cuda or a number" in capsys.readouterr().err


def decided(ngpus: int, made: Settings, environ=None, *, member=False) -> Start:
    machine: dict[str, Any] = {"ncores": 8, "launcher": "/bin/mpiexec", "has_mpi": True}
    return decide(made, environ or {}, member=member, ngpus=ngpus, **machine)


@pytest.mark.parametrize(
    ("ngpus", "made", "start"),
    [
        (0, Settings(), Start("mpiexec", 4, "/bin/mpiexec")),
        (8, Settings(), Start("mpiexec", 8, "/bin/mpiexec")),
        (8, Settings(device="cpu"), Start("mpiexec", 4, "/bin/mpiexec")),
        (8, Settings(ranks=2), Start("mpiexec", 2, "/bin/mpiexec")),
        (1, Settings(), Start("here", 4)),
        (1, Settings(peer="nccl"), Start("mpiexec", 1, "/bin/mpiexec")),
        (1, Settings(graphs=1), Start("mpiexec", 1, "/bin/mpiexec")),
        (0, Settings(device="cuda"), Start("mpiexec", 1, "/bin/mpiexec")),
        (1, Settings(device="0"), Start("here", 1)),
        (1, Settings(device="0", threads=8), Start("here", 8)),
    ],
)
def test_ranks_follow_the_gpus(ngpus, made, start):
    assert decided(ngpus, made) == start


def test_a_shared_gpu_is_for_threads():
    for made, environ, member in (
        (Settings(device="0", ranks=2), {}, False),
        (Settings(device="0"), UNDER_MPI, False),
        (Settings(device="0"), {}, True),
    ):
        with pytest.raises(ArgumentError, match="threads of one process; say with -g"):
            decided(1, made, environ, member=member)


def test_the_environment_has_a_say(monkeypatch):
    start = decide(Settings(), {"RINGCOLL_DEVICE": "cpu"}, member=False, ncores=3, ngpus=8)
    assert start.ranks == 3
    monkeypatch.setenv("RINGCOLL_DEVICE", "cuda")
    assert World().on_gpu()
    assert not World(device="cpu").on_gpu()
    assert World(device="0").on_gpu()


def test_a_world_without_the_gpu_it_was_asked_for(monkeypatch):
    from ringcoll.cuda import device

    monkeypatch.setattr(device, "_probe", lambda: ((), "there is no CUDA device"))
    with pytest.raises(MachineError, match="has no GPU"):
        World(2, "cuda").run(lambda control, comm: None)
    with pytest.raises(ArgumentError, match="none of the 0 GPUs of this process: there is no CUDA"):
        World(2, "5").run(lambda control, comm: None)


def test_graphs_of_cpu_ranks_are_refused():
    comm: Any = SimpleNamespace(device="cpu")
    assert device_of(comm).address.bus == "0000:00:00"
    with pytest.raises(ArgumentError, match="no CUDA graphs"):
        device_of(comm, graphs=1)


# -- the clock -----------------------------------------------------------------------------------


class Stream:
    """A stream on which a call takes a second of device time."""

    def __init__(self) -> None:
        self.now, self.captured, self.events = 0.0, -1, list[str]()

    def call(self) -> None:
        if self.captured >= 0:
            self.captured += 1
        else:
            self.now += 1.0

    def begin_capture(self) -> None:
        self.captured = 0

    def end_capture(self) -> Any:
        calls, self.captured = self.captured, -1

        def launch(stream) -> None:
            stream.now += calls

        self.events.append(f"graph of {calls}")
        return SimpleNamespace(launch=launch, upload=lambda stream: None)


@pytest.fixture
def stream(monkeypatch) -> Stream:
    class Event:
        def record(self, stream) -> None:
            self.at = stream.now

    def elapsed(before, after) -> float:
        return (after.at - before.at) * 1e3

    fake = SimpleNamespace(Event=Event, get_elapsed_time=elapsed)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=fake))
    monkeypatch.setitem(sys.modules, "cupy.cuda", fake)
    return Stream()


def timed(stream: Stream, iterations: int, graphs: int = 0, **how) -> EventWatch:
    def note(word: str) -> Any:
        return lambda: stream.events.append(word)

    made = EventWatch(note("barrier"), Timing(**how), stream, note("finish"), graphs)
    made.block(stream.call, iterations)
    return made


def test_a_block_is_timed_by_the_device(stream):
    assert timed(stream, 3).blocks == [pytest.approx(1.0)]
    assert stream.now == 4.0  # one call more, before the clock
    assert stream.events == ["barrier", "finish"]
    assert timed(stream, 2, aggregate=5).blocks == [pytest.approx(1.0)]


def test_single_iterations(stream):
    made = timed(stream, 3, single=True, aggregate=2)
    assert made.singles == [pytest.approx(1.0)] * 3
    assert made.blocks == [pytest.approx(1.0)]


def test_a_barrier_after_each_call(stream):
    timed(stream, 2, blocking=True)
    assert stream.events.count("barrier") == 3


def test_a_graph_is_captured_once_and_launched_often(stream):
    made = timed(stream, 4, graphs=10)
    made.block(stream.call, 4)
    assert made.blocks == [pytest.approx(1.0)] * 2
    assert stream.events.count("graph of 4") == 1
    assert stream.now == 2 * (1 + 10 * 4)
    made.block(stream.call, 3)
    assert stream.events.count("graph of 3") == 1


def test_the_hosts_time(stream):
    assert 0 <= timed(stream, 2, cpu_time=True).blocks[0] < 0.1


def test_a_capture_that_fails_is_ended(stream):
    def fail() -> None:
        raise ArgumentError("no")

    with pytest.raises(ArgumentError):
        gpu.captured(stream, fail, 2)
    assert stream.captured == -1


# -- the algorithm's name ------------------------------------------------------------------------


def named(collective: str, nbytes: int, *, symmetric=True, **section) -> str:
    state = object.__new__(CudaState)
    state.config = Config()
    machine, fits = gpu_ranks(Workspace(4), 32, nvlink=True), KernelFits(Workspace(4))
    vars(state)["cuda"] = SimpleNamespace(
        machine=machine, fits=fits, auto_register=None, large_scratch=None
    )
    comm: Any = SimpleNamespace(rank=0, nranks=4, device="cuda:0", _state=state)
    op = "sum" if "reduce" in collective else None
    root = 0 if collective in ROOTED else -1
    made = Section(collective, 4, dtype_of("float32"), op, root, **section)
    return Ringcoll(comm, symmetric=symmetric).algorithm(made.case(nbytes))


def test_the_name_is_the_executors_choice():
    for collective in ("all_reduce", *ROOTED, "all_gather", "reduce_scatter", "all_to_all"):
        for nbytes, protocol in ((1024, "LL"), (64 << 20, "Simple")):
            for symmetric in (True, False):
                words = named(collective, nbytes, symmetric=symmetric).split()
                assert words[0] in ALGORITHMS[collective]
                assert words[1] == protocol
    assert named("barrier", 0).split()[0] in ALGORITHMS["barrier"]
    assert named("sendrecv", 64) == "pair"


def test_the_name_of_what_was_asked_for():
    assert named("all_reduce", 64 << 20, algorithm="ring").startswith("ring Simple")
    assert named("all_reduce", 1024, algorithm="two_shot", slices=4) == "two_shot Simple S=4"
    # All buffers are of one kind: where peers reach some, they reach the root's own.
    assert named("reduce", 64 << 20, algorithm="scatter_gather") == "scatter_gather Simple"
    staged = named("reduce", 64 << 20, algorithm="scatter_gather", symmetric=False)
    assert staged.startswith("scatter_gather Simple S=")
    assert named("all_reduce", 64, algorithm="magic") == "magic"  # the call itself refuses it


# -- NCCL ----------------------------------------------------------------------------------------


class FakeDist:
    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.ReduceOp = SimpleNamespace(SUM="s", PRODUCT="p", MIN="n", MAX="x", AVG="a")

    def __getattr__(self, name):
        return lambda *rest: self.calls.append((name, rest))


class Tensor:
    def __init__(self, array) -> None:
        self.array = array

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)

    def view(self, dtype):
        return Tensor(self.array.view(dtype))

    def chunk(self, parts):
        return [Tensor(part) for part in np.split(self.array, parts)]


class Plain(np.ndarray):
    """Has CuPy's way to say where it begins."""

    @property
    def data(self):
        return SimpleNamespace(ptr=self.ctypes.data)


@pytest.fixture
def peer() -> Nccl:
    made = Nccl.__new__(Nccl)
    made.dist, made.nranks, made.device = FakeDist(), 2, "cuda:0"
    made.torch = SimpleNamespace(
        as_tensor=lambda array, device: Tensor(array), float32=np.float32, bfloat16=np.int16
    )
    return made


@pytest.mark.parametrize(
    ("collective", "in_place", "called"),
    [
        ("all_reduce", True, "all_reduce"),
        ("all_reduce", False, None),
        ("reduce", True, "reduce"),
        ("broadcast", True, "broadcast"),
        ("broadcast", False, None),
        ("all_gather", True, "all_gather_into_tensor"),
        ("all_gather", False, "all_gather_into_tensor"),
        ("reduce_scatter", True, "reduce_scatter_tensor"),
        ("reduce_scatter", False, "reduce_scatter_tensor"),
        ("all_to_all", False, "all_to_all_single"),
        ("all_to_all", True, None),
        ("gather", False, "gather"),
        ("scatter", False, "scatter"),
    ],
)
def test_calls_of_nccl(peer, collective, in_place, called):
    op = "sum" if "reduce" in collective else None
    root = 0 if collective in ROOTED else -1
    case = Section(collective, 2, dtype_of("float32"), op, root).case(64)
    memory = np.zeros(1024, np.uint8).view(Plain)
    place = Buffers(0, memory, memory.copy()).place(case, in_place)
    assert place is not None
    operation = peer.operation(case, place)
    assert (operation is None) == (called is None)
    if operation is not None:
        operation.call()
        ((name, arguments),) = peer.dist.calls
        assert name == called
        first = arguments[0].array
        assert first.dtype == (np.float32 if op else np.uint8)


def test_what_nccl_can(peer):
    def unable(collective="all_reduce", dtype="float32", op: str | None = "sum") -> str | None:
        reason: str | None = peer.unable(Section(collective, 2, dtype_of(dtype), op).case(64))
        return reason

    assert unable() is None
    assert unable(op="avg") is None
    assert unable("all_gather", "complex64", None) is None
    assert "avg of int32" in str(unable(dtype="int32", op="avg"))
    assert "uint16" in str(unable(dtype="uint16"))
    assert "band" in str(unable(dtype="int32", op="band"))
    assert "barrier" in str(unable("barrier", "uint8", None))


def test_nccl_that_is_not_there_is_said(monkeypatch):
    import ringcoll

    def start(comm) -> None:
        Nccl(comm, Address(comm.rank, f"0000:0{comm.rank}:00", "a GPU"), 1)

    monkeypatch.setattr(torch_peers, "_missing", lambda: "there is no torch; pip install torch")
    with pytest.raises(MachineError, match="pip install torch"):
        ringcoll.spawn(start, 2, device="cpu")
    monkeypatch.setattr(torch_peers, "_missing", lambda: None)
    with pytest.raises(ArgumentError, match="a process of its own"):
        ringcoll.spawn(start, 2, device="cpu")
