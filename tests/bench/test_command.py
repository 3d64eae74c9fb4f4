"""The command as a user types it: threads, and processes that meet over sockets."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ringcoll import __version__
from ringcoll.cli import main

ROOT = Path(__file__).parents[2]
COLUMNS = ["-b", "64", "-e", "256", "-f", "2", "-n", "2"]


def environment(**more: str) -> dict[str, str]:
    # What a launcher tells its ranks; Open MPI's settings of this machine stay.
    launchers = ("PMI", "SLURM", *(("OMPI",) if "OMPI_COMM_WORLD_RANK" in os.environ else ()))
    plain = {k: v for k, v in os.environ.items() if not k.startswith(launchers)}
    return {**plain, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error", **more}


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "ringcoll", *words]


def bench(*words: str, **more) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command("bench", *words),
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        **more,
    )


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if line and not line.startswith("#")]


def test_threads():
    result = bench("all_reduce", *COLUMNS, "-g", "2")
    assert (result.returncode, result.stderr) == (0, "")
    assert [(row[0], row[1], row[8], row[12]) for row in rows(result.stdout)] == [
        ("64", "16", "0", "0"),
        ("128", "32", "0", "0"),
        ("256", "64", "0", "0"),
    ]
    assert result.stdout.count("#  Rank ") == 2
    assert result.stdout.count("# Device: auto is cpu") == 1


def test_json_on_standard_output_is_alone_there():
    result = bench("broadcast", *COLUMNS, "-g", "2", "--json", "-")
    assert result.returncode == 0
    found = json.loads(result.stdout)
    assert [(r["bytes"], r["in_place"]) for r in found["rows"]][:2] == [(64, False), (64, True)]
    assert found["machine"]["ranks"] == 2
    assert found["versions"]["ringcoll"] == __version__
    assert "out-of-place" in result.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["-G", "1"], "no CUDA graphs"),
        (["-d", "quarter", "-g", "2"], "quarter"),
        (["--algorithm", "magic", "-g", "2"], "magic"),
        (["-g", "2", "--peer", "mpi"], "each rank to be a process"),
        (["-b", "8", "-e", "4"], "-b 8 is above -e 4"),
        (["reduce", "-g", "2", "-r", "5"], "-r 5: name a root from 0 to 1"),
    ],
)
def test_errors_are_one_line(words, says, capsys):
    assert main(["bench", *words]) == 2
    printed = capsys.readouterr()
    assert printed.out.count("\n# Out of bounds") == 0
    (line,) = printed.err.splitlines()
    assert line.startswith("ringcoll bench: ")
    assert line.count("bench") == 1
    assert says in line


@pytest.mark.parametrize("how", [["--ranks", "2"], ["-g", "2"]])
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["-d", "fp99"], "-d fp99: dtype='fp99' is not one of int8, "),
        (["-d", "fp99", "--format", "osu"], "-d fp99: "),
        (["-o", "mean"], "-o mean: op='mean' is not one of sum, "),
        (["-o", "band"], "op='band' is not defined on float32; it takes int8, "),
        (["scan", "-o", "avg"], "-o avg: scan has no avg; name another operator"),
        (["reduce", "-r", "2"], "-r 2: name a root from 0 to 1"),
        (["--algorithm", "none.py:mine,rings"], "did you mean ring?"),
        (["--peer", "nccl", "--device", "cpu"], "add --device cuda, or take --peer mpi or --peer"),
        (["--peer", "nccl"], "--peer nccl works on GPUs, and these ranks are CPUs; add"),
        (["--peer", "nccl", "--device", "cuda"], "--peer nccl needs torch; pip install torch"),
        (["--peer", "gloo"], "--peer gloo needs torch; pip install torch"),
    ],
)
def test_what_no_rank_can_measure_is_refused_before_ranks_start(
    words, says, how, capsys, monkeypatch
):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *_: None if name == "torch" else find(name)
    )
    monkeypatch.setattr("ringcoll.bench.flags.gpus", lambda: 0)
    monkeypatch.setattr("ringcoll.cli.bench.supervise", lambda *_, **__: pytest.fail("they start"))
    monkeypatch.setattr("ringcoll.cli.bench._measure", lambda *_: pytest.fail("they start"))
    assert main(["bench", *words, *how]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert says in printed.err


def test_names_that_are_known_are_measured(monkeypatch):
    monkeypatch.setattr("ringcoll.cli.bench.supervise", lambda *_, **__: 99)
    for words in (["-d", "all"], ["-o", "mulsum,max"], ["-d", "half", "-o", "all"], ["-r", "all"]):
        assert main(["bench", "reduce", *words, "--ranks", "2"]) == 99


def test_the_command_that_starts_ranks_loads_no_numpy_for_usual_names():
    code = (
        "import sys; from ringcoll.cli import bench, main; bench.supervise = lambda *_, **__: 0; "
        "main(['bench', 'broadcast', '-b', '8', '--ranks', '2', '--device', 'cpu']); "
        "print('numpy' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"


WITHOUT_MPI = """
import sys
sys.modules["mpi4py"] = None
import importlib.util
plain = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "mpi4py" else plain(name, *rest)
from ringcoll.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_an_error_of_a_process():
    result = bench("-G", "1")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("ringcoll bench: ")


def test_ranks_over_sockets():
    words = ["bench", "all_gather", *COLUMNS, "--ranks", "3", "--json", "-"]
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_MPI, *words],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert (found["machine"]["ranks"], found["machine"]["ranks_are"]) == (3, "processes")
    assert {row["wrong"] for row in found["rows"]} == {0}


def interrupted(words: list[str], rows_first: int) -> tuple[int, str, str]:
    process = subprocess.Popen(
        words, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    lines: list[str] = []
    deadline = time.monotonic() + 60
    while sum(not line.startswith("#") for line in lines) < rows_first:
        assert time.monotonic() < deadline
        line = process.stdout.readline()
        assert line, "the rows ended"
        lines.append(line)
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=60)
    return process.returncode, "".join(lines) + rest, errors


def test_interruption_of_threads(tmp_path):
    file = tmp_path / "rows.json"
    words = command("bench", *COLUMNS, "-N", "0", "-g", "2", "--json", str(file))
    status, text, errors = interrupted(words, 4)
    assert status == 130
    assert errors == "ringcoll bench: interrupted\n"
    assert "# Avg bus bandwidth" in text
    assert len(json.loads(file.read_text())["rows"]) >= 8


def test_interruption_of_processes(tmp_path):
    file = tmp_path / "rows.json"
    words = ["bench", *COLUMNS, "-N", "0", "--ranks", "2", "--json", str(file)]
    status, text, errors = interrupted([sys.executable, "-c", WITHOUT_MPI, *words], 4)
    assert status == 130
    assert errors == "ringcoll bench: interrupted\n"
    assert text.count("# Avg bus bandwidth") == 1
    assert len(json.loads(file.read_text())["rows"]) >= 8


def test_help_names_every_command(capsys):
    assert main([]) == 2
    text = capsys.readouterr().out
    assert all(name in text for name in ("bench", "model", "verify", "explain"))
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"{__version__}\n"


def test_unknown_command_and_flag(capsys):
    for words in (["benchmark"], ["bench", "--frobnicate"]):
        with pytest.raises(SystemExit) as left:
            main(words)
        assert left.value.code == 2
    capsys.readouterr()


def test_commands_are_loaded_when_asked_for():
    code = (
        "import sys; from ringcoll.cli import main; main(['--version']); "
        "print([m for m in sys.modules if m.startswith(('ringcoll.cli.', 'ringcoll.bench'))])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True
    )
    assert result.stdout.splitlines()[1] == "[]"


def test_closed_pipe_is_no_traceback():
    shell = f"{sys.executable} -m ringcoll bench {' '.join(COLUMNS)} -N 50 -g 2 | head -n 3"
    result = subprocess.run(
        ["sh", "-c", shell],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert len(result.stdout.splitlines()) == 3
    assert "Traceback" not in result.stderr
