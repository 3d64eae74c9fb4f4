"""ringcoll as a backend of torch.distributed: ``init_process_group("ringcoll")``.

torch loads the backend of an installed ringcoll by itself, through the entry point in the group
``torch.backends`` (:mod:`ringcoll.torch_entry`). In a checkout that is only on the path,
``import ringcoll.torch`` registers it.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

__all__ = ["BACKEND", "register_backend"]

BACKEND = "ringcoll"
"""The name for ``init_process_group``."""


def register_backend() -> None:
    """Register the backend with torch.distributed. Idempotent."""
    # A build of torch without distributed has neither.
    if not dist.is_available() or BACKEND in dist.Backend.backend_list:
        return
    dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])
    # torch 2.15 records the calls of backends that do not record them themselves; it fails to do
    # so for a group that is written in Python.
    recorded = getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", None)
    if recorded is not None:
        recorded.add(BACKEND)


def _create(options: Any, given: Any) -> Any:
    """A group of torch.distributed, from torch's options and the user's ``pg_options``."""
    from ringcoll.torch.composite import create

    return create(options, given)


register_backend()
