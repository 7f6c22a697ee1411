"""Params: keyword arguments, getters and setters, copies and explanations. No Spark session."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from pyspark.ml.param import Param
from torch import nn

from sparkhvd import Settings, TorchEstimator, TorchModel
from sparkhvd.estimator.params import TrainParams, camel_case, short_repr

NAMES = [p.name for p in TorchEstimator().params]


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


EXAMPLES: dict[str, Any] = {
    "feature_cols": ["a"],
    "label_cols": ["b"],
    "input_shapes": [[-1, 2]],
    "inputs": {"x": ["a"]},
    "feature_dtypes": ["float32"],
    "label_dtypes": {"b": "int64"},
    "outputCols": ["o"],
    "output_fn": torch.sigmoid,
    "loss_weights": [0.5],
    "batch_size": 7,
    "val_batch_size": 7,
    "epochs": 7,
    "num_proc": 7,
    "shuffle": False,
    "shuffle_bytes": 7,
    "drop_last": True,
    "random_seed": 7,
    "gradient_clip_norm": 0.5,
    "lr_scheduler": print,
    "restore_best": True,
    "verbose": 0,
    "progress": print,
    "settings": Settings(),
    "max_retries": 0,
    "start_timeout": 1.5,
    "keep_data": True,
}


def test_keyword_arguments_are_params_and_none_means_not_given() -> None:
    estimator = TorchEstimator(**{n: EXAMPLES.get(n, n) for n in NAMES})
    for name in NAMES:
        assert estimator.getOrDefault(name) == EXAMPLES.get(name, name)
    assert not TorchEstimator(model=None, epochs=None).isSet("model")
    assert TorchEstimator(epochs=None).getEpochs() == 1
    assert set(inspect.signature(TorchEstimator).parameters) == set(NAMES)


def test_sparks_names_are_taken_too() -> None:
    estimator = TorchEstimator(featuresCol="f", labelCol="l", maxIter=3, seed=4, batchSize=5)
    assert estimator.getFeatureCols() == ["f"]
    assert estimator.getLabelCols() == ["l"]
    assert (estimator.getEpochs(), estimator.getRandomSeed(), estimator.getBatchSize()) == (3, 4, 5)
    assert estimator.setParams(weightCol="w") is estimator
    assert estimator.getSampleWeightCol() == "w"


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        (
            {"batchsize": 3},
            "TorchEstimator() got an unexpected keyword argument 'batchsize'. Did you mean 'batch_size'?",
        ),
        ({"qqq": 3}, "TorchEstimator() got an unexpected keyword argument 'qqq'."),
        (
            {"epochs": 3, "maxIter": 3},
            "TorchEstimator(): 'maxIter' is another name of 'epochs', which is given too.",
        ),
        (
            {"batch_size": "many"},
            'Invalid param value given for param "batch_size". Could not convert many to int',
        ),
        (
            {"epochs": True},
            'Invalid param value given for param "epochs". expected a whole number',
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
def test_bad_arguments_are_type_errors(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError) as failed:
        TorchEstimator(**keywords)
    assert str(failed.value) == message


def test_positional_arguments_are_refused() -> None:
    with pytest.raises(TypeError):
        TorchEstimator(nn.Linear(1, 1))  # type: ignore[call-arg]


def test_a_copy_keeps_everything_and_is_its_own() -> None:
    model = nn.Linear(1, 1)
    estimator = TorchEstimator(model=model, epochs=3, label_cols=["y"])
    copied = estimator.copy({estimator.epochs: 5})
    assert copied.getModel() is model
    assert copied.getLabelCols() == ["y"]
    assert (copied.getEpochs(), estimator.getEpochs()) == (5, 3)
    assert copied.uid == estimator.uid


def test_explanations_are_short() -> None:
    model = nn.Sequential(*(nn.Linear(10, 10) for _ in range(50)))
    estimator = TorchEstimator(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    text = estimator.explainParams()
    assert max(len(line) for line in text.splitlines()) < 200
    assert "(current: <Sequential: 5,500 parameters>)" in text
    assert "(current: <SGD: 1 parameter group>)" in text
    assert "batch_size: rows per rank and step (default: 32)" in text
    assert len(text.splitlines()) == len(NAMES)


def test_short_reprs() -> None:
    assert short_repr({"a": nn.ReLU()}) == "{'a': <ReLU: 0 parameters>}"
    assert short_repr([torch.optim.Adam]) == "[<torch.optim.adam.Adam>]"
    assert short_repr("x" * 200) == "'" + "x" * 76 + "..."


def test_a_model_has_only_what_it_uses() -> None:
    names = {p.name for p in TorchModel().params}
    assert names < set(NAMES)
    assert "feature_cols" in names
    assert "epochs" not in names
    with pytest.raises(ValueError, match="TorchModel has no trained module"):
        _ = TorchModel().history


def test_declared_params_are_found() -> None:
    assert all(isinstance(getattr(TrainParams, n), Param) for n in NAMES)


def test_a_getter_gives_none_and_a_setter_takes_it() -> None:
    estimator = TorchEstimator()
    assert estimator.getValidation() is None
    assert estimator.setValidation(0.1).getValidation() == 0.1
    assert estimator.setValidation(None).getValidation() is None
    assert estimator.setBatchSize(4).setBatchSize(None).getBatchSize() == 32
