"""All facts of this machine: NVML's, CUDA's and the kernel's, joined by bus id."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ringcoll.topology.busid import all_ones
from ringcoll.topology.detect.cuda import CudaFacts, read_cuda
from ringcoll.topology.detect.facts import Facts, GpuFacts, PairFacts
from ringcoll.topology.detect.nics import read_nics
from ringcoll.topology.detect.nvml import NvmlFacts, read_nvml
from ringcoll.topology.detect.sysfs import (
    driver_version,
    nvidia_gpus,
    read_cpu,
    read_numa,
    read_pci,
)


def collect(root: Path = Path("/")) -> Facts:
    """Read everything below ``root``; a fact that is missing is None, never an error.

    With CuPy this starts the CUDA driver: do not fork afterwards and use CUDA in the child.
    """
    return _joined(read_nvml(), read_cuda(), root)


def _joined(nvml: NvmlFacts, cuda: CudaFacts, root: Path) -> Facts:
    gpus = _gpus(nvml, cuda, root)
    nics = read_nics(root)
    wanted = {gpu.busid for gpu in gpus} | {nic.busid for nic in nics if nic.busid is not None}
    for gpu in gpus:
        far = (link.remote for link in gpu.links or ())
        wanted.update(remote for remote in far if remote is not None and not all_ones(remote))
    none = () if gpus else ("this machine shows no NVIDIA GPU",)
    return Facts(
        gpus=gpus,
        pairs=_pairs(nvml, cuda),
        pci=read_pci(sorted(wanted), root),
        numa=read_numa(root),
        cpu=read_cpu(root),
        nics=nics,
        driver=nvml.driver or driver_version(root),
        notes=(*none, *nvml.notes, *cuda.notes),
    )


def _gpus(nvml: NvmlFacts, cuda: CudaFacts, root: Path) -> tuple[GpuFacts, ...]:
    """NVML's GPUs, which are all; without NVML, those of CUDA, or of the bus."""
    known = {gpu.busid: gpu for gpu in nvml.gpus}
    if not known:
        seen = {device.busid for device in cuda.devices} or set(nvidia_gpus(root))
        known = {busid: GpuFacts(busid) for busid in sorted(seen)}
    for device in cuda.devices:
        gpu = known.get(device.busid, GpuFacts(device.busid))
        sm = gpu.sm if gpu.sm is not None else device.sm
        known[device.busid] = replace(gpu, sm=sm)
    return tuple(known.values())


def _pairs(nvml: NvmlFacts, cuda: CudaFacts) -> dict[tuple[str, str], PairFacts]:
    pairs = dict(nvml.pairs)
    for pair, access in cuda.access.items():
        pairs[pair] = replace(pairs.get(pair, PairFacts()), access=access)
    return pairs
