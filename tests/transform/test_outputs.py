"""Columns that a transform adds: their selection, order, and Spark ML attributes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from sparkhvd import InvalidArgumentError, TorchModel
from sparkhvd.data.columns.binding import bind_inputs
from sparkhvd.data.columns.labels import is_of_row, known_kinds
from sparkhvd.data.columns.schema import Column, DataSchema
from sparkhvd.estimator.fitting.request import FitRequest
from sparkhvd.estimator.params.generated import PredictOptions
from sparkhvd.estimator.transform.outputs import output_columns
from sparkhvd.estimator.transform.worker import Output
from sparkhvd.training.modules.fitted import TrainedState

pytestmark = pytest.mark.pure

CLASSES = ["y__output", "rawPrediction", "probability", "prediction"]
VALUE = ["y__output", "prediction"]
ALONE = ["y__output"]


def outputs(
    links: tuple[str, ...], widths: tuple[int, ...], existing: tuple[str, ...] = (), **params: Any
) -> list[Output]:
    """Decide on the columns for a DataFrame that has `existing` ones."""
    module, column = nn.Linear(2, 1), Column("x", "vector", "float32", (2,), "vector", "float32")
    fitted = TrainedState(
        module=module,
        columns=(column,),
        labels=("y", "z")[: len(links)],
        inputs=bind_inputs(module, DataSchema((column,), ())),
        links=links,
        widths=widths,
    )
    conf = SimpleNamespace(get=lambda name, default: default)
    df: Any = SimpleNamespace(columns=["x", *existing], sparkSession=SimpleNamespace(conf=conf))
    options = TorchModel(**params)._read_options(PredictOptions)
    return list(output_columns(fitted, options, df))


@pytest.mark.parametrize(
    ("link", "width", "params", "expected"),
    [
        ("softmax", 3, {}, CLASSES),
        ("sigmoid", 1, {}, CLASSES),
        ("value", 1, {}, VALUE),
        # Their meaning is unknown.
        ("identity", 1, {}, ALONE),
        ("identity", 3, {}, ALONE),
        ("softmax", 1, {}, ALONE),
        ("sigmoid", 3, {}, ALONE),
        ("value", 3, {}, ALONE),
        # Only the function knows how many elements it makes.
        ("softmax", 3, {"output_fn": print}, CLASSES),
        ("sigmoid", 1, {"output_fn": print}, CLASSES),
        ("value", 1, {"output_fn": print}, ALONE),
        # A name that was set always counts, even the default name.
        ("identity", 1, {"predictionCol": "prediction"}, VALUE),
        ("identity", 3, {"rawPredictionCol": "r"}, ["y__output", "r"]),
        (
            "softmax",
            3,
            {"predictionCol": "p", "probabilityCol": ""},
            ["y__output", "rawPrediction", "p"],
        ),
        ("softmax", 3, {"outputCols": [""]}, CLASSES[1:]),
        ("softmax", 3, {"label_cols": "own"}, ["own__output", *CLASSES[1:]]),
    ],
)
def test_output_columns_are_added_if_the_loss_defines_their_meaning(
    link: str, width: int, params: dict[str, Any], expected: list[str]
) -> None:
    assert [o.name for o in outputs((link,), (width,), **params)] == expected


def test_models_with_several_outputs_have_no_prediction_column() -> None:
    assert [o.name for o in outputs(("softmax", "value"), (3, 1))] == ["y__output", "z__output"]
    with pytest.raises(
        InvalidArgumentError, match="predictionCol is 'prediction', but the model has 2 outputs"
    ):
        outputs(("softmax", "value"), (3, 1), predictionCol="prediction")


@pytest.mark.parametrize("link", ["identity", "value"])
def test_probabilities_not_defined_by_a_loss_require_an_output_function(link: str) -> None:
    with pytest.raises(InvalidArgumentError, match="does not define how to compute probabilities"):
        outputs((link,), (3,), probabilityCol="p")
    assert outputs((link,), (3,), probabilityCol="p", output_fn=print)[-1].name == "p"


@pytest.mark.parametrize(
    ("link", "width", "sizes"),
    [("softmax", 3, [3, 3, 3, 3]), ("sigmoid", 1, [1, 2, 2, 2]), ("value", 1, [1, 0])],
)
def test_output_columns_have_known_widths_and_classes(
    link: str, width: int, sizes: list[int]
) -> None:
    found = outputs((link,), (width,))
    assert [o.size for o in found] == sizes
    kinds = ["output"] if width > 1 else []
    assert {o.kind for o in found if o.is_vector} == {*kinds, *known_kinds(link, width)} - {
        "prediction"
    }


def test_widths_of_a_custom_output_function_are_unknown() -> None:
    sizes = {o.name: o.size for o in outputs(("softmax",), (3,), output_fn=print)}
    assert sizes == {"y__output": 3, "rawPrediction": 3, "probability": 0, "prediction": 0}


@pytest.mark.parametrize(
    ("taken", "remedy"),
    [("PREDICTION", "predictionCol=''"), ("y__output", "outputCols with '' at its position")],
)
def test_error_of_an_existing_column_explains_how_to_omit_it(taken: str, remedy: str) -> None:
    with pytest.raises(InvalidArgumentError, match="which exists already") as wrong:
        outputs(("value",), (1,), existing=(taken,))
    assert f"Drop the existing column, set another name, or omit the output: {remedy}." in str(
        wrong.value
    )
    left_out: Any = {"predictionCol": ""} if taken == "PREDICTION" else {"outputCols": [""]}
    assert outputs(("value",), (1,), existing=(taken,), **left_out)


INDEX = Column("y", "scalar", "int64", (), "int", "int64")
PIXELS = Column("y", "array", "int64", (6,), "array<int>", "int64")
SHARES = Column("y", "array", "float32", (3,), "array<double>", "float32")
TAGS = Column("y", "array", "int64", (1,), "array<int>", "int64", is_collated=True)


def test_per_row_labels_are_distinguished_from_per_element_labels() -> None:
    assert [is_of_row(c) for c in (INDEX, PIXELS, SHARES, TAGS)] == [True, False, True, False]


@pytest.mark.parametrize(
    ("own_step", "label", "expected"),
    [(False, INDEX, True), (False, PIXELS, False), (True, INDEX, False)],
)
def test_a_loss_does_not_define_outputs_with_a_custom_train_step(
    own_step: bool, label: Column, expected: bool
) -> None:
    user = SimpleNamespace(computes_loss=own_step)
    request: Any = SimpleNamespace(program=SimpleNamespace(user=user))
    assert FitRequest.tells_outputs(request, [label]) is expected
