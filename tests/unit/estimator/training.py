"""What tests of the training loop share: packed data without Spark, ranks as threads, and a plain reference."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from sparkhvd.estimator.binding import bind_inputs, bind_labels
from sparkhvd.estimator.checkpoint import Checkpoints
from sparkhvd.estimator.manifest import Manifest
from sparkhvd.estimator.metrics import resolve_metrics
from sparkhvd.estimator.packed import write_packed
from sparkhvd.estimator.program import Program, dump_program, resolve_losses
from sparkhvd.estimator.reader import Reader
from sparkhvd.estimator.schema import Column, DataSchema
from sparkhvd.estimator.store import Store
from sparkhvd.estimator.train import PROGRAM_NAME, TrainResult, TrainSpec, train
from sparkhvd.torch._context import use_engine
from tests.harness.ranks import run_ranks

DATA_DIR = "data/k/app"
RUN_DIR = "runs/r"


@dataclass
class Case:
    """A small fit: `x` (rows, 3) to `y` by a module, with everything that may vary."""

    store: Store
    model: nn.Module
    optimizer: Any
    rows: int = 100
    loss: Any = field(default_factory=nn.MSELoss)
    dtype: str = "float32"
    label: str = "scalar"
    weighted: bool = False
    metrics: Any = ()
    lr_scheduler: Callable[..., Any] | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        generator = np.random.default_rng(self.rows)
        x = generator.standard_normal((self.rows, 3))
        y = x @ np.array([1.0, -2.0, 0.5]) + 0.1 * generator.standard_normal(self.rows)
        label = "int64" if self.label == "class" else self.dtype
        self.values = {
            "x": x.astype(self.dtype),
            "y": ((y > 0) if self.label == "class" else y).astype(label),
            "w": generator.random(self.rows).astype(self.dtype),
        }
        columns = [
            Column("x", "array", self.dtype, (3,), "array<double>", self.dtype),
            Column("y", "scalar", label, (), "double", label),
        ]
        weight = (
            Column("w", "scalar", self.dtype, (), "double", self.dtype) if self.weighted else None
        )
        self.schema = DataSchema((columns[0],), (columns[1],), weight)
        stored = [*columns, *([weight] if weight else [])]
        self.store.write_bytes("keep", b"")
        cut = self.rows // 3
        files = [
            write_packed(
                self.store,
                f"{DATA_DIR}/part-{i}.parquet",
                stored,
                {n: v[low:high] for n, v in self.values.items()},
            )
            for i, (low, high) in enumerate(((0, cut), (cut, self.rows)))
        ]
        Manifest(tuple(files), self.schema, self.rows).save(self.store, DATA_DIR)

    def spec(self) -> TrainSpec:
        """Write the program and say what the ranks need."""
        losses, is_sum = resolve_losses(self.loss, 1, per_row=self.weighted)
        program = Program(
            model=self.model,
            optimizer=self.optimizer,
            losses=losses,
            is_sum=is_sum,
            metrics=resolve_metrics(self.metrics, ["y"], ["softmax"]),
            lr_scheduler=self.lr_scheduler,
        )
        data, sha256 = dump_program(program)
        self.store.write_bytes(f"{RUN_DIR}/{PROGRAM_NAME}", data)
        spec = TrainSpec(
            store=self.store,
            run_dir=RUN_DIR,
            program_sha256=sha256,
            data_dir=DATA_DIR,
            inputs=bind_inputs(self.model, self.schema),
            labels=bind_labels(self.schema, self.loss),
            sample_weight="w" if self.weighted else None,
            fingerprint=json.dumps({"rows": self.rows}),
        )
        return TrainSpec(**{**vars(spec), **self.options})

    def train(self, size: int, **options: Any) -> TrainResult:
        """Train with ranks as threads; every rank must report the same history, but for times."""
        spec = TrainSpec(**{**vars(self.spec()), **options})
        results = run_ranks(size, lambda engine: train(spec), using=use_engine)
        for result in results[1:]:
            assert without_times(result) == without_times(results[0])
        return results[0]

    def weights(self, epoch: int) -> dict[str, torch.Tensor]:
        """The model's state in the checkpoint after an epoch."""
        return Checkpoints(self.store, RUN_DIR).load(epoch).model

    def reference(self, size: int, epochs: int, clip: float | None = None) -> list[dict[str, Any]]:
        """The same training in one process in plain PyTorch, over the same global batches.

        Returns:
            The state dict after each epoch, with "loss" as the epoch's mean.
        """
        options = {"batch_size": 32, "seed": 0, "shuffle": True, "drop_last": False, **self.options}
        model, optimizer = copy.deepcopy((self.model, self.optimizer))
        if not isinstance(optimizer, torch.optim.Optimizer):
            optimizer = optimizer(model.parameters())
        scheduler = self.lr_scheduler(optimizer) if self.lr_scheduler else None
        with Reader(
            self.store,
            Manifest.load(self.store, DATA_DIR),
            rank=0,
            size=size,
            batch_size=options["batch_size"],
            seed=options["seed"],
            shuffle=options["shuffle"],
            drop_last=options["drop_last"],
        ) as reader:
            plans = [reader.plan(epoch) for epoch in range(epochs)]
        states = []
        for plan in plans:
            model.train()
            total = weight = 0.0
            for step in range(plan.num_steps):
                rows = np.concatenate([plan.batch_rows(r, step) for r in range(size)])
                loss, own = self._reference_loss(model, rows)
                optimizer.zero_grad()
                loss.backward()
                if clip is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                total += float(loss.detach()) * own
                weight += own
            if scheduler is not None:
                scheduler.step()
            states.append({**copy.deepcopy(model.state_dict()), "loss": total / weight})
        return states

    def _reference_loss(self, model: nn.Module, rows: Any) -> tuple[torch.Tensor, float]:
        output = model(torch.from_numpy(self.values["x"][rows]))
        label = torch.from_numpy(self.values["y"][rows])
        label = label if self.label == "class" else label.reshape(output.shape)
        if not self.weighted:
            loss = self.loss(output, label)
            if isinstance(loss, tuple):
                return loss[0], float(loss[1])
            return loss, float(len(rows))
        per_row = copy.copy(self.loss)
        per_row.reduction = "none"
        weights = torch.from_numpy(self.values["w"][rows])
        values = per_row(output, label).reshape(len(rows), -1).mean(1)
        return (values * weights).sum() / weights.sum(), float(weights.sum())


def without_times(result: TrainResult) -> Any:
    times = ("seconds", "rows_per_s")
    history = [{k: v for k, v in r.items() if k not in times} for r in result.history]
    return history, result.epoch, result.order


def assert_close(found: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=tolerance, atol=tolerance)


def linear(dtype: torch.dtype = torch.float32, outputs: int = 1, seed: int = 0) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, outputs)).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=dtype) * 0.3)
    return model


def names(values: Sequence[Any]) -> list[str]:
    return [type(v).__name__ for v in values]
