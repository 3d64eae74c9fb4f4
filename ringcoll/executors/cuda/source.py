"""CUDA source text of a kernel: its frame, and what kernels call element types and operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

from ringcoll.dtypes import DTYPES, DType, ReduceOp, dtype_of
from ringcoll.errors import ArgumentError

TYPES = {
    "int8": "Int8",
    "uint8": "UInt8",
    "int16": "Int16",
    "uint16": "UInt16",
    "int32": "Int32",
    "uint32": "UInt32",
    "int64": "Int64",
    "uint64": "UInt64",
    "float16": "Float16",
    "float32": "Float32",
    "float64": "Float64",
    "bfloat16": "BFloat16",
    "float8_e4m3fn": "Float8E4M3",
    "float8_e5m2": "Float8E5M2",
    "bool": "Bool",
    "complex64": "Complex64",
    "complex128": "Complex128",
}

OPERATORS = {
    "sum": "Sum",
    "prod": "Prod",
    "min": "Min",
    "max": "Max",
    "avg": "Avg",
    "band": "BAnd",
    "bor": "BOr",
    "bxor": "BXor",
    "land": "LAnd",
    "lor": "LOr",
    "premul_sum": "PremulSum",
}

_BY_WIDTH = {1: "UInt8", 2: "UInt16", 4: "UInt32", 8: "UInt64", 16: "Complex128"}


def names_of(dtype: DType, op: ReduceOp | None) -> tuple[str, str]:
    """The C++ names of a dtype and an operator; without an operator only the width counts.

    And the alignment: an array of complex64 may begin between two words of eight bytes.
    """
    if op is None and dtype.name != "complex64":
        return _BY_WIDTH[dtype.itemsize], "Sum"
    return TYPES[dtype.name], OPERATORS["sum" if op is None else op.name]


def _takes(op: str, dtype: DType) -> bool:
    try:
        ReduceOp(op).check(dtype)
    except ArgumentError:
        return False
    return True


def _computed_in(dtype: DType) -> str:
    """The type in which a generic kernel computes; integers wrap in their own width there."""
    if dtype.category == "int":
        return "int64" if dtype.numpy.kind == "i" else "uint64"
    return dtype.accumulator.name


_CONVERTED = [dtype for dtype in DTYPES if dtype.category != "int"]
_OPERATIONS = [
    (name, op)
    for name in dict.fromkeys(map(_computed_in, DTYPES))
    for op in OPERATORS
    if _takes(op, dtype_of(name))
]


@cache
def elements_word(
    dtype: DType, op: ReduceOp | None, *, dual: bool = False, gated: bool = False
) -> int:
    """``Elements`` of ``kernels/generic.cuh``: what a launch says of its elements."""
    integers, negative = dtype.category == "int", dtype.numpy.kind == "i"
    kind = 0 if integers else _CONVERTED.index(dtype_of(dtype.name))
    pair = 0 if op is None else _OPERATIONS.index((_computed_in(dtype), op.name))
    sizes = dtype.itemsize << 16 | dtype.accumulator.itemsize << 21
    flags = integers << 26 | negative << 27 | (op is not None and op.scales) << 28
    return kind | pair << 8 | sizes | flags | dual << 29 | gated << 30


def elements_lines() -> list[str]:
    """``Text`` of the generic kernels: all element types, and every operator on what it takes."""
    types = [f"generic::Conversion<{TYPES[dtype.name]}>" for dtype in _CONVERTED]
    pairs = [f"generic::Operation<{OPERATORS[op]}<{TYPES[name]}>>" for name, op in _OPERATIONS]
    value = "const generic::Value&"
    return [
        "struct Text {",
        *_switch("convert", "bool widens", f"{value} value", types),
        *_switch("operate", "generic::Step step", f"{value} left, {value} right", pairs),
        "};",
    ]


def _switch(name: str, first: str, values: str, cases: Sequence[str]) -> list[str]:
    """A function that calls ``run`` of the case of a number."""
    arguments = ", ".join(part.split()[-1] for part in (first, *values.split(", ")))
    return [
        f"    RC_DEVICE static generic::Value {name}(u32 number, {first}, {values}) {{",
        "        switch (number) {",
        *(
            f"            case {k}: return {each}::run({arguments});"
            for k, each in enumerate(cases)
        ),
        "        }",
        "        return {};",
        "    }",
    ]


def kernel_text(
    header: str,
    constants: Mapping[str, int],
    frame: str,
    body: str,
    declarations: Sequence[str] = (),
) -> str:
    """What NVRTC compiles: a header of the kernels' folder, ``RC_`` macros and one kernel.

    ``frame`` is a macro of ``kernels/system.cuh``: the bounds of a launch, or few registers.
    """
    return "\n".join(
        [
            *(f"#define RC_{name} {value}" for name, value in constants.items()),
            f'#include "{header}.cuh"',
            "using namespace rc;",
            *declarations,
            f"{frame} ringcoll_kernel(RC_PARAMETER Args args) {{",
            f"    {body}",
            "}",
            "",
        ]
    )
