"""What the package contains against what it says that it contains."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

import ringcoll

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "ringcoll"
SOURCES = sorted(PACKAGE.rglob("*.py"))
PROGRAMS = [
    *(p for folder in ("ringcoll", "tests", "benchmarks") for p in (ROOT / folder).rglob("*.py")),
    *(p for folder in ("scripts", ".ci") for p in (ROOT / folder).iterdir() if p.is_file()),
]
# From the files, not by importing packages: one that is broken fails its own tests only.
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in SOURCES
    if path.name != "__main__.py"
]
OPTIONAL = ("cupy", "matplotlib", "mpi4py", "torch")
# The backend of torch needs torch; its entry point does not.
OF_TORCH = [name for name in MODULES if f"{name}.".startswith("ringcoll.torch.")]


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.fixture(scope="module")
def trees() -> dict[Path, ast.Module]:
    """The package's files, parsed."""
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES}


# One test for all files: a test for each takes longer to start than to run.
def test_all_names_what_exists():
    assert wrongly_offered(name for name in MODULES if name not in OF_TORCH) == []


def test_modules_that_the_pages_name_need_no_import():
    code = """
import ringcoll
print(ringcoll.errors.WrongResult.__name__, ringcoll.plan.Plan is ringcoll.Plan)
print("ring" in ringcoll.algorithms.ALGORITHMS["all_reduce"])
print(ringcoll.verifier.launches.ProofReport.__name__)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["WrongResult", "True", "True", "ProofReport"]


def test_all_names_what_exists_of_the_backend_of_torch():
    pytest.importorskip("torch")
    assert wrongly_offered(OF_TORCH) == []


def wrongly_offered(names: Iterable[str]) -> list[str]:
    """What modules offer twice or do not have, and modules that do not load."""
    found = []
    for name in names:
        try:
            module = importlib.import_module(name)
        except Exception as error:
            found.append(f"{name}: {error!r}")
            continue
        offered = list(getattr(module, "__all__", ()))
        found += [f"{name}.{n} twice" for n in {*offered} if offered.count(n) > 1]
        found += [f"{name}.{n}" for n in offered if not hasattr(module, n)]
    return found


def test_a_name_with_an_underscore_stays_in_its_module(trees):
    taken = [
        f"{relative(path)}: {node.module}.{alias.name}"
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ringcoll")
        for alias in node.names
        if alias.name.startswith("_") and not alias.name.startswith("__")
    ]
    assert taken == []


def test_package_all_is_sorted():
    kinds = {True: 0, False: 1}  # CONSTANTS, then Classes, then functions and values
    order = sorted(ringcoll.__all__, key=lambda n: (kinds[n.isupper()], kinds[n[:1].isupper()], n))
    assert list(ringcoll.__all__) == order


def added_by(code: str) -> set[str]:
    """The top-level modules beyond the standard library that ``code`` loads."""
    program = (
        "import sys, json; before = set(sys.modules)\n"
        f"{code}\n"
        "names = {m.partition('.')[0] for m in set(sys.modules) - before}\n"
        "print(json.dumps(sorted(names - sys.stdlib_module_names)))"
    )
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return set(json.loads(result.stdout))


def test_import_needs_only_the_dependencies():
    assert added_by("import ringcoll") <= {"ringcoll", "numpy", "ml_dtypes"}


RARE = (
    *("logging", "hashlib", "socket", "ssl", "secrets", "random", "selectors", "subprocess"),
    *("ringcoll.topology", "ringcoll.verifier", "ringcoll.transports", "ringcoll.executors.cuda"),
    *(f"ringcoll.bootstrap.{name}" for name in ("joining", "launcher", "mpi", "relay", "store")),
    *(f"ringcoll.fabric.{name}" for name in ("connect", "nodes", "opening", "process", "remote")),
    *(f"ringcoll.tuner.{name}" for name in ("gpu", "kept_gpu", "simple", "table")),
    *(f"ringcoll.algorithms.{name}" for name in ("bruck", "halving", "ring", "scan", "tree")),
    *(f"ringcoll.communicator.{name}" for name in ("explaining", "setup.tuning")),
    *("ringcoll.model.closed_form", "ringcoll.units", "numpy.ma"),
)
"""What a rank that is a thread does not load for its start and a small call, nor below it."""


def loaded_of(names: Sequence[str], code: str) -> str:
    """The modules among these and below them that ``code`` loads and numpy does not."""
    program = (
        "import numpy, sys; before = set(sys.modules)\n"
        f"{code}\n"
        f"rare = {tuple(names)!r}; below = tuple(name + '.' for name in rare)\n"
        "after = sorted(set(sys.modules) - before)\n"
        "print(*(name for name in after if name in rare or name.startswith(below)))"
    )
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout.strip()


def test_a_cpu_rank_loads_neither_bootstraps_nor_machines_nor_logging():
    # Each of them would be a part of the time in which every rank starts.
    code = (
        "import ringcoll\n"
        "def work(comm): comm.all_reduce(numpy.ones(9)); comm.all_reduce(memoryview(bytes(9)), "
        "numpy.ones(9, 'uint8'))\n"
        "ringcoll.spawn(work, 2)"
    )
    assert loaded_of(RARE, code) == ""


@pytest.mark.parametrize("words", ["--help", "model all_reduce", "explain all_reduce"])
def test_a_command_that_computes_plans_alone_loads_no_numpy(words):
    program = (
        "import sys; from ringcoll.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "sys.exit(str({'numpy', 'ml_dtypes', 'ringcoll.config'} & sys.modules.keys() or ''))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *words.split()],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.stderr.strip() == ""
    assert words.split()[-1].strip("-") in done.stdout


def test_what_torch_loads_in_every_process_is_next_to_nothing():
    assert added_by("import ringcoll.torch_entry") == {"ringcoll"}


def test_no_module_loads_an_optional_library():
    names = [
        name for name in MODULES if not name.endswith("pytest_plugin") and name not in OF_TORCH
    ]
    code = f"import importlib\nfor name in {names!r}: importlib.import_module(name)"
    assert added_by(code).isdisjoint(OPTIONAL)


def test_no_file_outgrows_a_reader():
    lengths = {relative(p): len(p.read_text(encoding="utf-8").splitlines()) for p in PROGRAMS}
    assert {name: length for name, length in lengths.items() if length > 500} == {}
    assert len(lengths) > 800


def test_assert_guards_no_user(trees):
    found = [
        f"{relative(path)}:{node.lineno}"
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Assert)
    ]
    assert found == [], "python -O removes assert: raise an error of ringcoll.errors"


@pytest.mark.skipif(
    not list(importlib.metadata.distributions(name="ringcoll")), reason="ringcoll is not installed"
)
def test_installed_version_and_command():
    assert importlib.metadata.version("ringcoll") == ringcoll.__version__
    (command,) = importlib.metadata.entry_points(group="console_scripts", name="ringcoll")
    assert command.value == "ringcoll.cli:main"


def test_pytest_plugin_is_registered_as_soon_as_it_exists():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    entry = '[project.entry-points.pytest11]\nringcoll = "ringcoll.pytest_plugin"\n'
    assert (entry in text) == (PACKAGE / "pytest_plugin.py").is_file()


def test_typed():
    assert (PACKAGE / "py.typed").is_file()
