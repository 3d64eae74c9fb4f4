"""The line of a long work: shown in a terminal, nowhere else."""

from __future__ import annotations

import io
import re
import time
from types import SimpleNamespace

import pytest

from ringcoll.cli.output import bold, progress


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
        shown.print("a row")
        assert "\r\x1b[Ka row\n" in terminal.getvalue()


def test_the_line_goes_when_the_work_fails(terminal):
    with pytest.raises(ZeroDivisionError), progress("proving"):
        _ = 1 // 0
    assert terminal.getvalue().endswith("\r\x1b[K")


def test_a_pipe_sees_nothing(capsys):
    with progress("proving", 3) as shown:
        shown.step("ring")
        shown.print("row")
    assert capsys.readouterr() == ("row\n", "")


def test_what_counts_itself_is_counted(terminal):
    done = [7]
    with progress("compiling", 9, lambda: done[0]):
        wait_for(terminal, r"\rcompiling 7/9, \d+ s")
        done[0] = 8
        wait_for(terminal, r"\rcompiling 8/9, \d+ s")


def test_headings_stand_out_in_terminals_alone(monkeypatch):
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    assert bold("head") == "head"
    monkeypatch.setattr("ringcoll.cli.output.sys", SimpleNamespace(stdout=Terminal()))
    assert bold("head") == "\x1b[1mhead\x1b[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert bold("head") == "head"
