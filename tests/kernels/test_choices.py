"""What GPU ranks choose for a call becomes a kernel's text and words, however small it is."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from ringcoll.algorithms import build
from ringcoll.algorithms.channels import alternating
from ringcoll.algorithms.parts import assemble, inp, out
from ringcoll.arguments.calls import Call
from ringcoll.collectives import COLLECTIVES, Collective
from ringcoll.dtypes import dtype_of, op_of
from ringcoll.encode import encode
from ringcoll.errors import ArgumentError, LaunchRefused
from ringcoll.executors.cuda import dual_program
from ringcoll.executors.cuda.dual_program import fits_dual
from ringcoll.executors.cuda.kernel_body import KernelFits, body_of
from ringcoll.executors.cuda.params import Addresses, Header, pack
from ringcoll.executors.cuda.workspace import Workspace
from ringcoll.executors.cuda_nodes import standard
from ringcoll.launch import ALL_MAPPED
from ringcoll.plan import Block, Buffer, Step
from ringcoll.tuner import candidates
from ringcoll.tuner.choice import Limits
from ringcoll.tuner.measured import PROTOCOL_SIZES
from ringcoll.tuner.simple import copied_blocks, crosses
from tests.kernels.chosen import chosen, rooted

NAMES = [name for name in COLLECTIVES if name != "send"]
FLOATS = Call("all_reduce", 0, None, None, 1, dtype_of("float32"))
SCANS = [name for name in NAMES if COLLECTIVES[name].prefix]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("nvlink", [False, True])
@pytest.mark.parametrize("nranks", [1, 2, 3])
def test_every_call_has_a_kernel(nranks, nvlink, name):
    op = op_of("sum") if COLLECTIVES[name].reduces else None
    workspace = Workspace(nranks)
    counts = [0] if name == "barrier" else [0, 1, 5, 1 << 20]
    for count, in_place, mapped in product(counts, [False, True], [frozenset(), ALL_MAPPED]):
        nbytes = 4 * count * nranks
        call = Call(name, 0, None, None, count, dtype_of("float32"), op, 0, in_place, nbytes)
        choice = chosen(call, nranks, nvlink=nvlink, mapped=mapped)
        body = body_of(choice, call, workspace, (Addresses(0, (0,) * nranks, 0),))
        assert "ringcoll_kernel" in body.text
        assert 1 <= choice.grid.blocks <= 132, (count, in_place, mapped)
        assert len(body.words) == len(body.programs) == 1, (count, in_place, mapped)


@pytest.mark.parametrize("mapped", [frozenset(), ALL_MAPPED], ids=["plain", "mapped"])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "barrier"])
def test_hardly_more_slices_than_must_be_are_found_in_two_attempts(monkeypatch, name, mapped):
    """A first call of 64 MiB took twice as long on the host when each power of two was tried."""
    tried = []

    def noting(plan, launch):
        tried.append(launch.slices)
        return encode(plan, launch)

    monkeypatch.setattr(candidates, "encode", noting)
    for nbytes in (1 << 20, 100 << 20, 3 << 30):
        tried.clear()
        found = choice(name, nbytes, protocol="Simple", slices=1, mapped=mapped)
        assert 1 <= len(tried) <= 2, nbytes
        if (less := found.launch.slices * 511 // 512 - 1) >= 1:
            launch, layout = replace(found.launch, slices=less), replace(found.layout, slices=less)
            fewer = replace(found, launch=launch, layout=layout, program=encode(found.plan, launch))
            need, room = KernelFits(Workspace(4)).scratch(FLOATS, fewer)
            assert need > room, nbytes


def choice(name, nbytes=256, nvlink=True, dtype="float32", **options):
    row = dtype_of(dtype)
    op = op_of("sum") if COLLECTIVES[name].reduces else None
    wide = "all" in (COLLECTIVES[name].input, COLLECTIVES[name].output)
    count = nbytes // row.itemsize // (4 if wide else 1)
    call = Call(name, 0, None, None, count, row, op, nbytes=nbytes)
    return chosen(call, 4, nvlink=nvlink, **options)


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("barrier", "gather", "scatter")])
def test_lines_grow_wider_and_then_end(name):
    protocols = [choice(name, 1 << k).launch.protocol for k in range(8, 27)]
    assert list(dict.fromkeys(protocols)) == ["LL", "LL128", "Simple"]
    without = [choice(name, 1 << k, nvlink=False).launch.protocol for k in range(8, 27)]
    assert list(dict.fromkeys(without)) == ["LL", "Simple"]


@pytest.mark.parametrize("name", [n for n in NAMES if n != "barrier"])
def test_kernels_are_compiled_ahead_for_sizes_of_every_protocol(name):
    samples = {protocol: by.samples for protocol, by in PROTOCOL_SIZES.items()}
    assert all(samples.values())
    samples["Simple"] = (64 << 20, 256 << 20)
    for protocol, nbytes in ((p, size) for p, sizes in samples.items() for size in sizes):
        assert choice(name, nbytes).launch.protocol == protocol, nbytes


@pytest.mark.parametrize("nranks", [2, 4])
def test_a_wheel_carries_what_runs_on_registered_memory(nranks):
    kept = {*standard.standard_sources((nranks,))}
    for name in (name for name in NAMES if name not in ("barrier", *SCANS)):
        for nbytes in (3 << 20, 5 << 20, 12 << 20, 24 << 20, 512 << 20):
            call = standard.call_of(nranks, name, "float32", nbytes)
            for blocks in (None, 32):  # of an init and of a group of torch.distributed
                limits = Limits(hellos_decide=True, blocks=blocks)
                texts = standard.texts_of(call, nranks, limits)
                assert {*texts} <= kept, (name, nbytes, blocks)


@pytest.mark.parametrize(("name", "last"), [("all_reduce", 21), ("all_gather", 22)])
@pytest.mark.parametrize(("blocks", "beyond"), [(49, "LL128"), (48, "Simple"), (32, "Simple")])
def test_lines_end_earlier_for_few_blocks(name, last, blocks, beyond):
    found = [choice(name, 1 << k, blocks=blocks).launch.protocol for k in (last, last + 1)]
    assert found == ["LL128", beyond]


def test_wide_lines_want_nvlink():
    with pytest.raises(LaunchRefused, match=r"LL128.*needs NVLink"):
        choice("all_gather", protocol="LL128", nvlink=False)


def test_wide_lines_carry_elements_of_eight_bytes_at_most():
    assert choice("all_gather", 1 << 20, dtype="complex64").launch.protocol == "LL128"
    assert choice("all_gather", 1 << 20, dtype="complex128").launch.protocol == "LL"
    with pytest.raises(LaunchRefused, match="at most 8 bytes"):
        choice("all_gather", protocol="LL128", dtype="complex128")


def test_lines_have_one_slice():
    with pytest.raises(ArgumentError, match="protocol='LL' has one slice"):
        choice("all_gather", protocol="LL", slices=4)


def test_a_barrier_has_signals_of_its_own_whatever_the_protocol():
    assert choice("barrier", protocol="LL").launch.protocol == "Simple"


def test_an_unknown_protocol_is_refused():
    with pytest.raises(ArgumentError, match="protocol='none'"):
        choice("all_gather", protocol="none")


@pytest.mark.parametrize("nranks", [2, 4])
def test_slices_are_words_and_no_text(nranks):
    """Whoever measures many numbers of slices compiles one kernel a rank."""
    workspace, row = Workspace(nranks), dtype_of("uint32")
    for rank in range(nranks):
        call = Call("broadcast", rank, None, None, 128 << 20, row, None, nbytes=512 << 20)
        texts, words = set(), set()
        for slices in (1, 2, 4, 64, 256):
            mapped = frozenset({Buffer.OUTPUT})
            options: dict[str, Any] = {"algorithm": "chain", "protocol": "Simple"}
            choice = chosen(call, nranks, mapped=mapped, slices=slices, **options)
            assert (choice.launch.slices, choice.grid.blocks) == (slices, 64)
            body = body_of(choice, call, workspace, (Addresses(rank, (0,) * nranks, 0),))
            texts.add(body.text)
            words.add(tuple(body.words[0]))
        assert len(texts) == 1 and len(words) == 5


@pytest.mark.parametrize("mapped", [frozenset(), ALL_MAPPED], ids=["plain", "mapped"])
@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("barrier", *SCANS)])
@pytest.mark.parametrize("nranks", [2, 3])
def test_every_collective_has_lanes_of_copies(nranks, name, mapped):
    op = op_of("sum") if COLLECTIVES[name].reduces else None
    nbytes = 4 * (1 << 22) * nranks
    call = Call(name, 0, None, None, 1 << 22, dtype_of("float32"), op, nbytes=nbytes)
    found = chosen(call, nranks, mapped=mapped, engine="copy")
    assert found.engine == "copy"
    programs = found.program.programs
    copied = copied_blocks(found.program)
    assert any(crosses(programs[number]) for number in copied)
    others = [block for k, block in enumerate(programs) if k not in copied]
    assert bool(found.grid.blocks) == bool(others)
    assert found.grid.blocks <= 66
    if found.program.collective.reduces:
        assert any(row.labels.reduces for block in others for row in block.rows)


@pytest.mark.parametrize("name", SCANS)
def test_copy_engines_do_not_carry_prefixes(name):
    with pytest.raises(LaunchRefused, match=f"engine='copy' does not support {name}: leave engine"):
        choice(name, engine="copy")


@pytest.mark.parametrize("name", SCANS)
@pytest.mark.parametrize("nranks", [2, 4, 8])
def test_prefixes_go_by_doubling_where_they_are_small_and_along_a_chain(nranks, name):
    def by(nbytes, **options):
        call = Call(
            name, 0, None, None, nbytes // 4, dtype_of("float32"), op_of("sum"), nbytes=nbytes
        )
        found = chosen(call, nranks, **options)
        return found.launch.protocol, found.algorithm, found.launch.slices > 1

    assert by(4096) == ("LL", "recursive_doubling", False)
    assert by(4096, deterministic=True) == ("LL", "chain", False)
    assert by(1 << 20) == ("LL128", "recursive_doubling", False)
    assert by(64 << 20) == ("Simple", "chain", True)


def test_copy_engines_have_nothing_to_do_for_a_barrier_or_one_rank():
    assert choice("barrier", engine="copy").engine == "sm"
    call = Call("all_gather", 0, None, None, 64, dtype_of("float32"), None, nbytes=256)
    alone = chosen(call, 1, engine="copy")
    assert alone.engine == "sm"


def test_copy_engines_carry_no_lines():
    with pytest.raises(ArgumentError, match="engine='copy' runs with protocol='Simple' only"):
        choice("all_gather", engine="copy", protocol="LL")


def test_an_algorithm_without_a_lane_of_copies_is_refused():
    call = Call("all_reduce", 1, None, None, 64, dtype_of("float32"), op_of("sum"), nbytes=256)
    refusal = "all_reduce on rank 1: engine='copy': with slices=2 no block"
    with pytest.raises(LaunchRefused, match=refusal):
        chosen(call, 2, mapped=ALL_MAPPED, engine="copy", algorithm="one_shot")


def test_more_lanes_than_blocks_that_run_together_are_refused():
    call = Call("all_reduce", 0, None, None, 1 << 22, dtype_of("float32"), op_of("sum"))
    options: dict[str, Any] = {"protocol": "Simple", "algorithm": "all_pairs", "slices": 4}
    with pytest.raises(LaunchRefused, match="needs 3 CUDA blocks on a rank, 1 are resident"):
        chosen(call, 4, 1, mapped=ALL_MAPPED, **options)


@pytest.mark.parametrize(
    ("nranks", "mebibytes", "options", "algorithm", "slices", "blocks"),
    [
        (4, 16, {}, "scatter_gather_fused", 8, 3 * 43),
        (4, 64, {}, "scatter_gather_fused", 24, 3 * 44),
        (5, 64, {}, "scatter_gather_fused", 24, 4 * 33),
        (3, 127, {}, "scatter_gather_fused", 24, 2 * 64),
        (4, 128, {}, "chain", 32, 64),
        (2, 64, {}, "chain", 1, 64),
        (2, 64, {"mapped": ALL_MAPPED}, "one_shot", 1, 64),
        (8, 64, {}, "chain", 16, 64),  # a lane of the root would have 18 blocks
        (4, 64, {"blocks": 95}, "chain", 16, 64),
        (4, 64, {"channels": 2}, "ring", 16, 128),
        (4, 64, {"mapped": frozenset()}, "tree", 16, 3 * 44),
        (4, 64, {"algorithm": "scatter_gather_fused", "slices": 3}, "scatter_gather_fused", 3, 132),
    ],
)
def test_a_large_broadcast(nranks, mebibytes, options, algorithm, slices, blocks):
    found = rooted("broadcast", nranks, mebibytes << 20, **options)
    assert found.algorithm == algorithm
    assert (found.launch.slices, found.grid.blocks) == (slices, blocks)


def own_signals(nranks, *, only=None):
    """An all_gather of two ranks that says itself who waits for whom."""

    def steps(rank):
        peer = Block(1 - rank)
        yield Step((inp(rank, 0),), (out(rank, rank),))
        yield Step((), (), signals=(peer,))
        yield Step((inp(rank, 0),), (out(1 - rank, rank),), waits=(peer,), signals=(peer,))
        yield Step((), (), waits=(peer,))

    turns = zip(steps(0), steps(1), strict=True)
    program = ((Block(rank), step) for turn in turns for rank, step in enumerate(turn))
    return assemble(Collective("all_gather", nranks), program, only=only)


@pytest.mark.parametrize("name", ["all_to_all", "all_gather"])
@pytest.mark.parametrize(("nranks", "slices"), [(2, 2), (4, 1)])
def test_an_own_segment_is_copied_beside_those_of_two_ranks(name, nranks, slices):
    count = (64 << 20) // 4 // nranks
    call = Call(name, 0, None, None, count, dtype_of("float32"), None, nbytes=64 << 20)
    found = chosen(call, nranks, mapped=ALL_MAPPED)
    lanes = slices if name == "all_to_all" else 1  # others may compute beside an all_gather
    assert (found.launch.slices, found.grid.blocks) == (slices, 64 * lanes)


@pytest.mark.parametrize("algorithm", ["ring", own_signals])
def test_slices_of_two_ranks_are_those_of_the_default_algorithm(algorithm):
    found = rooted("all_gather", 2, mapped=ALL_MAPPED, algorithm=algorithm)
    assert found.launch.slices == 1


@pytest.mark.parametrize(
    ("nranks", "mebibytes", "mapped", "algorithm", "slices", "blocks"),
    [
        (2, 32, ALL_MAPPED, "two_shot", 1, 64),
        (2, 64, ALL_MAPPED, "all_pairs_fused", 8, 2 * 64),
        (2, 512, ALL_MAPPED, "all_pairs_fused", 64, 2 * 64),
        (2, 512, frozenset(), "all_pairs", 256, 3 * 44),
        (4, 512, ALL_MAPPED, "two_shot", 1, 64),
    ],
)
def test_two_ranks_push_what_is_large(nranks, mebibytes, mapped, algorithm, slices, blocks):
    found = rooted("all_reduce", nranks, mebibytes << 20, mapped)
    assert found.algorithm == algorithm
    assert (found.launch.slices, found.grid.blocks) == (slices, blocks)


@pytest.mark.parametrize(
    ("mebibytes", "how", "algorithm", "slices", "blocks"),
    [
        (32, {}, "one_shot", 1, 64),
        (64, {}, "all_pairs_output", 16, 2 * 64),
        (256, {}, "all_pairs_output", 32, 2 * 64),
        (1024, {}, "all_pairs_output", 64, 2 * 64),
        (512, {"in_place": True}, "one_shot", 1, 64),
        (512, {"mapped": frozenset()}, "all_pairs", 128, 2 * 64),
        (512, {"mapped": frozenset({Buffer.INPUT})}, "one_shot", 1, 64),
        (512, {"blocks": 96}, "one_shot", 1, 64),
        (512, {"nranks": 4}, "one_shot", 1, 64),
    ],
)
def test_contributions_of_two_ranks_land_in_output(mebibytes, how, algorithm, slices, blocks):
    """Where it is not INPUT as well, peers reach it, and there are blocks for both lanes."""
    found = rooted("reduce_scatter", **{"nranks": 2, "nbytes": mebibytes << 20, **how})
    assert found.algorithm == algorithm
    assert (found.launch.slices, found.grid.blocks) == (slices, blocks)


EITHER = [
    ("reduce", {"algorithm": "scatter_gather"}),
    ("reduce", {"algorithm": "scatter_gather_push"}),
    ("gather", {"algorithm": "all_pairs"}),
    ("scatter", {"algorithm": "one_shot"}),
    ("broadcast", {"algorithm": "one_shot"}),
]
ASKED = ("all_reduce", {"mapped": frozenset(), "hellos_decide": True})


@pytest.mark.parametrize("nranks", [2, 3, 4, 8, 16])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in ("all_gather", "reduce_scatter", "all_to_all")),
        *(("all_reduce", {"deterministic": ordered}) for ordered in (False, True)),
        ("all_reduce", {"algorithm": "ring"}),
    ],
)
def test_where_hellos_tell_of_all_buffers_both_ways_are_carried(nranks, name, options):
    found = rooted(name, nranks, **ASKED[1], **options)
    reached = rooted(name, nranks, mapped=ALL_MAPPED, **options)
    staged = rooted(name, nranks, mapped=frozenset(), **options)
    # Each as it would be alone, in a launch that has blocks for both.
    grid = staged.grid._replace(blocks=max(staged.grid.blocks, reached.grid.blocks))
    assert found == replace(staged, grid=grid, direct=reached)
    assert found.reads_hellos and reached.reads_hellos and not staged.reads_hellos


def test_lines_ask_for_nothing():
    found = rooted("all_reduce", nbytes=4096, mapped=frozenset(), hellos_decide=True)
    assert found.launch.in_band and found.direct is None and not found.reads_hellos


@pytest.mark.parametrize(("name", "options"), EITHER)
@pytest.mark.parametrize("nranks", [3, 4, 8])
def test_a_rooted_call_carries_what_runs_where_the_root_is_reached(nranks, name, options):
    found = rooted(name, nranks, **options)
    other = rooted(name, nranks, mapped=ALL_MAPPED, **options)
    assert found.direct == other and other.direct is None
    assert found.program != other.program and found.plan == other.plan
    assert other.launch.mapped == ALL_MAPPED and other.launch.slices < found.launch.slices
    wanted = rooted(name, nranks, **options).grid.blocks
    assert found.grid.blocks == max(other.grid.blocks, wanted) <= 132
    assert [kind.launch for kind in found.variants] == [found.launch, other.launch]
    assert found.total == (found.program.total and other.program.total)


@pytest.mark.parametrize("nranks", [2, 4])
def test_few_blocks_run_an_all_reduce_in_one_lane(nranks):
    many, few = (
        rooted("all_reduce", nranks, mapped=ALL_MAPPED, blocks=blocks) for blocks in (49, 48)
    )
    assert (few.algorithm, few.grid.blocks) == ("two_shot_fused", 48) != many.algorithm
    assert "gpu_few_blocks.json" in few.why[0]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in ("broadcast", "gather", "scatter", "all_reduce", "all_gather")),
        ("reduce", {"algorithm": "one_shot"}),
        ("reduce", {"algorithm": "chain"}),
        ("reduce", {"mapped": frozenset()}),
        ("reduce", {"engine": "copy"}),
        ("reduce", {"protocol": "LL", "nbytes": 4096}),
        ("reduce", {"nranks": 1}),
    ],
)
def test_where_nobody_else_touches_the_roots_buffer_there_is_one_program(name, options):
    found = rooted(name, **options)
    assert found.direct is None and found.variants == (found,)
    assert found.total == found.program.total


@pytest.mark.parametrize(("name", "options"), [*EITHER, ASKED])
@pytest.mark.parametrize("nranks", [2, 3, 8])
def test_what_fits_is_what_a_launch_carries(monkeypatch, nranks, name, options):
    """The room that is asked for is enough, by no more than the padding."""
    found = rooted(name, nranks, **options)
    op = op_of("sum") if COLLECTIVES[name].reduces else None
    call = Call(name, 0, None, None, found.layout.counts[0], dtype_of("float32"), op)
    at = tuple(Addresses(rank, (0,) * nranks, 0, trace=1) for rank in range(nranks))
    body = body_of(found, call, Workspace(nranks), at)
    fits_one = len(pack(body, Header(1.0, 0, True, True, 1), 0, at))
    programs = found.program, found.direct.program
    for room, wanted in ((fits_one + 8 * 32 * nranks, True), (fits_one - 1, False)):
        monkeypatch.setattr(dual_program, "LARGEST", room)
        fits_dual.cache_clear()
        assert fits_dual(*programs, scales=False, together=nranks) is wanted
    monkeypatch.undo()
    fits_dual.cache_clear()


def test_two_programs_that_no_launch_could_carry_are_one():
    # Eight ranks of one GPU are one launch, which has less room for each.
    assert rooted("reduce", 8, together=8).direct is not None
    assert rooted("reduce", 16).direct is not None
    assert rooted("reduce", 16, together=16).direct is None


@pytest.mark.parametrize(("name", "options"), [*EITHER, ASKED])
def test_both_programs_are_words_of_one_text(name, options):
    found = rooted(name, **options)
    op = op_of("sum") if COLLECTIVES[name].reduces else None
    call = Call(name, 1, None, None, found.layout.counts[0], dtype_of("float32"), op)
    at = Addresses(1, (0,) * 4, 0)
    body = body_of(found, call, Workspace(4), (at,))
    alone = [
        body_of(replace(kind, direct=None), call, Workspace(4), (at,)) for kind in found.variants
    ]
    moves = [re.findall(r"Move<.*?>", one.text) for one in (*alone, body)]
    assert moves[2] == list(dict.fromkeys(moves[0] + moves[1]))
    assert "run_dual<Type" in body.text and all("run<Type" in one.text for one in alone)
    words = body.words[0]
    for number, (kind, one) in enumerate(zip(found.variants, alone, strict=True)):
        begin, own = words[number], one.words[0]
        blocks = kind.program.of(1)
        assert words[begin : begin + 1 + len(blocks)] == own[: 1 + len(blocks)]
        for place in own[1 : 1 + len(blocks)]:  # rows, slices, window, width
            assert words[begin + place : begin + place + 4] == own[place : place + 4]
        assert words[2 + number] == kind.grid.replicas
    # The first program's moves have the numbers that they would have alone.
    assert words[words[0] : words[1]] == alone[0].words[0][: words[1] - words[0]]
    side = int(COLLECTIVES[name].rooted == "output")  # of root 0
    asked = (side, side + 1) if COLLECTIVES[name].has_root else (0, 8)
    assert (words[4] & 0xFFFFFFFF, words[4] >> 32) == asked


@pytest.mark.parametrize(("name", "algorithm"), [("all_reduce", None), ("broadcast", "chain")])
@pytest.mark.parametrize("nbytes", [256, 64 << 20])
def test_channels_are_rings_by_turns_in_both_directions(name, algorithm, nbytes):
    found = choice(name, nbytes, algorithm=algorithm, channels=3)
    wished = build(name, algorithm or "ring", 4, rings=alternating(4, 3))
    assert found.plan == wished
    assert alternating(4, 3) == [(0, 1, 2, 3), (3, 2, 1, 0), (0, 1, 2, 3)]


@pytest.mark.parametrize(("name", "algorithm"), [("all_reduce", "all_pairs"), ("gather", None)])
def test_channels_of_what_has_no_rings_are_refused(name, algorithm):
    with pytest.raises(ArgumentError, match=f"{name} on rank 0: channels=2.*no rings"):
        choice(name, algorithm=algorithm, channels=2)
