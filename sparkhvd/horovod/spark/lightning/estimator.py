"""Horovod's `horovod.spark.lightning.estimator`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from sparkhvd import estimator as own
from sparkhvd.data.columns.labels import link_of
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.estimator.params.converters import any_value
from sparkhvd.estimator.params.table import param
from sparkhvd.horovod.spark.common.estimator import HorovodEstimator
from sparkhvd.horovod.spark.common.model import HorovodModel
from sparkhvd.horovod.spark.common.params import DEFAULTS, OUTPUTS_ALONE, EstimatorParams
from sparkhvd.horovod.spark.lightning.plain import PlainModule, check_metrics, package_name
from sparkhvd.lightning import estimator
from sparkhvd.lightning.estimator import MODULE_OR_TRAINER
from sparkhvd.lightning.loop import LightningLoop, RowFunction, encoded
from sparkhvd.lightning.strategy import is_module
from sparkhvd.training.loss_functions import construct_losses, resolve_losses
from sparkhvd.training.metrics import resolve_metrics
from sparkhvd.training.model import build_model, check_model
from sparkhvd.training.optimizer import check_optimizer

if TYPE_CHECKING:
    from sparkhvd.estimator.params.generated import FitOptions
    from sparkhvd.training.train_fn import TrainFnContext

__all__ = ["MIN_PL_VERSION", "EstimatorParams", "TorchEstimator", "TorchModel"]

# Oldest pytorch-lightning of Horovod's estimator, with which programs compare theirs. sparkhvd itself needs 2.4.
MIN_PL_VERSION = "1.3.8"

# Params of a plain module for its LightningModule.
_OF_PLAIN = (
    *("optimizer", "learning_rate", "weight_decay"),
    *("loss", "loss_constructors", "loss_weights", "metrics"),
)
_NOT_PLAIN = {
    **MODULE_OR_TRAINER,
    **dict.fromkeys(
        ("lr_scheduler", "lr_scheduler_interval"),
        "make the module a LightningModule, whose configure_optimizers returns the scheduler",
    ),
}


class TorchModel(HorovodModel, own.TorchModel):  # type: ignore[misc]  # `history` is a Param here
    """Model of a LightningModule, with Horovod's Params and hooks."""


class TorchEstimator(HorovodEstimator, estimator.TorchEstimator):
    """Estimator of a LightningModule with Horovod's behaviour. A plain module is wrapped using `optimizer` and `loss`.

    Differences from `sparkhvd.lightning.TorchEstimator`: learning rates are multiplied by the number of ranks, rows that fill no
    step of all ranks are dropped, `transformation_fn` receives a dict of a row's values, including text and bytes, on the rank,
    and the default logger writes into the run's folder.
    """

    _other_defaults: ClassVar[Mapping[str, object]] = {**OUTPUTS_ALONE, **DEFAULTS}

    _moves_files: ClassVar[bool] = True
    # Accepted and ignored by Horovod.
    train_minibatch_fn = param(any_value, "no effect", no_effect="training_step is that")

    def get_model_class(self) -> type[Any]:
        return TorchModel

    @property
    def _is_plain(self) -> bool:
        """Whether the model is plain. A factory counts as plain if an optimizer is given."""
        model = self._get("model")
        if isinstance(model, torch.nn.Module):
            return not is_module(model)
        return self._get("optimizer") is not None

    def _wrap(self, options: FitOptions) -> Callable[[TrainFnContext], Any] | None:
        if not self._is_plain:
            return super()._wrap(options)
        module = check_model(build_model(options.model))
        check_optimizer(options.optimizer, options.model, module)
        labels = options.label_cols or []
        loss = construct_losses(options.loss, options.loss_constructors, module)
        per_row = options.sample_weight_col is not None
        losses, _ = resolve_losses(loss, len(labels), per_row=per_row)
        given = loss if isinstance(loss, (list, tuple)) else [loss] * len(labels)
        metrics = resolve_metrics(options.metrics, labels, [link_of(each) for each in given])
        of_lightning = [
            *(self._get("callbacks") or ()),
            *(self._get(name) for name in ("logger", "profiler", "data_module")),
        ]
        return PlainModule(
            package=package_name(of_lightning), losses=losses, metrics=check_metrics(metrics)
        )

    def _refused(self) -> Mapping[str, str]:
        if not self._is_plain:
            return super()._refused()
        return {n: instead for n, instead in _NOT_PLAIN.items() if n not in _OF_PLAIN}

    def _reads_parquet(self) -> bool:
        return self._get("data_module") is not None

    def _loop(self, options: FitOptions) -> LightningLoop:
        loop = super()._loop(options)
        if self._is_plain:
            # The module finds columns by name, and `compression` and `lr_scaling` are already in its optimizer.
            loop = replace(loop, columns=None, strategy={})
        # Horovod's default is TensorBoard if installed; Lightning otherwise writes a CSV table.
        return loop if self._get("logger") is not None else replace(loop, logger=True)

    def _loading(self, options: FitOptions) -> dict[str, Any]:
        names = {
            "num_reader_epochs": "loader_num_epochs",
            "reader_pool_type": "reader_pool_type",
            "inmemory_cache_all": "inmemory_cache_all",
            "debug_data_loader": "debug_data_loader",
            "train_async_data_loader_queue_size": "train_async_data_loader_queue_size",
            "val_async_data_loader_queue_size": "val_async_data_loader_queue_size",
        }
        given = {name: self._get(own_name) for name, own_name in names.items()}
        return {**super()._loading(options), **given}

    def _history_of(self, fitted: Any) -> list[dict[str, Any]]:
        """Logged metrics of the epochs."""
        records: list[dict[str, Any]] = fitted.history
        return records

    def _read_options(self, options: type[Any]) -> Any:
        read = super()._read_options(options)
        if not self._is_plain:
            # Horovod accepts and ignores them for a LightningModule.
            read = replace(read, metrics=[], explicit=read.explicit - {"metrics"})
        if read.transformation_fn is None and not self._reads_parquet():
            return read
        # The function, or the data module, receives raw values.
        names = {*(read.feature_cols or []), *(read.label_cols or [])}
        raw = {name: encoded for name in names & (self._texts | self._binaries)}
        return replace(
            read,
            transformation_fn=None,
            explicit=read.explicit - {"transformation_fn"},
            decoders={**(read.decoders or {}), **raw},
            collate_fn={**(read.collate_fn or {}), **dict.fromkeys(raw, list)},
        )

    def _row_function(self, options: FitOptions) -> RowFunction | None:
        function = self._get("transformation_fn")
        if function is None:
            return None
        fields = [tuple(each) for each in self._get("transformation_edit_fields") or ()]
        if any(len(each) != 4 for each in fields):
            raise InvalidArgumentError(
                f"transformation_edit_fields is {fields!r:.200}; give tuples of name, numpy type, shape, and whether it may be missing."
            )
        return RowFunction(
            function=function,
            fields=fields,
            removed=tuple(self._get("transformation_removed_fields") or ()),
            texts=self._texts,
            binaries=self._binaries,
            num_workers=options.num_workers,
        )
