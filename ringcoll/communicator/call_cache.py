"""Prepared calls of GPU ranks, found again by their buffers."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ringcoll.cuda.raw import RawArray
from ringcoll.executors.cuda.cuda_call import CudaCall
from ringcoll.executors.cuda_nodes.executor import CudaNodesCall


@dataclass(slots=True)
class CachedCall:
    """A prepared call, and weak references to its buffers and where these were."""

    send: Callable[[], Any]
    recv: Callable[[], Any]
    locations: tuple[object, object]
    call: CudaCall | CudaNodesCall
    by_cupy: bool
    """Whether the arrays are CuPy's, whose current stream the call then takes."""

    def is_of(self, sendbuf: Any, recvbuf: Any, changes: int) -> bool:
        """Whether these buffers are the ones it was prepared for, where they were then."""
        return (
            (sendbuf is None or self.send() is sendbuf)
            and (recvbuf is None or self.recv() is recvbuf)
            and self.locations == (location_of(sendbuf), location_of(recvbuf))
            and self.call.changes == changes
        )

    def is_still_of(self, sendbuf: Any, recvbuf: Any, changes: int) -> bool:
        """The same where it was prepared for arrays of CuPy's, by what can change of these."""
        first, last = self.locations
        return (
            (sendbuf is None or (self.send() is sendbuf and sendbuf.data.ptr == first))
            and (recvbuf is None or (self.recv() is recvbuf and recvbuf.data.ptr == last))
            and self.call.changes == changes
        )


def is_cupy(buffer: Any) -> bool:
    """Whether a buffer is an array of CuPy's."""
    return type(buffer).__module__.partition(".")[0] == "cupy"


def location_of(buffer: Any) -> object:
    """Where and how a buffer lies now; None where that is not known without looking closely."""
    if buffer is None:
        return 0
    place: object
    try:
        place = buffer.data.ptr  # CuPy's arrays keep their size and type
    except AttributeError:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(buffer, torch.Tensor):
            # resize_, set_ and t_ change a tensor in place.
            place = buffer.data_ptr(), buffer.numel(), buffer.dtype, buffer.is_contiguous()
        else:
            place = buffer.pointer if isinstance(buffer, RawArray) else None
    return place


def reference(buffer: Any) -> Callable[[], Any]:
    """A weak reference, TypeError where there can be none; of no buffer one that is never dead."""
    return _absent if buffer is None else weakref.ref(buffer)


def _absent() -> bool:
    """Stands for a weak reference to None: never dead."""
    return True
