"""The kernels compile for every generation of GPUs, whatever is asked of them."""

from __future__ import annotations

import functools
import importlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import pytest

from ringcoll.algorithms import build
from ringcoll.dtypes import DTYPES, OPS, DType, dtype_of, op_of, premul_sum
from ringcoll.encode import encode
from ringcoll.executors.cuda import compile as compiling
from ringcoll.executors.cuda.cache import KernelCache
from ringcoll.executors.cuda.compile import flags, nvrtc_version, read_headers
from ringcoll.executors.cuda.copies import kernel_part
from ringcoll.executors.cuda.copy_gates import gate_text
from ringcoll.executors.cuda.generic import generic_texts
from ringcoll.executors.cuda.ll import ll_body
from ringcoll.executors.cuda.params import Addresses
from ringcoll.executors.cuda.point_to_point import pairs_text
from ringcoll.executors.cuda.simple import simple_body
from ringcoll.executors.cuda.workspace import Workspace
from ringcoll.executors.cuda_nodes.standard import standard_sources
from ringcoll.launch import PROTOCOLS, Launch, Layout
from tests.kernels import cuda12
from tests.kernels.harness import LEGAL, OPERATORS, TYPES
from tests.kernels.stand_in import by_head, together

pytestmark = pytest.mark.slow

pytest.importorskip("cupy", reason="NVRTC is reached through CuPy")

ARCHS = ("sm_75", "sm_80", "sm_90", "sm_100", "sm_120")
ENDS = (ARCHS[0], ARCHS[-1])
"""For kernels of instructions that the standard kernels, compiled for all, have too."""
ELF = b"\x7fELF"
LAUNCHES = (Launch(protocol="LL", mapped=frozenset()), Launch())
INSTANCE = re.compile(r"(?:Batch|Move)<.*>")
BATCH = re.compile(
    r"Batch<Type, Op, (\w+), (\w+), 0x\w+, \d+, (\d+), (\d+), Kinds<0x(\w+)>, Kinds<0x(\w+)>>"
)
MOVE = re.compile(r"Move<Type, Op, (\w+), (\w+), 0x\w+, 0x\w+, \w+, (\d+), (\d+)>")


@functools.cache
def shapes() -> tuple[str, ...]:
    """Of the standard kernels, for 8 ranks or one, so many that each piece of any is in one."""
    texts = [text for text in standard_sources() if re.search(r"RC_RANKS [18]\n", text)]
    return few(texts, pieces)


@functools.cache
def codes() -> tuple[str, ...]:
    """Of those so many that each kind of code is in one: what a generation may still refuse.

    :func:`errors` has found by then what is wrong with any instance for any type; the generic
    kernels, which are among them, and the kernel of each operator have all types.
    """
    return few(shapes(), kinds_of_code)


def few(texts: Sequence[str], parts: Callable[[str], set[object]]) -> tuple[str, ...]:
    """Texts that have all parts of all, none of which the others could do without."""
    of = {text: parts(text) for text in texts}
    times = Counter(part for own in of.values() for part in own)
    found = []
    # Of those that do as well, the floats of 16 bits that are used most stay.
    for text in sorted(of, key=lambda text: (len(of[text]), "BFloat16" in text)):
        if any(times[part] == 1 for part in of[text]):
            found.append(text)
        else:
            times.subtract(of[text])
    return tuple(found)


def pieces(text: str) -> set[object]:
    """What a kernel gives the compiler: its frame, and each instance of a template in that.

    The two floats of 16 bits stand for each other: every operator on every type is compiled too.
    """
    text = re.sub(r"#define RC_WORDS \d+|run\(thread, .*\)|case \d+", "", text)
    text = text.replace("BFloat16", "Float16")
    frame = "\n".join(line for line in text.splitlines() if not INSTANCE.search(line))
    return {(frame, instance) for instance in ("", *INSTANCE.findall(text))}


def header(text: str) -> str:
    return re.findall(r'#include "(.*)"', text)[0]


def kinds_of_code(text: str) -> set[object]:
    """Its headers with their macros, and what each instance does, for any type and number of ranks.

    What an instance does: whether it reduces and finishes, from one source or several, to one
    destination or several, and of which kinds these are.
    """
    found: set[object] = {(header(text), *re.findall(r"RC_LANES \d+", text))}
    if header(text) == "fold.cuh":  # each is of other templates
        found = {text}
    for reduces, final, srcs, dsts, *kinds in (*BATCH.findall(text), *MOVE.findall(text)):
        sources, destinations = (
            frozenset(int(mask, 16) >> 2 * k & 3 for k in range(int(number)))
            for mask, number in zip(kinds or "00", (srcs, dsts), strict=True)
        )
        several = int(srcs) > 1, int(dsts) > 1
        found.add((header(text), reduces, final, several, sources, destinations))
    return found


TWINS = {"uint16", "uint32", "uint64", "bfloat16", "float8_e5m2"}
"""Of the size and accumulator's size of another: every operator on them is compiled too."""
FRAMED = [dtype for dtype in DTYPES if dtype.name not in TWINS]


@functools.cache
def operators() -> tuple[str, ...]:
    """In lines and in words the smallest kernel of each kind of element, operators by turns.

    Integers, on which each is legal, come last and take those that are left.
    """
    found: list[str] = []
    for launch in LAUNCHES:
        program = encode(build("all_reduce", "ring" if launch.in_band else "one_shot", 2), launch)
        layout = Layout(program.collective, (64,))
        at = (Addresses(0, (0, 0), 0),)
        turns: Counter[str] = Counter()
        for number, dtype in enumerate(reversed(FRAMED)):
            name = min((name for d, name in LEGAL if d == dtype), key=turns.__getitem__)
            turns[name] += 1
            op = premul_sum(1) if name == "premul_sum" else OPS[name]
            if launch.in_band:
                wide = number % 2 == 0 and dtype.itemsize <= PROTOCOLS["LL128"].most_itemsize
                protocol = PROTOCOLS["LL128" if wide else "LL"]
                body = ll_body(program, layout, dtype, op, Workspace(2), at, protocol)
            else:
                body = simple_body(program, layout, dtype, op, Workspace(2), at)
            found.append(body.text)
    return tuple(found)


def each_operator() -> str:
    """A kernel for every operator on every element type: all that other kernels take of it."""
    lines = ["#include <ops.cuh>", "using namespace rc;"]
    for dtype, name in LEGAL:
        kind, op = TYPES[dtype.name], f"{OPERATORS[name]}<{TYPES[dtype.name]}>"
        lines.append(
            f'extern "C" __global__ void {kind}_{OPERATORS[name]}(const {kind}::Raw* in, '
            f"const {kind}::Acc* factor, {kind}::Raw* out, u32 nranks) {{\n"
            f"    const {kind}::Acc one = {op}::load(in[0], factor[0]);\n"
            f"    const {kind}::Acc sum = {op}::combine(one, {kind}::widen(in[1]));\n"
            f"    out[0] = {kind}::narrow({op}::finish(sum, nranks));\n"
            "}"
        )
    return "\n".join(lines)


def test_there_is_something_of_everything() -> None:
    texts = "".join(shapes())
    assert {"BFloat16", "Float32"} <= set(re.findall(r"using Type = (\w+);", texts))
    used = set(re.findall(r'#include "(\w+\.cuh)"', texts))
    others = {"copy_gates.cuh", "staging.cuh", "fold.cuh", "generic_ll.cuh", "generic_simple.cuh"}
    assert used == {"ll.cuh", "point_to_point.cuh", "simple.cuh", *others}
    lines, words = "".join(operators()[: len(FRAMED)]), "".join(operators()[len(FRAMED) :])
    for texts in (lines, words):
        kinds = set(re.findall(r"using Type = (\w+);", texts))
        assert kinds == {TYPES[dtype.name] for dtype in FRAMED}
        assert set(re.findall(r"using Op = (\w+)<", texts)) == set(OPERATORS.values())
    assert set(re.findall(r"RC_LANES (\d+)", lines)) == {"1", "8"}


def test_twins_are_as_large_as_another() -> None:
    def sizes(dtype: DType) -> tuple[int, int]:
        return dtype.itemsize, dtype.accumulator.itemsize

    assert {sizes(dtype) for dtype in DTYPES} == {sizes(dtype) for dtype in FRAMED}


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVRTC optimises little: what it refuses, and what the assembler refuses, it still does.

    The kernels for sm_90, and every operator on every type, are compiled as users compile them.
    """
    if nvrtc_version() >= (13, 0):  # which surely has the option
        monkeypatch.setattr(compiling, "flags", lambda arch: (*flags(arch), "--Ofast-compile=max"))


@pytest.mark.parametrize("arch", ARCHS)
def test_standard_kernels(arch: str, request: pytest.FixtureRequest) -> None:
    # NVRTC takes half a second for each: each generation compiles a fifth, together they do all.
    if arch != "sm_90":
        request.getfixturevalue("hasty")
    choice = sorted(codes(), key=header)[ARCHS.index(arch) :: len(ARCHS)]
    cubins = KernelCache(None).compile_all(choice, arch)
    assert all(cubin.startswith(ELF) for cubin in cubins)


def test_every_piece_every_operator_and_each_kind_of_element_is_free_of_errors() -> None:
    assert errors((*shapes(), *operators()), dict(read_headers())) == ""


def test_an_error_in_one_instance_is_found() -> None:
    headers, wanted = dict(read_headers()), b"    static constexpr u32 OWNERS = 1 + SRCS + DSTS;"
    assert headers["ll.cuh"].count(wanted) == 1
    refused = b"    static_assert(SRCS != 4 || RAW != 12);"
    headers["ll.cuh"] = headers["ll.cuh"].replace(wanted, wanted + refused)
    alike = [text for text in shapes() if ", 0xc, 1, 4, 1, " in text]
    assert 0 < len(alike) < 10
    assert "static assertion failed" in errors(alike, headers)


def errors(texts: Iterable[str], headers: dict[str, bytes]) -> str:
    """What the compiler finds in them before it makes code: a tenth of its work."""
    nvrtc = importlib.import_module("cupy.cuda").nvrtc
    said = []
    for alike in by_head(re.sub(r"RC_WORDS \d+", "RC_WORDS 512", text) for text in texts):
        names = [name.encode() for name in headers]
        program = nvrtc.createProgram(together(alike), "all", list(headers.values()), names)
        try:
            nvrtc.compileProgram(program, (*flags("sm_90"), "-fdevice-syntax-only"))
        except nvrtc.NVRTCError:
            said.append(nvrtc.getProgramLog(program))
        nvrtc.destroyProgram(program)
    return "".join(said)


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("arch", ENDS)
def test_kernels_of_calls_of_copy_engines(arch: str) -> None:
    launch = Launch(slices=2, mapped=frozenset())
    program = encode(build("all_reduce", "all_pairs", 2), launch)
    workspace, at = Workspace(2), (Addresses(0, (0, 0), 0),)
    layout = Layout(program.collective, (64,), slices=2)
    beside = simple_body(
        program,
        layout,
        dtype_of("bfloat16"),
        op_of("sum"),
        workspace,
        at,
        kernel_part=kernel_part(program, workspace),
    )
    cubins = KernelCache(None).compile_all([gate_text(3), beside.text], arch)
    assert all(cubin.startswith(ELF) for cubin in cubins)


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("arch", ENDS)
def test_sends_and_receives(arch: str) -> None:
    # That of a process with one rank is among the standard kernels.
    assert KernelCache(None).get(pairs_text(3, 2, 128), arch).startswith(ELF)


def test_gpus_that_only_cuda_12_serves() -> None:
    # The generic kernels have every instruction of those that they stand for, on every type.
    some = {header(text): text for text in (*codes(), pairs_text(2, 1, 64))}
    assert some.keys() > {"copy_gates.cuh", "fold.cuh", "staging.cuh", "point_to_point.cuh"}
    for name in ("simple.cuh", "ll.cuh", "generic_simple.cuh", "generic_ll.cuh"):
        del some[name]
    for text in (*some.values(), *generic_texts(2)):
        assert cuda12.compile_kernel(text, "sm_70", hasty=True).startswith(ELF)


def test_each_size_of_element_in_lines_and_in_words() -> None:
    # The standard kernels have elements of 1, of 2 and of 4 bytes.
    some: dict[tuple[bool, int], str] = {}
    for number, text in enumerate(operators()):
        dtype = FRAMED[-1 - number % len(FRAMED)]
        if dtype.itemsize > 4:
            some.setdefault((number < len(FRAMED), dtype.itemsize), text)
    assert len(some) == 2 * len({dtype.itemsize for dtype in DTYPES} - {1, 2, 4})
    cubins = KernelCache(None).compile_all([*some.values()], "sm_90")
    assert all(cubin.startswith(ELF) for cubin in cubins)


@pytest.mark.parametrize("arch", ARCHS)
def test_every_operator_on_every_element_type(arch: str) -> None:
    cubin = KernelCache(None).get(each_operator(), arch)
    assert cubin.startswith(ELF)
    for dtype, name in LEGAL:
        assert f".text.{TYPES[dtype.name]}_{OPERATORS[name]}\0".encode() in cubin
