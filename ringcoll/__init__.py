"""ringcoll: collective communication for multiple GPUs, in Python that a person can read.

A collective is a plan: for every block of every rank, a short list of steps "wait for these
signals, reduce these sources into these destinations, post these signals". The plan that is
proven is the plan that is timed is the plan that runs.
"""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"
