"""Harness of the training loop: packed data without Spark, ranks as threads, and a plain reference."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

import sparkhvd.torch as hvd
from sparkhvd.data.columns.binding import bind_inputs
from sparkhvd.data.columns.decoders import RowFunctions
from sparkhvd.data.columns.labels import bind_labels
from sparkhvd.data.columns.schema import Column, DataSchema
from sparkhvd.data.manifest import Manifest
from sparkhvd.data.packed import write_packed
from sparkhvd.data.reading.reader import Reader
from sparkhvd.data.reading.source import open_source
from sparkhvd.data.store.store import Store
from sparkhvd.torch.context import use_engine
from sparkhvd.training.check_user_code import check_user_code
from sparkhvd.training.checkpoints.files import Checkpoints
from sparkhvd.training.loss_functions import resolve_losses
from sparkhvd.training.metrics import resolve_metrics
from sparkhvd.training.precision import autocast, widened
from sparkhvd.training.program import Program, dump_program, store_program
from sparkhvd.training.spec import TrainResult, TrainSpec
from sparkhvd.training.train import train
from sparkhvd.training.user_code.transformations import transformed_by
from tests.harness.plans import batch_rows
from tests.harness.ranks import run_ranks

DATA_DIR = "data/k/app"
RUN_DIR = "runs/r"


@dataclass
class Case:
    """A small fit: `x` (rows, 3) to `y` by a module, with every varying option."""

    store: Store
    model: nn.Module
    optimizer: Any
    rows: int = 100
    loss: Any = field(default_factory=nn.MSELoss)
    dtype: str = "float32"
    label: str = "scalar"
    second_label: bool = False  # "z", for a model with two outputs
    weighted: bool = False
    metrics: Any = ()
    link: str = "softmax"
    data_seed: int | None = None  # None: the number of rows
    groups: Any = None  # the number of each row's group
    nan_row: int | None = None  # whose features are NaN
    lr_scheduler: Callable[..., Any] | None = None
    model_function: Callable[[], nn.Module] | None = None
    compression: Any = hvd.Compression.none
    options: dict[str, Any] = field(default_factory=dict)
    user: dict[str, Any] = field(default_factory=dict)
    inputs: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        generator = np.random.default_rng(self.rows if self.data_seed is None else self.data_seed)
        x = generator.standard_normal((self.rows, 3))
        y = x @ np.array([1.0, -2.0, 0.5]) + 0.1 * generator.standard_normal(self.rows)
        if self.nan_row is not None:
            x[self.nan_row] = np.nan
        label = "int64" if self.label == "class" else self.dtype
        self.values = {
            "x": x.astype(self.dtype),
            "y": ((y > 0) if self.label == "class" else y).astype(label),
            "z": (x[:, 0] * x[:, 1]).astype(self.dtype),
            "w": generator.random(self.rows).astype(self.dtype),
        }
        columns = [
            Column("x", "array", self.dtype, (3,), "array<double>", self.dtype),
            Column("y", "scalar", label, (), "double", label),
        ]
        weight = (
            Column("w", "scalar", self.dtype, (), "double", self.dtype) if self.weighted else None
        )
        if self.second_label:
            columns.append(Column("z", "scalar", self.dtype, (), "double", self.dtype))
        group = None
        if self.groups is not None:
            self.values["g"] = np.asarray(self.groups, np.int64)
            group = Column("g", "scalar", "int64", (), "LongType", "int64")
        self.schema = DataSchema((columns[0],), tuple(columns[1:]), weight, group=group)
        self.store.write_bytes("keep", b"")
        self.write()

    def write(self) -> None:
        """Write `values` as packed data."""
        stored = self.schema.columns
        cut = self.rows // 3
        files = [
            write_packed(
                self.store,
                f"{DATA_DIR}/part-{i}.parquet",
                stored,
                {c.name: self.values[c.name][low:high] for c in stored},
            )
            for i, (low, high) in enumerate(((0, cut), (cut, self.rows)))
        ]
        Manifest(tuple(files), self.schema, self.rows).save(self.store, DATA_DIR)

    def spec(self) -> TrainSpec:
        """Write the program and say what the ranks need."""
        labels = [c.name for c in self.schema.labels]
        known = {"loss": self.loss} if self.loss is not None else {}
        user = check_user_code({**known, **self.options, **self.user})
        losses, is_sum = (), ()
        if self.loss is not None:
            losses, is_sum = resolve_losses(self.loss, len(labels), per_row=self.weighted)
        program = Program(
            model=self.model_function or self.model,
            optimizer=self.optimizer,
            losses=losses,
            is_sum=is_sum,
            metrics=resolve_metrics(self.metrics, labels, [self.link] * len(labels)),
            lr_scheduler=self.lr_scheduler,
            compression=self.compression,
            user=user,
        )
        data, sha256 = dump_program(program)
        weights = store_program(self.store, RUN_DIR, data, program.model)
        schema, transformed = self.schema, None
        if user.transformations:
            manifest = Manifest.load(self.store, DATA_DIR)
            with open_source(self.store, manifest) as rows:
                schema = transformed = transformed_by(
                    user.transformations,
                    rows,
                    manifest.schema,
                    RowFunctions(),
                    inputs=self.inputs,
                    model_dtype=self.dtype,
                )
        spec = TrainSpec(
            store=self.store,
            run_dir=RUN_DIR,
            program_sha256=sha256,
            program_weights=weights,
            data_dir=DATA_DIR,
            inputs=bind_inputs(self.model, schema, inputs=self.inputs),
            labels=bind_labels(
                schema, [self.loss] * len(labels) if self.loss is None else self.loss
            ),
            sample_weight="w" if self.weighted else None,
            group="g" if self.groups is not None else None,
            transformed=transformed,
            fingerprint=json.dumps({"rows": self.rows}),
        )
        return TrainSpec(**{**vars(spec), **self.options})

    def train(self, size: int, **options: Any) -> TrainResult:
        """Train with ranks as threads. Every rank must report the same history, except times."""
        spec = TrainSpec(**{**vars(self.spec()), **options})
        results = run_ranks(size, lambda engine: train(spec), using=use_engine, deadline_s=200)
        for result in results[1:]:
            # As text, because NaN is not equal to itself.
            assert repr(without_times(result)) == repr(without_times(results[0]))
        return results[0]

    def checkpoint(self, epoch: int) -> Any:
        """Load the checkpoint after an epoch."""
        return Checkpoints(self.store, RUN_DIR).load(epoch)

    def weights(self, epoch: int) -> dict[str, torch.Tensor]:
        """Load the model's state in the checkpoint after an epoch."""
        weights: dict[str, torch.Tensor] = self.checkpoint(epoch).model
        return weights

    def reference(self, size: int, epochs: int, device: str = "cpu") -> list[dict[str, Any]]:
        """Train the same in one process in plain PyTorch, with batch size * batch_size * accumulate.

        Returns:
            The state dict after each epoch on the CPU, with "loss" as the epoch's mean.
        """
        options = {"batch_size": 32, "seed": 0, "shuffle": True, "drop_last": False, **self.options}
        model, optimizer = copy.deepcopy((self.model, self.optimizer))
        model.to(device)
        if not isinstance(optimizer, torch.optim.Optimizer):
            optimizer = optimizer(model.parameters())
        scheduler = self.lr_scheduler(optimizer) if self.lr_scheduler else None
        per_step = options.get("lr_scheduler_interval") == "step"
        with Reader(
            self.store,
            Manifest.load(self.store, DATA_DIR),
            rank=0,
            size=1,
            batch_size=size * options["batch_size"] * options.get("accumulate", 1),
            seed=options["seed"],
            shuffle=options["shuffle"],
            drop_last=options["drop_last"],
        ) as reader:
            plans = [reader.plan(epoch) for epoch in range(epochs)]
        states = []
        for plan in plans:
            model.train()
            total = weight = 0.0
            for step in range(plan.num_steps)[: options.get("train_steps_per_epoch")]:
                rows = batch_rows(plan, 0, step)
                loss, count = self._reference_loss(model, rows)
                optimizer.zero_grad()
                loss.backward()
                if (limit := options.get("gradient_clip_value")) is not None:
                    nn.utils.clip_grad_value_(model.parameters(), limit)
                if (norm := options.get("gradient_clip_norm")) is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), norm)
                optimizer.step()
                if scheduler is not None and per_step:
                    scheduler.step()
                total += float(loss.detach()) * count
                weight += count
            if scheduler is not None and not per_step:
                scheduler.step()
            states.append({**copy.deepcopy(model).cpu().state_dict(), "loss": total / weight})
        return states

    def _reference_loss(self, model: nn.Module, rows: Any) -> tuple[torch.Tensor, float]:
        precision = self.options.get("precision", "32")
        device = next(model.parameters()).device
        with autocast(precision, device):
            outputs = model(torch.from_numpy(self.values["x"][rows]).to(device))
        outputs = widened(outputs if isinstance(outputs, tuple) else (outputs,))
        weights = self.options.get("loss_weights", (1.0,))
        total, weight = torch.zeros((), device=device), float(len(rows))
        names = [c.name for c in self.schema.labels]
        for name, output, factor in zip(names, outputs, weights, strict=True):
            label = torch.from_numpy(self.values[name][rows]).to(device)
            label = label if self.label == "class" else label.reshape(output.shape)
            loss, weight = self._one_loss(output, label, rows)
            total = total + factor * loss
        return total, weight

    def _one_loss(
        self, output: torch.Tensor, label: torch.Tensor, rows: Any
    ) -> tuple[torch.Tensor, float]:
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
    times = ("seconds", "rows_per_s", "data_wait_s", "comm_wait_s", "rank_wait_s", "slowest_rank")
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


@dataclass
class Remembered:
    """Parameters, without hooks, of ranks that ran as threads of this process."""

    parameters: list[list[torch.Tensor]] = field(default_factory=list)

    def assert_alike(self, size: int) -> None:
        """Assert that the parameters of the last `size` ranks are equal bit by bit, and forget them."""
        last, self.parameters = self.parameters[-size:], []
        assert len(last) == size
        for other in last:
            assert all(torch.equal(a, b) for a, b in zip(last[0], other, strict=True))


REMEMBERED = Remembered()


def remember(optimizer: torch.optim.Optimizer) -> Any:
    """Make a scheduler that changes nothing, and remember the rank's parameters."""
    REMEMBERED.parameters.append([p.detach() for g in optimizer.param_groups for p in g["params"]])
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0)


def names(values: Sequence[Any]) -> list[str]:
    return [type(v).__name__ for v in values]
