"""What of a prepared call's packed parameter depends on its count, by protocol."""

from __future__ import annotations

from typing import cast

from ringcoll.executors.cuda.cuda_call import CudaCall
from ringcoll.executors.cuda.ll_layout import LLLayout
from ringcoll.executors.cuda.ll_recounts import ll_recounts
from ringcoll.executors.cuda.loader import Launchable
from ringcoll.executors.cuda.params import Body
from ringcoll.executors.cuda.recounted import Recounts
from ringcoll.executors.cuda.simple_recounts import simple_recounts
from ringcoll.executors.cuda.workspace import Workspace
from ringcoll.tuner.choice import GpuRanks
from ringcoll.tuner.gpu import ll_grid
from ringcoll.tuner.simple import lanes_of


def recounts_of(before: CudaCall, workspace: Workspace, machine: GpuRanks) -> Recounts:
    """Of a call that a kernel of its own launches; found once."""
    if before.recounts is None:
        before.recounts = _recounts_of(before, workspace, machine)
    return before.recounts


def _recounts_of(before: CudaCall, workspace: Workspace, machine: GpuRanks) -> Recounts:
    launched, body = cast("Launchable", before.launchable), cast("Body", before.body)
    packed = launched.parameter.words, before.address_words
    call, choice, limits = before.call, before.choice, before.limits
    if not choice.launch.in_band:
        lanes = tuple(lanes_of(of, call, machine, limits) for of in choice.variants)
        return simple_recounts(*packed, choice, call, workspace, before.at, lanes)
    return ll_recounts(
        *packed,
        body,
        choice.program,
        choice.layout,
        LLLayout(call.dtype, choice.launch.lanes),
        before.at,
        workspace.region(choice.launch.protocol)[0],
        ll_grid(machine, limits),
        scales=call.op is not None and call.op.scales,
    )
