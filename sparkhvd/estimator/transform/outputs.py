"""Decide names and kinds of the output columns of a transform, on the driver."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sparkhvd.data.columns import labels
from sparkhvd.errors import InvalidArgumentError, listed
from sparkhvd.estimator.params.generated import PredictOptions
from sparkhvd.estimator.transform.worker import Output
from sparkhvd.training.modules.fitted import TrainedState

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


# Param with the name of a Spark ML column -> kind of the column, in the order of the columns.
OUTPUT_PARAMS = {
    "rawPredictionCol": "raw",
    "probabilityCol": "probability",
    "predictionCol": "prediction",
}


def output_columns(
    fitted: TrainedState, options: PredictOptions, df: DataFrame
) -> tuple[Output, ...]:
    """Select the columns to add to a DataFrame.

    Raises the errors of `named_outputs`, and an error if a name exists already.
    """
    outputs = named_outputs(fitted, options)
    _check_new(outputs, df)
    return outputs


def named_outputs(fitted: TrainedState, options: PredictOptions) -> tuple[Output, ...]:
    """Select the columns to add, independent of the DataFrame.

    Raises:
        InvalidArgumentError: there are too many or too few names, or a kind cannot be computed.
    """
    names = options.outputCols
    if names is None:
        names = _default_names(options.label_cols or fitted.labels, len(fitted.widths))
    check_count(names, fitted.widths)
    outputs = [
        Output(name, "output", i, is_vector=width != 1, size=width)
        for i, (name, width) in enumerate(zip(names, fitted.widths, strict=True))
        if name
    ]
    outputs += _spark_outputs(fitted, options)
    return tuple(outputs)


def check_count(names: Sequence[str], widths: Sequence[int]) -> None:
    """Raise InvalidArgumentError unless `outputCols` has a name per output."""
    if len(names) != len(widths):
        raise InvalidArgumentError(
            f"outputCols has {len(names)} names ({listed(map(repr, names))}), but the model has {len(widths)} outputs. Give a name per output; '' omits the output."
        )


def _default_names(labels: Sequence[str], count: int) -> list[str]:
    """Name outputs by their labels, or by number if there is not one label per output."""
    if len(labels) == count:
        return [f"{label}__output" for label in labels]
    return ["output"] if count == 1 else [f"output_{i}" for i in range(count)]


def _check_new(outputs: Sequence[Output], df: DataFrame) -> None:
    """Reject duplicate names and names of existing columns."""
    conf = df.sparkSession.conf
    minds_case = (conf.get("spark.sql.caseSensitive", "false") or "").lower() == "true"
    existing = {n if minds_case else n.lower(): n for n in df.columns}
    for output in outputs:
        key = output.name if minds_case else output.name.lower()
        if key in existing:
            other = f" as {existing[key]!r}" if existing[key] != output.name else ""
            raise InvalidArgumentError(
                f"transform would add column {output.name!r}, which exists already{other}. Drop the existing column, set another "
                f"name, or omit the output: {_left_out(output)}."
            )
        existing[key] = output.name


def _left_out(output: Output) -> str:
    """Format the argument for omitting a column."""
    names = [param for param, kind in OUTPUT_PARAMS.items() if kind == output.kind]
    return f"{names[0]}=''" if names else "outputCols with '' at its position"


def _spark_outputs(fitted: TrainedState, options: PredictOptions) -> list[Output]:
    """List the columns with Spark ML's names, by default the columns defined by the loss."""
    known = _known_kinds(fitted, options)
    outputs = []
    for param, kind in OUTPUT_PARAMS.items():
        name = getattr(options, param)
        if name and (param in options.explicit or kind in known):
            _check_meaning(param, kind, fitted, options)
            size = _size(kind, fitted, options)
            outputs.append(Output(name, kind, 0, is_vector=kind != "prediction", size=size))
    return outputs


def _check_meaning(param: str, kind: str, fitted: TrainedState, options: PredictOptions) -> None:
    name = getattr(options, param)
    if len(fitted.widths) > 1:
        raise InvalidArgumentError(
            f"{param} is {name!r}, but the model has {len(fitted.widths)} outputs, so it is not clear which "
            "output is meant. Use outputCols."
        )
    has_probability = fitted.output_links[0] in labels.WITH_PROBABILITY or options.output_fn
    thresholds = options.thresholds if kind == "prediction" else None
    if (kind == "probability" or thresholds) and not has_probability:
        asked = f"thresholds is {thresholds}" if thresholds else f"probabilityCol is {name!r}"
        raise InvalidArgumentError(
            f"{asked}, but the loss of the training does not define how to compute "
            "probabilities from outputs. Set output_fn to a function from an output to (rows, classes) "
            "probabilities."
        )
    num_classes = _size(kind, fitted, options)
    if thresholds and num_classes not in (0, len(thresholds)):
        raise InvalidArgumentError(
            f"thresholds has {len(thresholds)} numbers, but the model has {num_classes} classes. Give one number per class."
        )


def _size(kind: str, fitted: TrainedState, options: PredictOptions) -> int:
    """Count the elements of a vector, or the classes of a prediction, or return 0 for a value, or if unknown."""
    if kind != "raw" and options.output_fn is not None:
        return 0
    (width,) = fitted.widths
    num_classes = labels.num_classes(fitted.output_links[0], width)
    return num_classes if kind == "prediction" else num_classes or width


def _known_kinds(fitted: TrainedState, options: PredictOptions) -> tuple[str, ...]:
    """List the kinds of columns defined by the loss. They are added by default."""
    if len(fitted.widths) > 1:
        return ()
    link = fitted.output_links[0]
    # The user's output_fn returns probabilities if there are classes; for a value its result has no known meaning.
    is_known = options.output_fn is None or link != labels.VALUE
    return labels.known_kinds(link, fitted.widths[0]) if is_known else ()
