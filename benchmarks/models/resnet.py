"""ResNet-50 (He et al., 2015): torchvision's where it is installed, else our own definition.

The stride of a bottleneck is at its 3 x 3 convolution, as in torchvision. Images have ImageNet's
shape, 3 x 224 x 224 of 1000 classes, and are noise around a pattern for each class.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.models.task import Task

__all__ = ["Bottleneck", "ResNet", "SlicedMaxPool", "task"]


class Bottleneck(nn.Module):  # type: ignore[misc]
    """1 x 1, 3 x 3 and 1 x 1 convolutions beside a shortcut; the last widens four times.

    Args:
        inputs: channels that come in.
        width: channels of the 3 x 3 convolution.
        stride: of that.

    """

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            *_convolution(inputs, width, 1),
            nn.ReLU(inplace=True),
            *_convolution(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *_convolution(width, outputs, 1),
        )
        self.shortcut = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(*_convolution(inputs, outputs, 1, stride))

    def forward(self, x: Any) -> Any:
        """The block's outputs."""
        return functional.relu(self.body(x) + self.shortcut(x), inplace=True)


class ResNet(nn.Module):  # type: ignore[misc]
    """A residual network of bottlenecks.

    Args:
        blocks: how many in each of the four stages; ResNet-50 has 3, 4, 6, 3.
        width: channels of the first stage.
        classes: how many.

    """

    def __init__(
        self, blocks: Sequence[int] = (3, 4, 6, 3), width: int = 64, classes: int = 1000
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(*_convolution(3, width, 7, 2), nn.ReLU(inplace=True))
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        stages: list[Any] = []
        inputs = width
        for stage, count in enumerate(blocks):
            for number in range(count):
                stride = 2 if stage and not number else 1
                stages.append(Bottleneck(inputs, width << stage, stride))
                inputs = 4 * (width << stage)
        self.stages = nn.Sequential(*stages)
        self.classifier = nn.Linear(inputs, classes)

    def forward(self, x: Any) -> Any:
        """Scores of the classes."""
        return self.classifier(self.stages(self.maxpool(self.stem(x))).mean((2, 3)))


class SlicedMaxPool(nn.Module):  # type: ignore[misc]
    """The stem's pooling by operations whose gradients are the same in every run."""

    def forward(self, x: Any) -> Any:
        """The largest of each 3 x 3 window, every other one."""
        rows, columns = (x.shape[2] + 1) // 2, (x.shape[3] + 1) // 2
        x = functional.pad(x, (1, 1, 1, 1), value=float("-inf"))
        found = None
        for i in range(3):
            for j in range(3):
                part = x[:, :, i : i + 2 * rows - 1 : 2, j : j + 2 * columns - 1 : 2]
                found = part if found is None else torch.maximum(found, part)
        return found


def task(*, tiny: bool = False, repeatable: bool = False) -> Task:
    """ResNet-50 and its data.

    Args:
        tiny: a network of 4 blocks and images of 32 x 32, for tests.
        repeatable: without operations whose gradients differ from run to run.

    """
    size, classes = (32, 10) if tiny else (224, 1000)
    module, source = _module(tiny)
    if repeatable:
        module.maxpool = SlicedMaxPool()
    patterns = torch.randn(classes, 3, 8, 8, generator=torch.Generator().manual_seed(1))

    def sample(batch: int, generator: Any) -> tuple[Any, Any]:
        labels = torch.randint(classes, (batch,), generator=generator)
        images = torch.randn(batch, 3, size, size, generator=generator)
        return images + functional.interpolate(patterns[labels], size=(size, size)), labels

    def optimizer(parameters: Any) -> Any:
        return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, weight_decay=1e-4)

    return Task(
        "resnet50",
        source,
        "images",
        1,
        module,
        sample,
        functional.cross_entropy,
        optimizer,
        channels_last=True,
    )


def _module(tiny: bool) -> tuple[Any, str]:
    if tiny:
        return ResNet((1, 1, 1, 1), 8, 10), "ringcoll's benchmark, tiny"
    try:
        from torchvision.models import resnet50
    except (ImportError, RuntimeError):  # the second: made for another torch
        return ResNet(), "ringcoll's benchmark"
    return resnet50(), "torchvision"


def _convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> tuple[Any, Any]:
    convolution = nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
    return convolution, nn.BatchNorm2d(outputs)
