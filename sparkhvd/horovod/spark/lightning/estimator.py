"""Horovod's `horovod.spark.lightning.estimator`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from sparkhvd import estimator as own
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.estimator.params.converters import any_value
from sparkhvd.estimator.params.table import param
from sparkhvd.horovod.spark.common.estimator import HorovodEstimator
from sparkhvd.horovod.spark.common.model import HorovodModel
from sparkhvd.horovod.spark.common.params import DEFAULTS, OUTPUTS_ALONE
from sparkhvd.lightning import estimator as lightning
from sparkhvd.lightning.batches import RowFunction, encoded
from sparkhvd.lightning.loop import LightningLoop
from sparkhvd.lightning.packages import is_module

if TYPE_CHECKING:
    from sparkhvd.estimator.params.options import FitOptions

__all__ = ["TorchEstimator", "TorchModel"]


class TorchModel(HorovodModel, own.TorchModel):  # type: ignore[misc]  # `history` is a Param here
    """Model of a LightningModule, with Horovod's Params and hooks."""


class TorchEstimator(HorovodEstimator, lightning.TorchEstimator):
    """Estimator of a LightningModule that does what Horovod's does; of another module, with `optimizer` and `loss`, too.

    As there, and other than `sparkhvd.lightning.TorchEstimator`: learning rates are multiplied by the number of ranks, rows that fill no step
    of all ranks are left out, `transformation_fn` gets a dict of a row's values, text and bytes among them, on the rank, and the default logger writes
    into the run's folder.
    """

    _other_defaults: ClassVar[Mapping[str, object]] = {**OUTPUTS_ALONE, **DEFAULTS}

    _moves_loggers: ClassVar[bool] = True
    # Horovod takes it, and does nothing with it.
    train_minibatch_fn = param(any_value, "no effect", no_effect="training_step is that")

    def get_model_class(self) -> type[Any]:
        """Return the class of the model that a fit returns."""
        return TorchModel

    def _options(self) -> FitOptions:
        if not is_module(self._get("model")):
            return self._of_plain_module()
        return super()._options()

    def _of_plain_module(self) -> FitOptions:
        """Return the options of a module that `optimizer` and `loss` train, which Lightning's trainer does not see.

        Raises:
            InvalidArgumentError: something of Lightning's is given.
        """
        of_lightning = ("callbacks", "logger", "profiler", "trainer_args", "data_module")
        if given := [name for name in of_lightning if self._get(name)]:
            raise InvalidArgumentError(
                f"{given[0]} is of Lightning, and model is a {type(self._get('model')).__name__}, which is trained with optimizer and loss "
                "alone. Make it part of a LightningModule."
            )
        return self._with_backend(own.TorchEstimator._options(self))

    def _loop(self, options: FitOptions) -> LightningLoop:
        loop = super()._loop(options)
        # Horovod's default is TensorBoard, where it is installed; Lightning's takes a table of CSV else.
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
        """Return the logged metrics of the epochs."""
        records: list[dict[str, Any]] = fitted.history
        return records

    def _read_options(self, options: type[Any]) -> Any:
        read = super()._read_options(options)
        if not is_module(self._get("model")):
            return read
        # Horovod has them, and does nothing with them for a LightningModule.
        read = replace(read, metrics=[], explicit=read.explicit - {"metrics"})
        if read.transformation_fn is None:
            return read
        # The function gets values as they are.
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
