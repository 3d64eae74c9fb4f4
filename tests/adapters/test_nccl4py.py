"""nccl4py's names and meanings on CPU ranks."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import ringcoll
import ringcoll.nccl4py as nccl
from ringcoll.errors import ArgumentError, ArgumentTypeError, MachineError
from tests.launching import launch

pytestmark = pytest.mark.usefixtures("no_gpus")

ROOT = Path(__file__).parents[2]

# The public names of nccl4py 0.6 that are here, its methods, and what it has beyond them.
NAMES = """NcclDataType NcclRedOp NcclInvalid INT8 CHAR UINT8 INT32 INT UINT32 INT64 UINT64
    FLOAT16 HALF FLOAT32 FLOAT FLOAT64 DOUBLE BFLOAT16 FLOAT8E4M3 FLOAT8E5M2 SUM PROD MAX MIN AVG
    CTAPolicy CommShrinkFlag WindowFlag NCCLConfig NCCLCollConfig NCCLCommProperties Communicator
    RegisteredBufferHandle RegisteredWindowHandle CustomRedOp group group_start group_end
    __version__ VersionInfo get_version show_versions UniqueId get_unique_id get_error_string
    mem_alloc mem_free cupy torch"""
METHODS = """init init_all initialize split shrink destroy abort finalize is_valid nranks device
    rank properties cuda_dev send recv allreduce broadcast reduce allgather reduce_scatter
    alltoall gather scatter register_buffer register_window create_pre_mul_sum close_all_resources
    get_last_error get_async_error"""
ABSENT = """ptr grow get_unique_id revoke suspend resume wait_signal signal put_signal
    create_dev_comm get_mem_stat team_world nvml_dev"""
ABSENT_NAMES = "WaitSignalDesc NCCLTeam DevCommResource GroupSimInfo params dump_params LibraryInfo"


def among(nranks, work):
    """What ``work(comm)`` returns on each of the ranks, which are threads."""

    def rank(comm):
        return work(nccl.Communicator._of(comm))

    return ringcoll.spawn(rank, nranks, device="cpu", timeout=20)


def test_names_are_nccl4pys():
    for name in NAMES.split():
        assert hasattr(nccl, name), name
        assert name in nccl.__all__
    for name in METHODS.split():
        assert hasattr(nccl.Communicator, name), name
    for name in ABSENT.split():
        with pytest.raises(AttributeError, match=r"no '.*docs/coming-from\.md"):
            getattr(nccl.Communicator(), name)
    for name in ABSENT_NAMES.split():
        with pytest.raises(AttributeError, match=r"docs/coming-from\.md"):
            getattr(nccl, name)


def test_what_is_absent_is_documented():
    page = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8")
    for name in (
        "ptr",
        "grow",
        "revoke",
        "suspend",
        "put_signal",
        "create_dev_comm",
        "get_mem_stat",
    ):
        assert f"`{name}`" in page, name


@pytest.mark.parametrize(
    ("op", "wanted"),
    [
        (nccl.SUM, 6),
        (nccl.PROD, 6),
        (nccl.MAX, 3),
        (nccl.MIN, 1),
        (nccl.AVG, 2),
        pytest.param(2, 3, id="a number"),
    ],
)
def test_all_reduce_is_reduce_without_a_root(op, wanted):
    def work(comm):
        x = np.full(4, comm.rank + 1, "float32")
        y, z, at_root = np.zeros(4, "float32"), np.zeros(6, "float32"), np.zeros(4, "float32")
        comm.allreduce(x, y, op)
        comm.reduce(x, z, op)
        comm.reduce(x, at_root if comm.rank == 2 else None, op, 2)
        comm.allreduce(x, x, op)
        return y.tolist(), z.tolist(), at_root.tolist(), x.tolist()

    full = [wanted] * 4
    for rank, (y, z, at_root, x) in enumerate(among(3, work)):
        assert (y, z, x) == (full, [*full, 0, 0], full)  # a larger recvbuf keeps the rest
        assert at_root == (full if rank == 2 else [0] * 4)


def test_gathers_and_scatters():
    def work(comm):
        x = np.full(2, comm.rank, "int32")
        gathered, at_root = np.full(8, -1, "int32"), np.full(6, -1, "int32")
        everywhere, mine = np.full(6, -1, "int32"), np.zeros(2, "int32")
        comm.allgather(x, gathered)
        comm.gather(x, everywhere)
        comm.gather(x, at_root if comm.rank == 1 else None, 1)
        comm.scatter(np.arange(7, dtype="int32") if comm.rank == 0 else None, mine, 0)
        return gathered.tolist(), everywhere.tolist(), at_root.tolist(), mine.tolist()

    for rank, (gathered, everywhere, at_root, mine) in enumerate(among(3, work)):
        assert gathered == [0, 0, 1, 1, 2, 2, -1, -1]
        assert everywhere == gathered[:6]
        assert at_root == (gathered[:6] if rank == 1 else [-1] * 6)
        assert mine == [2 * rank, 2 * rank + 1]


def test_a_remainder_is_left_out():
    def work(comm):
        x, part, turned = np.arange(8.0), np.full(3, -1.0), np.full(8, -1.0)
        comm.reduce_scatter(x, part, nccl.SUM)
        comm.alltoall(x + 10 * comm.rank, turned)
        return part.tolist(), turned.tolist()

    for rank, (part, turned) in enumerate(among(3, work)):
        assert part == [6 * rank, 6 * rank + 3, -1]
        own = [2 * rank, 2 * rank + 1]
        assert turned == [x + 10 * peer for peer in range(3) for x in own] + [-1, -1]


def test_broadcast_and_messages():
    def work(comm):
        x, y = np.full(3, comm.rank), np.full(3, -1)
        comm.broadcast(x if comm.rank == 1 else None, y, 1)
        z, peer = np.zeros(3, int), 1 - comm.rank
        with nccl.group():
            comm.send(x, peer)
            comm.recv(z, peer)
        nccl.group_start()
        comm.allreduce(y, y, nccl.SUM)
        nccl.group_end()
        return y.tolist(), z.tolist()

    assert among(2, work) == [([2] * 3, [1] * 3), ([2] * 3, [0] * 3)]


def test_memory_in_fortran_order_is_taken_as_it_lies():
    def work(comm):
        x = np.asfortranarray(np.arange(6.0).reshape(2, 3))
        y = np.zeros((2, 4), order="F")
        comm.allreduce(x, y, nccl.SUM)
        return y.ravel("F").tolist()

    assert among(2, work) == [[0, 6, 2, 8, 4, 10, 0, 0]] * 2


def test_tensors_of_torch():
    torch = pytest.importorskip("torch")

    def work(comm):
        x, y = torch.full((2, 2), comm.rank + 1.0), torch.zeros(6)
        comm.allreduce(x, y, nccl.SUM)
        made = nccl.torch.empty(2, 3, dtype=torch.int32, morder="F")
        return y.tolist(), tuple(made.shape), made.stride(), nccl.torch.empty([4]).numel()

    assert among(2, work) == [([3.0] * 4 + [0.0] * 2, (2, 3), (1, 2), 4)] * 2


def test_factors():
    def work(comm):
        x = np.ones(2)
        with pytest.raises(ArgumentTypeError, match="pass a number"):
            comm.create_pre_mul_sum("2")
        with pytest.raises(ArgumentError, match="3 elements"):
            comm.create_pre_mul_sum(np.ones(3))
        op = comm.create_pre_mul_sum(np.array([comm.rank + 1.0]), nccl.FLOAT64)
        comm.allreduce(x, x, op)
        op.close()
        with pytest.raises(nccl.NcclInvalid, match="has been closed"):
            comm.allreduce(x, x, op)
        return x.tolist(), op.is_valid

    assert among(2, work) == [([3.0, 3.0], False)] * 2


def test_windows_and_buffers():
    def work(comm):
        x = np.full(100_000, comm.rank + 1.0)
        window = comm.register_window(x, nccl.WindowFlag.COLL_SYMMETRIC)
        buffer = comm.register_buffer(x)
        comm.allreduce(x, x, nccl.SUM)
        handle = window.handle
        window.close()
        window.close()
        buffer.close()
        comm.close_all_resources()
        return handle, window.is_valid, buffer.is_valid, x[5]

    assert among(2, work) == [(1, False, False, 3.0)] * 2


def test_life():
    comms = nccl.Communicator.init_all(3)
    assert [(c.rank, c.nranks, c.cuda_dev, c.is_valid) for c in comms] == [
        (rank, 3, -1, True) for rank in range(3)
    ]
    assert comms[1].properties == nccl.NCCLCommProperties(1, 3, -1)
    assert (comms[0].device, comms[0].communicator.nranks) == ("cpu", 3)
    x = [np.ones(2) for _ in comms]
    with nccl.group():
        for comm, array in zip(comms, x, strict=True):
            comm.allreduce(array, array, nccl.SUM)
    assert [array.tolist() for array in x] == [[3.0] * 2] * 3
    comms[0].finalize()
    assert comms[0].get_async_error() == 0
    assert comms[0].get_last_error() == ""
    comms[2].destroy()
    comms[2].destroy()
    assert not comms[2].is_valid
    assert "not initialized" in repr(comms[2])
    with pytest.raises(nccl.NcclInvalid, match="not initialized, or destroyed"):
        comms[2].allreduce(x[0], x[0], nccl.SUM)
    comms[1].abort()
    assert comms[0].get_async_error() == nccl.Result.RemoteError
    assert nccl.get_error_string(6) == "RemoteError"
    assert "aborted" in comms[0].get_last_error()
    comms[0].abort()


def test_no_gpus_are_no_communicators():
    assert nccl.Communicator.init_all() == []
    assert nccl.Communicator.init_all(0) == []
    assert nccl.Communicator.init_all([]) == []


def test_children():
    def work(comm):
        config = nccl.NCCLConfig(max_ctas=3)
        part = comm.split(None if comm.rank == 2 else 0, -comm.rank, config)
        assert part._options == {"max_sms": 3}
        rest = None if comm.rank == 1 else comm.shrink([1], flag=nccl.CommShrinkFlag.ABORT)
        return (part.is_valid and (part.rank, part.nranks)), rest and (rest.rank, rest.nranks)

    assert among(3, work) == [((1, 2), (0, 2)), ((0, 2), None), (False, (1, 2))]


def test_configurations(caplog):
    config = nccl.NCCLCollConfig(max_ctas=4, alg_selection="RING", force_alg_selection=True)
    assert config.options() == {"max_sms": 4, "algorithm": "ring"}
    assert (config.max_ctas, config.nvls_ctas) == (4, None)
    with caplog.at_level("INFO", logger="ringcoll"):
        assert nccl.NCCLConfig(blocking=True, net_name="IB").options() == {}
    assert "NCCLConfig: blocking, net_name: of no effect" in caplog.text
    with pytest.raises(ArgumentTypeError, match="no field 'blockin'"):
        nccl.NCCLConfig(blockin=True)

    def work(comm):
        x = np.ones(2)
        comm.allreduce(x, x, nccl.SUM, config=config)
        with pytest.raises(TypeError):
            comm.allreduce(x, x, nccl.SUM, streams=3)
        with pytest.raises(nccl.NcclInvalid, match="CPU ranks have no streams"):
            comm.allreduce(x, x, nccl.SUM, stream=3)
        return x.tolist()

    assert among(2, work) == [[2.0, 2.0]] * 2


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda c, x: c.allreduce(x, x[:3], nccl.SUM), "allreduce on rank 0: recvbuf has 3 elem"),
        (lambda c, x: c.gather(x, x[:3]), "allgather on rank 0: recvbuf has 3 elements; pass 4"),
        (lambda c, x: c.reduce(x, x[:3], nccl.SUM, 0), "reduce on rank 0: recvbuf has 3 elements"),
        (lambda c, x: c.reduce_scatter(x[:0], x, nccl.SUM), "sendbuf has 0 elements; pass 1"),
        (lambda c, x: c.scatter(x[:1], x, 0), "scatter on rank 0: sendbuf has 1 elements; pass 4"),
        (lambda c, x: c.allreduce(x, x, 9), "op=9"),
        (lambda c, x: c.allreduce(x, x.astype("f4"), nccl.SUM), "float64 and float32"),
        (lambda c, x: c.allreduce([1], x, nccl.SUM), "sendbuf is a list"),
        (lambda c, x: c.send(x, 5), "dest=5"),
        (lambda c, x: c.initialize(1, 0, nccl.get_unique_id(empty=True)), "is initialized"),
        (lambda c, x: nccl.Communicator(4096), "an NCCL communicator is none of ringcoll's"),
        (lambda c, x: nccl.Communicator.init(1, 0, cast("Any", "id")), "unique_id is a str"),
        (lambda c, x: nccl.Communicator.init(1, 0, nccl.UniqueId()), "the unique id is empty"),
        (lambda c, x: nccl.group_end(), "has begun no group"),
        (lambda c, x: nccl.group_end(simulate=True), "comm.communicator.explain"),
    ],
)
def test_wrong_arguments_are_refused(call, words):
    [comm] = nccl.Communicator.init_all(1)
    with pytest.raises(nccl.NcclInvalid) as caught:
        call(comm, np.zeros(4))
    comm.destroy()
    assert words in str(caught.value)


def test_data_types():
    data_type: Any = nccl.NcclDataType
    assert data_type("float32") is nccl.FLOAT is nccl.FLOAT32
    assert data_type(np.int64) == nccl.INT64 == 4
    assert (nccl.BFLOAT16.itemsize, nccl.FLOAT8E5M2.numpy_dtype.name) == (2, "float8_e5m2")
    with pytest.raises(ArgumentTypeError, match="none of NCCL's"):
        data_type("int16")
    with pytest.raises(ValueError, match="99"):
        data_type(99)


def test_memory_and_versions(capsys):
    buffer = nccl.mem_alloc(64)
    assert (buffer.size, str(buffer.dtype)) == (64, "uint8")
    nccl.mem_free(buffer)
    assert nccl.cupy.empty((2, 3), "int32", order="F").strides == (4, 8)
    nccl.show_versions()
    assert nccl.get_version().ringcoll in capsys.readouterr().out


def test_a_unique_id_travels():
    made = nccl.UniqueId("127.0.0.1:4000:0123")
    received = nccl.get_unique_id(empty=True)
    received.as_ndarray[:] = made.as_ndarray
    pickled = pickle.loads(pickle.dumps(made))  # noqa: S301
    for other in (nccl.UniqueId.from_bytes(bytes(made)), received, pickled):
        assert other.text == made.text == "127.0.0.1:4000:0123"
        assert other.as_bytes == made.as_bytes
    assert "0123" not in repr(made)
    with pytest.raises(ArgumentError, match="1024 bytes, not 3"):
        nccl.UniqueId.from_bytes(b"abc")
    with pytest.raises(MachineError, match="too many addresses"):
        nccl.UniqueId("x" * 1025)


PROGRAM = """
import sys
import numpy as np
import ringcoll.nccl4py as nccl

rank, nranks, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
unique_id = nccl.get_unique_id() if rank == 0 else None
if rank == 0:
    print(bytes(unique_id).hex(), flush=True)
else:
    unique_id = nccl.UniqueId.from_bytes(bytes.fromhex(path))
comm = nccl.Communicator.init(nranks=nranks, rank=rank, unique_id=unique_id)
send, recv = np.full(3, rank + 1.0), np.empty(3)
comm.allreduce(send, recv, nccl.SUM)
print(recv.tolist())
comm.destroy()
"""


def test_processes_meet_by_a_unique_id():
    def rank(number, given):
        words = [sys.executable, "-W", "error", "-c", PROGRAM, str(number), "2", given]
        return subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True)

    first = rank(0, "")
    assert first.stdout is not None
    made = first.stdout.readline().strip()
    outputs = [process.communicate(timeout=100)[0] for process in (first, rank(1, made))]
    assert [output.strip() for output in outputs] == ["[3.0, 3.0, 3.0]"] * 2


UNDER_MPI = """
import numpy as np
from mpi4py import MPI
import ringcoll.nccl4py as nccl

world = MPI.COMM_WORLD
rank, nranks = world.Get_rank(), world.Get_size()
unique_id = world.bcast(nccl.get_unique_id() if rank == 0 else None, root=0)
again = nccl.get_unique_id(empty=rank != 0)
world.Bcast(again.as_ndarray, root=0)
for given in (unique_id, again):
    comm = nccl.Communicator.init(nranks=nranks, rank=rank, unique_id=given)
    x = np.full(3, rank + 1.0)
    comm.allreduce(x, x, nccl.SUM)
    assert x.tolist() == [3.0] * 3, x
    comm.destroy()
print("right")
"""


@pytest.mark.mpi
def test_a_unique_id_goes_by_mpi_as_in_nccl4pys_examples():
    words = [*launch(2), sys.executable, "-W", "error", "-c", UNDER_MPI]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("right") == 2
