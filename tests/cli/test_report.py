"""``ringcoll report``: one page of records that nobody vouches for."""

from __future__ import annotations

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from ringcoll.cli import main
from ringcoll.cli.report import _RESULTS

MACHINE = {"cpu": "A CPU", "cores": 4, "device": "cpu", "ranks": 4}
HEAD = {"date": "2026-01-02T03:04:05", "commit": "abcdef012345", "command": "python -m a.b --c"}
TAGS = {
    *("html", "head", "meta", "title", "style", "body", "h1", "h2", "nav", "a", "p", "code", "br"),
    *("figure", "figcaption", "details", "summary", "div", "table", "tr", "th", "td"),
    *("svg", "defs", "g", "path", "use", "text", "tspan", "clippath", "rect"),
}
ATTRIBUTES = {
    *("lang", "charset", "http-equiv", "content", "name", "id", "href", "class", "style", "type"),
    *("xmlns", "xmlns:xlink", "xlink:href", "viewbox", "version", "role", "d", "x", "y", "width"),
    *("height", "transform", "clip-path"),
}


def call(lib, nbytes, us, **more):
    return {"lib": lib, "collective": "all_reduce", "bytes": nbytes, "us": us, **more}


def calls(**changes):
    rows = [call(lib, 1 << at, 10.0 + at) for lib in ("ringcoll", "nccl") for at in (10, 20)]
    return {**HEAD, "machine": MACHINE, "rows": rows, **changes}


def chain(**changes):
    rows = [{"ranks": 2, "slices": s, "seconds": 1.1, "model": 1.0} for s in (1, 2, 4)]
    return {**HEAD, "machine": MACHINE, "rows": rows, "points": 3, **changes}


def training(ranks):
    row = {"model": "gpt", "batch": 16, "unit": "tokens", "ranks": ranks}
    rows = [{**row, "way": way, "per_second": 100.0 * ranks} for way in ("nccl", "ringcoll")]
    return {**HEAD, "machine": {**MACHINE, "gpus": f"{ranks} GPU X"}, "rows": rows}


def overlap():
    row = {"edge": 8192, "bytes": 256 << 20, "slowdown": 1.55, "gemm_slowdown": 1.03}
    return {**HEAD, "gpus": ["GPU X, 1", "GPU X, 1"], "rows": [{"name": "nccl, plain", **row}]}


class Page(HTMLParser):
    """The tags, attributes and words of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.links, self.words = set(), set(), [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.links += [value for name, value in attrs if name.endswith("href") or name == "src"]

    def handle_data(self, data):
        self.words += data


@pytest.fixture
def report(tmp_path, capsys):
    """Makes a page of records by their names."""

    def make(**records):
        for name, record in records.items():
            text = record if isinstance(record, str) else json.dumps(record)
            (tmp_path / f"{name}.json").write_text(text, encoding="utf-8")
        out = tmp_path / "page.html"
        assert main(["report", str(tmp_path), "--out", str(out)]) == 0
        assert capsys.readouterr().err == f"wrote {out}\n"
        return Page(out.read_text(encoding="utf-8")), out.read_text(encoding="utf-8")

    return make


def test_every_section_has_its_plots_and_their_sources(report):
    more = {"host_us": {"call": 6.31, "bare launch": 4.0}}
    large = calls(machine={**MACHINE, "ranks": 8, "cores": 4})
    _, text = report(a=calls(**more), b=chain(), c=overlap(), d=training(2), e=training(4), f=large)
    # Two sweeps, one of host times, a chain, an overlap, all_reduce and the GPT over ranks.
    assert text.count("<svg") == text.count("<figcaption>") == 7
    assert "No record has it" not in text
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", text, re.DOTALL)
    for caption in captions:
        assert "2026-01-02, commit abcdef012345: <code>python -m a.b --c</code>" in caption
        assert "4 cores of A CPU" in caption or "GPU X" in caption
    assert "<td>1 KiB</td><td>20.00</td>" in text
    assert "<td>ringcoll, a call</td><td>6.31</td>" in text
    assert "<td>+10.0%</td>" in text
    assert "<td>nccl, plain</td><td>1.55</td><td>1.03</td>" in text
    assert captions[-1].count("training") == 0 and captions[-1].count("GPU X") == 2


def test_a_section_without_records_names_the_benchmark(report):
    _, text = report(a=calls(), other={"seconds": 3})
    assert text.count("No record has it") == 4
    assert "<code>python -m benchmarks.gpu.overlap --out FOLDER</code>" in text
    assert text.partition("Records without a plot")[2].count("<code>other.json</code>") == 1


def test_the_page_stands_alone_and_follows_the_readers_colours(report):
    page, text = report(a=calls(), b=chain(), c=overlap(), d=training(2), e=training(4))
    assert page.tags <= TAGS and page.attributes <= ATTRIBUTES
    assert all(link.startswith("#") for link in page.links)
    assert "default-src 'none'" in text and "prefers-color-scheme: dark" in text
    assert "currentColor" in text and "#010203" not in text and "#ffffff" not in text
    ids = re.findall(r' id="([^"]*)"', text)
    assert len(ids) == len(set(ids))
    assert {link[1:] for link in page.links} <= set(ids)


def test_the_same_records_make_the_same_page(report):
    assert report(a=calls(), b=chain())[1] == report(a=calls(), b=chain())[1]


def test_what_records_say_stays_text(report):
    evil = '</text></code><script>alert("1")</script><img src=x onerror=y> $\\frac{$ & \x00\x1b[1m'
    row = call(f"_{evil}", 1024, 3.0)
    record = calls(command=evil, note=evil, machine={**MACHINE, "cpu": evil})
    record["rows"] += [row, {**row, "bytes": 2048}]
    others = {"b": {**chain(**HEAD), "host_us": {evil: 3.0}}, "c": overlap()}
    others["c"]["rows"][0]["name"] = evil
    page, text = report(a=record, **others)
    assert page.tags <= TAGS and page.attributes <= ATTRIBUTES
    assert 'alert("1")' in page.words
    assert not any(c in text for c in "\x00\x1b")


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ("[1]", "x.json is [1], not an object"),
        ("{", "x.json: no JSON"),
        ("[" * 100_000, "x.json: no JSON"),
        (" " * (17 << 20), "x.json: more than 16 MiB"),
        (calls(rows=[1]), "x.json: rows[0] is 1, not an object"),
        (calls(rows=[call("nccl", 8, "3")]), "x.json: rows[0]: us is '3', not a number from"),
        (calls(rows=[call("nccl", 8, float("nan"))]), "x.json: rows[0]: us is nan, not"),
        (calls(rows=[call("nccl", 8, float("inf"))]), "x.json: rows[0]: us is inf, not"),
        (calls(rows=[call("nccl", 8, True)]), "x.json: rows[0]: us is True, not"),
        (calls(rows=[call("nccl", 8, -1.0)]), "x.json: rows[0]: us is -1.0, not"),
        (calls(rows=[call("nccl", 8, 0)]), "x.json: rows[0]: us is 0, not"),
        (calls(rows=[call("nccl", 1.5, 1.0)]), "x.json: rows[0]: bytes is 1.5, not a whole"),
        (calls(rows=[call(7, 8, 1.0)]), "x.json: rows[0]: lib is 7, not a text"),
        (calls(rows={"a": 3}), "x.json: rows: a is 3, not a list"),
        (calls(machine=[]), "x.json: machine is [], not an object"),
        (calls(machine={"cpu": "A", "cores": 4}), "x.json: machine: ranks is nothing, not"),
        (calls(date=20260102), "x.json: date is 20260102, not a text"),
        (calls(gpus=[3]), "x.json: gpus is 3, not a text"),
        (calls(host_us={"call": None}), "x.json: host_us: call is nothing, not a number"),
        (calls(us={"call": {"mpi": ["a"]}}), "x.json: us: call: mpi: 0 is 'a', not a number"),
        (chain(rows=[*chain()["rows"], {"ranks": 2}]), "x.json: rows[3]: slices is nothing, not"),
        ({**overlap(), "rows": [{"slowdown": 1, "gemm_slowdown": 1}]}, "x.json: rows[0]: edge is"),
        ({"lines": [{"ms": 1, "model_ms": 1}]}, "x.json: lines[0]: collective is nothing, not"),
    ],
)
def test_a_malformed_record_is_refused_by_its_name(record, said, tmp_path, capsys):
    (tmp_path / "a.json").write_text(json.dumps(calls()))
    path = tmp_path / "x.json"
    path.write_text(record if isinstance(record, str) else json.dumps(record))
    out = tmp_path / "page.html"
    assert main(["report", str(tmp_path), "--out", str(out)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("ringcoll report: ") and err.count("\n") == 1
    assert str(tmp_path / said.partition(":")[0].split(" ")[0]) in err and said in err
    assert not out.exists()


def test_bytes_that_are_no_text_are_refused(tmp_path, capsys):
    (tmp_path / "x.json").write_bytes(b'{"a": "\xff"}')
    assert main(["report", str(tmp_path)]) == 2
    assert f"{tmp_path / 'x.json'}: no JSON" in capsys.readouterr().err


def test_a_folder_that_has_none_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("ringcoll.cli.report._RESULTS", tmp_path / "no")
    monkeypatch.chdir(tmp_path)
    for words, said in (
        ([str(tmp_path)], f"{tmp_path} has no records: `ringcoll bench --json FILE` writes one"),
        ([str(tmp_path / "no")], f"{tmp_path / 'no'} is no folder"),
        ([], "FOLDER: neither this installation nor the current folder has records"),
        ([], "name a folder with some, such as benchmarks/results of a checkout"),
        ([str(tmp_path), "--out", str(tmp_path / "no" / "page")], "--out"),
    ):
        assert main(["report", *words]) == 2
        assert said in capsys.readouterr().err


def test_an_installation_takes_the_records_of_the_checkout_it_is_called_in(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("ringcoll.cli.report._RESULTS", tmp_path / "no")
    monkeypatch.chdir(tmp_path)
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    assert main(["report", "--out", "-"]) == 2
    assert "such as benchmarks/results of a checkout" in capsys.readouterr().err
    (results / "mine.json").write_text(json.dumps(calls(command="mine --own")), encoding="utf-8")
    assert main(["report", "--out", "-"]) == 0
    assert "<code>mine --own</code>" in capsys.readouterr().out


def test_without_matplotlib_the_extra_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["report"]) == 2
    assert "a plot needs matplotlib" in capsys.readouterr().err


def test_measurements_of_the_command_are_drawn(tmp_path, capsys):
    file = tmp_path / "rows.json"
    words = [
        "bench",
        "all_reduce",
        "-g",
        "2",
        "-b",
        "64",
        "-e",
        "256",
        "-f",
        "2",
        "-n",
        "1",
        "-w",
        "0",
    ]
    assert main([*words, "--json", str(file)]) == 0
    assert main(["report", str(tmp_path), "--out", "-"]) == 0
    text = capsys.readouterr().out.partition("<!DOCTYPE html>")[2]
    assert text.count("<svg") == 1
    command = f"ringcoll {' '.join(words)} --json {file}"
    assert f", commit not recorded: <code>{command}</code>" in text


def test_algorithms_that_are_compared_are_apart(report):
    rows = [call("ringcoll", n, 3.0, algorithm=a) for n in (64, 128) for a in ("ring", "tree")]
    rows += [call("mpi", 64, 3.0, algorithm="a"), call("mpi", 128, 3.0, algorithm="b")]
    _, text = report(a=calls(rows=rows))
    assert "<th>MPI</th><th>ringcoll ring</th><th>ringcoll tree</th></tr>" in text


def test_predictions_of_rows_and_of_hosts_have_residuals(report):
    rows = [call("ringcoll", 1024, 3.0, predicted_us=4.0), call("mpi", 1024, 5.0)]
    line = {"collective": "broadcast", "bytes": 2048, "lib": "ringcoll", "ms": 2.0}
    lines = [{**line, "model_ms": 1.9}, {**line, "lib": "mpi"}]
    _, text = report(a=calls(rows=rows), b={**calls(rows=[]), "lines": lines})
    assert text.count("<svg") == 2
    numbers = "<td>1 KiB</td><td>3.00</td><td>4.00</td><td>-25.0%</td>"
    assert f"<td>all_reduce, ringcoll</td>{numbers}" in text
    assert "<td>broadcast</td><td>2 KiB</td><td>2000</td><td>1900</td><td>+5.3%</td>" in text


def test_wrong_refused_and_chosen_by_hand_is_left_out(report):
    rows = calls()["rows"]
    rows += [call("wrong", 1024, 1.0, wrong=3), call("wrong", 2048, 1.0, wrong=0)]
    rows += [call("refused", 1024, None), call("by hand", 1024, 1.0, protocol="LL")]
    page, text = report(a=calls(rows=rows), several=calls(commit="abcdef0 and fedcba9"))
    assert "<th>ringcoll</th><th>NCCL</th><th>wrong</th></tr>" in text
    assert "<td>1 KiB</td><td>20.00</td><td>20.00</td><td></td></tr>" in text
    assert text.endswith("<code>several.json</code></p>\n</body>\n</html>\n")
    assert page.words.count("abcdef012345") == 1


def test_the_records_of_the_checkout_are_drawn(report):
    assert Path(_RESULTS).is_dir()
    records = {path.stem: path.read_text("utf-8") for path in _RESULTS.glob("gpu_*_2.json")}
    page, _ = report(**records)
    assert page.tags <= TAGS and page.attributes <= ATTRIBUTES
    assert "python -m benchmarks.gpu.bars --ranks 2" in page.words
