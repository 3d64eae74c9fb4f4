"""Calls of which the timeout alone is new, on GPUs: their results, and what they wait for."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

import ringcoll
from ringcoll.bootstrap import run_ranks
from ringcoll.errors import DeadlineError
from ringcoll.fabric import each
from tests.gpu.ranks import close, on, together
from tests.processes.conftest import environment

pytestmark = pytest.mark.gpu

APART = pytest.param([0, 1], marks=pytest.mark.multi_gpu)
DEVICES = [[0, 0], [0, 0, 0], APART]


@pytest.fixture(params=DEVICES, ids=str)
def ranks(request) -> Iterator[list[Any]]:
    """Ranks that share a GPU, and with it their launches, and ranks on GPUs of their own."""
    made: list[Any] = ringcoll.init_all(request.param, device="cuda", timeout=20)
    yield made
    close(made, failed=True)


def prepared_by(comm: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What a rank prepares from the beginning, from now on."""
    found, prepare = list[Any](), comm._state.cuda.prepare

    def preparing(*how: Any) -> Any:
        found.append(prepare(*how))
        return found[-1]

    monkeypatch.setattr(comm._state.cuda, "prepare", preparing)
    return found


@pytest.mark.parametrize("count", [500, 40_001, 1 << 20])  # by LL, LL128 and Simple
@pytest.mark.parametrize("grouped", [False, True])
def test_each_call_gives_what_it_gives_without(ranks, monkeypatch, count, grouped):
    """Also of a new count, in between; only the first call is prepared from the beginning."""
    n = len(ranks)
    seen = [prepared_by(comm, monkeypatch) for comm in ranks]
    xs = together(ranks, lambda comm: comm.xp.zeros(count, "float32"))

    def run(comm: Any) -> None:
        x = xs[comm.rank]
        with on(comm):
            for step in range(40):
                x.fill(comm.rank + step)
                how: dict[str, Any] = {"timeout": 15 - step / 7 if step % 4 else 17}
                if step % 10 == 3:
                    how = {}
                comm.all_reduce(x, **how)
                assert (x.get() == n * (n - 1) // 2 + n * step).all()
            comm.synchronize()

    def run_grouped() -> None:
        for step in range(40):
            for comm, x in zip(ranks, xs, strict=True):
                with on(comm):
                    x.fill(comm.rank + step)
            with ringcoll.group():
                for comm, x in zip(ranks, xs, strict=True):
                    comm.all_reduce(x, timeout=15 - step / 7)
            for comm, x in zip(ranks, xs, strict=True):
                comm.synchronize()
                with on(comm):
                    assert (x.get() == n * (n - 1) // 2 + n * step).all()

    if grouped:
        run_grouped()
    else:
        each(ranks, run)
    assert [len(of) for of in seen] == [1] * n


@pytest.mark.parametrize("engine", ["sm", "copy"])
@pytest.mark.multi_gpu
def test_calls_between_symmetric_arrays(engine, tmp_path):
    """A process for each GPU: copy engines make such calls too."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    argv = [sys.executable, str(program), engine]
    assert run_ranks(argv, 2, env=environment()) == [0, 0]


PROGRAM = """
import sys

import ringcoll

with ringcoll.init(device="cuda", timeout=20) as comm:
    x, y = comm.empty(1 << 20, "float32"), comm.empty(2 << 20, "float32")
    for step in range(20):
        x.fill(comm.rank + step)
        comm.xp.cuda.get_current_stream().synchronize()
        comm.barrier(timeout=18 - step / 9)
        comm.all_gather(x, y, engine=sys.argv[1], timeout=19 - step / 9)
        found = y.get()
        assert (found[: 1 << 20] == step).all() and (found[1 << 20 :] == 1 + step).all()
    comm.synchronize()
"""


@pytest.mark.parametrize("count", [500, 1 << 20])
def test_a_call_ends_by_its_own_timeout_and_says_it(ranks, count):
    """Though the call behind it has more, and so have those before."""
    xs = together(ranks, lambda comm: comm.xp.ones(count, "float32"))

    def run(comm: Any) -> None:
        with on(comm):
            for step in range(5):
                comm.all_reduce(xs[comm.rank], timeout=15 - step)
            comm.synchronize()

    each(ranks, run)
    first, started = ranks[0], time.monotonic()
    with pytest.raises(DeadlineError, match=r"waited 1\.25 s for "), on(first):
        first.all_reduce(xs[0], timeout=1.25)
        first.all_reduce(xs[0], timeout=17)
        first.synchronize()
    assert 1.1 < time.monotonic() - started < 12
