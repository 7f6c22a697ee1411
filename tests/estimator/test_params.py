"""Params without a Spark session: keyword arguments, getters and setters, copies and explanations."""

from __future__ import annotations

import ast
import inspect
import warnings
from typing import Any

import pandas as pd
import pytest
import torch
from pyspark.ml.param import Param
from pyspark.ml.tuning import ParamGridBuilder
from torch import nn

from sparkhvd import Settings, TorchEstimator, TorchModel
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.estimator.fitting.inputs import dataframe_sources
from sparkhvd.estimator.params.base import ELSEWHERE, camel_case
from sparkhvd.estimator.params.generated import EstimatorKeywords, FitOptions
from sparkhvd.estimator.params.groups import TrainParams
from sparkhvd.estimator.params.table import GROUPS, rows_of, short_repr
from sparkhvd.observe.loggers.base import Fit, Logger, Sink
from tools import keywords

pytestmark = pytest.mark.pure

NAMES = [p.name for p in TorchEstimator().params]
ROWS = rows_of(TorchEstimator)
ALIASES = {alias: name for name, row in ROWS.items() for alias in row.aliases}
ACCESSORS = {camel: name for name, row in ROWS.items() for camel in row.accessors}
NO_EFFECT = {name: row.no_effect for name, row in ROWS.items() if row.no_effect}
without_effect = pytest.mark.filterwarnings("ignore:.* has no effect in sparkhvd")


@without_effect
def test_every_param_has_a_doc_a_getter_and_a_chainable_setter() -> None:
    estimator = TorchEstimator()
    for param in estimator.params:
        assert param.doc
        setter = getattr(estimator, f"set{camel_case(param.name)}")
        getter = getattr(estimator, f"get{camel_case(param.name)}")
        value = EXAMPLES.get(param.name, param.name)
        assert setter(value) is estimator
        assert getter() == value
        assert setter.__doc__.startswith(f"Set `{param.name}`")


class Nowhere(Logger):
    """Logger that logs nothing."""

    def begin(self, fit: Fit) -> Sink:
        return Sink()


EXAMPLES: dict[str, Any] = {
    "feature_cols": ["a"],
    "label_cols": ["b"],
    "input_shapes": [[-1, 2]],
    "inputs": {"x": ["a"]},
    "feature_dtypes": ["float32"],
    "label_dtypes": {"b": "int64"},
    "outputCols": ["o"],
    "output_fn": torch.sigmoid,
    "optimizer": torch.optim.SGD,
    "loss": torch.nn.functional.mse_loss,
    "loss_weights": [0.5],
    "thresholds": [0.4, 0.6],
    "decoders": {"a": len},
    "collate_fn": {"a": max},
    "sparse_cols": ["a"],
    "num_workers": 7,
    "val_reader_num_workers": 7,
    "label_shapes": [[-1, 1]],
    "batch_size": 7,
    "val_batch_size": 7,
    "epochs": 7,
    "num_proc": 7,
    "elastic_batch": "global",
    "shuffle": False,
    "shuffle_bytes": 7,
    "drop_last": True,
    "random_seed": 7,
    "gradient_clip_norm": 0.5,
    "gradient_clip_value": 0.5,
    "accumulate": 7,
    "train_steps_per_epoch": 7,
    "validation_steps_per_epoch": 7,
    "early_stopping": {"patience": 7},
    "terminate_on_nan": True,
    "compile": True,
    "pairs_rows": False,
    "lr_scheduler": print,
    "restore_best": True,
    "learning_rate": 0.5,
    "weight_decay": 0.5,
    "inmemory_cache_all": True,
    "use_gpu": True,
    "verbose": 0,
    "progress": print,
    "settings": Settings(),
    "loggers": [Nowhere()],
    "timeline": 7,
    "max_retries": 0,
    "keep_checkpoints": 2,
    "start_timeout": 1.5,
    "warm_start": True,
    "checkpoint_interval_s": 1.5,
    "keep_data": True,
    "num_partitions": 3,
    "group_col": "q",
}


@without_effect
def test_keyword_arguments_set_params_and_none_keeps_defaults() -> None:
    estimator = TorchEstimator(**{n: EXAMPLES.get(n, n) for n in NAMES})
    for name in NAMES:
        assert estimator.getOrDefault(name) == EXAMPLES.get(name, name)
    assert not TorchEstimator(model=None, epochs=None).isSet("model")
    assert TorchEstimator(epochs=None).getEpochs() == 1
    # This includes a Param with a value, by either of its names.
    named = TorchEstimator(run_id="a", epochs=4, label_cols="y", feature_cols="x")
    assert named.setParams(run_id=None, maxIter=None, labelCol=None) is named
    assert (named.getRunId(), named.getEpochs(), named.getLabelCols()) == (None, 1, None)
    assert named.getFeatureCols() == ["x"]
    assert named.setParams(epochs=3, maxIter=None).getEpochs() == 3
    assert named.setParams(maxIter=None, epochs=5).getEpochs() == 5
    assert estimator.setParams(**dict.fromkeys(NAMES))._options() == TorchEstimator()._options()


def test_optimizers_and_losses_can_be_given_by_name() -> None:
    estimator = TorchEstimator(optimizer="AdamW", loss=["mse", torch.nn.functional.l1_loss])
    assert estimator.getOptimizer() is torch.optim.AdamW
    mse, own = estimator.getLoss()
    assert isinstance(mse, torch.nn.MSELoss)
    assert own is torch.nn.functional.l1_loss
    assert isinstance(TorchEstimator(loss="cross_entropy").getLoss(), torch.nn.CrossEntropyLoss)
    for names in ({"optimizer": "adm"}, {"loss": "mean"}, {"loss": ["mse", "x"]}):
        with pytest.raises(
            TypeError, match="is not one of 'sgd', 'adam'|is not one of 'mse', 'mae'"
        ):
            TorchEstimator(**names)


def test_error_shows_the_form_for_arguments_of_other_libraries() -> None:
    parameters = [nn.Parameter(torch.zeros(1))]
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(parameters, lr=1.0), 1)
    with pytest.raises(TypeError, match=r"lr_scheduler=lambda optimizer: torch\.optim\..*StepLR\("):
        TorchEstimator(lr_scheduler=scheduler)
    with pytest.raises(TypeError, match=r"early_stopping=\{'patience': 3, "):
        TorchEstimator(early_stopping=True)  # type: ignore[arg-type]


def test_pandas_dataframe_error_shows_createdataframe() -> None:
    frame: Any = pd.DataFrame({"x": [1.0]})
    for call, act in (("fit", TorchEstimator().fit), ("transform", TorchModel().transform)):
        with pytest.raises(InvalidArgumentError) as failed:
            act(frame)
        assert str(failed.value) == (
            f"{call} got a pandas.DataFrame; it takes a DataFrame of Spark: convert it with spark.createDataFrame(frame)."
        )
    with pytest.raises(
        InvalidArgumentError, match=r"(?s)^validation is .* or a DataFrame of Spark\. Convert"
    ):
        dataframe_sources(frame, frame)
    with pytest.raises(InvalidArgumentError, match=r"fit got a builtins.dict; .*createDataFrame\("):
        TorchEstimator().fitMultiple({}, [])  # type: ignore[arg-type]


def test_signature_lists_effective_params_by_group() -> None:
    names = list(inspect.signature(TorchEstimator).parameters)
    dead = {*NO_EFFECT, *(n for n, row in ROWS.items() if row.refused)}
    assert set(names) == set(NAMES) - dead
    groups = [ROWS[name].group for name in names]
    assert list(dict.fromkeys(groups)) == [*GROUPS, ""]
    assert groups == sorted(groups, key=[*GROUPS, ""].index)
    assert not dead & EstimatorKeywords.__annotations__.keys()


def test_fit_has_its_own_docstring() -> None:
    text = inspect.getdoc(TorchEstimator.fit) or ""
    assert text.startswith("Train on a DataFrame")
    assert all(word in text for word in ("dataset:", "params:", "Returns:", "RankError:"))
    assert list(inspect.signature(TorchEstimator.fit).parameters) == ["self", "dataset", "params"]


def test_fit_options_contain_the_given_param_values() -> None:
    assert TorchEstimator(epochs=3, maxIter=None, label_cols="y")._options() == FitOptions(
        epochs=3, label_cols=["y"], explicit=frozenset({"epochs", "label_cols"})
    )
    both = TorchEstimator(restore_best=True, inmemory_cache_all=True, shuffle_bytes=5)
    options = both._options()
    assert (options.return_model, options.shuffle_bytes) == ("best", 1 << 62)
    with pytest.raises(InvalidArgumentError) as refused:
        TorchEstimator(train_minibatch_fn=print)._options()
    assert str(refused.value) == (
        "train_minibatch_fn is an argument of Horovod. Give train_step instead, a function (model, batch, ctx) that returns the "
        "loss: the loop calls backward() and the optimizer."
    )


def test_constructor_accepts_spark_ml_param_names() -> None:
    estimator = TorchEstimator(featuresCol="f", labelCol="l", maxIter=3, seed=4, batchSize=5)
    assert estimator.getFeatureCols() == ["f"]
    assert estimator.getLabelCols() == ["l"]
    assert (estimator.getEpochs(), estimator.getRandomSeed(), estimator.getBatchSize()) == (3, 4, 5)
    assert estimator.setParams(weightCol="w") is estimator
    assert estimator.getSampleWeightCol() == "w"


def test_spark_ml_names_work_as_params_and_accessors() -> None:
    estimator = TorchEstimator()
    for alias, name in ALIASES.items():
        param = getattr(estimator, alias)
        assert param is getattr(estimator, name)  # as ParamGridBuilder needs it
        assert estimator.getParam(alias) is param
        value = {"feature_cols": "f", "label_cols": "l"}.get(name, EXAMPLES.get(name, name))
        assert getattr(estimator, f"set{camel_case(alias)}")(value) is estimator
        # Spark's getter returns one column unchanged, Horovod's a list.
        expected = [value] if camel_case(alias) in ACCESSORS else value
        assert getattr(estimator, f"get{camel_case(alias)}")() == expected
    assert estimator.getFeatureCols() == ["f"]
    assert estimator.setFeaturesCol(["f", "g"]).getFeaturesCol() == ["f", "g"]
    assert len({p.name for p in estimator.params}) == len(estimator.params) == len(NAMES)
    grid = ParamGridBuilder().addGrid(estimator.maxIter, [1, 2]).build()
    assert [estimator.copy(m).getEpochs() for m in grid] == [1, 2]
    model = TorchModel().setFeaturesCol("f").setPredictionCol("p")
    assert (model.getFeatureCols(), model.getPredictionCol()) == (["f"], "p")
    assert not hasattr(model, "maxIter")


@without_effect
def test_horovod_accessors_exist() -> None:
    estimator = TorchEstimator()
    for camel, name in ACCESSORS.items():
        value = EXAMPLES.get(name, name)
        assert getattr(estimator, f"set{camel}")(value) is estimator
        assert getattr(estimator, f"get{camel}")() == estimator.getOrDefault(name) == value


def test_params_without_effect_warn_once_with_the_remedy() -> None:
    for name, instead in NO_EFFECT.items():
        with pytest.warns(UserWarning, match=name) as caught:
            estimator = TorchEstimator(**{name: 5})
        texts = [str(w.message) for w in caught]
        assert texts == [f"{name} has no effect in sparkhvd: {instead}."]
        assert caught[0].filename == __file__
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            estimator.copy({estimator.getParam(name): 6}).setParams(**{name: 7})
    with pytest.warns(UserWarning, match="backend has no effect in sparkhvd: give num_proc."):
        estimator = TorchEstimator().setBackend(object())
    assert all(name not in TorchEstimator().explainParams() for name in NO_EFFECT)
    assert "backend: no effect" in estimator.copy({estimator.backend: 3}).explainParams()


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        (
            {"batchsize": 3},
            "TorchEstimator() got an unexpected keyword argument 'batchsize'. Did you mean 'batch_size'?",
        ),
        ({"qqq": 3}, "TorchEstimator() got an unexpected keyword argument 'qqq'."),
        (
            {"num_gpus": 1},
            "TorchEstimator() got an unexpected keyword argument 'num_gpus'. It is of horovod.spark.lightning; give "
            "num_proc.",
        ),
        (
            {"epochs": 3, "maxIter": 3},
            "TorchEstimator(): 'epochs' and 'maxIter' are names of the same param, 'epochs'. Give only one of them.",
        ),
        (
            {"batch_size": "64"},
            "Invalid param value given for param \"batch_size\". expected a whole number, not '64'",
        ),
        (
            {"epochs": True},
            'Invalid param value given for param "epochs". expected a whole number, not True',
        ),
        (
            {"learning_rate": "0.1"},
            "Invalid param value given for param \"learning_rate\". expected a number, not '0.1'",
        ),
        (
            {"inputs": ["a"]},
            'Invalid param value given for param "inputs". expected a dict from argument names to column names',
        ),
        (
            {"progress": 1},
            'Invalid param value given for param "progress". expected a function',
        ),
    ],
)
def test_invalid_arguments_raise_typeerror(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError) as failed:
        TorchEstimator(**keywords)
    assert str(failed.value) == message


def test_positional_arguments_are_refused() -> None:
    for call in (TorchEstimator, TorchEstimator().setParams):
        with pytest.raises(TypeError) as failed:
            call(nn.Linear(1, 1))
        assert str(failed.value) == (
            "TorchEstimator() takes only keyword arguments, but got <Linear: 2 parameters> without a name. Write for "
            "example TorchEstimator(model=...)."
        )
    with pytest.raises(TypeError, match=r"TorchModel\(feature_cols=...\)"):
        TorchModel("x")
    assert not set(ELSEWHERE) & {*NAMES, *ALIASES}


def test_estimator_copy_keeps_values_and_is_independent() -> None:
    model = nn.Linear(1, 1)
    estimator = TorchEstimator(model=model, epochs=3, label_cols=["y"])
    copied = estimator.copy({estimator.epochs: 5})
    assert copied.getModel() is model
    assert copied.getLabelCols() == ["y"]
    assert (copied.getEpochs(), estimator.getEpochs()) == (5, 3)
    assert copied.uid == estimator.uid


def test_param_explanations_are_short() -> None:
    model = nn.Sequential(*(nn.Linear(10, 10) for _ in range(50)))
    estimator = TorchEstimator(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    text = estimator.explainParams()
    assert max(len(line) for line in text.splitlines()) < 200
    assert "(current: <Sequential: 5,500 parameters>)" in text
    assert "(current: <SGD: 1 parameter group>)" in text
    assert "batch_size: rows per rank and step (default: 32)" in text
    assert len(text.splitlines()) == len(set(NAMES) - set(NO_EFFECT))


def test_reprs_of_param_values_are_short() -> None:
    columns = [f"column_{i}" for i in range(200)]
    assert short_repr(columns).endswith("... (200 in all)")
    assert len(short_repr(columns)) == 80
    assert short_repr({"a": nn.ReLU()}) == "{'a': <ReLU: 0 parameters>}"
    assert short_repr([torch.optim.Adam]) == "[<torch.optim.adam.Adam>]"
    assert short_repr(nn.Identity) == "<torch.nn.modules.linear.Identity>"
    assert short_repr(nn.LazyLinear(1)) == "<LazyLinear: 0 parameters>"
    assert short_repr("x" * 200) == "'" + "x" * 76 + "..."


def test_model_has_only_the_params_that_transform_uses() -> None:
    names = {p.name for p in TorchModel().params}
    assert names < set(NAMES)
    assert "feature_cols" in names
    assert "epochs" not in names
    with pytest.raises(ValueError, match="TorchModel has no trained module"):
        _ = TorchModel().history


def test_every_declared_param_is_a_class_attribute() -> None:
    assert all(isinstance(getattr(TrainParams, n), Param) for n in NAMES)


def test_setters_accept_none_and_getters_return_it() -> None:
    estimator = TorchEstimator()
    assert estimator.getValidation() is None
    assert estimator.setValidation(0.1).getValidation() == 0.1
    assert estimator.setValidation(None).getValidation() is None
    assert estimator.setBatchSize(4).setBatchSize(None).getBatchSize() == 32


def test_none_in_a_param_map_clears_the_param() -> None:
    estimator = TorchEstimator(epochs=3, feature_cols=["a"])
    copied = estimator.copy({estimator.epochs: None, estimator.feature_cols: None})
    assert (copied.getEpochs(), copied.getFeatureCols()) == (1, None)
    assert estimator.getEpochs() == 3


def test_assignment_to_a_param_raises() -> None:
    estimator = TorchEstimator(epochs=2)
    for wrong in ("epochs", "batchsize", "batchSize", "batch_sise", "featurecols", "maxIter"):
        with pytest.raises(AttributeError, match=r"is a Param\. Call set"):
            setattr(estimator, wrong, 3)
    assert estimator.getEpochs() == 2
    assert estimator.epochs is estimator.getParam("epochs")
    estimator.note = "an attribute of the user's own"


def test_generated_types_match_the_param_table() -> None:
    written, expected = keywords.FILE.read_text(), keywords.source()
    assert ast.dump(ast.parse(written)) == ast.dump(ast.parse(expected)), (
        "Run: python -m tools.keywords"
    )


def test_feature_columns_default_to_the_columns_of_inputs() -> None:
    by_name = TorchEstimator(inputs={"x": ["a", "b"], "y": "a"})
    assert by_name._options().feature_cols == ["a", "b"]
    assert by_name.copy({by_name.feature_cols: ["c"]})._options().feature_cols == ["c"]
    transformed = by_name.copy({by_name.transformation_fn: lambda row: row})
    assert transformed._options().feature_cols is None
