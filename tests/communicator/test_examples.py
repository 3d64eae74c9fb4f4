"""The examples of public docstrings, run on CPU ranks; every public call has one."""

from __future__ import annotations

import doctest
import inspect

import numpy as np
import pytest

import ringcoll

CLASSES = (ringcoll.Communicator, ringcoll.Work)
FUNCTIONS = ("from_pointer", "group", "init", "init_all", "premul_sum", "spawn")
DOCUMENTED = {
    **{name: getattr(ringcoll, name) for name in (*FUNCTIONS, "Config", "Topology")},
    **{cls.__name__: cls for cls in CLASSES},
    **{
        f"{cls.__name__}.{name}": member
        for cls in CLASSES
        for name, member in inspect.getmembers(cls)
        if not name.startswith("_") and (inspect.isroutine(member) or isinstance(member, property))
    },
}


@pytest.mark.parametrize("name", DOCUMENTED)
def test_the_example_of_a_docstring(name, monkeypatch):
    monkeypatch.setenv("RINGCOLL_DEVICE", "cpu")
    text = inspect.getdoc(DOCUMENTED[name]) or ""
    names = {"np": np, "ringcoll": ringcoll}
    test = doctest.DocTestParser().get_doctest(text, names, name, name, 0)
    assert test.examples or "Example:\n    See :meth:`" in text
    said: list[str] = []
    doctest.DocTestRunner(verbose=False).run(test, out=said.append)
    assert not said, "".join(said)


@pytest.mark.parametrize("name", [n for n in DOCUMENTED if inspect.isroutine(DOCUMENTED[n])])
def test_every_argument_is_described(name):
    """And what is raised, but where nothing is."""
    call = DOCUMENTED[name]
    text = inspect.getdoc(call) or ""
    arguments = [p for p in inspect.signature(call).parameters if p != "self"]
    described = text.partition("Args:\n")[2]
    assert [p for p in arguments if f"    {p}: " not in described] == []
    silent = ("Communicator.abort", "Work.done", "Work.exception")
    assert ("Raises:\n" in text) == (name not in silent)
