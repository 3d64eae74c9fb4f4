"""The caches of prepared calls, which are found again by their buffers."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ringcoll.cuda.raw import RawArray

if TYPE_CHECKING:
    from ringcoll.executors.cuda.cuda_call import CudaCall
    from ringcoll.executors.cuda_nodes.executor import CudaNodesCall

CACHED_CALLS = 128
"""Calls that a communicator caches; the oldest goes first."""


def evict(cache: dict[Any, Any], dead: Iterable[object] = ()) -> None:
    """Make room for one more call: drop the ``dead`` ones, then the oldest beyond the bound.

    Callbacks of weak references would not do: a KeyboardInterrupt inside one is lost. Another
    thread may drop calls meanwhile.
    """
    for key in dead:
        cache.pop(key, None)
    while len(cache) >= CACHED_CALLS:
        cache.pop(next(iter(cache)), None)


@dataclass(slots=True)
class CachedCall:
    """A prepared call of GPU ranks: weak references to its buffers, and their locations then."""

    send: Callable[[], Any]
    recv: Callable[[], Any]
    locations: tuple[object, object]
    call: CudaCall | CudaNodesCall
    by_cupy: bool
    """Whether the arrays are CuPy's: the call runs on CuPy's current stream."""

    def is_of(self, sendbuf: Any, recvbuf: Any, changes: int) -> bool:
        """Whether it was prepared for these buffers, and they have not moved."""
        return (
            (sendbuf is None or self.send() is sendbuf)
            and (recvbuf is None or self.recv() is recvbuf)
            and self.locations == (location_of(sendbuf), location_of(recvbuf))
            and self.call.changes == changes
        )

    def is_still_of(self, sendbuf: Any, recvbuf: Any, changes: int) -> bool:
        """:meth:`is_of` for CuPy's arrays, of which only the address can change."""
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
    """A buffer's address and, where these can change, its layout; None: unknown type of array."""
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
