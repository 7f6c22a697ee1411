"""`TorchClassifier`, `TorchRegressor` and their models without Spark: types, Params, checks and single rows."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pyspark.ml import classification, regression
from pyspark.ml.linalg import DenseVector, SparseVector, Vectors
from pyspark.ml.param.shared import HasWeightCol
from pyspark.ml.tuning import ParamGridBuilder
from torch import Tensor, nn

from sparkhvd import (
    InvalidArgumentError,
    TorchClassificationModel,
    TorchClassifier,
    TorchModel,
    TorchRegressionModel,
    TorchRegressor,
)
from sparkhvd.data.columns import labels
from sparkhvd.data.columns.binding import bind_inputs
from sparkhvd.data.columns.schema import Column, DataSchema
from sparkhvd.estimator.params.generated import PredictOptions
from sparkhvd.estimator.transform.outputs import output_columns
from sparkhvd.training.modules.fitted import TrainedState

pytestmark = pytest.mark.pure

VECTOR = Column("features", "vector", "float32", (4,), "vector", "float32")


def scores(width: int = 3, inputs: int = 4) -> nn.Module:
    torch.manual_seed(width)
    return nn.Linear(inputs, width)


def trained(
    cls: type[Any],
    module: nn.Module,
    link: str,
    columns: tuple[Column, ...] = (VECTOR,),
    width: int | None = None,
    **params: Any,
) -> Any:
    """Make a model as `fit` does, without the fit."""
    model = cls(**{"feature_cols": [c.name for c in columns], **params})
    model._fitted = TrainedState(
        module=module.eval(),
        columns=columns,
        labels=("label",),
        inputs=bind_inputs(module, DataSchema(columns, ())),
        links=(link,),
        widths=(width or module.out_features,),
    )
    return model


def classifier(module: nn.Module, link: str = "softmax", **options: Any) -> Any:
    return trained(TorchClassificationModel, module, link, **options)


def test_predict_uses_the_gradient_mode_and_precision_of_validation() -> None:
    class Slope(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            assert not torch.is_grad_enabled()
            assert torch.is_autocast_enabled("cpu")
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                self.slope = torch.autograd.grad((x**3).sum(), x, create_graph=True)[0]
            return self.slope.sum(1, keepdim=True)

    model = trained(TorchRegressionModel, Slope(), "value", width=1, precision="bf16-mixed")
    assert model.predict([1.0, 2.0, 0.0, 0.0]) == 15.0
    assert not hasattr(model.getModel(), "slope")  # of a copy


# -- types and Params


def test_predictors_implement_spark_ml_interfaces() -> None:
    for made, spark in (
        (TorchClassifier(), classification.ProbabilisticClassifier),
        (TorchClassificationModel(), classification.ProbabilisticClassificationModel),
        (TorchRegressor(), regression.Regressor),
        (TorchRegressionModel(), regression.RegressionModel),
    ):
        assert isinstance(made, spark)
        assert made.getLabelCol() == "label"
        assert made.getFeaturesCol() == "features"
        assert made.getPredictionCol() == "prediction"
        assert made.getOutputCols() == [""]
        assert "feature_cols: " in made.explainParams()
    assert isinstance(TorchClassifier(), HasWeightCol)  # OneVsRest asks
    assert isinstance(TorchClassifier().getLoss(), nn.CrossEntropyLoss)
    assert isinstance(TorchRegressor().getLoss(), nn.MSELoss)
    # Spark's Params with the same names are ours, so no Param exists twice.
    for cls in (TorchClassifier, TorchRegressor, TorchClassificationModel, TorchRegressionModel):
        assert not {"labelCol", "featuresCol", "weightCol"} & {p.name for p in cls().params}


def test_param_maps_with_spark_names_reach_predictors() -> None:
    given = TorchClassifier(model=scores(), labelCol="mine", thresholds=[0.2, 0.3, 0.5])
    maps = {
        given.labelCol: "other",
        given.featuresCol: "v",
        given.predictionCol: "p",
        given.thresholds: [1, 2, 3],
        given.weightCol: "w",
    }
    copied = given.copy(maps)
    assert copied.getLabelCol() == "other"
    assert copied.getFeaturesCol() == "v"
    assert copied.getPredictionCol() == "p"
    assert copied.getThresholds() == [1.0, 2.0, 3.0]
    assert copied.getWeightCol() == copied.getSampleWeightCol() == "w"
    assert copied._options().explicit >= {"label_cols", "thresholds"}
    assert given.getLabelCol() == "mine"
    assert given.getThresholds() == [0.2, 0.3, 0.5]
    grid = ParamGridBuilder().addGrid(given.maxIter, [1, 2]).baseOn({given.labelCol: "l"}).build()
    assert [given.copy(m).getEpochs() for m in grid] == [1, 2]


@pytest.mark.parametrize("bad", [[0.5], [0.5, -0.1], [0.0, 0.0, 1.0], [0.5, math.nan], "half"])
def test_thresholds_that_spark_ml_refuses_are_refused(bad: Any) -> None:
    with pytest.raises(TypeError, match="thresholds"):
        TorchClassificationModel().setThresholds(bad)


# -- checks of a fit


def request_of(link: str, output_fn: Any = None) -> Any:
    return SimpleNamespace(links=(link,), options=SimpleNamespace(output_fn=output_fn))


def test_a_classifier_requires_a_loss_that_defines_probabilities() -> None:
    fit = TorchClassifier()
    assert fit._link(request_of("softmax")) == "softmax"
    assert fit._link(request_of("sigmoid")) == "sigmoid"
    assert fit._link(request_of("identity", output_fn=print)) == "softmax"
    for link in ("identity", "value"):
        with pytest.raises(InvalidArgumentError, match="set output_fn to a function"):
            fit._link(request_of(link))
    assert TorchRegressor()._link(request_of("identity")) == "value"


def test_loss_constructors_override_the_default_loss() -> None:
    assert TorchClassifier(loss_constructors=nn.NLLLoss)._options().loss is None
    both = TorchClassifier(loss_constructors=nn.NLLLoss, loss="nll")
    assert both._options().loss is not None  # which is refused later


def test_predictors_refuse_several_label_columns() -> None:
    with pytest.raises(InvalidArgumentError, match=r"TorchRegressor: labelCol has 2 columns"):
        TorchRegressor(label_cols=["a", "b"])._options()
    places = Column("label", "array", "int64", (6,), "array<int>", "int64")
    with pytest.raises(
        InvalidArgumentError,
        match=r"label 'label' has class indices of shape \(6,\) per row, but must have one",
    ):
        TorchClassifier()._check_label(DataSchema((VECTOR,), (places,)))


@pytest.mark.parametrize(
    ("cls", "link", "width", "says"),
    [
        (
            TorchClassificationModel,
            "softmax",
            1,
            "has 1 elements per row. Return one score per class",
        ),
        (TorchClassificationModel, "sigmoid", 3, "BCE-with-logits treats as 3 labels"),
        (
            TorchClassificationModel,
            "value",
            1,
            "it is not known how to compute probabilities from outputs",
        ),
        (TorchRegressionModel, "value", 3, "has 3 elements per row, but must have one"),
    ],
)
def test_predictors_refuse_outputs_of_wrong_width(
    cls: type[TorchModel], link: str, width: int, says: str
) -> None:
    model = trained(cls, scores(width), link)
    for use in (model._check_outputs, lambda _: model.predict([0.0] * 4)):
        with pytest.raises(InvalidArgumentError, match=f"{cls.__name__}: .*{says}"):
            use(model._fitted)


def test_feature_columns_come_from_inputs_before_the_default() -> None:
    inputs = {"numbers": "n", "city": ["c", "d"]}
    assert TorchClassifier(inputs=inputs)._options().feature_cols == ["n", "c", "d"]
    assert TorchClassifier()._options().feature_cols == ["features"]


# -- models


def test_num_classes_and_num_features_match_the_model() -> None:
    assert classifier(scores(3)).numClasses == 3
    assert classifier(scores(1), "sigmoid").numClasses == 2
    assert classifier(scores(3)).numFeatures == 4
    columns = tuple(Column(n, "scalar", "float32", (), "double", "float32") for n in "ab")
    regressor = trained(TorchRegressionModel, scores(1, 2), "value", columns)
    assert regressor.numFeatures == 2
    text = Column("t", "string", "object", (), "string", "int64", has_decoder=True, decoded=())
    assert classifier(scores(3, 1), columns=(text,), decoders={"t": len}).numFeatures == -1


def test_predictors_add_only_the_spark_ml_columns() -> None:
    conf = SimpleNamespace(get=lambda name, default: default)
    df: Any = SimpleNamespace(columns=["features"], sparkSession=SimpleNamespace(conf=conf))
    model = classifier(scores(1), "sigmoid", output_fn=torch.sigmoid)
    outputs = output_columns(model._fitted, model._read_options(PredictOptions), df)
    assert [o.name for o in outputs] == ["rawPrediction", "probability", "prediction"]
    model.setThresholds([0.3, 0.3, 0.4])
    model.setOutputFn(None)
    with pytest.raises(
        InvalidArgumentError, match="thresholds has 3 numbers, but the model has 2 clas"
    ):
        output_columns(model._fitted, model._read_options(PredictOptions), df)
    value = trained(TorchModel, scores(1), "value", predictionCol="p", thresholds=[0.5, 0.5])
    with pytest.raises(InvalidArgumentError, match=r"thresholds is \[0.5, 0.5\], but the loss"):
        output_columns(value._fitted, value._read_options(PredictOptions), df)


@pytest.mark.parametrize(
    "row",
    [
        Vectors.dense(1.0, 0.0, -2.0, 0.5),
        SparseVector(4, [0, 2, 3], [1.0, -2.0, 0.5]),
        [1, 0, -2, 0.5],
        np.array([1.0, 0.0, -2.0, 0.5], np.float32),
    ],
)
def test_predict_methods_compute_single_rows_on_the_driver(row: Any) -> None:
    module = scores(3)
    model = classifier(module)
    with torch.no_grad():
        z = module(torch.tensor([[1.0, 0.0, -2.0, 0.5]]))[0].double()
    assert isinstance(model.predictRaw(row), DenseVector)
    np.testing.assert_allclose(model.predictRaw(row).toArray(), z, rtol=1e-6)
    probability = model.predictProbability(row).toArray()
    np.testing.assert_allclose(probability, torch.softmax(z, 0), rtol=1e-6)
    assert model.predict(row) == float(z.argmax())
    # p / t: the least likely class wins where its threshold is small enough.
    least = int(probability.argmin())
    thresholds = [0.0 if c == least else 0.5 for c in range(3)]
    assert model.setThresholds(thresholds).predict(row) == least


def test_single_logit_gives_probabilities_of_two_classes() -> None:
    module = scores(1)
    row = [0.5, 1.0, 1.5, -1.0]
    with torch.no_grad():
        z = float(module(torch.tensor([row])))
    p = 1 / (1 + math.exp(-z))
    model = classifier(module, "sigmoid")
    assert model.predictRaw(row).toArray() == pytest.approx([-z, z], rel=1e-6)
    assert model.predictProbability(row).toArray() == pytest.approx([1 - p, p], rel=1e-6)
    assert model.predict(row) == float(z > 0)
    assert model.setThresholds([1 - p - 0.01, p + 0.01]).predict(row) == 0.0
    assert model.setThresholds([1 - p + 0.01, p - 0.01]).predict(row) == 1.0
    # A user's function may return only the probability of class 1.
    model = classifier(module, "sigmoid", output_fn=lambda output: torch.sigmoid(-output))
    assert model.predictProbability(row).toArray() == pytest.approx([p, 1 - p], rel=1e-6)
    assert model.predict(row) == float(z < 0)


class Sum(nn.Module):
    """Takes an image and a number apart."""

    def forward(self, image: Tensor, number: Tensor) -> Tensor:
        return image.flatten(1).sum(1) + 100 * number.reshape(-1)


def test_predict_takes_several_columns_as_a_single_vector() -> None:
    image = Column("image", "array", "float32", (2, 3), "array<array<float>>", "float32")
    number = Column("number", "scalar", "int64", (), "int", "int64")
    model = trained(TorchRegressionModel, Sum(), "value", (image, number), width=1)
    assert model.predict([1, 2, 3, 4, 5, 6, 7]) == 721.0
    with pytest.raises(
        InvalidArgumentError,
        match=r"has 6 elements, but .* 7: the numbers of 'image' \(6\), 'number' \(1\)",
    ):
        model.predict([1, 2, 3, 4, 5, 6])
    with pytest.raises(
        InvalidArgumentError, match="column 'number' has 1 rows .* not whole numbers"
    ):
        model.predict([1, 2, 3, 4, 5, 6, 7.5])


def test_output_fn_rescales_predictions_of_a_regressor() -> None:
    module = scores(1)
    plain = trained(TorchRegressionModel, module, "value")
    scaled = trained(TorchRegressionModel, module, "value", output_fn=torch.exp)
    row = [1.0, 2.0, 3.0, 4.0]
    assert scaled.predict(row) == pytest.approx(math.exp(plain.predict(row)), rel=1e-6)


def test_rows_that_are_not_one_vector_raise_a_clear_error() -> None:
    text = Column("t", "string", "object", (), "string", "int64", has_decoder=True, decoded=())
    model = classifier(scores(3, 1), columns=(text,), decoders={"t": len})
    with pytest.raises(
        InvalidArgumentError,
        match="reads column 't' of type string, whose values a vector cannot hold",
    ):
        model.predict([1.0])
    bad = [1.0, math.nan, 0.0, 0.0]
    with pytest.raises(InvalidArgumentError, match="column 'features' is NaN in 1 rows"):
        classifier(scores(3)).predict(bad)
    with pytest.raises(InvalidArgumentError, match="handle_invalid='skip' would skip it"):
        classifier(scores(3), handle_invalid="skip").predict(bad)
    filled = classifier(scores(3), handle_invalid={"features": 0.0})
    assert filled.predictRaw(bad) == classifier(scores(3)).predictRaw([1.0, 0.0, 0.0, 0.0])
    with pytest.raises(InvalidArgumentError, match="has no trained module"):
        TorchClassificationModel().predict(bad)


def test_thresholds_select_classes_like_spark_ml() -> None:
    """The expected classes follow the rule of `ProbabilisticClassificationModel.probability2prediction`."""
    generator = np.random.default_rng(1)
    probability = generator.dirichlet([1.0, 1.0, 1.0], 200)
    probability[:40, 0], probability[40:60, 1] = 0.0, 0.0
    for thresholds in ([0.5, 0.2, 0.3], [0.0, 0.4, 0.6], [1.0, 1.0, 1.0]):
        expected = []
        for row in probability:
            best, chosen = -math.inf, 0
            for c, (p, t) in enumerate(zip(row, thresholds, strict=True)):
                scaled = p / t if t else (math.inf if p else math.nan)
                if scaled > best:
                    best, chosen = scaled, c
            expected.append(chosen)
        assert labels.most_likely(torch.tensor(probability), thresholds).tolist() == expected
    with pytest.raises(
        InvalidArgumentError, match="thresholds has 2 numbers, but the model has 3 classes"
    ):
        labels.most_likely(torch.tensor(probability), [0.5, 0.5])


def test_from_module_wraps_a_pretrained_module() -> None:
    module = scores(3)
    model = TorchClassificationModel.from_module(module, loss="cross_entropy", widths=[3])
    assert (model.numClasses, model.numFeatures) == (3, -1)
    assert model.predictRaw([1.0, 0.0, 2.0, 0.0]) == classifier(module).predictRaw([1, 0, 2, 0])
    value = TorchRegressionModel.from_module(scores(1, 2), feature_cols=["a", "b"])
    expected = scores(1, 2)(torch.tensor([[1.0, 2.0]])).detach()
    assert value.predict([1.0, 2.0]) == pytest.approx(float(expected), rel=1e-6)
    unknown = TorchClassificationModel.from_module(module)
    with pytest.raises(InvalidArgumentError, match=r"or link='softmax' or 'sigmoid', to TorchClas"):
        unknown.predict([1.0, 2.0, 3.0, 4.0])
    several = TorchRegressionModel.from_module(module, widths=[1, 2])
    with pytest.raises(InvalidArgumentError, match="the model has 2 outputs, but must have on"):
        several._check_outputs(several._fitted)


@pytest.mark.parametrize("cls", [TorchClassificationModel, TorchRegressionModel])
def test_evaluation_without_its_columns_raises(cls: type[Any]) -> None:
    with pytest.raises(InvalidArgumentError, match="predictionCol='' omits"):
        cls(predictionCol="")._named("predictionCol")
