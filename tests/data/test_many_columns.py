"""Tables with 10,000 columns: messages stay short, and columns are found without a search."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pyspark.sql import types as T  # noqa: N812 - Spark's own custom
from torch import nn

import sparkhvd.torch as hvd
from sparkhvd import TorchModel
from sparkhvd.data.columns.binding import Argument, InputBinding, bind_inputs
from sparkhvd.data.columns.check import check_schema
from sparkhvd.data.columns.labels import LabelBinding
from sparkhvd.data.columns.schema import Column, DataSchema
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.estimator.fitting.on_parquet import _refuse_encoded
from sparkhvd.estimator.fitting.request import _HistoryKeys
from sparkhvd.estimator.params.generated import PredictOptions
from sparkhvd.estimator.transform.binding import functions_of
from sparkhvd.estimator.transform.outputs import check_count
from sparkhvd.training.step import Step
from sparkhvd.training.user_code.transformations import Transformations

pytestmark = pytest.mark.pure

NUMBER = 10_000
NAMES = [f"column_{i}" for i in range(NUMBER)]
COLUMNS = tuple(Column(n, "scalar", "float32", (), "double", "float32") for n in NAMES)
ROW = {name: np.zeros(2, np.float32) for name in NAMES}


def model(**options: Any) -> TorchModel:
    return TorchModel.from_module(
        nn.Linear(NUMBER, 1), widths=[1], feature_cols=NAMES, label_cols=["y"], **options
    )


def check(**options: Any) -> None:
    fields = [T.StructField(name, T.DoubleType()) for name in NAMES]
    check_schema(T.StructType(fields), feature_cols=NAMES[1:], label_cols=[NAMES[0]], **options)


def fail(values: Any) -> Any:
    raise ValueError("no")


def first_batch() -> None:
    batch = SimpleNamespace(num_rows=2, columns=ROW)
    labels = LabelBinding(("y",), ("float32",), ("unknown",), (False,), ((),))
    parts = {"model": nn.Identity(), "forward": lambda *_: fail(0), "program": None}
    step: Any = SimpleNamespace(spec=SimpleNamespace(labels=labels), **parts)
    hvd.init()
    try:
        Step.first_forward(step, batch, None)  # type: ignore[arg-type]
    finally:
        hvd.shutdown()


def encoded() -> None:
    fields = [T.StructField(name, T.BinaryType()) for name in NAMES]
    dataset: Any = SimpleNamespace(
        url="data", metadata={b"dataset-toolkit.unischema.v1": b""}, schema=fields
    )
    _refuse_encoded(dataset, NAMES)


MESSAGES: dict[str, Callable[[], Any]] = {
    "first batch": first_batch,
    "predict": lambda: model().local().predict({n: [0.0] * (1 + (n == NAMES[3])) for n in NAMES}),
    "handle_invalid": lambda: check(handle_invalid=dict.fromkeys(NAMES[1:], "skp")),
    "feature_dtypes": lambda: check(feature_dtypes=["float32"] * (NUMBER + 7)),
    "label_dtypes": lambda: check_schema(
        T.StructType([T.StructField("x", T.DoubleType())]),
        feature_cols=["x"],
        label_cols=[],
        label_dtypes=dict.fromkeys(NAMES, "float32"),
    ),
    "feature_cols": lambda: check_schema(
        T.StructType([]),
        feature_cols=dict.fromkeys(NAMES),  # type: ignore[arg-type]
        label_cols=["y"],
    ),
    "input_shapes": lambda: bind_inputs(
        nn.Linear(NUMBER, 1), DataSchema(COLUMNS, ()), input_shapes=dict.fromkeys(NAMES, [1])
    ),
    "decoders": lambda: functions_of(
        SimpleNamespace(columns=[SimpleNamespace(name=n, has_decoder=True) for n in NAMES]),  # type: ignore[arg-type]
        PredictOptions(),
    ),
    "row function": lambda: Transformations(row=fail).run(ROW, is_training=True),
    "names of rows": lambda: Transformations(row=changing()).run(ROW, is_training=True),
    "outputCols": lambda: check_count(NAMES, [1]),
    "history": lambda: model(history=[{"epoch": 1, **dict.fromkeys(NAMES, 1.0)}]).plot(["z"]),
    "monitor": lambda: _HistoryKeys(tuple(NAMES), is_open=False).check("monitor", "z"),
    "petastorm": encoded,
}


def changing() -> Callable[[Any], Any]:
    calls: list[int] = []

    def change(row: dict[str, Any]) -> dict[str, Any]:
        calls.append(1)
        return {f"{name}_{len(calls)}": value for name, value in row.items()}

    return change


@pytest.mark.parametrize("name", MESSAGES)
def test_error_lists_the_first_of_ten_thousand_columns(name: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        MESSAGES[name]()
    assert "column_" in str(caught.value) or name == "feature_dtypes"
    assert len(str(caught.value)) < 2_000


def test_hint_about_dtypes_of_ten_thousand_labels_is_short() -> None:
    every = [(each,) * NUMBER for each in ("int64", "unknown", False, ())]
    labels = LabelBinding(tuple(NAMES), *every)  # type: ignore[arg-type]
    hint = labels.dtype_hint(RuntimeError("expected scalar type Float"))
    assert "'column_0': 'float32'" in hint
    assert len(hint) < 2_000


def test_reprs_of_ten_thousand_columns_are_short() -> None:
    assert "column_0" in repr(model())
    assert len(repr(model())) < 2_000
    arguments = tuple(Argument(None, (name,), "float32", None, is_joined=False) for name in NAMES)
    assert len(InputBinding(arguments).describe()) < 2_000


def test_columns_are_found_by_name_without_a_search() -> None:
    schema = DataSchema(
        COLUMNS, (Column("y", "scalar", "float32", (), "double", "float32"), COLUMNS[7])
    )
    size = len(pickle.dumps(schema))
    assert schema.columns is schema.columns
    assert len(schema.columns) == NUMBER + 1
    assert all(schema.column(name) is column for name, column in zip(NAMES, COLUMNS, strict=True))
    assert schema.column("y") is schema.labels[0]
    assert len(pickle.dumps(schema)) == size  # what is cached is not sent to ranks
    again = pickle.loads(pickle.dumps(schema))
    assert again == schema
    assert again.column(NAMES[-1]) == COLUMNS[-1]
    assert replace(schema, labels=()).columns == COLUMNS
