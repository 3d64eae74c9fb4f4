"""What torch runs when it is imported: say that there is a backend, and touch nothing else.

An error here would break ``import torch`` for everyone in the environment, so none gets out; one
is remembered, and logged for those who look.
"""

from __future__ import annotations

import logging
from typing import Any

__all__ = ["BACKEND", "register"]

BACKEND = "ringcoll"
"""The name for ``init_process_group``."""

_log = logging.getLogger("ringcoll")


def register() -> None:
    """Register the backend with torch.distributed; never raises. Idempotent."""
    try:
        import torch.distributed as dist

        # A build without distributed has neither.
        if not dist.is_available() or BACKEND in dist.Backend.backend_list:
            return
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])
        # torch 2.15 looks on at the calls of backends that do not record them themselves; it fails
        # to do so for a group that is written in Python.
        recorded = getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", None)
        if recorded is not None:
            recorded.add(BACKEND)
    except Exception:
        _log.warning("torch.distributed has no backend ringcoll", exc_info=True)


def _create(options: Any, given: Any) -> Any:
    """A group of torch.distributed.

    Args:
        options: torch's: store, ranks and timeout.
        given: what the user passed as ``pg_options``.

    """
    from ringcoll.torch.composite import create

    return create(options, given)
