"""A group that is made for one kind of device, beside another backend for another."""

from __future__ import annotations

from typing import Any

from ringcoll.torch.group import ProcessGroupRingcoll

__all__ = ["create"]


def create(options: Any, given: Any) -> ProcessGroupRingcoll:
    """A group of torch.distributed, from torch's options and the user's ``pg_options``."""
    return ProcessGroupRingcoll(
        options.store, options.group_rank, options.group_size, options.timeout, given
    )
