"""The kernels that most programs need: what ``ringcoll kernels ARCH`` compiles and a wheel carries.

A text depends on collective, algorithm, protocol, element type, operator and the rank's part,
and hardly on a size: a few sizes of each protocol stand for all. Copies depend on the width of
elements alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from ringcoll.arguments.calls import Call
from ringcoll.collectives import COLLECTIVES
from ringcoll.dtypes import dtype_of, op_of
from ringcoll.executors.cuda.copy_gates import gate_text
from ringcoll.executors.cuda.generic import generic_texts
from ringcoll.executors.cuda.kernel_body import KernelFits, body_of, gpu_ranks
from ringcoll.executors.cuda.params import Addresses
from ringcoll.executors.cuda.point_to_point import standard_pairs_text
from ringcoll.executors.cuda.workspace import MOST_BLOCKS, Workspace
from ringcoll.executors.cuda_nodes.lane import staging_text
from ringcoll.executors.cuda_nodes.phases import fold_text
from ringcoll.launch import ALL_MAPPED
from ringcoll.tuner import Limits, choose
from ringcoll.tuner.measured import FEW_BLOCKS, PROTOCOL_SIZES

RANKS = (2, 4, 8)
_FLOATS = ("bfloat16", "float16", "float32")
_COMMON: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (tuple(name for name in COLLECTIVES if name != "send"), ("float32",)),
    (("all_reduce", "reduce_scatter"), ("bfloat16",)),
    (("all_gather", "broadcast", "all_to_all"), ("bfloat16",)),  # and so of float16
    (("all_reduce",), ("float16",)),
    (("all_gather", "broadcast"), ("uint8",)),  # torch's objects
)
"""Collectives and the element types that they are compiled for; reductions are sums."""
_SIMPLE = 32 << 20, 64 << 20, 512 << 20
"""Bytes of calls by Simple: of all_reduce and broadcast by each of their algorithms."""
_FEW = 3 << 20, 6 << 20, 16 << 20
"""Bytes of calls with few blocks, whose LL128 ends earlier: of all_reduce behind 2 MiB."""
_BYTES = (*(size for by in PROTOCOL_SIZES.values() for size in by.samples), *_SIMPLE)
_NO_LIMITS = Limits()
_TWO_PROGRAMS = (
    (1 << 20, Limits(protocol="Simple", hellos_decide=True)),  # of one slice if staged
    *((nbytes, Limits(hellos_decide=True)) for nbytes in _SIMPLE),
)
"""Bytes and options of calls whose buffers are registered automatically."""


def standard_sources(ranks: Sequence[int] = RANKS) -> list[str]:
    """Source texts, each once, for communicators of so many ranks on a GPU each.

    Generic kernels, copy gates, sends and receives, the collectives of ``_COMMON``, and staging
    and sums between nodes.
    """
    each = (
        text
        for nranks in ranks
        for text in (*generic_texts(nranks), gate_text(nranks), standard_pairs_text(nranks))
    )
    return list(dict.fromkeys((*each, staging_text(), *_folds(), *_texts(ranks))))


def _folds() -> Iterator[str]:
    """The reductions of partial sums inside a node, and of the nodes' partial sums."""
    for name in _FLOATS:
        dtype, op = dtype_of(name), op_of("sum")
        raw = dtype.partial == dtype.numpy
        yield fold_text(dtype, op, raw_in=True, raw_out=raw, final=False)
        yield fold_text(dtype, op, raw_in=raw, raw_out=True, final=True)


def _texts(ranks: Sequence[int]) -> Iterator[str]:
    for nranks, (names, dtypes) in product(ranks, _COMMON):
        for name, dtype, in_place in product(names, dtypes, (False, True)):
            kind = COLLECTIVES[name]
            # Not all ranks know whether peers reach a buffer that some lack.
            shared = frozenset(each for each in ALL_MAPPED if each.name.lower() != kind.uneven)
            for nbytes in _BYTES:
                call = call_of(nranks, name, dtype, nbytes, in_place=in_place)
                yield from texts_of(call, nranks)
                yield from texts_of(call, nranks, Limits(mapped=shared))
                if name == "all_reduce":
                    yield from texts_of(call, nranks, nvlink=False)
            few = Limits(blocks=FEW_BLOCKS.value)
            ways = [few, replace(few, mapped=shared)]
            if not kind.prefix:
                ways.append(replace(few, hellos_decide=True))
            for nbytes, limits in product((*_FEW, *_SIMPLE), ways):
                call = call_of(nranks, name, dtype, nbytes, in_place=in_place)
                yield from texts_of(call, nranks, limits)
            if not kind.prefix:
                for nbytes, limits in _TWO_PROGRAMS:
                    call = call_of(nranks, name, dtype, nbytes, in_place=in_place)
                    yield from texts_of(call, nranks, limits)


def call_of(nranks: int, name: str, dtype: str, nbytes: int, *, in_place: bool = False) -> Call:
    """A call of rank 0, a sum where it reduces; ``nbytes``: of the larger buffer."""
    kind, row = COLLECTIVES[name], dtype_of(dtype)
    op = op_of("sum") if kind.reduces else None
    nbytes = 0 if name == "barrier" else nbytes
    count = nbytes // row.itemsize // (nranks if "all" in (kind.input, kind.output) else 1)
    return Call(name, 0, None, None, count, row, op, 0, in_place, nbytes)


def texts_of(
    call: Call, nranks: int, limits: Limits = _NO_LIMITS, *, nvlink: bool = True
) -> Iterator[str]:
    """The source text of each rank's kernel."""
    workspace = Workspace(nranks)
    machine = gpu_ranks(workspace, MOST_BLOCKS, nvlink=nvlink)
    choice = choose(call, machine, limits, KernelFits(workspace))
    for rank in range(nranks):
        at = Addresses(rank, (0,) * nranks, 0)
        yield body_of(choice, call, workspace, (at,)).text
