"""`TorchEstimator` of a LightningModule: a first version, which trains once from begin to end (docs/lightning.md says what is not there)."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from pyspark.ml import Estimator

from sparkhvd.data.dataset import Dataset, prepare
from sparkhvd.data.lightning import data_module
from sparkhvd.data.store.store import Store
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.estimator import TorchModel
from sparkhvd.lightning.packages import package_of
from sparkhvd.lightning.strategy import register
from sparkhvd.runner import run

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["TorchEstimator"]

_FORMATS = ("dict", "tuple")


@dataclass(frozen=True, kw_only=True)
class _Order:
    """What a rank trains.

    Attributes:
        model: LightningModule of the user.
        dataset: rows with the columns of a batch.
        loading: options of `data_module`.
        epochs: passes over the rows.
        callbacks: of Lightning.
        logger: of Lightning; False = none.
        trainer_args: of Lightning's `Trainer`, which win.
    """

    model: Any
    dataset: Dataset
    loading: Mapping[str, Any]
    epochs: int
    callbacks: Sequence[Any]
    logger: Any
    trainer_args: Mapping[str, Any] = field(default_factory=dict)


class TorchEstimator(Estimator[TorchModel]):
    """Estimator of a LightningModule: Lightning's `Trainer` on ranks of Spark, over rows that the driver has written into the store.

    Batches reach `training_step` as a dict of tensors by column, or as a tuple in the columns' order (`feature_cols`, then `label_cols`). Every row comes
    once per epoch over all ranks. The learning rate is used as given.

    Args:
        model: a LightningModule of either package; it is not modified.
        feature_cols: columns of a batch, and arguments of `forward` in the model that `fit` returns.
        label_cols: further columns of a batch.
        num_proc: ranks; None = as many as the cluster has task slots.
        batch_size: rows per rank and step.
        epochs: passes over the rows.
        store: that driver and executors share; None = the one of `spark.sparkhvd.store`, or on a local master a temporary folder.
        validation: boolean or numeric column; True or above 0 marks rows of `validation_step`.
        batch_format: "dict" or "tuple".
        shuffle: a new order in each epoch.
        random_seed: decides the order.
        callbacks: of Lightning; copies run on the ranks.
        logger: of Lightning; None = none.
        trainer_args: further arguments of `Trainer`.

    Raises:
        InvalidArgumentError: an argument is wrong, before any job.
    """

    def __init__(
        self,
        *,
        model: Any,
        feature_cols: Sequence[str],
        label_cols: Sequence[str] = (),
        num_proc: int | None = None,
        batch_size: int = 32,
        epochs: int = 1,
        store: Store | str | PathLike[str] | None = None,
        validation: str | None = None,
        batch_format: str = "dict",
        shuffle: bool = True,
        random_seed: int = 0,
        callbacks: Sequence[Any] = (),
        logger: Any = None,
        trainer_args: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        package_of(model)  # refuses another module
        if batch_format not in _FORMATS:
            raise InvalidArgumentError(
                f"TorchEstimator: batch_format is {batch_format!r}; it must be 'dict' or 'tuple'."
            )
        self._columns = list(feature_cols), list(label_cols)
        self._model, self._epochs, self._num_proc = model, epochs, num_proc
        self._store, self._validation = store, validation
        self._loading = {
            "batch_size": batch_size,
            "batch_format": batch_format,
            "shuffle": shuffle,
            "seed": random_seed,
        }
        self._training: dict[str, Any] = {
            "callbacks": list(callbacks),
            "logger": False if logger is None else logger,
            "trainer_args": dict(trainer_args or {}),
        }

    def _fit(self, dataset: DataFrame) -> TorchModel:
        """Train on a DataFrame; Spark's `fit` calls it.

        Raises:
            RankError: a rank failed.
        """
        features, labels = self._columns
        rows = prepare(
            dataset, self._store, columns=[*features, *labels], validation=self._validation
        )
        order = _Order(
            model=self._model,
            dataset=rows,
            loading=self._loading,
            epochs=self._epochs,
            **self._training,
        )
        found = run(_train, args=(order,), num_proc=self._num_proc, spark=dataset.sparkSession)
        assert found[0] is not None  # rank 0's
        weights, history = found[0]
        trained = copy.deepcopy(self._model)
        trained.load_state_dict(weights)
        shapes = [rows.schema.column(name).row_shape for name in features]
        return TorchModel.from_module(
            trained.eval(),
            history=history,
            feature_cols=features,
            label_cols=labels,
            # What no DataFrame tells; scalars are joined, as TorchModel does by itself.
            input_shapes=[[-1, *shape] for shape in shapes if shape] if all(shapes) else None,
        )


def _train(order: _Order) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]] | None:
    """Train on a rank; return weights and metrics by epoch on rank 0."""
    package = package_of(order.model)
    history = _history(package)
    arguments: dict[str, Any] = {
        "strategy": register(package)(),
        "max_epochs": order.epochs,
        "logger": order.logger,
        "callbacks": [*order.callbacks, history],
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    trainer = package.Trainer(**{**arguments, **order.trainer_args})
    trainer.fit(order.model, datamodule=data_module(order.dataset, **order.loading))
    if not trainer.is_global_zero:
        return None
    return order.model.state_dict(), history.records


def _history(package: Any) -> Any:
    """Return a callback of Lightning that keeps the logged metrics of each epoch, validation's included."""

    class History(package.Callback):  # type: ignore[misc]  # of either package
        def __init__(self) -> None:
            self.records: list[dict[str, Any]] = []

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
            self.records.append({"epoch": trainer.current_epoch, **logged})

    return History()
