"""Futures get their values from threads of their own: a callback may wait for another call.

torch's PowerSGD hook does. The thread that has ended a call may be the one that has to carry out
that other call, or to meet its message.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

__all__ = ["give"]


def give(futures: Sequence[Any], value: Any = None) -> None:
    """Give futures of torch's their value, and return before their callbacks have run."""

    def run() -> None:
        for future in futures:
            future.set_result(value)

    if not futures:
        return
    try:
        # The interpreter waits for it at its end, where it would crash inside torch.
        threading.Thread(target=run, name="ringcoll future").start()
    except RuntimeError:  # at that end no thread can be started any more
        run()
