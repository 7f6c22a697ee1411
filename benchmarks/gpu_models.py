"""The networks of `gpu.py`: a ResNet-50 and a GPT of 124 million parameters, with their batches and steps in bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from step_models import mlp, resnet50
from torch import Tensor, nn


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a layer norm and beside the identity."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.before_forward = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        parts = self.attention(self.before_attention(x)).split(width, dim=2)
        query, key, value = (
            part.view(rows, length, self.heads, -1).transpose(1, 2) for part in parts
        )
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mix(attended.transpose(1, 2).reshape(rows, length, width))
        return x + self.narrow(nn.functional.gelu(self.widen(self.before_forward(x))))


class Gpt(nn.Module):
    """A language model of the shape of GPT-2 small: 12 layers of width 768, 124 million parameters."""

    WORDS, WIDTH, LAYERS, HEADS = 50_257, 768, 12, 12

    def __init__(self, length: int) -> None:
        super().__init__()
        self.words = nn.Embedding(self.WORDS, self.WIDTH)
        self.places = nn.Embedding(length, self.WIDTH)
        self.blocks = nn.ModuleList(Block(self.WIDTH, self.HEADS) for _ in range(self.LAYERS))
        self.norm = nn.LayerNorm(self.WIDTH)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words) + self.places.weight[: words.shape[1]]
        for block in self.blocks:
            x = block(x)
        return nn.functional.linear(self.norm(x), self.words.weight).flatten(0, 1)


@dataclass(frozen=True)
class Task:
    """A network and its batch on the GPU.

    Attributes:
        title: as the table has it.
        build: makes the network, on the CPU.
        batch: makes inputs and targets, on a device.
        steps: timed ones in a row.
        longer: percent that a step may take longer than without communication; None: no limit.
    """

    title: str
    build: Callable[[], nn.Module]
    batch: Callable[[torch.device], tuple[Tensor, Tensor]]
    steps: int
    longer: float | None = 1.0

    def loss(self, network: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """Compute the loss of a batch with autocast to bfloat16."""
        with torch.autocast(inputs.device.type, torch.bfloat16):
            return nn.functional.cross_entropy(network(inputs).float(), targets)


def images(rows: int, size: int) -> Callable[[torch.device], tuple[Tensor, Tensor]]:
    """Make random images, channels last, and classes."""

    def batch(device: torch.device) -> tuple[Tensor, Tensor]:
        pixels = torch.randn(rows, 3, size, size, device=device)
        return (
            pixels.to(memory_format=torch.channels_last),
            torch.randint(1000, (rows,), device=device),
        )

    return batch


def sentences(rows: int, length: int) -> Callable[[torch.device], tuple[Tensor, Tensor]]:
    """Make random words, and the word behind each."""

    def batch(device: torch.device) -> tuple[Tensor, Tensor]:
        words = torch.randint(Gpt.WORDS, (rows, length), device=device)
        return words, words.roll(-1, dims=1).flatten()

    return batch


def points(rows: int, width: int) -> Callable[[torch.device], tuple[Tensor, Tensor]]:
    """Make random vectors and classes."""

    def batch(device: torch.device) -> tuple[Tensor, Tensor]:
        return torch.randn(rows, width, device=device), torch.randint(1000, (rows,), device=device)

    return batch


TASKS = {
    "resnet": Task(
        "ResNet-50, 25.6 million parameters, batch 128 at 224 x 224, channels last",
        lambda: resnet50().to(memory_format=torch.channels_last),  # type: ignore[call-overload]
        images(128, 224),
        steps=10,
    ),
    "gpt": Task(
        "GPT, 124 million parameters, batch 8 x 1024",
        lambda: Gpt(1024),
        sentences(8, 1024),
        steps=10,
    ),
    # The host is the slower one: 202 parameters, each of which costs it time, and nothing to do for the GPU.
    "mlp": Task(
        "101 layers of width 256, batch 64",
        lambda: mlp(*[256] * 101, 1000),
        points(64, 256),
        steps=20,
        longer=None,
    ),
}

# To try the benchmark where there is no GPU.
TINY = {
    "mlp": Task("three layers", lambda: mlp(16, 32, 32, 1000), points(8, 16), steps=2),
}
