"""nccl4py's names over ringcoll: a program changes ``import nccl.core as nccl`` to this module.

A thin adapter: each call becomes one of :class:`ringcoll.Communicator`, and where nccl4py means
something else by a name, that is what it means here: ``reduce`` and ``gather`` without a root are
``all_reduce`` and ``all_gather``, a remainder is left out, a larger ``recvbuf`` is filled in part,
and without ``stream`` a call is made on the default stream. The differences are in the page "Coming
from NCCL, torch, MPI"; ``Communicator.communicator`` is what carries the calls.

Example:
    >>> import ringcoll.nccl4py as nccl
    >>> comms = nccl.Communicator.init_all(2)
    >>> x = [np.ones(3), np.ones(3)]
    >>> with nccl.group():
    ...     for comm, array in zip(comms, x):
    ...         comm.allreduce(array, array, nccl.SUM)
    >>> x[1]
    array([2., 2., 2.])

"""

from __future__ import annotations

from typing import Any

from ringcoll.nccl4py.calls import CustomRedOp, RegisteredBufferHandle, RegisteredWindowHandle
from ringcoll.nccl4py.communicator import Communicator, NCCLCommProperties
from ringcoll.nccl4py.groups import group, group_end, group_start
from ringcoll.nccl4py.memory import cupy, mem_alloc, mem_free, torch
from ringcoll.nccl4py.values import (
    CommShrinkFlag,
    CTAPolicy,
    NCCLCollConfig,
    NCCLConfig,
    NcclDataType,
    NcclInvalid,
    NcclRedOp,
    Result,
    UniqueId,
    VersionInfo,
    WindowFlag,
    get_error_string,
    get_unique_id,
    get_version,
    show_versions,
)
from ringcoll.version import __version__

globals().update(NcclDataType.__members__)
globals().update(NcclRedOp.__members__)

__all__ = [
    "CTAPolicy",
    "CommShrinkFlag",
    "Communicator",
    "CustomRedOp",
    "NCCLCollConfig",
    "NCCLCommProperties",
    "NCCLConfig",
    "NcclDataType",
    "NcclInvalid",
    "NcclRedOp",
    "RegisteredBufferHandle",
    "RegisteredWindowHandle",
    "Result",
    "UniqueId",
    "VersionInfo",
    "WindowFlag",
    "__version__",
    "cupy",
    "get_error_string",
    "get_unique_id",
    "get_version",
    "group",
    "group_end",
    "group_start",
    "mem_alloc",
    "mem_free",
    "show_versions",
    "torch",
]
__all__ += [*NcclDataType.__members__, *NcclRedOp.__members__]


def __getattr__(name: str) -> Any:
    raise AttributeError(
        f"module {__name__!r} has no attribute {name!r}: see 'NCCL and nccl4py' in "
        f"docs/coming-from.md for what nccl4py has beyond it"
    )
