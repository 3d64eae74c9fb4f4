"""CUDA source text of a kernel: its frame, and what kernels call element types and operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ringcoll.dtypes import DType, ReduceOp

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
    """The C++ names of a dtype and an operator; without an operator only the width counts."""
    if op is None:
        return _BY_WIDTH[dtype.itemsize], "Sum"
    return TYPES[dtype.name], OPERATORS[op.name]


def kernel_text(
    header: str,
    constants: Mapping[str, int],
    bounds: str,
    body: str,
    declarations: Sequence[str] = (),
) -> str:
    """What NVRTC compiles: a header of the kernels' folder, ``RC_`` macros and one kernel."""
    return "\n".join(
        [
            *(f"#define RC_{name} {value}" for name, value in constants.items()),
            f'#include "{header}.cuh"',
            "using namespace rc;",
            *declarations,
            f"RC_KERNEL({bounds}) ringcoll_kernel(RC_PARAMETER Args args) {{",
            f"    {body}",
            "}",
            "",
        ]
    )
