"""Memory of GPU ranks on several nodes: what fails on one node is told to the others."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from ringcoll.errors import ArgumentError, MachineError, MismatchError, OutOfMemory
from ringcoll.symmetric.nodes import NodesMemory

ARRAY: Any = SimpleNamespace(nbytes=64)


class Fabric:
    """Two ranks, of which the other one says what it is told to say."""

    def __init__(self, *others: bytes) -> None:
        self.others, self.said = list(others), list[bytes]()

    def texts(self, _what: str):
        def gather(text: str) -> list[str]:
            self.said.append(text.encode())
            return [text, self.others.pop(0).decode()]

        return gather


class Inside:
    changes = 0

    def __init__(self, failure: Exception | None = None) -> None:
        self.failure = failure

    def register(self, _array: object) -> bool:
        if self.failure is not None:
            raise self.failure
        return True

    def empty(self, *_how: object) -> str:
        self.register(None)
        return "an array"


def memory(fabric: Fabric, failure: Exception | None = None) -> NodesMemory:
    made: Any = fabric, Inside(failure), SimpleNamespace(close=lambda: None)
    return NodesMemory(*made)


@pytest.mark.parametrize("kind", [ArgumentError, MismatchError, MachineError, OutOfMemory])
def test_what_fails_inside_a_node_is_told_to_the_others(kind):
    for make in (lambda m: m.register(ARRAY), lambda m: m.empty(16, "float32")):
        fabric = Fabric(b"64", b'{"value": true}')
        with pytest.raises(kind, match="on some ranks only"):
            make(memory(fabric, kind("symmetric on some ranks only")))
        assert json.loads(fabric.said[-1])["error"] == "symmetric on some ranks only"


def test_what_fails_inside_another_node_is_named():
    fabric = Fabric(b"64", b'{"error": "symmetric on some ranks only"}')
    with pytest.raises(MachineError, match="rank 1 failed: symmetric on some ranks only"):
        memory(fabric).register(ARRAY)


def test_ranks_of_all_nodes_reach_an_array_or_it_is_not_reached():
    assert memory(Fabric(b"64", b'{"value": true}')).register(ARRAY)
    assert not memory(Fabric(b"64", b'{"value": false}')).register(ARRAY)


def test_ranks_that_ask_for_different_sizes_are_all_told():
    with pytest.raises(MismatchError, match="rank 0: 64, rank 1: 128"):
        memory(Fabric(b"128")).empty(16, "float32")
