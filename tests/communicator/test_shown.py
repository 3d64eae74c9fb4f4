"""What a debugger and a notebook show, and what is said of names that are nearly right."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest

import ringcoll
from ringcoll.dtypes import ReduceOp, op_of
from ringcoll.topology.document import write
from ringcoll.topology.presets import preset_document

# -- what is shown -------------------------------------------------------------------------------


def test_a_communicator_shows_its_rank_device_tag_and_state():
    comms = ringcoll.init_all(2, device="cpu", tag="dp")
    assert repr(comms[1]) == "<ringcoll.Communicator rank 1 of 2 on cpu, tag 'dp'>"
    comms[0].close()
    assert repr(comms[0]) == "<ringcoll.Communicator rank 0 of 2 on cpu, tag 'dp', closed>"
    with pytest.raises(ringcoll.RankLostError):
        comms[1].barrier()
    assert repr(comms[1]).endswith("tag 'dp', broken by RankLostError>")
    comms[1].close()


def test_work_shows_its_call_and_how_it_stands():
    (comm,) = ringcoll.init_all(1, device="cpu")
    gate = threading.Event()
    comm._state.submit(lambda: print(gate.wait()), ())
    work = comm.all_reduce(np.ones(3), async_op=True, tag="loss")
    wanted = "<ringcoll.Work all_reduce count=3 dtype=float64 op=sum tag=loss: "
    assert repr(work) == wanted + "running>"
    gate.set()
    work.wait()
    assert repr(work) == wanted + "finished>"
    failed = comm._state.submit(lambda: print(1 // 0), ())
    with pytest.raises(ZeroDivisionError):
        failed.wait()
    assert "failed: ZeroDivisionError: " in repr(failed)
    with ringcoll.group():
        pending = comm.barrier(async_op=True)
        assert repr(pending) == "<ringcoll.Work of a group: not started>"
    assert repr(pending) == "<ringcoll.Work of a group: finished>"
    comm.close()


def star(nranks):
    raise NotImplementedError


def test_config_and_operators_show_what_is_set():
    assert repr(ringcoll.Config()) == "Config()"
    config = ringcoll.Config(algorithm=star, slices=4, tag="x")
    assert repr(config) == "Config(algorithm=star, slices=4, tag='x')"
    assert repr(op_of("max")) == "ReduceOp('max')"
    assert repr(ringcoll.premul_sum(0.5)) == "premul_sum(0.5)"


def test_a_topology_shows_its_machine(tmp_path):
    path = str(tmp_path / "machine.xml")
    (tmp_path / "machine.xml").write_text(write(preset_document("dgx1-v100")), encoding="utf-8")

    def work(comm):
        return repr(comm.topology), comm.topology._repr_html_()

    shown, html = ringcoll.spawn(work, 2, device="cpu", topo_file=path)[0]
    assert re.fullmatch(r"<ringcoll\.Topology: .*; 2 GPUs; \d+ rings?, [\d.]+ GB/s>", shown)
    assert html.count("<table>") == 2
    assert "<td>GPU0</td>" in html
    assert "<td>0 → 1</td>" in html
    (alone,) = ringcoll.init_all(1, device="cpu")
    assert alone.topology._repr_html_().startswith("<pre>&lt;ringcoll.Topology: not known")
    alone.close()


# -- near misses ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("allreduce", "'all_reduce'"),
        ("Allreduce", "'all_reduce'"),
        ("reduceScatter", "'reduce_scatter'"),
        ("Reduce_scatter_block", "'reduce_scatter'"),
        ("all_gather_into_tensor", "'all_gather'"),
        ("Allgatherv", "'all_gather_v'"),
        ("bcast", "'broadcast'"),
        ("Iallreduce", "'all_reduce' with async_op=True"),
        ("isend", "'send' with async_op=True"),
        ("ibcast", "'broadcast' with async_op=True"),
        ("size", "'nranks'"),
        ("Get_size", "'nranks'"),
        ("world_size", "'nranks'"),
        ("Get_rank", "'rank'"),
        ("brodcast", "'broadcast'"),
        ("Free", "'close'"),
        ("Iprobe", "'probe' with wait=False"),
        ("iprobe", "'probe' with wait=False"),
    ],
)
def test_a_method_of_another_library_names_ours(name, meant):
    (comm,) = ringcoll.init_all(1, device="cpu")
    with comm, pytest.raises(AttributeError) as caught:
        getattr(comm, name)
    assert str(caught.value) == (
        f"'Communicator' object has no attribute '{name}'; did you mean {meant}?"
    )


def test_python_adds_no_hint_of_its_own():
    program = "import ringcoll; ringcoll.init_all(1, device='cpu')[0].allreduce"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.stderr.lower().count("did you mean") == 1


def test_a_name_like_no_other_is_left_without_a_hint():
    (comm,) = ringcoll.init_all(1, device="cpu")
    with comm:
        for name in ("weights", "i", "_repr_html_", "__array__"):
            with pytest.raises(AttributeError, match=f"no attribute '{name}'$"):
                getattr(comm, name)
        assert not hasattr(comm, "step")


@pytest.mark.parametrize(
    ("op", "meant"),
    [
        ("mean", "avg"),
        ("SUM", "sum"),
        ("ReduceOp.MAX", "max"),
        ("add", "sum"),
        ("product", "prod"),
        ("maximum", "max"),
        ("xor", "bxor"),
        ("Avg", "avg"),
        ("summ", "sum"),
        (np.sum, "sum"),
        (np.multiply, "prod"),
        (np.logical_or, "lor"),
        (np.bitwise_and, "band"),
        (max, "max"),
    ],
)
def test_an_operator_of_another_library_names_ours(op, meant):
    (comm,) = ringcoll.init_all(1, device="cpu")
    x = np.ones(3)
    with comm, pytest.raises(ringcoll.ArgumentError) as caught:
        comm.all_reduce(x, op=op)
    assert str(caught.value).startswith("all_reduce on rank 0: op=")
    assert str(caught.value).endswith(f"; did you mean {meant!r}?")
    assert isinstance(op_of(meant), ReduceOp)


def test_operators_of_mpi4py_name_ours():
    mpi = pytest.importorskip("mpi4py.MPI")
    for name in ("SUM", "PROD", "MIN", "MAX", "LAND", "LOR", "BAND", "BOR", "BXOR"):
        with pytest.raises(ringcoll.ArgumentError, match=f"; did you mean '{name.lower()}'"):
            op_of(getattr(mpi, name))
    with pytest.raises(ringcoll.ArgumentError, match=r"premul_sum\(scalar\)$"):
        op_of(mpi.MAXLOC)


def test_in_place_of_mpi4py_says_what_to_write():
    mpi = pytest.importorskip("mpi4py.MPI")
    (comm,) = ringcoll.init_all(1, device="cpu")
    x = np.ones(3)
    calls: dict[str, Any] = {
        r"all_reduce.*: sendbuf is MPI.IN_PLACE; write all_reduce\(x\)": comm.all_reduce,
        r"all_gather.*: sendbuf is MPI.IN_PLACE; write all_gather\(None, x\)": comm.all_gather,
        r"all_gather.*: recvbuf is MPI.IN_PLACE; write all_gather\(None, x\)": (
            lambda a, b: comm.all_gather(b, a)
        ),
        r"all_gather_v.*; write all_gather_v\(None, x, counts\)": (
            lambda a, b: comm.all_gather_v(a, b, [3])
        ),
        r"scatter.*: recvbuf is MPI.IN_PLACE; leave recvbuf out": lambda a, b: comm.scatter(b, a),
        r"reduce_scatter_v.*; write reduce_scatter_v\(x, None, counts\)": (
            lambda a, b: comm.reduce_scatter_v(a, b, [3])
        ),
        r"all_to_all_v.*: sendbuf is MPI.IN_PLACE; this call is never in place": (
            lambda a, b: comm.all_to_all_v(a, [3], b, [3])
        ),
        r"sendrecv.*: recvbuf is MPI.IN_PLACE; this call is never in place": (
            lambda a, b: comm.sendrecv(b, 0, a, 0)
        ),
    }
    for match, call in calls.items():
        with pytest.raises(ringcoll.ArgumentTypeError, match=match):
            call(mpi.IN_PLACE, x)
    comm.close()


def test_a_tag_by_position_is_told_that_there_are_none():
    comm: Any = ringcoll.init_all(1, device="cpu")[0]  # types refuse these calls too
    x, y = np.ones(3), np.ones(3)
    calls = {
        "send(buf, dest)": lambda: comm.send(x, 0, 0),
        "recv(buf, source)": lambda: comm.recv(x, 0, 7),
        "sendrecv(sendbuf, dest, recvbuf, source)": lambda: comm.sendrecv(x, 0, 0, y, 0),
    }
    for right, call in calls.items():
        with pytest.raises(ringcoll.ArgumentTypeError, match="messages have no tags") as refused:
            call()
        assert f"; write {right}, and options by keyword" in str(refused.value)
    comm.close()


def test_a_negative_source_names_any():
    (comm,) = ringcoll.init_all(1, device="cpu")
    for call in (lambda: comm.recv(np.ones(3), -1), lambda: comm.probe(-2)):
        with pytest.raises(ringcoll.ArgumentError, match=r"or ringcoll\.ANY for any of them$"):
            call()
    with pytest.raises(ringcoll.ArgumentError, match=r"pass one from 0 to 0$"):
        comm.send(np.ones(3), -1)
    comm.close()


def test_a_collective_to_explain_is_hinted():
    (comm,) = ringcoll.init_all(1, device="cpu")
    with comm, pytest.raises(ringcoll.ArgumentError, match="did you mean all_reduce"):
        comm.explain("allreduce", 8)
