"""Rings as JSON and back; what is malformed is named."""

from __future__ import annotations

import json

import pytest

from ringcoll.errors import MachineError
from ringcoll.topology.presets import preset
from ringcoll.topology.ringsets import as_json, ring_set_of
from ringcoll.topology.search import find_rings

SYSTEM = preset("minsky")
TOLD = as_json(find_rings(SYSTEM))


def said(**changes):
    told = json.loads(json.dumps(TOLD))
    for name, value in changes.items():
        (told if name in told else told["rings"][0])[name] = value
    return told


@pytest.mark.parametrize("name", ["minsky", "dgx1-v100", "dgx-h100", "rtx3090-bridged-4"])
def test_there_and_back(name):
    system = preset(name)
    found = find_rings(system)
    assert ring_set_of(json.loads(json.dumps(as_json(found))), system, "x") == found


@pytest.mark.parametrize(
    ("told", "named"),
    [
        (None, "x: malformed: None"),
        ([], "x: malformed"),
        ({}, "x: malformed: {}"),
        ({**said(), "more": 1}, "x: malformed"),
        (said(rings={}), "x: rings: malformed: {}"),
        (said(rings=[7]), "x: rings: malformed: 7"),
        (said(rings=[{}] * 5000), "x: rings: malformed"),
        (said(order=[0, 1, 2]), "order: malformed: [0, 1, 2]"),
        (said(order=[1, 0, 2, 3]), "order: malformed"),
        (said(order=[0, 1, 2, True]), "order: malformed: True"),
        (said(order="0123"), "order: malformed: '0123'"),
        (said(bandwidth=0), "bandwidth: malformed: 0"),
        (said(bandwidth=-1.0), "bandwidth: malformed: -1.0"),
        (said(bandwidth=float("inf")), "bandwidth: malformed: inf"),
        (said(bandwidth=10**400), "bandwidth: malformed: 1"),
        (said(bandwidth="fast"), "bandwidth: malformed: 'fast'"),
        (said(hops=["NVL"]), "hops and paths: malformed"),
        (said(hops=["NVL", "NVL", "NVL", "VERY"]), "hops: malformed: 'VERY'"),
        (said(hops=[[]] * 4), "hops: malformed: []"),
        (said(paths=[["GPU/1"]] * 4), "paths: malformed"),
        (said(paths=[[SYSTEM.gpus[0].name] * 2] * 4), "paths: malformed"),
        (said(paths=[["GPU/1", "nowhere"]] * 4), "paths: malformed"),
        (said(paths=[[SYSTEM.gpus[0].name, [], SYSTEM.gpus[1].name]] * 4), "paths: malformed"),
        (said(limits=[["a", 1]]), "limits: malformed"),
        (said(limits=[[1, 1, 1]]), "limits: malformed: 1"),
        (said(bound="much"), "bound: malformed: 'much'"),
        (said(bound=float("nan")), "bound: malformed: nan"),
        (said(all_pairs=1), "all_pairs: malformed: 1"),
        (said(tried=[1]), "tried: malformed: 1"),
    ],
)
def test_malformed(told, named):
    with pytest.raises(MachineError) as caught:
        ring_set_of(told, SYSTEM, "x")
    assert named in str(caught.value) and len(str(caught.value)) < 200
