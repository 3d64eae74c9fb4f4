"""What is said of how to install more, and of a GPU that stays idle."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

import ringcoll
from ringcoll import folders
from ringcoll.communicator.setup import devices

ROOT = Path(__file__).parents[2]


def test_an_extra_is_added_to_the_checkout_or_to_the_wheel(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    assert folders.pip_install("mpi") == "pip install -e '.[mpi]'"
    monkeypatch.chdir(tmp_path)
    assert folders.pip_install("mpi") == f"pip install -e '{ROOT}[mpi]'"
    wheel = tmp_path / "site-packages" / "ringcoll" / "folders.py"
    monkeypatch.setattr(folders, "__file__", str(wheel))
    assert folders.pip_install("plot") == "pip install 'ringcoll[plot]'"


@pytest.fixture
def no_cupy(monkeypatch):
    monkeypatch.delenv("RINGCOLL_DEVICE", raising=False)
    monkeypatch.setattr(devices, "available", lambda: "CuPy cannot be imported")
    monkeypatch.setattr(devices, "devices", lambda: ())


def test_a_gpu_that_stays_idle_is_a_warning_with_the_remedy(monkeypatch, no_cupy):
    monkeypatch.setattr(devices, "_has_driver", lambda: True)
    with pytest.warns(RuntimeWarning) as said:
        comms = ringcoll.init_all(2)
    assert [str(warning.message) for warning in said] == [
        "init: device='auto' is the CPU: rank 0 has no GPU (CuPy cannot be imported), though its "
        "host has an NVIDIA driver; pass device='cpu' if that is what you want"
    ]
    for comm in comms:
        comm.close()


@pytest.mark.parametrize(("driver", "device"), [(False, "auto"), (True, "cpu")])
def test_nothing_is_said_without_a_gpu_or_where_the_cpu_was_wanted(
    monkeypatch, no_cupy, driver, device
):
    monkeypatch.setattr(devices, "_has_driver", lambda: driver)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (comm,) = ringcoll.init_all(1, device=device)
    assert comm.device == "cpu"
    comm.close()
