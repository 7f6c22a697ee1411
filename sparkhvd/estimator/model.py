"""`TorchModel`: a trained module as a Spark ML transformer."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import inspect
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from html import escape
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from pyspark.ml import Model
from pyspark.ml.util import MLReadable, MLReader, MLWritable, MLWriter
from torch import Tensor, nn

from sparkhvd.data.columns import labels
from sparkhvd.data.columns.binding import InputBinding, columns_in
from sparkhvd.data.store.connect import as_seen_by
from sparkhvd.data.store.store import Store
from sparkhvd.data.store.temporary import default_store
from sparkhvd.errors import InvalidArgumentError, SparkhvdError, listed
from sparkhvd.estimator.evaluation import TrainingSummary, horovod_history
from sparkhvd.estimator.importance import Importance, permutation_importance
from sparkhvd.estimator.params.base import with_signature
from sparkhvd.estimator.params.converters import to_losses
from sparkhvd.estimator.params.generated import PredictOptions
from sparkhvd.estimator.params.groups import PredictParams
from sparkhvd.estimator.saving.persistence import ModelReader, ModelWriter
from sparkhvd.estimator.saving.run_model import load_run_model
from sparkhvd.estimator.transform.binding import (
    bind_module,
    check_passing,
    described,
    functions_of,
    match_columns,
    name_outputs,
    source_names,
    warn_of_large_rows,
)
from sparkhvd.estimator.transform.local import LocalModel
from sparkhvd.estimator.transform.outputs import OUTPUT_PARAMS, named_outputs, output_columns
from sparkhvd.estimator.transform.stage import add_outputs
from sparkhvd.estimator.transform.worker import Computation, Output, PredictSpec, column_tensor
from sparkhvd.observe.live_plot import draw_curves, measured
from sparkhvd.observe.report.page import JSON_NAME, Document, dumps, loads, render
from sparkhvd.spark import active_session, check_dataframe, is_connect
from sparkhvd.training.modules.architecture import tensors_of
from sparkhvd.training.modules.copies import copied
from sparkhvd.training.modules.fitted import TrainedState, failure_on_zeros, output_widths, zeros
from sparkhvd.training.modules.modes import check_modes, in_mode
from sparkhvd.training.modules.weights import Weights, store_weights
from sparkhvd.training.torch_settings import settings_here

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure
    from pyspark.ml.evaluation import Evaluator
    from pyspark.sql import DataFrame, SparkSession
    from typing_extensions import Self, Unpack

    from sparkhvd.estimator.params.generated import ModelKeywords


class Report:
    """Report of a fit, shown as a page in a notebook and written to a file by `save`.

    Attributes:
        document: facts and numbers of the fit, see `sparkhvd.observe.report.page`.
        html: HTML page of the report.
    """

    def __init__(self, document: Document) -> None:
        # A round trip through JSON makes the document equal to one read from a file.
        self.document = loads(dumps(document), JSON_NAME)
        self.html = render(self.document)

    def __repr__(self) -> str:
        return f"Report({self.document.get('run_id') or 'fit'}): save(path) writes the page, a notebook shows it"

    def _repr_html_(self) -> str:
        """Embed the page in a frame, to isolate its style from the notebook's style."""
        return f'<iframe srcdoc="{escape(self.html)}" sandbox style="width:100%;height:800px;border:0"></iframe>'

    def save(self, path: str | PathLike[str]) -> None:
        """Write the page to a file of this machine, replacing an existing file.

        Raises:
            OSError: the file cannot be written.
        """
        Path(path).write_text(self.html, encoding="utf-8")


# One loss for all outputs, or one per output.
Losses: TypeAlias = "Callable[..., Any] | str | Sequence[Callable[..., Any] | str]"
# Argument of Horovod without effect -> what to do instead.
_NO_EFFECT = {
    "optimizer": "a model is not trained further; give it to TorchEstimator",
    "_metadata": "types follow from the columns of the DataFrame, shapes from input_shapes",
}


@with_signature
class TorchModel(PredictParams, Model, MLWritable, MLReadable["TorchModel"]):
    """Trained model. `transform` adds the model's outputs to a DataFrame.

    `TorchEstimator.fit` and `load` return a `TorchModel`. For a module trained elsewhere use `from_module`, or as in
    Horovod:

        TorchModel(model=net, feature_columns=["x"], label_columns=["y"], input_shapes=[[-1, 4]])

    `transform` adds one column `<label>__output` per label, never rounded: a double for an output of one element per
    row, else an ML vector. If there is one output and the loss defines its meaning, Spark ML's columns are added, too:
    the vectors `rawPredictionCol` and `probabilityCol`, and the double `predictionCol` (the most likely class, or the
    value). Setting the name of a column always adds it; an empty name omits it.

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
        self._fitted: TrainedState | None = None
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
                loss=to_losses(loss),
                loss_constructors=loss_constructors,
                history=history,
                run_id=run_id,
            )
        elif any(value is not None for value in (loss, loss_constructors, history, run_id)):
            raise InvalidArgumentError(
                "TorchModel: loss, loss_constructors, history and run_id describe a trained module. Give model, too."
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
        """Make a model from a module trained elsewhere.

        Each DataFrame and `feature_dtypes` decide the types of features, by the rules of a fit. `input_shapes` or a
        vector's metadata give the lengths of arrays and vectors and the shapes of decoded values.

        Args:
            module: trained module, which is copied.
            loss: loss of its training, or a list per output; decides how probabilities are computed from outputs.
            link: instead of a loss: "softmax", "sigmoid", "probability" (the output is a probability), "value" or
                "identity" (unknown), or a list per output.
            widths: elements per row of each output; by default a run on two rows of zeros finds them.
            history: records of the epochs.
            run_id: name of the run.
            params: `feature_cols`, `label_cols` (or `outputCols`), `input_shapes`, `feature_dtypes`, ... as in
                `TorchModel`.
        """
        model = cls(**params).setModel(module)
        fitted = described(
            model._require_fitted(), loss=to_losses(loss), link=link, history=history, run_id=run_id
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
        return f"{self.uid}: {name}, {listed(inputs)} -> {listed(outputs)}{summary}"

    def getModel(self) -> nn.Module:  # noqa: N802 - Horovod's name
        """Return a copy of the trained module, in eval mode."""
        return in_mode(copied(self._require_fitted().module), is_training=False)

    def getLoss(self) -> Any:  # noqa: N802 - like the estimator's
        """Return a copy of the training loss, with parameters and buffers trained with the model.

        It is a function, a module, or a list with an entry per label, as given. It is None if unknown, or if the model
        was loaded without trust and its loss needs trust.
        """
        loss = self._require_fitted().loss
        if isinstance(loss, (list, tuple)):
            return [_copy_of(each) for each in loss]
        return _copy_of(loss)

    # -- training ------------------------------------------------------------------------------------

    @property
    def history(self) -> list[dict[str, Any]]:
        """Records of the epochs, in order."""
        return self._records()

    def _records(self) -> list[dict[str, Any]]:
        """Records of the epochs, also in subclasses with Horovod's names, where `history` is a Param."""
        return [dict(record) for record in self._require_fitted().history]

    def history_frame(self) -> pd.DataFrame:
        """Convert `history` to a pandas DataFrame with a row per epoch, indexed by epoch."""
        import pandas as pd

        frame = pd.DataFrame(self._require_fitted().history)
        return frame.set_index("epoch") if "epoch" in frame else frame

    @property
    def training_data(self) -> dict[str, Any]:
        """Describe the training rows of the fit: "rows" (their number), "columns", "digest" and "tables".

        Each table has "format", "name", "url", "uuid", "version" (number of a Delta version, id of an Iceberg
        snapshot), "committed" and "where". The list is empty if the rows did not come from a table, or its version is
        unknown.
        """
        return dict(self._require_fitted().data)

    @property
    def run_key(self) -> str:
        """Key for `sparkhvd reproduce` of a fit on a table. Keep it apart from the store.

        It is "" without a table or a kept run, if the fit is elastic or uses `warm_start`, and if Params cannot be pickled.
        """
        return self._require_fitted().run_key

    @property
    def timings(self) -> dict[str, float]:
        """Seconds of the fit's phases: materialize, launch, train."""
        return dict(self._require_fitted().timings)

    @property
    def summary(self) -> TrainingSummary:
        """Summary of the training, with the names of Spark ML's summaries."""
        fitted = self._require_fitted()
        return TrainingSummary(self._records(), self.timings, fitted.run_id)

    def report(self) -> Report:
        """Make the report of the fit: curves, throughput, phases, waits, settings.

        See docs/monitoring.md#report. For a loaded model, the report is read from the run's folder in the store.
        Without that folder, it has only history and timings.
        """
        fitted = self._require_fitted()
        return Report(fitted.report or self._stored_report(fitted) or _short_document(fitted))

    def _stored_report(self, fitted: TrainedState) -> Document:
        store = self._get("store")
        if not fitted.run_id or not hasattr(store, "read_bytes"):
            return {}
        path = f"runs/{fitted.run_id}/{JSON_NAME}"
        with contextlib.suppress(OSError, SparkhvdError):
            return loads(store.read_bytes(path), store.full_url(path))
        return {}

    def permutation_importance(
        self,
        dataset: DataFrame,
        evaluator: Evaluator,
        *,
        num_rows: int = 2000,
        repeats: int = 3,
        seed: int = 0,
    ) -> list[Importance]:
        """Compute how much worse predictions get when a feature is permuted among the rows, in descending order.

        Each scalar column is a feature, and each element of a vector or list of numbers, named by Spark ML's metadata
        if present.
        Correlated features share importance: each of them may have little.

        Args:
            dataset: rows with the columns of model and evaluator, preferably rows that were not trained on.
            evaluator: evaluator of Spark ML, such as `RegressionEvaluator(labelCol="y")`.
            num_rows: maximum number of sampled rows, which the driver holds in memory.
            repeats: number of permutations of each feature.
            seed: seed of sampling and permutations.

        Raises:
            InvalidArgumentError: there are fewer than two rows, `num_rows` or `repeats` is too small, `evaluator` has no
                method `evaluate`, or a column of the model or the evaluator's label is missing.
        """
        columns = self._get("feature_cols") or [c.name for c in self._require_fitted().columns]
        return permutation_importance(
            self.transform,
            columns,
            dataset,
            evaluator,
            num_rows=num_rows,
            repeats=repeats,
            seed=seed,
        )

    def plot(self, names: Sequence[str] | None = None) -> Figure:
        """Draw training and validation curves over the epochs with matplotlib.

        Args:
            names: losses, metrics or other keys of `history`, without "val_"; None draws all losses and metrics.

        Returns:
            The figure, with one plot per name; a notebook shows it.

        Raises:
            InvalidArgumentError: matplotlib is not installed, there is no history, or it has no such key.
        """
        history = self._records()
        known = measured(history)
        chosen = known if names is None else list(names)
        keys = {key for record in history for key in record}
        if wrong := [n for n in chosen if not {n, f"train_{n}", f"val_{n}"} & keys]:
            raise InvalidArgumentError(
                f"plot: {wrong[0]!r} is not in the history, which has {listed(map(repr, known)) or 'nothing'}."
            )
        if not chosen:
            raise InvalidArgumentError(
                "plot: the model has no history. Only a fit records a history."
            )
        try:
            return draw_curves(history, chosen)
        except ImportError:
            raise InvalidArgumentError(
                "plot: matplotlib is not installed. Run `pip install matplotlib`, or use model.report(), which does not need it."
            ) from None

    # -- Horovod's names -----------------------------------------------------------------------------

    def setModel(self, module: nn.Module) -> Self:  # noqa: N802
        """Use a copy of another module for the same columns, and return this object.

        Without a fit, any module is accepted, because the Params define its columns.

        Raises:
            InvalidArgumentError: the outputs differ in number or elements per row (not checked if a column is
                collated).
        """
        if not isinstance(module, nn.Module):
            raise InvalidArgumentError(f"setModel({module!r:.200}): give a torch.nn.Module.")
        if lazy := [name for name, p in module.named_parameters() if nn.parameter.is_lazy(p)]:
            raise InvalidArgumentError(
                f"setModel: parameter {lazy[0]!r} of a lazy module has no shape yet. Run the module on one batch first."
            )
        check_modes(module, "setModel")
        own = in_mode(copied(module), is_training=False)
        own.cpu()
        fitted = self._fitted or TrainedState(own)
        if not fitted.columns:
            self._fitted = replace(fitted, module=own, widths=())
            return self
        # The result of a collate function is known only when rows are read, so the outputs cannot be checked here.
        widths = fitted.widths
        if not any(c.is_collated for c in fitted.columns):
            precision = self._get("precision")
            measured = output_widths(own, fitted.inputs, fitted.columns, precision=precision)
            widths = fitted.widths if measured is None else tuple(measured)
        if fitted.widths and widths != fitted.widths:
            raise InvalidArgumentError(
                f"setModel: the module's outputs have {widths} elements per row, but the trained module's outputs have "
                f"{fitted.widths}. Give a module with the same outputs, or fit it."
            )
        self._fitted = replace(fitted, module=own, widths=widths)
        return self

    def getHistory(self) -> list[dict[str, Any]]:  # noqa: N802
        """Return `history` in Horovod's format: `[-1]["train"]["loss"]`, `[-1]["validation"]["loss"]`.

        Metrics are there by name and as `all_metrics`.
        """
        records = [dict(record) for record in self._require_fitted().history]
        return horovod_history(records, len(self.getLabelColumns()))

    def setHistory(self, history: Sequence[Mapping[str, Any]]) -> TorchModel:  # noqa: N802
        """Replace the epochs' records, flat or in Horovod's format, and return this object."""
        records = [dict(record) for record in history]
        self._fitted = replace(self._require_fitted(), history=records, report={})
        return self

    def getRunId(self) -> str:  # noqa: N802
        """Return the name of the run. Its kept files are under `runs/<run_id>` in the store."""
        return self._require_fitted().run_id

    def setRunId(self, run_id: str) -> TorchModel:  # noqa: N802
        """Set the name of the run without renaming files in the store, and return this object."""
        self._fitted = replace(self._require_fitted(), run_id=run_id, report={})
        return self

    def getFeatureColumns(self) -> list[str]:  # noqa: N802
        """List the columns that `transform` reads: `feature_cols`, or the columns of the training."""
        fitted = self._require_fitted()
        if not fitted.columns:
            return list(self._get("feature_cols") or columns_in(self._get("inputs") or {}))
        return source_names(fitted, self._read_options(PredictOptions))

    def getLabelColumns(self) -> list[str]:  # noqa: N802
        """List the labels of the output columns: `label_cols`, or the labels of the training."""
        return list(self._get("label_cols") or self._require_fitted().labels)

    # -- transform -----------------------------------------------------------------------------------

    def _transform(self, dataset: DataFrame) -> DataFrame:
        """Add the output columns. Rows and all other columns are kept.

        No Spark job runs, unless the outputs of a module without a fit must be measured on real rows. The model runs
        when rows are computed. Filter rows and select columns before, because Spark cannot push filters and selections
        through a Python function.
        """
        check_dataframe("transform", dataset)
        module = fitted = self._require_fitted()
        options = self._read_options(PredictOptions)
        if not fitted.columns:
            fitted, options = bind_module(fitted, options, dataset.schema, may_measure=True)
            if not fitted.widths:
                widths = self._measure_widths(dataset.limit(32), fitted, options)
                # Kept, so that the widths are measured only once.
                self._fitted = replace(module, widths=widths)
                fitted = name_outputs(fitted, options, widths)
        self._check_outputs(fitted)
        outputs = output_columns(fitted, options, dataset)
        check_passing(dataset.schema)
        warn_of_large_rows(fitted, options, dataset)
        return add_outputs(dataset, self._predict_spec(dataset, fitted, options, outputs))

    def _measure_widths(
        self, dataset: DataFrame, fitted: TrainedState, options: PredictOptions
    ) -> tuple[int, ...]:
        """Find the elements per row of each output by a Spark job on real rows."""
        output = Output("sparkhvd widths", "widths", 0, is_vector=True)
        spec = self._predict_spec(dataset, fitted, options, (output,))
        row = add_outputs(dataset, spec).select(f"`{output.name}`").first()
        if row is None:
            raise InvalidArgumentError(
                "transform: the outputs of the module are not known, because its forward failed on made-up rows and the DataFrame is empty. "
                "Give a DataFrame with rows, or the elements per row of each output: TorchModel.from_module(..., widths=[1])."
            )
        return tuple(int(width) for width in row[0])

    def _predict_spec(
        self,
        dataset: DataFrame,
        fitted: TrainedState,
        options: PredictOptions,
        outputs: tuple[Output, ...],
    ) -> PredictSpec:
        columns = match_columns(fitted, options, dataset.schema)
        names = tuple(dataset.columns)  # each access to `columns` makes a new list
        number_of = {name: number for number, name in reversed([*enumerate(names)])}
        module = self._require_fitted()
        return PredictSpec(
            shell=module.shell,
            weights=_weights(module, dataset.sparkSession, options),
            columns=fitted.inputs.with_casts(columns),
            sources=tuple(number_of[name] for name in source_names(fitted, options)),
            names=names,
            inputs=fitted.inputs,
            links=fitted.output_links,
            outputs=outputs,
            output_fn=options.output_fn,
            functions=functions_of(fitted, options),
            thresholds=options.thresholds,
            precision=options.precision,
            use_gpu=options.use_gpu,
            torch_settings=settings_here(),
        )

    def local(self) -> LocalModel:
        """Make a predictor for numpy, pandas, polars and Arrow in this process, without Spark jobs.

        `sparkhvd.load_local` makes the same predictor from a saved model, without pyspark.

        Raises:
            InvalidArgumentError: there is no trained module, or its outputs are not known.
        """
        fitted = self._require_fitted()
        if fitted.columns:
            self._check_outputs(fitted)
        return LocalModel(fitted, self._read_options(PredictOptions))

    def _check_outputs(self, fitted: TrainedState) -> None:
        """Reject a model with unknown outputs."""
        if not fitted.widths:
            raise InvalidArgumentError(
                "transform: the outputs of the model are not known, because its forward failed on made-up rows on the driver and, "
                f"after training, on the ranks' first batch{failure_on_zeros(fitted)}. Take the trained module with getModel(), and give "
                "setModel a module whose forward runs in eval mode, without ranks."
            )

    def _name_no_outputs(self) -> None:
        """Omit Spark ML's columns unless their names were set, because the meaning of the outputs is unknown."""
        self._set(**{name: "" for name in OUTPUT_PARAMS if not self.isSet(name)})

    def _require_fitted(self) -> TrainedState:
        if self._fitted is None:
            raise InvalidArgumentError(
                "TorchModel has no trained module. Get a model from TorchEstimator.fit or TorchModel.load, or give a module to "
                "TorchModel.from_module(module, feature_cols=[...]) or setModel(module)."
            )
        return self._fitted

    # -- export --------------------------------------------------------------------------------------

    def to_onnx(self, path: str | PathLike[str], *, dataset: DataFrame | None = None) -> None:
        """Write the model to an ONNX file, replacing an existing file.

        Inputs are the arguments of the module's `forward`, with any number of rows. Outputs are the columns that
        `transform` adds, in the module's dtype, classes as int64. Decoders and `handle_invalid` are not exported.
        Weights of more than 1.5 GB are written to a second file beside the first.

        Args:
            path: file as a path or URL, such as "model.onnx" or "s3://bucket/model.onnx".
            dataset: DataFrame whose columns give the types; only needed for a model without a fit.

        Raises:
            InvalidArgumentError: onnx or onnxscript is not installed, a column is not a dense tensor, or torch cannot
                export the module.
        """
        if missing := [name for name in _PACKAGES if importlib.util.find_spec(name) is None]:
            raise InvalidArgumentError(
                f"to_onnx needs the package {missing[0]}. Install it: pip install 'sparkhvd[onnx]'."
            )
        fitted, options = self._require_fitted(), self._read_options(PredictOptions)
        if not fitted.columns:
            if dataset is None:
                raise InvalidArgumentError(
                    "to_onnx: no fit has trained this model, so the types of its columns are not known. Give dataset=, a DataFrame with the columns."
                )
            fitted, options = bind_module(fitted, options, dataset.schema)
        self._check_outputs(fitted)
        _check_columns(fitted)
        module = in_mode(copied(fitted.module), is_training=False)
        _save(_exported(module, fitted, options), fspath(path))

    # -- save and load -------------------------------------------------------------------------------

    def write(self) -> MLWriter:
        """Create a writer: `model.write().overwrite().save(path)`."""
        return ModelWriter(self)

    def _for_mlflow(self) -> Any:
        """Return the object to save with MLflow's flavour `spark` in this session."""
        if not is_connect(active_session()):
            return self
        from sparkhvd.estimator.saving.local_pipeline import LocalPipeline

        return LocalPipeline(self)

    @classmethod
    def read(cls) -> MLReader[TorchModel]:
        """Create a reader: `TorchModel.read().load(path)`."""
        return ModelReader(cls)

    @classmethod
    def load(cls, path: str, *, trust: bool = False) -> Self:
        """Load a saved model.

        Args:
            path: path that was given to `save`.
            trust: True lets the file run code. Required for modules with classes outside `torch.nn`, and with torch
                before 2.10. Without trust the model has no store: on a cluster, a model with more than 64 MiB of
                weights then needs `setStore`, or the conf `spark.sparkhvd.store`, before `transform`.

        Raises:
            UntrustedError: the file holds code and is not trusted.
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
        """Make the model of a run in a store, for example if the program ended before it saved the model.

        For an unfinished run, the model has the weights of the newest complete checkpoint, and a warning names the
        epoch. The run is not changed. If fits with `warm_start` continued the run, the last of these fits is used.

        Args:
            store: store of the fit, or its path or URL.
            run_id: `run_id` of the fit; `Store.runs()` lists the run ids.
            trust: True lets files of the run run code, as in `load`.
            spark: session through which a Spark Connect client reaches the store, and whose conf may name trusted
                paths; None means the active session, if any.

        Raises:
            InvalidArgumentError: there is no such run (the message lists the existing runs), it has no checkpoint yet,
                or its files are damaged.
            UntrustedError: the run holds code and is not trusted.
        """
        seen, spark = _opened(store, spark)
        return load_run_model(cls, seen, run_id, trusted=trust, spark=spark)


def _opened(
    store: Store | str | PathLike[str], spark: SparkSession | None
) -> tuple[Store, SparkSession | None]:
    """Open the store of `from_run` through the session if there is one."""
    if not isinstance(store, (Store, str, PathLike)):
        raise InvalidArgumentError(
            f"from_run: store is {store!r:.100}; it must be a Store, or the path or URL of a store."
        )
    if spark is None:
        with contextlib.suppress(InvalidArgumentError):
            spark = active_session()
    opened = store if isinstance(store, Store) else Store(fspath(store))
    seen = opened.direct if spark is None else as_seen_by(spark, opened)
    return seen, spark


def _copy_of(loss: object) -> object:
    return copied(loss) if isinstance(loss, nn.Module) else loss


def _weights(fitted: TrainedState, spark: SparkSession, options: PredictOptions) -> Weights:
    """Put small weights into the closure, and write large weights once as a file of the store."""
    if fitted.weights.data is not None:
        return fitted.weights
    store = default_store(spark, options.store)
    return store_weights(tensors_of(fitted.module), fitted.weights.sha256, store)


def _short_document(fitted: TrainedState) -> Document:
    phases = [{"name": name, "seconds": seconds} for name, seconds in fitted.timings.items()]
    return {"run_id": fitted.run_id, "history": list(fitted.history), "phases": phases}


# ----------------------------------------------------------------------------------------------------
# Export a model to ONNX: the trained module, and the computation of the columns that `transform` adds.

_PACKAGES = ("onnx", "onnxscript")


class _OutputColumns(nn.Module):
    """Module that returns the columns of a transform as tensors."""

    def __init__(self, module: nn.Module, spec: Computation) -> None:
        super().__init__()
        self.module = module
        self._spec = spec

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Compute the columns from the arguments of the module, in the order of the binding."""
        named = list(zip(self._spec.inputs.arguments, values, strict=True))
        positional = [value for argument, value in named if argument.name is None]
        keywords = {a.name: value for a, value in named if a.name is not None}
        outputs = labels.outputs_of(self.module(*positional, **keywords))
        columns = []
        for column in self._spec.outputs:
            tensor = column_tensor(self._spec, column, outputs[column.label])
            tensor = tensor.long() if tensor.dtype == torch.bool else tensor
            shape = (tensor.shape[0], -1) if column.is_vector else (-1,)
            columns.append(tensor.reshape(shape))
        return tuple(columns)


def _check_columns(fitted: TrainedState) -> None:
    """Reject columns that are not dense tensors."""
    for column in fitted.columns:
        if column.kind == "sparse" or column.is_collated or column.row_shape is None:
            kind = "sparse" if column.kind == "sparse" else "collated, or its rows differ in length"
            raise InvalidArgumentError(
                f"to_onnx: column {column.name!r} is {kind}, but the ONNX export needs dense tensors. Call torch.onnx.export with getModel() "
                "and your own arguments."
            )


def _exported(module: nn.Module, fitted: TrainedState, options: PredictOptions) -> Any:
    """Export a module, and return torch's ONNXProgram."""
    if "dynamic_shapes" not in inspect.signature(torch.onnx.export).parameters:
        raise InvalidArgumentError(
            f"to_onnx needs torch 2.6 or newer; this is {torch.__version__}. Upgrade it: pip install 'torch>=2.6'."
        )
    outputs = named_outputs(fitted, options)
    spec = Computation(
        columns=fitted.columns,
        sources=(),
        names=(),
        inputs=fitted.inputs,
        links=fitted.output_links,
        outputs=outputs,
        output_fn=options.output_fn,
        thresholds=options.thresholds,
    )
    rows = {column.name: zeros(column) for column in fitted.columns}
    examples = tuple(argument.tensor(rows) for argument in fitted.inputs.arguments)
    names = _input_names(module, fitted.inputs)
    batch = torch.export.Dim("batch")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own code raises these warnings
            program = torch.onnx.export(
                _OutputColumns(module, spec).eval(),
                examples,
                input_names=names,
                output_names=[output.name for output in outputs],
                dynamic_shapes=(tuple({0: batch} for _ in examples),),
                dynamo=True,
                verbose=False,
            )
    except ImportError as e:
        raise InvalidArgumentError(
            f"to_onnx: torch {torch.__version__} does not work with the installed onnxscript {importlib.metadata.version('onnxscript')} ({e}). "
            "Upgrade it: pip install -U onnx onnxscript."
        ) from e
    except Exception as e:
        text = " ".join(str(e).split())
        raise InvalidArgumentError(
            f"to_onnx: torch {torch.__version__} cannot export {type(module).__name__}: {type(e).__name__}: {text:.600}. Write its forward so that "
            "torch.export supports it: without branches on values of tensors, and valid for any number of rows."
        ) from e
    assert program is not None  # torch returns a program if dynamo=True
    for name, argument in zip(names, fitted.inputs.arguments, strict=True):
        program.model.metadata_props[f"columns of {name}"] = ", ".join(argument.columns)
    return program


def _input_names(module: nn.Module, inputs: InputBinding) -> list[str]:
    """Name the inputs after the arguments of `forward`."""
    kinds = inspect.Parameter
    known = [
        name
        for name, each in inspect.signature(module.forward).parameters.items()
        if each.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
    ]
    positional = iter(range(len(inputs.arguments)))
    return [a.name or _nth(known, next(positional)) for a in inputs.arguments]


def _nth(names: Sequence[str], index: int) -> str:
    return names[index] if index < len(names) else f"input_{index}"


def _save(program: Any, path: str) -> None:
    """Write torch's ONNXProgram to a path or URL."""
    if "://" not in path and not path.startswith("dbfs:"):
        program.save(path)
        return
    folder, _, name = path.rpartition("/")
    store = Store.create(folder)
    with tempfile.TemporaryDirectory() as made:
        program.save(f"{made}/{name}")
        # The main file is written last, because it refers to the file with the weights.
        for file in sorted(Path(made).iterdir(), key=lambda file: file.name == name):
            with store.open_output(file.name) as sink, file.open("rb") as source:
                while block := source.read(1 << 24):
                    sink.write(block)
