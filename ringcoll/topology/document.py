"""The XML of topologies and graphs as a frozen tree, read with limits and written as NCCL does.

Nothing in a file is evaluated: document types, and with them entities, are refused, and size, depth
and number of elements are bounded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NoReturn
from xml.parsers import expat

from ringcoll.errors import ArgumentError

MAX_BYTES = 64 << 20
MAX_ELEMENTS = 100_000
MAX_DEPTH = 64
MAX_ATTRIBUTES = 64
MAX_VALUE = 16 << 10

_NAME = re.compile(r"[A-Za-z_:][\w.:-]*", re.ASCII)
# What XML 1.0 cannot hold, escaped or not.
_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_ESCAPES = str.maketrans(
    {"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;"} | {c: f"&#{ord(c)};" for c in "\t\n\r"}
)


@dataclass(frozen=True, slots=True)
class Element:
    """An element of XML; equal if tag, attributes and children are, whatever its place.

    Unknown attributes and children are kept, in the order of the file; ``line`` is 0 without a
    file.
    """

    tag: str
    attributes: Mapping[str, str] = field(default_factory=dict)
    children: tuple[Element, ...] = ()
    line: int = field(default=0, compare=False)
    source: str = field(default="", compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "attributes", MappingProxyType(dict(self.attributes)))

    def get(self, name: str, default: str = "") -> str:
        """The attribute of that name, or ``default``."""
        return self.attributes.get(name, default)

    def named(self, *tags: str) -> Iterator[Element]:
        """The children that have one of these tags."""
        return (child for child in self.children if child.tag in tags)

    def walk(self) -> Iterator[Element]:
        """This element and all below it, each before its children."""
        yield self
        for child in self.children:
            yield from child.walk()

    def refuse(self, why: str) -> NoReturn:
        """Raise an ArgumentError that names file, line and tag."""
        place = f"{self.source or 'document'}, line {self.line}" if self.line else self.source
        raise ArgumentError(f"{place or 'document'}: <{self.tag}>: {why}")


@dataclass(slots=True)
class _Open:
    """An element whose end has not been read yet."""

    tag: str
    attributes: dict[str, str]
    line: int
    children: list[Element]


class _Reader:
    """Builds the tree from expat's calls."""

    def __init__(self, source: str, skipped: int) -> None:
        self.source = source
        self.skipped = skipped
        # What is open now, the innermost last; the first stands for the file itself.
        self.open = [_Open("", {}, 0, [])]
        self.elements = 0
        # Always UTF-8, whatever the file declares: its declaration would choose a codec.
        self.parser = expat.ParserCreate("utf-8")
        self.parser.StartElementHandler = self.start
        self.parser.EndElementHandler = self.end
        self.parser.CharacterDataHandler = self.text
        self.parser.StartDoctypeDeclHandler = self.doctype

    def refusal(self, why: str, line: int) -> ArgumentError:
        return ArgumentError(f"{self.source}, line {line + self.skipped}: {why}")

    def refuse(self, why: str) -> NoReturn:
        raise self.refusal(why, self.parser.CurrentLineNumber)

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        self.elements += 1
        if self.elements > MAX_ELEMENTS:
            self.refuse(f"more than {MAX_ELEMENTS} elements; is this a topology file?")
        if len(self.open) > MAX_DEPTH:
            self.refuse(f"elements nested deeper than {MAX_DEPTH}")
        if len(tag) > MAX_VALUE:
            self.refuse(f"a tag is longer than {MAX_VALUE} characters")
        if len(attributes) > MAX_ATTRIBUTES:
            self.refuse(f"<{tag}> has more than {MAX_ATTRIBUTES} attributes")
        for name, value in attributes.items():
            if len(name) > MAX_VALUE or len(value) > MAX_VALUE:
                self.refuse(f"<{tag}>: {name[:40]} is longer than {MAX_VALUE} characters")
        line = self.parser.CurrentLineNumber + self.skipped
        self.open.append(_Open(tag, attributes, line, []))

    def end(self, _tag: str) -> None:
        done = self.open.pop()
        element = Element(done.tag, done.attributes, tuple(done.children), done.line, self.source)
        self.open[-1].children.append(element)

    def text(self, data: str) -> None:
        if not data.isspace():
            self.refuse(f"text {data.strip()[:40]!r} between elements; remove it")

    def doctype(self, *_declared: object) -> None:
        self.refuse("a document type is declared; remove it, topology files need none")


def parse(text: bytes, source: str) -> Element:
    """The root element of an XML file in UTF-8; errors name ``source`` and the line.

    Comments, processing instructions and white space are dropped; a document type, text between
    elements, and what exceeds the limits of this module are refused.
    """
    if len(text) > MAX_BYTES:
        raise ArgumentError(f"{source}: {len(text)} bytes; at most {MAX_BYTES} are read")
    # Some files begin with blank lines, which expat refuses before an XML declaration.
    stripped = text.lstrip(b" \t\r\n")
    reader = _Reader(source, text[: len(text) - len(stripped)].count(b"\n"))
    try:
        reader.parser.Parse(stripped, True)
    except expat.ExpatError as error:
        why = expat.ErrorString(error.code)
        inside = reader.open[-1]
        if not stripped:
            why = "the file is empty"
        elif inside.tag:
            why = f"{why}, inside <{inside.tag}> of line {inside.line}; is the file cut off?"
        raise reader.refusal(why, error.lineno) from None
    return reader.open[0].children[0]


def write(element: Element) -> str:
    """An element as XML in NCCL's layout: a line each, indented by two spaces, attributes in order.

    ``parse`` of the result equals ``element``; what could not be read back raises ArgumentError.
    """
    lines: list[str] = []
    _write(element, 0, lines)
    return "".join(lines)


def _write(element: Element, depth: int, lines: list[str]) -> None:
    if depth >= MAX_DEPTH:
        element.refuse(f"nested deeper than {MAX_DEPTH}")
    for name in (element.tag, *element.attributes):
        if not _NAME.fullmatch(name):
            element.refuse(f"{name!r} is not a name that XML can hold")
    for name, value in element.attributes.items():
        if _FORBIDDEN.search(value):
            element.refuse(f"{name}={value!r} holds a character that XML cannot")
    indent = "  " * depth
    pairs = (f' {key}="{value.translate(_ESCAPES)}"' for key, value in element.attributes.items())
    opening = f"{indent}<{element.tag}{''.join(pairs)}"
    if not element.children:
        lines.append(f"{opening}/>\n")
        return
    lines.append(f"{opening}>\n")
    for child in element.children:
        _write(child, depth + 1, lines)
    lines.append(f"{indent}</{element.tag}>\n")
