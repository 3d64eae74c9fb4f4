"""The entry point that torch loads when it is imported.

An error here would break ``import torch`` for everyone in the environment: it is logged instead.
"""

from __future__ import annotations

from ringcoll import log


def register() -> None:
    """Register the backend with torch.distributed; never raises. Idempotent."""
    try:
        from ringcoll.torch import register_backend

        register_backend()
    except Exception:
        log.logger().warning("torch.distributed has no backend ringcoll", exc_info=True)
