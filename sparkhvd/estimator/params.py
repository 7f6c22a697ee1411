"""Every Spark ML Param of the estimator and its model, one per line, with type and meaning.

To add one: a line here, and the place that uses it. Getters, setters, keyword arguments and `explainParams` come
from the line.
"""

from __future__ import annotations

import difflib
import inspect
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, TypeVar

from pyspark.ml.param import Param, Params, TypeConverters

from sparkhvd.data.store.addresses import secrets_of
from sparkhvd.data.store.store import Store
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.estimator.names import ACCESSORS, ALIASES, ELSEWHERE, NO_EFFECT

__all__ = ["HorovodParams", "PredictParams", "TorchParams", "TrainParams", "short_repr"]

T = TypeVar("T", bound=type)


# --- type converters: what they raise becomes "Invalid param value given for param ..." -----------------------


def _columns(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else TypeConverters.toListString(value)


def _shapes(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: [int(n) for n in shape] for name, shape in value.items()}
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TypeError("expected a list with one shape per column, such as [[-1, 28, 28]]")
    for shape in value:
        if isinstance(shape, str) or not isinstance(shape, Sequence):
            raise TypeError(f"expected one shape per column, such as [[-1, 28]], not {value}")
    return [[int(n) for n in shape] for shape in value]


def _inputs(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError("expected a dict from argument names to column names")
    return {k: v if isinstance(v, str) else list(v) for k, v in value.items()}


def _dtypes(value: Any) -> Any:
    from sparkhvd.data.columns.schema import dtype_name

    def name(dtype: Any) -> str | None:
        try:
            return None if dtype is None else dtype_name(dtype)
        except InvalidArgumentError as e:
            raise TypeError(str(e)) from e  # Spark adds the name of the param to a TypeError

    if isinstance(value, Mapping):
        return {column: name(dtype) for column, dtype in value.items()}
    return [name(dtype) for dtype in value]


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError("expected a dict")
    return dict(value)


def _whole(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError("expected a whole number")
    return TypeConverters.toInt(value)


def _function(value: Any) -> Callable[..., Any]:
    if not callable(value):
        raise TypeError("expected a function")
    return value  # type: ignore[no-any-return]  # what callable() narrows to


def _any(value: Any) -> Any:
    return value


def _store(value: Any) -> Any:
    """As given, but no password of a URL stays text, which `explainParams` and a saved estimator would show."""
    if isinstance(value, (str, PathLike)) and secrets_of(text := str(fspath(value)), {}):
        return Store(text)
    return value


def _p(name: str, convert: Callable[[Any], Any], doc: str) -> Param[Any]:
    return Param(Params._dummy(), name, doc, typeConverter=convert)


# --- getters, setters and keyword arguments from the Params ---------------------------------------------------


def camel_case(name: str) -> str:
    """The name as it stands in getters and setters: "batch_size" -> "BatchSize", "outputCols" -> "OutputCols"."""
    return "".join(part[:1].upper() + part[1:] for part in name.split("_"))


def _own_params(cls: type) -> list[Param[Any]]:
    return [value for value in vars(cls).values() if isinstance(value, Param)]


def accessors(cls: T) -> T:
    """Give a class `getX()` and `setX(value)` for each Param that it declares; `setX` returns the object.

    Horovod's and Spark's names of these Params get theirs too; a name of Spark's is also an attribute that is the
    Param. Where Spark has one column and the Param a list, Spark's getter gives the one column.
    """
    for param in _own_params(cls):
        _accessors(cls, param, camel_case(param.name))
        for other, name in ACCESSORS.items():
            if name == param.name:
                _accessors(cls, param, other)
        for alias, name in ALIASES.items():
            if name == param.name:
                _accessors(cls, param, camel_case(alias), is_alias=True)
                doc = f"Spark ML's name of the Param `{name}`."
                setattr(cls, alias, property(operator.attrgetter(name), doc=doc))
    return cls


def _accessors(cls: type, param: Param[Any], camel: str, *, is_alias: bool = False) -> None:
    name = param.name

    def get(self: Any) -> Any:
        value = self._get(name)
        return value[0] if is_alias and isinstance(value, list) and len(value) == 1 else value

    def put(self: Any, value: Any) -> Any:
        if value is None:
            self.clear(self.getParam(name))
            return self
        return self._set(**{name: value})

    for prefix, function, doc in (
        ("get", get, f"The value of `{name}`, or None: {param.doc}."),
        ("set", put, f"Set `{name}` (None clears it): {param.doc}. Returns this object."),
    ):
        function.__name__ = f"{prefix}{camel}"
        function.__qualname__ = f"{cls.__name__}.{function.__name__}"
        function.__doc__ = doc
        if not hasattr(cls, function.__name__):
            setattr(cls, function.__name__, function)


class TorchParams(Params):
    """What estimator and model share: keyword arguments and readable explanations."""

    if TYPE_CHECKING:  # the accessors are made from the Params

        def __getattr__(self, name: str) -> Any: ...

    def _set_keywords(self, positional: Sequence[Any], keywords: Mapping[str, Any]) -> None:
        """Set Params from keyword arguments; None means "not given".

        Raises:
            TypeError: an argument is positional, unknown or given under two names.
        """
        if positional:
            raise TypeError(
                f"{type(self).__name__}() takes keyword arguments only, and got {short_repr(positional[0])} without "
                f"a name. Write for example {type(self).__name__}({self._example()}=...)."
            )
        values: dict[str, Any] = {}
        for given, value in keywords.items():
            name = self._param_name(given)
            if value is None:
                continue
            if name in values:
                other = next(n for n in keywords if n != given and self._param_name(n) == name)
                raise TypeError(
                    f"{type(self).__name__}(): {other!r} and {given!r} are names of the same param, {name!r}. Give one."
                )
            values[name] = value
        self._set(**values)

    def _param_name(self, given: str) -> str:
        names = [p.name for p in self.params]
        camel = {camel_case(n)[:1].lower() + camel_case(n)[1:]: n for n in names}
        name = given if given in names else ALIASES.get(given, camel.get(given, ""))
        if name not in names:
            known = difflib.get_close_matches(given, names, n=1)
            hint = f" Did you mean {known[0]!r}?" if known else ""
            hint = f" {ELSEWHERE[given]}" if given in ELSEWHERE else hint
            raise TypeError(
                f"{type(self).__name__}() got an unexpected keyword argument {given!r}.{hint}"
            )
        return name

    def _example(self) -> str:
        return "model" if self.hasParam("model") else "feature_cols"

    def setParams(self, *positional: Any, **keywords: Any) -> Any:  # noqa: N802 - Spark's name
        """Set several Params by keyword; returns this object."""
        self._set_keywords(positional, keywords)
        return self

    def explainParams(self) -> str:  # noqa: N802 - Spark's name
        """One line per Param; Horovod's Params without effect only where they are set."""
        shown = [p for p in self.params if p.name not in NO_EFFECT or self.isSet(p)]
        return "\n".join(self.explainParam(p) for p in shown)

    def explainParam(self, param: str | Param[Any]) -> str:  # noqa: N802 - Spark's name
        """Name, meaning, default and current value of a Param on one line; a model is shown by its size."""
        resolved = self._resolveParam(param)
        values = []
        if resolved in self._defaultParamMap:
            values.append(f"default: {short_repr(self._defaultParamMap[resolved])}")
        if resolved in self._paramMap:
            values.append(f"current: {short_repr(self._paramMap[resolved])}")
        return f"{resolved.name}: {resolved.doc} ({', '.join(values) or 'undefined'})"

    def _set(self, **values: Any) -> Any:
        """None clears a Param, also where it comes from a param map."""
        for name in [name for name, value in values.items() if value is None]:
            self.clear(self.getParam(name))
        return super()._set(**{n: value for n, value in values.items() if value is not None})

    def _get(self, name: str) -> Any:
        """The value of a Param, or None if it has none."""
        return self.getOrDefault(name) if self.isDefined(name) else None


def with_signature(cls: T) -> T:
    """Show a class's Params as its keyword arguments, for `help()` and editors."""
    params = [v for v in (getattr(cls, n) for n in dir(cls)) if isinstance(v, Param)]
    keyword = inspect.Parameter.KEYWORD_ONLY
    cls.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # read by inspect.signature
        [inspect.Parameter(p.name, keyword, default=None) for p in params]
    )
    return cls


@accessors
class PredictParams(TorchParams):
    """What decides how columns enter the model and how its outputs leave."""

    feature_cols = _p("feature_cols", _columns, "columns that become the model's input")
    label_cols = _p("label_cols", _columns, "columns with the labels, one per output of the model")
    input_shapes = _p(
        "input_shapes", _shapes, "shape of one row of each column, each an argument of forward"
    )
    inputs = _p("inputs", _inputs, "argument name of forward -> column or list of columns")
    feature_dtypes = _p("feature_dtypes", _dtypes, "torch dtype by feature column")
    decoders = _p(
        "decoders",
        _mapping,
        "column -> function of a bytes, str or array (or dict) -> number or array",
    )
    collate_fn = _p("collate_fn", _mapping, "column -> function of a batch's rows -> model's input")
    sparse_cols = _p(
        "sparse_cols", _columns, "vector columns kept sparse; default those above 65,536 dimensions"
    )
    handle_invalid = _p(
        "handle_invalid",
        _any,
        "null, NaN, infinity, out of range: 'error', 'skip', or a dict from column to a number",
    )
    outputCols = _p("outputCols", _columns, "output columns; default <label>__output")  # noqa: N815 - Spark's
    predictionCol = _p(  # noqa: N815 - Spark's name
        "predictionCol",
        TypeConverters.toString,
        "column for the class or value as a double; '' = none",
    )
    probabilityCol = _p(  # noqa: N815 - Spark's name
        "probabilityCol", TypeConverters.toString, "column for a vector of probabilities; '' = none"
    )
    rawPredictionCol = _p(  # noqa: N815 - Spark's name
        "rawPredictionCol",
        TypeConverters.toString,
        "column for the model's output as a vector; '' = none",
    )
    use_gpu = _p(
        "use_gpu",
        TypeConverters.toBoolean,
        "a GPU per rank, and in transform; default where Spark gives tasks GPUs",
    )
    output_fn = _p("output_fn", _function, "the model's output -> (rows, classes) probabilities")
    store = _p("store", _store, "Store where data, checkpoints and weights live")

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(
            handle_invalid="error", predictionCol="", probabilityCol="", rawPredictionCol=""
        )


@accessors
class HorovodParams(TorchParams):
    """Params of Horovod that have no effect here; setting one warns, once per estimator and its copies."""

    backend = _p("backend", _any, "no effect")
    partitions_per_process = _p("partitions_per_process", _any, "no effect")
    reader_pool_type = _p("reader_pool_type", _any, "no effect")
    mp_start_method = _p("mp_start_method", _any, "no effect")
    tensorflow_dataset_prefetch_buffer_size = _p(
        "tensorflow_dataset_prefetch_buffer_size", _any, "no effect"
    )
    shuffle_buffer_size = _p("shuffle_buffer_size", _any, "no effect")
    continuous_cols = _p("continuous_cols", _any, "no effect")
    categorical_cols = _p("categorical_cols", _any, "no effect")
    data_module = _p("data_module", _any, "no effect")
    compress_sparse_cols = _p("compress_sparse_cols", _any, "no effect")
    transformation_edit_fields = _p("transformation_edit_fields", _any, "no effect")
    transformation_removed_fields = _p("transformation_removed_fields", _any, "no effect")

    def __init__(self) -> None:
        super().__init__()
        self._warned: set[str] = set()  # a copy of the estimator has the same set

    def _set(self, **values: Any) -> Any:
        """Set Params; warns about those without effect."""
        for name, value in values.items():
            if name in NO_EFFECT and value is not None and name not in self._warned:
                self._warned.add(name)
                warnings.warn(f"{name} has no effect in sparkhvd: {NO_EFFECT[name]}.", stacklevel=4)
        return super()._set(**values)


@accessors
class TrainParams(HorovodParams, PredictParams):
    """What a fit takes besides."""

    model = _p("model", _any, "torch.nn.Module to train, or a function that makes one")
    optimizer = _p(
        "optimizer", _any, "optimizer over the model's parameters, or a function of parameters"
    )
    loss = _p(
        "loss", _any, "(output, label) -> scalar mean or (scalar mean, weight); or one per label"
    )
    loss_constructors = _p(
        "loss_constructors", _any, "functions that return the loss; instead of loss"
    )
    learning_rate = _p(
        "learning_rate", TypeConverters.toFloat, "of all groups of the optimizer; default theirs"
    )
    weight_decay = _p(
        "weight_decay", TypeConverters.toFloat, "of all groups of the optimizer; default theirs"
    )
    lr_scaling = _p(
        "lr_scaling", TypeConverters.toString, "'linear' multiplies learning rates by num_proc"
    )
    gradient_compression = _p(
        "gradient_compression", _any, "of hvd.Compression: how gradients travel"
    )
    loss_weights = _p("loss_weights", TypeConverters.toListFloat, "factor of each label's loss")
    sample_weight_col = _p(
        "sample_weight_col", TypeConverters.toString, "column with a weight per row"
    )
    label_shapes = _p("label_shapes", _shapes, "shape of one row of each label column")
    label_dtypes = _p("label_dtypes", _dtypes, "torch dtype by label column")
    metrics = _p(
        "metrics",
        _any,
        "'accuracy', 'mse', 'mae', functions of (output, label) or torchmetrics; or a dict",
    )
    batch_size = _p("batch_size", _whole, "rows per rank and step")
    val_batch_size = _p("val_batch_size", _whole, "rows per rank and step of validation")
    epochs = _p("epochs", _whole, "passes over the data")
    num_proc = _p("num_proc", _whole, "number of ranks; default every GPU or task slot")
    validation = _p(
        "validation",
        _any,
        "fraction of the rows, column that is true for validation rows, or DataFrame",
    )
    reader = _p(
        "reader",
        TypeConverters.toString,
        "of fit_on_parquet: 'pyarrow', or 'petastorm' for data sets that it encoded",
    )
    num_workers = _p("num_workers", _whole, "threads per rank that run decoders")
    val_reader_num_workers = _p(
        "val_reader_num_workers", _whole, "the same for validation; default num_workers"
    )
    shuffle = _p("shuffle", TypeConverters.toBoolean, "a new order of the rows each epoch")
    shuffle_bytes = _p(
        "shuffle_bytes",
        _whole,
        "data up to this many bytes are held in memory and permuted uniformly",
    )
    inmemory_cache_all = _p(
        "inmemory_cache_all",
        TypeConverters.toBoolean,
        "keep all data in memory, whatever they take",
    )
    drop_last = _p(
        "drop_last", TypeConverters.toBoolean, "leave out the last step if it is not full"
    )
    random_seed = _p("random_seed", _whole, "decides split, order and dropout; default random")
    gradient_clip_norm = _p(
        "gradient_clip_norm", TypeConverters.toFloat, "largest norm of all gradients together"
    )
    gradient_clip_value = _p(
        "gradient_clip_value", TypeConverters.toFloat, "largest absolute value in a gradient"
    )
    accumulate = _p("accumulate", _whole, "batches per rank whose gradients make one step")
    precision = _p("precision", TypeConverters.toString, "'32', 'bf16-mixed' or '16-mixed'")
    lr_scheduler = _p(
        "lr_scheduler", _function, "(optimizer) or (optimizer, total_steps) -> scheduler"
    )
    lr_scheduler_interval = _p(
        "lr_scheduler_interval", TypeConverters.toString, "it moves after each 'epoch' or 'step'"
    )
    train_steps_per_epoch = _p(
        "train_steps_per_epoch", _whole, "at most so many steps per epoch; default all rows"
    )
    validation_steps_per_epoch = _p(
        "validation_steps_per_epoch", _whole, "the same for batches of validation"
    )
    monitor = _p(
        "monitor",
        TypeConverters.toString,
        "key of the history that tells the best epoch; default val_loss, else loss",
    )
    monitor_mode = _p("monitor_mode", TypeConverters.toString, "'min' or 'max' of it is best")
    return_model = _p(
        "return_model", TypeConverters.toString, "weights of the 'last' or the 'best' epoch"
    )
    restore_best = _p("restore_best", TypeConverters.toBoolean, "the same as return_model='best'")
    early_stopping = _p(
        "early_stopping",
        _mapping,
        "dict with patience, min_delta, monitor, mode: end when it stops improving",
    )
    terminate_on_nan = _p(
        "terminate_on_nan",
        TypeConverters.toBoolean,
        "end with an error at a loss that is no number",
    )
    compile = _p("compile", TypeConverters.toBoolean, "run the model through torch.compile")
    train_step = _p(
        "train_step", _any, "(model, batch, ctx) -> loss of a batch; instead of forward and loss"
    )
    validation_step = _p(
        "validation_step", _any, "(model, batch, ctx) -> loss of a validation batch"
    )
    train_fn = _p("train_fn", _any, "(ctx): the whole training loop")
    train_minibatch_fn = _p("train_minibatch_fn", _any, "Horovod's: give train_step")
    callbacks = _p("callbacks", _any, "sparkhvd.estimator.Callback objects")
    transformation_fn = _p(
        "transformation_fn", _any, "a dict of one row's values in and out, before training"
    )
    batch_transform_fn = _p(
        "batch_transform_fn", _any, "a dict of arrays of a batch in and out, before training"
    )
    verbose = _p("verbose", _whole, "0 prints nothing; 1 prints a line per epoch")
    progress = _p("progress", _function, "called on the driver with each epoch's record")
    run_id = _p(
        "run_id", TypeConverters.toString, "name of the run in the store; an unfinished one resumes"
    )
    warm_start = _p(
        "warm_start",
        TypeConverters.toBoolean,
        "a finished run_id trains `epochs` more epochs from its weights",
    )
    checkpoint_interval_s = _p(
        "checkpoint_interval_s",
        TypeConverters.toFloat,
        "at most so many seconds of steps are repeated after a loss; also saved after each epoch",
    )
    keep_checkpoints = _p(
        "keep_checkpoints",
        _whole,
        "epochs whose checkpoints stay after the fit; 0: nothing of the run; not given: 1 with a run_id, else 0",
    )
    settings = _p("settings", _any, "sparkhvd.Settings of the engine")
    max_retries = _p("max_retries", _whole, "relaunches after a lost process, executor or host")
    start_timeout = _p(
        "start_timeout", TypeConverters.toFloat, "longest wait for task slots in seconds"
    )
    data_key = _p(
        "data_key",
        TypeConverters.toString,
        "equal keys mean equal data: reuse what was materialized",
    )
    keep_data = _p(
        "keep_data", TypeConverters.toBoolean, "keep materialized data until Store.clean()"
    )

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(
            batch_size=32,
            epochs=1,
            metrics=[],
            reader="pyarrow",
            num_workers=1,
            shuffle=True,
            shuffle_bytes=1 << 30,
            inmemory_cache_all=False,
            drop_last=False,
            restore_best=False,
            accumulate=1,
            precision="32",
            lr_scheduler_interval="epoch",
            monitor_mode="min",
            terminate_on_nan=False,
            compile=False,
            verbose=1,
            max_retries=2,
            warm_start=False,
            checkpoint_interval_s=300.0,
            keep_data=False,
        )


def short_repr(value: Any, limit: int = 80) -> str:
    """A value on one short line: a module by class and size, an optimizer by class, a function by name."""
    if isinstance(value, type):
        return f"<{value.__module__}.{value.__qualname__}>"
    if hasattr(value, "parameters") and hasattr(value, "state_dict"):
        # A lazy module's parameters have no size yet.
        count = sum(0 if hasattr(p, "materialize") else p.numel() for p in value.parameters())
        return f"<{type(value).__name__}: {count:,} parameters>"
    if hasattr(value, "param_groups"):
        groups = len(value.param_groups)
        return f"<{type(value).__name__}: {groups} parameter group{'s' * (groups != 1)}>"
    if callable(value) and hasattr(value, "__qualname__"):
        return f"<{value.__module__}.{value.__qualname__}>"
    if isinstance(value, Mapping):
        text = "{" + ", ".join(f"{k!r}: {short_repr(v, limit)}" for k, v in value.items()) + "}"
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        text = "[" + ", ".join(short_repr(v, limit) for v in value) + "]"
    else:
        text = " ".join(repr(value).split())
    return text if len(text) <= limit else text[: limit - 3] + "..."
