"""`sparkhvd.lightning.TorchEstimator`: a LightningModule trained from a DataFrame, equal on 2 ranks and on one."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pl = pytest.importorskip("lightning", reason="runs where lightning is: make test-users")

import torch  # noqa: E402 - after importorskip
from pyspark.ml import Pipeline  # noqa: E402
from pyspark.ml.feature import VectorAssembler  # noqa: E402
from torch import nn  # noqa: E402

import sparkhvd.torch as hvd  # noqa: E402
from sparkhvd.errors import InvalidArgumentError, RankError  # noqa: E402
from sparkhvd.estimator import TorchModel  # noqa: E402
from sparkhvd.lightning import TorchEstimator  # noqa: E402
from tests.harness.by_value import by_value  # noqa: E402

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]
travels_by_value = by_value(__name__)
# 75 are training rows: 6 whole steps, and one of 3 rows.
ROWS = 100


class Regression(pl.LightningModule):  # type: ignore[misc]  # untyped
    def __init__(self, batch_format: str = "dict", dropout: float = 0.0) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(2, 8), nn.Dropout(dropout), nn.Linear(8, 1))
        self.batch_format = batch_format

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.net(x)
        return out

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = (batch["x"], batch["y"]) if self.batch_format == "dict" else batch
        return nn.functional.mse_loss(self(x)[:, 0], y)

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        self.log("loss", loss := self.loss(batch), sync_dist=True, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, _: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)]


class KilledOnce(pl.Callback):  # type: ignore[misc]  # untyped
    """Kills rank 1 at a batch, unless a file exists."""

    def __init__(self, file: Path, epoch: int, batch: int) -> None:
        self.file, self.at = file, (epoch, batch)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, number: int) -> None:
        is_due = (trainer.current_epoch, number) == self.at
        if trainer.global_rank == 1 and is_due and not self.file.exists():
            self.file.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class Counting(pl.Callback):  # type: ignore[misc]  # untyped
    """Counts steps, with a state."""

    def __init__(self) -> None:
        self.steps = 0

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.steps += 1
        trainer.lightning_module.log("steps", float(self.steps), on_epoch=True)

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


@pytest.fixture(scope="module")
def df(spark: SparkSession) -> DataFrame:
    rows = [([n / ROWS, n % 7 / 7], n / ROWS + n % 7, n % 4 == 0) for n in range(ROWS)]
    return spark.createDataFrame(rows, ["x", "y", "held_out"])


def estimator(store: Path, num_proc: int = 2, **options: Any) -> TorchEstimator:
    given = {
        "model": Regression(options.get("batch_format", "dict")),
        "feature_cols": ["x"],
        "label_cols": ["y"],
        "num_proc": num_proc,
        "batch_size": 12 // num_proc,
        "epochs": 3,
        "store": str(store),
        "validation": "held_out",
        "random_seed": 5,
    }
    return TorchEstimator(**{**given, **options})


def weights_of(model: TorchModel) -> dict[str, torch.Tensor]:
    return model.getModel().state_dict()


def test_two_ranks_give_the_model_of_one_rank(df: DataFrame, tmp_path: Path) -> None:
    """In the last step, the ranks have unequal numbers of rows."""
    two = estimator(tmp_path).fit(df)
    one = estimator(tmp_path, 1, batch_format="tuple").fit(df)
    for name, weights in weights_of(one).items():
        torch.testing.assert_close(weights_of(two)[name], weights, rtol=0, atol=2e-5)
    assert [record["epoch"] for record in two.history] == [1, 2, 3]
    assert [record["rows"] for record in two.history] == [75] * 3
    assert two.history[2]["val_loss"] < two.history[0]["val_loss"]
    predicted = two.transform(df).select("x", "y__output").limit(5).collect()
    for row in predicted:
        wanted = two.getModel()(torch.tensor([row.x]))[0, 0].item()
        assert row["y__output"] == pytest.approx(wanted, abs=1e-5)
    two.write().overwrite().save(str(tmp_path / "model"))
    loaded = TorchModel.load(str(tmp_path / "model"), trust=True)
    assert loaded.transform(df).collect() == two.transform(df).collect()


@pytest.mark.parametrize(("epoch", "batch"), [(0, 1), (1, 0), (2, 6)])
def test_a_fit_with_a_killed_rank_equals_an_undisturbed_fit(
    df: DataFrame, tmp_path: Path, epoch: int, batch: int
) -> None:
    def fitted(*callbacks: Any) -> TorchModel:
        return estimator(
            tmp_path,
            model=Regression(dropout=0.5),
            callbacks=[Counting(), pl.pytorch.callbacks.EarlyStopping("val_loss"), *callbacks],
            checkpoint_interval_s=1e-6,
        ).fit(df)

    whole, stopped = fitted(), fitted(KilledOnce(tmp_path / "killed", epoch, batch))
    assert (tmp_path / "killed").exists()
    for name, weights in weights_of(whole).items():
        assert torch.equal(weights, weights_of(stopped)[name])
    timed = ("seconds", "rows_per_s")
    same = [{n: v for n, v in r.items() if n not in timed} for r in whole.history]
    assert [{n: v for n, v in r.items() if n not in timed} for r in stopped.history] == same


@pytest.mark.parametrize("folder", [None, "own"])
def test_returned_model_is_the_best_of_a_model_checkpoint(
    df: DataFrame, tmp_path: Path, folder: str | None
) -> None:
    kept = pl.pytorch.callbacks.ModelCheckpoint(
        folder and tmp_path / folder, monitor="val_loss", mode="max", save_top_k=1
    )
    fitted = estimator(tmp_path, callbacks=[kept], run_id="best").fit(df)
    losses = [record["val_loss"] for record in fitted.history]
    best = losses.index(max(losses))
    (file,) = (tmp_path / (folder or "runs/best/lightning")).iterdir()
    assert file.name.startswith(f"epoch={best}-")
    saved = torch.load(file, weights_only=False)["state_dict"]
    for name, weights in saved.items():
        assert torch.equal(weights, weights_of(fitted)[name])


def test_estimator_works_in_a_pipeline_and_accepts_param_maps(
    spark: SparkSession, tmp_path: Path
) -> None:
    rows = [(n / 40, n % 3 / 3, float(n)) for n in range(40)]
    df = spark.createDataFrame(rows, ["a", "b", "y"])
    assembler = VectorAssembler(inputCols=["a", "b"], outputCol="x")
    stage = estimator(tmp_path, epochs=1)
    stage.clear(stage.validation)
    pipeline = Pipeline(stages=[assembler, stage])
    model = pipeline.fit(df)
    assert model.transform(df).where("y__output IS NULL").count() == 0
    stage.write().overwrite().save(str(tmp_path / "estimator"))
    loaded = TorchEstimator.load(str(tmp_path / "estimator"), trust=True)
    assert loaded.getOrDefault("epochs") == 1
    two = loaded.fit(assembler.transform(df), [{loaded.batch_size: 4}, {loaded.batch_size: 20}])
    assert [len(each.history) for each in two] == [1, 1]


def test_single_validation_row_counts_once_on_two_ranks(
    spark: SparkSession, tmp_path: Path
) -> None:
    rows = [([n / 30, n % 7 / 7], n / 30, n == 3) for n in range(30)]
    df = spark.createDataFrame(rows, ["x", "y", "held_out"])
    two, one = (estimator(tmp_path, n, epochs=1).fit(df) for n in (2, 1))
    assert two.history[0]["val_loss"] == pytest.approx(one.history[0]["val_loss"], rel=1e-4)


def test_horovod_params_map_to_lightning_trainer_arguments(df: DataFrame, tmp_path: Path) -> None:
    few = estimator(
        tmp_path,
        epochs=1,
        train_steps_per_epoch=2,
        validation_steps_per_epoch=1,
        gradient_compression=hvd.Compression.fp16,
    ).fit(df)
    assert few.history[0]["rows"] == 24
    broken = Regression()
    with torch.no_grad():
        broken.net[0].weight.fill_(float("inf"))
    with pytest.raises(RankError, match="terminate_on_nan is set"):
        estimator(tmp_path, model=broken, terminate_on_nan=True).fit(df)


class OwnData(pl.LightningDataModule):  # type: ignore[misc]  # untyped
    """Accepts all arguments of Horovod's data modules."""

    def __init__(
        self, *, train_dir: str, val_dir: str, num_train_epochs: int, has_val: bool, train_batch_size: int, val_batch_size: int,
        shuffle: bool, num_reader_epochs: Any, reader_pool_type: str, reader_worker_count: int, transformation: Any,
        transformation_edit_fields: Any, transformation_removed_fields: Any, inmemory_cache_all: bool, cur_shard: int,
        shard_count: int, schema_fields: Any, storage_options: Any, steps_per_epoch_train: int, steps_per_epoch_val: int,
        verbose: bool, debug_data_loader: bool, train_async_data_loader_queue_size: Any,
        val_async_data_loader_queue_size: Any, seed: int,
    ) -> None:  # fmt: skip
        super().__init__()
        self.batch_size = train_batch_size

    def train_dataloader(self) -> Any:
        rows = [{"x": torch.ones(2), "y": torch.ones(())}] * 8
        return torch.utils.data.DataLoader(rows, self.batch_size)  # type: ignore[arg-type]


def test_data_module_gets_the_arguments_of_horovod(df: DataFrame, tmp_path: Path) -> None:
    fitted = estimator(tmp_path, data_module=OwnData, epochs=1, validation=None).fit(df)
    assert len(fitted.history) == 1


def test_lightning_loggers_write_to_the_run_folder(df: DataFrame, tmp_path: Path) -> None:
    logger = pl.pytorch.loggers.CSVLogger(str(tmp_path / "csv"))
    estimator(tmp_path, logger=logger, log_every_n_steps=1, epochs=1).fit(df)
    (metrics,) = (tmp_path / "csv").rglob("metrics.csv")
    assert "val_loss" in metrics.read_text()


def test_wrong_arguments_are_refused_before_any_job(df: DataFrame, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="model is a Linear; it must be a LightningModu"):
        estimator(tmp_path, model=nn.Linear(2, 1)).fit(df)
    with pytest.raises(InvalidArgumentError, match="batch_format is 'list'; it must be one of"):
        estimator(tmp_path, batch_format="list").fit(df)
    with pytest.raises(
        InvalidArgumentError,
        match="loss has no effect on a LightningModule. Leave it out; instead: trai",
    ):
        estimator(tmp_path, loss=nn.MSELoss()).fit(df)
    with pytest.raises(InvalidArgumentError, match="trainer_args has 'max_epochs', but the fit"):
        estimator(tmp_path, trainer_args={"max_epochs": 3}).fit(df)
    with pytest.raises(TypeError, match="unexpected keyword argument 'callback'"):
        estimator(tmp_path, callback=[])
