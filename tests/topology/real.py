"""The files of real machines, for tests."""

from __future__ import annotations

from pathlib import Path

from ringcoll.topology.build import build
from ringcoll.topology.document import Element, parse
from ringcoll.topology.system import Link, LinkKind, System

MACHINES = Path(__file__).parent / "machines"
FILES = tuple(sorted(path.name for path in MACHINES.glob("*.xml")))


def document(name: str) -> Element:
    return parse((MACHINES / name).read_bytes(), name)


def system(name: str) -> System:
    return build(document(name))


def built(text: str) -> System:
    return build(parse(text.encode(), "test.xml"))


def link(found: System, src: str, dst: str, kind: LinkKind) -> Link:
    links = [one for one in found.out[src] if one.dst == dst and one.kind is kind]
    assert len(links) == 1, f"{src} -> {dst} ({kind}): {links}"
    return links[0]


def linked(found: System, kind: LinkKind) -> set[tuple[str, str, int]]:
    return {(one.src, one.dst, one.count) for one in found.links if one.kind is kind}
