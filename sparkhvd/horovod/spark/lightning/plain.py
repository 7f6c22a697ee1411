"""Training of a plain module by Lightning's trainer: a LightningModule around it, from `optimizer`, `loss`, `loss_weights` and
`metrics`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sparkhvd.data.columns.binding import Argument, quoted
from sparkhvd.data.columns.labels import outputs_of
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.lightning.strategy import NAMES, find
from sparkhvd.training.metrics import AnyMetric, Metric
from sparkhvd.training.to_device import move_losses
from sparkhvd.training.train_fn import TrainFnContext
from sparkhvd.training.types import Loss

__all__ = ["PlainModule", "check_metrics", "package_name"]


def package_name(parts: Iterable[object]) -> str:
    """Find the package of the first part from Lightning, or return the default package.

    Parts are callbacks and loggers, for example.
    """
    for part in parts:
        kinds = part.__mro__ if isinstance(part, type) else type(part).__mro__
        for name in NAMES:
            if any(f"{kind.__module__}.".startswith(f"{name}.") for kind in kinds):
                return name
    return str(find()[0].__name__)


def check_metrics(metrics: Sequence[AnyMetric]) -> tuple[Metric, ...]:
    """Check that the metrics are means over rows.

    Raises:
        InvalidArgumentError: a metric is not a mean over rows.
    """
    for each in metrics:
        if not isinstance(each, Metric):
            raise InvalidArgumentError(
                f"metrics has {each.name!r}, but for a module trained by Lightning's trainer the estimator reports only means over rows. Give "
                "functions of (output, label), or make the module a LightningModule, which logs metrics of torchmetrics."
            )
    return tuple(each for each in metrics if isinstance(each, Metric))


@dataclass(frozen=True, kw_only=True)
class PlainModule:
    """Factory of a rank's LightningModule around the run's module. Picklable if its parts are.

    It logs `train_loss`, `val_loss`, and metrics by their names, with the prefix `val_` for validation rows.

    Attributes:
        package: name of the package of Lightning.
        losses: one per label; with sample weights they return a value per row.
        metrics: measured besides the loss.
    """

    package: str
    losses: tuple[Loss, ...]
    metrics: tuple[Metric, ...]

    def __call__(self, ctx: TrainFnContext) -> Any:
        """Make the LightningModule of this rank."""
        package = importlib.import_module(self.package)
        move_losses(self.losses, ctx.device)
        step = _Step(self, ctx)

        class PlainLightningModule(package.LightningModule):  # type: ignore[misc,name-defined]  # of either package
            def __init__(self) -> None:
                super().__init__()
                self.model = ctx.model

            def forward(self, *inputs: Any, **named: Any) -> Any:
                return self.model(*inputs, **named)

            def training_step(self, batch: Any, batch_idx: int) -> Tensor:
                del batch_idx
                loss, means, num_rows = step(self, batch)
                # The loss of this rank only: a mean over ranks would cost a message in every step.
                self.log("train_loss_step", loss.detach(), on_step=True, on_epoch=False)
                self._log_means({"train_loss": loss.detach(), **means}, num_rows)
                return loss

            def validation_step(self, batch: Any, batch_idx: int) -> None:
                del batch_idx
                loss, means, num_rows = step(self, batch)
                named = {f"val_{name}": value for name, value in {"loss": loss, **means}.items()}
                self._log_means(named, num_rows)

            def _log_means(self, means: Mapping[str, Tensor], num_rows: int) -> None:
                options = {"on_step": False, "on_epoch": True, "sync_dist": True}
                self.log_dict(means, batch_size=num_rows, **options)

            def configure_optimizers(self) -> Any:
                return ctx.optimizer

        return PlainLightningModule()


class _Step:
    """Loss and metrics of a batch."""

    def __init__(self, plain: PlainModule, ctx: TrainFnContext) -> None:
        self._plain, self._spec = plain, ctx._spec
        floats = (p.dtype for p in ctx.model.parameters() if p.is_floating_point())
        self._dtype = next(floats, torch.float32)

    def __call__(self, module: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor], int]:
        """Compute the loss, the metrics by name, and the number of rows."""
        spec, plain = self._spec, self._plain
        batch = self._checked(batch)
        args: list[Any] = []
        named: dict[str, Any] = {}
        for each in spec.inputs.arguments:
            if each.name is None:
                args.append(self._input(each, batch))
            else:
                named[each.name] = self._input(each, batch)
        outputs = outputs_of(module(*args, **named))
        labels = spec.labels.match(outputs, spec.labels.apply(batch))
        weights = None if spec.sample_weight is None else batch[spec.sample_weight]
        total: Tensor | None = None
        for loss, output, label, factor in zip(
            plain.losses, outputs, labels, spec.loss_weights, strict=True
        ):
            value: Any = loss(output, label)
            if weights is not None:  # the mean over rows, for any sum of weights
                per_row = value.reshape(len(weights), -1).mean(1)
                value = (per_row * weights.to(per_row.dtype)).mean()
            total = value * factor if total is None else total + value * factor
        assert total is not None
        num_rows = len(outputs[0])
        means = {
            m.name: m.row_sum(outputs[m.label].detach(), labels[m.label]) / num_rows
            for m in plain.metrics
        }
        return total, means, num_rows

    def _checked(self, batch: Any) -> Mapping[str, Any]:
        """Check the columns of a batch."""
        spec = self._spec
        if not isinstance(batch, Mapping):
            raise InvalidArgumentError(
                f"data_module gives a {type(batch).__name__} as a batch, and the module is no LightningModule. Give dicts of tensors by column."
            )
        names = [name for each in spec.inputs.arguments for name in _names(each, batch)]
        names += [*spec.labels.columns, *([spec.sample_weight] if spec.sample_weight else [])]
        if missing := [name for name in names if name not in batch]:
            raise InvalidArgumentError(
                f"A batch has {quoted(batch)}, and not {quoted(missing)}, which feature_cols, label_cols or sample_weight_col name. Let "
                "transformation_fn or the data module return them."
            )
        return batch

    def _input(self, argument: Argument, batch: Mapping[str, Any]) -> Any:
        """Argument of `forward`. Values of the fit's loaders have their shape and dtype, except joined columns."""
        names = _names(argument, batch)
        values = [batch[name] for name in names]
        dtype = getattr(torch, argument.dtype) if argument.is_joined else self._dtype
        if len(values) > 1:
            return torch.cat([each.to(dtype).reshape(len(each), -1) for each in values], 1)
        (value,) = values
        if not isinstance(value, Tensor) or value.is_sparse:
            return value
        if argument.is_joined and value.ndim == 1:
            value = value.reshape(-1, 1)
        if argument.is_joined or value.is_floating_point():
            value = value.to(dtype)
        return value if argument.shape is None else value.reshape(len(value), *argument.shape)


def _names(argument: Argument, batch: Mapping[str, Any]) -> Sequence[str]:
    """Names of an argument's parts in a batch."""
    name = argument.name
    return [name] if name is not None and name in batch else argument.columns
