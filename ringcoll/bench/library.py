"""Libraries whose calls are timed: ringcoll itself here, its peers beside it.

A library is given the arrays of a call (:class:`Place`) and returns the call to time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from ringcoll.arguments.calls import Call
from ringcoll.bench.cases import Case, Section
from ringcoll.bench.devices import Device
from ringcoll.communicator.explaining import reachable
from ringcoll.errors import ArgumentError, LaunchRefused
from ringcoll.plan import Buffer

if TYPE_CHECKING:
    from ringcoll.communicator.public import Communicator
    from ringcoll.communicator.rank import RankState
    from ringcoll.config import Config

Array = npt.NDArray[Any]

_LINE = 64  # bytes of a cache line: ranks of nccl-tests' sizes begin at a whole one


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank's input and output of one call lie; ``whole``: in place, what holds both."""

    in_place: bool
    input: Array | None
    output: Array | None
    whole: Array | None = None


@dataclass(frozen=True, slots=True)
class Operation:
    """A call to time, and the array that holds its result."""

    call: Callable[[], object]
    output: Array | None


class Library:
    """Runs collectives on a rank's buffers."""

    name = ""

    def algorithm(self, case: Case) -> str:
        """The algorithm that runs a case, where the library says which."""
        return self.name

    def unable(self, case: Case) -> str | None:
        """Why the library has no call for a case on either side; None if it has one."""
        return None

    def operation(self, case: Case, place: Place) -> Operation | None:
        """The call on these arrays; None where the library has none, in place or out of place."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Buffers:
    """The two buffers of a rank, in bytes, for every case of a sweep.

    ``recv`` holds outputs, and everything of in-place calls; arrays are shifted by ``shift``
    elements.
    """

    rank: int
    send: Array
    recv: Array
    shift: int = 0

    def place(self, case: Case, in_place: bool) -> Place | None:
        """The arrays of one call; None where the collective has none such."""
        section, count, rank = case.section, case.count, self.rank
        kind, n = section.kind, section.nranks
        has_input = kind.rooted != "input" or rank == section.root
        has_output = kind.rooted != "output" or rank == section.root
        has_output = has_output and (section.collective, rank) != ("exscan", 0)
        if section.collective == "barrier":
            return None if in_place else Place(False, None, None)
        wide_in = count * n if kind.input == "all" else count
        wide_out = count * n if kind.output == "all" else count
        if not in_place:
            return Place(
                False,
                self._view(self.send, case, wide_in) if has_input else None,
                self._view(self.recv, case, wide_out) if has_output else None,
            )
        if section.collective == "sendrecv":
            return None
        if not has_input:
            return Place(True, None, self._view(self.recv, case, wide_out))
        if not has_output:
            return Place(True, self._view(self.recv, case, wide_in), None)
        whole = self._view(self.recv, case, max(wide_in, wide_out))
        own = slice(rank * count, (rank + 1) * count)
        return Place(
            True,
            whole if wide_in == whole.size else whole[own],
            whole if wide_out == whole.size else whole[own],
            whole,
        )

    def _view(self, raw: Array, case: Case, elements: int) -> Array:
        dtype = case.section.dtype
        start = self.shift * dtype.itemsize
        return raw[start : start + elements * dtype.itemsize].view(dtype.numpy)


def allocate(
    comm: Communicator,
    nbytes: int,
    *,
    shift: int = 0,
    register: int = 2,
    device: Device | None = None,
) -> Buffers:
    """Buffers for cases of up to ``nbytes`` bytes, shifted by ``shift`` elements; collective.

    ``register``: 2 takes memory that peers reach, 0 plain arrays, 1 plain ones that are registered,
    which helps where ranks are threads.
    """
    place = Device() if device is None else device
    length = nbytes + 16 * shift + _LINE
    if register == 2:
        send, recv = comm.empty(length, "uint8"), comm.empty(length, "uint8")
    else:
        send, recv = place.empty(length), place.empty(length)
        if register == 1:
            comm.register(send)
            comm.register(recv)
    # Touched now: the first write to a page costs a page fault.
    place.clear(send)
    place.clear(recv)
    return Buffers(comm.rank, send, recv, shift)


class Ringcoll(Library):
    """ringcoll; ``symmetric`` says that peers reach the buffers, ``options`` go with every call."""

    name = "ringcoll"

    def __init__(
        self,
        comm: Communicator,
        *,
        symmetric: bool = True,
        options: Mapping[str, object] | None = None,
    ) -> None:
        self.comm, self.symmetric = comm, symmetric
        self.options = {k: v for k, v in (options or {}).items() if v is not None}

    def algorithm(self, case: Case) -> str:
        """The one that the user named, or the one that the tuner picks."""
        section = case.section
        if section.collective == "sendrecv":
            return section.algorithm or "pair"
        op = None if section.op is None else section.operator(self.comm.rank)
        root, state = max(section.root, 0), self.comm._state
        call = Call(
            section.collective,
            self.comm.rank,
            None,
            None,
            case.count,
            section.dtype,
            op,
            root,
            nbytes=case.nbytes,
        )
        how: dict[str, Any] = {"algorithm": section.algorithm, "slices": section.slices}
        mapped = reachable(call) if self.symmetric else frozenset[Buffer]()
        try:
            config = replace(state.config, **how)
            if state.on_gpu and _in_layers(state, call, config):
                return "two layers"
            found = state.choice(call, config, mapped)
        except (ArgumentError, LaunchRefused):
            return section.algorithm or "none"  # the call itself will say why
        last = found.variants[-1]  # the root's own buffer is like the others; all are warmed up
        algorithm, slices = last.algorithm or "unnamed", last.launch.slices
        if found.engine == "host":
            return algorithm if section.slices is None else f"{algorithm} S={section.slices}"
        name = f"{algorithm} {'copy' if found.engine == 'copy' else found.launch.protocol}"
        return f"{name} S={slices}" if slices > 1 else name

    def operation(self, case: Case, place: Place) -> Operation:
        """The public call with the arguments that a user would write."""
        arguments, keywords = self._arguments(case, place), self._keywords(case.section)
        function = getattr(self.comm, case.section.collective)
        if not keywords:
            return Operation(lambda: function(*arguments), place.output)
        return Operation(lambda: function(*arguments, **keywords), place.output)

    def _keywords(self, section: Section) -> dict[str, Any]:
        keywords: dict[str, Any] = {**self.options}
        if section.op is not None and section.op != "sum":
            keywords["op"] = section.operator(self.comm.rank)
        if section.root > 0:
            keywords["root"] = section.root
        return keywords

    def _arguments(self, case: Case, place: Place) -> tuple[Any, ...]:
        section, rank, n = case.section, self.comm.rank, self.comm.nranks
        if section.collective == "barrier":
            return ()
        if section.collective == "sendrecv":
            return place.input, (rank + 1) % n, place.output, (rank - 1) % n
        # In place the larger buffer stands alone, on the side to which it belongs.
        if place.whole is None:
            return place.input, place.output
        if section.kind.input == "one" and section.kind.output == "all":
            return None, place.whole
        return place.whole, None


def _in_layers(state: RankState, call: Call, config: Config) -> bool:
    """Whether GPU ranks on several nodes run a call in two layers."""
    from ringcoll.communicator.cuda.nodes import NodesState

    return isinstance(state, NodesState) and state.in_layers(call, config)
