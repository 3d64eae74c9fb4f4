"""A program that is forked is, to whoever starts it, the one that an interpreter would run."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.forks.client import PROXY, forked

FIRST = ("json",)
"""What the process of these tests has loaded: a set of modules that no other test has."""


def words(text, *args):
    return forked([sys.executable, "-W", "error", "-c", text, *args], *FIRST)


def run(text, *args, **how):
    return subprocess.run(
        words(text, *args), capture_output=True, text=True, timeout=60, check=False, **how
    )


@pytest.mark.parametrize(
    ("text", "status", "error"),
    [
        ("import sys; sys.exit(7)", 7, ""),
        ("import sys; sys.exit('in words')", 1, "in words\n"),
        ("raise ValueError('no such file')", 1, "ValueError: no such file\n"),
        ("import os; os._exit(3)", 3, ""),
        ("def f(x: y): pass", 1, "NameError: name 'y' is not defined\n"),
        ("import os; os.kill(os.getpid(), 9)", -9, ""),
        ("import os; os.kill(os.getpid(), 15)", -15, ""),
        ("import os; os.kill(os.getpid(), 2)", -2, "KeyboardInterrupt\n"),
        ("import warnings; warnings.warn('mind')", 1, "UserWarning: mind\n"),
    ],
)
def test_it_ends_as_the_program_does(text, status, error):
    done = run(text)
    assert done.returncode == status
    assert done.stderr.endswith(error)
    assert bool(done.stderr) == bool(error)


def test_it_ends_as_an_interpreter_does():
    """Threads are waited for, then exit functions run, and what is left is dropped."""
    done = run(
        "import atexit, threading, time\n"
        "print('text', end=' ')\n"
        "later = lambda: (time.sleep(0.2), print('thread', end=' '))\n"
        "threading.Thread(target=later).start()\n"
        "atexit.register(print, 'atexit', end=' ')\n"
        "class AtTheEnd:\n"
        "    def __del__(self): print('dropped', end=' ')\n"
        "kept = AtTheEnd()\n"
    )
    assert (done.returncode, done.stdout) == (0, "text thread atexit dropped ")


def test_it_has_the_words_the_folder_and_the_environment(tmp_path):
    text = "import os, sys; print(sys.argv, os.getcwd(), sorted(os.environ), os.environ['OWN'])"
    done = run(text, "a b", "", cwd=tmp_path, env={"OWN": "1=\n2", "LC_ALL": "C.UTF-8"})
    assert done.stdout == f"{['-c', 'a b', '']} {tmp_path} ['LC_ALL', 'OWN'] 1=\n2\n"


def test_it_has_the_descriptors_and_no_more():
    reading, writing = os.pipe()
    text = "import os; print(sorted(map(int, os.listdir('/proc/self/fd')))); os.write({}, b'here')"
    done = run(text.format(writing), pass_fds=(writing,), stdin=subprocess.DEVNULL)
    os.close(writing)
    assert done.stdout == f"{sorted({0, 1, 2, 3, writing} | ({4} if writing == 3 else set()))}\n"
    assert os.read(reading, 100) == b"here"
    assert os.read(reading, 100) == b""
    os.close(reading)


def test_it_has_the_descriptors_by_numbers_above_those_of_who_forks():
    """A test process may have hundreds open when it starts who forks; 0 to 2 are passed, too."""
    held = [os.dup(1)]
    while held[-1] < 250:
        held.append(os.dup(1))
    passed = [*range(203, 251)]
    text = "import os; print(sorted(map(int, os.listdir('/proc/self/fd'))))"
    command = forked([sys.executable, "-W", "error", "-c", text], *FIRST, "wave")
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, pass_fds=passed
    )
    for descriptor in held:
        os.close(descriptor)
    assert done.stderr == ""
    assert done.stdout == f"{[0, 1, 2, 3, *passed]}\n"


def test_the_other_end_of_a_descriptor_sees_the_program_end_not_its_proxy():
    """Also where the program closes it and goes on."""
    with subprocess.Popen(
        words("import os, time; os.close(1); time.sleep(60)"), stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.read() == b""
        assert process.poll() is None
        process.terminate()
    assert process.returncode == -signal.SIGTERM


def test_signals_are_passed_on():
    text = (
        "import os, signal\n"
        "for n in (signal.SIGUSR1, signal.SIGINT, signal.SIGTERM):\n"
        # No print, which is refused inside another one.
        "    signal.signal(n, lambda n, _: os.write(1, b'%d\\n' % n))\n"
        "print('ready', flush=True)\n"
        "while True: signal.pause()\n"
    )
    with subprocess.Popen(words(text), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        for number in (signal.SIGUSR1, signal.SIGINT, signal.SIGTERM):
            process.send_signal(number)
            assert process.stdout.readline() == f"{int(number)}\n"
        process.kill()
        assert process.stdout.read() == ""  # who holds its output has been killed too


def test_a_signal_that_comes_as_soon_as_the_program_runs_is_passed_on(tmp_path):
    """Where the process that forks is faster than its proxy."""
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        for _ in range(10):
            argv = [sys.executable, "-IS", PROXY, path, "-W", "error", "-c", "pass"]
            with subprocess.Popen(argv) as process:
                link, _ = listener.accept()
                with link:
                    header, descriptors, *_ = socket.recv_fds(link, 8, 64)
                    left = int.from_bytes(header, sys.byteorder)
                    while left:
                        left -= len(link.recv(left))
                    process.send_signal(signal.SIGUSR1)
                    for descriptor in descriptors:
                        os.close(descriptor)
                    assert link.recv(1) == bytes([signal.SIGUSR1])
                    process.kill()


def test_what_its_starter_ignores_it_ignores():
    text = "import signal; print(*map(signal.getsignal, (signal.SIGINT, signal.SIGUSR1)))"
    start = "trap '' USR1; exec \"$@\""
    done = subprocess.run(
        ["sh", "-c", start, "sh", *words(text)], capture_output=True, text=True, check=False
    )
    assert "default_int_handler" in done.stdout
    assert done.stdout.split()[-1] in ("Handlers.SIG_IGN", "1")


def test_forks_run_side_by_side_and_share_no_state(tmp_path):
    text = (
        "import json, sys, time\n"
        "assert not hasattr(json, 'mark'); json.mark = 1\n"
        "open(sys.argv[1], 'w').close()\n"
        "import os\n"
        "while not os.path.exists(sys.argv[2]): time.sleep(0.01)\n"
        "print(os.getpid(), 'numpy' in sys.modules, __name__)\n"
    )
    names = [str(tmp_path / name) for name in "ab"]
    pair = [
        subprocess.Popen(words(text, *turned), stdout=subprocess.PIPE, text=True)
        for turned in (names, names[::-1])
    ]
    said = [process.communicate(timeout=60)[0].split() for process in pair]
    assert [process.returncode for process in pair] == [0, 0]
    assert said[0][0] != said[1][0]
    assert [line[1:] for line in said] == [["False", "__main__"]] * 2


def test_it_ends_with_the_process_that_has_asked_for_it():
    """Whoever starts programs may be killed: what forks them ends, and so do they."""
    text = (
        "import subprocess, sys\n"
        "from tests.forks.client import forked\n"
        "words = forked([sys.executable, '-W', 'error', '-c', sys.argv[1]])\n"
        "with subprocess.Popen(words) as process: pass\n"
    )
    inner = "import os, time; print(os.getpid(), os.getppid(), flush=True); time.sleep(60)"
    root = str(Path(__file__).parents[2])
    with subprocess.Popen(
        [sys.executable, "-c", text, inner],
        stdout=subprocess.PIPE,
        text=True,
        cwd=root,
        env={**os.environ, "PYTHONPATH": root},
    ) as process:
        assert process.stdout is not None
        pids = process.stdout.readline().split()
        process.kill()
        assert process.stdout.read() == ""
    late = time.monotonic() + 30
    while any(_runs(pid) for pid in pids) and time.monotonic() < late:
        time.sleep(0.01)
    assert [pid for pid in pids if _runs(pid)] == []


def _runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_other_words_are_started_as_they_say():
    for argv in (
        [sys.executable, "-W", "error", "-O", "x.py"],
        [sys.executable, "x.py"],
        ["sh", "-W", "error"],
    ):
        assert forked(argv) == argv


def test_what_outlives_it_is_found_by_its_words(tmp_path):
    """As the fixture does that lets no test leave a process behind."""
    text = "import os, time\nif not os.fork():\n    os.closerange(0, 3)\n    time.sleep(60)"
    assert run(text, str(tmp_path)).returncode == 0
    (left,) = pids(str(tmp_path))
    os.kill(left, signal.SIGKILL)


def pids(word):
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if word.encode() in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found
