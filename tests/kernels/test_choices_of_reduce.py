"""What GPU ranks choose for a reduce: who sums, and where the sums go."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ringcoll.arguments.calls import Call
from ringcoll.dtypes import dtype_of, op_of
from ringcoll.launch import ALL_MAPPED
from tests.kernels.chosen import chosen, rooted


@pytest.mark.parametrize(
    ("mebibytes", "dtype", "how", "algorithm"),
    [
        (2, "float32", {}, "scatter_gather_push"),
        (3, "float32", {}, "chain"),
        (4, "float32", {"nranks": 3}, "chain"),
        (4, "float32", {"nranks": 5}, "scatter_gather_push"),
        (4, "float32", {"blocks": 48}, "scatter_gather_push"),
        (12, "int64", {}, "chain"),
        (4, "float32", {"deterministic": True}, "scatter_gather_push"),
        (4, "bfloat16", {}, "scatter_gather_push"),  # partial results in float32
        (4, "bfloat16", {"accumulate": "dtype"}, "chain"),
        (4, "float32", {"nranks": 2}, "all_pairs"),
        (2, "float32", {"nvlink": False}, "scatter_gather"),
    ],
)
def test_a_chain_carries_sums_that_are_no_wider_than_the_elements(mebibytes, dtype, how, algorithm):
    row = replace(dtype_of(dtype), wide=how.get("accumulate") != "dtype")
    options = {"nranks": 4, "mapped": ALL_MAPPED, **how}
    nbytes = mebibytes << 20
    count = nbytes // row.itemsize
    call = Call("reduce", 0, None, None, count, row, op_of("sum"), nbytes=nbytes)
    assert chosen(call, **options).algorithm == algorithm


@pytest.mark.parametrize("mapped", [frozenset(), ALL_MAPPED])
def test_two_ranks_reduce_at_the_root(mapped):
    two, three = (rooted("reduce", nranks, mapped=mapped) for nranks in (2, 3))
    assert (two.algorithm, two.direct) == ("one_shot" if mapped else "all_pairs", None)
    assert three.algorithm == ("scatter_gather" if mapped else "scatter_gather_push")
    assert "gpu_pushes.json" in two.why[0] and "gpu_choices_4.json" in three.why[0]


def test_a_reduce_whose_sums_go_to_the_root_at_once_has_one_slice():
    found = rooted("reduce")
    assert (found.launch.slices, found.program.scratch) == (17, 3)
    assert (found.direct.launch.slices, found.direct.program.scratch) == (1, 0)
