"""Ranks come to know one machine: what they are told and refuse, what a file makes of them."""

from __future__ import annotations

import json
import logging
import re
from typing import Any

import numpy as np
import pytest

import ringcoll
from ringcoll import ArgumentError, MachineError, MismatchError, UsageError
from ringcoll.communicator.setup import machine, start
from ringcoll.communicator.setup.machine import agree
from ringcoll.config import starting
from ringcoll.fabric import each, thread_fabrics
from ringcoll.topology.document import parse, write
from ringcoll.topology.presets import preset_document
from ringcoll.topology.search import cached
from ringcoll.tuner.measured import HOST
from tests.communicator.sums import sums

BUSIDS = ["06", "07", "0A", "0B", "85", "86", "89", "8A"]
"""Of a DGX-1's GPUs, as CUDA spells them."""


@pytest.fixture
def file(tmp_path):
    """The file of a machine, by its name."""

    def made(name):
        path = tmp_path / f"{name}.xml"
        path.write_text(write(preset_document(name)), encoding="utf-8")
        return str(path)

    return made


@pytest.fixture
def detected(monkeypatch):
    """What detection says, or raises; and how often it was asked."""
    said: dict[str, Any] = {"document": preset_document("dgx1-v100"), "count": 0}

    def detect(**_how):
        said["count"] += 1
        if isinstance(said["document"], BaseException):
            raise said["document"]
        return said["document"]

    monkeypatch.setattr("ringcoll.topology.detect.detect", detect)
    return said


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Where rings are kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "ringcoll" / "rings"


def agreed(nranks, gpus=None, topo_file=None):
    """What each rank knows, or the error that it raises."""
    fabrics = thread_fabrics(nranks, 20.0)

    def ask(fabric):
        busid = None if gpus is None else f"0000:{BUSIDS[gpus[fabric.rank]]}:00.0"
        try:
            return agree(fabric, busid, topo_file, None)
        except ringcoll.Error as error:
            return error

    try:
        return each(fabrics, ask)
    finally:
        for fabric in fabrics:
            fabric.close()


def test_gpu_ranks_find_themselves_by_bus_id(detected, caplog):
    caplog.set_level(logging.INFO, logger="ringcoll")
    found = agreed(4, [4, 0, 3, 7])
    assert all(one is found[0] for one in found) and detected["count"] == 1
    busids = [gpu.busid[5:7] for gpu in found[0].system.gpus]
    assert busids == ["85", "06", "0b", "8a"]
    assert found[0].rings.gpus == found[0].system.gpus
    # There are NVLinks 4 - 0 - 3 - 7 - 4 and none else: without relays that is the ring.
    assert {ring.order for ring in found[0].stored.rings} == {(0, 1, 2, 3), (0, 3, 2, 1)}
    assert caplog.text.count("init: this machine: 3 rings, 60 GB/s together") == 1


def test_rings_are_kept_for_the_next_process(detected, folder, caplog, monkeypatch):
    def again():
        cached.cached_rings.cache_clear()
        return agreed(4, [0, 1, 4, 6])[0]

    first = again()
    (path,) = folder.iterdir()
    with monkeypatch.context() as context:
        context.setattr(cached, "find_rings", None)
        assert again() == first
    assert caplog.text == ""
    for torn in (b"", b"[]", b"[7, 8]", path.read_bytes().replace(b"NVL", b"GLUE")):
        path.write_bytes(torn)
        assert again() == first and f"cannot use {path}, so rings are searched again" in caplog.text
        caplog.clear()
        assert again() == first and caplog.text == ""
    detected["document"] = preset_document("dgx1-p100")
    agreed(4, [0, 1, 4, 6])
    assert len([*folder.iterdir()]) == 2
    monkeypatch.setattr(cached, "_sources", lambda: "another search")
    again()
    assert len([*folder.iterdir()]) == 3
    folder.chmod(0o777)
    agreed(3, [0, 1, 4])
    assert "cannot keep rings in" in caplog.text


def test_relays_are_left_to_who_can_relay(detected):
    (one, *_) = agreed(4, [0, 1, 4, 6])
    relayed = {hop.name for ring in one.rings.rings for hop in ring.hops}
    assert "NVB" in relayed
    taken = {hop.name for ring in one.stored.rings for hop in ring.hops}
    assert taken and "NVB" not in taken
    assert "no GPU relays for others yet" in str(one)
    assert one.machine.channels.rings == tuple(ring.order for ring in one.stored.rings)


def test_a_bus_that_nobody_knows_is_not_gone_by(detected):
    text = write(preset_document("pcie-8-dual-socket"))
    busids = re.findall(r'busid="([^"]*)"[^>]*class="0x03', text)
    for old, new in zip(busids, BUSIDS, strict=True):
        text = text.replace(old, f"0000:{new.lower()}:00.0")
    for flat in (False, True):
        if flat:
            text = re.sub(r'numaid="[01]"', 'numaid="-1"', text)
        detected["document"] = parse(text.encode(), "bus")
        (one, *_) = agreed(4, [0, 1, 4, 5])
        assert one.system is not None and one.rings.rings
        assert (one.machine is None) is flat
        assert ("are guesses" in one.reason) is flat
    assert "calls do not use them: the bandwidths of their links are guesses" in str(one)
    assert "calls do not use it: " in "".join(one.format_use("all_reduce"))


@pytest.mark.parametrize(
    ("document", "gpus", "said"),
    [
        (None, [0, 3, 3], "several ranks share the GPU 0000:0b:00.0"),
        (RuntimeError("no NVML"), [0, 1], "RuntimeError: no NVML"),
        (ArgumentError("line 3 is torn"), [0, 1], "line 3 is torn"),
        (
            preset_document("dgx-h100"),
            [0, 1],
            "the topology has no GPU 0000:06:00.0, that of rank 0",
        ),
    ],
    ids=["shared", "fails", "refuses", "other GPUs"],
)
def test_an_unknown_machine_costs_nothing(detected, caplog, document, gpus, said):
    caplog.set_level(logging.INFO, logger="ringcoll")
    detected["document"] = document or detected["document"]
    for one in agreed(len(gpus), gpus):
        assert (one.system, one.rings, one.links, one.machine) == (None,) * 4
        assert one.reason == said
        assert str(one) == f"the machine is not known: {said}"
    assert caplog.text.count(f"init: unknown machine: {said}") == 1


def test_a_rank_alone_and_cpu_ranks_do_not_look(detected):
    assert agreed(1, [0])[0].reason == "a rank alone has no links"
    assert agreed(3)[1].links is HOST.value
    assert detected["count"] == 0


def test_a_file_of_no_use_is_every_ranks_error(detected, tmp_path):
    missing = str(tmp_path / "none.xml")
    torn = tmp_path / "torn.xml"
    torn.write_text("<system>")
    for path, said in ((missing, "cannot be read"), (str(torn), "torn.xml, line 1")):
        found = agreed(3, topo_file=path)
        assert [type(one) for one in found] == [ArgumentError] * 3
        assert len({str(one) for one in found}) == 1
        assert str(found[0]).startswith("init: ") and said in str(found[0])
    detected["document"] = ArgumentError("who made this?")
    for one in agreed(2, [0, 1], topo_file=missing):
        assert str(one) == f"init: topo_file={missing!r}, read by rank 0: who made this?"
    with pytest.raises(ArgumentError, match=r"^init: .*none\.xml"):
        ringcoll.init_all(2, device="cpu", topo_file=missing)


def test_a_file_with_too_few_gpus(file):
    with pytest.raises(ArgumentError, match="minsky has 4 GPUs, too few for 5 CPU ranks"):
        ringcoll.init_all(5, device="cpu", topo_file=file("minsky"))


def test_ranks_name_the_same_file(file):
    def begin(fabric):
        name = file("minsky") if fabric.rank else None
        try:
            return start.communicator_on(
                fabric, *starting(None, None, "cpu", {"topo_file": name}), None
            )
        except MismatchError as error:
            return str(error)

    for said in each(thread_fabrics(2, 20.0), begin):
        assert "minsky.xml" in said and "pass the same options" in said


def word(**changes):
    """What rank 0 tells of a DGX-1 with two ranks, with some of it changed."""
    said = json.loads(machine._topology_text(2, ["0000:06:00.0", "0000:85:00.0"], None, None))
    found = json.loads(said["found"])
    for name, value in changes.items():
        (said if name in said else found)[name] = value
    if "found" not in changes:
        said["found"] = json.dumps(found)
    return json.dumps(said)


RING = {"order": [0, 1], "bandwidth": 40.0, "hops": ["NVL"] * 2}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "Expecting value"),
        ("[1]", "[1]"),
        ("[" * 100_000, "recursion"),
        ("{}", "{}"),
        ('{"unknown": 3}', "unknown: malformed: 3"),
        ('{"refused": "no", "unknown": "no"}', "refused"),
        ({"title": 5}, "title: malformed: 5"),
        ({"document": "<system>"}, "document: malformed"),
        ({"document": "<!DOCTYPE a><system/>"}, "document: malformed"),
        ({"document": None}, "document: malformed: None"),
        ({"gpus": ["GPU/1"]}, "gpus: malformed"),
        ({"gpus": "GPU"}, "gpus: malformed: GPU"),
        ({"gpus": [{}, 1]}, "gpus: malformed"),
        ({"found": "7"}, "malformed: 7"),
        ({"found": "{}"}, "found: malformed"),
        ({"rings": 1}, "rings: malformed: 1"),
        ({"rings": {"rings": []}}, "rings: malformed"),
        ({"stored": "x"}, "stored: malformed: 'x'"),
    ],
)
def test_a_malformed_word_is_named(detected, text, named):
    if isinstance(text, dict):
        text = word(**text)
    with pytest.raises(MachineError, match=r"^topology sent by rank 0") as caught:
        machine._parse(text, 2, True)
    assert named in str(caught.value)


def test_what_is_malformed_is_every_ranks_error(detected, monkeypatch):
    text = word(gpus=["GPU/nobody", "GPU/else"])
    monkeypatch.setattr(machine, "_topology_text", lambda *_asked: text)
    found = agreed(2, [0, 4])
    assert [type(one) for one in found] == [MachineError] * 2
    assert str(found[0]) == str(found[1])


# -- CPU ranks that play a machine's GPUs ----------------------------------------------------------


def test_ranks_play_a_machine(file):
    def work(comm):
        assert sums(comm) and sums(comm, algorithm="ring", verify=True)
        assert sums(comm, algorithm="ring", channels=3) and sums(comm, channels=6)
        return comm.topology

    topologies = ringcoll.spawn(work, 8, device="cpu", topo_file=file("dgx1-v100"))
    topology = topologies[0]
    assert isinstance(topology, ringcoll.Topology)
    assert all(one is topology for one in topologies)
    machine, links, rings = topology.machine, topology.links, topology.rings
    assert machine and machine.channels and links and rings
    assert machine.channels.shares == (2, 2, 1, 1)
    assert links.topology == "machine" and rings.bandwidth == 120


@pytest.mark.parametrize("name", ["pcie-4-two-switches", "dgx-h100", "minsky"])
def test_other_machines(file, name):
    assert ringcoll.spawn(sums, 4, device="cpu", topo_file=file(name)) == [True] * 4


def test_unequal_counts_along_rings(file):
    counts = [0, 30_000, 5, 1111, 64, 1]

    def work(comm):
        whole = np.empty(sum(counts), "int64")
        comm.all_gather_v(np.full(counts[comm.rank], comm.rank), whole, counts, algorithm="ring")
        part = np.empty(counts[comm.rank], "int64")
        comm.reduce_scatter_v(whole, part, counts, algorithm="ring")
        return np.array_equal(whole, np.repeat(range(6), counts)), set(part.tolist())

    for rank, (right, part) in enumerate(
        ringcoll.spawn(work, 6, device="cpu", topo_file=file("dgx1-v100"))
    ):
        assert right and part <= {6 * rank}


def test_the_environment_names_a_file(file, monkeypatch):
    monkeypatch.setenv("RINGCOLL_TOPO_FILE", file("dgx1-p100"))

    def work(comm):
        return comm.topology.system.title, comm.topology.rings.bandwidth

    assert ringcoll.spawn(work, 8, device="cpu") == [("dgx1-p100", 72.0)] * 8
    other = ringcoll.spawn(work, 4, device="cpu", topo_file=file("a100-mesh-4"))
    assert other == [("a100-mesh-4", 240.0)] * 4


def test_children_search_among_their_members(file, monkeypatch):
    calls = []
    honest = vars(cached)["find_rings"]

    def counted(*args, **how):
        calls.append(1)
        return honest(*args, **how)

    monkeypatch.setattr(cached, "find_rings", counted)
    cached.cached_rings.cache_clear()
    name = file("dgx1-v100")

    def work(comm):
        before = len(calls)
        odd = comm.split(comm.rank % 2, key=-comm.rank)
        alone = comm.split(comm.rank)
        # The world again, and again: nothing is searched.
        again = comm.split(0)
        comm.barrier()
        searched = len(calls) - before
        rest = comm.shrink([0]) if comm.rank else None
        assert sums(odd) and sums(again)
        assert again.topology is comm.topology
        assert alone.topology.rings.rings == () and alone.topology.machine is None
        assert rest is None or sums(rest)
        busids = [gpu.busid[5:7] for gpu in odd.topology.system.gpus]
        return busids, rest and rest.topology.rings.bandwidth, searched

    found = ringcoll.spawn(work, 8, device="cpu", topo_file=name)
    wanted = [BUSIDS[rank].lower() for rank in (6, 4, 2, 0)]
    assert [busids for busids, *_ in found[::2]] == [wanted] * 4
    assert all(rest and rest > 0 for _, rest, _ in found[1:]) and found[0][1] is None
    calls.clear()
    assert all(ringcoll.spawn(sums, 8, device="cpu", topo_file=name))
    assert calls == []


def test_a_search_that_fails_costs_no_child(file, monkeypatch):
    def work(comm):
        comm.barrier()
        if comm.rank == 0:
            monkeypatch.setattr(machine, "_rings_text", None)
        child = comm.split(0, key=-comm.rank)
        return sums(child), child.topology.machine, child.topology.reason

    for right, known, reason in ringcoll.spawn(work, 4, device="cpu", topo_file=file("minsky")):
        assert right and known is None and reason.startswith("TypeError: ")


def test_ranks_without_a_machine_are_as_they_were():
    def work(comm):
        child = comm.split(0)
        return comm.topology, child.topology, comm.explain("all_reduce", 4096)

    for mine, childs, text in ringcoll.spawn(work, 2, device="cpu"):
        assert mine.links is HOST.value and childs == mine
        assert "machine" not in text
        assert str(mine) == "the machine is not known: CPU ranks, and no topo_file"


def test_explain_and_the_text_of_a_topology(file):
    def work(comm):
        sizes = ("all_reduce", 1 << 24), ("reduce", 64), ("all_to_all", 64)
        return str(comm.topology), *(comm.explain(*size) for size in sizes)

    text, large, small, hops = ringcoll.spawn(work, 8, device="cpu", topo_file=file("dgx1-v100"))[5]
    for part in (
        "GPU3  NV2   NV1   NV2   X     SYS   SYS   SYS   NV1   0",
        "4 rings, 120 GB/s together; no set of rings of these classes exceeds 120",
        "limit: NVLink (GPU0 -> GPU1, ",
        "takes 3 times as long on paper along as many rings in index order (GPUs may relay)",
    ):
        assert part in text
    assert "ring and chain go along 4 rings, 120 GB/s together:" in large
    assert "  0 3 2 1 5 6 7 4, with 2 of 6 parts of the bytes" in large
    # The same rings: those in index order go by PCIe and CPUs where no link joins two GPUs.
    assert "takes 20 times as long on paper along as many rings in index order (no GPU re" in large
    assert "\n  ring, S = 1: " in large
    assert "machine: dgx1-v100" in small and "in index order" not in small
    assert "machine: dgx1-v100" in hops and "ring and chain" not in hops


def test_explain_suggests_only_what_it_explains():
    (comm,) = ringcoll.init_all(1, device="cpu")
    with comm, pytest.raises(ArgumentError, match=r"'send': one of all_reduce, .*barrier$"):
        comm.explain("send", 64)


def test_explain_takes_the_options_of_a_call():
    """What it says of them is what the call does; ``stream`` decides nothing."""

    def work(comm):
        refusals = []
        for how in ({"protocol": "LL"}, {"algoritm": "ring"}, {"async_op": True}):
            with pytest.raises(UsageError) as refused:
                comm.explain("all_reduce", 64, **how)
            refusals.append(str(refused.value))
        config = ringcoll.Config(algorithm="ring")
        said = [
            comm.explain("all_reduce", 1 << 20, algorithm="ring", stream=None),
            comm.explain("all_reduce", 1 << 20, config=config, slices=3),
            comm.explain("all_reduce", 64, algorithm="ring", deterministic=True),
        ]
        return said, refusals

    (ring, sliced, ordered), refusals = ringcoll.spawn(work, 4, device="cpu")[0]
    assert "algorithm='ring' is set" in ring
    assert "buffers of comm.empty: ring, S = 3" in sliced
    assert "refused: all_reduce: algorithm='ring' is not deterministic on 4 ranks" in ordered
    assert "protocol='LL' is for GPU ranks" in refusals[0]
    assert "did you mean 'algorithm'" in refusals[1] and "no option 'async_op'" in refusals[2]


def test_explain_says_which_rings_channels_take(file):
    def work(comm):
        return comm.explain("broadcast", 1 << 24)

    name = file("dgx1-v100")
    (text, *_) = ringcoll.spawn(work, 8, device="cpu", topo_file=name, channels=5)
    assert "(channels=5: in turns, every other turn the other way round)" in text
    assert "  0 3 2 1 5 6 7 4, with 1 of 6 parts of the bytes" in text
    assert "  4 7 6 5 1 2 3 0, with 1 of 6 parts of the bytes" in text
    (text, *_) = ringcoll.spawn(work, 8, device="cpu", topo_file=name, channels=1)
    assert "\n  0 3 2 1 5 6 7 4\n" in text and "in turns" not in text
