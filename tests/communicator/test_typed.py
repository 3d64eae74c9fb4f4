"""What a type checker says of right and wrong calls."""

from __future__ import annotations

from typing import get_args

import pytest

from ringcoll.algorithms import ALGORITHMS
from ringcoll.communicator.call_options import CallOptions
from ringcoll.config import OPTIONS
from ringcoll.dtypes import OPS, OpName
from ringcoll.options import AlgorithmName

HEAD = """
from typing import Any
from typing_extensions import Unpack
import ringcoll

def star(nranks: int) -> ringcoll.Plan:
    raise NotImplementedError

def calls(comm: ringcoll.Communicator, x: object, flag: bool, many: dict[str, Any]) -> None:
"""
RIGHT = """
    comm.all_reduce(x, async_op=True).wait()
    comm.barrier(async_op=True).done()
    comm.send(x, 1, async_op=True).wait(timeout=3)
    comm.reduce(x, op="max", root=1, algorithm="tree", slices=4, tag="loss")
    comm.all_reduce(x, None, ringcoll.premul_sum(0.5), stream=7, timeout=1.5)
    comm.all_reduce(x, algorithm=star, config=ringcoll.Config(protocol="LL"))
    comm.all_to_all_v(x, [1, 1], x, [1, 1], async_op=True).exception()
    comm.split(0).barrier()
    comm.all_reduce(x, **many)
    work = comm.all_gather(x, x, async_op=flag)
    if work is not None:
        work.wait()

def mean(comm: ringcoll.Communicator, x: object, **how: Unpack[ringcoll.CallOptions]) -> None:
    comm.all_reduce(x, op="avg", **how)
"""
WRONG = [
    "comm.all_reduce(x, asinc_op=True)",
    "comm.all_reduce(x).wait()",
    "comm.all_reduce(x, async_op=False).wait()",
    "comm.all_reduce(x, async_op=flag).wait()",
    'comm.all_reduce(x, op="mean")',
    'comm.all_reduce(x, algorithm="rng")',
    'comm.all_gather(x, protocol="ll")',
    'comm.broadcast(x, root="0")',
    "comm.barrier(slices=1.5)",
    "comm.split(None).barrier()",
    "comm.allreduce(x)",
    "comm.size",
    'comm.empty(3, like="jax")',
    'ringcoll.Config(engine="network")',
]


@pytest.fixture(scope="module")
def complaints(tmp_path_factory, kept):
    """What mypy says of each line: one run for all of them."""
    api = pytest.importorskip("mypy.api")
    path = tmp_path_factory.mktemp("typed") / "calls.py"
    lines = (HEAD + "".join(f"    {call}\n" for call in WRONG) + RIGHT).splitlines()
    path.write_text("\n".join(lines) + "\n")
    cached = f"--cache-dir={kept('mypy')}"  # what it knows of the modules that have not changed
    flags = ["--strict", "--no-error-summary", "--hide-error-context", cached]
    flags += ["--ignore-missing-imports", "--follow-imports=silent"]
    said, failed, _ = api.run([*flags, str(path)])
    assert failed == ""
    numbers = {int(line.split(":")[1]) for line in said.splitlines() if ": error: " in line}
    return {lines[number - 1].strip() for number in numbers}


def test_a_type_checker_accepts_right_calls_alone(complaints):
    assert complaints == set(WRONG)


def test_the_names_that_editors_offer_are_those_there_are():
    assert set(get_args(AlgorithmName)) == {n for known in ALGORITHMS.values() for n in known}
    assert get_args(OpName) == tuple(OPS)
    assert set(CallOptions.__annotations__) == {*OPTIONS, "stream", "config"}


def test_options_are_typed_as_the_fields_of_config():
    from ringcoll.config import Config

    options, fields = CallOptions.__annotations__, Config.__annotations__
    plain = [name for name in OPTIONS if name != "algorithm"]
    assert {n: options[n].__forward_arg__ for n in plain} == {n: fields[n] for n in plain}
