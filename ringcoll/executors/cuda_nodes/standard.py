"""The kernels that most programs need: what ``ringcoll kernels ARCH`` compiles and a wheel carries.

A text depends on collective, algorithm, protocol, element type, operator and the rank's part, never
on a size: three sizes stand for all, one for each protocol on GPUs joined by NVLink. Copies depend
on the width of elements alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from ringcoll.arguments.calls import Call
from ringcoll.collectives import COLLECTIVES
from ringcoll.dtypes import dtype_of, op_of
from ringcoll.executors.cuda.copy_gates import gate_text
from ringcoll.executors.cuda.generic import generic_texts
from ringcoll.executors.cuda.kernel_body import KernelFits, body_of, gpu_ranks
from ringcoll.executors.cuda.params import Addresses
from ringcoll.executors.cuda.point_to_point import pairs_text
from ringcoll.executors.cuda.workspace import MOST_BLOCKS, Workspace
from ringcoll.executors.cuda_nodes.lane import staging_text
from ringcoll.executors.cuda_nodes.phases import fold_text
from ringcoll.launch import ALL_MAPPED
from ringcoll.tuner import Limits, choose

_RANKS = (2, 4, 8)
_FLOATS = ("bfloat16", "float16", "float32")
_COMMON: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (tuple(name for name in COLLECTIVES if name != "send"), ("float32",)),
    (("all_reduce", "reduce_scatter"), ("bfloat16", "float16")),
    (("all_gather", "broadcast", "all_to_all"), ("bfloat16",)),  # float16's are the same
    (("all_gather", "broadcast"), ("uint8",)),  # torch's objects
)
"""Collectives and the element types that they are compiled for; reductions are sums."""
_BYTES = (4 << 10, 256 << 10, 64 << 20)  # LL, LL128 and Simple
_REGISTERED_BYTES = 64 << 20  # torch's large tensors, which are registered automatically
_PAIR_WORDS = (256, 512)


def standard_sources() -> list[str]:
    """Source texts, each once, for 2, 4 and 8 ranks on a GPU each.

    Generic kernels, copy gates, sends and receives, the collectives of ``_COMMON``, and staging
    and sums between nodes.
    """
    generic = (text for nranks in _RANKS for text in generic_texts(nranks))
    pairs = (pairs_text(nranks, 1, words) for nranks, words in product(_RANKS, _PAIR_WORDS))
    between = (staging_text(), *_folds())
    return list(dict.fromkeys((*generic, *map(gate_text, _RANKS), *pairs, *_texts(), *between)))


def _folds() -> Iterator[str]:
    """The reductions of partial sums inside a node, and of the nodes' partial sums."""
    for name in _FLOATS:
        dtype, op = dtype_of(name), op_of("sum")
        raw = dtype.partial == dtype.numpy
        yield fold_text(dtype, op, raw_in=True, raw_out=raw, final=False)
        yield fold_text(dtype, op, raw_in=raw, raw_out=True, final=True)


def _texts() -> Iterator[str]:
    for nranks, (names, dtypes) in product(_RANKS, _COMMON):
        for name, dtype, nbytes in product(names, dtypes, _BYTES):
            for call, limits in _calls(nranks, name, dtype, nbytes):
                workspace = Workspace(nranks)
                for nvlink in (True, False):
                    machine = gpu_ranks(workspace, MOST_BLOCKS, nvlink=nvlink)
                    choice = choose(call, machine, limits, KernelFits(workspace))
                    for rank in range(nranks):
                        at = Addresses(rank, (0,) * nranks, 0)
                        yield body_of(choice, call, workspace, (at,)).text


def _calls(nranks: int, name: str, dtype: str, nbytes: int) -> Iterator[tuple[Call, Limits]]:
    """Calls on plain, on symmetric and on registered arrays, in place and not."""
    kind, row = COLLECTIVES[name], dtype_of(dtype)
    op = op_of("sum") if kind.reduces else None
    nbytes = 0 if name == "barrier" else nbytes
    count = nbytes // row.itemsize // (nranks if "all" in (kind.input, kind.output) else 1)
    # Not all ranks know whether peers reach a buffer that some lack.
    shared = frozenset(buffer for buffer in ALL_MAPPED if buffer.name.lower() != kind.uneven)
    for in_place in (False, True):
        call = Call(name, 0, None, None, count, row, op, 0, in_place, nbytes)
        yield call, Limits()
        yield call, Limits(mapped=shared)
        if nbytes >= _REGISTERED_BYTES and not kind.prefix:
            yield call, Limits(hellos_decide=True)
