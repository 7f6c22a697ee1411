"""A training step under Lightning's Trainer, two ranks on this host, in turns inside the same two processes.

    build/users-env/bin/python -m benchmarks.lightning [--rounds 9] [--json FILE] [--write]

The environment is that of `make test-users`. Each round, every variant trains the same network for some steps, the first of them untimed: a plain loop
without communication and with `hvd.DistributedOptimizer`; the Trainer without communication, with our strategy, with Lightning's DDP over Gloo
and over our backend. A cell is the median over rounds (25 % to 75 %); targets are held against medians of ratios within a round.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader

import sparkhvd.torch as hvd
from benchmarks.common import Report, Target, median_and_quartiles
from benchmarks.step_models import MODELS
from sparkhvd.runner import run_local

WARM_UP, STEPS = 3, 8
# Times the plain loop with our optimizer, and times Lightning's DDP over Gloo.
LIMITS = {"loop, sparkhvd": 1.05, "Trainer, DDP over Gloo": 0.75}
OURS = "Trainer, sparkhvd"
MLP = MODELS["mlp"]


class Watch(pl.Callback):
    """Time of the steps behind the first ones."""

    seconds = 0.0

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        if index == WARM_UP:
            hvd.barrier()
            self.seconds = -time.perf_counter()

    def on_train_batch_end(
        self, trainer: Any, module: Any, out: Any, batch: Any, index: int
    ) -> None:
        if index == WARM_UP + STEPS - 1:
            self.seconds += time.perf_counter()


class Module(pl.LightningModule):
    """The network and its optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = MLP.build()

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        return MLP.loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return MLP.optimizer(self.net)


def trained(
    batches: list[Any], strategy: Callable[[], Any], devices: int = 2
) -> Callable[[], float]:
    """Make a run under the Trainer. Its result is the seconds of a step."""
    module = Module()

    def run() -> float:
        watch = Watch()
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=devices,
            strategy=strategy(),
            max_epochs=1,
            logger=False,
            callbacks=[watch],
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        )
        trainer.fit(module, DataLoader(batches, batch_size=None))
        return watch.seconds / STEPS

    return run


def looped(batches: list[Any], wrap: Callable[[Any], Any]) -> Callable[[], float]:
    """Make a run of a plain loop. Its result is the seconds of a step."""
    net: nn.Module = MLP.build()

    def run() -> float:
        optimizer = wrap(MLP.optimizer(net))
        began = 0.0
        for number, (x, y) in enumerate(DataLoader(batches, batch_size=None)):
            if number == WARM_UP:
                hvd.barrier()
                began = time.perf_counter()
            optimizer.zero_grad()
            MLP.loss(net(x), y).backward()
            optimizer.step()
        return (time.perf_counter() - began) / STEPS

    return run


def rank(rounds: int) -> dict[str, list[float]]:
    """Measure on both ranks. Only the times of rank 0 count."""
    import sparkhvd.distributed
    import sparkhvd.lightning  # noqa: F401 - this function travels by value, without the module's imports

    class Hooked(DDPStrategy):
        """DDP with our hook, also on CPUs, where Lightning omits the hook."""

        def _register_ddp_hooks(self) -> None:
            self.model.register_comm_hook(ours, sparkhvd.distributed.ddp_hook)

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    hvd.init()
    dist.init_process_group("gloo")  # torch has one default group; ours is inside
    ours = dist.new_group(backend="sparkhvd")
    batches = [MLP.batch() for _ in range(WARM_UP + STEPS)]
    views = {"process_group": ours, "gradient_as_bucket_view": True}
    calls = {
        "loop, no communication": looped(batches, lambda optimizer: optimizer),
        "Trainer, no communication": trained(batches, lambda: "auto", 1),
        "loop, sparkhvd": looped(batches, hvd.DistributedOptimizer),
        OURS: trained(batches, lambda: "sparkhvd"),
        "Trainer, DDP over Gloo": trained(batches, lambda: "ddp"),
        "Trainer, DDP over sparkhvd": trained(batches, lambda: DDPStrategy(process_group=ours)),
        "Trainer, DDP over sparkhvd, views, ddp_hook": trained(batches, lambda: Hooked(**views)),
    }
    found: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            hvd.barrier()
            seconds = call()
            if number:  # the first round warms up
                found[name].append(seconds)
    return found


def main() -> None:
    """Print the table, with the load of the machine before and after."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    report = Report("A step under Lightning: MLP of 18.9 million parameters, two ranks on one host")
    before = os.getloadavg()[0]
    times = run_local(rank, args=(options.rounds,), num_proc=2)[0]
    report.raw = {"seconds": times}
    rows: list[list[Any]] = []
    for name, values in times.items():
        against = {
            other: statistics.median(a / b for a, b in zip(values, times[other], strict=True))
            for other in ("loop, no communication", *LIMITS)
        }
        targets = [
            Target(f"{OURS} / {other}", against[other], limit, at_least=False)
            for other, limit in LIMITS.items()
            if name == OURS
        ]
        cells = [f"{ratio:.3f}" for ratio in against.values()]
        rows.append([name, median_and_quartiles(values), *cells, targets])
    heads = ["x loop, no communication", *(f"x {other}" for other in LIMITS)]
    report.table(["what", "a step", *heads, "targets"], rows)
    report.note(
        f"{options.rounds} rounds of {STEPS} steps, after {WARM_UP} untimed steps. A ratio is the median of the ratios of the rounds."
    )
    report.note(
        f"Load of the machine: {before:.1f} before, {os.getloadavg()[0]:.1f} after (of which 2 are this program)."
    )
    if before > 1:
        report.note("Other programs used the processors. An idle machine gives other figures.")
    report.finish("lightning.py", write=options.write, json_path=options.json)


if __name__ == "__main__":
    main()
