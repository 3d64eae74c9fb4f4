"""The kernels that most programs need, for ``ringcoll kernels``, which compiles them ahead."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from ringcoll.arguments.calls import Call
from ringcoll.collectives import COLLECTIVES
from ringcoll.dtypes import dtype_of, op_of
from ringcoll.executors.cuda.choose import choose
from ringcoll.executors.cuda.copy_gates import gate_text
from ringcoll.executors.cuda.generic import generic_texts
from ringcoll.executors.cuda.kernel_choice import body_of
from ringcoll.executors.cuda.limits import KernelOptions, Resources
from ringcoll.executors.cuda.params import Addresses, Body
from ringcoll.executors.cuda.point_to_point import pairs_text
from ringcoll.executors.cuda.workspace import Workspace
from ringcoll.executors.cuda_nodes.lane import staging_text
from ringcoll.executors.cuda_nodes.phases import fold_text
from ringcoll.launch import ALL_MAPPED
from ringcoll.plan import Buffer

_RANKS = (2, 4, 8)
_DTYPES = ("bfloat16", "float16", "float32")
_BYTES = (4 << 10, 256 << 10, 64 << 20)
_BLOCKS = 128
_PAIR_WORDS = (256, 512)
_UNMAPPED = frozenset[Buffer]()


def standard_sources() -> list[str]:
    """Source texts, each once, for 2, 4 and 8 ranks on a GPU each.

    Sums of the common floats, copies, generic kernels, copy gates, sends and receives, and staging
    between nodes.
    """
    bodies = (body.text for body in _bodies())
    pairs = (pairs_text(nranks, 1, words) for nranks, words in product(_RANKS, _PAIR_WORDS))
    between = (staging_text(), *_folds())
    generic = (text for nranks in _RANKS for text in generic_texts(nranks))
    return list(dict.fromkeys((*bodies, *generic, *map(gate_text, _RANKS), *pairs, *between)))


def _folds() -> Iterator[str]:
    """The reductions of partial sums inside a node, and of the nodes' partial sums."""
    for name in _DTYPES:
        dtype, op = dtype_of(name), op_of("sum")
        raw = dtype.partial == dtype.numpy
        yield fold_text(dtype, op, raw_in=True, raw_out=raw, final=False)
        yield fold_text(dtype, op, raw_in=raw, raw_out=True, final=True)


def _bodies() -> Iterator[Body]:
    names = [name for name in COLLECTIVES if name not in ("send", "barrier")]
    for nranks, name, dtype, nbytes in product(_RANKS, names, _DTYPES, _BYTES):
        workspace, row = Workspace(nranks), dtype_of(dtype)
        op = op_of("sum") if COLLECTIVES[name].reduces else None
        wide = "all" in (COLLECTIVES[name].input, COLLECTIVES[name].output)
        count = nbytes // row.itemsize // (nranks if wide else 1)
        call = Call(name, 0, None, None, count, row, op, nbytes=nbytes)
        uneven = COLLECTIVES[name].uneven  # not all ranks know whether peers have mapped it
        shared = frozenset(buffer for buffer in ALL_MAPPED if buffer.name.lower() != uneven)
        variants = [(_UNMAPPED, KernelOptions()), (shared, KernelOptions())]
        if name == "all_reduce":
            variants.append(
                (_UNMAPPED, KernelOptions(hellos_decide=True))
            )  # torch's gradient buckets
        for mapped, options in variants:
            resources = Resources(workspace, _BLOCKS, nvlink=True)
            choice = choose(call, resources, mapped=mapped, options=options)
            for rank in range(nranks):
                at = Addresses(rank, (0,) * nranks, 0)
                yield body_of(choice, call, workspace, (at,))
