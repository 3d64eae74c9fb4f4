"""The parts of the scripts that can be judged without installing anything."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMANDS = [*(p for p in (ROOT / "scripts").iterdir() if not p.suffix), ROOT / ".ci" / "run"]


def shell(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` after sourcing the scripts' common part, with further variables set."""
    return subprocess.run(
        ["sh", "-eu", "-c", f'root=$1; . "$root/scripts/environment.sh"\n{code}', "sh", str(ROOT)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def program(folder: Path, name: str, body: str) -> str:
    """Put a shell program into ``folder``; returns a PATH on which it comes first."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    path.chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


@pytest.mark.parametrize("path", COMMANDS, ids=lambda p: p.name)
def test_commands_are_executable_and_parse(path):
    assert os.access(path, os.X_OK)
    assert subprocess.run(["sh", "-n", str(path)], check=False).returncode == 0


@pytest.mark.parametrize(
    ("driver", "extra"),
    [("580.65.06", "cu13"), ("610.1", "cu13"), ("575.57.08", "cu12"), ("99.1", "cu12")],
)
def test_extra_follows_the_driver(tmp_path, driver, extra):
    path = program(tmp_path, "nvidia-smi", f"echo {driver}; echo {driver}")
    result = shell("cuda_extra", PATH=path)
    assert (result.stdout, result.returncode) == (f"{extra}\n", 0)


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has a driver")
def test_no_extra_without_a_driver(tmp_path):
    path = program(tmp_path, "nvidia-smi", "echo NVIDIA-SMI has failed; exit 9")
    result = shell("cuda_extra", PATH=path)
    assert (result.stdout, result.stderr, result.returncode) == ("", "", 0)


@pytest.mark.parametrize("has_cupy", [True, False])
def test_a_missing_gpu_is_said_in_one_line(tmp_path, has_cupy):
    if not has_cupy and Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has a driver")
    # A python that imports what it is asked for, or nothing, and never finds a GPU.
    sees = 'case "$*" in *available*) echo its driver is old;; esac' if has_cupy else "exit 1"
    program(tmp_path, "nvidia-smi", "echo NVIDIA-SMI has failed; exit 9")
    result = subprocess.run(
        [str(ROOT / "scripts" / "test-gpu")],
        env={**os.environ, "PATH": program(tmp_path, "python3", sees)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (result.returncode, result.stdout) == (5, "")
    why = "its driver is old" if has_cupy else "there is no GPU here"
    assert result.stderr == f"scripts/test-gpu: {why}\n"


@pytest.mark.parametrize(
    ("names", "enough"),
    [
        (["g++", "gcc"], True),
        (["clang++", "clang"], True),
        (["c++", "cc"], True),
        (["g++"], False),
        (["cc"], False),
        ([], False),
    ],
)
def test_a_compiler_is_installed_where_there_is_none(tmp_path, names, enough):
    for name in names:
        program(tmp_path, name, "exit 0")
    code = (
        "PATH=$only; cuda_extra() { echo cu12; }; environment() { echo $#: $*; }; dev_environment"
    )
    result = shell(code, only=str(tmp_path))
    group = "5: dev --editable .[cu12] --group dev"
    wanted = group if enough else f"{group.replace('5', '7')} --group compiler"
    assert (result.stdout, result.stderr, result.returncode) == (f"{wanted}\n", "", 0)


@pytest.mark.parametrize(
    ("release", "extra", "wanted"),
    [
        ("2.13", "", "torch --editable . --group torch"),
        ("2.13", "cu13", "torch --editable .[cu13] --group torch"),
        ("2.11", "", "torch-2.11 --editable . --group torch-suite torch==2.11.*"),
        ("newest", "", "torch-newest --editable . --group torch-suite torch"),
    ],
)
def test_each_release_of_torch_has_its_environment(release, extra, wanted):
    code = f"cuda_extra() {{ echo {extra}; }}; environment() {{ echo $*; }}"
    result = shell(f"{code}; torch_environment {release}")
    assert (result.stdout, result.stderr, result.returncode) == (f"{wanted}\n", "", 0)


def test_the_release_of_torch_in_ci_is_the_one_that_the_scripts_name():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert 'torch = ["torch==2.13.*"' in text
    for name in ("test-torch", "torch_suite"):
        assert "2.13" in (ROOT / "scripts" / name).read_text(encoding="utf-8")


def test_old_python_is_refused(tmp_path):
    names = ["python", "python3", *(f"python3.{minor}" for minor in range(10, 15))]
    for name in names:
        path = program(tmp_path, name, "exit 1")
    result = shell("find_python", PATH=path)
    assert result.returncode == 1
    assert "Python 3.10 or newer" in result.stderr


def test_environment_is_found_again_only_if_nothing_changed(tmp_path):
    # A python that only records what it is asked stands in for the environment's own.
    code = """
    root=$HOME/clone; mkdir -p "$root/scripts" "$root/.venvs/toy/bin"
    echo 1 >"$root/pyproject.toml"; echo 1 >"$root/scripts/environment.sh"
    make_environment() { echo made "$@"; mkdir -p "$env/bin"; echo "$wanted" >"$env/ready"
        printf '#!/bin/sh\\n' >"$env/bin/python"; chmod +x "$env/bin/python"; }
    environment toy this; environment toy this; environment toy that; environment toy that
    echo 2 >"$root/pyproject.toml"; environment toy that
    rm "$env/ready"; environment toy that
    echo "$python"
    """
    result = shell(code, HOME=str(tmp_path))
    python = tmp_path / "clone/.venvs/toy/bin/python"
    assert result.stdout.splitlines() == [
        "made this",
        "made that",
        "made that",
        "made that",
        str(python),
    ]


def test_shared_folder_of_another_user_is_refused(tmp_path):
    # Where the private folder exists already, it must be the user's own and no link.
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f"ringcoll-{os.getuid()}").symlink_to(tmp_path / "elsewhere")
    result = shell("name=toy; place temporary", TMPDIR=str(tmp_path))
    assert result.returncode == 1


def test_under_workers_a_test_is_named_when_it_fails(tmp_path):
    (tmp_path / "test_two.py").write_text(
        "def test_bad():\n    raise OSError\ndef test_good(): pass\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider"]
    command += ["--numprocesses=1", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    early, heading, _ = result.stdout.partition("= FAILURES =")
    assert heading
    assert re.search(r"^FAILED \S*test_two.py::test_bad \(call\)$", early, re.MULTILINE)
    assert "test_good" not in early
