"""`TorchModel`: a trained module as a Spark ML transformer."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, TypeAlias

from pyspark.ml import Model
from pyspark.ml.util import MLReadable, MLReader, MLWritable, MLWriter
from torch import nn

from sparkhvd.data.store.connect import as_seen_by
from sparkhvd.data.store.default import default_store
from sparkhvd.data.store.store import Store
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.estimator.onnx import OnnxExport
from sparkhvd.estimator.params.base import with_signature
from sparkhvd.estimator.params.fit import columns_in
from sparkhvd.estimator.params.options import PredictOptions
from sparkhvd.estimator.params.prediction import PredictParams
from sparkhvd.estimator.saving.persistence import ModelReader, ModelWriter
from sparkhvd.estimator.saving.run_model import load_run_model
from sparkhvd.estimator.summary import horovod_history
from sparkhvd.estimator.trained import Trained
from sparkhvd.estimator.transform.binding import bind_module, described
from sparkhvd.estimator.transform.columns import (
    check_passing,
    functions_of,
    match_columns,
    source_names,
    warn_of_large_rows,
)
from sparkhvd.estimator.transform.outputs import OUTPUT_PARAMS, output_columns
from sparkhvd.estimator.transform.stage import add_outputs
from sparkhvd.estimator.transform.worker import PredictSpec
from sparkhvd.sessions import active_session, check_dataframe, is_connect
from sparkhvd.training.modules.architecture import tensors_of
from sparkhvd.training.modules.copies import copied
from sparkhvd.training.modules.fitted import Fitted
from sparkhvd.training.modules.modes import check_modes, in_mode
from sparkhvd.training.modules.output_widths import output_widths
from sparkhvd.training.modules.weights import Weights, store_weights
from sparkhvd.training.torch_settings import settings_here

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from typing_extensions import Self, Unpack

    from sparkhvd.estimator.params.keywords import ModelKeywords

__all__ = ["TorchModel"]


# One loss for all outputs, or one per output.
Losses: TypeAlias = "Callable[..., Any] | str | Sequence[Callable[..., Any] | str]"
# Horovod's arguments without effect here, and why.
_NO_EFFECT = {
    "optimizer": "a model is not trained further; give it to TorchEstimator",
    "_metadata": "types follow from the columns of the DataFrame, shapes from input_shapes",
}


@with_signature
class TorchModel(Trained, OnnxExport, PredictParams, Model, MLWritable, MLReadable["TorchModel"]):
    """Trained model. `transform` adds the model's outputs to a DataFrame.

    It comes from `TorchEstimator.fit` or `load`. A module that was trained elsewhere becomes one by `from_module`, or as in Horovod:

        TorchModel(model=net, feature_columns=["x"], label_columns=["y"], input_shapes=[[-1, 4]])

    One column `<label>__output` per label: a double where the output has one element per row, else an ML vector; never
    rounded. Where the loss of the training tells what the only output means, also Spark ML's columns: `rawPredictionCol` and
    `probabilityCol`, vectors, and `predictionCol`, a double (the most likely class, or the value). A name that is set adds
    its column in any case; an empty one leaves it out.

    Attributes:
        history: one record per epoch: epoch, loss, metrics, val_..., rows, seconds, rows_per_s, data_wait_s (seconds
            in which rank 0 waited for batches), lr.
        timings: seconds of the fit's phases: materialize, launch, train.
    """

    def __init__(
        self,
        *positional: object,
        model: nn.Module | None = None,
        loss: Losses | None = None,
        loss_constructors: object = None,
        history: Sequence[Mapping[str, Any]] | None = None,
        run_id: str | None = None,
        optimizer: object = None,
        _metadata: object = None,
        **keywords: Unpack[ModelKeywords],
    ) -> None:
        super().__init__()
        self._fitted: Fitted | None = None
        self._set_keywords(positional, keywords)
        for name, value in (("optimizer", optimizer), ("_metadata", _metadata)):
            if value is not None:
                warnings.warn(
                    f"{name} has no effect in TorchModel: {_NO_EFFECT[name]}.", stacklevel=2
                )
        if model is not None:
            self.setModel(model)
            self._fitted = described(
                self._require_fitted(),
                loss=loss,
                loss_constructors=loss_constructors,
                history=history,
                run_id=run_id,
            )
        elif any(value is not None for value in (loss, loss_constructors, history, run_id)):
            raise InvalidArgumentError(
                "TorchModel: loss, loss_constructors, history and run_id are those of a module. Give model, too."
            )

    @classmethod
    def from_module(
        cls,
        module: nn.Module,
        *,
        loss: Losses | None = None,
        link: str | Sequence[str] | None = None,
        widths: Sequence[int] = (),
        history: Sequence[Mapping[str, Any]] | None = None,
        run_id: str | None = None,
        **params: Unpack[ModelKeywords],
    ) -> Self:
        """Make the model of a module that was trained elsewhere.

        Types of the feature columns follow from each DataFrame by the rules of a fit, and from `feature_dtypes`; how long rows of arrays
        and vectors are, and what shape decoders give, from `input_shapes` or a vector's metadata.

        Args:
            module: is copied.
            loss: of its training, or one per output; tells how probabilities follow from outputs, as in a fit.
            link: "softmax", "sigmoid", "probability" (the output is one), "value" or "identity" (not known) instead of a loss, or one per output.
            widths: elements per row of each output; not given: the module runs on two rows of zeros.
            history: records of its epochs.
            run_id: name of its run.
            params: `feature_cols`, `label_cols` (or `outputCols`), `input_shapes`, `feature_dtypes`, ... as of `TorchModel`.
        """
        model = cls(**params).setModel(module)
        fitted = described(
            model._require_fitted(), loss=loss, link=link, history=history, run_id=run_id
        )
        model._fitted = replace(fitted, widths=tuple(widths))
        return model

    def __repr__(self) -> str:
        if self._fitted is None:
            return f"{self.uid}: no trained module"
        fitted = self._fitted
        inputs = [column.name for column in fitted.columns] or self.getFeatureColumns() or ["?"]
        outputs = fitted.labels or self._get("label_cols") or self._get("outputCols") or ["?"]
        number = sum(p.numel() for p in fitted.module.parameters())
        name = f"{type(fitted.module).__name__} with {number:,} parameters"
        summary = f"; {self.summary}" if fitted.history else ""
        return f"{self.uid}: {name}, {', '.join(inputs)} -> {', '.join(outputs)}{summary}"

    def getModel(self) -> nn.Module:  # noqa: N802 - Horovod's name
        """Return a copy of the trained module, in eval mode."""
        return in_mode(copied(self._require_fitted().module), is_training=False)

    def getLoss(self) -> Any:  # noqa: N802 - like the estimator's
        """Return a copy of the loss of the training, with the parameters and buffers that were trained with the model.

        A function, module, or list with one per label, as it was given; None where it is not known, and after `load` without trust of a
        loss that needs it.
        """
        loss = self._require_fitted().loss
        if isinstance(loss, (list, tuple)):
            return [_copy_of(each) for each in loss]
        return _copy_of(loss)

    # -- Horovod's names -----------------------------------------------------------------------------

    def setModel(self, module: nn.Module) -> Self:  # noqa: N802
        """Predict with a copy of another module that takes the same columns; returns this object.

        A model that no fit has trained takes any module: its columns are those of the Params.

        Raises:
            InvalidArgumentError: its outputs have another number or width (not checked if a column is collated).
        """
        if not isinstance(module, nn.Module):
            raise InvalidArgumentError(f"setModel({module!r:.200}): give a torch.nn.Module.")
        if lazy := [name for name, p in module.named_parameters() if nn.parameter.is_lazy(p)]:
            raise InvalidArgumentError(
                f"setModel: parameter {lazy[0]!r} has no shape yet. Run the lazy module on one batch before."
            )
        check_modes(module, "setModel")
        own = in_mode(copied(module), is_training=False)
        own.cpu()
        fitted = self._fitted or Fitted(own)
        if not fitted.columns:
            self._fitted = replace(fitted, module=own, widths=())
            return self
        # What a collate function makes is known only when there are rows.
        widths = fitted.widths
        if not any(c.is_collated for c in fitted.columns):
            precision = self._get("precision")
            measured = output_widths(own, fitted.inputs, fitted.columns, precision=precision)
            widths = fitted.widths if measured is None else tuple(measured)
        if fitted.widths and widths != fitted.widths:
            raise InvalidArgumentError(
                f"setModel: the module's outputs have {widths} elements per row; those of the trained one have "
                f"{fitted.widths}. Give a module with the same outputs, or fit it."
            )
        self._fitted = replace(fitted, module=own, widths=widths)
        return self

    def getHistory(self) -> list[dict[str, Any]]:  # noqa: N802
        """Return `history` in Horovod's shape: `[-1]["train"]["loss"]`, `[-1]["validation"]["loss"]`, metrics by name and as `all_metrics`."""
        records = [dict(record) for record in self._require_fitted().history]
        return horovod_history(records, len(self.getLabelColumns()))

    def setHistory(self, history: Sequence[Mapping[str, Any]]) -> TorchModel:  # noqa: N802
        """Replace the records of the epochs, flat or in Horovod's shape; returns this object."""
        records = [dict(record) for record in history]
        self._fitted = replace(self._require_fitted(), history=records, report={})
        return self

    def getRunId(self) -> str:  # noqa: N802
        """Return the name of the run in the store: what `keep_checkpoints` lets stay of it is under `runs/<run_id>`."""
        return self._require_fitted().run_id

    def setRunId(self, run_id: str) -> TorchModel:  # noqa: N802
        """Set the name of the run; nothing in the store is renamed. Returns this object."""
        self._fitted = replace(self._require_fitted(), run_id=run_id, report={})
        return self

    def getFeatureColumns(self) -> list[str]:  # noqa: N802
        """List the columns that `transform` reads: `feature_cols`, or those of the training."""
        fitted = self._require_fitted()
        if not fitted.columns:
            return list(self._get("feature_cols") or columns_in(self._get("inputs") or {}))
        return source_names(fitted, self._read_options(PredictOptions))

    def getLabelColumns(self) -> list[str]:  # noqa: N802
        """List the labels after which output columns are named: `label_cols`, or those of the training."""
        return list(self._get("label_cols") or self._require_fitted().labels)

    # -- transform -----------------------------------------------------------------------------------

    def _transform(self, dataset: DataFrame) -> DataFrame:
        """Add the output columns; starts no Spark job. Rows and all other columns stay as they are.

        The model sees the columns only when rows are computed: filter and select before, because Spark cannot move
        either through a Python function.
        """
        check_dataframe("transform", dataset)
        module = fitted = self._require_fitted()
        options = self._read_options(PredictOptions)
        if not fitted.columns:
            fitted, options = bind_module(fitted, options, dataset.schema)
        self._check_outputs(fitted)
        outputs = output_columns(fitted, options, dataset)
        check_passing(dataset.schema)
        warn_of_large_rows(fitted, options, dataset)
        columns = match_columns(fitted, options, dataset.schema)
        sources = source_names(fitted, options)
        spec = PredictSpec(
            shell=module.shell,
            weights=_weights(module, dataset.sparkSession, options),
            columns=fitted.inputs.with_casts(columns),
            sources=tuple(dataset.columns.index(name) for name in sources),
            names=tuple(dataset.columns),
            inputs=fitted.inputs,
            links=fitted.links,
            outputs=outputs,
            output_fn=options.output_fn,
            functions=functions_of(fitted, options),
            thresholds=options.thresholds,
            precision=options.precision,
            use_gpu=options.use_gpu,
            torch_settings=settings_here(),
        )
        return add_outputs(dataset, spec)

    def _check_outputs(self, fitted: Fitted) -> None:
        """Refuse outputs that are not known."""
        if not fitted.widths:
            raise InvalidArgumentError(
                "transform: the outputs of the model are not known, because its forward ran on two rows of zeros neither on the "
                "driver nor, after training, on the ranks. getModel() gives the trained module; give one whose forward runs "
                "without ranks to setModel."
            )

    def _name_no_outputs(self) -> None:
        """Leave out the columns of the outputs' meaning whose names are not set, because nothing tells it."""
        self._set(**{name: "" for name in OUTPUT_PARAMS if not self.isSet(name)})

    def _require_fitted(self) -> Fitted:
        if self._fitted is None:
            raise InvalidArgumentError(
                "TorchModel has no trained module. It comes from TorchEstimator.fit or TorchModel.load, or is made of a module by "
                "TorchModel.from_module(module, feature_cols=[...]) or setModel(module)."
            )
        return self._fitted

    # -- save and load -------------------------------------------------------------------------------

    def write(self) -> MLWriter:
        """Return a writer: `model.write().overwrite().save(path)`."""
        return ModelWriter(self)

    def _for_mlflow(self) -> Any:
        """Return what MLflow's flavour `spark` can save in this session."""
        if not is_connect(active_session()):
            return self
        from sparkhvd.estimator.saving.local_pipeline import LocalPipeline

        return LocalPipeline(self)

    @classmethod
    def read(cls) -> MLReader[TorchModel]:
        """Return a reader: `TorchModel.read().load(path)`."""
        return ModelReader(cls)

    @classmethod
    def load(cls, path: str, *, trust: bool = False) -> Self:
        """Load a saved model.

        Args:
            path: what was given to `save`.
            trust: the file may run code. Needed for modules with classes that are not of `torch.nn`, and with torch before
                2.10. Without it the model has no store: on a cluster, one with more than 64 MiB of weights then
                needs `setStore`, or the conf `spark.sparkhvd.store`, before it transforms.

        Raises:
            UntrustedError: the file holds code and nobody trusts it.
        """
        loaded: Self = ModelReader(cls, trusted=trust).load(path)
        return loaded

    @classmethod
    def from_run(
        cls,
        store: Store | str | PathLike[str],
        run_id: str,
        *,
        trust: bool = False,
        spark: SparkSession | None = None,
    ) -> Self:
        """Make the model of a run in a store, for example when the program ended before it had saved what `fit` returned.

        A finished run gives its model. One that has not finished gives the weights of its newest whole checkpoint, and a
        warning says after which epoch; nothing of the run is changed. Where fits with `warm_start` went on from the run, it
        is the last one's.

        Args:
            store: the store of the fit, or its path or URL.
            run_id: its `run_id`; `Store.runs()` lists them.
            trust: the run may run code, as in `load`.
            spark: session through which a client of Spark Connect reaches the store, and whose conf may name trusted paths;
                None means the active one, if there is one.

        Raises:
            InvalidArgumentError: there is no such run (the message lists those that are there), it has no checkpoint yet, or
                its files are damaged.
            UntrustedError: the run holds code and nobody trusts it.
        """
        seen, spark = _opened(store, spark)
        return load_run_model(cls, seen, run_id, trusted=trust, spark=spark)


def _opened(
    store: Store | str | PathLike[str], spark: SparkSession | None
) -> tuple[Store, SparkSession | None]:
    """Open the store of `from_run`, as the session sees it if there is one."""
    if not isinstance(store, (Store, str, PathLike)):
        raise InvalidArgumentError(
            f"from_run: store is {store!r:.100}; it must be a Store, or the path or URL of one."
        )
    if spark is None:
        with contextlib.suppress(InvalidArgumentError):
            spark = active_session()
    opened = store if isinstance(store, Store) else Store(fspath(store))
    seen = opened.direct if spark is None else as_seen_by(spark, opened)
    return seen, spark


def _copy_of(loss: object) -> object:
    return copied(loss) if isinstance(loss, nn.Module) else loss


def _weights(fitted: Fitted, spark: SparkSession, options: PredictOptions) -> Weights:
    """Return small weights for the closure, large ones as a file of the store, written once."""
    if fitted.weights.data is not None:
        return fitted.weights
    store = default_store(spark, options.store)
    return store_weights(tensors_of(fitted.module), fitted.weights.sha256, store)
