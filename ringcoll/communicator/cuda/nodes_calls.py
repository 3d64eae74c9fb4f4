"""Prepare and explain the calls of GPU ranks on several nodes: in two layers, or in pieces."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ringcoll.arguments.calls import Call
from ringcoll.communicator.cpu.rank_calls import with_options
from ringcoll.communicator.explaining import explain_pieces
from ringcoll.config import Config
from ringcoll.dtypes import dtype_of
from ringcoll.executors.cuda_nodes.executor import PIECE_BYTES, CudaNodesCall
from ringcoll.executors.cuda_nodes.pieces import cut, part_of
from ringcoll.tuner import measured

if TYPE_CHECKING:
    from ringcoll.communicator.cuda.nodes import NodesState


def prepare_across(state: NodesState, call: Call, config: Config) -> CudaNodesCall:
    """Prepare a checked call whose options are allowed."""
    if state.in_layers(call, config):
        return _layered(state, call, config)
    return _staged(state, call, config)


def _layered(state: NodesState, call: Call, config: Config) -> CudaNodesCall:
    """A call in two layers, after a barrier in which the ranks compare its signature."""
    signature = f"{call.signature()} in two layers"
    if call.collective == "all_to_all":
        # The kernels of a node must agree on it, and an error names the ranks that differ.
        signature += f" in_place={call.in_place}"
    if config.accumulate == "dtype":
        signature += " accumulate=dtype"
    call = with_options(call, config)
    if state.debug:
        state.log_choice(call.tagged(signature))
    hello = Call("barrier", call.rank, None, None, 0, dtype_of("uint8"), custom_signature=signature)
    plain = replace(config, algorithm=None, accumulate=None)
    return state.layers.prepare(
        call,
        _staged(state, hello, plain),
        lambda rest: _staged(state, rest, config),
        state.timeout_of(config),
        config.max_sms,
    )


def _staged(state: NodesState, call: Call, config: Config) -> CudaNodesCall:
    """A call in pieces, each of which runs as a call of CPU ranks."""
    return state.cuda.prepare(
        call,
        lambda piece: state.prepare_on_host(piece, config),
        state.timeout_of(config),
    )


def first_piece(call: Call, nranks: int) -> Call:
    """The first piece of a call whose pieces run as calls of CPU ranks."""
    return part_of(call, nranks, *cut(call, nranks, PIECE_BYTES)[0])


def explain_across(state: NodesState, call: Call, config: Config) -> str:
    """Which algorithm runs between the ranks' host memory, and how data get there."""
    nranks, nodes = state.fabric.nranks, max(state.fabric.nodes) + 1
    if not state.in_layers(call, config):
        return explain_pieces(call, first_piece(call, nranks), PIECE_BYTES, state, config)
    title = (
        f"{call.collective}, {call.nbytes} bytes, {nranks} GPU ranks on {nodes} nodes: in two "
        f"layers, from {measured.LAYERS_BYTES.value} bytes on"
    )
    return "\n".join([title, *state.layers.explain(call)])
