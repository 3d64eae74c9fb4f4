"""cupyx.distributed's methods on CPU ranks, and the same names and arguments as there."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import logging
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import ringcoll
from ringcoll.cupyx import NCCLBackend, RingcollBackend, init_process_group
from ringcoll.errors import ArgumentError, ArgumentTypeError, RankLostError
from tests.adapters.ports import free_port

ROOT = Path(__file__).parents[2]


def among(nranks, work):
    """What ``work(backend)`` returns on each of the ranks, which are threads."""

    def rank(comm):
        return work(RingcollBackend.from_communicator(comm))

    return ringcoll.spawn(rank, nranks, device="cpu", timeout=20)


def theirs():
    """The methods of cupyx's class with the names of their arguments; not run, only read."""
    spec = importlib.util.find_spec("cupyx")
    if spec is None or spec.origin is None:
        pytest.skip("CuPy is not installed")
    source = Path(spec.origin).parent / "distributed" / "_nccl_comm.py"
    tree = ast.parse(source.read_text(encoding="utf-8"))
    kinds = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    return {
        node.name: [argument.arg for argument in node.args.args[1:]]
        for node in kinds["NCCLBackend"].body
        if isinstance(node, ast.FunctionDef)
        and (node.name == "__init__" or not node.name.startswith("_"))
    }


def test_methods_and_arguments_are_cupyxs():
    found = theirs()
    assert {"all_reduce", "send_recv", "all_to_all", "barrier"} <= found.keys()
    for name, arguments in found.items():
        ours = inspect.signature(getattr(RingcollBackend, name)).parameters
        plain = [n for n, p in ours.items() if p.kind is not p.KEYWORD_ONLY and n != "self"]
        assert plain == arguments, name
    assert NCCLBackend is RingcollBackend
    assert callable(RingcollBackend.stop)


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize(("op", "wanted"), [("sum", 6), ("prod", 6), ("min", 1), ("max", 3)])
def test_all_reduce_and_reduce(order, op, wanted):
    def work(backend):
        x = np.full((2, 3), backend.rank + 1, "float32", order)
        y, z = np.zeros_like(x), np.zeros_like(x)
        backend.all_reduce(x, y, op)
        backend.reduce(x, z, 1, op)
        backend.all_reduce(x, x, op)
        return y.tolist(), z.tolist(), x.tolist()

    full, none = [[wanted] * 3] * 2, [[0] * 3] * 2
    assert among(3, work) == [(full, full if r == 1 else none, full) for r in range(3)]


def test_elements_keep_their_places_in_fortran_order():
    def work(backend):
        x = np.asfortranarray(np.arange(6, dtype="int32").reshape(2, 3))
        backend.all_reduce(x, x)
        return x.tolist()

    assert among(2, work) == [[[0, 2, 4], [6, 8, 10]]] * 2


def test_counts_take_the_first_elements():
    def work(backend):
        x = np.arange(10, dtype="int64")
        part, whole = np.full(4, -1), np.full(10, -1)
        backend.reduce_scatter(x, part, 3)
        backend.all_gather(x + 100 * backend.rank, whole, 2)
        return part.tolist(), whole.tolist()

    gathered = [0, 1, 100, 101, 200, 201, -1, -1, -1, -1]
    assert among(3, work) == [
        ([3 * (3 * r), 3 * (3 * r + 1), 3 * (3 * r + 2), -1], gathered) for r in range(3)
    ]


def test_rooted_calls_and_all_to_all():
    def work(backend):
        n, rank = 3, backend.rank
        root = 2
        rows = np.arange(6).reshape(n, 2) + 100 * rank
        mine, gathered, turned = np.zeros(2, int), np.zeros((n, 2), int), np.zeros((n, 2), int)
        backend.scatter(rows if rank == root else None, mine, root)
        backend.gather(mine, gathered if rank == root else None, root)
        backend.all_to_all(rows, turned)
        x = np.full(2, rank)
        backend.broadcast(x, 1)
        return mine.tolist(), gathered.tolist(), turned.tolist(), x.tolist()

    for rank, (mine, gathered, turned, x) in enumerate(among(3, work)):
        assert mine == [200 + 2 * rank, 201 + 2 * rank]
        assert gathered == ([[200, 201], [202, 203], [204, 205]] if rank == 2 else [[0, 0]] * 3)
        assert turned == [[100 * p + 2 * rank, 100 * p + 2 * rank + 1] for p in range(3)]
        assert x == [1, 1]


def test_point_to_point():
    def work(backend):
        peer, x = 1 - backend.rank, np.full(4, backend.rank, "float64")
        y = np.empty_like(x)
        backend.send_recv(x, y, peer)
        z = np.empty_like(x)
        if backend.rank:
            backend.recv(z, peer)
        else:
            backend.send(x + 7, peer)
            z = x
        backend.barrier()
        return y.tolist(), z.tolist()

    assert among(2, work) == [([1.0] * 4, [0.0] * 4), ([0.0] * 4, [7.0] * 4)]


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda b, x: b.all_reduce(x, x, "mean"), ArgumentError, "op='mean' is not one of"),
        (lambda b, x: b.all_to_all(x, x), ArgumentError, "wanted (1, ...)"),
        (lambda b, x: b.scatter(x[0], x, 0), ArgumentError, "scatter on rank 0: in_array"),
        (lambda b, x: b.all_gather(x, x, 7), ArgumentError, "has 6 elements, and count asks for 7"),
        (
            lambda b, x: b.all_gather(x[:, ::2], x, 1),
            ArgumentError,
            "in_array of shape (2, 2) with",
        ),
        (lambda b, x: b.all_reduce(x, x, "sum", 3), ArgumentError, "CPU ranks have no streams"),
        (lambda b, x: b.broadcast([1]), ArgumentTypeError, "in_out_array is a list"),
        (lambda b, x: b.all_reduce(x, x[0]), ArgumentError, "out_array has 3 elements, and in_ar"),
        (lambda b, x: b.reduce(x, [1]), ArgumentTypeError, "reduce on rank 0: out_array is a"),
        (lambda b, x: b.all_reduce([1], x), ArgumentTypeError, "in_array is a list"),
        (lambda b, x: b.all_reduce(x, x.astype(int)), ArgumentTypeError, "in_array and out_array"),
        (lambda b, x: b.all_reduce(x[:, ::2], x), ArgumentError, "np.ascontiguousarray(in_array)"),
        (lambda b, x: b.send([1], 0), ArgumentTypeError, "array is a list"),
        (lambda b, x: b.recv([1], 0), ArgumentTypeError, "out_array is a list"),
        (lambda b, x: b.recv(x, 3), ArgumentError, "peer=3 is no rank"),
        (lambda b, x: b.send_recv(x, x, 0), ArgumentError, "out_array overlaps in_array"),
        (
            lambda b, x: b.scatter(np.asfortranarray(np.ones((1, 2, 3))), x, 0),
            ArgumentError,
            "numpy.ascontiguousarray(in_array)",
        ),
    ],
)
def test_wrong_arguments_are_refused(call, kind, words):
    with ringcoll.init_all(1, device="cpu")[0] as comm:
        backend = RingcollBackend.from_communicator(comm)
        with pytest.raises(kind) as caught:
            call(backend, np.zeros((2, 3)))
    assert words in str(caught.value)
    assert not re.search(r"\b(sendbuf|recvbuf|buf|dest|source|sendrecv)\b", str(caught.value))
    assert ".T" not in str(caught.value)
    assert isinstance(caught.value, RuntimeError)


def test_rows_in_fortran_order_are_refused_with_what_is_right():
    def work(backend):
        x = np.asfortranarray(np.arange(6.0).reshape(2, 3))
        texts = []
        for call in (backend.all_to_all, backend.scatter, backend.gather):
            row = x if call == backend.all_to_all else np.zeros(3)
            pair = (row, x) if call == backend.gather else (x, row)
            if backend.rank == 0:
                with pytest.raises(ArgumentError) as caught:
                    call(*pair)
                texts.append(str(caught.value))
        return texts

    texts = among(2, work)[0]
    assert len(texts) == 3
    for text in texts:
        assert "is in Fortran order, where the ranks' rows are not contiguous" in text
        assert "pass numpy.ascontiguousarray(" in text


@pytest.mark.parametrize("order", ["C", "F"])
def test_a_larger_out_array_keeps_the_rest(order):
    def work(backend):
        x, y, z = np.ones((2, 3)), np.full((3, 4), -1.0, order=order), np.full(8, -1.0)
        backend.all_reduce(x, y)
        backend.reduce(x, z, 1)
        return y.ravel(order).tolist(), z.tolist()

    got = among(2, work)
    assert [y for y, _ in got] == [[2.0] * 6 + [-1.0] * 6] * 2
    assert [z for _, z in got] == [[-1.0] * 8, [2.0] * 6 + [-1.0] * 2]


def test_errors_are_runtime_errors_with_all_that_they_are():
    zero, one = ringcoll.init_all(2, device="cpu")
    one.close()
    with pytest.raises(RuntimeError) as caught:
        RingcollBackend.from_communicator(zero).barrier()
    error = caught.value
    assert isinstance(error, RankLostError)
    assert (type(error).__name__, error.left) == ("RankLostError", 1)
    again = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert (type(again), str(again)) == (type(error), str(error))


def test_other_backends_and_ranks_are_refused():
    with pytest.raises(ArgumentError, match="this module has 'ringcoll'"):
        init_process_group(2, 0, backend="mpi")
    for n_devices, rank in ((2, 2), (2, -1), (0, 0), (-1, 0)):
        with pytest.raises(ValueError, match=f"rank {rank} of {n_devices}"):
            init_process_group(n_devices, rank, port=1)


def test_nccl_as_the_backend_is_taken_with_a_note(caplog):
    with caplog.at_level(logging.INFO, logger="ringcoll"):
        comm = init_process_group(1, 0, backend="nccl", device="cpu")
    x = np.ones(3)
    comm.all_reduce(x, x)
    comm.stop()
    assert x.tolist() == [1] * 3
    assert "backend='nccl' is taken: the calls go through ringcoll" in caplog.text


PROGRAM = """
import json, sys
import numpy as np
from ringcoll.cupyx import init_process_group

rank, nranks, port = map(int, sys.argv[1:])
comm = init_process_group(nranks, rank, port=port, device="cpu", timeout=30)
x = np.full(5, rank, "int32")
comm.all_reduce(x, x)
comm.barrier()
comm.stop()
print(json.dumps([comm.communicator.nranks, x.tolist()]))
"""


def test_processes_meet_at_a_port():
    words = [sys.executable, "-W", "error", "-c", PROGRAM]
    port = str(free_port())
    ranks = [
        subprocess.Popen([*words, str(r), "2", port], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for r in range(2)
    ]
    outputs = [rank.communicate(timeout=100)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert [json.loads(output) for output in outputs] == [[2, [1] * 5]] * 2


def test_an_option_that_one_rank_has_wrong_is_told_to_the_others():
    words = [sys.executable, "-c", PROGRAM]
    port = str(free_port())
    ranks = [
        subprocess.Popen(
            [*words, str(r), "2", port],
            cwd=ROOT,
            env={**os.environ, **({"RINGCOLL_SLICES": "junk"} if r else {})},
            stderr=subprocess.PIPE,
            text=True,
        )
        for r in range(2)
    ]
    for rank in ranks:
        _, errors = rank.communicate(timeout=100)
        assert rank.returncode == 1
        assert "ArgumentError" in errors
        assert "RINGCOLL_SLICES" in errors
