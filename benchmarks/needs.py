"""What a benchmark needs of the machine: where it is missing, one sentence says so."""

from __future__ import annotations

import argparse
import os
from importlib import import_module

from ringcoll.cuda.device import available, devices

__all__ = ["require"]


def require(
    parser: argparse.ArgumentParser, *, gpus: int = 1, torch: bool = False, instead: str = ""
) -> int:
    """End the program with status 2, before anything is measured, where something is missing.

    Args:
        parser: the benchmark's.
        gpus: how many it takes; 0: it measures CPU ranks.
        torch: it takes torch as well, for GPUs with CUDA.
        instead: what can be asked for without GPUs.

    Returns:
        How many GPUs there are; 0 if none are needed.

    """
    there = len(devices()) if gpus else 0
    if gpus and (reason := available()):
        lacking = reason + instead
    elif torch and (reason := _without("torch")):
        lacking = reason
    elif gpus and torch and not import_module("torch").cuda.is_available():
        lacking = "torch sees no GPU: install one that is built for CUDA (pytorch.org)"
    elif gpus > there:
        lacking = f"{gpus} ranks want a GPU each, of which there are {there}"
    else:
        if gpus:  # what is timed are the kernels that calls end up with
            os.environ.setdefault("RINGCOLL_KERNEL_WAIT", "inf")
        return there
    needed = " and ".join([*["NVIDIA GPUs with CuPy"] * bool(gpus), *["torch"] * torch])
    parser.exit(2, f"{parser.prog}: needs {needed}, but here {lacking}\n")


def _without(package: str) -> str:
    """Why a package cannot be imported; "" if it can."""
    try:
        import_module(package)
    except ImportError as error:
        return f"{package} cannot be imported ({error}): pip install {package}"
    return ""
