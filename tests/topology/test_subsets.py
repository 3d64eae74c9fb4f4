"""All subsets of the two DGX-1, on which greedy searches fall short."""

from __future__ import annotations

from itertools import combinations

import pytest

from ringcoll.topology.presets import preset
from ringcoll.topology.search import find_rings
from tests.topology.graph import check


@pytest.mark.parametrize("size", range(2, 9))
@pytest.mark.parametrize("name", ["dgx1-p100", "dgx1-v100"])
def test_subsets(name, size):
    system = preset(name)
    for chosen in combinations(system.gpus, size):
        found = find_rings(system, chosen)
        check(system, found, most=10)
        assert found.gpus == chosen
        assert found.bound
        assert found.bandwidth >= 0.97 * found.bound
        assert any("proven" in said for said in found.tried)
