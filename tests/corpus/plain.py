"""The plain program of a case: a loop of PyTorch, in one process or under DistributedDataParallel."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sparkhvd.training.rank_sync import seed_everything
from tests.corpus.case import BATCH, EPOCHS, ROWS, SEED, Case, Data


@dataclass(frozen=True)
class Trained:
    """Result of a training.

    Attributes:
        state: the module's state dict.
        outputs: of the module in eval mode on all rows, (ROWS, numbers per row), in float64.
    """

    state: Mapping[str, Tensor]
    outputs: list[np.ndarray]


def train(case: Case, *, rank: int = 0, size: int = 1, batch: int = BATCH) -> Trained:
    """Train in the order of the rows: each step takes `batch` of them on each of `size` ranks."""
    model, loss = case.module(), case.made_loss()
    dtype = model_dtype(model)
    if any(map(nn.parameter.is_lazy, model.parameters())):
        torch.manual_seed(SEED)
        with torch.no_grad():
            model.eval()(*inputs(case.data, slice(0, 2), dtype, zeros=True))
    call: nn.Module = model
    if size > 1:
        call = DistributedDataParallel(model, find_unused_parameters=True)
    program = Program(case, call, loss, dtype, rank, size, batch)
    program.run()
    # In eval mode, like the result of `fit`, because it merges the weights of some layers.
    module = getattr(model, "_orig_mod", model).eval()  # of torch.compile
    state = {
        name: value.detach().clone()
        for name, value in module.state_dict().items()
        if isinstance(value, Tensor)
    }
    return Trained(state, evaluate(case, module))


class Program:
    """A user's program: model, optimizer, scheduler and the loop over the rows of a rank."""

    def __init__(
        self,
        case: Case,
        call: nn.Module,
        loss: Any,
        dtype: torch.dtype,
        rank: int,
        size: int,
        batch: int,
    ) -> None:
        self.case, self.call, self.loss, self.dtype = case, call, loss, dtype
        self.rank, self.size, self.batch = rank, size, batch
        parameters = list(call.parameters())
        if isinstance(loss, nn.Module):
            parameters += list(loss.parameters())
        has_optimizer = case.loop is None or case.optimizer is not None
        self.optimizer = case.make_optimizer(iter(parameters)) if has_optimizer else None
        self.scheduler = case.scheduler(self.optimizer) if case.scheduler else None
        self.losses: list[float] = []

    def run(self) -> None:
        if self.case.loop is not None:
            self.case.loop(self.context())
            return
        for epoch in range(EPOCHS):
            self.call.train()
            set_mode(self.optimizer, "train")
            seed_everything(SEED, epoch, self.rank)  # as each epoch of the estimator
            self.losses = []
            for step in self.steps():
                self.step(step)
                if self.scheduler is not None and self.case.is_per_step:
                    self.scheduler.step()
            set_mode(self.optimizer, "eval")
            if self.scheduler is not None and not self.case.is_per_step:
                plateau = isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
                self.scheduler.step(*[sum(self.losses) / len(self.losses)] if plateau else [])

    def steps(self) -> Iterator[list[slice]]:
        """Yield the batches of each step."""
        accumulate = self.case.options.get("accumulate", 1)
        each = self.size * self.batch
        for begin in range(0, ROWS, each * accumulate):
            firsts = [
                begin + i * self.batch + self.rank * self.batch * accumulate
                for i in range(accumulate)
            ]
            yield [slice(first, first + self.batch) for first in firsts]

    def step(self, batches: list[slice]) -> None:
        options, optimizer = self.case.options, self.optimizer
        assert optimizer is not None

        def closure() -> Tensor:
            optimizer.zero_grad()
            total: Any = 0.0
            for rows in batches:
                loss = self.compute(rows) / len(batches) if len(batches) > 1 else self.compute(rows)
                loss.backward()
                total = total + loss.detach()
            parameters = [p for g in optimizer.param_groups for p in g["params"]]
            if (value := options.get("gradient_clip_value")) is not None:
                nn.utils.clip_grad_value_(parameters, value)
            if (norm := options.get("gradient_clip_norm")) is not None:
                nn.utils.clip_grad_norm_(parameters, norm)
            self.losses.append(float(total))
            return total

        if self.case.has_closure:
            if hasattr(optimizer, "first_step"):  # it moves by the gradient before it evaluates
                closure()
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()

    def compute(self, rows: slice) -> Tensor:
        """Return the loss of rows."""
        case, data = self.case, self.case.data
        precise = case.options.get("precision", "32") == "32"
        context = contextlib.nullcontext() if precise else torch.autocast("cpu", torch.bfloat16)
        with context:
            if case.step is not None:
                result = case.step(self.call, self.batch_of(rows), self.context())
                return result[0] if isinstance(result, tuple) else result
            result = call(self.call, data, inputs(data, rows, self.dtype))
        if case.loss is None:
            return result["loss"] if isinstance(result, dict) else first(result)
        outputs = [o if precise else o.float() for o in tensors(result)]
        labels = [torch.as_tensor(v[rows]) for v in data.labels.values()]
        total: Any = None
        losses = self.loss if isinstance(self.loss, list) else [self.loss] * len(outputs)
        for loss, output, label in zip(losses, outputs, labels, strict=True):
            each = loss(output, matched(label, output))
            each = each[0] if isinstance(each, tuple) else each
            each = each if len(outputs) == 1 else each * (1 / len(outputs))
            total = each if total is None else total + each
        return total

    def batch_of(self, rows: slice) -> dict[str, Tensor]:
        """Return the batch of a user's step."""
        features = inputs(self.case.data, rows, self.dtype)
        batch = dict(zip(self.case.data.features, features, strict=True))
        labels = {n: typed(v[rows], self.dtype) for n, v in self.case.data.labels.items()}
        return {**batch, **labels}

    def context(self) -> Any:
        """Return the `ctx` of a user's step or loop."""
        return SimpleNamespace(
            model=self.call,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            rank=self.rank,
            size=self.size,
            device=torch.device("cpu"),
            start_epoch=0,
            epochs=EPOCHS,
            train_loader=Loader(self),
            val_loader=None,
            backward=lambda loss: loss.backward(),
            log=lambda *_: None,
            keep=lambda *_: None,
            after_step=lambda: None,
            save_checkpoint=lambda: None,
        )


class Loader:
    """The batches of a user's loop. Each iteration is an epoch."""

    def __init__(self, program: Program) -> None:
        self.program, self.epoch = program, 0

    def __len__(self) -> int:
        return ROWS // (self.program.size * self.program.batch)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        seed_everything(SEED, self.epoch, self.program.rank)
        self.epoch += 1
        for (rows,) in self.program.steps():
            yield self.program.batch_of(rows)


def model_dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype of the first floating or complex parameter."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            return parameter.dtype
    return torch.float32


def typed(values: np.ndarray, dtype: torch.dtype) -> Tensor:
    tensor = torch.as_tensor(values)
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def inputs(data: Data, rows: slice, dtype: torch.dtype, *, zeros: bool = False) -> list[Tensor]:
    """Return the model's arguments for rows."""
    found = [typed(v[rows], dtype) for v in data.features.values()]
    if zeros:
        found = [torch.zeros_like(v) for v in found]
    if not data.is_joined:
        return found
    return [torch.cat([v.to(dtype).reshape(len(v), -1) for v in found], 1)]


def call(model: nn.Module, data: Data, values: list[Tensor], without: Any = ()) -> Any:
    """Call a model with the values of the features."""
    named = dict(zip(data.features, values, strict=False))
    if data.is_dict:
        return model(named)
    if not data.by_name:
        return model(*values)
    return model(**{n: v for n, v in named.items() if n not in without})


def first(result: Any) -> Tensor:
    loss = getattr(result, "loss", None)
    return result[0] if loss is None else loss


def matched(label: Tensor, output: Tensor) -> Tensor:
    """Give a label of numbers the shape and dtype of its output."""
    if label.is_floating_point():
        label = label.to(output.dtype)
        if label.numel() == output.numel():
            return label.reshape(output.shape)
    return label


def tensors(result: Any) -> list[Tensor]:
    """Return the outputs with rows of a result of any form."""
    if isinstance(result, Tensor):
        return [result] if result.ndim else []
    if isinstance(result, Mapping):
        return [t for v in result.values() for t in tensors(v)]
    if is_dataclass(result):
        return [t for f in fields(result) for t in tensors(getattr(result, f.name))]
    if isinstance(result, (tuple, list)):
        return [t for v in result for t in tensors(v)]
    return []


def set_mode(optimizer: Any, name: str) -> None:
    """Switch an optimizer that has modes, such as a schedule-free one."""
    if callable(method := getattr(optimizer, name, None)):
        method()


def evaluate(case: Case, module: nn.Module) -> list[np.ndarray]:
    """Return the outputs of the module in eval mode on all rows."""
    module.eval()
    values = inputs(case.data, slice(0, ROWS), model_dtype(module))
    torch.manual_seed(SEED)
    precise = case.options.get("precision", "32") == "32"
    context = contextlib.nullcontext() if precise else torch.autocast("cpu", torch.bfloat16)
    with torch.no_grad(), context:
        result = call(module, case.data, values, case.label_arguments)
    found = [t for t in tensors(result) if len(t) == ROWS]
    return [
        t.detach().to(torch.float64).reshape(ROWS, -1).numpy() for t in found if not t.is_complex()
    ]
