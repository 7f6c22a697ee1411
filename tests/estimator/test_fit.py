"""Real fits on `local[2]` equal one process, for any rows, partitions, columns and ranks."""

from __future__ import annotations

import gc
import os
import re
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from pyspark.ml.functions import array_to_vector
from pyspark.sql import functions as F  # noqa: N812
from torch import nn
from torch.optim.lr_scheduler import StepLR

import sparkhvd.torch as hvd
from sparkhvd import InvalidArgumentError, Store, TorchEstimator, trust
from sparkhvd.data import reuse
from sparkhvd.data.store.locks import acquire
from sparkhvd.estimator import Callback
from sparkhvd.estimator.fitting import progress
from sparkhvd.training.checkpoints.files import Checkpoints
from sparkhvd.training.precision import autocast
from tests.estimator.fits import assert_same_weights, estimator, mlp, one_process, only_data
from tests.harness.by_value import by_value
from tests.harness.later import Later
from tests.harness.processes import wait_for_no_trainers
from tests.harness.soak import soak
from tests.harness.waiting import wait_until

torchmetrics = Later("torchmetrics")

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from sparkhvd.training.user_code.callbacks import CallbackContext

pytestmark = pytest.mark.spark


travels_by_value = by_value(__name__)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(tmp_path / "store")


def numbers(spark: SparkSession, rows: int, width: int, partitions: int) -> DataFrame:
    """Make `rows` rows of doubles a0, a1, ... and a label, in this many partitions (some may be empty)."""
    generator = np.random.default_rng(rows)
    x = generator.standard_normal((rows, width))
    y = x.sum(axis=1) + 0.1 * generator.standard_normal(rows)
    columns = [f"a{i}" for i in range(width)]
    data = [(*map(float, row), float(label)) for row, label in zip(x, y, strict=True)]
    schema = ", ".join(f"{c} double" for c in [*columns, "y"])
    return spark.createDataFrame(data, schema).repartition(partitions)


# (rows, width, kind of the columns, partitions, ranks, batch size, dtype), drawn once at random.
_COVERED = soak("120 rows mixed and 5 rows vector, here; training/test_train")
EXAMPLES = [
    (120, 5, "mixed", 3, 2, 16, torch.float64),
    (5, 2, "vector", 4, 2, 4, torch.float32),
    pytest.param((97, 3, "scalars", 3, 2, 8, torch.float32), marks=_COVERED),
    pytest.param((64, 4, "array", 2, 2, 16, torch.float64), marks=_COVERED),
    pytest.param((33, 4, "vector", 2, 2, 64, torch.float32), marks=_COVERED),
    pytest.param((80, 2, "vector", 1, 1, 32, torch.float64), marks=_COVERED),
]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: f"{e[0]} rows {e[2]}")
def test_fit_equals_one_process(
    spark: SparkSession, store: Store, example: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    rows, width, kind, partitions, ranks, batch_size, dtype = example
    plain = numbers(spark, rows, width, partitions)
    names = [f"a{i}" for i in range(width)]
    if kind == "scalars":
        df, features = plain, names
    elif kind == "array":
        df, features = plain.select(F.array(*names).alias("x"), "y"), ["x"]
    elif kind == "vector":
        df, features = plain.select(array_to_vector(F.array(*names)).alias("x"), "y"), ["x"]
    else:
        rest = F.array(*names[3:])
        array, vector = F.array(*names[1:3]).alias("w"), array_to_vector(rest).alias("x")
        df, features = plain.select("a0", array, vector, "y"), ["a0", "w", "x"]
    model = mlp(width, dtype=dtype)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    fitted = estimator(
        model,
        store,
        feature_cols=features,
        batch_size=batch_size,
        epochs=2,
        num_proc=ranks,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.05),
        keep_data=True,
        num_partitions=2,
    ).fit(df)
    manifest, _ = only_data(store)
    assert len(manifest.files) <= min(2, partitions)
    assert capfd.readouterr().out == ""  # verbose=0
    expected = one_process(
        model, store, features, size=ranks, batch_size=batch_size, lr=0.05, seed=3, epochs=2
    )
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    assert_same_weights(fitted.getModel(), expected, tolerance)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])  # the caller's module is as it was
    assert [r["rows"] for r in fitted.history] == [rows, rows]
    assert set(fitted.timings) == {"materialize", "launch", "train"}
    found = [r.y__output for r in fitted.transform(df).select("y__output").collect()]
    assert len(found) == rows


class Shares(nn.Module):
    """Two outputs from two arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 3)
        self.layer = nn.Linear(2, 3)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.layer(x) + self.embedding(ids)
        return hidden, hidden.sum(dim=1)


def test_fit_uses_several_inputs_labels_weights_validation_and_metrics(
    spark: SparkSession, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    generator = np.random.default_rng(0)
    data = [
        (float(a), float(b), int(i), int(i % 3), float(a + b), float(w), bool(v))
        for a, b, i, w, v in zip(
            *generator.standard_normal((2, 60)),
            generator.integers(0, 4, 60),
            generator.random(60),
            generator.random(60) < 0.3,
            strict=True,
        )
    ]
    df = spark.createDataFrame(
        data, "a double, b double, id int, kind int, total double, w double, held_out boolean"
    ).withColumn("query", F.format_string("q%d", "id"))
    seen: list[dict[str, Any]] = []
    fitted = TorchEstimator(
        model=Shares(),
        optimizer=torch.optim.Adam,
        loss=[nn.CrossEntropyLoss(), nn.functional.mse_loss],
        loss_weights=[0.7, 0.3],
        feature_cols=["a", "b", "id"],
        inputs={"x": ["a", "b"], "ids": "id"},
        label_cols=["kind", "total"],
        sample_weight_col="w",
        group_col="query",
        validation="held_out",
        metrics={"size": lambda output, label: output.abs().mean()},
        batch_size=10,
        epochs=3,
        num_proc=1,
        random_seed=0,
        store=store,
        progress=seen.append,
    ).fit(df)
    keys = {"loss", "kind_size", "total_size", "val_loss", "val_kind_size", "val_total_size"}
    assert keys <= set(fitted.history[0])
    assert seen == fitted.history
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch ")]
    assert len(lines) == 3
    assert re.fullmatch(r"epoch 1/3  loss \d.*  val_loss .*  [\d,]+ rows/s(  waited.*)?", lines[0])
    held_out = sum(row[-1] for row in data)
    assert fitted.history[0]["rows"] == 60 - held_out
    row = fitted.transform(df).first()
    assert len(row.kind__output) == 3
    assert isinstance(row.total__output, float)


def test_progress_shows_steps_and_the_slowest_rank_during_an_epoch(
    spark: SparkSession,
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def slow(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02 + 0.2 * hvd.rank())
        print("a line of the loss")
        return (output - label).square().mean()

    monkeypatch.setattr(progress, "_PLAIN_S", 0.0)
    df = spark.range(24).selectExpr("id / 24 AS x", "id % 2 / 2 AS y")
    TorchEstimator(
        model=nn.Linear(1, 1),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.01),
        loss=slow,
        feature_cols=["x"],
        label_cols=["y"],
        batch_size=1,
        num_proc=2,
        store=store,
    ).fit(df)
    said = capsys.readouterr()
    steps = r"^epoch 1/1  step (\d+)/12  loss [\d.]+  [\d,]+ rows/s  [0123] s left(.*)$"
    found = re.findall(steps, said.out, re.MULTILINE)
    shown = [int(step) for step, _ in found]
    assert 1 <= len(shown) <= 7
    assert shown == sorted(shown)
    assert re.fullmatch(r"  waiting for rank 1 [5-9]\d%", found[-1][1])
    assert said.err.count("[0] a line of the loss\n") == 12


def test_training_params_reach_the_ranks(
    spark: SparkSession, store: Store, capfd: pytest.CaptureFixture[str]
) -> None:
    df = numbers(spark, 90, 2, 2).select(F.array("a0", "a1").alias("x"), "y")
    fitted = estimator(
        mlp(2),
        store,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.05),
        epochs=9,
        backward_passes_per_step=2,
        precision="bf16-mixed",
        gradient_clip_value=0.5,
        lr_scheduler=lambda o, total_steps: torch.optim.lr_scheduler.LinearLR(
            o, 1.0, 0.0, total_iters=total_steps
        ),
        lr_scheduler_interval="step",
        metrics={"r2": torchmetrics.R2Score()},
        validation=0.2,
        monitor="val_r2",
        monitor_mode="max",
        return_model="best",
        # No epoch is that much better than the first.
        early_stopping={"patience": 2, "min_delta": 1e9},
        terminate_on_nan=True,
        verbose=1,
        run_id="shaped",
    ).fit(df)
    history = fitted.history
    assert len(history) == 3
    assert (
        "stopped after epoch 3/9: val_r2 has not improved by more than min"
        in capfd.readouterr().out
    )
    # 72 training rows in steps of 2 ranks * 8 * 2: 3 steps in each of 9 epochs.
    assert [r["lr"] for r in history] == pytest.approx([0.05 * (1 - 3 * e / 27) for e in (1, 2, 3)])
    best = max(history, key=lambda r: r["val_r2"])["epoch"]
    saved = Checkpoints(store, "runs/shaped").load(best).model
    assert fitted.report().document["best"]["epoch"] == best
    for name, value in fitted.getModel().state_dict().items():
        assert torch.equal(value, saved[name])
    # In 16 bits, like the validation, unless the model changes it.
    for precision, is_narrow in (("bf16-mixed", True), ("32", False)):
        rows = fitted.copy().setPrecision(precision).transform(df).select("x", "y__output")
        given, found = (torch.tensor(values) for values in zip(*rows.collect(), strict=True))
        with torch.no_grad(), autocast(precision, torch.device("cpu")):
            expected = fitted.getModel()(given.float())[:, 0].float()
        assert torch.allclose(found.float(), expected, rtol=1e-2 if is_narrow else 1e-5)
        assert torch.equal(found, found.bfloat16().to(found.dtype)) is is_narrow


class InDouble(nn.Module):
    """Adds a tensor of torch's default dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1).float()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert torch.get_float32_matmul_precision() == "high"
        return self.layer(x.float()) + torch.full((1,), 2.0**-40)


def test_torch_settings_apply_in_ranks_and_in_transform(spark: SparkSession, store: Store) -> None:
    df = numbers(spark, 8, 2, 1).select(F.array("a0", "a1").alias("x"), "y")
    torch.set_default_dtype(torch.float64)
    torch.set_float32_matmul_precision("high")
    try:
        fitted = estimator(InDouble(), store, num_proc=1, loss=nn.MSELoss()).fit(df)
        rows = fitted.transform(df).select("x", "y__output").collect()
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_float32_matmul_precision("highest")
    # A float32 output could not hold the value that was added in float64.
    found = torch.tensor([row[1] for row in rows], dtype=torch.float64)
    assert not torch.equal(found, found.float().double())


@soak("data/test_reader")
def test_inmemory_cache_all_shuffles_all_rows_uniformly(spark: SparkSession, store: Store) -> None:
    """`shuffle_bytes` changes the order of the rows, except with `inmemory_cache_all`."""
    df = numbers(spark, 90, 2, 2).select(F.array("a0", "a1").alias("x"), "y")
    weights = [
        estimator(mlp(2), store, **options).fit(df).getModel()[0].weight
        for options in (
            {},
            {"shuffle_bytes": 100, "inmemory_cache_all": True},
            {"shuffle_bytes": 100},
        )
    ]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert {run.state for run in store.runs()} == {"report"}  # of fits without a run_id


@soak("data/test_reader_kinds")
def test_validation_rows_have_separate_decoder_threads(
    spark: SparkSession, store: Store, tmp_path: Path
) -> None:
    names = tmp_path / "names"

    def decode(value: bytes) -> Any:
        with names.open("a") as file:
            file.write(threading.current_thread().name + "\n")
        return np.frombuffer(value, np.float32)

    rows = [(np.full(2, i, np.float32).tobytes(), float(i % 3), i % 4 == 0) for i in range(40)]
    df = spark.createDataFrame(rows, "x binary, y double, held_out boolean")
    options = {"decoders": {"x": decode}, "validation": "held_out", "num_proc": 1}
    found = []
    for workers in ({}, {"val_reader_num_workers": 3}, {"num_workers": 3}):
        names.write_text("")
        estimator(mlp(2), store, **options, **workers).fit(df)
        threads = names.read_text().split()
        found.append(sum(name.startswith("sparkhvd-decoder") for name in threads))
    assert found[0] == 0
    assert found[1] == 10  # the validation rows
    assert found[2] == 40


def test_run_id_resumes_unfinished_runs_and_refuses_finished_runs(
    spark: SparkSession, store: Store
) -> None:
    df = numbers(spark, 40, 3, 2).select(F.array("a0", "a1", "a2").alias("x"), "y")
    model = mlp(3)
    options: dict[str, Any] = {"optimizer": torch.optim.Adam, "keep_data": True, "data_key": "d"}
    options |= {"run_id": "mine", "epochs": 2, "lr_scheduler": lambda o: StepLR(o, 2, 0.5)}
    options["num_proc"] = 1
    with (
        acquire(store, "mine"),
        pytest.raises(InvalidArgumentError, match="is held by another fit: process "),
    ):
        estimator(model, store, **options).fit(df)
    first = estimator(model, store, **options).fit(df).getModel().state_dict()
    (run,) = store.runs()
    assert (run.run_id, run.state, run.epochs) == ("mine", "finished", 2)

    with pytest.raises(InvalidArgumentError) as refused:
        estimator(model, store, **options).fit(df)
    assert str(refused.value) == (
        f"run_id is 'mine', but this run has finished: {store.full_url('runs/mine')}. Give another run_id, or "
        "warm_start=True to train `epochs` more epochs from its weights; TorchModel.from_run returns its model."
    )

    # A step of length zero keeps the weights.
    warm = {**options, "warm_start": True, "optimizer": lambda p: torch.optim.SGD(p, lr=0.0)}
    started = estimator(mlp(3, 1), store, **{**warm, "epochs": 1}).fit(df)
    for name, value in started.getModel().state_dict().items():
        assert torch.equal(value, first[name])
    assert [r["epoch"] for r in started.history] == [1]
    assert Checkpoints(store, "runs/mine/warm-1").latest_epoch() == 1
    wider = nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 1))
    with pytest.raises(InvalidArgumentError) as refused:
        estimator(wider, store, **warm).fit(df)
    assert str(refused.value).startswith(
        f"warm_start: the weights of {store.full_url('runs/mine/warm-1/checkpoints/epoch-1.pt')} do not fit: model: "
    )
    change = '\'0.weight\' was [[6, 3], "torch.float32"] and is [[7, 3], "torch.float32"]'
    assert change in str(refused.value)

    rectified = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 1))

    # As if the driver had died after all epochs, before it had the model.
    store.delete("runs/mine/finished.json")
    fewer = df.limit(39)
    for data, changed, difference in (
        (fewer, {"data_key": "e"}, "rows was 40 and is 39"),
        (df, {"batch_size": 4}, "batch_size was 8 and is 4"),
        (df, {"random_seed": 4}, "random_seed was 3 and is 4"),
        (df, {"optimizer": torch.optim.Adagrad}, 'optimizer was "Adam" and is "Adagrad"'),
        (df, {"loss": nn.L1Loss()}, 'loss was ["MSELoss"] and is ["L1Loss"]'),
        (df, {"num_proc": 2}, "num_proc was 1 and is 2"),
        (df, {"shuffle_bytes": 500}, "shuffle_bytes was 1073741824 and is 500"),
        (
            df,
            {"lr_scheduler": lambda o: StepLR(o, 2, 0.1)},
            "lr_scheduler: 'gamma' was 0.5 and is 0.1",
        ),
        (df, {"epochs": 1}, "it has 2 epochs, but epochs is 1"),
        (df, {"model": wider}, change),
        (df, {"model": rectified}, 'modules: \'1\' was "Tanh()" and is "ReLU(inplace=false)"'),
        (
            df,
            {"optimizer": lambda p: torch.optim.Adam(p, lr=0.5)},
            "optimizer options: 'lr of group 0' was 0.001 and is 0.5",
        ),
        (df, {"metrics": ["mse"]}, "metrics: 'mse' is new"),
        (df, {"return_model": "best", "monitor": "loss"}, 'return_model was "last" and is "best"'),
    ):
        fit = estimator(model, store, **options)
        for name, value in changed.items():
            fit.set(fit.getParam(name), value)
        with pytest.raises(InvalidArgumentError) as refused:
            fit.fit(data)
        assert str(refused.value).startswith(
            f"{store.full_url('runs/mine')} holds a checkpoint of another run: "
        )
        assert difference in str(refused.value)
        assert str(refused.value).endswith(
            ". Give another run_id, or the same model, data and params."
        )
    again = estimator(model, store, **options).fit(df)
    assert [r["epoch"] for r in again.history] == [1, 2]
    for name, value in again.getModel().state_dict().items():
        assert torch.equal(value, first[name])


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The data directories that have been materialized."""
    folders: list[str] = []
    materialize = reuse.materialize

    def counted(df: Any, schema: Any, store: Any, data_dir: str, **options: Any) -> Any:
        folders.append(data_dir)
        return materialize(df, schema, store, data_dir, **options)

    monkeypatch.setattr(reuse, "materialize", counted)
    return folders


class MeetsAnother(Callback):
    """Ends a fit if no other fit trains at the same time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_begin(self, ctx: CallbackContext) -> None:
        self.folder.mkdir(exist_ok=True)
        (self.folder / str(os.getpid())).touch()
        # Each of the later fits finds the first two.
        wait_until(lambda: len(list(self.folder.iterdir())) >= 2, "another fit trains", within_s=60)


def test_cross_validator_finds_the_best_params_with_separate_runs(
    spark: SparkSession, store: Store, tmp_path: Path, written: list[str]
) -> None:
    from pyspark.ml.evaluation import RegressionEvaluator
    from pyspark.ml.tuning import CrossValidator, CrossValidatorModel, ParamGridBuilder

    df = numbers(spark, 40, 2, 2).select(F.array("a0", "a1").alias("x"), "y")
    est = estimator(
        mlp(2),
        store,
        num_proc=1,
        optimizer=torch.optim.SGD,
        run_id="cv",
    )
    est.setEpochs(2)
    est.setCallbacks([MeetsAnother(tmp_path / "met")])
    grid = ParamGridBuilder().addGrid(est.learning_rate, [1e-7, 0.05]).build()
    cv = CrossValidator(
        estimator=est,
        estimatorParamMaps=grid,
        evaluator=RegressionEvaluator(labelCol="y"),
        numFolds=2,
        parallelism=2,
    )
    threads = threading.active_count()
    best = cv.fit(df)
    still, converging = best.avgMetrics
    assert converging < 0.9 * still  # RMSE
    assert best.bestModel.getModel()[0].weight.ne(mlp(2)[0].weight).all()
    assert best.bestModel.uid == est.uid
    runs = {path.split("/")[1] for path in store.list("runs", recursive=True)}
    assert runs == {"cv", "cv-0", "cv-1", "cv-fold2-0", "cv-fold2-1"}
    assert est._folds.label() == ""  # another search begins with its first fold
    # One data set per fold, for all param maps, and one for the best model. No later fit uses them.
    assert len(set(written)) == len(written) == 3
    assert store.list("data", recursive=True) == []
    best.write().overwrite().save(str(tmp_path / "cv"))
    with trust():  # its estimator has a store
        loaded = CrossValidatorModel.load(str(tmp_path / "cv"))
    assert loaded.bestModel.transform(df).collect() == best.bestModel.transform(df).collect()
    gc.collect()
    wait_until(lambda: threading.active_count() <= threads + 5, "the threads of the fits end")


def test_each_param_map_has_its_own_model_run_and_validation(
    spark: SparkSession, store: Store, tmp_path: Path, written: list[str]
) -> None:
    df = spark.createDataFrame([([1.0, 2.0], 1.0)] * 4, "x array<double>, y double")
    near, far = df.limit(2), df.limit(3).withColumn("y", F.lit(100.0))
    est = estimator(mlp(2), store, num_proc=1, optimizer=torch.optim.SGD, run_id="mine")
    est.setValidation(near)
    one = {est.model: lambda: nn.Linear(2, 1)}
    other = {est.model: lambda: nn.Sequential(nn.Linear(2, 1)), est.validation: far}
    left = est.fitMultiple(df, [one, other])
    fitted = dict([next(left)])
    assert len(store.data_directories()) == len(written) == 2
    fitted |= dict(left)
    assert [type(fitted[i].getModel()) for i in (0, 1)] == [nn.Linear, nn.Sequential]
    losses = [fitted[i].history[-1]["val_loss"] for i in (0, 1)]
    assert losses[0] < 100 < losses[1]
    assert [store.exists(f"runs/mine-{i}/program.pkl") for i in (0, 1)] == [True, True]
    # The training rows are the same data, the validation rows are not.
    assert len(set(written)) == len(written) == 3
    assert store.data_directories() == []
    assert est.getRunId() == "mine"
    assert est.getValidation() is near
    with pytest.raises(InvalidArgumentError, match="validation is a DataFrame, which cannot be"):
        est.save(str(tmp_path / "saved"))
    # The same data are the same fold, also for a copy.
    different, same = df.limit(1).semanticHash(), df.semanticHash()
    for data, name in (
        (different, "mine-fold2-1"),
        (same, "mine-1"),
        (different, "mine-fold2-1"),
    ):
        assert est.copy()._folds.name("mine", data, 1) == name


def test_fit_leaves_no_process(spark: SparkSession) -> None:
    assert wait_for_no_trainers() == set()
