"""A pynvml that answers what it is told, and refuses the rest with NVML's codes."""

from __future__ import annotations

import ctypes
import json
import types

from tests.topology.replay import LINKS, VM


class NVMLError(Exception):
    def __init__(self, value):
        super().__init__(f"code {value}")
        self.value = value


class Fabric(ctypes.Structure):
    _fields_ = [
        ("version", ctypes.c_uint),
        ("clusterUuid", ctypes.c_uint8 * 16),
        ("status", ctypes.c_uint),
        ("cliqueId", ctypes.c_uint32),
        ("state", ctypes.c_uint8),
        ("healthMask", ctypes.c_uint32),
    ]


class Nvml(types.ModuleType):
    """The calls are made of ``answers``: name -> function, whose KeyError is "not supported".

    Args:
        answers: of calls.
        most: links of a GPU; further ones are an invalid argument.

    """

    NVMLError = NVMLError
    c_nvmlGpuFabricInfoV_t = Fabric  # noqa: N815
    NVML_P2P_CAPS_INDEX_READ = (0,)

    def __init__(self, answers):
        super().__init__("pynvml")
        self.asked = []
        for name, answer in answers.items():
            setattr(self, name, self._call(name, answer))

    def _call(self, name, answer):
        def call(*args):
            self.asked.append((name, *args))
            result = answer(*args)
            if isinstance(result, NVMLError):
                raise result
            return result

        return call


def value(number, code=0, kind=1):
    names = {1: "uiVal", 2: "ulVal", 3: "ullVal"}
    said = types.SimpleNamespace(**{names.get(kind, "dVal"): number})
    return types.SimpleNamespace(nvmlReturn=code, valueType=kind, value=said)


def vm_answers():
    """What the VM with 8 H200 answers; a handle is an index."""
    said = json.loads(VM.read_text())
    gpus = said["gpus"]

    def link(gpu, number):
        links = gpus[gpu][LINKS]
        return links[number] if number < len(links) else None

    def of_link(place):
        return lambda gpu, number, *_: (
            NVMLError(2) if link(gpu, number) is None else link(gpu, number)[place]
        )

    def remote(gpu, number):
        found = link(gpu, number)
        return NVMLError(2) if found is None else types.SimpleNamespace(busId=found[1].encode())

    def fields(gpu, ids):
        ((field, scope),) = ids
        found = link(gpu, scope)
        if field not in (164, 165) or found is None:
            return [value(0, 3)]
        code, number = found[5][field - 164]
        return [value(number, code)]

    def fabric(gpu, reference):
        info = reference._obj
        told = gpus[gpu]["fabric"]
        info.state, info.status, info.cliqueId = told["state"], told["status"], told["clique"]
        info.clusterUuid[:] = bytes.fromhex(told["cluster"])
        return 0

    def status(a, b, index):
        assert isinstance(index, int)
        assert index == 2
        return said["p2p_nvlink"][a][b]

    return {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: b"580.95.05",
        "nvmlDeviceGetCount": lambda: len(gpus),
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetPciInfo": lambda gpu: types.SimpleNamespace(busId=gpus[gpu]["pci"].encode()),
        "nvmlDeviceGetUUID": lambda gpu: f"GPU-{gpu}",
        "nvmlDeviceGetName": lambda _gpu: "NVIDIA H200",
        "nvmlDeviceGetCudaComputeCapability": lambda _gpu: (9, 0),
        "nvmlDeviceGetMaxPcieLinkGeneration": lambda gpu: gpus[gpu]["pcie_gen_max"],
        "nvmlDeviceGetMaxPcieLinkWidth": lambda gpu: gpus[gpu]["pcie_width_max"],
        "nvmlDeviceGetGpuFabricInfoV": fabric,
        "nvmlDeviceGetMigMode": lambda _gpu: [0, 0],
        "nvmlDeviceGetNvLinkState": of_link(0),
        "nvmlDeviceGetNvLinkRemotePciInfo": remote,
        "nvmlDeviceGetNvLinkRemoteDeviceType": of_link(2),
        "nvmlDeviceGetNvLinkCapability": of_link(4),
        "nvmlDeviceGetFieldValues": fields,
        "nvmlDeviceGetP2PStatus": status,
        "nvmlDeviceGetTopologyCommonAncestor": lambda a, b: said["common_ancestor"][a][b],
    }
