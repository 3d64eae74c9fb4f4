"""The line of a long work: shown in a terminal, nowhere else."""

from __future__ import annotations

import io
import re
import time
from types import SimpleNamespace

import pytest

from ringcoll.cli.output import progress


class Terminal(io.StringIO):
    """A standard error that a person looks at."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch):
    # Of the module alone: pytest puts its own stream in sys.stderr after this.
    stream = Terminal()
    monkeypatch.setattr("ringcoll.cli.output.sys", SimpleNamespace(stderr=stream, stdout=stream))
    return stream


def wait_for(stream: io.StringIO, pattern: str) -> None:
    late = time.monotonic() + 20
    while not re.search(pattern, stream.getvalue()):
        assert time.monotonic() < late, stream.getvalue()
        time.sleep(0.01)


def test_a_terminal_sees_parts_and_seconds(terminal):
    with progress("proving", 3) as shown:
        shown.step("ring, 4 ranks")
        wait_for(terminal, r"\rproving 1/3, ring, 4 ranks, \d+ s")
    assert terminal.getvalue().endswith("\r\x1b[K"), "the line is gone at the end"


def test_what_is_printed_meanwhile_takes_the_line_away(terminal):
    with progress("detecting the GPUs") as shown:
        wait_for(terminal, r"\rdetecting the GPUs, \d+ s")
        with shown.hidden():
            assert terminal.getvalue().endswith("\r\x1b[K")


def test_the_line_goes_when_the_work_fails(terminal):
    with pytest.raises(ZeroDivisionError), progress("proving"):
        _ = 1 // 0
    assert terminal.getvalue().endswith("\r\x1b[K")


def test_a_pipe_sees_nothing(capsys):
    with progress("proving", 3) as shown:
        shown.step("ring")
        with shown.hidden():
            print("row")
    assert capsys.readouterr() == ("row\n", "")
