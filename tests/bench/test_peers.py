"""Which peer can do what; that it does so is shown under mpiexec."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ringcoll.bench.cases import Section
from ringcoll.bench.library import Buffers
from ringcoll.bench.peers import Mpi, open_peer
from ringcoll.bench.torch_peers import Gloo
from ringcoll.dtypes import dtype_of
from ringcoll.errors import ArgumentError, MachineError


def section(collective="all_reduce", dtype="float32", op="sum") -> Section:
    root = 0 if collective in ("broadcast", "reduce", "gather", "scatter") else -1
    return Section(collective, 2, dtype_of(dtype), op, root)


@pytest.mark.parametrize(
    ("dtype", "op", "able"),
    [
        ("float32", "sum", True),
        ("float32", "band", False),
        ("float32", "avg", False),
        ("float16", "sum", False),
        ("bfloat16", None, False),
        ("int64", "bxor", True),
        ("bool", "land", True),
        ("bool", "sum", False),
        ("complex64", "prod", True),
        ("complex64", "min", False),
    ],
)
def test_what_mpi_can(dtype, op, able):
    reason = Mpi.unable(Mpi.__new__(Mpi), section(dtype=dtype, op=op).case(64))
    assert (reason is None) == able
    assert able or str(reason).startswith("MPI has no ")


class FakeDist:
    """torch.distributed that notes what it is asked for."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.ReduceOp = SimpleNamespace(SUM="s", PRODUCT="p", MIN="n", MAX="x")

    def __getattr__(self, name):
        return lambda *rest: self.calls.append(name)


@pytest.fixture
def gloo() -> Gloo:
    made = Gloo.__new__(Gloo)
    made.dist = FakeDist()
    made.torch = SimpleNamespace(from_numpy=lambda array: array)
    return made


def test_what_gloo_can(gloo):
    assert gloo.unable(section().case(64)) is None
    assert "uint32" in gloo.unable(section(dtype="uint32").case(64))
    assert "avg" in gloo.unable(section(op="avg").case(64))
    assert "all_to_all" in gloo.unable(section("all_to_all", op=None).case(64))


@pytest.mark.parametrize(
    ("collective", "in_place", "called"),
    [
        ("all_reduce", True, "all_reduce"),
        ("all_reduce", False, None),
        ("broadcast", True, "broadcast"),
        ("reduce", True, "reduce"),
        ("all_gather", False, "all_gather_into_tensor"),
        ("all_gather", True, None),
        ("barrier", False, "barrier"),
    ],
)
def test_calls_of_gloo(gloo, collective, in_place, called):
    op = "sum" if "reduce" in collective else None
    case = section(collective, op=op).case(64)
    memory = np.zeros(1024, np.uint8)
    place = Buffers(0, memory, memory.copy()).place(case, in_place)
    operation = gloo.operation(case, place)
    assert (operation is None) == (called is None)
    if operation is not None:
        operation.call()
        assert gloo.dist.calls == [called]


def test_missing_torch_is_said(monkeypatch):
    comm: Any = SimpleNamespace(rank=0, nranks=1)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MachineError, match="pip install torch"):
        open_peer("gloo", comm)
    with pytest.raises(ArgumentError, match=r"--peer nccl works on GPUs, .* take --peer mpi"):
        open_peer("nccl", comm)
