"""A topo_file of no use is every rank's error, at once, with its name and who has read it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

import ringcoll
from ringcoll import ArgumentError


def missing(_path: Path) -> None:
    """There is none."""


def empty(path: Path) -> None:
    path.write_text('<system version="1"></system>')


def torn(path: Path) -> None:
    path.write_text("<system>")


MAKE: dict[Callable[[Path], object], str] = {
    missing: "cannot be read: No such file or directory",
    Path.mkdir: "it is not a regular file",
    os.mkfifo: "it is not a regular file",  # whose writer never comes
    torn: "line 1: ",
    empty: "has 0 GPUs, too few for 2 CPU ranks",
}


@pytest.mark.parametrize("make", MAKE, ids=lambda make: make.__name__)
def test_a_bad_file_is_named_with_its_argument_and_reader(tmp_path, make):
    path = tmp_path / "machine.xml"
    make(path)
    with pytest.raises(ArgumentError) as caught:
        ringcoll.init_all(2, device="cpu", topo_file=str(path), timeout=20)
    said = str(caught.value)
    assert said.startswith(f"init: topo_file={str(path)!r}, read by rank 0: ")
    assert MAKE[make] in said
