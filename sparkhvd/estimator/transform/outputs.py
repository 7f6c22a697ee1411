"""Output columns of a transform: names and kinds; checked on the driver."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparkhvd.data.columns import heads
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.estimator.params.options import PredictOptions
from sparkhvd.estimator.transform.worker import Output
from sparkhvd.training.modules.fitted import Fitted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["output_columns"]


def output_columns(fitted: Fitted, options: PredictOptions, df: DataFrame) -> tuple[Output, ...]:
    """Decide on the columns to add.

    Raises:
        InvalidArgumentError: there are too many or too few names, one exists already, or its kind cannot be computed.
    """
    names = options.outputCols
    if names is None:
        names = [f"{label}__output" for label in options.label_cols or fitted.labels]
    if len(names) != len(fitted.widths):
        raise InvalidArgumentError(
            f"outputCols has {len(names)} names ({names}); the model has {len(fitted.widths)} outputs."
        )
    outputs = [
        Output(name, "output", i, is_vector=width > 1)
        for i, (name, width) in enumerate(zip(names, fitted.widths, strict=True))
        if name
    ]
    outputs += _spark_outputs(fitted, options)
    _check_new(outputs, df)
    return tuple(outputs)


def _check_new(outputs: list[Output], df: DataFrame) -> None:
    """Refuse names that the DataFrame has already, or that are given twice."""
    conf = df.sparkSession.conf
    minds_case = (conf.get("spark.sql.caseSensitive", "false") or "").lower() == "true"
    existing = {n if minds_case else n.lower(): n for n in df.columns}
    for output in outputs:
        key = output.name if minds_case else output.name.lower()
        if key in existing:
            other = f" as {existing[key]!r}" if existing[key] != output.name else ""
            raise InvalidArgumentError(
                f"transform would add column {output.name!r}, which exists already{other}. Drop it first, or "
                "set another name (outputCols, predictionCol, probabilityCol, rawPredictionCol)."
            )
        existing[key] = output.name


def _spark_outputs(fitted: Fitted, options: PredictOptions) -> list[Output]:
    """List the columns that Spark ML's own names ask for."""
    wanted = (
        ("predictionCol", options.predictionCol, "prediction"),
        ("probabilityCol", options.probabilityCol, "probability"),
        ("rawPredictionCol", options.rawPredictionCol, "raw"),
    )
    outputs = []
    for param, name, kind in wanted:
        if not name:
            continue
        if len(fitted.widths) > 1:
            raise InvalidArgumentError(
                f"{param} is {name!r}, and the model has {len(fitted.widths)} outputs, so it is not clear which "
                "is meant. Use outputCols."
            )
        has_probability = fitted.links[0] != heads.IDENTITY or options.output_fn is not None
        if kind == "probability" and not has_probability:
            raise InvalidArgumentError(
                f"probabilityCol is {name!r}, and the loss of the training does not say how probabilities "
                "follow from outputs. Set output_fn to a function from an output to (rows, classes) "
                "probabilities."
            )
        outputs.append(Output(name, kind, 0, is_vector=kind != "prediction"))
    return outputs
