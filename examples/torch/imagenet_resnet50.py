"""Train ResNet-50 with large batches: warm-up, accumulated gradients, checkpoints that are resumed.

    python imagenet_resnet50.py                                  # one rank
    python start.py 2 imagenet_resnet50.py --epochs 5            # two ranks on this host; again: resumes

Images are generated: each class has a pattern of its own, under noise. Put a dataset of yours in place of
`GeneratedImages`. `--width 8 --image-size 32` is the same network, small enough to try the script.
"""

from __future__ import annotations

import argparse
import itertools
import os

import torch
from resnet import MODELS
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import sparkhvd.torch as hvd


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="ResNet-50 with sparkhvd")
    parser.add_argument("--checkpoint-format", default="checkpoint-{epoch}.pt")
    parser.add_argument("--num-images", type=int, default=512, help="to train on")
    parser.add_argument("--num-val-images", type=int, default=128)
    parser.add_argument("--num-classes", type=int, default=10)
    parser.add_argument("--image-size", type=int, default=64, help="pixels per side")
    parser.add_argument("--width", type=int, default=64, help="channels of the first stage")
    parser.add_argument("--batch-size", type=int, default=32, help="images per backward pass")
    parser.add_argument(
        "--batches-per-allreduce",
        type=int,
        default=1,
        help="backward passes per step: as large a batch as you like in the memory of a small one",
    )
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--base-lr", type=float, default=0.0125, help="of one rank and one pass")
    parser.add_argument("--warmup-epochs", type=float, default=5)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--wd", type=float, default=5e-5, help="weight decay")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients in 16 bits")
    parser.add_argument("--use-adasum", action="store_true", help="combine steps by Adasum")
    parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)
    return parser.parse_args()


class GeneratedImages(Dataset):
    """Images that depend only on the seed and their number."""

    def __init__(self, first: int, count: int, options: argparse.Namespace) -> None:
        self.first, self.count, self.seed = first, count, options.seed
        self.shape = (3, options.image_size, options.image_size)
        generator = torch.Generator().manual_seed(options.seed)
        self.patterns = torch.randn(options.num_classes, *self.shape, generator=generator)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        number = self.first + index
        label = number % len(self.patterns)
        generator = torch.Generator().manual_seed(self.seed + 1 + number)
        return self.patterns[label] + torch.randn(self.shape, generator=generator), label


class Metric:
    """A mean over all samples of all ranks. Counts here, and communicates once, in `mean`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.sums = torch.zeros(2, dtype=torch.float64)  # values, samples

    def update(self, mean: Tensor, count: int) -> None:
        """Add the mean of this rank's `count` samples."""
        self.sums += torch.tensor([mean.item() * count, count], dtype=torch.float64)

    def mean(self) -> float:
        """Return the mean over all ranks; every rank must call this."""
        total, count = hvd.allreduce(self.sums, name=self.name, op=hvd.Sum).tolist()
        return total / count


def accuracy(output: Tensor, labels: Tensor) -> Tensor:
    return (output.argmax(dim=1) == labels).float().mean()


def learning_rate(epoch: float, options: argparse.Namespace) -> float:
    """Return the rate at a moment of training, in epochs.

    A step uses the images of all ranks and passes, and its rate grows with their number; during the warm-up it
    rises to that from the rate of one (Goyal et al., 2017, arXiv:1706.02677). Adasum needs the passes only.
    """
    ranks = 1 if options.use_adasum else hvd.size()
    factor = float(ranks * options.batches_per_allreduce)
    if epoch < options.warmup_epochs:
        return options.base_lr * (1 + (factor - 1) * epoch / options.warmup_epochs)
    decay = sum(epoch >= milestone for milestone in (30, 60, 80))
    return options.base_lr * factor * 0.1**decay


def last_checkpoint(options: argparse.Namespace) -> int:
    """Find the last epoch of which rank 0 has a checkpoint, 0 without one; every rank gets the same."""
    found = 0
    if hvd.rank() == 0:
        epochs = itertools.takewhile(
            lambda epoch: os.path.exists(options.checkpoint_format.format(epoch=epoch)),
            itertools.count(1),
        )
        found = max(epochs, default=0)
    return int(hvd.broadcast(torch.tensor(found), root_rank=0, name="resume_from_epoch").item())


def save_checkpoint(
    model: nn.Module, optimizer: torch.optim.Optimizer, epoch: int, options: argparse.Namespace
) -> None:
    if hvd.rank() == 0:  # the others have the same weights
        path = options.checkpoint_format.format(epoch=epoch)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, f"{path}.part")
        os.replace(f"{path}.part", path)  # a checkpoint is whole, or it is not there


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader,
    epoch: int,
    options: argparse.Namespace,
) -> None:
    model.train()
    losses, right = Metric("train_loss"), Metric("train_accuracy")
    for step, (images, labels) in enumerate(loader):
        rate = learning_rate(epoch - 1 + step / len(loader), options)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        # The loader gives the images of a whole step; each backward pass takes a part of them.
        parts = images.split(options.batch_size), labels.split(options.batch_size)
        for some_images, some_labels in zip(*parts, strict=True):
            output = model(some_images)
            loss = functional.cross_entropy(output, some_labels)
            losses.update(loss.detach(), len(some_labels))
            right.update(accuracy(output.detach(), some_labels), len(some_labels))
            # Gradients of the passes add up; so that they average, each counts by its share.
            (loss * (len(some_labels) / len(labels))).backward()
        optimizer.step()
    means = losses.mean(), right.mean()
    if hvd.rank() == 0:
        print(f"epoch {epoch}: lr {rate:.4f}, train loss {means[0]:.4f}, accuracy {means[1]:.4f}")


@torch.no_grad()
def validate(model: nn.Module, loader: DataLoader, epoch: int) -> None:
    model.eval()
    losses, right = Metric("val_loss"), Metric("val_accuracy")
    for images, labels in loader:
        output = model(images)
        losses.update(functional.cross_entropy(output, labels), len(labels))
        right.update(accuracy(output, labels), len(labels))
    means = losses.mean(), right.mean()
    if hvd.rank() == 0:
        print(f"epoch {epoch}: validation loss {means[0]:.4f}, accuracy {means[1]:.4f}")


def main() -> None:
    options = parse_arguments()
    hvd.init()
    torch.manual_seed(options.seed)

    resume_from = last_checkpoint(options)
    train_data = GeneratedImages(0, options.num_images, options)
    val_data = GeneratedImages(options.num_images, options.num_val_images, options)
    sampler = DistributedSampler(
        train_data, num_replicas=hvd.size(), rank=hvd.rank(), seed=options.seed
    )
    batch_size = options.batch_size * options.batches_per_allreduce
    loader = DataLoader(train_data, batch_size=batch_size, sampler=sampler)
    val_sampler = DistributedSampler(
        val_data, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False
    )
    val_loader = DataLoader(val_data, batch_size=options.batch_size, sampler=val_sampler)

    model = MODELS["resnet50"](options.num_classes, options.width)
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=learning_rate(resume_from, options),
        momentum=options.momentum,
        weight_decay=options.wd,
    )
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if options.fp16_allreduce else hvd.Compression.none,
        backward_passes_per_step=options.batches_per_allreduce,
        op=hvd.Adasum if options.use_adasum else hvd.Average,
        gradient_predivide_factor=options.gradient_predivide_factor,
    )
    if resume_from > 0 and hvd.rank() == 0:
        print(f"resuming after epoch {resume_from}")
        path = options.checkpoint_format.format(epoch=resume_from)
        checkpoint = torch.load(path, weights_only=True)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    # The first weights, or those that rank 0 has read.
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    for epoch in range(resume_from + 1, options.epochs + 1):
        sampler.set_epoch(epoch)
        train(model, optimizer, loader, epoch, options)
        validate(model, val_loader, epoch)
        save_checkpoint(model, optimizer, epoch, options)


if __name__ == "__main__":
    main()
