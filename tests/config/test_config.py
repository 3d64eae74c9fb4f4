"""Which option wins, and what is no option."""

from __future__ import annotations

import copy
import json
import math
import os
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

import ringcoll
from ringcoll.config import (
    DEFAULTS,
    SETTINGS,
    Config,
    Settings,
    from_environment,
    from_options,
    merge,
    resolve,
    starting,
)
from ringcoll.errors import ArgumentError, ArgumentTypeError
from ringcoll.options import OPTION_TYPES, ProtocolName

PROTOCOLS = ", ".join(get_args(ProtocolName))


def my_ring(nranks):
    raise NotImplementedError


def test_every_field_has_a_kind():
    names = [field.name for kind in (Config, Settings) for field in fields(kind)]
    assert sorted(names) == sorted(OPTION_TYPES)


def test_none_inherits_and_anything_else_wins():
    base = Config(algorithm="ring", slices=4, deterministic=True)
    assert merge(base, Config()) == base
    seen = merge(base, Config(slices=2, deterministic=False, tag="x"))
    assert seen == Config(algorithm="ring", slices=2, deterministic=False, tag="x")


def test_call_over_config_over_communicator():
    base = Config(slices=1, channels=1, timeout=1.0, tag="base")
    config = Config(slices=2, channels=2)
    seen = resolve(base, config, {"slices": 3}, "all_reduce")
    assert (seen.slices, seen.channels, seen.timeout, seen.tag) == (3, 2, 1.0, "base")
    assert resolve(base, None, {}, "all_reduce") is base


@pytest.mark.usefixtures("no_gpus")
def test_init_over_environment_over_defaults(monkeypatch):
    monkeypatch.setenv("RINGCOLL_SLICES", "5")
    monkeypatch.setenv("RINGCOLL_CHANNELS", "6")
    monkeypatch.setenv("RINGCOLL_NODE", "left")
    monkeypatch.setenv("RINGCOLL_PACE", "1e9,5e-6")
    monkeypatch.setenv("RINGCOLL_TAG", "")
    config, settings = starting(Config(channels=7, tag="t"), None, "auto", {"tag": "u"})
    assert (config.slices, config.channels, config.tag) == (5, 7, "u")
    assert (config.timeout, config.accumulate, config.deterministic) == (60.0, "wide", False)
    assert settings == Settings(node="left", device="auto", pace=(1e9, 5e-6))
    config, settings = starting(None, 3, "cpu", {"node": "right", "pace": 5})
    assert config.timeout == 3.0
    assert settings == Settings(node="right", device="cpu", pace=(5.0, 0.0))


@pytest.mark.usefixtures("no_gpus")
def test_defaults(monkeypatch):
    assert DEFAULTS.timeout == 60.0
    assert starting(None, None, "auto", {}) == (DEFAULTS, Settings(device="auto"))
    monkeypatch.setenv("RINGCOLL_DEVICE", "cpu")
    assert starting(None, None, "auto", {})[1].device == "cpu"


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("slice", "slices"), ("algoritm", "algorithm"), ("time_out", "timeout"), ("channel", "chan")],
)
def test_an_unknown_option_names_the_nearest(name, nearest):
    with pytest.raises(ArgumentTypeError, match=f"reduce: .*'{name}'; did you mean '{nearest}"):
        from_options("reduce", **{name: 1})
    with pytest.raises(ArgumentTypeError, match=f"did you mean '{nearest}"):
        resolve(DEFAULTS, None, {name: 1}, "reduce")
    with pytest.raises(ArgumentTypeError, match=f"init: .*did you mean '{nearest}"):
        starting(None, None, "auto", {name: 1})


def test_an_option_like_no_other_lists_all():
    listed = r"one of sendbuf, recvbuf, op, root, stream, async_op, config, algorithm, .*, tag"
    with pytest.raises(ArgumentTypeError, match=listed):
        from_options("reduce", qqqqqq=1)


@pytest.mark.parametrize(
    ("call", "name", "wanted"),
    [
        ("all_reduce on rank 0", "oop", "did you mean 'op'"),
        ("broadcast on rank 0", "rot", "did you mean 'root'"),
        ("broadcast on rank 0", "oop", "it is one of sendbuf, recvbuf, root, .*, tag"),
        ("broadcast on rank 0", "src", "did you mean 'root'"),
        ("recv on rank 0", "src", "did you mean 'source'"),
        ("all_gather_v on rank 0", "output", "did you mean 'recvbuf'"),
        ("all_gather_v on rank 0", "count", "did you mean 'counts'"),
        ("send on rank 0", "asyncop", "did you mean 'async_op'"),
        ("barrier on rank 0", "src", "it is one of stream, async_op, config, algorithm, .*, tag"),
        ("init", "rot", "it is one of algorithm, .*, tag"),
    ],
)
def test_an_argument_of_the_call_may_have_been_meant(call, name, wanted):
    with pytest.raises(ArgumentTypeError, match=f"{call}: .*'{name}'; {wanted}"):
        from_options(call, **{name: 1})


def test_settings_are_no_options_of_a_call():
    with pytest.raises(ArgumentTypeError, match="all_reduce: there is no option 'pace'"):
        from_options("all_reduce", pace=1e9)


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("algorithm", "rng", ArgumentError, "one of ring, .*did you mean 'ring'"),
        ("algorithm", 3, ArgumentTypeError, "a function that returns a Plan"),
        ("protocol", "simple", ArgumentError, f"{PROTOCOLS}; did you mean 'Simple'"),
        ("protocol", "ll", ArgumentError, f"{PROTOCOLS}; did you mean 'LL'"),
        ("engine", "cpu", ArgumentError, "one of sm, copy, host"),
        ("channels", 0, ArgumentError, "an integer >= 1"),
        ("slices", True, ArgumentTypeError, "an integer >= 1"),
        ("slices", 2.0, ArgumentTypeError, "an integer >= 1"),
        ("slices", "2", ArgumentTypeError, "an integer >= 1"),
        ("max_sms", -1, ArgumentError, "an integer >= 1"),
        ("timeout", 0, ArgumentError, "seconds > 0, or math.inf"),
        ("timeout", math.nan, ArgumentError, "seconds > 0"),
        ("timeout", True, ArgumentTypeError, "seconds > 0"),
        ("timeout", "5", ArgumentTypeError, "seconds > 0"),
        ("deterministic", 1, ArgumentTypeError, "True or False"),
        ("accumulate", "float32", ArgumentError, "one of wide, dtype"),
        ("verify", "yes", ArgumentTypeError, "True or False"),
        ("tag", 3, ArgumentTypeError, "a word"),
        ("tag", "", ArgumentError, "a word"),
        ("tag", "\ud800", ArgumentError, "a word that UTF-8 can encode"),
        ("node", "\udcff", ArgumentError, "a word that UTF-8 can encode"),
        ("device", "tpu", ArgumentError, "one of auto, cpu, cuda$"),
        ("device", "gpu", ArgumentError, "one of auto, cpu, cuda; did you mean 'cuda'"),
        ("device", "cuda:1", ArgumentError, "did you mean 'cuda'"),
        ("transport", "hots", ArgumentError, "one of p2p, host; did you mean 'host'"),
        ("topo_file", 3, ArgumentTypeError, "a path"),
        ("pace", (0, 0), ArgumentError, "bytes/s > 0"),
        ("pace", (1, 2, 3), ArgumentError, "bytes/s > 0"),
        ("pace", (1, 2, "pairs", 4), ArgumentError, "bytes/s > 0"),
        ("pace", (1, -1), ArgumentError, "bytes/s > 0"),
        ("pace", (1, math.inf), ArgumentError, "bytes/s > 0"),
        ("pace", "1e9", ArgumentTypeError, "bytes/s > 0"),
    ],
)
def test_an_illegal_value_names_the_option_and_the_legal_ones(name, value, error, message):
    kind = Config if name in {field.name for field in fields(Config)} else Settings
    with pytest.raises(error, match=f"option {name}=.*: wanted .*{message}"):
        kind(**{name: value})
    with pytest.raises(error, match=f"init: option {name}="):
        starting(None, None, "auto", {name: value})


def test_legal_values_have_one_form():
    given: Any = {"slices": np.int64(4), "timeout": np.float32(2), "deterministic": np.bool_(True)}
    seen = Config(**given)
    assert (type(seen.slices), type(seen.timeout), seen.deterministic) == (int, float, True)
    assert Config(timeout=math.inf).timeout == math.inf
    assert Settings(pace=(2, 1, "switch")).pace == (2.0, 1.0)
    assert Settings(pace=(2, 1, "pairs")).pace == (2.0, 1.0, "pairs")
    given = {"topo_file": Path("a") / "b", "pace": [2, 1]}
    assert Settings(**given) == Settings(topo_file="a/b", pace=(2.0, 1.0))


def test_a_users_algorithm_is_always_proven():
    assert Config(algorithm=my_ring).algorithm is my_ring
    with pytest.raises(ArgumentError, match="verify=False with a function as algorithm"):
        Config(algorithm=my_ring, verify=False)
    with pytest.raises(ArgumentError, match="all_reduce: verify=False"):
        resolve(Config(verify=False), None, {"algorithm": my_ring}, "all_reduce")


def test_a_config_of_another_type_is_refused():
    config: Any = {"slices": 2}
    with pytest.raises(ArgumentTypeError, match=r"reduce: config is a dict.*ringcoll\.Config"):
        resolve(DEFAULTS, config, {}, "reduce")


def test_the_environment():
    config, settings = from_environment(
        {
            "PATH": "/bin",
            "RINGCOLL_ALGORITHM": "tree",
            "RINGCOLL_TIMEOUT": "inf",
            "RINGCOLL_DETERMINISTIC": "1",
            "RINGCOLL_VERIFY": "off",
            "RINGCOLL_TAG": "",
            "RINGCOLL_PACE": "1e9",
            "RINGCOLL_CACHE_DIR": "/somewhere",
            "RINGCOLL_DEBUG": "TRUE",
        }
    )
    assert config == Config(algorithm="tree", timeout=math.inf, deterministic=True, verify=False)
    assert settings == Settings(pace=(1e9, 0.0), cache_dir="/somewhere", debug=True)


@pytest.mark.parametrize(
    ("text", "wanted"), [("trace", "trace"), ("1", True), ("off", False), ("", None)]
)
def test_debug_is_a_flag_or_a_trace(text, wanted):
    assert from_environment({"RINGCOLL_DEBUG": text})[1].debug == wanted
    assert Settings(debug=wanted).debug == wanted


@pytest.mark.parametrize("wrong", ["traces", "1", 3])
def test_another_debug_is_refused(wrong):
    with pytest.raises((ArgumentError, ArgumentTypeError), match="True, False or 'trace'"):
        Settings(debug=wrong)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("RINGCOLL_DEBUG", "tracing", "wanted True, False or 'trace'"),
        ("RINGCOLL_SLICE", "3", "no such option; did you mean 'RINGCOLL_SLICES'"),
        ("RINGCOLL_slices", "3", "no such option"),
        ("RINGCOLL_SLICES", "x", "='x': wanted an integer >= 1"),
        ("RINGCOLL_SLICES", "0", "wanted an integer >= 1"),
        ("RINGCOLL_DETERMINISTIC", "maybe", "1 or 0 in the environment"),
        ("RINGCOLL_TIMEOUT", "soon", "inf in the environment"),
        ("RINGCOLL_PACE", "1e9;0", "wanted bytes/s > 0.*in the environment 1e9, 1e9,1e-3 or"),
        ("RINGCOLL_ALGORITHM", "rings", "one of ring,.*; did you mean 'ring'"),
        ("RINGCOLL_TAG", "\udcff", "a word that UTF-8 can encode"),
        ("RINGCOLL_DEVICE", "GPU", "one of auto, cpu, cuda; did you mean 'cuda'"),
    ],
)
def test_an_environment_that_cannot_be_read_is_refused(name, text, message):
    with pytest.raises(ArgumentError, match=f"environment variable {name}.*{message}"):
        from_environment({name: text})


def test_whose_environment_cannot_be_read_is_said(monkeypatch):
    monkeypatch.setenv("RINGCOLL_SLICE", "3")
    words = f"init in process {os.getpid()} on host .*: environment variable RINGCOLL_SLICE"
    with pytest.raises(ArgumentError, match=words):
        ringcoll.init()


def test_an_option_that_there_is_not_is_refused_in_the_words_of_a_call():
    with pytest.raises(ArgumentTypeError, match="Config: there is no option 'algoritm'; did you"):
        Config(algoritm="ring")  # type: ignore[call-arg]
    config = Config("ring", slices=4)
    assert copy.deepcopy(config) == copy.copy(config) == replace(config) == config


def test_what_ranks_must_share():
    one = Config(algorithm="ring", timeout=1.0, tag="a", verify=True)
    two = Config(algorithm="ring", timeout=2.0, tag="b")
    assert one.agreed() == two.agreed()
    assert set(json.loads(one.agreed())) == {"version", "algorithm"}
    for other in (Config(algorithm="tree"), Config(algorithm="ring", slices=2), Config()):
        assert other.agreed() != one.agreed()
    assert json.loads(Config(algorithm=my_ring).agreed())["algorithm"] == "my_ring"
    assert Settings(node="a", pace=(1, 0)).agreed() == Settings(node="b", pace=(1.0, 0.0)).agreed()
    assert Settings(pace=(1, 0)).agreed() != Settings(pace=(2, 0)).agreed()


@pytest.mark.parametrize("name", SETTINGS)
def test_ranks_agree_on_all_settings_but_those_of_a_rank_alone(name):
    values = {
        "node": "a",
        "topo_file": "a.xml",
        "device": "cpu",
        "transport": "host",
        "cache_dir": "/tmp",
        "debug": True,
        "pace": (1, 0),
        "register": False,
        "kernel_wait": 1.0,
        "tuning": "off",
        "compiled": False,
    }
    given: dict[str, Any] = {name: values[name]}
    own = name in ("node", "cache_dir", "debug", "kernel_wait", "compiled")
    assert (Settings(**given).agreed() == Settings().agreed()) == own
