"""The name of what runs, where it depends on where the ranks are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ringcoll.bench.cases import Section
from ringcoll.bench.library import Ringcoll
from ringcoll.communicator.topology import Topology
from ringcoll.dtypes import dtype_of
from ringcoll.model.links import Links


def test_the_algorithm_named_is_that_of_the_ranks_nodes():
    case = Section("all_reduce", 4, dtype_of("float32"), "sum").case(64 << 20)
    names = []
    for nodes in ((), (0, 0, 1, 1)):
        topology = Topology(links=Links(1e9, nodes=nodes))
        comm: Any = SimpleNamespace(device="cpu", rank=0, topology=topology)
        names.append(Ringcoll(comm).algorithm(case))
    assert names[1] == "hierarchical" != names[0]
