"""GPUs and their links as NVML reports them, through nvidia-ml-py.

An old driver, a virtual machine or a container may refuse any call: then that one fact is None.
Numbers are passed where nvidia-ml-py's names cannot be relied on: its ``NVML_P2P_CAPS_INDEX_READ``
is a tuple, and old releases lack the newer names.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import byref
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any, TypeVar

from ringcoll.topology.busid import bus_id
from ringcoll.topology.detect.facts import FabricFacts, GpuFacts, LinkFacts, PairFacts

_T = TypeVar("_T")

# Return codes.
_INVALID_ARGUMENT = 2
_NOT_SUPPORTED = 3
_FUNCTION_NOT_FOUND = 13

# nvmlGpuP2PCapsIndex_t, nvmlNvLinkCapability_t and the ids of nvmlDeviceGetFieldValues.
_NVLINK = 2
_CAN_P2P = 0
_LINK_SPEED, _LINK_STATE = 164, 165
_C2C_COUNT, _C2C_SPEED = 170, 172

# nvmlValueType_t, those that are whole numbers, and their places in nvmlValue_t.
_VALUES = {1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal", 6: "usVal"}

_UP = (1, 2)
"""Of field 165: active, and asleep until it is used."""

_HOPPER = 90
"""From this compute capability on NCCL uses field 165."""

_MOST_LINKS = 36
"""NVML_NVLINK_MAX_LINKS: some drivers answer for higher numbers, which no GPU has."""


@dataclass(frozen=True)
class NvmlFacts:
    """NVML's GPUs in its order, pairs by bus ids in both directions, the driver's version."""

    gpus: tuple[GpuFacts, ...] = ()
    pairs: dict[tuple[str, str], PairFacts] = field(default_factory=dict)
    driver: str | None = None
    notes: tuple[str, ...] = ()


def read_nvml() -> NvmlFacts:
    """Everything that NVML reports of this machine; never an error."""
    try:
        import pynvml
    except ImportError:
        return NvmlFacts(
            notes=(
                "nvidia-ml-py is not installed, so NVLinks are unknown: pip install nvidia-ml-py",
            )
        )
    return _Reader(pynvml).read()


class _Reader:
    """Calls ``nvml``, the module pynvml; a refused call is a missing fact."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._notes: list[str] = []

    def read(self) -> NvmlFacts:
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as error:
            return NvmlFacts(notes=(f"cannot initialise NVML, so NVLinks are unknown: {error}",))
        try:
            handles: dict[str, Any] = {}
            gpus: list[GpuFacts] = []
            count, _ = self._ask("nvmlDeviceGetCount")
            for index in range(count or 0):
                handle, code = self._ask("nvmlDeviceGetHandleByIndex", index)
                busid = None
                if handle is not None:
                    busid, code = self._ask("nvmlDeviceGetPciInfo", handle, then=_address)
                if handle is None or busid is None:
                    self._notes.append(
                        f"NVML reports no PCI address of GPU {index} (return code {code}); the GPU "
                        f"is left out"
                    )
                    continue
                handles[busid] = handle
                gpus.append(self._gpu(index, busid, handle))
            driver, _ = self._ask("nvmlSystemGetDriverVersion", then=_word)
            return NvmlFacts(tuple(gpus), self._pairs(handles), driver, tuple(self._notes))
        finally:
            self._ask("nvmlShutdown")

    def _ask(
        self, name: str, *args: object, then: Callable[[Any], _T | None] = lambda value: value
    ) -> tuple[_T | None, int]:
        """The result of a call, or None, and NVML's return code."""
        call = getattr(self._nvml, name, None)
        if call is None:  # an old nvidia-ml-py
            return None, _FUNCTION_NOT_FOUND
        try:
            return then(call(*args)), 0
        except self._nvml.NVMLError as error:
            return None, int(error.value)

    def _gpu(self, index: int, busid: str, handle: Any) -> GpuFacts:
        def fact(name: str, then: Callable[[Any], _T | None]) -> _T | None:
            return self._ask(name, handle, then=then)[0]

        sm = fact("nvmlDeviceGetCudaComputeCapability", _sm)
        return GpuFacts(
            busid=busid,
            index=index,
            uuid=fact("nvmlDeviceGetUUID", _word),
            name=fact("nvmlDeviceGetName", _word),
            sm=sm,
            links=self._links(handle, sm),
            generation_max=fact("nvmlDeviceGetMaxPcieLinkGeneration", int),
            width_max=fact("nvmlDeviceGetMaxPcieLinkWidth", int),
            fabric=self._fabric(handle),
            mig=fact("nvmlDeviceGetMigMode", lambda modes: bool(modes[0])),
            c2c=self._c2c(handle),
        )

    def _links(self, handle: Any, sm: int | None) -> tuple[LinkFacts, ...] | None:
        """All links, possibly none; None if NVML reports the state of no link."""
        found = []
        for link in range(_MOST_LINKS):
            active, code = self._active(handle, link, sm)
            if active is None and code in (_INVALID_ARGUMENT, _NOT_SUPPORTED):
                break  # there are no more
            found.append(LinkFacts() if active is None else self._link(handle, link, active))
        if found and all(link.active is None for link in found):
            return None
        return tuple(found)

    def _active(self, handle: Any, link: int, sm: int | None) -> tuple[bool | None, int]:
        """Whether a link is up, and the return code of the call for it."""
        state, code = self._ask("nvmlDeviceGetNvLinkState", handle, link, then=bool)
        if sm is None or sm >= _HOPPER:
            up = self._field(handle, _LINK_STATE, link)
            if up is not None:
                return up in _UP, 0
        return state, code

    def _link(self, handle: Any, link: int, active: bool) -> LinkFacts:
        def fact(name: str, *args: object, then: Callable[[Any], _T | None]) -> _T | None:
            return self._ask(f"nvmlDeviceGetNvLink{name}", handle, link, *args, then=then)[0]

        return LinkFacts(
            active=active,
            p2p=fact("Capability", _CAN_P2P, then=bool),
            remote=fact("RemotePciInfo", then=_address),
            remote_type=fact("RemoteDeviceType", then=int),
            speed=self._field(handle, _LINK_SPEED, link),
        )

    def _field(self, handle: Any, number: int, scope: int = 0) -> int | None:
        """A whole number among the field values; each has a return code of its own."""

        def one(values: Any) -> int | None:
            value = values[0]
            if value.nvmlReturn != 0:
                return None
            name = _VALUES.get(value.valueType)
            return None if name is None else int(getattr(value.value, name))

        return self._ask("nvmlDeviceGetFieldValues", handle, [(number, scope)], then=one)[0]

    def _fabric(self, handle: Any) -> FabricFacts | None:
        make = getattr(self._nvml, "c_nvmlGpuFabricInfoV_t", None)
        if make is None:  # an old nvidia-ml-py
            return None
        info = make()
        _, code = self._ask("nvmlDeviceGetGpuFabricInfoV", handle, byref(info))
        if code:
            return None
        return FabricFacts(
            state=int(info.state),
            status=int(info.status),
            clique=int(info.cliqueId),
            cluster=bytes(info.clusterUuid).hex(),
        )

    def _c2c(self, handle: Any) -> tuple[int, int] | None:
        count = self._field(handle, _C2C_COUNT)
        speed = self._field(handle, _C2C_SPEED) if count else None
        return (count, speed) if count and speed else None

    def _pairs(self, handles: dict[str, Any]) -> dict[tuple[str, str], PairFacts]:
        found = {}
        for (a, one), (b, other) in permutations(handles.items(), 2):
            nvlink, _ = self._ask("nvmlDeviceGetP2PStatus", one, other, _NVLINK, then=int)
            ancestor, _ = self._ask("nvmlDeviceGetTopologyCommonAncestor", one, other, then=int)
            found[a, b] = PairFacts(nvlink, ancestor)
        return found


def _word(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _address(info: Any) -> str | None:
    """Of an nvmlPciInfo_t, whose field is bytes or, in some versions, a string."""
    return bus_id(_word(info.busId)) or None


def _sm(capability: tuple[int, int]) -> int:
    return capability[0] * 10 + capability[1]
