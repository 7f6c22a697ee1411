"""Every Spark ML Param of the estimator and its model, one per line, with type and meaning.

To add one: a line here, and the place that uses it. Getters, setters, keyword arguments and `explainParams` come
from the line.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from pyspark.ml.param import Param, Params, TypeConverters

from sparkhvd.errors import InvalidArgumentError

__all__ = ["PredictParams", "TorchParams", "TrainParams", "short_repr"]

T = TypeVar("T", bound=type)


# --- type converters: what they raise becomes "Invalid param value given for param ..." -----------------------


def _columns(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else TypeConverters.toListString(value)


def _shapes(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: [int(n) for n in shape] for name, shape in value.items()}
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TypeError("expected a list with one shape per feature column, such as [[-1, 28, 28]]")
    for shape in value:
        if isinstance(shape, str) or not isinstance(shape, Sequence):
            raise TypeError(
                f"expected one shape per feature column, such as [[-1, 28]], not {value}"
            )
    return [[int(n) for n in shape] for shape in value]


def _inputs(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError("expected a dict from argument names to column names")
    return {k: v if isinstance(v, str) else list(v) for k, v in value.items()}


def _dtypes(value: Any) -> Any:
    from sparkhvd.estimator.schema import dtype_name

    def name(dtype: Any) -> str | None:
        try:
            return None if dtype is None else dtype_name(dtype)
        except InvalidArgumentError as e:
            raise TypeError(str(e)) from e  # Spark adds the name of the param to a TypeError

    if isinstance(value, Mapping):
        return {column: name(dtype) for column, dtype in value.items()}
    return [name(dtype) for dtype in value]


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


def _p(name: str, convert: Callable[[Any], Any], doc: str) -> Param[Any]:
    return Param(Params._dummy(), name, doc, typeConverter=convert)


# --- getters, setters and keyword arguments from the Params ---------------------------------------------------


def camel_case(name: str) -> str:
    """The name as it stands in getters and setters: "batch_size" -> "BatchSize", "outputCols" -> "OutputCols"."""
    return "".join(part[:1].upper() + part[1:] for part in name.split("_"))


def _own_params(cls: type) -> list[Param[Any]]:
    return [value for value in vars(cls).values() if isinstance(value, Param)]


def accessors(cls: T) -> T:
    """Give a class `getX()` and `setX(value)` for each Param that it declares; `setX` returns the object."""
    for param in _own_params(cls):
        name = param.name

        def get(self: Any, name: str = name) -> Any:
            return self._get(name)

        def put(self: Any, value: Any, name: str = name) -> Any:
            if value is None:
                self.clear(self.getParam(name))
                return self
            return self._set(**{name: value})

        for prefix, function, doc in (
            ("get", get, f"The value of `{name}`, or None: {param.doc}."),
            ("set", put, f"Set `{name}` (None clears it): {param.doc}. Returns this object."),
        ):
            function.__name__ = f"{prefix}{camel_case(name)}"
            function.__qualname__ = f"{cls.__name__}.{function.__name__}"
            function.__doc__ = doc
            if not hasattr(cls, function.__name__):
                setattr(cls, function.__name__, function)
    return cls


# Spark ML's names for what has another name here.
ALIASES = {
    "featuresCol": "feature_cols",
    "labelCol": "label_cols",
    "weightCol": "sample_weight_col",
    "validationIndicatorCol": "validation",
    "maxIter": "epochs",
    "seed": "random_seed",
}


class TorchParams(Params):
    """What estimator and model share: keyword arguments and readable explanations."""

    if TYPE_CHECKING:  # the accessors are made from the Params

        def __getattr__(self, name: str) -> Any: ...

    def _set_keywords(self, keywords: Mapping[str, Any]) -> None:
        """Set Params from keyword arguments; None means "not given".

        Raises:
            TypeError: an argument is unknown or given under two names.
        """
        values: dict[str, Any] = {}
        for given, value in keywords.items():
            name = self._param_name(given)
            if value is None:
                continue
            if name in values:
                raise TypeError(
                    f"{type(self).__name__}(): {given!r} is another name of {name!r}, which is given too."
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
            raise TypeError(
                f"{type(self).__name__}() got an unexpected keyword argument {given!r}.{hint}"
            )
        return name

    def setParams(self, **keywords: Any) -> Any:  # noqa: N802 - Spark's name
        """Set several Params by keyword; returns this object."""
        self._set_keywords(keywords)
        return self

    def explainParam(self, param: str | Param[Any]) -> str:  # noqa: N802 - Spark's name
        """Name, meaning, default and current value of a Param on one line; a model is shown by its size."""
        resolved = self._resolveParam(param)
        values = []
        if resolved in self._defaultParamMap:
            values.append(f"default: {short_repr(self._defaultParamMap[resolved])}")
        if resolved in self._paramMap:
            values.append(f"current: {short_repr(self._paramMap[resolved])}")
        return f"{resolved.name}: {resolved.doc} ({', '.join(values) or 'undefined'})"

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
    output_fn = _p("output_fn", _function, "the model's output -> (rows, classes) probabilities")
    store = _p("store", _any, "Store where data, checkpoints and weights live")

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(predictionCol="", probabilityCol="", rawPredictionCol="")


@accessors
class TrainParams(PredictParams):
    """What a fit takes besides."""

    model = _p("model", _any, "torch.nn.Module to train; it is not modified")
    optimizer = _p(
        "optimizer", _any, "optimizer over the model's parameters, or a function of parameters"
    )
    loss = _p(
        "loss", _any, "(output, label) -> scalar mean or (scalar mean, weight); or one per label"
    )
    loss_weights = _p("loss_weights", TypeConverters.toListFloat, "factor of each label's loss")
    sample_weight_col = _p(
        "sample_weight_col", TypeConverters.toString, "column with a weight per row"
    )
    label_dtypes = _p("label_dtypes", _dtypes, "torch dtype by label column")
    metrics = _p(
        "metrics", _any, "'accuracy', 'mse', 'mae' or functions of (output, label); or a dict"
    )
    batch_size = _p("batch_size", _whole, "rows per rank and step")
    val_batch_size = _p("val_batch_size", _whole, "rows per rank and step of validation")
    epochs = _p("epochs", _whole, "passes over the data")
    num_proc = _p("num_proc", _whole, "number of ranks; default every task slot")
    validation = _p(
        "validation", _any, "fraction of the rows, or column that is true for validation rows"
    )
    shuffle = _p("shuffle", TypeConverters.toBoolean, "a new order of the rows each epoch")
    shuffle_bytes = _p(
        "shuffle_bytes", _whole, "data up to this many bytes per rank are permuted uniformly"
    )
    drop_last = _p(
        "drop_last", TypeConverters.toBoolean, "leave out the last step if it is not full"
    )
    random_seed = _p("random_seed", _whole, "decides split, order and dropout; default random")
    gradient_clip_norm = _p(
        "gradient_clip_norm", TypeConverters.toFloat, "largest norm of all gradients together"
    )
    lr_scheduler = _p("lr_scheduler", _function, "optimizer -> scheduler, stepped after each epoch")
    restore_best = _p(
        "restore_best",
        TypeConverters.toBoolean,
        "return the weights of the lowest val_loss, not the last",
    )
    verbose = _p("verbose", _whole, "0 prints nothing; 1 prints a line per epoch")
    progress = _p("progress", _function, "called on the driver with each epoch's record")
    run_id = _p(
        "run_id", TypeConverters.toString, "name of the run in the store; an unfinished one resumes"
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
            shuffle=True,
            shuffle_bytes=1 << 30,
            drop_last=False,
            restore_best=False,
            verbose=1,
            max_retries=2,
            keep_data=False,
        )


def short_repr(value: Any, limit: int = 80) -> str:
    """A value on one short line: a module by class and size, an optimizer by class, a function by name."""
    if hasattr(value, "parameters") and hasattr(value, "state_dict"):
        count = sum(p.numel() for p in value.parameters())
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
