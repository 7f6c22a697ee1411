"""Measure how many images per second a network trains on, with random images.

python synthetic_benchmark.py                                        # one rank
python start.py 2 synthetic_benchmark.py --model resnet18            # two ranks on this host
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from resnet import MODELS
from torch import nn
from torch.nn import functional

import sparkhvd.torch as hvd

NUM_CLASSES = 1000


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Images per second with sparkhvd")
    parser.add_argument("--model", choices=sorted(MODELS), default="resnet50")
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step")
    parser.add_argument("--image-size", type=int, default=224, help="pixels per side")
    parser.add_argument("--width", type=int, default=64, help="channels of the first stage")
    parser.add_argument("--num-warmup-batches", type=int, default=10, help="not measured")
    parser.add_argument("--num-batches-per-iter", type=int, default=10)
    parser.add_argument("--num-iters", type=int, default=10, help="measurements")
    parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients in 16 bits")
    parser.add_argument("--use-adasum", action="store_true", help="combine steps by Adasum")
    return parser.parse_args()


def log(text: str) -> None:
    if hvd.rank() == 0:
        print(text)


def main() -> None:
    options = parse_arguments()
    hvd.init()
    torch.manual_seed(hvd.rank())

    model: nn.Module = MODELS[options.model](NUM_CLASSES, options.width)
    scale = 1 if options.use_adasum else hvd.size()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * scale)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if options.fp16_allreduce else hvd.Compression.none,
        op=hvd.Adasum if options.use_adasum else hvd.Average,
    )
    images = torch.randn(options.batch_size, 3, options.image_size, options.image_size)
    labels = torch.randint(NUM_CLASSES, (options.batch_size,))

    def train(batches: int) -> None:
        for _ in range(batches):
            optimizer.zero_grad()
            functional.cross_entropy(model(images), labels).backward()
            optimizer.step()

    log(f"Model {options.model}, {options.batch_size} images per rank, {hvd.size()} ranks")
    train(options.num_warmup_batches)
    rates = []
    for number in range(1, options.num_iters + 1):
        began = time.perf_counter()
        train(options.num_batches_per_iter)
        seconds = time.perf_counter() - began
        rates.append(options.batch_size * options.num_batches_per_iter / seconds)
        log(f"Iter {number}: {rates[-1]:.1f} img/sec per rank")

    mean = statistics.fmean(rates)
    error = 1.96 * statistics.pstdev(rates)
    # Ranks step together, but each has its own clock: what all of them measured is added up.
    totals = hvd.allreduce(torch.tensor([mean, error], dtype=torch.float64), op=hvd.Sum).tolist()
    log(f"Img/sec per rank: {mean:.1f} +-{error:.1f}")
    log(f"Total img/sec on {hvd.size()} rank(s): {totals[0]:.1f} +-{totals[1]:.1f}")


if __name__ == "__main__":
    main()
