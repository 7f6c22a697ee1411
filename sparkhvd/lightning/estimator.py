"""`TorchEstimator` of a LightningModule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.estimator import estimator
from sparkhvd.estimator.params.base import with_signature
from sparkhvd.estimator.params.options import FitOptions
from sparkhvd.lightning.batches import RowFunction
from sparkhvd.lightning.loop import LightningLoop
from sparkhvd.lightning.packages import package_of
from sparkhvd.lightning.params import (
    LIGHTNING_ALONE,
    MODULE_OR_TRAINER,
    OF_THE_LOOP,
    LightningParams,
)
from sparkhvd.training.precision import PRECISIONS

if TYPE_CHECKING:
    from sparkhvd.training.train_fn import TrainFnContext

__all__ = ["TorchEstimator"]


@with_signature
class TorchEstimator(LightningParams, estimator.TorchEstimator):
    """Estimator of a LightningModule: Lightning's `Trainer` on one rank per Spark task, over a DataFrame's rows.

        estimator = TorchEstimator(
            model=module, feature_cols=["features"], label_cols=["label"], batch_size=32, epochs=10, num_proc=2,
            callbacks=[EarlyStopping("val_loss")], validation=0.1, trainer_args={"gradient_clip_val": 1.0})
        model = estimator.fit(df)  # TorchModel

    Data, checkpoints, relaunches and the model that `fit` returns are those of `sparkhvd.TorchEstimator`; optimizers, losses and logged metrics
    those of the module. `training_step` gets a dict of tensors by column. The module is not modified. Arguments and their meaning: `explainParams()`.
    """

    # Whether loggers and `ModelCheckpoint` write into the folder of the run, whatever folder they were given.
    _moves_files: ClassVar[bool] = False

    def _options(self) -> FitOptions:
        """Check the values and read them.

        Raises:
            InvalidArgumentError: one is out of range, cannot be used here, or contradicts another.
        """
        options = super()._options()
        wrap = self._wrap(options)
        self._refuse(options)
        # What the loop takes by itself is not refused as unseen by it.
        explicit = options.explicit - {"callbacks", *MODULE_OR_TRAINER, *OF_THE_LOOP} | {"train_fn"}
        loop = replace(self._loop(options), wrap=wrap)
        # For the trial and `transform`, which have no trainer.
        given = str((self._get("trainer_args") or {}).get("precision"))
        precision = {"16": "16-mixed", "bf16": "bf16-mixed"}.get(given, given)
        return replace(
            options,
            train_fn=loop,
            callbacks=None,
            precision=precision if precision in PRECISIONS else "32",
            explicit=explicit,
        )

    def _wrap(self, options: FitOptions) -> Callable[[TrainFnContext], Any] | None:
        """Return what makes the LightningModule of a rank from its module; None where the module is one.

        Raises:
            InvalidArgumentError: it is none.
        """
        if isinstance(options.model, torch.nn.Module):
            package_of(options.model)  # refuses another module
        return None

    def _refused(self) -> Mapping[str, str]:
        """Return the Params that have no effect, and what to do instead."""
        return MODULE_OR_TRAINER

    def _refuse(self, options: FitOptions) -> None:
        for name, instead in self._refused().items():
            if name in options.explicit and getattr(options, name) not in (None, []):
                raise InvalidArgumentError(
                    f"{name} has no effect on a LightningModule: {instead}. Leave it out."
                )
        for name in self._get("trainer_args") or {}:
            if name in LIGHTNING_ALONE:
                raise InvalidArgumentError(
                    f"trainer_args has {name!r}, which the fit decides. Give {LIGHTNING_ALONE[name]} instead."
                )

    def _loop(self, options: FitOptions) -> LightningLoop:
        columns = [*(options.feature_cols or []), *(options.label_cols or [])]
        strategy = {
            "compression": options.gradient_compression,
            "lr_scaling": options.lr_scaling,
        }
        limits = {
            "limit_train_batches": options.train_steps_per_epoch,
            "limit_val_batches": options.validation_steps_per_epoch,
        }
        return LightningLoop(
            callbacks=tuple(self._get("callbacks") or ()),
            logger=self._get("logger") or False,
            profiler=self._get("profiler"),
            log_every_n_steps=self._get("log_every_n_steps"),
            trainer_args={
                **{name: value for name, value in limits.items() if value is not None},
                **(self._get("trainer_args") or {}),
            },
            moves_files=self._moves_files,
            ends_on_nan=bool(options.terminate_on_nan),
            columns=columns if self._get("batch_format") == "tuple" else None,
            rows=self._row_function(options),
            data_module=self._get("data_module"),
            loading=self._loading(options),
            strategy={name: value for name, value in strategy.items() if value is not None},
        )

    def _loading(self, options: FitOptions) -> dict[str, Any]:
        """Return arguments of the data module that only Horovod's own readers have a use for."""
        return {
            "num_reader_epochs": None,
            "reader_pool_type": "thread",
            "reader_worker_count": options.num_workers,
            "inmemory_cache_all": False,
            "verbose": bool(options.verbose),
            "debug_data_loader": False,
            "train_async_data_loader_queue_size": None,
            "val_async_data_loader_queue_size": None,
        }

    def _row_function(self, options: FitOptions) -> RowFunction | None:
        """Return a function on rows that the ranks run instead of `transformation_fn`."""
        del options
        return None
