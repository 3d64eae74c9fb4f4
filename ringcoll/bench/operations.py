"""The memory of a case, and the calls of ringcoll on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ringcoll.bench.cases import Case
from ringcoll.bench.devices import CpuDevice, Device
from ringcoll.bench.library import Operation, Place
from ringcoll.communicator.selection import tuned

if TYPE_CHECKING:
    from ringcoll.communicator.public import Communicator

__all__ = ["Buffers", "Ringcoll", "allocate"]

Array = npt.NDArray[Any]

_LINE = 64  # bytes of a cache line: ranks of nccl-tests' sizes begin at a whole one


@dataclass(frozen=True, slots=True)
class Buffers:
    """The two buffers of a rank, for every case of a sweep.

    Args:
        rank: the rank that owns them.
        send: bytes; inputs of out-of-place calls.
        recv: bytes; outputs of out-of-place calls, everything of in-place calls.
        shift: elements that all arrays are shifted by.

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
    """Buffers for cases of up to ``nbytes`` bytes; collective.

    Args:
        comm: of this rank.
        nbytes: the largest size.
        shift: elements that arrays are shifted by.
        register: 2: memory that peers reach; 0: plain arrays; 1: plain ones that are registered,
            which helps where ranks are threads.
        device: of this rank; None is the CPU.

    """
    place = CpuDevice() if device is None else device
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


class Ringcoll:
    """The library itself.

    Args:
        comm: of this rank.
        symmetric: its peers reach the buffers.
        options: of each call; None leaves an option out.

    """

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
        """The one asked for, or the one that the tuner picks."""
        section = case.section
        if self.comm.device != "cpu":
            return self._on_gpu(case)
        name = section.algorithm
        if name is None and section.collective == "sendrecv":
            name = "pair"
        if name is None:
            links, machine = self.comm.topology.links, self.comm.topology.machine
            nodes = links.nodes if links is not None else ()
            name = tuned(
                section.collective, section.nranks, case.nbytes, nodes=nodes, machine=machine
            ).algorithm
        return name if section.slices is None else f"{name} S={section.slices}"

    def _on_gpu(self, case: Case) -> str:
        from ringcoll.bench.chosen import chosen_name

        # Only the sizes of the arrays count, and pages that nobody touches cost nothing.
        length = case.nbytes + _LINE
        memory = Buffers(self.comm.rank, np.empty(length, np.uint8), np.empty(length, np.uint8))
        place = memory.place(case, False)
        arguments, keywords = self._arguments(case, place) if place is not None else ((), {})
        return chosen_name(self.comm, case, arguments, keywords, symmetric=self.symmetric)

    def unable(self, case: Case) -> str | None:
        """Nothing is missing."""
        return None

    def operation(self, case: Case, place: Place) -> Operation:
        """The public call with the arguments that a user would write."""
        arguments, keywords = self._arguments(case, place)
        function = getattr(self.comm, case.section.collective)
        if not keywords:
            return Operation(lambda: function(*arguments), place.output)
        return Operation(lambda: function(*arguments, **keywords), place.output)

    def _arguments(self, case: Case, place: Place) -> tuple[tuple[Any, ...], dict[str, Any]]:
        section, rank, n = case.section, self.comm.rank, self.comm.nranks
        name = section.collective
        keywords: dict[str, Any] = {**self.options}
        if section.op is not None and section.op != "sum":
            keywords["op"] = section.operator(rank)
        if section.root > 0:
            keywords["root"] = section.root
        if name == "barrier":
            return (), keywords
        if name == "sendrecv":
            return (place.input, (rank + 1) % n, place.output, (rank - 1) % n), keywords
        if not place.in_place:
            return (place.input, place.output), keywords
        # In place the larger buffer stands alone, on the side to which it belongs.
        if place.whole is None:
            return (place.input, place.output), keywords
        if section.kind.input == "one" and section.kind.output == "all":
            return (None, place.whole), keywords
        return (place.whole, None), keywords
