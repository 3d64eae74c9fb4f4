"""Whether two GPUs are joined by NVLink, as the driver's management library says."""

from __future__ import annotations

import logging
from collections.abc import Sequence

__all__ = ["joined_by_nvlink"]

_log = logging.getLogger("ringcoll")


def joined_by_nvlink(pci: str, others: Sequence[str]) -> bool:
    """Whether one GPU reaches all of some others over NVLink, a switch between them or not.

    Args:
        pci: bus address of the one.
        others: of the others; its own address among them counts as joined.

    Returns:
        False also where nvidia-ml-py is not installed or the driver does not tell.

    """
    far = [other for other in others if other != pci]
    if not far:
        return True
    try:
        import pynvml
    except ImportError:
        _log.info("nvidia-ml-py is not installed: NVLink is not made use of by protocol LL128")
        return False
    try:
        pynvml.nvmlInit()
        try:
            own = pynvml.nvmlDeviceGetHandleByPciBusId(pci)
            for other in far:
                peer = pynvml.nvmlDeviceGetHandleByPciBusId(other)
                said = pynvml.nvmlDeviceGetP2PStatus(own, peer, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
                if said != pynvml.NVML_P2P_STATUS_OK:
                    return False
        finally:
            pynvml.nvmlShutdown()
    except (pynvml.NVMLError, AttributeError) as error:  # an old nvidia-ml-py lacks functions
        _log.info("NVML does not say how device %s reaches its peers: %s", pci, error)
        return False
    return True
