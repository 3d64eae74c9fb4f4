"""Prepare the calls of GPU ranks on several nodes: in two layers, or in pieces by the hosts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ringcoll.arguments.calls import Call
from ringcoll.communicator.rank_calls import with_options
from ringcoll.config import Config
from ringcoll.dtypes import dtype_of
from ringcoll.executors.cuda_nodes.executor import CudaNodesCall

if TYPE_CHECKING:
    from ringcoll.communicator.gpu_nodes import NodesState


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
