"""Calls that were launched before, by the compiled part of the package, where it has been built.

Of a warm call of a GPU rank some 4 µs are Python's and as many the driver's
(``gpu_launch_parts_2.json``). ``native/launches.c`` reads the arrays, finds the call and hands it
to the driver without Python's part. Python stays in charge: it makes every call that is new or has
more to do, and gives those that it has launched. ``native/recounts.h`` launches calls of a count
that has not come often, by LL or LL128, from the parameter of one: see :mod:`.recounted`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ringcoll.cuda.driver import address_of
from ringcoll.cuda.raw import RawArray
from ringcoll.cuda.readers import Libraries
from ringcoll.executors import compiled
from ringcoll.executors.cuda.fast_path import FastPath
from ringcoll.executors.cuda.params import PACKS_WORD, SIGNATURE_WORD, TIMEOUT_WORD, nanoseconds
from ringcoll.executors.cuda.recounted import Recounter

_INTERFACE = 3
_launches: Any = compiled.load("ringcoll.executors.cuda._launches", _INTERFACE)

MOST = 512
"""Calls that are known at a time."""

MOST_LIKES = 128
"""Kinds of calls that are known at a time for counts that have not come often."""

_VARIANTS = 4
"""Arguments by which one prepared call is known. Python takes calls for one that differ there: an
operator that is made anew for each call, a tensor and a parameter of torch's."""

_DLPACK_CUDA = 2  # kDLCUDA


@dataclass(slots=True, eq=False)
class StreamOwners:
    """What keeps the streams of a rank's last call alive, by their handles.

    A stream must live until the next call has waited for it. There are several of a group, which
    may make its calls in another order.
    """

    now: dict[int, object] = field(default_factory=dict)


Launch = Callable[..., bool]
"""Enqueues a kept call, as :meth:`.FastPath.launch`."""


def launch_of(path: FastPath, setting: bool | None) -> Launch:
    """What launches the kept calls of a rank that something else finds: C, if that is wanted."""
    if not is_wanted(setting):
        return path.launch
    launch: Launch = _of(path, StreamOwners(), set(), None).launch
    return launch


def is_wanted(setting: bool | None) -> bool:
    """Whether the setting ``compiled`` asks for it; see :func:`.compiled.is_wanted`."""
    return compiled.is_wanted(setting, _launches)


class Launches:
    """The calls of one rank that the compiled part knows: those of one kernel by LL or LL128."""

    def __init__(
        self, path: FastPath, owners: StreamOwners, groups: set[Any], libraries: Libraries
    ) -> None:
        from cupy.cuda import get_current_stream

        self._launches = _of(path, owners, groups, get_current_stream)
        self._libraries = libraries
        self._learnt: dict[type, bool] = {type(None): True}
        self.make: Callable[..., bool] = self._launches
        """Makes a call that is known: of its name, buffers, operator and root.

        False: it is for Python, and nothing of it has begun.
        """
        self.launch: Launch = self._launches.launch
        """As :meth:`.FastPath.launch`."""
        self.whole = _VARIANTS
        """What a prepared call notes once no more of it is taken; more when all is forgotten."""

    def clear(self) -> None:
        """Forget all calls."""
        self._launches.clear()
        self.whole += _VARIANTS

    def add(
        self,
        call: tuple[str, Any, Any, Any, int],
        prepared: Any,
        places: tuple[int, int, int, int],
        nbytes: tuple[int, int],
    ) -> None:
        """Take a call that has just been launched, with its arguments.

        ``places``: the argument of INPUT, and where it lies in it; the same of OUTPUT. ``nbytes``:
        of both arguments.
        """
        _, sendbuf, recvbuf, _, _ = call
        if self._learn(type(sendbuf)) and self._learn(type(recvbuf)):
            if self._launches.size >= MOST:
                self.clear()
            self._launches.add(*call, prepared, places, nbytes)
        prepared.taken = max(prepared.taken, self.whole - _VARIANTS) + 1

    def add_like(
        self,
        call: tuple[str, Any, Any, Any, int],
        recounter: Recounter,
        places: tuple[int, int, int, int],
        nbytes: tuple[int, int],
        count: int,
    ) -> None:
        """Take calls that differ from one that has just been launched in their counts alone.

        ``places`` and ``nbytes`` as :meth:`add` takes them, of a call with this ``count``. The
        recounter counts the kinds of arguments by which its calls are known.
        """
        taken = max(recounter.taken, self.whole - _VARIANTS)
        recounter.taken = taken + 1
        table, (first, offset, second, other) = recounter.recounts.table(), places
        longest, sizes, before = recounter.alike.longest, recounter.sizes, recounter.before
        _, sendbuf, recvbuf, _, _ = call
        known = self._learn(type(sendbuf)) and self._learn(type(recvbuf))
        if not known or table is None or before.large or sizes.step != 1:
            return
        if len(table[3]) > _launches.PLACES or offset % count or other % count:
            return
        if self._launches.likes >= MOST_LIKES:
            self.clear()
        new = self._launches.add_like(
            *(*call, nbytes, count),
            (longest.start, longest.stop, sizes.start, sizes.stop, recounter.each),
            (first, offset // count, second, other // count),
            *(recounter.begin_new, recounter.launchable),
            (PACKS_WORD, SIGNATURE_WORD, recounter.number_at, TIMEOUT_WORD),
            *(nanoseconds(before.timeout), table),
        )
        if not new:  # Python has launched one that is known, since it had more to do
            recounter.taken = taken

    def _learn(self, kind: type) -> bool:
        """Whether arrays of a type are read there."""
        found = self._learnt.get(kind)
        if found is None:
            found = self._learnt[kind] = self._read_there(kind)
        return found

    def _read_there(self, kind: type) -> bool:
        library, learn = self._libraries[kind], self._launches.learn
        if library.owner is not None:  # torch's
            table = getattr(kind, "__dlpack_c_exchange_api__", None)
            return table is not None and learn(kind, _launches.DLPACK, table, library.owner)
        if kind is RawArray:
            return bool(learn(kind, _launches.RAW, None, None))
        cupy = sys.modules.get("cupy")
        known = cupy is not None and kind is cupy.ndarray and hasattr(kind, "_c_contiguous")
        return known and learn(kind, _launches.CUPY, None, None)


def _of(path: FastPath, owners: StreamOwners, groups: set[Any], current_stream: object) -> Any:
    """The compiled part's record of a rank; ``current_stream``: CuPy's function, if it is asked."""
    current = path.current
    parts = (
        *(path.rank, path.order, path.timer, path.report, path.records),
        *(current.get, current.ordinal, current.thread, path.errors, path.fabric),
        *(owners, groups, current_stream),
    )
    driver = address_of("cuLaunchKernel"), address_of("cuCtxGetDevice")
    return _launches.Launches(parts, *driver, (_DLPACK_CUDA, current.ordinal))
