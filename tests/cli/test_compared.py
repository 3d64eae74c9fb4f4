"""``ringcoll topo --compare``: the rings of graph files beside ours, by one clock."""

from __future__ import annotations

import json

import pytest

from ringcoll.cli import main
from ringcoll.model.machine import ring_gain
from ringcoll.topology.presets import preset
from ringcoll.topology.search import find_rings
from tests.topology.real import MACHINES

GRAPHS = MACHINES / "graphs"
GPUS = "".join(f'<gpu dev="{dev:#x}"/>' for dev in range(8))
INDEX = (
    '<graphs version="1"><graph id="0" pattern="4" nchannels="1" speedintra="18" typeintra="NVL">'
    f"<channel>{GPUS}</channel></graph></graphs>"
)


def compared(capsys, *words):
    status = main(["topo", *map(str, words), "--json", "-"])
    printed = capsys.readouterr()
    assert (status, printed.err) == (0, "")
    return json.loads(printed.out)


@pytest.mark.parametrize("machine", ["simllm-perlmutter-a100", "simllm-vastai-b200"])
def test_what_nccl_has_found_is_worth_as_much(capsys, machine):
    files = MACHINES / f"{machine}-topo.xml", GRAPHS / f"{machine}-graph.xml"
    found = compared(capsys, "--file", files[0], "--compare", files[1])
    assert found["compared"]["times_as_long"] == pytest.approx(1)
    theirs = {tuple(ring["order"]) for ring in found["compared"]["rings"]}
    assert theirs == {tuple(ring["order"]) for ring in found["rings"]}


def test_our_own_rings_come_back(capsys, tmp_path):
    graph = tmp_path / "graph.xml"
    assert main(["topo", "--preset", "dgx1-v100", "--graph", str(graph)]) == 0
    assert main(["topo", "--preset", "dgx1-v100", "--compare", str(graph)]) == 0
    out = capsys.readouterr().out
    assert f"{graph}: 4 rings, 120 GB/s together" in out
    assert "an all_reduce takes 1 times as long on paper along them" in out
    assert main(["topo", "--preset", "dgx1-v100", "--matrix", "--compare", str(graph)]) == 0
    assert "times as long on paper along them" in capsys.readouterr().out


def test_rings_that_claim_too_much_are_judged_by_the_links(capsys, tmp_path):
    graph = tmp_path / "graph.xml"
    graph.write_text(INDEX.replace('"18"', '"9000"'))
    found = compared(capsys, "--preset", "dgx1-p100", "--compare", graph)
    assert found["compared"]["total_bandwidth"] == 9000
    system = preset("dgx1-p100")
    # Four rings in index order by turns gain more than this one, in one direction.
    gain = ring_gain(system, find_rings(system))
    assert found["compared"]["times_as_long"] >= gain > 1


@pytest.mark.parametrize(
    ("text", "words", "says"),
    [
        (INDEX, ["--preset", "minsky"], "expected each of the 4 GPUs"),
        (INDEX, ["--preset", "dgx1-p100", "--gpus", "0-3"], "leave --gpus out"),
        ("<graphs/>", ["--preset", "minsky"], "the file has no rings"),
        ("<system/>", ["--preset", "minsky"], "the root of a graph file is <graphs>"),
        (None, ["--preset", "minsky"], "cannot be read"),
    ],
)
def test_what_cannot_be_compared_is_one_line(capsys, tmp_path, text, words, says):
    graph = tmp_path / "graph.xml"
    if text is not None:
        graph.write_text(text)
    assert main(["topo", *words, "--compare", str(graph)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert says in printed.err and printed.err.count("\n") == 1
