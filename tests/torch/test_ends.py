"""How processes with a group end: in order, by an error, or without having destroyed it."""

import re
import socket

import pytest

START = """
import os, sys
import torch, torch.distributed as dist
from datetime import timedelta
from ringcoll.torch_entry import register
register()
rank = int(sys.argv[1])
store = dist.TCPStore("127.0.0.1", int(sys.argv[2]), 2, rank == 0, wait_for_workers=False)

def begin():
    dist.init_process_group(
        "ringcoll", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=30)
    )

begin()
x = torch.ones(2)
"""


@pytest.fixture
def two(programs):
    """Runs a program as 2 ranks over one store, which the first serves."""

    def run(code):
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        return programs.run(START + code, 2, port)

    return run


# Both ranks have all threads that there are: the worker's, and those of messages.
THREADS = """
dist.all_reduce(x, async_op=True).wait()
works = [dist.irecv(x, 1 - rank), dist.isend(torch.ones(2), 1 - rank)]
for work in works:
    work.wait()
"""


@pytest.mark.parametrize("destroyed", [True, False])
def test_a_run_that_goes_well_ends_well(two, destroyed):
    """Trap 5: a daemon thread inside torch at the end of the interpreter is a SIGABRT."""
    end = "dist.destroy_process_group()" if destroyed else "dist.irecv(x, 1 - rank, tag=5)"
    for code, out, err in two(f"{THREADS}\n{end}\nprint('well')"):
        assert (code, out.strip()) == (0, "well"), err
        assert "terminate called" not in err


def test_a_group_that_is_made_again(two):
    """Trap 4: keys of the former group are still in the store, and its name is the same."""
    again = """
for turn in range(3):
    dist.all_reduce(x)
    if turn == 1 and rank == 0:
        dist.isend(x, 1)  # a communicator that the other rank has no part in
    dist.destroy_process_group()
    begin()
dist.all_reduce(x)
assert x.tolist() == [16, 16]
dist.destroy_process_group()
print("well")
"""
    for code, out, err in two(again):
        assert (code, out.strip()) == (0, "well"), err


def test_an_error_reaches_the_other_rank(two):
    raising = """
dist.all_reduce(x)
if rank == 1:
    raise ValueError("the data is gone")
dist.all_reduce(x)
"""
    (code, _, err), (other, _, other_err) = two(raising)
    assert (code, other) == (1, 1)
    assert "the data is gone" in other_err
    assert "DistBackendError" in err
    assert "uncaught ValueError: the data is gone" in err


@pytest.mark.parametrize(
    ("call", "end", "how"),
    [
        ("dist.all_reduce(x)", "dist.destroy_process_group()", "destroyed its group"),
        ("dist.barrier()", "sys.exit(0)", "ended"),
        (
            "dist.recv(x, 1)",
            "raise ValueError('no data')",
            r"ended \(uncaught ValueError: no data\)",
        ),
    ],
)
def test_a_rank_that_leaves_before_the_first_call_is_lost_at_once(two, call, end, how):
    check_lost(two, call, end, how)


@pytest.mark.parametrize("call", ["dist.all_reduce(x)", "dist.barrier()", "dist.recv(x, 1)"])
@pytest.mark.parametrize("pause", [0, 1])
def test_a_rank_that_is_killed_before_the_first_call_is_lost_at_once(two, call, pause):
    kill = f"import time; time.sleep({pause}); os.kill(os.getpid(), 9)"
    check_lost(two, call, kill, r"died \(process \d+\)")


def check_lost(two, call, end, how):
    first = f"""
if rank == 1:
    {end}
else:
    import time
    began = time.monotonic()
    try:
        {call}
    except RuntimeError as error:
        print(error)
        assert time.monotonic() - began < 15, "waited for the group's timeout"
    dist.destroy_process_group()
"""
    (code, out, err), _ = two(first)
    assert code == 0, err
    assert "Connection closed : " in out
    name = call[5:].partition("(")[0]
    assert re.search(rf"rank 1 {how}, without making call 1, {name}", out), out
    assert "Broken pipe" not in err


def test_a_killed_rank_is_named(two):
    killed = """
dist.all_reduce(x)
if rank == 1:
    os.kill(os.getpid(), 9)
dist.all_reduce(x)
"""
    (code, _, err), (other, *_) = two(killed)
    assert (code, other) == (1, -9)
    assert "rank 1 died" in err


def test_helper_threads_do_not_hold_the_store(two):
    """Trap 3: a wait inside the store's client holds back every other call of the process."""
    waiting = """
if rank == 0:
    work = dist.irecv(torch.zeros(2), 1)  # a thread waits for a rank that comes later
    import time
    time.sleep(0.3)
    store.set("go", "1")
else:
    store.wait(["go"])
    dist.send(torch.ones(2), 0)
if rank == 0:
    work.wait()
dist.barrier()
dist.destroy_process_group()
print("well")
"""
    for code, out, err in two(waiting):
        assert (code, out.strip()) == (0, "well"), err


def test_a_receive_from_any_rank_ends_when_all_have_left(two):
    leaving = """
if rank == 1:
    dist.send(x, 0)
    dist.destroy_process_group()
else:
    assert dist.recv(x) == 1
    for turn in range(2):
        try:
            dist.recv(x)
        except RuntimeError as error:
            assert " closed " in str(error), error
        else:
            raise AssertionError("received from nobody")
    dist.destroy_process_group()
print("well")
"""
    for code, out, err in two(leaving):
        assert (code, out.strip()) == (0, "well"), err
