"""What the kernels call the element types and operators."""

from __future__ import annotations

from ringcoll.dtypes import DType, ReduceOp

__all__ = ["OPERATORS", "TYPES", "names_of"]

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
"""Of every dtype."""

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
"""Of every operator."""

_BY_WIDTH = {1: "UInt8", 2: "UInt16", 4: "UInt32", 8: "UInt64", 16: "Complex128"}


def names_of(dtype: DType, op: ReduceOp | None) -> tuple[str, str]:
    """The C++ names of a dtype and an operator.

    Args:
        dtype: of the call.
        op: of the call; None where nothing is reduced: then only the width of an element counts.

    """
    if op is None:
        return _BY_WIDTH[dtype.itemsize], "Sum"
    return TYPES[dtype.name], OPERATORS[op.name]
