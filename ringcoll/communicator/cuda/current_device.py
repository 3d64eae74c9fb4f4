"""A communicator of this process's rank on the device that is the current one, as NCCL makes it."""

from __future__ import annotations

import sys
from typing import Any

from ringcoll.bootstrap import post_failure
from ringcoll.communicator.public import Communicator
from ringcoll.communicator.setup.start import begin
from ringcoll.config import starting
from ringcoll.cuda.device import available
from ringcoll.errors import Error


def on_current_device(
    bootstrap: object,
    *,
    device: str = "auto",
    timeout: float | None = None,
    always: bool = False,
    **met: Any,
) -> Communicator:
    """As :func:`ringcoll.init`, on the current device if CuPy is loaded, or ``always``.

    Where it is not, no program for CuPy has chosen a device, and ranks of a host take one each.
    ``met`` is the id, the rank and the number of ranks.
    """
    try:
        config, settings = starting(None, timeout, device, {})
    except Error as error:
        post_failure(error, bootstrap, timeout=timeout, **met)
        raise
    chosen, loaded = None, "cupy" in sys.modules
    if (loaded or always) and settings.device != "cpu" and available() is None:
        import cupy

        chosen = int(cupy.cuda.runtime.getDevice())
    return begin(bootstrap, config, settings, chosen, **met)
