"""An interruption or a death ends the whole job, with one line on the standard error."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys

import pytest

from ringcoll import interrupts
from ringcoll.bench.launch import marker_of
from ringcoll.bench.supervisor import Channel
from ringcoll.bootstrap.launcher import launcher_ended
from tests.bench.interrupt_loop import ROOT, attempt
from tests.launching import launch

MOMENTS = [
    ("mpi", "SIGINT", 1.5),
    ("mpi", "child", 0.7),
    ("tour", "SIGTERM", 1.0),
    ("processes", "child", 1.2),
    ("sockets", "SIGINT", 0.2),
    ("sockets", "child", 0.9),
    ("threads", "SIGTERM", 0.6),
    ("threads", "SIGTERM", 2.0),
]


@pytest.mark.mpi
@pytest.mark.parametrize(("name", "kind", "delay"), MOMENTS)
def test_the_job_ends_with_one_line(name, kind, delay, tmp_path):
    launch(2)  # skips where there is no mpiexec
    # The 5 s that a quiet machine keeps are measured by interrupt_loop's own command.
    trial = attempt(name, kind, delay, tmp_path, allowed=30.0)
    while trial.unborn and delay < 30:  # a busy machine had not begun the command
        delay *= 2
        trial = attempt(name, kind, delay, tmp_path, allowed=30.0)
    assert trial.wrong == (), trial.errors
    if kind != "child":
        assert trial.status == {"SIGINT": 130, "SIGTERM": 143}[kind]
        assert trial.errors.endswith("ringcoll bench: interrupted\n")


def test_a_rank_ends_with_the_users_launcher():
    rank = (
        "import os, time; from ringcoll.bench.supervisor import Channel; Channel(None); "
        "print(os.getpid(), flush=True); time.sleep(60)"
    )
    launcher = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {rank!r}])"
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PMI_SIZE": "2", "PMI_RANK": "0"}
    words = [sys.executable, "-c", launcher]
    with subprocess.Popen(words, env=environ, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        end = os.pidfd_open(int(process.stdout.readline()))
        process.kill()
        assert select.select([end], [], [], 20)[0]
        os.close(end)


@pytest.mark.parametrize("ended", [True, False])
def test_a_rank_whose_launcher_has_ended_before_it_began_ends_too(ended):
    """MPICH's launcher holds the other end of a socket; the kernel's signal came too early."""
    here, there = socket.socketpair()
    words = [
        sys.executable,
        "-c",
        "from ringcoll.bench.supervisor import Channel; Channel(None); print('goes on')",
    ]
    environ = {"PMI_SIZE": "2", "PMI_RANK": "0", "PMI_FD": str(there.fileno())}
    with here, there:
        if ended:
            here.close()
        rank = subprocess.run(
            words,
            env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
            pass_fds=[there.fileno()],
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
    assert (rank.returncode, rank.stdout) == ((2, "") if ended else (0, "goes on\n")), rank.stderr


@pytest.mark.parametrize(
    ("argv", "orig", "is_one"),
    [
        (["/usr/bin/ringcoll", "bench"], [], True),
        (["-m", "bench"], ["python", "-X", "dev", "-m", "ringcoll", "bench"], True),
        (["-m", "ringcoll"], ["python", "-m", "train", "ringcoll"], False),
        (["train.py", "ringcoll"], ["python", "train.py", "ringcoll"], False),
        (["-c", "bench"], ["python", "-c", "bench"], False),
        ([""], ["python"], False),
    ],
)
def test_only_the_command_handles_signals(argv, orig, is_one, monkeypatch):
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(sys, "orig_argv", orig)
    assert interrupts.is_command() == is_one


def test_a_user_program_keeps_its_handlers():
    assert not interrupts.begun()


def test_the_line_comes_once_and_from_the_first_rank(monkeypatch, capfd):
    monkeypatch.setattr(interrupts, "_untold", [True])
    monkeypatch.setattr(sys, "argv", ["ringcoll", "bench"])
    monkeypatch.setenv("PMI_RANK", "1")
    interrupts.tell()
    assert capfd.readouterr().err == ""
    monkeypatch.setenv("PMI_RANK", "0")
    interrupts.tell()
    interrupts.tell()
    assert capfd.readouterr().err == "ringcoll bench: interrupted\n"


def test_a_message_is_one_line_of_bounded_length():
    assert not Channel(None).send("begin")
    reading, writing = os.pipe()
    code = (
        "import sys; from ringcoll.bench.supervisor import Channel\n"
        "print(Channel(sys.argv[1]).send('error', 'a\\nb ' + 9999 * 'é'))"
    )
    # A shell between: the child of a supervisor itself takes its launcher for dead.
    words = [
        "sh",
        "-c",
        '"$@"; exit $?',
        "sh",
        sys.executable,
        "-c",
        code,
        f"{marker_of(writing)},",
    ]
    subprocess.run(words, pass_fds=[writing], cwd=ROOT, check=True, timeout=60)
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        message = stream.read()
    assert len(message) == 4096
    assert message.startswith(b"error ")
    assert b" a b " in message
    assert message.count(b"\n") == 1


@pytest.mark.parametrize(
    ("end", "shown"),
    [
        ("os.kill(os.getpid(), 9)", "# mine\nringcoll bench: a rank or its launcher died; "),
        ("print('x', file=sys.stderr)", "# mine\nx\nAbort(1)\nBoth lines of a library\n"),
    ],
)
def test_words_of_a_library_come_last_and_only_where_nothing_else_explains(end, shown):
    """MPICH writes a page to descriptor 2 when another rank dies during its call."""
    rank = (
        "import os, sys; from ringcoll.bench.supervisor import Channel; Channel(sys.argv[1])\n"
        "os.write(2, b'Abort(1)\\nBoth lines of a library\\n')\n"
        f"print('# mine', file=sys.stderr); {end}"
    )
    code = (
        "import subprocess, sys; from ringcoll.bench.supervisor import supervise\n"
        "words = ['sh', '-c', '\"$@\"; exit $?', 'sh', sys.executable, '-c', sys.argv[1]]\n"
        "start = lambda marker: subprocess.run([*words, marker]).returncode\n"
        "sys.exit(supervise(start, 'mpiexec', quiet=True))"
    )
    words = [sys.executable, "-c", code, rank]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == ""
    assert done.stderr.startswith(shown)
    assert len(done.stderr.splitlines()) == shown.count("\n") + (done.returncode != 0)


@pytest.mark.parametrize("number", ["", "x", "²", "9" * 11])
def test_a_variable_that_is_no_descriptor_is_no_launcher(number):
    assert not launcher_ended({"PMI_FD": number})


RANK = """
import os, signal, sys, time
from pathlib import Path
from ringcoll.bench.supervisor import Channel
marker, number = sys.argv[1], int(sys.argv[2])
channel = Channel(marker)
channel.send("begin")
Path(f"rank{number}").touch()
while len(list(Path().glob("rank?"))) < 3:
    time.sleep(0.01)
"""
LAUNCHER = """
import subprocess, sys, time
from pathlib import Path
from ringcoll.bench import supervisor

def start(marker):
    words = [sys.executable, "-c", sys.argv[1], marker]
    ranks = [subprocess.Popen([*words, str(number)]) for number in range(3)]
    while sys.argv[2] and ranks[0].poll() is None:
        ranks.append(subprocess.Popen(["sleep", "60"]))
        time.sleep(0.02)
    return max(rank.wait() for rank in ranks)

def look(pids):
    files = [Path(f"/proc/{pid}/stat") for pid in pids]
    late = time.monotonic() + 10
    states = {""}
    while states - {"T"} and time.monotonic() < late:  # the kernel stops a process a moment later
        texts = [file.read_text() for file in files if file.exists()]
        states = {text.rpartition(")")[2].split()[0] for text in texts}
        states = {"T" if state == "D" else state for state in states}  # by a fork that is stopped
    print(len(files) > 3, *sorted(states), flush=True)
    return set()

supervisor.leftovers = look
sys.exit(supervisor.supervise(start, "the launcher", quiet=False))
"""


def supervised(folder, lines: str, *, starts_more: bool) -> subprocess.CompletedProcess[str]:
    """Run three ranks, which go on by these lines once all of them have begun."""
    words = [sys.executable, "-c", LAUNCHER, RANK + lines, "more" if starts_more else ""]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        words, env=environ, cwd=folder, capture_output=True, text=True, timeout=100, check=False
    )


def test_no_process_of_the_job_takes_a_core_while_it_is_being_ended(tmp_path):
    """Many ranks that wait in loops, and a launcher that starts more, left none for the end."""
    lines = "if not number: os.kill(int(marker.partition(':')[0]), signal.SIGTERM)\nwhile 1: pass"
    done = supervised(tmp_path, lines, starts_more=True)
    assert (done.returncode, done.stdout) == (143, "True T\n"), done.stderr


def test_ranks_go_on_after_another_has_failed(tmp_path):
    """They are stopped for a moment, and not once more for each that fails."""
    lines = (
        "if number == 0:\n"
        "    channel.send('error', 'zero')\n"
        "    Path('said').touch()\n"
        "while not Path('said').exists(): pass\n"
        "channel.send('error', 'another')\n"
        "Path(f'went on {number}').touch()\n"
        "channel.send('end', 2)"
    )
    done = supervised(tmp_path, lines, starts_more=False)
    assert done.returncode == 2
    assert done.stderr.endswith(": zero\n")
    assert len(list(tmp_path.glob("went on ?"))) == 3
    first, *_ = looks = done.stdout.splitlines()
    assert first == "True T"
    assert len(looks) == 2, "as the first fails, and at the end"
