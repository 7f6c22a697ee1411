"""Residual networks (He et al., 2015, arXiv:1512.03385), for the examples in this folder."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


def _convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs))


class Residual(nn.Module):
    """Residual block: two convolutions, or three with a bottleneck, added to their input."""

    def __init__(self, inputs: int, width: int, outputs: int, stride: int) -> None:
        super().__init__()
        if outputs == width:
            self.layers = nn.Sequential(
                _convolution(inputs, width, 3, stride),
                nn.ReLU(inplace=True),
                _convolution(width, outputs, 3),
            )
        else:
            self.layers = nn.Sequential(
                _convolution(inputs, width, 1),
                nn.ReLU(inplace=True),
                _convolution(width, width, 3, stride),
                nn.ReLU(inplace=True),
                _convolution(width, outputs, 1),
            )
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else _convolution(inputs, outputs, 1, stride)
        nn.init.zeros_(self.layers[-1][1].weight)  # at first a block is its shortcut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.layers(x) + self.shortcut(x))


class ResNet(nn.Module):
    """Four stages of residual blocks.

    Args:
        blocks: residual blocks in each stage.
        expansion: outputs of a block per unit of its width: 1, or 4 with bottlenecks.
        num_classes: outputs of the network.
        width: of the first stage; the paper has 64, and less makes a network of the same shape that is faster.
    """

    def __init__(
        self, blocks: tuple[int, ...], expansion: int, num_classes: int, width: int
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            _convolution(3, width, 7, stride=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        stages: list[nn.Module] = []
        inputs = width
        for stage, count in enumerate(blocks):
            inner = width * 2**stage
            for block in range(count):
                stride = 2 if stage > 0 and block == 0 else 1
                stages.append(Residual(inputs, inner, inner * expansion, stride))
                inputs = inner * expansion
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(inputs, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.stages(self.stem(images)).mean(dim=(2, 3)))


MODELS: dict[str, Callable[[int, int], ResNet]] = {
    "resnet18": lambda num_classes, width: ResNet((2, 2, 2, 2), 1, num_classes, width),
    "resnet34": lambda num_classes, width: ResNet((3, 4, 6, 3), 1, num_classes, width),
    "resnet50": lambda num_classes, width: ResNet((3, 4, 6, 3), 4, num_classes, width),
    "resnet101": lambda num_classes, width: ResNet((3, 4, 23, 3), 4, num_classes, width),
}
