"""Beginning over torch's own stores: under torchrun, and over a store that is handed over."""

import json
import os
import re
import subprocess
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.adapters.ports import free_port
from tests.fabric.test_addresses import no_ipv6

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")

ROOT = Path(__file__).parents[2]

# README's ten lines, on the CPU.
TEN_LINES = """
    import json
    import ringcoll

    with ringcoll.init(device="cpu") as comm:
        x = comm.empty(1 << 20, "float32")
        x[:] = comm.rank
        comm.all_reduce(x)
        comm.synchronize()
        print(json.dumps({"rank": comm.rank, "x": float(x[0])}))
"""


def environment(**extra):
    dropped = ("PMI_", "OMPI_", "SLURM_", "RINGCOLL_", "TORCHELASTIC_", "MASTER_")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
    path = os.pathsep.join(p for p in (str(ROOT), kept.get("PYTHONPATH", "")) if p)
    return {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **extra}


def program(tmp_path, *parts):
    path = tmp_path / "program.py"
    path.write_text("".join(map(textwrap.dedent, parts)), encoding="utf-8")
    return str(path)


def said(output):
    # Ranks that share one pipe may put two of them on a line.
    return sorted(map(json.loads, re.findall("{.*?}", output)), key=lambda word: word["rank"])


def torchrun(path, *flags):
    argv = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", *flags, path]
    done = subprocess.run(
        argv, env=environment(), capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    return said(done.stdout)


BOTH = [{"rank": 0, "x": 1.0}, {"rank": 1, "x": 1.0}]


def test_torchrun_needs_no_mpi_and_ranks_that_it_starts_again_meet_anew(tmp_path):
    # The first attempt leaves its keys in the agent's store, and rank 1 had not yet begun.
    code = """
        import os, sys, time
        first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if first and os.environ["RANK"] == "1":
            time.sleep(1)
            sys.exit(3)
    """
    path = program(tmp_path, code, TEN_LINES)
    assert torchrun(path, "--standalone", "--max-restarts=1") == BOTH


def start(path, **extra):
    return subprocess.Popen(
        [sys.executable, path],
        env=environment(**{"WORLD_SIZE": "2", **extra}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(ranks):
    outputs = [rank.communicate(timeout=100) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    return [out for out, _ in outputs]


def processes(path, **extra):
    return said("".join(ended([start(path, RANK=rank, **extra) for rank in "01"])))


def test_rank_0_serves_where_no_agent_does_and_torch_shares_its_store(tmp_path):
    # Twice, on both sides of torch's own use of that port, and the second over a store by hand.
    code = """
        import os
        import torch.distributed as dist
        dist.init_process_group("gloo")
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        with ringcoll.init(dist.PrefixStore("mine", store), device="cpu") as comm:
            y = comm.empty(3, "int64")
            y[:] = 2
            comm.all_reduce(y)
            assert list(y) == [4, 4, 4]
        dist.barrier()
        dist.destroy_process_group()
        with ringcoll.init(device="cpu") as comm:
            assert comm.nranks == 2
    """
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    assert processes(program(tmp_path, TEN_LINES, code), **where) == BOTH


@pytest.mark.skipif(bool(no_ipv6()), reason=no_ipv6())
def test_the_address_of_the_store_may_be_of_ipv6(tmp_path):
    where = {"MASTER_ADDR": "::1", "MASTER_PORT": str(free_port())}
    assert processes(program(tmp_path, TEN_LINES), **where) == BOTH


@pytest.mark.parametrize(("variable", "value"), [("RANK", "2"), ("WORLD_SIZE", "two")])
def test_a_wrong_number_of_the_environment_is_an_error_on_all_ranks_at_once(
    tmp_path, variable, value
):
    path = program(tmp_path, "import ringcoll\nwith ringcoll.init(device='cpu', timeout=90): pass")
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [start(path, **where, RANK="0"), start(path, **{**where, "RANK": "1", variable: value})]
    errors = [rank.communicate(timeout=80)[1] for rank in ranks]  # none waits to the deadline
    assert [rank.returncode for rank in ranks] == [1, 1]
    assert "LauncherError: init: WORLD_SIZE is" in errors[1]
    assert f"{variable} is '{value}'" in errors[1]
    assert "AbortedError: process" in errors[0]
    assert f"{variable} is '{value}'" in errors[0]


def test_a_file_store_carries_several_communicators(tmp_path):
    code = """
        import json
        import ringcoll
        from torch.distributed import FileStore

        store = FileStore(__file__ + ".store", 2)
        for turn in range(3):
            with ringcoll.init(store, device="cpu") as comm:
                x = comm.empty(1, "float32")
                x[:] = turn
                comm.all_reduce(x)
                assert x[0] == 2 * turn
        print(json.dumps({"rank": comm.rank, "x": float(x[0])}))
    """
    assert processes(program(tmp_path, code)) == [{"rank": 0, "x": 4.0}, {"rank": 1, "x": 4.0}]


def test_who_does_not_come_is_named_and_who_serves_too(tmp_path):
    code = """
        import json, os
        import ringcoll
        try:
            ringcoll.init(timeout=3, device="cpu")
        except ringcoll.DeadlineError as error:
            print(json.dumps({"rank": int(os.environ["RANK"]), "said": str(error)}))
    """
    path = program(tmp_path, code)
    # Two worlds, of which only one rank comes.
    alone = [
        start(path, RANK=rank, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
        for rank in "01"
    ]
    waited = [said(out)[0]["said"] for out in ended(alone)]
    assert "for rank 1: did every rank make" in waited[0]
    assert "for rank 0 to serve torchrun's store at" in waited[1]
