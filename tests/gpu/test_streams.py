"""Which stream a call goes to."""

import ctypes
import sys
import types

import numpy as np
import pytest

from ringcoll.cuda.streams import foreign_streams, stream_of, stream_pointer
from ringcoll.errors import ArgumentError, ArgumentTypeError

cupy = pytest.importorskip("cupy")


class Spoken:
    """A stream by its protocol alone."""

    def __init__(self, said):
        self.said = said

    def __cuda_stream__(self):
        return self.said


class Numba:
    __module__ = "numba.cuda.cudadrv.driver"

    def __init__(self, handle, external=False):
        self.handle, self.external = ctypes.c_void_p(handle), external


@pytest.mark.parametrize(
    ("stream", "handle"),
    [
        (0, 0),
        (np.int64(5), 5),
        (types.SimpleNamespace(ptr=1234, device_id=-1), 1234),
        (cupy.cuda.Stream.null, 0),
        (types.SimpleNamespace(cuda_stream=99), 99),
        (Spoken((0, 77)), 77),
        (Numba(55), 55),
        (Numba(None), 0),
    ],
    ids=["int", "numpy", "ptr", "cupy", "torch", "spoken", "numba", "numba's default"],
)
def test_streams_of_any_library(stream, handle):
    assert stream_pointer(stream, ordinal=0) == handle


def test_what_keeps_a_stream_alive():
    """A handle keeps nothing, and CuPy's class for streams of others does not either."""
    owner = types.SimpleNamespace(ptr=1234, device_id=-1)
    assert stream_of(owner) == (1234, owner)
    assert stream_of(1234) == (1234, None)
    assert stream_of(2) == (2, None)  # another stream in each thread
    (_, kept), (_, own) = stream_of(0), stream_of(types.SimpleNamespace(cuda_stream=0, stream_id=0))
    assert kept is own is not None  # nobody destroys the default stream
    torchs = types.SimpleNamespace(cuda_stream=1234, stream_id=35)
    assert stream_of(torchs) == (1234, torchs)
    torchs.stream_id = torchs.cuda_stream  # torch.cuda.ExternalStream, also where it is current
    assert stream_of(torchs) == (1234, None)
    numbas = Numba(1234)
    assert stream_of(numbas) == (1234, numbas)
    assert stream_of(Numba(1234, external=True)) == (1234, None)
    foreign = foreign_streams()
    if foreign is not None:
        with pytest.warns(DeprecationWarning):
            theirs = foreign(1234)
        assert stream_of(theirs) == (1234, None)


@pytest.mark.parametrize(
    "stream",
    [True, 2.5, "0", object(), Spoken(None), Spoken((0, "x"))],
    ids=["bool", "float", "str", "object", "says None", "says no number"],
)
def test_what_is_no_stream_is_refused(stream):
    with pytest.raises(ArgumentTypeError, match="all_reduce on rank 1: stream is a "):
        stream_of(stream, where="all_reduce on rank 1")


def test_streams_of_other_devices_are_refused():
    with pytest.raises(ArgumentError, match="stream=-1"):
        stream_pointer(-1)
    of_one = types.SimpleNamespace(ptr=8, device_id=1)
    assert stream_pointer(of_one) == stream_pointer(of_one, ordinal=1) == 8
    with pytest.raises(ArgumentError, match="is on device 1, but this rank is on device 0"):
        stream_pointer(of_one, ordinal=0)
    torchs = types.SimpleNamespace(cuda_stream=8, device=types.SimpleNamespace(index=1))
    with pytest.raises(ArgumentError, match="device 1"):
        stream_pointer(torchs, ordinal=0)


def test_the_current_stream_of_the_library(monkeypatch):
    asked = []

    def current(device_id=-1):
        asked.append(device_id)
        return types.SimpleNamespace(ptr=60)

    monkeypatch.setattr("cupy.cuda.get_current_stream", current)
    assert stream_pointer(None) == 60
    assert stream_pointer(None, ordinal=2) == 60
    assert asked == [-1, 2]
    speaks = types.SimpleNamespace(__cuda_array_interface__={"stream": 2})
    silent = types.SimpleNamespace(__cuda_array_interface__={"stream": None})
    assert stream_pointer(None, speaks) == 2
    assert stream_pointer(None, silent) == 60


def test_torchs_current_stream(monkeypatch):
    class Tensor:
        pass

    cuda = types.SimpleNamespace(current_stream=lambda device: types.SimpleNamespace(cuda_stream=7))
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(Tensor=Tensor, cuda=cuda))
    assert stream_pointer(None, Tensor(), ordinal=0) == 7
