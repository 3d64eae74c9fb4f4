"""A wheel takes compiled kernels along, and needs no compiler to find them."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from ringcoll.executors.cpu import small_calls
from ringcoll.executors.cuda import launches
from ringcoll.executors.cuda.cache import KernelCache
from ringcoll.executors.cuda.generic import generic_texts
from ringcoll.executors.cuda.shipped import write_archive
from ringcoll.version import __version__

ROOT = Path(__file__).parents[2]

# CuPy's parts that load a kernel; there is no NVRTC, nor a driver.
CUPY = {
    "__init__.py": "",
    "cuda/__init__.py": """
class Device:
    def __init__(self, ordinal): pass
    def __enter__(self): return self
    def __exit__(self, *error): pass
""",
    "cuda/runtime.py": "def driverGetVersion(): return 12020\n",
    "cuda/driver.py": "CU_FUNC_ATTRIBUTE_NUM_REGS = 4\ndef funcGetAttribute(*words): return 32\n",
    "cuda/function.py": """
class Module:
    def load(self, cubin):
        global loaded
        loaded = cubin
    def get_function(self, name):
        return type("Function", (), {"ptr": 77})
""",
}

PROGRAM = """
import hashlib, json, logging, sys
import ringcoll
from cupy.cuda import function
from ringcoll.communicator.setup.devices import loader
from ringcoll.errors import MachineError
from ringcoll.executors.cuda.generic import generic_texts
kernels = loader(sys.argv[1])
found = []
for text in generic_texts(2):
    assert kernels.stored(text, (9, 0)) and kernels.function(text, 0, (9, 0)) == 77
    found.append(hashlib.sha256(function.loaded).hexdigest())
other = "".join(generic_texts(3))
assert not kernels.available(other, (9, 0))
try:
    kernels.function(other, 0, (9, 0))
except MachineError as error:
    print(json.dumps([ringcoll.__file__, found, str(error)]))
"""


FOR_ALL = {"HATCH_BUILD_NO_HOOKS": "true"}
"""For a wheel that every Python takes."""


def built(checkout: Path, out: Path, env: Mapping[str, str] = FOR_ALL) -> Path:
    """The wheel of a checkout, by hatchling as ``python -m build --wheel`` calls it."""
    pytest.importorskip("hatchling", reason="the group test of pyproject.toml has it")
    out.mkdir()
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    env = {**os.environ, **env}
    subprocess.run(command, cwd=checkout, env=env, capture_output=True, check=True, timeout=100)
    (wheel,) = out.glob("*.whl")
    return wheel


@pytest.fixture
def checkout(tmp_path):
    """The parts of the repository that a wheel is made from."""
    made = tmp_path / "checkout"
    made.mkdir()
    (made / "scripts").mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", ".gitignore", "scripts/build_hook.py"):
        shutil.copy(ROOT / name, made / name)
    ignored = shutil.ignore_patterns("__pycache__", "compiled", "*.so")
    shutil.copytree(ROOT / "ringcoll", made / "ringcoll", ignore=ignored)
    return made


@pytest.mark.slow
def test_kernels_of_a_wheel_are_loaded_without_a_compiler(tmp_path, checkout):
    cache = KernelCache(None)
    texts = list(generic_texts(2))
    cubins = [os.urandom(50_000 + number) for number in range(len(texts))]
    kernels = [(cache.key(text, "sm_90"), cubin) for text, cubin in zip(texts, cubins, strict=True)]
    folder = checkout / "ringcoll" / "compiled"
    write_archive(folder, "sm_90", kernels, version=__version__, nvrtc=(12, 9))
    (folder / "new-left-behind").write_bytes(b"")
    wheel = built(checkout, tmp_path / "dist")
    names = [name for name in zipfile.ZipFile(wheel).namelist() if "/compiled/" in name]
    assert sorted(names) == ["ringcoll/compiled/sm_90.json", "ringcoll/compiled/sm_90.xz"]

    place = tmp_path / "env"
    venv.create(place, with_pip=False)
    (site,) = (place / "lib").glob("python*/site-packages")
    pip = [sys.executable, "-m", "pip", "--python", str(place), "install", "--no-deps"]
    subprocess.run([*pip, "--no-index", str(wheel)], capture_output=True, check=True, timeout=100)
    for name, text in CUPY.items():
        path = site / "cupy" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    for package in (np, ml_dtypes):
        for found in Path(str(package.__file__)).parents[1].glob(f"{package.__name__}*"):
            (site / found.name).symlink_to(found)
    python = place / "bin" / "python"
    said = subprocess.run(
        [python, "-I", "-c", PROGRAM, tmp_path / "cache"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert said.returncode == 0, said.stderr
    where, digests, error = json.loads(said.stdout)
    assert Path(where).is_relative_to(place)
    assert digests == [hashlib.sha256(cubin).hexdigest() for cubin in cubins]
    assert "need CuPy" in error and "pip install" in error
    assert list((tmp_path / "cache").rglob("*.cubin")) == []


@pytest.mark.slow
def test_a_wheel_of_a_bare_checkout_has_none(tmp_path, checkout):
    names = zipfile.ZipFile(built(checkout, tmp_path / "dist")).namelist()
    assert "ringcoll/kernels/simple.cuh" in names
    assert [name for name in names if "compiled/" in name or name.endswith(".cubin")] == []


@pytest.mark.slow
@pytest.mark.skipif(
    small_calls._small_calls is None, reason="without a C compiler there are no compiled parts"
)
def test_a_wheel_has_the_compiled_parts_for_the_python_that_builds_it(tmp_path, checkout):
    wheel = built(checkout, tmp_path / "dist", {})
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(suffix)]
        parts = "cpu/_small_calls", "cuda/_launches"
        assert sorted(names) == [f"ringcoll/executors/{part}{suffix}" for part in parts]
        archive.extractall(tmp_path, names)
    assert f"-cp3{sys.version_info.minor}-" in wheel.name
    for part, wanted in zip(parts, (small_calls, launches), strict=True):
        place = tmp_path / "ringcoll" / "executors" / f"{part}{suffix}"
        spec = importlib.util.spec_from_file_location(place.name.partition(".")[0], place)
        assert spec is not None and spec.loader is not None
        assert importlib.util.module_from_spec(spec).INTERFACE == wanted._INTERFACE


@pytest.mark.slow
def test_a_wheel_that_finds_no_c_compiler_goes_without_compiled_parts(tmp_path, checkout):
    wheel = built(checkout, tmp_path / "dist", {"CC": str(tmp_path / "none"), "LDSHARED": "none"})
    assert wheel.name.endswith("-py3-none-any.whl")
    assert [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")] == []
