"""The hand-written kernels beside the library: the same processes, clock and moment.

A process's GPU has two states: at some moment within its first seconds every small kernel of it
becomes 0.18 us longer, the library's and these alike, so that figures of two processes do not
compare.
"""

from __future__ import annotations

import functools
import json
from typing import Any

from cupy.cuda import runtime

from benchmarks.gpu import device
from benchmarks.gpu.calls import INPUT, Point, points
from benchmarks.gpu.timer import Rendezvous, Timer
from benchmarks.gpu.yardstick import CALLS, Team, checked, expected, inputs

__all__ = ["Yardstick"]


class Yardstick:
    """Times the kernels of ``yardstick.cu``.

    Args:
        rendezvous: of the ranks, one process a GPU.
        timer: the library's.

    """

    def __init__(self, rendezvous: Rendezvous, timer: Timer) -> None:
        self._meeting, self._timer = rendezvous, timer
        rank = rendezvous.rank
        self._gpu = device.Gpu(rank)
        self._team = Team([self._gpu], [rank], rendezvous.nranks)
        said = rendezvous.allgather(runtime.ipcGetMemHandle(self._team.own[rank]))
        self._team.arenas = [
            self._team.own[rank] if peer == rank else runtime.ipcOpenMemHandle(handle)
            for peer, handle in enumerate(said)
        ]
        rendezvous.allgather(b"")

    def row(self, nbytes: int, dtype: str) -> dict[str, Any] | None:
        """The best grid for all_reduce of a type; None: no kernel takes so many bytes of it."""
        most = self._team.most_blocks()
        fitting = [
            point
            for point in points(self._meeting.nranks, most_blocks=most)
            if (point.dtype, point.nbytes) == (dtype, nbytes)
        ]
        timed = [self._timed(number, point) for number, point in enumerate(fitting)]
        if not timed:
            return None
        us, best = min(timed, key=lambda found: found[0])
        return {
            "lib": "yardstick",
            "collective": "all_reduce",
            "bytes": nbytes,
            "dtype": dtype,
            "in_place": False,
            "us": round(us, 2),
            "algorithm": best.algorithm,
            "blocks": best.blocks,
            "workers": best.workers,
        }

    def _timed(self, seed: int, point: Point) -> tuple[float, Point]:
        """Microseconds a call.

        Raises:
            RuntimeError: an element is wrong, or a kernel gave up.

        """
        gpu, team, rank = self._gpu, self._team, self._meeting.rank
        arrays = inputs(point, self._meeting.nranks, seed)
        device.upload(team.own[rank] + INPUT, arrays[rank])
        (call,) = team.prepare(point)
        wrong = checked(team, point, expected(arrays), call)
        if any(json.loads(part) for part in self._meeting.allgather(str(wrong).encode())):
            raise RuntimeError(f"wrong elements of the yardstick: {point}")
        graph = gpu.capture(functools.partial(_repeat, call))
        seconds = self._timer.median(functools.partial(graph.launch, gpu.stream), CALLS, gpu.stream)
        team.synchronize()
        return seconds, point


def _repeat(call: Any) -> None:
    for _ in range(CALLS):
        call()
