"""Train a small convolutional network on handwritten digits, on one rank or on several.

    python mnist.py                            # one rank
    python start.py 2 mnist.py --epochs 5      # two ranks on this host

The digits are the 1,797 images of 8 x 8 pixels that come with scikit-learn, which must be installed.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset, TensorDataset

import sparkhvd.torch as hvd


class Net(nn.Module):
    """Two convolutions and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(1, 16, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.linears = nn.Sequential(
            nn.Linear(32 * 4 * 4, 64), nn.ReLU(), nn.Dropout(0.25), nn.Linear(64, 10)
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.linears(self.convolutions(images).flatten(1))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Handwritten digits with sparkhvd")
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate of one rank")
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--log-interval", type=int, default=10, help="steps between two lines")
    parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients in 16 bits")
    parser.add_argument("--use-adasum", action="store_true", help="combine steps by Adasum")
    parser.add_argument(
        "--gradient-predivide-factor",
        type=float,
        default=1.0,
        help="divide gradients by this before the sum, and by size / this after it",
    )
    return parser.parse_args()


def digits() -> tuple[Dataset, Dataset]:
    """Load the images to train on and, one in five, those to test on; the same on every rank."""
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels / 16.0, dtype=torch.float32).view(-1, 1, 8, 8)
    data = TensorDataset(images, torch.tensor(labels, dtype=torch.int64))
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(7)).tolist()
    tested = len(data) // 5
    return Subset(data, order[tested:]), Subset(data, order[:tested])


def metric_average(value: float, name: str) -> float:
    """Average a value over the ranks; every rank must call this."""
    return hvd.allreduce(torch.tensor(value), name=name).item()


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader,
    epoch: int,
    log_interval: int,
) -> None:
    model.train()
    total = 0.0
    for step, (images, labels) in enumerate(loader, 1):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        total += loss.item()
        if step % log_interval == 0 and hvd.rank() == 0:
            print(f"epoch {epoch} step {step}/{len(loader)}: loss {loss.item():.4f}")
    average = metric_average(total / len(loader), "train_loss")
    if hvd.rank() == 0:
        print(f"epoch {epoch}: train loss {average:.4f}")


@torch.no_grad()
def test(model: nn.Module, data: Dataset) -> None:
    """Test each rank's share of the images; the sums are exact also where shares differ by one."""
    model.eval()
    share = Subset(data, range(hvd.rank(), len(data), hvd.size()))
    sums = torch.zeros(3, dtype=torch.float64)  # loss, right answers, images
    for images, labels in DataLoader(share, batch_size=200):
        output = model(images)
        loss = functional.cross_entropy(output, labels, reduction="sum")
        right = (output.argmax(dim=1) == labels).sum()
        sums += torch.tensor([loss.item(), right.item(), len(labels)], dtype=torch.float64)
    loss_sum, right_sum, count = hvd.allreduce(sums, name="test", op=hvd.Sum).tolist()
    if hvd.rank() == 0:
        print(f"test loss {loss_sum / count:.4f}, accuracy {right_sum / count:.4f} ({count:.0f})")


def main() -> None:
    options = parse_arguments()
    hvd.init()
    torch.manual_seed(options.seed)

    train_data, test_data = digits()
    sampler = DistributedSampler(
        train_data, num_replicas=hvd.size(), rank=hvd.rank(), seed=options.seed
    )
    loader = DataLoader(train_data, batch_size=options.batch_size, sampler=sampler)

    model = Net()
    # Averaged gradients are those of a batch `size` times as large. Adasum needs no larger rate.
    scale = 1 if options.use_adasum else hvd.size()
    optimizer = torch.optim.SGD(
        model.parameters(), lr=options.lr * scale, momentum=options.momentum
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if options.fp16_allreduce else hvd.Compression.none,
        op=hvd.Adasum if options.use_adasum else hvd.Average,
        gradient_predivide_factor=options.gradient_predivide_factor,
    )

    for epoch in range(1, options.epochs + 1):
        sampler.set_epoch(epoch)  # another order in every epoch
        train(model, optimizer, loader, epoch, options.log_interval)
        test(model, test_data)


if __name__ == "__main__":
    main()
