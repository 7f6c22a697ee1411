"""The networks of `step.py` and `scaling.py`: definitions, batches, and limits of a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

CLASSES = 10


@dataclass(frozen=True)
class Limits:
    """Limits of a model, as multiples of the step without communication or of DDP's speed.

    None means no limit.

    Attributes:
        default: at most, with the default options.
        best: at most, with the best of the options.
        faster_than_ddp: at least, with the default options.
    """

    default: float | None = None
    best: float | None = None
    faster_than_ddp: float | None = None


@dataclass(frozen=True)
class Model:
    """A network to train.

    Attributes:
        title: as the table has it.
        build: makes the network.
        batch: makes inputs and targets.
        steps: timed ones in a row, so that they take about half a second.
        warm_up: steps before them, untimed: the variant before has filled the caches with its own.
        limits: see Limits.
        loss: of outputs and targets.
        momentum: of SGD; sparse gradients have none.
        variants: those that make sense, by name; None means all.
    """

    title: str
    build: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    steps: int
    warm_up: int = 2
    limits: Limits = Limits()
    loss: Callable[[Tensor, Tensor], Tensor] = nn.functional.cross_entropy
    momentum: float = 0.9
    variants: Sequence[str] | None = None

    def optimizer(self, network: nn.Module) -> torch.optim.Optimizer:
        # So slow that no loss leaves the range of usual numbers within the steps of a benchmark.
        return torch.optim.SGD(network.parameters(), lr=1e-4, momentum=self.momentum)


def labelled(*shape: int) -> Callable[[], tuple[Tensor, Tensor]]:
    """Make a function for batches of random inputs of this shape, with their classes."""
    return lambda: (torch.randn(shape), torch.randint(CLASSES, shape[:1]))


def mlp(*widths: int) -> nn.Module:
    """Build linear layers with ReLU between them.

    Initialised after He, so that neither values nor gradients vanish over a hundred layers: numbers below 1e-38 take the
    processor many times as long.
    """
    layers: list[nn.Module] = []
    for inputs, outputs in zip(widths, widths[1:], strict=False):
        linear = nn.Linear(inputs, outputs)
        nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")
        nn.init.zeros_(linear.bias)
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def cnn() -> nn.Module:
    """Build three convolutions and a linear layer: 0.1 million parameters."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 128, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(128, CLASSES),
    )


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut (He, Zhang, Ren and Sun, CVPR 2016)."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            *convolution(inputs, width, 1),
            nn.ReLU(inplace=True),
            *convolution(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *convolution(width, outputs, 1),
        )
        self.shortcut = nn.Sequential()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(*convolution(inputs, outputs, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> list[nn.Module]:
    return [
        nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False),
        nn.BatchNorm2d(outputs),
    ]


def resnet50() -> nn.Module:
    """Build a ResNet-50 with 1000 classes: 25.6 million parameters in 161 tensors."""
    layers = [*convolution(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1)]
    inputs = 64
    for width, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for number in range(blocks):
            layers.append(Bottleneck(inputs, width, stride if number == 0 else 1))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))


class Transformer(nn.Module):
    """A language model of 10 million parameters: 4 layers of width 384, 6 heads, 4,000 words."""

    WORDS = 4000
    WIDTH = 384

    def __init__(self, length: int) -> None:
        super().__init__()
        self.words = nn.Embedding(self.WORDS, self.WIDTH)
        self.places = nn.Parameter(torch.randn(length, self.WIDTH) / math.sqrt(self.WIDTH))
        layer = nn.TransformerEncoderLayer(
            self.WIDTH, 6, 4 * self.WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(self.WIDTH, self.WORDS)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.layers(self.words(words) + self.places)).flatten(0, 1)

    @classmethod
    def batch(cls, rows: int, length: int) -> tuple[Tensor, Tensor]:
        words = torch.randint(cls.WORDS, (rows, length))
        return words, words.roll(-1, dims=1).flatten()


class EmbeddingNet(nn.Module):
    """Mean of 16 rows of a large table, then a small head. The table's gradient is sparse."""

    ROWS = 2_000_000
    WIDTH = 32

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(self.ROWS, self.WIDTH, sparse=True)
        self.head = mlp(self.WIDTH, 64, CLASSES)

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(self.table(rows).mean(dim=1))

    @classmethod
    def batch(cls) -> tuple[Tensor, Tensor]:
        return torch.randint(cls.ROWS, (256, 16)), torch.randint(CLASSES, (256,))


MODELS = {
    "mlp": Model(
        "MLP 512-4096-4096-10, 18.9 million parameters, batch 32",
        lambda: mlp(512, 4096, 4096, CLASSES),
        labelled(32, 512),
        steps=6,
        limits=Limits(default=1.12, best=1.05),
    ),
    "layers": Model(
        "121 small layers, 1 million parameters, batch 64",
        lambda: mlp(*[91] * 121, CLASSES),
        labelled(64, 91),
        steps=40,
        warm_up=5,
        limits=Limits(default=1.25),
    ),
    "resnet": Model(
        "ResNet-50, 25.6 million parameters, batch 8 at 64 x 64",
        resnet50,
        labelled(8, 3, 64, 64),
        steps=3,
        warm_up=1,
        limits=Limits(default=1.06, best=1.03),
    ),
    "transformer": Model(
        "transformer, 10.3 million parameters, 64 words, batch 8",
        lambda: Transformer(64),
        lambda: Transformer.batch(8, 64),
        steps=3,
        warm_up=1,
        limits=Limits(default=1.05),
    ),
    "embedding": Model(
        "embedding of 2 million rows x 32, sparse gradients, batch 256 of 16 rows",
        EmbeddingNet,
        EmbeddingNet.batch,
        steps=40,
        warm_up=5,
        limits=Limits(faster_than_ddp=3.0),
        momentum=0.0,
        variants=("none", "DDP", "sparkhvd", "fp16"),
    ),
    "small mlp": Model(
        "MLP 256-512-512-10, 0.4 million parameters, batch 128",
        lambda: mlp(256, 512, 512, CLASSES),
        labelled(128, 256),
        steps=30,
        warm_up=5,
    ),
    "small cnn": Model(
        "CNN of three convolutions, 0.1 million parameters, batch 16 at 32 x 32",
        cnn,
        labelled(16, 3, 32, 32),
        steps=10,
    ),
}
