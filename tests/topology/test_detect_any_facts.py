"""Whatever a machine says of itself: a document comes out, and no pair that anyone denies."""

from hypothesis import given, settings
from hypothesis import strategies as st

from ringcoll.topology.build import build
from ringcoll.topology.detect import document_of
from ringcoll.topology.detect.facts import (
    CpuFacts,
    FabricFacts,
    Facts,
    GpuFacts,
    LinkFacts,
    NicFacts,
    PairFacts,
    PciFacts,
)
from ringcoll.topology.document import parse, write
from ringcoll.topology.system import LinkKind, NvSwitch

BUSIDS = [f"{domain}:0{n}:00.0" for n, domain in enumerate(("0000", "0000", "0001", "10000"))]
FAR = [*BUSIDS, "ffffffff:ff:ff.0", "0000:c5:00.0", "0000:77:00.0", None]


def maybe(strategy):
    return st.none() | strategy


def choice(*values):
    return st.sampled_from((None, *values))


links = st.builds(
    LinkFacts,
    active=choice(True, True, False),
    p2p=choice(True, True, False),
    remote=st.sampled_from(FAR),
    remote_type=choice(0, 1, 2, 255),
    speed=choice(0, 25781, 26562),
)
fabrics = st.builds(
    FabricFacts, choice(0, 1, 2, 3), choice(0), choice(0, 1), choice("0" * 32, "ab" * 16)
)
texts = st.text(max_size=5)


@st.composite
def facts(draw):
    gpus = []
    for n, busid in enumerate(draw(st.lists(st.sampled_from(BUSIDS), unique=True))):
        rows = draw(maybe(st.lists(links, max_size=6)))
        gpus.append(
            GpuFacts(
                busid,
                index=draw(maybe(st.just(n))),
                name=draw(maybe(texts)),
                sm=draw(choice(60, 90)),
                links=None if rows is None else tuple(rows),
                generation_max=draw(choice(0, 3, 99)),
                width_max=draw(choice(0, 16)),
                fabric=draw(maybe(fabrics)),
                mig=draw(choice(True, False)),
                c2c=draw(maybe(st.just((10, 44712)))),
            )
        )
    pairs = {}
    for a in gpus:
        for b in gpus:
            if a is not b and draw(st.booleans()):
                status, access = draw(choice(0, 0, 5)), draw(choice(True, True, False))
                ancestor = draw(choice(10, 30))
                pairs[a.busid, b.busid] = PairFacts(status, ancestor, access)
    pci = []
    for busid in draw(st.lists(st.sampled_from([*BUSIDS, "0000:c5:00.0"]), unique=True)):
        above = draw(st.lists(st.sampled_from(["0000:e0:00.0", "0000:e1:00.0"]), unique=True))
        pci.append(
            PciFacts(
                busid,
                (*above, busid),
                draw(choice("0x030200", "0x068000", "0x068001", "0x060400")),
                max_speed=draw(choice("Unknown", "16.0 GT/s PCIe")),
                max_width=draw(choice(0, 16, 255)),
                width=draw(choice(0, 8)),
                numa=draw(choice(-1, 0, 3)),
            )
        )
    nics = draw(st.lists(st.builds(NicFacts, texts, choice("0000:77:00.0", BUSIDS[0]), choice(1))))
    cpu = CpuFacts(draw(choice("x86_64", "arm64")), draw(choice("GenuineIntel")), draw(choice(25)))
    return Facts(tuple(gpus), pairs, tuple(pci), (), cpu, tuple(nics), draw(choice("580")))


@given(facts())
@settings(max_examples=60)
def test_any_facts_make_a_machine(said):
    document = document_of(said)
    assert parse(write(document).encode(), "facts") == document
    system = build(document)
    assert sorted(gpu.busid for gpu in system.gpus) == sorted(gpu.busid for gpu in said.gpus)
    place = {gpu.name: gpu.busid for gpu in system.gpus}
    fabrics = {node.name for node in system.nodes if isinstance(node, NvSwitch)}
    members = {name: {x.dst for x in system.out[name]} for name in fabrics}
    joined = [(a, b) for ends in members.values() for a in ends for b in ends if a != b]
    joined += [
        (link.src, link.dst)
        for link in system.links
        if link.kind is LinkKind.NVLINK and {link.src, link.dst} <= place.keys()
    ]
    whole = {gpu.busid for gpu in said.gpus if not gpu.mig}
    for a, b in joined:
        pair = said.pair(place[a], place[b])
        assert pair.access is not False
        assert pair.nvlink in (0, None)
        assert {place[a], place[b]} <= whole
