"""The memory fence between data and the flag that announces it.

A rank writes data, then an aligned 8-byte flag; its peer reads the flag, then the data. x86-64
keeps stores in order and loads in order, and numpy's copies end with the fence that streaming
stores need, so there plain stores suffice. Any other processor may reorder them: there a fence is
called between the two, on both sides, or the machine is refused.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable

from ringcoll.errors import MachineError

Fence = Callable[[], None]

_ORDERED = frozenset({"x86_64", "amd64"})  # names of x86-64, as platform.machine() spells it
_SEQ_CST = 5  # memory_order_seq_cst of C11's <stdatomic.h>


def fence_of(machine: str | None = None, library: str = "libatomic.so.1") -> Fence | None:
    """The fence to call between data and flag on this machine; None where none is needed.

    Raises:
        MachineError: the processor needs a fence, and ``library`` with C11's is not there.

    """
    name = (platform.machine() if machine is None else machine).lower()
    if name in _ORDERED:
        return None
    try:
        function = ctypes.CDLL(library).atomic_thread_fence
    except (OSError, AttributeError) as error:
        raise MachineError(
            f"CPU ranks on a {name!r} processor need a memory fence, and {library} with "
            f"atomic_thread_fence cannot be loaded ({error}); install libatomic "
            "(Debian, Ubuntu: apt install libatomic1; Fedora: dnf install libatomic)"
        ) from error
    function.argtypes = (ctypes.c_int,)
    function.restype = None

    def fence() -> None:
        function(_SEQ_CST)

    return fence
