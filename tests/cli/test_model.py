"""``ringcoll model`` and ``ringcoll explain``, from their words to their output."""

from __future__ import annotations

import json
import sys

import pytest

from ringcoll.algorithms import ALGORITHMS
from ringcoll.cli import main
from ringcoll.model.closed_form import chain_best_slices, chain_time


def run(capsys, words):
    status = main(words.split())
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def points(capsys, words):
    status, out, err = run(capsys, words + " --json -")
    assert (status, err) == (0, "")
    found = json.loads(out)
    assert set(found) == {"points"}
    return found["points"]


def test_the_chain_on_paper_is_the_formula(capsys):
    found = points(
        capsys,
        "model broadcast --algorithm chain --ranks 2,4-6 --bytes 1M,64M --bandwidth 5e9 "
        "--alpha 3e-6 --slices 1,4,16",
    )
    assert len(found) == 4 * 2 * 3
    for point in found:
        names = {"algorithm", "ranks", "bytes", "slices", "seconds", "limit", "wire", "terms"}
        assert set(point) == names
        assert point["limit"] == point["wire"] == pytest.approx(point["bytes"] / 5e9)
        assert sum(point["terms"].values()) == pytest.approx(point["seconds"])
        assert point["algorithm"] == "chain"
        wanted = chain_time(point["ranks"], point["bytes"], point["slices"], 5e9, 3e-6)
        assert point["seconds"] == pytest.approx(wanted, rel=1e-12)


def test_latency_and_window_are_options(capsys):
    words = "model reduce --algorithm chain --ranks 4 --bytes 1M --bandwidth 1G --slices 32"
    (free,) = points(capsys, f"{words} --latency 1ms --window 99")
    assert free["seconds"] == pytest.approx(chain_time(4, 1 << 20, 32, 1e9, 0.0, 1e-3))
    (tight,) = points(capsys, f"{words} --latency 1ms --window 1")
    assert tight["seconds"] > 3 * free["seconds"]


@pytest.mark.parametrize("collective", sorted(ALGORITHMS))
def test_every_algorithm_has_an_answer(capsys, collective):
    ranks = "2" if collective == "send" else "1,5"
    found = points(
        capsys, f"model {collective} --ranks {ranks} --bytes 1M --slices 1,3 --alpha 1us"
    )
    assert {point["algorithm"] for point in found} == set(ALGORITHMS[collective])
    assert all(point["seconds"] > 0 for point in found if point["ranks"] > 1)


def test_a_barrier_moves_no_bytes_and_has_one_slice(capsys):
    found = points(capsys, "model barrier --ranks 1-3 --bytes 1M,2M --slices 1,2 --alpha 1us")
    assert len(found) == 3 * len(ALGORITHMS["barrier"])
    assert {(point["bytes"], point["slices"]) for point in found} == {(0, 1)}


def test_the_text_says_best_limits_and_what_dominates(capsys):
    status, out, _ = run(
        capsys, "model broadcast --algorithm chain --ranks 8 --bytes 64M --alpha 10us --slices 1,64"
    )
    assert status == 0
    best = chain_best_slices(8, 64 << 20, 10e9, 1e-5)
    assert f"at least 1: {best:.1f}" in out
    assert f"best S searched: {round(best)} takes" in out
    assert "S = 1 takes (k - 1)*N/B = 46.98 ms, S -> inf N/B = 6.711 ms" in out
    assert "7.01  ramp (86%)" in out and "overhead (" in out
    assert "limit: N/B = 6.711 ms, egress of rank 0 at full rate" in out
    assert "1.20 times the limit; most costs overhead (9%)" in out
    _, out, _ = run(capsys, "model all_reduce --algorithm ring --ranks 4 --slices 1")
    assert "S = 1 takes 6*alpha + 1.5*N/B + 6*L on a switch" in out
    _, out, _ = run(capsys, "model broadcast --algorithm chain --ranks 4 --slices 1")
    assert "infinite, as alpha = 0" in out


@pytest.mark.parametrize("words", ["--ranks 8", "--per-node 8 --nodes 1 --bandwidth 100G"])
def test_messages_that_cost_their_bytes_alone_are_warned_of(capsys, words):
    words = f"model all_reduce --algorithm ring --bytes 1K --slices 1 {words}"
    out = run(capsys, words)[1]
    assert "no alpha and no latency known, 0 assumed: small sizes and many slices look" in out
    assert "no latency known, 0 assumed: small" in run(capsys, f"{words} --alpha 1us")[1]
    assert "no alpha known, 0 assumed: many" in run(capsys, f"{words} --latency 1us")[1]
    for given in ("--alpha 0 --latency 0", "--json -"):
        assert "assumed" not in run(capsys, f"{words} {given}")[1]


def test_presets_say_where_alpha_and_latency_are_from(capsys):
    words = "model all_reduce --algorithm ring --bytes 1K --slices 1 --nodes 1 --preset"
    out = run(capsys, f"{words} dgx-h100")[1]
    assert "alpha = 2.6 us: measured on 4 H200" in out
    assert "L = 3.4 us: NCCL 2.28's model" in out
    assert "assumed" not in out
    assert "no alpha known, 0 assumed" in run(capsys, f"{words} dgx-a100")[1]
    assert "L = 3.4 us: NCCL" not in run(capsys, f"{words} dgx-h100 --latency 2us")[1]


def test_links_nodes_and_the_network_are_options(capsys):
    words = "model all_reduce --algorithm hierarchical --ranks 8 --slices 1 --bytes 1M"
    (near,) = points(capsys, words)
    (far,) = points(capsys, f"{words} --nodes 2 --network-bandwidth 1G --network-latency 1us")
    (listed,) = points(capsys, f"{words} --nodes 4,4 --network-bandwidth 1G --network-latency 1us")
    assert far == listed
    assert far["seconds"] > near["seconds"]
    (pairs,) = points(capsys, f"{words} --links pairs")
    (memory,) = points(capsys, f"{words} --links memory --local-bandwidth 5G")
    assert pairs["seconds"] <= near["seconds"] < memory["seconds"]
    status, _, err = run(capsys, f"{words} --nodes 3")
    assert status == 2 and "nodes=3" in err
    status, _, err = run(capsys, f"{words} --nodes 4,5")
    assert status == 2 and "9 ranks, not 8" in err


def test_thousands_of_ranks(capsys):
    found = points(capsys, "model all_reduce --algorithm ring --ranks 1024 --bytes 1G --slices 1,8")
    assert [point["slices"] for point in found] == [1, 8]
    (node,) = points(
        capsys,
        "model all_gather --algorithm hierarchical --ranks 2048 --nodes 256 --slices 1 --bytes 1G",
    )
    assert node["seconds"] > 0


def test_what_is_too_large_is_left_out_with_its_reason(capsys):
    words = "model all_gather --algorithm ring,recursive_doubling --bytes 1G --slices 1,2 --json -"
    status, out, err = run(capsys, f"{words} --ranks 512")
    assert status == 0
    seen = [(point["algorithm"], point["slices"]) for point in json.loads(out)["points"]]
    assert seen == [("ring", 1), ("ring", 2), ("recursive_doubling", 1)]
    assert "recursive_doubling, 512 ranks, 1 GiB, 2 slices: left out" in err
    status, _, err = run(capsys, f"{words} --ranks 2048 --algorithm recursive_doubling")
    assert status == 2
    assert "recursive_doubling, 2048 ranks: left out" in err and "nothing" in err


def test_files_are_written(capsys, tmp_path):
    json_file, png = tmp_path / "points.json", tmp_path / "curve.png"
    status, out, err = run(
        capsys, f"model broadcast --slices 1,2 --json {json_file} --plot {png} --bytes 1M"
    )
    assert status == 0 and "broadcast over a switch" in out
    assert err == f"wrote {png}\nwrote {json_file}\n"
    assert len(json.loads(json_file.read_text())["points"]) == 2 * len(ALGORITHMS["broadcast"])
    assert png.read_bytes().startswith(b"\x89PNG")
    status, _, err = run(capsys, f"model broadcast --slices 1 --json {tmp_path}/none/points.json")
    assert status == 2 and "--json" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("model broadcast --algorithm ringo", "ringo"),
        ("model send --ranks 3", "2 ranks"),
        ("explain broadcast --algorithm ringo", "ringo"),
        ("explain broadcast --ranks 0", "--ranks 0"),
        ("explain broadcast --ranks 1000", "at most 64"),
        ("explain barrier --slices 3", "takes 1"),
        ("explain broadcast --slices 0 --algorithm chain", "slices=0"),
    ],
)
def test_mistakes_are_one_line(capsys, words, said):
    status, _, err = run(capsys, words)
    assert status == 2
    assert said in err and err.count("\n") == 1


@pytest.mark.parametrize(
    "words", ["model broadcast --bytes 1X", "model broadcast --alpha fast", "model allreduce"]
)
def test_words_that_are_no_values_are_refused(capsys, words):
    with pytest.raises(SystemExit) as refused:
        main(words.split())
    assert refused.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", ["model broadcast", "model all_reduce --per-node 2 --bandwidth 1e9", "explain send"]
)
def test_what_cannot_be_drawn_is_said_before_anything_else(capsys, tmp_path, monkeypatch, words):
    for path, said in (("a.doc", "ends in .png"), ("none/a.png", "no such folder")):
        status, out, err = run(capsys, f"{words} --plot {tmp_path / path}")
        assert (status, out) == (2, "") and said in err
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    status, out, err = run(capsys, f"{words} --plot {tmp_path / 'a.png'}")
    assert status and out == ""
    assert "[plot]'" in err and err.count("\n") == 1


def test_explain_shows_the_table_and_the_launch(capsys):
    status, out, _ = run(capsys, "explain broadcast --algorithm chain --ranks 4 --slices 4")
    assert status == 0
    assert "rank 1          s0>2  s1>2  s2>2  s3>2" in out
    assert "launch: chain (given), S = 4 (given), W = 2" in out
    status, out, _ = run(capsys, "explain all_reduce --bytes 8 --alpha 1us --lowered --width 60")
    assert "(the fastest by the model)" in out
    assert "signal" in out.split("times as long")[-1]


def test_explain_names_a_tie_and_what_is_assumed(capsys):
    status, out, _ = run(capsys, "explain all_reduce --ranks 4 --alpha 0")
    assert status == 0
    assert "launch: ring (the first of 8 that tie by the model: ring, two_shot, two_shot_f" in out
    assert "alpha = 0 ns, L = 0 ns\nB, L are assumed, not measured: --bandwidth" in out
    status, out, _ = run(capsys, "explain all_reduce --ranks 4")
    assert status == 0
    assert "over a switch of B = 10 GB/s, alpha = 1 us, L = 0 ns\nB, alpha, L are assumed" in out
    given = "--bandwidth 5G --alpha 2us --latency 0"
    status, out, _ = run(capsys, f"explain all_reduce --ranks 4 --algorithm ring {given}")
    assert status == 0
    assert "assumed" not in out and "tie" not in out
    assert "over a switch of B = 5 GB/s, alpha = 2 us, L = 0 ns\n\n" in out
    assert "launch: ring (given)" in out


def test_explain_cuts_no_more_slices_than_an_overhead_allows(capsys):
    status, out, _ = run(capsys, "explain broadcast --algorithm chain --json -")
    assert status == 0
    assert 1 < json.loads(out)["slices"] < 64


def test_explain_answers_as_json_and_as_a_picture(capsys, tmp_path):
    svg = tmp_path / "a.svg"
    words = f"explain all_reduce --algorithm ring --ranks 3 --slices 2 --json - --plot {svg}"
    status, out, err = run(capsys, words)
    assert (status, err) == (0, f"wrote {svg}\n")
    found = json.loads(out)
    assert (found["algorithm"], found["ranks"], found["slices"]) == ("ring", 3, 2)
    assert len(found["steps"]) == 2 * 3 * 4
    assert max(step["end"] for step in found["steps"]) == pytest.approx(found["seconds"])
    assert {step["rank"] for step in found["steps"]} == {0, 1, 2}
    assert svg.read_text(encoding="utf-8").startswith("<?xml")


def test_explain_has_defaults_for_everything_else(capsys):
    assert run(capsys, "explain send")[0] == 0
    status, out, _ = run(capsys, "explain broadcast --algorithm chain --bytes 64M --alpha 10us")
    assert status == 0 and "the best power of two by the model" in out
