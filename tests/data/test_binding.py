from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own custom
from torch import Tensor, nn

from sparkhvd.data.columns.binding import bind_inputs, label_arguments, model_dtype
from sparkhvd.data.columns.labels import bind_labels, outputs_of
from sparkhvd.data.columns.schema import Column, DataSchema
from sparkhvd.errors import InvalidArgumentError

pytestmark = pytest.mark.pure

ROWS = 4


def column(
    name: str, width: int | None = None, dtype: str = "float32", *, explicit: bool = False
) -> Column:
    kind, shape = ("scalar", ()) if width is None else ("array", (width,))
    stored = {"bool": "uint8", "bfloat16": "float32"}.get(dtype, dtype)
    return Column(name, kind, stored, shape, "source", dtype, explicit)


def schema_of(*features: Column, labels: tuple[Column, ...] = ()) -> DataSchema:
    return DataSchema(features, labels)


def batch_of(schema: DataSchema, rows: int = ROWS) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        c.name: rng.integers(0, 2, (rows, *(c.shape or ()))).astype(c.dtype) for c in schema.columns
    }


class One(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Two(One):
    def forward(self, x: Tensor, ids: Tensor, scale: float = 1.0) -> Tensor:  # type: ignore[override]
        return self.layer(x) * ids * scale


def test_scalars_or_one_array_column_form_the_same_single_argument() -> None:
    four = schema_of(*(column(n) for n in "abcd"))
    array = schema_of(column("v", 4))
    values = batch_of(four)
    joined = np.stack([values[n] for n in "abcd"], axis=1)
    for schema, batch in ((four, values), (array, {"v": joined})):
        (x,), kwargs = bind_inputs(One(), schema).apply(batch)
        assert kwargs == {}
        assert x.dtype == torch.float32
        np.testing.assert_array_equal(x.numpy(), joined)


def test_single_scalar_column_becomes_an_argument_of_width_one() -> None:
    schema = schema_of(column("a"))
    (x,), _ = bind_inputs(One(), schema).apply(batch_of(schema))
    assert x.shape == (ROWS, 1)


def test_each_argument_gets_one_column_if_counts_match() -> None:
    schema = schema_of(column("x", 4), column("i", None, "int64"))
    (x, i), _ = bind_inputs(Two(), schema).apply(batch_of(schema))
    assert (x.shape, x.dtype) == ((ROWS, 4), torch.float32)
    assert (i.shape, i.dtype) == ((ROWS,), torch.int64)


def test_error_names_argument_and_column_counts_that_mismatch() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        bind_inputs(Two(), schema_of(column("a"), column("b"), column("c")))
    assert str(caught.value) == (
        "Two.forward takes 2 required arguments (and optional ones) and there are 3 feature columns ('a', 'b', 'c'), "
        "so it is not clear which goes where. Say it with inputs={'<argument>': ['<column>', ...], ...}, or with one "
        "entry per column in input_shapes."
    )


def test_inputs_assign_columns_to_arguments_by_name() -> None:
    schema = schema_of(column("a"), column("b", 2), column("c", None, "int64"))
    binding = bind_inputs(Two(), schema, inputs={"x": ["a", "b"], "ids": "c"})
    args, kwargs = pickle.loads(pickle.dumps(binding)).apply(batch_of(schema))
    assert args == ()
    assert {n: (tuple(t.shape), t.dtype) for n, t in kwargs.items()} == {
        "x": ((ROWS, 3), torch.float32),
        "ids": ((ROWS,), torch.int64),
    }
    assert binding.describe() == "x = 'a' + 'b' (float32); ids = 'c' (int64)"


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (
            {"y": ["a", "b", "c"]},
            "inputs names the argument 'y', which forward does not take. Its arguments are: 'x'",
        ),
        (
            {"x": ["a", "z"]},
            r"inputs\['x'\] names column 'z', which is not among feature_cols: 'a', 'b', 'c'",
        ),
        ({"x": ["a"], "ids": "c"}, "feature_cols has 'b', which inputs does not use"),
        ({"x": []}, r"inputs\['x'\] is empty"),
    ],
)
def test_invalid_inputs_raise_a_clear_error(inputs: dict[str, Any], message: str) -> None:
    schema = schema_of(column("a"), column("b", 2), column("c", None, "int64"))
    with pytest.raises(InvalidArgumentError, match=message):
        bind_inputs(Two(), schema, inputs=inputs)


@pytest.mark.parametrize("shape", [[-1, 1, 2, 2], [1, 2, 2], [-1, 1, 2, -1]])
def test_input_shapes_may_include_the_batch_dimension(shape: list[int]) -> None:
    schema = schema_of(column("v", 4))
    (x,), _ = bind_inputs(One(), schema, input_shapes=[shape]).apply(batch_of(schema))
    assert x.shape == (ROWS, 1, 2, 2)


def test_input_shapes_assign_one_column_to_each_argument() -> None:
    schema = schema_of(column("v", 4), column("i", None, "int64"))
    (x, i), _ = bind_inputs(Two(), schema, input_shapes=[[-1, 4], [-1, 1]]).apply(batch_of(schema))
    assert (tuple(x.shape), tuple(i.shape)) == ((ROWS, 4), (ROWS, 1))
    named = bind_inputs(Two(), schema, inputs={"x": ["v"], "ids": "i"}, input_shapes={"x": [2, 2]})
    assert named.apply(batch_of(schema))[1]["x"].shape == (ROWS, 2, 2)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([[-1, 4]], "input_shapes has 1 shapes and feature_cols 2 columns"),
        (
            [[-1, 5], [1]],
            r"input_shapes gives \[-1, 5\] for column 'v', which has 4 elements per row",
        ),
        ([[-1, 3, -1], [1]], "which has 4 elements per row"),
        ([[-1, -1, -1], [1]], "at most one -1"),
        (["4", [1]], "A shape is a list of positive numbers"),
        ({"x": [4]}, "give inputs= too"),
    ],
)
def test_invalid_input_shapes_raise_a_clear_error(shapes: Any, message: str) -> None:
    schema = schema_of(column("v", 4), column("i", None, "int64"))
    with pytest.raises(InvalidArgumentError, match=message):
        bind_inputs(Two(), schema, input_shapes=shapes)


def test_input_shapes_of_unknown_width_are_checked_at_the_first_batch() -> None:
    unknown = Column("v", "vector", "float32", None, "vector", "float32")
    binding = bind_inputs(One(), schema_of(unknown), input_shapes=[[-1, 2, 2]])
    assert binding.apply({"v": np.zeros((3, 4), np.float32)})[0][0].shape == (3, 2, 2)
    assert binding.apply({"v": np.zeros((0, 4), np.float32)})[0][0].shape == (0, 2, 2)
    with pytest.raises(
        InvalidArgumentError, match="the data have 5 elements per row, the shape asks for 4"
    ):
        binding.apply({"v": np.zeros((3, 5), np.float32)})


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ([column("i", None, "int64")], torch.int64),
        ([column("i", 4, "int64")], torch.int64),
        ([column("i", None, "int64"), column("a")], torch.float32),
        ([column("i", None, "int64"), column("f", None, "bool")], torch.int64),
        ([column("f", None, "bool")], torch.bool),
        ([column("a"), column("d", None, "float64", explicit=True)], torch.float64),
        ([column("a", None, "bfloat16")], torch.bfloat16),
        ([column("a", None, "bfloat16"), column("b", None, "bfloat16")], torch.bfloat16),
    ],
)
def test_integer_columns_become_floats_only_when_joined_with_floats(
    columns: list[Column], expected: torch.dtype
) -> None:
    schema = schema_of(*columns)
    binding = bind_inputs(One(), schema)
    (x,), _ = binding.apply(batch_of(schema))
    assert x.dtype == expected
    # The parts that materialize and transform read.
    is_cast = [expected.is_floating_point and not c.is_floating for c in columns]
    casts = [c.cast_to for c in binding.with_casts(columns)]
    assert casts == ["float32" if cast else "" for cast in is_cast]


def test_integer_column_in_two_arguments_is_cast_to_the_narrower_float() -> None:
    schema = schema_of(
        column("a"), column("d", None, "float64", explicit=True), column("i", None, "int64")
    )
    for names in (["d", "i"], ["a", "i"]), (["a", "i"], ["d", "i"]):
        binding = bind_inputs(Two(), schema, inputs=dict(zip(("x", "ids"), names, strict=True)))
        assert [a.dtype for a in binding.arguments if "d" in a.columns] == ["float64"]
        assert [c.cast_to for c in binding.with_casts(schema.features)] == ["", "", "float32"]


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_arguments_of_scripted_compiled_and_variadic_modules_are_found() -> None:
    schema = schema_of(column("a", 4), column("b", 4))

    class Optional(One):
        def forward(self, x: Tensor | None = None) -> Tensor:  # type: ignore[override]
            assert x is not None
            return x

    class Star(One):
        def forward(self, *xs: Tensor) -> Tensor:  # type: ignore[override]
            return xs[0]

    class Named(One):
        def forward(self, **xs: Tensor) -> Tensor:  # type: ignore[override]
            return xs["p"]

    assert len(bind_inputs(nn.Sequential(nn.Linear(8, 1)), schema).arguments) == 1
    assert len(bind_inputs(Optional(), schema).arguments) == 1
    assert len(bind_inputs(torch.jit.script(One()), schema).arguments) == 1
    assert len(bind_inputs(torch.compile(Two()), schema).arguments) == 2
    assert len(bind_inputs(Star(), schema, input_shapes=[[4], [4]]).arguments) == 2
    assert len(bind_inputs(Named(), schema, inputs={"p": "a", "q": "b"}).arguments) == 2
    with pytest.raises(InvalidArgumentError, match=r"any number of arguments \(\*args\)"):
        bind_inputs(Star(), schema)


@pytest.mark.filterwarnings("error")
def test_read_only_columns_are_copied() -> None:
    schema = schema_of(column("v", 4), labels=(column("y"),))
    batch = batch_of(schema)
    for array in batch.values():
        array.flags.writeable = False
    (x,), _ = bind_inputs(One(), schema).apply(batch)
    (y,) = bind_labels(schema, nn.MSELoss()).apply(batch)
    x += 1
    y += 1
    assert batch["v"].max() <= 1
    assert batch["y"].max() <= 1
    two = schema_of(column("a"), column("b"))
    both = {n: v.copy() for n, v in batch_of(two).items()}
    for array in both.values():
        array.flags.writeable = False
    assert bind_inputs(One(), two).apply(both)[0][0].shape == (ROWS, 2)


def test_model_dtype_is_the_dtype_of_its_parameters() -> None:
    assert model_dtype(One()) == "float32"
    assert model_dtype(One().double()) == "float64"
    assert model_dtype(nn.ReLU()) == "float32"


# -- labels ------------------------------------------------------------------------------------------


def dice(output: Tensor, label: Tensor) -> Tensor:
    """Compare scores of classes (rows, classes, width) with class numbers (rows, 1, width)."""
    of_label = F.one_hot(label.long().squeeze(1), output.shape[1]).movedim(-1, 1)
    return 1 - (output * of_label).mean()


def test_a_custom_loss_may_broadcast_shapes_given_by_label_shapes() -> None:
    schema = schema_of(column("x", 4), labels=(column("m", 6),))
    output = torch.zeros(ROWS, 2, 6, requires_grad=True).sigmoid()
    binding = bind_labels(schema, dice, label_shapes={"m": [1, 6]})
    (label,) = binding.match([output], binding.apply(batch_of(schema)))
    assert label.shape == (ROWS, 1, 6)
    torchs = bind_labels(schema, nn.MSELoss(), label_shapes={"m": [1, 6]})
    with pytest.raises(InvalidArgumentError, match="the loss would broadcast"):
        torchs.match([output], torchs.apply(batch_of(schema)))


def test_shape_error_explains_how_to_give_the_shape() -> None:
    schema = schema_of(column("x", 4), labels=(column("y", 1),))
    binding = bind_labels(schema, mine)
    with pytest.raises(InvalidArgumentError, match=r"label_shapes=\{'y': \[1\]\}"):
        binding.match([torch.zeros(ROWS, 3)], binding.apply(batch_of(schema)))


def mine(output: Tensor, label: Tensor) -> Tensor:
    return F.cross_entropy(output, label)


INT, FLOAT = column("y", None, "int64"), column("y")


@pytest.mark.parametrize(
    ("loss", "label", "output_shape", "expected_dtype", "expected_shape"),
    [
        (nn.CrossEntropyLoss(), INT, (ROWS, 3), torch.int64, (ROWS,)),
        (F.cross_entropy, INT, (ROWS, 3), torch.int64, (ROWS,)),
        (nn.NLLLoss(), column("y", 1, "int64"), (ROWS, 3), torch.int64, (ROWS,)),
        (nn.MultiMarginLoss(), column("y", None, "bool"), (ROWS, 3), torch.int64, (ROWS,)),
        (nn.CrossEntropyLoss(), column("y", 6, "int64"), (ROWS, 3, 6), torch.int64, (ROWS, 6)),
        (
            nn.CrossEntropyLoss(),
            column("y", 6, "int64"),
            (ROWS, 3, 2, 3),
            torch.int64,
            (ROWS, 2, 3),
        ),
        (nn.CrossEntropyLoss(), column("y", 3), (ROWS, 3), torch.float32, (ROWS, 3)),
        (nn.MultiLabelMarginLoss(), column("y", 3, "int64"), (ROWS, 3), torch.int64, (ROWS, 3)),
        (mine, INT, (ROWS, 3), torch.int64, (ROWS,)),
        (nn.MSELoss(), INT, (ROWS,), torch.float32, (ROWS,)),
        (nn.MSELoss(), FLOAT, (ROWS, 1), torch.float32, (ROWS, 1)),
        (F.mse_loss, INT, (ROWS, 1), torch.float32, (ROWS, 1)),
        (nn.BCEWithLogitsLoss(), column("y", None, "bool"), (ROWS, 1), torch.float32, (ROWS, 1)),
        (nn.L1Loss(), column("y", 6), (ROWS, 2, 3), torch.float32, (ROWS, 2, 3)),
        (
            nn.MSELoss(),
            column("y", None, "float64", explicit=True),
            (ROWS,),
            torch.float64,
            (ROWS,),
        ),
    ],
)
def test_labels_get_the_dtype_and_shape_that_their_loss_needs(
    loss: Callable[..., Tensor],
    label: Column,
    output_shape: tuple[int, ...],
    expected_dtype: torch.dtype,
    expected_shape: tuple[int, ...],
) -> None:
    schema = schema_of(column("x", 4), labels=(label,))
    binding = pickle.loads(pickle.dumps(bind_labels(schema, loss)))
    output = torch.zeros(output_shape, requires_grad=True).sigmoid()
    (found,) = binding.match([output], binding.apply(batch_of(schema)))
    assert (found.dtype, tuple(found.shape)) == (expected_dtype, expected_shape)
    assert loss(output, found).dim() == 0
    binding.match([output[:1]], binding.apply(batch_of(schema, 1)))


@pytest.mark.parametrize(
    ("loss", "label", "output_shape", "message"),
    [
        (
            nn.MSELoss(),
            FLOAT,
            (ROWS, 3),
            r"has shape \(4,\), but the model's output has shape \(4, 3\): the loss would broadcast",
        ),
        (
            nn.MSELoss(),
            column("y", 2),
            (ROWS, 1),
            r"has shape \(4, 2\), but the model's output has shape \(4, 1\)",
        ),
        (
            mine,
            column("y", 1),
            (ROWS, 3),
            r"has shape \(4, 1\), but the model's output has shape \(4, 3\)",
        ),
        (nn.CrossEntropyLoss(), INT, (ROWS,), r"scores \(rows, classes, \.\.\.\)"),
        (nn.CrossEntropyLoss(), column("y", 2, "int64"), (ROWS, 3), r"has shape \(4, 2\)"),
        (nn.MSELoss(), FLOAT, (2, 1), "has shape \\(2, 1\\) for a batch of 4 rows"),
        (nn.MSELoss(), FLOAT, (), "must return one row per row"),
    ],
)
def test_label_that_would_broadcast_raises_error_with_both_shapes(
    loss: Callable[..., Tensor], label: Column, output_shape: tuple[int, ...], message: str
) -> None:
    schema = schema_of(column("x", 4), labels=(label,))
    binding = bind_labels(schema, loss)
    with pytest.raises(InvalidArgumentError, match=message):
        binding.match([torch.zeros(output_shape)], binding.apply(batch_of(schema)))


def test_number_of_outputs_and_losses_must_match() -> None:
    schema = schema_of(column("x", 4), labels=(INT, column("z")))
    binding = bind_labels(schema, [nn.CrossEntropyLoss(), nn.MSELoss()])
    assert binding.kinds == ("class_index", "elementwise")
    with pytest.raises(
        InvalidArgumentError, match=r"returned 1 output and there are 2 label columns \('y', 'z'\)"
    ):
        binding.match([torch.zeros(4, 2)], binding.apply(batch_of(schema)))
    with pytest.raises(InvalidArgumentError, match="There are 3 losses and 2 label columns"):
        bind_labels(schema, [mine, mine, mine])


def test_error_names_float_label_of_a_class_loss_before_any_job() -> None:
    schema = schema_of(column("x", 4), labels=(FLOAT,))
    with pytest.raises(InvalidArgumentError, match=r"label_dtypes=\{'y': 'int64'\}"):
        bind_labels(schema, nn.CrossEntropyLoss())


def test_labels_match_outputs_in_a_step_without_rows() -> None:
    schema = schema_of(column("x", 4), labels=(INT,))
    binding = bind_labels(schema, nn.CrossEntropyLoss())
    (found,) = binding.match([torch.zeros(0, 3)], binding.apply(batch_of(schema, 0)))
    assert found.shape == (0,)


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        ([[-1, 2, 3], [1]], [(ROWS, 2, 3), (ROWS, 1)]),
        ({"y": [3, -1]}, [(ROWS, 3, 2), (ROWS,)]),
        ([[-1, 6], [-1]], [(ROWS, 6), (ROWS,)]),
    ],
)
def test_a_custom_loss_gets_labels_of_the_given_shapes(
    shapes: Any, expected: list[tuple[int, ...]]
) -> None:
    schema = schema_of(column("x", 4), labels=(column("y", 6), column("z")))
    binding = pickle.loads(pickle.dumps(bind_labels(schema, mine, shapes)))
    batch = batch_of(schema)
    found = binding.apply(batch)
    assert [tuple(label.shape) for label in found] == expected
    for label, name in zip(found, ("y", "z"), strict=True):
        assert np.array_equal(
            label.numpy().ravel(), batch[name].astype(label.numpy().dtype).ravel()
        )


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([[2, 3]], r"label_shapes has 1 shapes and there are 2 label columns \('y', 'z'\)"),
        ([[4, 2], [1]], "label_shapes gives \\[4, 2\\] for column 'y', which has 6 elements"),
        ({"w": [1]}, "label_shapes names 'w'"),
        ([[0], [1]], "A shape is a list of positive numbers"),
    ],
)
def test_label_shapes_that_mismatch_columns_raise_a_clear_error(shapes: Any, message: str) -> None:
    schema = schema_of(column("x", 4), labels=(column("y", 6), column("z")))
    with pytest.raises(InvalidArgumentError, match=message):
        bind_labels(schema, mine, shapes)


def embedded(output: Tensor, label: Tensor) -> Tensor:
    return (output - F.embedding(label, torch.ones(4, 4))).sum()


@pytest.mark.parametrize(
    "function",
    [
        F.cross_entropy,
        lambda output, label: output.gather(1, label[:, None]).mean(),
        lambda output, label: (output * F.one_hot(label, 4)).mean(),
        lambda output, label: output[torch.arange(2), label].mean(),
        lambda output, label: torch.zeros(2, 4).scatter(1, label[:, None], 1.0),
        embedded,
    ],
)
def test_torch_errors_on_float_labels_get_a_label_dtypes_hint(
    function: Callable[..., Tensor],
) -> None:
    schema = schema_of(column("x"), labels=(column("k"),))
    binding = bind_labels(schema, lambda output, label: function(output, label))
    with pytest.raises((RuntimeError, IndexError)) as raised:
        function(torch.zeros(2, 4), torch.zeros(2))
    assert "if it needs class indices, give label_dtypes={'k': 'int64'}." in binding.dtype_hint(
        raised.value
    )
    with pytest.raises(RuntimeError) as other:
        nn.Linear(4, 4)(torch.zeros(2, 4, dtype=torch.int64))
    assert binding.dtype_hint(other.value) == ""


@pytest.mark.parametrize("function", [F.binary_cross_entropy, F.huber_loss, F.kl_div])
def test_torch_errors_on_integer_labels_get_a_label_dtypes_hint(
    function: Callable[..., Tensor],
) -> None:
    schema = schema_of(column("x"), labels=(column("k", dtype="int64"),))
    binding = bind_labels(schema, lambda output, label: function(output, label))
    output = torch.full((2,), 0.5, requires_grad=True)
    with pytest.raises(RuntimeError) as raised:
        function(output, torch.ones(2, dtype=torch.int64)).backward()
    assert "label_dtypes={'k': 'float32'}" in binding.dtype_hint(raised.value)
    assert binding.dtype_hint(ValueError("division by zero")) == ""
    assert bind_labels(schema, nn.HuberLoss()).dtype_hint(raised.value) == ""


@pytest.mark.parametrize(
    ("loss", "low", "high", "classes", "says"),
    [
        (nn.CrossEntropyLoss(), 0, 3, 4, ""),
        (nn.CrossEntropyLoss(), 1, 3, 4, ""),
        (nn.CrossEntropyLoss(), -100, 3, 4, ""),
        (F.cross_entropy, -100, 3, 4, ""),
        (nn.CrossEntropyLoss(ignore_index=255), 0, 255, 4, ""),
        (nn.CrossEntropyLoss(ignore_index=-1), -1, 3, 4, ""),
        (mine, 1, 9, 4, ""),
        (nn.HuberLoss(), 1, 9, 4, ""),
        (
            nn.CrossEntropyLoss(),
            0,
            9,
            4,
            "Label 'k' is from 0 to 9 in the data, and the model's output has 4 classes "
            "per row, so labels must be whole numbers from 0 to 3. Give the last layer 10 outputs, or"
            " number the classes from 0 without gaps, as a StringIndexer does.",
        ),
        (
            nn.NLLLoss(),
            1,
            4,
            4,
            "Label 'k' is from 1 to 4 in the data, and the model's output has 4 classes per row, so labels must be whole numbers from "
            '0 to 3. Classes are numbered from 0: df.withColumn("k", df["k"] - 1).',
        ),
        (nn.CrossEntropyLoss(), -1, 3, 4, "with its ignore_index, -100"),
        (nn.MultiMarginLoss(), -100, 3, 4, "Label 'k' is from -100 to 3 in the data"),
        (nn.CrossEntropyLoss(ignore_index=255), 0, 256, 4, "Give the last layer 257 outputs"),
        (nn.CrossEntropyLoss(ignore_index=0), 0, 1, 1, "Label 'k' is 1 in the data"),
    ],
)
def test_error_names_labels_beyond_the_classes_of_the_output(
    loss: Any, low: int, high: int, classes: int, says: str
) -> None:
    label = column("k", dtype="int64")
    schema = schema_of(column("x"), labels=(label,))
    output, rows = torch.zeros(2, classes), torch.zeros(2, dtype=torch.int64)
    if isinstance(loss, nn.HuberLoss):
        rows = torch.zeros(2, classes, dtype=torch.int64)
    binding = pickle.loads(pickle.dumps(bind_labels(schema, loss, ranges={"k": (low, high)})))
    bind_labels(schema, loss).match([output], [rows])  # without a range nothing is known
    if not says:
        binding.match([output], [rows])
        return
    with pytest.raises(InvalidArgumentError) as raised:
        binding.match([output], [rows])
    assert says in str(raised.value)


class FromOne(nn.CrossEntropyLoss):
    def forward(self, input: Tensor, target: Tensor) -> Tensor:  # noqa: A002 - torch's name
        return super().forward(input, target - 1)


def test_class_ranges_of_custom_losses_are_not_checked() -> None:
    schema = schema_of(column("x"), labels=(column("k", dtype="int64"),))
    binding = bind_labels(schema, FromOne(), ranges={"k": (1, 4)})
    binding.match([torch.zeros(2, 4)], [torch.ones(2, dtype=torch.int64)])
    collated = replace(schema.labels[0], is_collated=True)
    changed = replace(schema, labels=(collated,))
    bind_labels(changed, nn.NLLLoss(), ranges={"k": (1, 4)}).match(
        [torch.zeros(2, 4)], [torch.ones(2, dtype=torch.int64)]
    )


def test_label_arguments_of_forward_are_recognized_by_name() -> None:
    class Forecaster(nn.Module):
        def forward(
            self, past_values: Tensor, future_values: Tensor | None = None, labels: Any = None
        ) -> None: ...

    names = ("past_values", "future_values", "labels", "start_positions")
    assert label_arguments(Forecaster(), names) == ("future_values", "labels")


def test_scalars_beside_outputs_are_ignored_unless_a_loss_uses_them() -> None:
    rows, number = torch.ones(3, 2), torch.ones(())
    assert [o.shape for o in outputs_of((rows, number))] == [rows.shape]
    assert len(outputs_of((rows, number), skips_numbers=False)) == 2
    assert len(outputs_of({"rows": rows, "loss": number}, skips_numbers=False)) == 1
    assert len(outputs_of([rows, None, (rows, {"more": [rows]})])) == 3
    assert outputs_of(number) == (number,)
    state = {"logits": rows, "mems": [torch.ones(5, 3, 2)], "past_key_values": ((rows, rows),)}
    assert len(outputs_of(state)) == 1
    with pytest.raises(InvalidArgumentError, match="returned str in a tuple"):
        outputs_of((rows, "text"))
