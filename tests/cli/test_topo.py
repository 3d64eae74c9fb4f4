"""``ringcoll topo``, from its words to its output."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

from ringcoll.cli import main
from ringcoll.topology.build import build
from ringcoll.topology.detect import document_of
from ringcoll.topology.document import Element, parse
from ringcoll.topology.presets import PRESETS, preset
from ringcoll.topology.system import Source
from tests.topology.real import FILES, MACHINES, system
from tests.topology.replay import only, vm_facts

DGX1 = MACHINES / "dgx1-p100.xml"
TEMPLATE = MACHINES / "aws-p4d-24xl-topo.xml"


def run(capsys, *words):
    status = main(["topo", *map(str, words)])
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def answer(capsys, *words):
    status, out, err = run(capsys, *words, "--json", "-")
    assert (status, err) == (0, "")
    return json.loads(out)


def check(found):
    """The shape that programs rely on, and that every ring is one."""
    assert set(found) == {"gpus", "rings", "total_bandwidth", "limits"}
    numbers = [gpu["number"] for gpu in found["gpus"]]
    for gpu in found["gpus"]:
        assert set(gpu) == {"number", "name", "rank", "dev", "busid", "sm"}
    for ring in found["rings"]:
        assert set(ring) == {"order", "bandwidth", "hops"}
        assert sorted(ring["order"]) == numbers
        assert len(ring["hops"]) == len(numbers) and ring["bandwidth"] > 0
    for limit in found["limits"]:
        assert set(limit) == {"link", "used", "capacity"}
        assert limit["used"] <= limit["capacity"] * (1 + 1e-9)
    total = sum(ring["bandwidth"] for ring in found["rings"])
    assert found["total_bandwidth"] == pytest.approx(total)


def draws_and_prints(capsys, tmp_path, source, name, gpus):
    """One call that searches once and writes everything."""
    svg, graph, xml, rings = (tmp_path / n for n in ("a.svg", "graph.xml", "topo.xml", "a.json"))
    outputs = ["--json", rings, "--picture", svg, "--xml", xml]
    outputs += ["--graph", graph] if gpus > 1 else []
    status, out, err = run(capsys, source, name, *outputs)
    written = [rings, xml, *([graph] if gpus > 1 else []), svg]
    assert (status, err) == (0, "".join(f"wrote {path}\n" for path in written))
    found = json.loads(rings.read_text())
    check(found)
    assert len(found["gpus"]) == gpus
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")
    again = build(parse(xml.read_bytes(), "topo.xml"))
    assert [gpu.busid for gpu in again.gpus] == [gpu["busid"] for gpu in found["gpus"]]
    if gpus > 1:
        assert f"GPU{gpus - 1}" in out or "hosts like it" in out
        assert "GB/s together" in out and "limit: " in out
        assert "<channel>" in graph.read_text()
    else:
        assert found["rings"] == [] and "no rings" in out


@pytest.mark.parametrize("name", FILES)
def test_every_file_is_loaded_drawn_and_printed(capsys, tmp_path, name):
    gpus = len(system(name).gpus)
    draws_and_prints(capsys, tmp_path, "--file", MACHINES / name, gpus)


@pytest.mark.parametrize("name", PRESETS)
def test_every_known_machine_is_loaded_drawn_and_printed(capsys, tmp_path, name):
    draws_and_prints(capsys, tmp_path, "--preset", name, len(preset(name).gpus))


def test_the_answer_as_json(capsys):
    found = answer(capsys, "--file", DGX1)
    check(found)
    assert found["total_bandwidth"] == pytest.approx(72)
    assert found["gpus"][1] == {
        "number": 1,
        "name": "GPU/1",
        "rank": 1,
        "dev": 1,
        "busid": "0000:07:00.0",
        "sm": 60,
    }
    assert all(hop == "NVL" for ring in found["rings"] for hop in ring["hops"])
    assert all(limit["used"] == limit["capacity"] for limit in found["limits"])


def test_templates_without_gpus_have_no_rings(capsys):
    found = answer(capsys, "--file", TEMPLATE)
    assert found == {"gpus": [], "rings": [], "total_bandwidth": 0, "limits": []}
    status, out, _ = run(capsys, "--file", TEMPLATE)
    assert status == 0 and "no GPUs" in out and "no rings: 0 GPUs" in out


def test_some_gpus_are_numbered_as_the_matrix_has_them(capsys):
    found = answer(capsys, "--file", DGX1, "--gpus", "5,0,1,4")
    check(found)
    assert [gpu["number"] for gpu in found["gpus"]] == [0, 1, 4, 5]
    assert [gpu["rank"] for gpu in found["gpus"]] == [0, 1, 4, 5]
    ends = {end for limit in found["limits"] for end in limit["link"].split(" (")[0].split(" -> ")}
    assert ends == {gpu["name"] for gpu in found["gpus"]}
    _, out, _ = run(capsys, "--file", DGX1, "--gpus", "0-1,4-5")
    orders = [ring["order"] for ring in found["rings"]]
    assert orders and all(f" {' '.join(map(str, [*o, o[0]]))} " in out for o in orders)


def test_mixed_rings_carry_no_less(capsys):
    usual = answer(capsys, "--preset", "rtx3090-bridged-4", "--gpus", "0,1")
    mixed = answer(capsys, "--preset", "rtx3090-bridged-4", "--gpus", "0,1", "--mixed")
    assert mixed["total_bandwidth"] > usual["total_bandwidth"]
    classes = {hop for ring in mixed["rings"] for hop in ring["hops"]}
    assert classes > {hop for ring in usual["rings"] for hop in ring["hops"]}


def test_what_is_printed_by_default(capsys):
    status, out, err = run(capsys, "--preset", "dgx-h200")
    assert (status, err) == (0, "")
    matrix, rings, machine = (out.index(t) for t in ("legend:", "GB/s together", "nominal"))
    assert matrix < rings < machine
    assert "370.8 GB/s each way" in out and "18 x 26.562" in out


def test_matrix_and_notes_alone(capsys):
    _, out, _ = run(capsys, "--file", DGX1, "--matrix")
    assert "legend:" in out and "together" not in out
    _, out, _ = run(capsys, "--file", MACHINES / "vm-8xh200-flat.xml", "--notes")
    assert "note: " in out and "search: " in out and "legend:" not in out


def test_stdout_is_for_one(capsys):
    status, out, _ = run(capsys, "--file", DGX1, "--xml", "-")
    assert status == 0 and out.startswith("<system") and parse(out.encode(), "stdout")
    status, out, _ = run(capsys, "--file", DGX1, "--graph", "-")
    assert status == 0 and out.startswith("<graphs")
    status, out, err = run(capsys, "--file", DGX1, "--graph", "-", "--json", "-")
    assert status == 2 and out == "" and "only one option may write to stdout" in err
    for text in ("--matrix", "--notes"):
        status, out, err = run(capsys, "--file", DGX1, text, "--json", "-")
        assert status == 2 and out == "" and f"--json - {text}: only one option" in err


def test_the_names_of_known_machines(capsys):
    status, out, _ = run(capsys, "--preset", "list")
    assert status == 0
    assert [line.split("  ")[0] for line in out.splitlines()] == list(PRESETS)
    assert "8 V100 in a hybrid cube mesh" in out


def test_a_file_name_that_is_no_text_is_drawn_all_the_same(capsys, tmp_path):
    strange = tmp_path / "a\udcff&<.xml"
    strange.write_bytes(TEMPLATE.read_bytes())
    svg = tmp_path / "a.svg"
    status, out, err = run(capsys, "--file", strange, "--picture", svg)
    assert (status, err) == (0, f"wrote {svg}\n")
    assert "\na?&<\n" in out
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")


def test_a_picture_that_cannot_be_is_refused_before_anything_is_done(capsys, monkeypatch):
    status, out, err = run(capsys, "--file", "none.xml", "--picture", "a.gif")
    assert (status, out) == (2, "")
    assert ".svg, .png or .txt" in err
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    status, out, err = run(capsys, "--file", "none.xml", "--picture", "a.png")
    assert (status, out) == (2, "")
    assert "plot]', or write .svg" in err


def test_a_malformed_file_is_named_with_its_line(capsys, tmp_path):
    bad = tmp_path / "bad.xml"
    bad.write_text('<system version="1">\n  <cpu numaid="0">\n  </gpu>\n</system>\n')
    status, out, err = run(capsys, "--file", bad)
    assert (status, out) == (2, "")
    assert f"{bad}, line 3" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--file", "none.xml"], "none.xml"),
        (["--preset", "dgx9"], "dgx1-p100"),
        (["--preset", "dgx"], "did you mean dgx2?"),
        (["--file", DGX1, "--gpus", "0,8"], "there is no GPU 8; they are 0 to 7"),
        (["--file", TEMPLATE, "--gpus", "0"], "the machine has none"),
        (["--file", DGX1, "--gpus", "1,0,1"], "the same GPU is given twice"),
        (["--file", DGX1, "--picture", "a.gif"], ".svg, .png or .txt"),
        (["--file", DGX1, "--xml", "none/a.xml"], "--xml none/a.xml"),
        (["--file", DGX1, "--measure", "--xml", "a.xml"], "holds no measured bandwidths"),
        (["--preset", "dgx1-p100", "--measure"], "leave --preset out"),
        (["--file", TEMPLATE, "--graph", "-"], "no ring joins these 0 GPUs"),
    ],
)
def test_mistakes_are_one_line(capsys, words, said):
    status, _, err = run(capsys, *words)
    assert status == 2
    assert said in err and err.count("\n") == 1


@pytest.mark.parametrize(
    "words", [["--gpus", "x"], ["--file", "a", "--preset", "b"], ["--gpu", "1"]]
)
def test_words_that_are_no_options_are_refused(capsys, words):
    with pytest.raises(SystemExit) as refused:
        main(["topo", *words])
    assert refused.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


def test_this_machine_without_gpus(capsys, monkeypatch):
    monkeypatch.setattr("ringcoll.topology.detect.detect", lambda **_: Element("system"))
    status, out, err = run(capsys)
    assert (status, out) == (2, "")
    assert "no GPU was found on this machine; --file FILE.xml" in err


def test_this_machine(capsys, monkeypatch):
    document = parse(DGX1.read_bytes(), DGX1.name)
    asked: list[dict[str, object]] = []

    def detect(**words):
        asked.append(words)
        return document

    monkeypatch.setattr("ringcoll.topology.detect.detect", detect)
    status, out, _ = run(capsys)
    assert status == 0 and "this machine" in out and "72 GB/s together" in out
    assert asked[0]["fresh"] is True


def test_measured_bandwidths_are_taken(capsys, monkeypatch):
    def halved(system):
        links = tuple(
            replace(link, bandwidth=link.bandwidth / 2, source=Source.MEASURED)
            for link in system.links
        )
        return replace(system, links=links)

    monkeypatch.setattr("ringcoll.topology.detect.measure", halved)
    status, out, _ = run(capsys, "--file", DGX1, "--measure")
    assert status == 0 and "36 GB/s together" in out
    assert "9 GB/s each way (measured; nominal 20)" in out


@pytest.mark.parametrize("count", [2, 4, 8])
def test_a_virtual_machine_that_hides_its_switch(capsys, monkeypatch, count):
    found = document_of(only(vm_facts(), range(count)))
    monkeypatch.setattr("ringcoll.topology.detect.detect", lambda **_: found)
    status, out, _ = run(capsys)
    assert status == 0
    assert out.splitlines()[1].split() == ["GPU0", "X", *["NV18"] * (count - 1), "?"]
    assert f"370.8 GB/s  {' '.join(map(str, [*range(count), 0]))}  (NVL)" in out
    assert "every pair is one switch hop apart" in out
    assert "every GPU has 18 NVLinks to the NVSwitch: 370.8 GB/s each way" in out
    assert "nominal 478.116 = 18 x 26.562" in out
    assert "note: " in out and "low confidence" in out
    check(answer(capsys))


def test_algorithms_are_timed_on_the_machine(capsys, tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text("from ringcoll.algorithms.ring import all_gather as mine\n")
    words = ["--preset", "dgx-h100", "--algorithm", f"ring,two_shot,{mine}:mine"]
    status, out, err = run(capsys, *words)
    assert (status, err) == (0, "")
    assert "all_reduce of 64 MiB by ring: " in out and "on paper (S = " in out
    found = answer(capsys, *words)["algorithms"]
    assert [f"{one['collective']} by {one['algorithm']}" for one in found] == [
        "all_reduce by ring",
        "all_reduce by two_shot",
        "all_gather by mine.py:mine",
    ]
    # 2 (n - 1)/n of the buffer over a GPU's way into the switch.
    ring, *_ = found
    assert ring["seconds"] == pytest.approx(2 * 7 / 8 * (64 << 20) / 370.8e9, rel=0.01)
    status, _, err = run(capsys, "--preset", "dgx-h100", "--algorithm", "rings")
    assert status == 2 and "did you mean ring?" in err
