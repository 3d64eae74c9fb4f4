"""Every option, setting and environment variable is read by something that then does otherwise."""

from __future__ import annotations

import ast
import logging
from contextlib import ExitStack
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ringcoll
from ringcoll import fabric
from ringcoll.arguments.calls import Call, prepare
from ringcoll.communicator.cuda import state
from ringcoll.communicator.setup import devices, start
from ringcoll.config import OPTIONS, SETTINGS, Config, merge, starting
from ringcoll.cuda.device import Device
from ringcoll.dtypes import dtype_of, op_of
from ringcoll.errors import Error
from ringcoll.executors.cuda.kernel_body import KernelFits, gpu_ranks
from ringcoll.executors.cuda.workspace import Workspace
from ringcoll.launch import ALL_MAPPED
from ringcoll.tuner import choose
from ringcoll.tuner.choice import limits_of
from ringcoll.verifier import prover

ROOT = Path(__file__).parents[2]
TOPOLOGY = """
<system version="1">
  <cpu numaid="0" affinity="ff" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="85">
    <pci busid="0000:01:00.0" class="0x030200" link_speed="16.0 GT/s PCIe" link_width="16">
      <gpu dev="0" sm="80" rank="0" gdr="0"/>
    </pci>
    <pci busid="0000:02:00.0" class="0x030200" link_speed="16.0 GT/s PCIe" link_width="16">
      <gpu dev="1" sm="80" rank="1" gdr="0"/>
    </pci>
  </cpu>
</system>
"""


class Reached(Exception):
    """Stands for what a CPU cannot do; holds what it was asked for."""


def prepared(how, **options):
    """What rank 0 of three CPU ranks keeps of an all_reduce, and its selection."""
    config, settings = how
    comms = ringcoll.init_all(3, **vars_of(config), **vars_of(settings, device="cpu"))
    with ExitStack() as end:
        for comm in comms:
            end.callback(comm.close)
        x = np.ones(30000, "float16")
        call = prepare("all_reduce", rank=0, nranks=3, sendbuf=x)
        state = comms[0]._state
        try:
            kept: Any = state.prepare(call, merge(state.config, Config(**options)))
            return kept, state._host.choice(kept.call, kept.limits)
        except Error as error:
            return type(error), str(error)


def vars_of(record, **others):
    found = {field.name: getattr(record, field.name) for field in fields(record)}
    return {**{name: value for name, value in found.items() if value is not None}, **others}


def plan(how, patch):
    return prepared(how)[1].plan.order


def slices(how, patch):
    return prepared(how)[1].launch.slices


def timeout(how, patch):
    return prepared(how)[0].timeout


def refused_order(how, patch):
    return isinstance(prepared(how, algorithm="ring")[1], str)


def stored(how, patch):
    return prepared(how)[0].call.dtype.partial


def proofs(how, patch):
    proven: list[object] = []
    patch.setattr(prover, "prove_launch", lambda plan, *_, **__: proven.append(plan))
    prepared(how)
    return len(proven)


def said(how, patch):
    return prepared(how)[0].call.tagged("all_reduce")


def on_gpus(how, patch):
    """What four GPU ranks run, as far as a CPU can tell."""
    config, _ = how
    nbytes = 1 << 20
    call = Call(
        "all_reduce", 0, None, None, nbytes // 4, dtype_of("float32"), op_of("sum"), nbytes=nbytes
    )
    limits = replace(limits_of(call, config, Config()), mapped=ALL_MAPPED)
    found = choose(
        call, gpu_ranks(Workspace(4), 132, nvlink=True), limits, KernelFits(Workspace(4))
    )
    return found.launch.protocol, found.engine, found.grid.blocks


def begun(how, patch):
    """What ``init`` comes to when it makes memory for a GPU, or to which refusal."""
    config, settings = how

    def reached(*_args, **how):
        raise Reached(how)

    patch.setattr(devices, "available", lambda: "a test says so")
    given = {**vars_of(config), **vars_of(settings)}
    found: dict[str, object] = {}
    patch.setattr(fabric, "open_fabric", lambda *args, **how: reached(**how))
    try:
        ringcoll.init(**given)
    except Reached as stop:
        found |= stop.args[0]
    given.pop("node", None)
    try:
        (comm,) = ringcoll.init_all(1, **given)
    except Error as error:
        return {**found, "error": str(error)}
    found["paced"] = comm._state._host.pacer is not None
    comm.close()
    gone: list[object] = []
    patch.setattr(start, "placed", lambda *_: Device(0, "none", "0000:01:00.0", 9, 0, 132))
    patch.setattr(start, "loader", gone.append)
    patch.setattr(state, "allocate_scratch", reached)
    try:
        ringcoll.init_all(1, **given)
    except Reached as stop:
        found["transport"] = stop.args[0]["wanted"]
    return {**found, "cache": gone}


def machine(how, patch):
    config, settings = how
    comms = ringcoll.init_all(2, **vars_of(config), **vars_of(settings, device="cpu"))
    try:
        return str(comms[0].topology)
    finally:
        for comm in comms:
            comm.close()


def logged(how, patch):
    lines: list[str] = []
    handler = logging.Handler(logging.DEBUG)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("ringcoll")
    level = log.level
    log.addHandler(handler)
    try:
        prepared(how)
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    return sorted(line for line in lines if "all_reduce" in line or "agreed" in line)


def registers(how, patch):
    return read_in_source("register") and how[1].register


def waits(how, patch):
    return read_in_source("kernel_wait") and how[1].kernel_wait


def compiled(how, patch):
    return read_in_source("compiled") and how[1].compiled


def read_in_source(name):
    """Whether a communicator is made by a setting: there need not be GPUs here."""
    folder = ROOT / "ringcoll" / "communicator"
    trees = [ast.parse(path.read_text()) for path in folder.rglob("*.py")]
    return any(
        isinstance(node, ast.Attribute)
        and node.attr == name
        and ast.unparse(node.value) in ("settings", "self.settings")
        for tree in trees
        for node in ast.walk(tree)
    )


READERS = {
    "algorithm": ("tree", plan),
    "channels": ("2", plan),
    "slices": ("7", slices),
    "timeout": ("5", timeout),
    "deterministic": ("1", refused_order),
    "accumulate": ("dtype", stored),
    "verify": ("1", proofs),
    "tag": ("grads", said),
    "protocol": ("Simple", on_gpus),
    "engine": ("copy", on_gpus),
    "max_sms": ("3", on_gpus),
    "node": ("left", begun),
    "device": ("cuda", begun),
    "transport": ("host", begun),
    "cache_dir": ("/nowhere", begun),
    "pace": ("1e9,1e-6", begun),
    "topo_file": ("two.xml", machine),
    "debug": ("1", logged),
    "register": ("0", registers),
    "kernel_wait": ("0.5", waits),
    "tuning": ("/nowhere", begun),
    "compiled": ("0", compiled),
}


def test_every_option_and_setting_has_a_case():
    assert sorted(READERS) == sorted((*OPTIONS, *SETTINGS))


@pytest.mark.parametrize("name", READERS)
@pytest.mark.usefixtures("no_gpus")
def test_an_environment_variable_changes_what_happens(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "two.xml").write_text(TOPOLOGY)
    text, seen = READERS[name]

    def now():
        with monkeypatch.context() as patch:
            return seen(starting(None, None, "auto", {}), patch)

    monkeypatch.delenv(f"RINGCOLL_{name.upper()}", raising=False)
    before = now()
    monkeypatch.setenv(f"RINGCOLL_{name.upper()}", text)
    assert now() != before
