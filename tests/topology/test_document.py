"""XML is read with limits, kept whole and written as NCCL writes it."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringcoll.errors import ArgumentError
from ringcoll.topology import document
from ringcoll.topology.document import Element, parse, write
from tests.topology.real import FILES, MACHINES

# Files that hold what is not written back: comments, a leading blank line.
NOT_VERBATIM = ("amd-", "aws-", "oci-")


@pytest.mark.parametrize("name", [*FILES, *(p.name for p in MACHINES.glob("graphs/*.xml"))])
def test_files_of_real_machines_round_trip(name):
    path = next(MACHINES.rglob(name))
    text = path.read_bytes()
    root = parse(text, name)
    again = write(root)
    assert parse(again.encode(), "again") == root
    if not name.startswith(NOT_VERBATIM):
        assert again.encode() == text


def test_unknown_tags_and_attributes_and_their_order_are_kept():
    text = (
        '<system version="1" zz="1" aa="2">\n  <wire b="1" a="&lt;&amp;&quot;&#10;"/>\n</system>\n'
    )
    root = parse(text.encode(), "file")
    assert root.children[0] == Element("wire", {"a": '<&"\n', "b": "1"})
    assert list(root.attributes) == ["version", "zz", "aa"]
    assert write(root) == text


names = st.from_regex(r"[a-z_][a-z0-9_.-]{0,6}", fullmatch=True)
values = st.text(
    st.characters(blacklist_categories=["Cs", "Cc"], blacklist_characters="\ufffe\uffff")
    | st.sampled_from("\t\n\r<>&\"'"),
    max_size=8,
)
trees = st.recursive(
    st.builds(Element, names, st.dictionaries(names, values, max_size=3)),
    lambda inner: st.builds(
        Element,
        names,
        st.dictionaries(names, values, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
    ),
    max_leaves=8,
)


@given(trees)
def test_any_tree_round_trips(tree):
    again = parse(write(tree).encode(), "again")
    assert again == tree
    for element, same in zip(tree.walk(), again.walk(), strict=True):
        assert list(element.attributes) == list(same.attributes)


def test_lines_are_those_of_the_file():
    root = parse(b"\n\n<?xml version='1.0'?>\n<system>\n  <cpu/>\n\n  <cpu/></system>", "f.xml")
    assert [element.line for element in root.walk()] == [4, 5, 7]
    with pytest.raises(ArgumentError, match=r"^f\.xml, line 7: <cpu>: why$"):
        root.children[1].refuse("why")


@pytest.mark.parametrize(
    ("text", "line", "why"),
    [
        (b"", 1, "empty"),
        (b" \n\n", 3, "empty"),
        (b"<system>\n <cpu>\n", 3, "inside <cpu> of line 2; is the file cut off"),
        (b"<system>\n</cpu>", 2, "mismatched"),
        (b"<a/>\n<b/>", 2, "junk"),
        (b"no xml", 1, "syntax error"),
        (b"<a>\n text</a>", 2, "text 'text' between elements"),
        (b"<a b='1' b='2'/>", 1, "duplicate"),
        (b"<a b='&who;'/>", 1, "undefined entity"),
        (b"<a b='\xff'/>", 1, "not well-formed"),
        (b"\x00\x00", 1, ""),
        (b"<?xml version='1.0'?>\n<!DOCTYPE a>\n<a/>", 2, "document type"),
        (b"<!DOCTYPE a [<!ENTITY x 'y'><!ENTITY y '&x;&x;'>]><a b='&y;'/>", 1, "document type"),
        (b"<!DOCTYPE a SYSTEM 'file:///etc/passwd'><a/>", 1, "document type"),
        (b"<a>" * 65 + b"</a>" * 65, 1, "deeper than 64"),
        (b"<a>" * 1_000_000, 1, "deeper than 64"),
        (b"<a " + b" ".join(b"x%d='1'" % i for i in range(65)) + b"/>", 1, "64 attributes"),
        (b"<a>\n<b c='" + b"x" * 16385 + b"'/></a>", 2, "<b>: c is longer than 16384"),
        (b"<a>\n<" + b"x" * 16385 + b"/></a>", 2, "a tag is longer than 16384"),
    ],
)
def test_malformed_files_are_refused_with_file_and_line(text, line, why):
    with pytest.raises(ArgumentError) as refused:
        parse(text, "some.xml")
    assert str(refused.value).startswith(f"some.xml, line {line}: ")
    assert why in str(refused.value)


def test_every_prefix_of_a_file_is_refused():
    text = (MACHINES / "azure-nc48v4-topo.xml").read_bytes().rstrip()
    for end in range(0, len(text), 7):
        with pytest.raises(ArgumentError, match=r"^cut\.xml, line \d+: "):
            parse(text[:end], "cut.xml")


def test_a_million_elements_are_refused_at_the_limit(monkeypatch):
    made = 0

    def count(_element):
        nonlocal made
        made += 1

    monkeypatch.setattr(Element, "__post_init__", count)
    with pytest.raises(ArgumentError, match="more than 100000 elements"):
        parse(b"<a>" + b"<b/>" * 1_000_000 + b"</a>", "big.xml")
    assert 0 < made <= document.MAX_ELEMENTS


def test_as_many_elements_as_the_limit_are_read(monkeypatch):
    monkeypatch.setattr(document, "MAX_ELEMENTS", 5)
    assert len(parse(b"<a>" + b"<b/>" * 4 + b"</a>", "f").children) == 4
    with pytest.raises(ArgumentError, match="more than 5 elements"):
        parse(b"<a>" + b"<b/>" * 5 + b"</a>", "f")


def test_too_many_bytes_are_refused(monkeypatch):
    monkeypatch.setattr(document, "MAX_BYTES", 10)
    assert parse(b"<abcdefg/>", "f").tag == "abcdefg"
    with pytest.raises(ArgumentError, match="at most 10"):
        parse(b"<abcdefgh/>", "f")


def test_a_declared_encoding_chooses_no_codec():
    assert parse(b"<?xml version='1.0' encoding='latin-1'?><a b='\xc3\xa9'/>", "f").get("b") == "é"


@pytest.mark.parametrize(
    "element",
    [
        Element("a b"),
        Element("a", {"x y": "1"}),
        Element("a", {"x": "\0"}),
        Element("a", {"x": "\ud800"}),
    ],
)
def test_what_xml_cannot_hold_is_not_written(element):
    with pytest.raises(ArgumentError, match="XML"):
        write(element)


def test_nothing_too_deep_is_written():
    tree = Element("a")
    for _ in range(document.MAX_DEPTH - 1):
        tree = Element("a", {}, (tree,))
    assert parse(write(tree).encode(), "f") == tree
    with pytest.raises(ArgumentError, match="deeper"):
        write(Element("a", {}, (tree,)))


def test_indentation_is_two_spaces_a_level():
    lines = write(parse((MACHINES / "dgx1-p100.xml").read_bytes(), "f")).splitlines()
    indents = [len(line) - len(line.lstrip()) for line in lines]
    assert indents[0] == 0
    assert all(abs(b - a) in (0, 2) for a, b in pairwise(indents))
