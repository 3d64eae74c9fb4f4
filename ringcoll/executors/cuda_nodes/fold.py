"""The kernel that folds what a rank has got from others; see ``kernels/fold.cuh``."""

from __future__ import annotations

from collections.abc import Callable

from ringcoll.dtypes import DType, ReduceOp
from ringcoll.executors.cuda.loader import Launchable
from ringcoll.executors.cuda.names import names_of
from ringcoll.executors.cuda.params import Addresses, Body, Header, pack, padded

__all__ = ["fold", "fold_text"]

_THREADS, _BLOCKS = 512, 64


def fold(
    load: Callable[[str], int],
    dtype: DType,
    op: ReduceOp,
    source: tuple[int, int, int],
    target: int,
    count: int,
    *,
    raw_in: bool,
    raw_out: bool,
    nranks: int,
) -> Launchable:
    """The launch that folds arrays into one.

    Args:
        load: gives the function of a source text.
        dtype: of the elements.
        op: of the call; it has no factor.
        source: how many arrays, the first one's address, bytes from one to the next.
        target: address of the result.
        count: elements of each.
        raw_in: whether the arrays are of the dtype itself, not of its accumulator.
        raw_out: whether the result is.
        nranks: contributions in a result that is the whole; 0: it is a part of one.

    """
    text = fold_text(dtype, op, raw_in=raw_in, raw_out=raw_out, final=nranks > 0)
    words = padded([(*source, target, count, nranks)])
    parameter = pack(
        Body(text, words, (0,), 0, 0), Header(0, 0, False, False, 1), 0, [Addresses(0, (0,), 0)]
    )
    blocks = max(1, min(_BLOCKS, -(-count // _THREADS)))
    return Launchable(load(text), blocks, 1, _THREADS, parameter)


def fold_text(dtype: DType, op: ReduceOp, *, raw_in: bool, raw_out: bool, final: bool) -> str:
    """What NVRTC compiles."""
    kind, operator = names_of(dtype, op)
    flags = ", ".join("true" if flag else "false" for flag in (raw_in, raw_out, final))
    return "\n".join(
        [
            "#define RC_RANKS 1",
            "#define RC_LOCAL 1",
            f"#define RC_WORDS {len(padded([()])[0])}",
            '#include "fold.cuh"',
            "using namespace rc;",
            f"RC_KERNEL({_THREADS}) ringcoll_kernel(RC_PARAMETER Args args) {{",
            f"    fold::run<{kind}, {operator}<{kind}>, {flags}>(args);",
            "}",
            "",
        ]
    )
