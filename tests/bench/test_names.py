"""The name of what runs, where it depends on where the ranks are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ringcoll.bench.cases import Section
from ringcoll.bench.library import Ringcoll
from ringcoll.communicator.rank import RankState
from ringcoll.config import Config
from ringcoll.dtypes import dtype_of
from ringcoll.executors.cpu.binder import HostFits
from ringcoll.executors.cpu.executor import CpuExecutor
from ringcoll.tuner import CpuRanks
from ringcoll.tuner.kept import KeptChoices


def test_the_algorithm_named_is_that_of_the_ranks_nodes():
    case = Section("all_reduce", 4, dtype_of("float32"), "sum").case(64 << 20)
    names = []
    for nodes in ((), (0, 0, 1, 1)):
        state = object.__new__(RankState)
        state.config, fits = Config(), HostFits(1 << 22)
        host = object.__new__(CpuExecutor)
        host.choices = KeptChoices(CpuRanks(4, nodes), fits)
        state._host = host
        comm: Any = SimpleNamespace(device="cpu", rank=0, _state=state)
        names.append(Ringcoll(comm).algorithm(case))
    assert names[1] == "hierarchical" != names[0]
