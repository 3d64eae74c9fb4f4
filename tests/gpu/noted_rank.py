"""A GPU rank whose launches are only noted: all between a call and its kernel is real."""

from __future__ import annotations

import math
import threading
from types import SimpleNamespace
from typing import Any

from ringcoll.executors.cuda.fast_path import FastPath
from ringcoll.fabric.poll import LivenessTimer

STREAM = 5
"""The handle of the stream of the last call."""


class NotedRank:
    """A rank as the fast path sees it: nothing is in the way. ``ordinal``: of its device."""

    def __init__(self, ordinal: int) -> None:
        self.noted: list[Any] = []
        self.failed: list[BaseException] = []
        self.timer = LivenessTimer(memoryview(bytearray(8)).cast("Q"))
        self.timer.due = math.inf
        self.order = SimpleNamespace(
            settled=STREAM, marking=False, mark=lambda stream: self.noted.append(("mark", stream))
        )
        self.here = SimpleNamespace(
            get=lambda: ordinal, ordinal=ordinal, thread=SimpleNamespace(bound=True)
        )
        self.errors = SimpleNamespace(last=None, _found=None)
        self.fabric = SimpleNamespace(entered=0)
        self.report = memoryview(bytearray(8)).cast("I")
        self.records = [0, 3]
        self.state = SimpleNamespace(
            config=SimpleNamespace(engine=None),
            settings=SimpleNamespace(compiled=None),
            lock=threading.RLock(),
            fail=self.failed.append,
            cuda=SimpleNamespace(failure=lambda: None),
        )
        executor: Any = SimpleNamespace(
            fabric=self.fabric,
            stream_order=self.order,
            current=self.here,
            async_errors=self.errors,
            report=SimpleNamespace(host=self.report),
            shared_state=SimpleNamespace(record_numbers=self.records),
        )
        self.path = FastPath(self.state, executor, self.timer)
