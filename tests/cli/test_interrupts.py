"""Ctrl-C where Python would lose it."""

from __future__ import annotations

import signal
import threading
import time
import weakref
from typing import Any, cast

import pytest

from ringcoll.cli.bench import _interruptible


class Thing:
    """Something that can be finalized."""


def interrupted_finalizer() -> None:
    thing = Thing()
    weakref.finalize(thing, signal.raise_signal, signal.SIGINT).atexit = False
    del thing


class Interrupting(set):
    """What a weak set keeps: Ctrl-C comes while its callback takes an object out."""

    def discard(self, _reference: object) -> None:
        signal.raise_signal(signal.SIGINT)


def interrupted_weak_set() -> None:
    thing, weak = Thing(), cast("Any", weakref.WeakSet())
    weak.add(thing)
    weak.data = Interrupting(weak.data)
    del thing


@pytest.mark.parametrize("interrupted", [interrupted_finalizer, interrupted_weak_set])
def test_an_interruption_of_a_finalizer_comes_again(capsys, interrupted):
    with pytest.raises(KeyboardInterrupt), _interruptible():
        interrupted()
        late = time.monotonic() + 60
        while time.monotonic() < late:
            time.sleep(0.001)
    assert capsys.readouterr().err == ""
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_any_other_is_raised_at_once():
    with pytest.raises(KeyboardInterrupt), _interruptible():
        signal.raise_signal(signal.SIGINT)
        pytest.fail("it went on")


def test_other_handlers_and_threads_are_left_alone():
    seen = []

    def own(number, frame):
        seen.append(number)

    before = signal.signal(signal.SIGINT, own)
    try:
        with _interruptible():
            signal.raise_signal(signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) is own
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [signal.SIGINT]

    def beside():
        with _interruptible():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=beside)
    thread.start()
    thread.join()
    assert seen[1] is before
