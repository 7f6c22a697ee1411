"""Modules without a fit, bound to the columns of a schema: equal to the module on the same rows, or an early error."""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyspark.ml.linalg import VectorUDT
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    DoubleType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
)
from torch import Tensor, nn

from sparkhvd import InvalidArgumentError, TorchModel
from sparkhvd.estimator import pad
from sparkhvd.estimator.params.generated import PredictOptions
from sparkhvd.estimator.transform.binding import (
    bind_module,
    functions_of,
    match_columns,
    source_names,
)
from sparkhvd.estimator.transform.worker import Output, PredictSpec, predict
from sparkhvd.training.modules.fitted import TrainedState

pytestmark = pytest.mark.pure

ROWS = 7
DOUBLES = ArrayType(DoubleType())


def bound(model: TorchModel, fields: list[StructField]) -> tuple[TrainedState, PredictOptions]:
    options = model._read_options(PredictOptions)
    return bind_module(model._require_fitted(), options, StructType(fields))


def outputs(
    model: TorchModel, types: dict[str, DataType], values: dict[str, list[Any]]
) -> np.ndarray:
    """Compute the first output as a worker of transform does."""
    fields = [StructField(name, kind) for name, kind in types.items()]
    fitted, options = bound(model, fields)
    columns = match_columns(fitted, options, StructType(fields))
    names = list(types)
    spec = PredictSpec(
        shell=fitted.shell,
        weights=fitted.weights,
        columns=fitted.inputs.with_casts(columns),
        sources=tuple(names.index(name) for name in source_names(fitted, options)),
        names=tuple(names),
        inputs=fitted.inputs,
        links=fitted.links,
        outputs=(Output("o", "output", 0, is_vector=True),),
        functions=functions_of(fitted, options),
        use_gpu=False,
    )
    batch = pa.RecordBatch.from_arrays([pa.array(v) for v in values.values()], names=names)
    (found,) = predict(spec, iter([batch]))
    return np.array([row["values"] for row in found.columns[-1].to_pylist()])


def expected(module: nn.Module, *arguments: Tensor) -> Any:
    with torch.no_grad():
        return pytest.approx(module.eval()(*arguments).reshape(ROWS, -1).double().numpy(), rel=1e-5)


class Two(nn.Module):
    def __init__(self, index: bool = True) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3) if index else nn.Linear(1, 3)
        self.layer = nn.Linear(4, 3)

    def forward(self, image: Tensor, level: Tensor) -> Tensor:
        result: Tensor = self.table(level) * self.layer(image.flatten(1))
        return result


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng().standard_normal(shape)


def test_scalar_columns_are_joined_in_the_module_dtype() -> None:
    values, whole = random(ROWS), np.random.default_rng().integers(-9, 9, ROWS)
    module = nn.Linear(2, 3).double()
    model = TorchModel.from_module(module, feature_cols=["k", "a"], label_cols="y")
    types = {"a": DoubleType(), "k": IntegerType()}
    found = outputs(model, types, {"a": values.tolist(), "k": whole.tolist()})
    assert found == expected(module, torch.tensor(np.stack([whole, values], 1)))


@pytest.mark.parametrize("shape", [(4,), (2, 2), (1, 4, 1)])
def test_array_columns_take_the_given_shape(shape: tuple[int, ...]) -> None:
    values = random(ROWS, 4)
    module = nn.Sequential(nn.Flatten(), nn.Linear(4, 2), nn.Tanh())
    model = TorchModel(
        model=module, feature_columns=["a"], label_columns=["y"], input_shapes=[[-1, *shape]]
    )
    found = outputs(model, {"a": DOUBLES}, {"a": values.tolist()})
    assert found == expected(module, torch.tensor(values).float())


def test_nested_arrays_bind_to_named_arguments() -> None:
    images, levels = random(ROWS, 2, 2), random(ROWS)
    module = Two(index=False)
    model = TorchModel.from_module(
        module,
        label_cols=["y"],
        inputs={"image": "a", "level": ["z"]},
        input_shapes={"image": [-1, 1, 2, 2]},
    )
    types: dict[str, DataType] = {"a": ArrayType(DOUBLES), "z": DoubleType()}
    found = outputs(model, types, {"a": images.tolist(), "z": levels.tolist()})
    arguments = torch.tensor(images).float(), torch.tensor(levels).float().reshape(-1, 1)
    assert found == expected(module, *arguments)


def test_decoded_columns_take_the_given_shape_and_dtype() -> None:
    images = np.random.default_rng().integers(0, 256, (ROWS, 4), np.uint8)
    texts = [("low", "mid", "high")[i % 3] for i in range(ROWS)]
    table = {"low": 0, "mid": 4, "high": 1}
    module = Two()
    model = TorchModel.from_module(
        module,
        feature_cols=["image", "text"],
        label_cols="y",
        decoders={"image": lambda data: np.frombuffer(data, np.uint8) / 255, "text": table},
        input_shapes=[[-1, 1, 2, 2], [-1]],
        feature_dtypes={"image": "float32"},
    )
    types: dict[str, DataType] = {"text": StringType(), "image": BinaryType()}
    found = outputs(model, types, {"text": texts, "image": [i.tobytes() for i in images]})
    levels = torch.tensor([table[t] for t in texts])
    assert found == expected(module, torch.tensor(images / 255).float(), levels)


def test_collated_columns_require_only_output_widths() -> None:
    rows = [list(range(1, 2 + i % 4)) for i in range(ROWS)]
    module = nn.Sequential(nn.EmbeddingBag(9, 3, padding_idx=0), nn.Linear(3, 2))
    params: Any = {"feature_cols": "t", "label_cols": "y", "collate_fn": {"t": pad(0)}}
    types = {"t": ArrayType(LongType())}
    padded = torch.tensor([r + [0] * (4 - len(r)) for r in rows])
    model = TorchModel.from_module(module, widths=[2], **params)
    assert outputs(model, types, {"t": rows}) == expected(module, padded)
    with pytest.raises(InvalidArgumentError, match=r"'t' is collated. Give .* widths=\[1\]"):
        bound(TorchModel.from_module(module, **params), [StructField("t", types["t"])])


def vector(width: int) -> StructField:
    return StructField("x", VectorUDT(), metadata={"ml_attr": {"num_attrs": width}})


def test_the_width_of_a_vector_is_read_from_its_metadata() -> None:
    model = TorchModel.from_module(nn.Linear(4, 1), feature_cols="x", label_cols="y")
    fitted, _ = bound(model, [vector(4)])
    assert [(c.kind, c.shape) for c in fitted.columns] == [("vector", (4,))]
    assert fitted.widths == (1,)
    wide = TorchModel.from_module(nn.Linear(70_000, 1), feature_cols="x", label_cols="y")
    assert [c.kind for c in bound(wide, [vector(70_000)])[0].columns] == ["sparse"]
    assert (
        math.prod(bound(wide.setSparseCols([]), [vector(70_000)])[0].columns[0].shape or ())
        == 70_000
    )


@pytest.mark.parametrize(
    ("given", "links"),
    [
        ({}, ("identity", "identity")),
        ({"loss": nn.CrossEntropyLoss()}, ("softmax", "softmax")),
        ({"loss": ["cross_entropy", "mse"]}, ("softmax", "value")),
        ({"link": "sigmoid"}, ("sigmoid", "sigmoid")),
        ({"link": ["softmax", "sigmoid"]}, ("softmax", "sigmoid")),
    ],
)
def test_loss_or_link_defines_the_probabilities(
    given: dict[str, Any], links: tuple[str, ...]
) -> None:
    class Pair(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, x[:, 0]

    model = TorchModel.from_module(Pair(), feature_cols="x", label_cols=["a", "b"], **given)
    fitted, _ = bound(model, [vector(3)])
    assert (fitted.links, fitted.widths, fitted.labels) == (links, (3, 1), ("a", "b"))


@pytest.mark.parametrize(
    ("params", "says"),
    [
        (
            {"feature_cols": None},
            "transform: feature_cols is required, because this module was not",
        ),
        (
            {"feature_cols": "z"},
            r"feature_cols\[0\] names column 'z', which the DataFrame does not",
        ),
        ({"feature_cols": "s"}, "names column 's' of type string, which cannot become a tensor"),
        (
            {"feature_cols": "a"},
            r"'a': .* not known how many elements per row array<double> has.*\[-1, 4\]",
        ),
        (
            {"feature_cols": "s", "decoders": {"s": len}},
            "'s': .* not known how many elements per row a decoder gives.* Give input_shapes",
        ),
        (
            {"feature_cols": "n", "input_shapes": [[-1, 4]]},
            r"'n' is of type array<array<double>>, but input_shapes gives \[4\] .* flatten\(n\)",
        ),
        ({"feature_cols": "a", "input_shapes": [[-1, 3]]}, r"failed on two rows .*2x3 and 4x1"),
        ({"feature_cols": "k"}, "if the model needs floats, give feature_dtypes={'k': 'float32'}"),
        (
            {"feature_cols": ["k", "d"], "input_shapes": [[-1, 4]]},
            "has 1 shapes and feature_cols 2",
        ),
        ({"label_cols": ["y", "z"]}, "returned 1 outputs, but label_cols has 2 columns"),
        (
            {"label_cols": None},
            "the module's 1 outputs have no names. Set outputCols, or label_cols",
        ),
        ({"loss": ["mse", "mse"]}, "was given 2 losses, but its module has 1 outputs"),
    ],
)
def test_mismatched_params_and_columns_raise_a_clear_error(
    params: dict[str, Any], says: str
) -> None:
    given = {"feature_cols": "a", "label_cols": "y", "input_shapes": [[-1, 4]], **params}
    if "feature_cols" in params and "input_shapes" not in params:
        given["input_shapes"] = None
    model = TorchModel.from_module(nn.Linear(4, 1), **given)
    fields = [
        StructField("a", DOUBLES),
        StructField("n", ArrayType(DOUBLES)),
        StructField("k", LongType()),
        StructField("d", DoubleType()),
        StructField("s", StringType()),
    ]
    with pytest.raises(InvalidArgumentError, match=says):
        bound(model, fields)


def test_modules_that_cannot_be_sent_raise_a_clear_error() -> None:
    with pytest.raises(
        InvalidArgumentError, match="parameter 'weight' of a lazy module has no shape yet. Run the"
    ):
        TorchModel().setModel(nn.LazyLinear(2))
    locked = nn.Linear(4, 2)
    locked.lock = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(
        InvalidArgumentError, match="Linear cannot be sent to Spark's workers: pickl"
    ):
        TrainedState(locked).shell  # noqa: B018 - a property


def test_model_constructor_arguments_are_checked() -> None:
    history = [{"epoch": 1, "loss": 0.5}]
    module = nn.Linear(2, 1).train()
    model = TorchModel(model=module, feature_columns="x", history=history, run_id="r", loss="mse")
    assert (model.history, model.getRunId()) == (history, "r")
    assert repr(model) == f"{model.uid}: Linear with 3 parameters, x -> ?; 1 epoch, loss 0.5"
    assert (model.getFeatureColumns(), model.getLabelColumns()) == (["x"], [])
    assert module.training  # the user's is left alone
    other = nn.Linear(3, 1)
    assert TorchModel().setModel(other).setModel(module).getModel().in_features == 2
    with pytest.warns(UserWarning, match="_metadata has no effect in TorchModel: types follow"):
        TorchModel(model=module, _metadata={"x": 1})
    with pytest.raises(InvalidArgumentError, match="describe a trained module. Give model, too"):
        TorchModel(history=history)
    with pytest.raises(
        InvalidArgumentError, match="link is 'logit'. Give either the loss of the training"
    ):
        TorchModel.from_module(module, link="logit")
    with pytest.raises(InvalidArgumentError, match="and loss is given, too"):
        TorchModel.from_module(module, link="softmax", loss="mse")
    with pytest.raises(InvalidArgumentError, match="give a torch.nn.Module"):
        TorchModel(model="net")  # type: ignore[arg-type]
