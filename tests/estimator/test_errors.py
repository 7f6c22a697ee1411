"""Clear errors for invalid input, at the earliest possible moment. Only the last group starts a Spark job."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

import sparkhvd.torch as hvd
from sparkhvd import (
    InvalidArgumentError,
    PreflightError,
    RankError,
    Settings,
    Store,
    TorchEstimator,
    lazy_compiler,
)
from tests.estimator.fits import estimator, fitted, mlp
from tests.harness import faults
from tests.harness.by_value import by_value

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark


travels_by_value = by_value(__name__)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(tmp_path / "store")


@pytest.fixture(scope="module")
def df(spark: SparkSession) -> DataFrame:
    rows = [([1.0, 2.0], 1.0, "a", 1)] * 10
    return spark.createDataFrame(rows, "x array<double>, y double, text string, k int")


MODEL = mlp(2)
OTHER = mlp(2)
with (
    lazy_compiler.installed()
):  # otherwise the collection of tests imports torch's compiler, for seconds
    OF_OTHER, OF_MODEL = (torch.optim.SGD(net.parameters(), lr=0.1) for net in (OTHER, MODEL))


class Unpicklable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.lock = threading.Lock()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)

    def __deepcopy__(self, memo: Any) -> Unpicklable:
        return self


class Locked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.lock = threading.Lock()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


UNPICKLABLE = Unpicklable()
LOCK = threading.Lock()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": None}, "model is required: give the torch.nn.Module to train."),
        ({"model": "net"}, "model is 'net'; it must be a torch.nn.Module."),
        (
            {"model": nn.ReLU()},
            "model has no parameter that requires a gradient, so there is nothing to train.",
        ),
        (
            {"optimizer": None},
            "optimizer is required: give an optimizer over model.parameters(), or a function of the parameters, for "
            "example torch.optim.Adam.",
        ),
        (
            {"optimizer": OF_OTHER},
            "optimizer: parameter group 0 holds a parameter of shape (6, 2) that the model does not "
            "have, so it belongs to another model. Build the optimizer from this model's parameters()"
            " and the loss's parameters, or give a function of the parameters.",
        ),
        (
            {"optimizer": 0.1},
            "optimizer is 0.1; it must be a torch.optim.Optimizer, a list of optimizers, or a function of the model's parameters.",
        ),
        (
            {"optimizer": list},
            "optimizer: calling it with the model's parameters returned [Parameter containing",
        ),
        (
            {"loss": None},
            "loss is required: give a function of (output, label), for example torch.nn.MSELoss().",
        ),
        (
            {"loss": nn.MSELoss},
            "loss is <class 'torch.nn.modules.loss.MSELoss'>; it must be a function of (output, label). Give an "
            "instance: MSELoss().",
        ),
        (
            {"loss": [nn.MSELoss(), nn.MSELoss()]},
            "loss has 2 entries, but label_cols has 1. Give one loss, or one loss per label.",
        ),
        (
            {"loss": nn.MSELoss(reduction="none")},
            "loss is MSELoss with reduction='none', but a loss must return one number. Use reduction='mean'.",
        ),
        (
            {"loss": max, "sample_weight_col": "k"},
            "loss: sample_weight_col needs a loss that can return one value per row, but <built-in "
            "function max> has no argument 'reduction'. Give a torch.nn loss, or a function of "
            "(output, label, reduction).",
        ),
        (
            {"optimizer": lambda p: torch.optim.SGD(p, lr=-1.0)},
            "optimizer: calling it with the model's parameters failed: ValueError: Invalid learning rate: -1.0. Give",
        ),
        (
            {"loss": nn.CrossEntropyLoss(), "label_dtypes": ["float32"]},
            "label_cols names column 'y' of type double, but CrossEntropyLoss needs class indices.",
        ),
        (
            {"feature_cols": ["k"], "model": nn.Linear(1, 1)},
            "model: forward failed on two rows of zeros (k (2,); argument = 'k' (int64)): RuntimeError:",
        ),
        ({"label_cols": None}, "label_cols is required: name the columns with the labels."),
        (
            {"feature_cols": None},
            "feature_cols is required: name the columns that become the model's input.",
        ),
        (
            {"feature_cols": ["X"]},
            "feature_cols[0] names column 'X', which the DataFrame does not have. Did you mean 'x'? Its columns are: "
            "'x', 'y', 'text', 'k'.",
        ),
        (
            {"label_cols": ["text"]},
            "label_cols[0] names column 'text' of type string, which cannot become a tensor.",
        ),
        ({"batch_size": 0}, "batch_size is 0; it must be at least 1."),
        ({"epochs": -1}, "epochs is -1; it must be at least 1."),
        ({"max_retries": -1}, "max_retries is -1; it must be at least 0."),
        ({"gradient_clip_norm": 0.0}, "gradient_clip_norm is 0.0; it must be more than 0."),
        ({"validation": 1.5}, "validation is 1.5. A fraction must be at least 0 and less than 1,"),
        (
            {"restore_best": True},
            "restore_best needs validation rows to decide which epoch is best. Set validation, for example 0.1, or set "
            "monitor to another key of the history.",
        ),
        (
            {"loss_weights": [0.5, 0.5]},
            "loss_weights has 2 numbers and label_cols 1 columns. Give one per label.",
        ),
        (
            {"metrics": ["recall"]},
            "metrics has the name 'recall', which is not a built-in metric. Give one of accuracy, "
            "mse, mae, f1, auc, or a function of (output, label).",
        ),
        (
            {"metrics": {"loss": "mse"}},
            "metrics: the name 'loss' is reserved. Give a dict from other names to functions.",
        ),
        (
            {"model": UNPICKLABLE, "optimizer": torch.optim.SGD},
            "model cannot be sent to the ranks: pickling failed at model.lock: TypeError: cannot pickle '_thread.lock' object. Build",
        ),
        (
            {"model": nn.Sequential(Locked()), "optimizer": torch.optim.SGD, "feature_cols": ["y"]},
            "model cannot be sent to the ranks: pickling failed at model.0.lock: TypeError: cannot pickle '_thread.lock' object. Build",
        ),
        (
            {"loss": lambda output, label, lock=LOCK: (output - label).mean()},
            "loss cannot be sent to the ranks: pickling failed at loss: variable 'lock': TypeError: cannot pickle",
        ),
        (
            {"store": 3},
            "store is 3; it must be a Store, for example Store.create('/shared/folder').",
        ),
        (
            {"run_id": "../x"},
            "run_id is '../x'; it names a folder and may hold only letters, digits, '.', '_' and '-'.",
        ),
        (
            {"model": lambda: mlp(2), "optimizer": OF_MODEL},
            "optimizer is an instance of SGD with the parameters of one model, but model is a function",
        ),
        ({"model": lambda: 3}, "model: the function returned 3; it must return a torch.nn.Module."),
        (
            {"model": nn.Linear},
            "model: calling the function failed: TypeError: Linear.__init__() missing 2 required",
        ),
        ({"learning_rate": -1.0}, "learning_rate is -1.0; it must be 0 or more."),
        (
            {"weight_decay": 0.1, "optimizer": lambda p: torch.optim.Rprop(p)},
            "weight_decay is given, but Rprop has no 'weight_decay' to set. Leave weight_decay out.",
        ),
        (
            {"lr_scaling": "square"},
            "lr_scaling is 'square'; it must be 'linear'. Leave it out to use learning rates unchanged.",
        ),
        (
            {"loss_constructors": [nn.MSELoss]},
            "loss and loss_constructors are both given. Give only one of them.",
        ),
        (
            {"loss": None, "loss_constructors": [lambda rate: rate]},
            "loss_constructors: calling <function",
        ),
        (
            {"gradient_compression": "fp16"},
            "gradient_compression: compression='fp16' has no compress() and decompress().",
        ),
        ({"settings": {}}, "settings is {}; it must be a sparkhvd.Settings."),
        (
            {"inputs": {"z": "x"}},
            "inputs names the argument 'z', which forward does not take.",
        ),
    ],
)
def test_error_names_wrong_params_before_any_job(
    df: DataFrame, store: Store, options: dict[str, Any], message: str
) -> None:
    given = {
        "model": MODEL,
        "optimizer": torch.optim.SGD,
        "loss": nn.MSELoss(),
        "feature_cols": ["x"],
        "label_cols": ["y"],
        "num_proc": 2,
        "store": store,
    }
    fit = TorchEstimator(**{**given, **options})
    tracker = df.sparkSession.sparkContext.statusTracker()
    jobs = tracker.getJobIdsForGroup()
    with pytest.raises(InvalidArgumentError) as failed:
        fit.fit(df)
    assert str(failed.value).startswith(message)
    assert tracker.getJobIdsForGroup() == jobs


def test_use_gpu_without_a_gpu_raises_an_error_with_the_cause(df: DataFrame, store: Store) -> None:
    fit = estimator(mlp(2), store, use_gpu=True, num_proc=1)
    # Variables of CUDA would start another zygote, and the next fit without them one more.
    fit.setSettings(Settings(cuda_library="/nowhere/libcuda.so.1", nursery="0"))
    # A torch that cannot use a GPU is an error before the search for a GPU.
    found = (
        r"sees no GPU.*: /nowhere/libcuda\.so\.1: cannot open shared"
        if torch.version.cuda
        else "has torch .*, which is built without CUDA"
    )
    with pytest.raises(PreflightError, match=rf"use_gpu is True, and rank 0 on host \S+ {found}"):
        fit.fit(df)


def test_too_many_ranks_raise_before_any_job(df: DataFrame, store: Store) -> None:
    with pytest.raises(
        PreflightError, match=r"num_proc=3: the application can run 2 barrier tasks"
    ) as failed:
        estimator(mlp(2), store, num_proc=3).fit(df)
    assert len(failed.traceback) == 2  # here and `fit`: a notebook shows the code of every frame
    assert store.list("data") == []


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (
            nn.Linear(3, 1),
            {},
            "model: forward failed on two rows of zeros (x (2, 2); argument = 'x' (float32)): RuntimeError: mat1 and mat2 shapes "
            "cannot be multiplied (2x2 and 3x1). A linear layer takes 3 numbers per row and gets 2: make it with in_features=2, or "
            "give other columns.",
        ),
        (
            nn.Sequential(nn.Linear(2, 1), nn.Flatten(0)),
            {"label_cols": ["y", "k"]},
            "model: forward returned 1 outputs, but label_cols has 2 columns ('y', 'k'). Return one "
            "tensor per label column, in the same order.",
        ),
    ],
)
def test_a_model_that_mismatches_the_data_raises_before_ranks_start(
    df: DataFrame, store: Store, model: nn.Module, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidArgumentError) as failed:
        estimator(model, store, **options).fit(df)
    assert str(failed.value).startswith(message)


class Ranked(nn.Module):
    """A module that runs only on ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) + 0.0 * hvd.rank()


def test_model_whose_forward_needs_a_rank_is_trained(df: DataFrame, store: Store) -> None:
    model = estimator(Ranked(), store, num_proc=1).fit(df)
    assert model.transform(df).columns[-2:] == ["y__output", "prediction"]
    assert dict(model.transform(df).dtypes)["y__output"] == "double"


def test_error_of_a_custom_loss_on_integer_labels_suggests_label_dtypes(
    df: DataFrame, store: Store
) -> None:
    fit = estimator(
        mlp(2),
        store,
        num_proc=1,
        label_cols=["k"],
        loss=lambda output, label: nn.functional.huber_loss(output, label),  # fails in backward
    )
    with pytest.raises(RankError, match=r"Found dtype Long .*give label_dtypes=\{'k': 'float32'\}"):
        fit.fit(df)
    assert store.list("runs") == []  # it has no run_id, and no checkpoint to resume from


def test_first_batch_error_reaches_the_driver_within_a_second(
    df: DataFrame, store: Store, tmp_path: Path
) -> None:
    raised = tmp_path / "raised"

    def fails(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        if "RANK" in os.environ:  # not in the driver's trial
            raised.write_text(str(time.monotonic()))
            raise KeyError("missing piece")
        return (output - label).square().mean()

    seconds = []
    for _ in range(2):  # another process may have the processor
        with pytest.raises(RankError, match="missing piece"):
            estimator(mlp(2), store, num_proc=2, loss=fails).fit(df)
        seconds.append(faults.seconds_since(raised))
    assert min(seconds) < 1, seconds


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {
                "metrics": ["mse"],
                "loss": nn.CrossEntropyLoss(),
                "model": mlp(2, 3),
                "label_cols": ["k"],
            },
            "model, tried on two rows of zeros: metric 'mse' compares an output of shape (2, 3) with a label of shape (2,). Give a "
            "metric that fits this label, for example 'accuracy' for classes.",
        ),
        (
            {"model": mlp(2, 3)},
            "model, tried on two rows of zeros: Label 'y' has shape (2,), but the model's output has shape "
            "(2, 3): the loss would broadcast.",
        ),
        (
            {"validation": "none"},
            "validation: column 'none' marks none of 10 rows. A row with true, or a number above 0, is a validation row.",
        ),
        (
            {"validation": "all"},
            "validation: column 'all' marks all 10 rows, so no rows are left to train on.",
        ),
        (
            {"drop_last": True, "validation": 0.2},
            "drop_last drops a step that is not full, but the 8 training rows are fewer than one full step of "
            "num_proc * batch_size * accumulate = 16 rows. Lower batch_size, or set drop_last=False.",
        ),
        (
            {"loss": nn.CrossEntropyLoss(), "label_cols": ["n"], "model": mlp(2, 3)},
            "model, tried on two rows of zeros: Label 'n' is from 0 to 9 in the data, and the model's output has 3 classes per row",
        ),
        (
            {"model": nn.Embedding(5, 1), "feature_cols": ["n"]},
            "model: embedding '' has 5 rows, so its indices must be from 0 to 4, but column 'n', which it looks up, has values from 0 to 9 in",
        ),
        (
            {"loss": nn.CrossEntropyLoss(), "label_cols": ["half"], "model": mlp(2, 2)},
            "The data cannot be used for training:\n  column 'half' (double): 10 of 10 rows hold a number that is not "
            "whole, but it is to be stored as int64.",
        ),
    ],
)
def test_invalid_splits_and_labels_raise_before_ranks_start(
    df: DataFrame, store: Store, options: dict[str, Any], message: str
) -> None:
    number = "monotonically_increasing_id() AS n"  # 0 to 9 in one partition
    more = df.coalesce(1).selectExpr("*", "false AS none", "1 AS all", "y / 2 AS half", number)
    model = options.get("model", mlp(2))
    with pytest.raises(InvalidArgumentError) as failed:
        estimator(model, store, **{k: v for k, v in options.items() if k != "model"}).fit(more)
    assert str(failed.value).startswith(message)


def test_error_names_columns_with_invalid_values_before_ranks_start(
    spark: SparkSession, store: Store
) -> None:
    rows = [([1.0, float("nan")], 1.0), ([1.0, 2.0], None), ([1.0], 2.0)]
    df = spark.createDataFrame(rows, "x array<double>, y double")
    with pytest.raises(InvalidArgumentError) as failed:
        estimator(mlp(2), store).fit(df)
    assert "'x'" in str(failed.value)
    assert "'y'" in str(failed.value)


def test_transform_error_names_mismatched_columns(df: DataFrame) -> None:
    model = fitted(mlp(2))
    with pytest.raises(
        InvalidArgumentError, match="names column 'x', which the DataFrame does not"
    ):
        model.transform(df.drop("x"))
    with pytest.raises(InvalidArgumentError, match="column 'y__output', which exists already"):
        model.transform(model.transform(df))
    with pytest.raises(InvalidArgumentError, match="does not define how to compute probabilities"):
        model.copy().setProbabilityCol("p").transform(df)
    with pytest.raises(
        InvalidArgumentError, match="column 'x' is of type double, but the model was trained"
    ):
        model.transform(df.selectExpr("y AS x"))
    assert np.isfinite(model.transform(df).first().y__output)
