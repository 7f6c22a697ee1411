"""Fits that log to a real MLflow server on loopback and to TensorBoard: Params, numbers, models, a server that is down, no secrets."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("KERAS_BACKEND", "torch")
pytest.importorskip("mlflow", reason="runs where MLflow is: make test-users")
pytest.importorskip("tensorboard", reason="runs where TensorBoard is: make test-users")
keras = pytest.importorskip("keras", reason="runs where keras is: make test-users")

import mlflow  # noqa: E402 - after importorskip
import mlflow.pyspark.ml  # noqa: E402
import mlflow.pytorch  # noqa: E402
import mlflow.spark  # noqa: E402
from pyspark.ml import Pipeline  # noqa: E402
from pyspark.ml.evaluation import RegressionEvaluator  # noqa: E402
from pyspark.ml.tuning import ParamGridBuilder, TrainValidationSplit  # noqa: E402

import sparkhvd  # noqa: E402
from sparkhvd import Callback, MLflowLogger, Store, TensorBoardLogger  # noqa: E402
from sparkhvd.keras import KerasEstimator  # noqa: E402
from tests.estimator.fits import estimator, mlp  # noqa: E402
from tests.harness.by_value import by_value  # noqa: E402
from tests.harness.cluster import run_client  # noqa: E402
from tests.harness.servers import S3, SECRET  # noqa: E402
from tests.harness.spark import connect_server, with_folder  # noqa: E402

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.soak, pytest.mark.timeout(500)]
travels_by_value = by_value(__name__)


class Server:
    """MLflow's server in its own process, which can stop and start again."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self.port = found.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self.port}"
        self.folder = folder
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [
            *(sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port"),
            *(str(self.port), "--workers", "1"),
            *("--backend-store-uri", f"sqlite:///{self.folder}/mlflow.db"),
            *("--artifacts-destination", f"{self.folder}/artifacts"),
        ]
        log = (self.folder / "server.log").open("ab")
        with log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, start_new_session=True, cwd=self.folder
            )
        deadline = time.monotonic() + 120
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{self.uri}/health", timeout=5).close()
                return
            assert time.monotonic() < deadline, (self.folder / "server.log").read_text()
            assert self.process.poll() is None, (self.folder / "server.log").read_text()
            time.sleep(0.2)

    def stop(self) -> None:
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(timeout=30)
            self.process = None


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(tmp_path_factory.mktemp("mlflow"))
    made.start()
    with pytest.MonkeyPatch.context() as patch:
        # Like a user's setting. mlflow's own calls in these tests need no minutes.
        patch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
        mlflow.set_tracking_uri(made.uri)
        yield made
    mlflow.set_tracking_uri(None)
    made.stop()


@pytest.fixture
def experiment(server: Server, request: pytest.FixtureRequest) -> Any:
    mlflow.set_experiment(request.node.name)
    return mlflow.get_experiment_by_name(request.node.name)


@pytest.fixture(scope="module")
def df(spark: SparkSession) -> DataFrame:
    return spark.range(120).selectExpr("array(rand(1), rand(2)) AS x", "rand(3) AS y").cache()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(tmp_path / "store")


def runs_of(experiment: Any) -> list[Any]:
    return list(mlflow.MlflowClient().search_runs([experiment.experiment_id]))


def numbers(run: Any, name: str) -> list[tuple[int, float]]:
    found = mlflow.MlflowClient().get_metric_history(run.info.run_id, name)
    return sorted((m.step, m.value) for m in found)


def test_mlflow_run_has_params_metrics_report_and_model_in_both_flavors(
    df: DataFrame, store: Store, experiment: Any, tmp_path: Path
) -> None:
    events = tmp_path / "events"
    loggers = [MLflowLogger(tags={"team": "a"}), TensorBoardLogger(events)]
    est = estimator(mlp(2), store, epochs=3, validation=0.2, metrics=["mae"], loggers=loggers)
    model = est.fit(df)
    (run,) = runs_of(experiment)
    assert run.info.status == "FINISHED"
    assert run.data.params["epochs"] == "3"
    assert run.data.params["num_proc"] == "2"
    assert run.data.tags["team"] == "a"
    assert run.data.tags["sparkhvd.run_id"] == model.getRunId()
    for name in ("loss", "val_loss", "mae", "rows_per_s"):
        assert numbers(run, name) == [(r["epoch"], r[name]) for r in model.history]
    _check_models(run.info.run_id, model, df)
    report = mlflow.artifacts.download_artifacts(f"runs:/{run.info.run_id}/report/report.json")
    assert json.loads(Path(report).read_text())["run_id"] == model.getRunId()
    assert _scalars(events / model.getRunId(), "loss") == pytest.approx(
        [r["loss"] for r in model.history]
    )


def _check_models(run_id: str, model: Any, df: DataFrame) -> None:
    expected = [row.prediction for row in model.transform(df).collect()]
    stages = mlflow.spark.load_model(f"runs:/{run_id}/model")
    assert [row.prediction for row in stages.transform(df).collect()] == expected
    module = mlflow.pytorch.load_model(f"runs:/{run_id}/pytorch-model")
    x = torch.tensor(np.array([row.x for row in df.collect()]), dtype=torch.float32)
    with torch.no_grad():
        assert module(x)[:, 0].tolist() == pytest.approx(expected, rel=1e-5)


def _scalars(folder: Path, name: str) -> list[float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util import tensor_util

    found = EventAccumulator(str(folder))
    found.Reload()
    return [float(tensor_util.make_ndarray(event.tensor_proto)) for event in found.Tensors(name)]


def test_mlflow_outage_of_a_minute_loses_no_entry(
    df: DataFrame, store: Store, server: Server, experiment: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """The server stops after the first epoch and starts again a minute later, after the training."""
    seen = threading.Event()

    def progress(record: dict[str, Any]) -> None:
        if record["epoch"] == 1:
            server.stop()
            seen.set()

    def come_back() -> None:
        assert seen.wait(300)
        time.sleep(60)
        server.start()

    back = threading.Thread(target=come_back)
    back.start()
    est = estimator(mlp(2), store, epochs=200, loggers=MLflowLogger(patience_s=120))
    try:
        model = est.setVerbose(1).setProgress(progress).fit(df)
    finally:
        back.join()
    (run,) = runs_of(experiment)
    assert run.info.status == "FINISHED"
    assert numbers(run, "loss") == [(r["epoch"], r["loss"]) for r in model.history]
    _check_models(run.info.run_id, model, df)
    lines = [line for line in capsys.readouterr().out.splitlines() if "MLflow" in line]
    assert len(lines) == 2
    assert lines[0].startswith(f"MLflow at 127.0.0.1:{server.port} does not respond (")
    assert "responds again" in lines[1]
    assert model.timings["train"] < 60  # the training has not waited


def test_unreachable_mlflow_server_causes_a_warning_after_the_patience(
    df: DataFrame, store: Store
) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        gone = MLflowLogger(
            tracking_uri=f"http://user:pass@127.0.0.1:{silent.getsockname()[1]}", patience_s=2
        )
        est = estimator(mlp(2), store, epochs=2, loggers=[gone])
        with pytest.warns(UserWarning, match=r"MLflow at 127.0.0.1:\d+ has not responded for 2 s"):
            model = est.fit(df)
    assert len(model.history) == 2


def test_mlflow_autologging_logs_each_epoch_and_the_model(
    df: DataFrame, store: Store, experiment: Any
) -> None:
    mlflow.pyspark.ml.autolog(log_datasets=False)
    try:
        model = estimator(mlp(2), store, epochs=2).fit(df)
        piped = Pipeline(stages=[estimator(mlp(2), store, epochs=2)]).fit(df)
    finally:
        mlflow.pyspark.ml.autolog(disable=True)
    of_pipe, run = runs_of(experiment)  # the newest first
    assert run.data.params["batch_size"] == "8"
    assert run.info.status == of_pipe.info.status == "FINISHED"
    assert numbers(run, "loss") == [(r["epoch"], r["loss"]) for r in model.history]
    assert numbers(of_pipe, "loss") == [(r["epoch"], r["loss"]) for r in piped.stages[0].history]
    _check_models(run.info.run_id, model, df)


def test_fit_logs_to_the_active_run_and_grids_use_child_runs(
    df: DataFrame, store: Store, experiment: Any
) -> None:
    est = estimator(mlp(2), store, epochs=1, loggers=[MLflowLogger(log_model=False)])
    with mlflow.start_run() as active:
        mlflow.log_param("mine", 1)
        est.fit(df)
        assert mlflow.active_run() is not None
    grid = ParamGridBuilder().addGrid(est.batch_size, [8, 16]).build()
    search = TrainValidationSplit(
        estimator=est,
        estimatorParamMaps=grid,
        evaluator=RegressionEvaluator(labelCol="y"),
        seed=1,
    )
    with mlflow.start_run() as parent:
        found = search.fit(df)
    # It fits the best ones again, with all rows.
    best = f"batch_size={grid[int(np.argmin(found.validationMetrics))][est.batch_size]}"
    runs = {run.info.run_id: run for run in runs_of(experiment)}
    single = runs[active.info.run_id]
    assert (single.data.params["mine"], single.data.params["epochs"]) == ("1", "1")
    assert numbers(single, "loss")
    below = [
        run
        for run in runs.values()
        if run.data.tags.get("mlflow.parentRunId") == parent.info.run_id
    ]
    names = [run.data.tags["mlflow.runName"] for run in below]
    assert sorted(names) == sorted(["batch_size=16", "batch_size=8", best])


class StopsOnce(Callback):
    """Fails once, in the third epoch."""

    ranks = 0

    def __init__(self, marker: str) -> None:
        self.marker = marker

    def on_epoch_begin(self, ctx: Any) -> None:
        if ctx.epoch == 3 and not os.path.exists(self.marker):
            open(self.marker, "w").close()
            raise ValueError("not now")


def test_resumed_fit_continues_the_mlflow_run_of_the_failed_fit(
    df: DataFrame, store: Store, experiment: Any, tmp_path: Path
) -> None:
    logger = MLflowLogger(log_model=False)
    est = estimator(mlp(2), store, epochs=4, loggers=[logger], run_id="mine")
    est.setCallbacks([StopsOnce(str(tmp_path / "marker"))])
    with pytest.raises(Exception, match="not now"):
        est.fit(df)
    (run,) = runs_of(experiment)
    assert run.info.status == "FAILED"
    assert [step for step, _ in numbers(run, "loss")] == [1, 2]
    model = est.fit(df)
    (run,) = runs_of(experiment)
    assert run.info.status == "FINISHED"
    assert [step for step, _ in numbers(run, "loss")] == [1, 2, 3, 4]
    assert len(model.history) == 4


def test_no_secret_of_the_store_is_logged_to_mlflow(
    df: DataFrame, server: Server, experiment: Any, s3: S3
) -> None:
    store = Store.create(f"s3://{s3.bucket}/logged", **s3.options())
    mlflow.pyspark.ml.autolog(log_datasets=False)
    try:
        estimator(mlp(2), store, epochs=1, loggers=[MLflowLogger()]).fit(df)
    finally:
        mlflow.pyspark.ml.autolog(disable=True)
    (run,) = runs_of(experiment)
    assert run.data.tags["sparkhvd.store"] == f"s3://{s3.bucket}/logged"
    texts = [*run.data.params.values(), *run.data.tags.values()]
    assert not [text for text in texts if SECRET in text]
    files = [path for path in server.folder.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]


CLIENT = """
import warnings, mlflow, torch
from sparkhvd import MLflowLogger, Store, TorchEstimator, TorchModel

warnings.filterwarnings("error", message="MLflow at")
mlflow.set_tracking_uri(URI)
mlflow.set_experiment("over Connect")
df = spark.range(40).selectExpr("array(rand(1), rand(2)) AS x", "rand(3) AS y")
fitted = TorchEstimator(
    model=torch.nn.Linear(2, 1), optimizer="sgd", loss="mse", feature_cols=["x"], label_cols=["y"], batch_size=5, epochs=2,
    num_proc=2, store=Store.create(FOLDER + "/store"), loggers=[MLflowLogger()], verbose=0).fit(df)
print("RUN", fitted.getRunId())
"""


def test_connect_client_logs_runs_and_models_to_mlflow(
    server: Server, spark: SparkSession, tmp_path: Path
) -> None:
    """The client writes the model in Spark's flavour without a JVM, and a classic session loads it."""
    with connect_server(tmp_path / "connect") as remote:
        body = f"URI = {server.uri!r}\n{with_folder(CLIENT, tmp_path)}"
        output = run_client(remote, body, tmp_path)
    assert "RUN" in output, output
    (run,) = runs_of(mlflow.get_experiment_by_name("over Connect"))
    assert run.info.status == "FINISHED"
    assert [step for step, _ in numbers(run, "loss")] == [1, 2]
    names = {each.path for each in mlflow.MlflowClient().list_artifacts(run.info.run_id)}
    assert names == {"model", "pytorch-model", "report"}
    module = mlflow.pytorch.load_model(f"runs:/{run.info.run_id}/pytorch-model")
    assert module(torch.zeros(3, 2)).shape == (3, 1)
    loaded = mlflow.spark.load_model(f"runs:/{run.info.run_id}/model")
    assert loaded.stages[0].getRunId() in output


def test_keras_fit_logs_epochs_and_model_to_mlflow(
    df: DataFrame, store: Store, experiment: Any
) -> None:
    network = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    est = KerasEstimator(
        model=network, optimizer="sgd", loss="mse", feature_cols=["x"], label_cols=["y"], batch_size=20,
        epochs=2, num_proc=2, store=store, loggers=[MLflowLogger()], verbose=0,
    )  # fmt: skip
    model = est.fit(df)
    (run,) = runs_of(experiment)
    assert run.info.status == "FINISHED"
    assert run.data.tags["sparkhvd.estimator"] == "KerasEstimator"
    assert numbers(run, "loss") == [(r["epoch"] + 1, r["loss"]) for r in model.history]
    wanted = [row.y__output for row in model.transform(df).collect()]
    with sparkhvd.trust():
        stages = mlflow.spark.load_model(f"runs:/{run.info.run_id}/model")
    assert [row.y__output for row in stages.transform(df).collect()] == wanted
    module = mlflow.pytorch.load_model(f"runs:/{run.info.run_id}/pytorch-model")
    x = torch.tensor(np.array([row.x for row in df.collect()]), dtype=torch.float32)
    assert module(x)[:, 0].tolist() == pytest.approx(wanted, rel=1e-4)


def test_mlflow_run_lists_the_table_as_input_and_model_tag(
    spark: SparkSession, tmp_path: Path
) -> None:
    deltalake = pytest.importorskip("deltalake", reason="runs where deltalake is")
    import pyarrow as pa

    x = np.random.default_rng(0).standard_normal((40, 2))
    table = pa.table({"a": x[:, 0], "b": x[:, 1], "y": x[:, 0]})
    deltalake.write_deltalake(tmp_path / "t", table)
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    mlflow.set_tracking_uri(uri)
    logger = MLflowLogger("tables", tracking_uri=uri, registered_model_name="ours")
    options = {"feature_cols": ["a", "b"], "num_proc": 1, "loggers": [logger]}
    fit = estimator(mlp(2), Store.create(tmp_path / "store"), **options)
    fit.fit_on_table(tmp_path / "t", where="a > -5")
    client = mlflow.MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("tables")
    (run,) = client.search_runs([experiment.experiment_id])
    (found,) = run.inputs.dataset_inputs
    assert found.dataset.name == str(tmp_path / "t")
    assert json.loads(found.dataset.source)["version"] == 0
    assert json.loads(found.dataset.profile) == {"num_rows": 40}
    assert found.tags[0].value == "training"
    (version,) = client.search_model_versions("name = 'ours'")
    assert version.run_id == run.info.run_id
    assert version.tags["sparkhvd.table.0"] == f"{tmp_path / 't'}@0"
