"""Imports of the package point downward in the picture ``docs/layers.txt``."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "docs" / "layers.txt"


def layers(text: str) -> dict[str, int]:
    """Each unit of the picture and how high it stands; the lowest line is 0."""
    found: dict[str, int] = {}
    for height, line in enumerate(reversed(text.splitlines())):
        for unit in line.split("  ")[0].split(" · "):
            assert unit not in found, f"{unit} stands twice"
            found[unit] = height
    return found


LAYERS = layers(PICTURE.read_text(encoding="utf-8"))


def unit_of(module: str) -> str:
    """The unit of the picture that a module belongs to: ``executors.cuda``, ``plan``, …"""
    name = module.partition(".")[2]
    while name:
        if name in LAYERS:
            return name
        name = name.rpartition(".")[0]
    return "ringcoll"


def imports(tree: ast.AST, modules: frozenset[str]) -> Iterator[tuple[int, str]]:
    """The line and the module of each import of the package, in functions and for types too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "ringcoll":
                    yield node.lineno, alias.name
        elif (
            isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "ringcoll"
        ):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield node.lineno, inner if inner in modules else str(node.module)


def upward(module: str, text: str, modules: frozenset[str]) -> list[str]:
    """The imports of a module that do not point to a lower line of the picture."""
    above, found = unit_of(module), []
    for line, target in imports(ast.parse(text), modules):
        below = unit_of(target)
        if below != above and LAYERS[below] >= LAYERS[above]:
            found.append(f"{module}:{line} ({above}) imports {target} ({below})")
    return found


def package() -> dict[str, str]:
    paths = sorted((ROOT / "ringcoll").rglob("*.py"))
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths]
    return {
        name.removesuffix(".__init__"): path.read_text(encoding="utf-8")
        for name, path in zip(names, paths, strict=True)
    }


SOURCES = package()
MODULES = frozenset(SOURCES)


def test_every_unit_stands_in_the_picture_and_exists():
    tops = {name.split(".")[1] for name in SOURCES if "." in name}
    assert tops | {"ringcoll"} == {unit.split(".")[0] for unit in LAYERS}
    assert {f"ringcoll.{unit}" for unit in LAYERS} - {"ringcoll.ringcoll"} <= set(SOURCES)


def test_imports_point_downward():
    assert [line for name in SOURCES for line in upward(name, SOURCES[name], MODULES)] == []


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("ringcoll.plan", "from ringcoll.verifier.prover import verify"),
        ("ringcoll.topology.system", "import ringcoll.plan"),
        ("ringcoll.host.shm", "def late():\n    from ringcoll.fabric.base import Fabric"),
        ("ringcoll.executors.cpu.executor", "from ringcoll.communicator import rank"),
        ("ringcoll.executors.cuda.executor", "from ringcoll.executors.cuda_nodes import lane"),
        ("ringcoll.cli.bench", "from ringcoll import __main__"),
        ("ringcoll.folders", "from ringcoll.units import parse_size"),
    ],
)
def test_an_import_that_points_elsewhere_is_found(module, line):
    (found,) = upward(module, f"{SOURCES[module]}\n{line}\n", MODULES)
    assert found.startswith(module)
