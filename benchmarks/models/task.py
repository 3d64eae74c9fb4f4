"""What a benchmark needs of a model: the module, its data, its loss and how it is optimized."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["Task"]


@dataclass(frozen=True, slots=True)
class Task:
    """A model to train on synthetic data.

    Args:
        name: of the model.
        source: whose definition it is.
        unit: what is counted, "images" or "tokens".
        units: of these in one sample.
        module: the model, on the CPU, its weights drawn from torch's default generator.
        sample: makes a batch on the CPU: (batch, generator) -> (inputs, targets).
        loss: (outputs, targets) -> the mean loss.
        optimizer: of parameters.
        channels_last: whether images lie so in memory, as GPUs want it.

    """

    name: str
    source: str
    unit: str
    units: int
    module: Any
    sample: Callable[[int, Any], tuple[Any, Any]]
    loss: Callable[[Any, Any], Any]
    optimizer: Callable[[Any], Any]
    channels_last: bool = False
