"""Save and load of estimator, model and pipelines, and the code that a load may run."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.functions import array_to_vector
from torch import nn

import sparkhvd
import sparkhvd.torch as hvd
from sparkhvd import (
    InvalidArgumentError,
    Store,
    TorchEstimator,
    TorchModel,
    UntrustedError,
    load_local,
)
from tests.estimator.fits import estimator, fitted, mlp
from tests.harness.soak import soak
from tests.harness.spark import run_on

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark


class Mine(nn.Module):
    """A user's module."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store.create(tmp_path_factory.mktemp("save"))


@pytest.fixture(scope="module")
def df(spark: SparkSession) -> DataFrame:
    rows = [([i / 10, 1 - i / 10], float(i % 3)) for i in range(20)]
    # In one partition: each costs a Python worker whenever rows are computed.
    return spark.createDataFrame(rows, "x array<double>, y double").coalesce(1)


@pytest.fixture(scope="module")
def plain(df: DataFrame, store: Store) -> TorchModel:
    return estimator(mlp(2), store, num_proc=1, data_key="d", predictionCol="prediction").fit(df)


@pytest.fixture(scope="module")
def own() -> TorchModel:
    return fitted(Mine())


def outputs(model: Any, df: DataFrame) -> list[float]:
    return [row.y__output for row in model.transform(df).collect()]


def assert_same(found: TorchModel, expected: TorchModel) -> None:
    """Compare the models' parts. Another test computes with a loaded model."""
    assert found.uid == expected.uid
    assert repr(found.getModel()) == repr(expected.getModel())
    for name, value in expected.getModel().state_dict().items():
        assert torch.equal(found.getModel().state_dict()[name], value)


def test_a_model_of_torch_nn_loads_without_trust(
    plain: TorchModel, df: DataFrame, tmp_path: Path
) -> None:
    path = str(tmp_path / "model")
    plain.save(path)
    loaded = TorchModel.load(path)
    assert loaded.uid == plain.uid
    assert loaded.history == plain.history
    assert loaded.timings == plain.timings
    assert loaded.getPredictionCol() == "prediction"
    # The store of a fit needs trust, but a model with small weights does not.
    assert loaded._get("store") is None
    assert TorchModel.load(path, trust=True).getStore() == plain.getStore()
    found = outputs(loaded, df)
    assert found == outputs(plain, df)
    alone = load_local(path).predict(df.toPandas())
    assert alone["y__output"] == pytest.approx(found, rel=1e-6)
    assert alone["prediction"] == pytest.approx(found, rel=1e-6)
    assert sorted(p.name for p in Path(path).iterdir()) == ["metadata", "weights"]
    (metadata,) = (tmp_path / "model" / "metadata").glob("part-*")
    assert json.loads(metadata.read_text())["class"] == "sparkhvd.estimator.model.TorchModel"
    (weights,) = (tmp_path / "model" / "weights").glob("part-*")
    state = torch.load(weights, weights_only=True)
    mlp(2).load_state_dict(state)
    with pytest.raises(Exception, match="already exists"):
        plain.save(path)
    plain.write().overwrite().save(path)
    with pytest.raises(InvalidArgumentError, match="holds a sparkhvd.estimator.model.TorchModel"):
        TorchEstimator.load(path)


def test_loading_a_model_of_a_user_class_requires_trust(
    own: TorchModel, df: DataFrame, tmp_path: Path
) -> None:
    spark = df.sparkSession
    path = str(tmp_path / "model")
    own.save(path)
    with pytest.raises(UntrustedError) as failed:
        TorchModel.load(path)
    assert str(failed.value) == (
        f"{path!r} holds {__name__}.Mine, and loading it runs code from that file. If you trust the file, load it "
        "with trust=True, or inside `with sparkhvd.trust():`, or set spark.sparkhvd.trust to a prefix of the path."
    )
    assert outputs(TorchModel.load(path, trust=True), df) == outputs(own, df)
    with sparkhvd.trust():
        TorchModel.load(path)
    with pytest.raises(UntrustedError):
        TorchModel.load(path)
    try:
        spark.conf.set("spark.sparkhvd.trust", f"{tmp_path}/mod, /elsewhere")
        with pytest.raises(UntrustedError):
            TorchModel.load(path)
        spark.conf.set("spark.sparkhvd.trust", f"/elsewhere, {tmp_path}")
        TorchModel.load(path)
        with pytest.raises(UntrustedError):
            TorchModel.load(_moved(path, tmp_path))
    finally:
        spark.conf.unset("spark.sparkhvd.trust")


def _moved(path: str, tmp_path: Path) -> str:
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    Path(path).rename(outside)
    return str(outside)


def test_failed_save_keeps_the_older_model(plain: TorchModel, tmp_path: Path) -> None:
    path = tmp_path / "model"
    plain.save(str(path))
    lock = threading.Lock()
    broken = plain.copy().setOutputFn(lambda output: output if lock.locked() else -output)
    with pytest.raises(TypeError, match="cannot pickle"):
        broken.write().overwrite().save(str(path))
    older = TorchModel.load(str(path))
    assert_same(older, plain)
    assert older.getOutputFn() is None
    assert list(tmp_path.iterdir()) == [path]  # nothing lies beside it
    assert sorted(p.name for p in path.iterdir()) == ["metadata", "weights"]
    # A model that is saved to the path from which it was loaded.
    loaded = TorchModel.load(str(path))
    for written in (f"file://{path}/", os.path.relpath(path)):
        loaded.write().overwrite().save(written)
        assert_same(TorchModel.load(str(path)), plain)


def test_a_saved_pipeline_model_keeps_its_torch_model(
    own: TorchModel, plain: TorchModel, df: DataFrame, tmp_path: Path
) -> None:
    path = str(tmp_path / "pipeline")
    both = PipelineModel([plain, own.copy().setOutputCols(["own"])])
    both.write().overwrite().save(path)
    with pytest.raises(UntrustedError):
        PipelineModel.load(path)
    with sparkhvd.trust():
        loaded = PipelineModel.load(path)
    found = loaded.transform(df).select("y__output", "own", "prediction").collect()
    stage = next(Path(path, "stages").glob("1_*"))
    alone = load_local(stage, trust=True).predict(df.toPandas())
    assert alone["own"] == pytest.approx([row.own for row in found], rel=1e-6)
    assert found == both.transform(df).select("y__output", "own", "prediction").collect()


def test_loaded_estimators_can_fit(df: DataFrame, store: Store, tmp_path: Path) -> None:
    model = mlp(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, betas=(0.8, 0.9))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    fit = estimator(
        model,
        Path(store.local_path("") or ""),
        optimizer=optimizer,
        metrics=["mse"],
        num_proc=1,
        inputs={"input": ["x"]},
        gradient_compression=hvd.Compression.fp16,
    )
    fit.save(str(tmp_path / "plain"))
    assert sorted(p.name for p in (tmp_path / "plain").iterdir()) == ["metadata", "weights"]
    with pytest.warns(
        UserWarning, match=f"plain' is loaded without its store {store.local_path('')}"
    ):
        assert TorchEstimator.load(str(tmp_path / "plain")).getStore() is None
    loaded = TorchEstimator.load(str(tmp_path / "plain"), trust=True)
    assert loaded.uid == fit.uid
    assert loaded.getBatchSize() == fit.getBatchSize()
    theirs = loaded.getOptimizer()
    assert theirs.param_groups[0]["params"][0] is next(loaded.getModel().parameters())
    assert theirs.param_groups[0]["betas"] == (0.8, 0.9)
    assert torch.equal(
        theirs.state_dict()["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"]
    )
    assert type(loaded.getLoss()) is nn.MSELoss
    assert loaded.fit(df).history[0]["loss"] == pytest.approx(fit.fit(df).history[0]["loss"])


def test_loading_estimators_with_user_code_requires_trust(store: Store, tmp_path: Path) -> None:
    model = Mine()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pipeline = Pipeline(
        stages=[
            estimator(
                model,
                store,
                optimizer=optimizer,
                loss=lambda output, label: (output - label).abs().mean(),
                settings=sparkhvd.Settings(slots=5),
            )
        ]
    )
    path = str(tmp_path / "pipeline")
    pipeline.write().overwrite().save(path)
    with pytest.raises(UntrustedError):
        Pipeline.load(path)
    with sparkhvd.trust():
        (stage,) = Pipeline.load(path).getStages()
    assert isinstance(stage.getModel(), Mine)
    assert stage.getOptimizer().param_groups[0]["params"][0] is next(stage.getModel().parameters())
    assert stage.getSettings() == sparkhvd.Settings(slots=5)
    assert float(stage.getLoss()(torch.tensor(3.0), torch.tensor(1.0))) == 2.0


def test_a_saved_cross_validator_model_keeps_its_torch_model(
    df: DataFrame, store: Store, tmp_path: Path
) -> None:
    from pyspark.ml.evaluation import RegressionEvaluator
    from pyspark.ml.tuning import CrossValidatorModel, ParamGridBuilder

    fit = estimator(mlp(2), store, num_proc=1, predictionCol="prediction")
    grid = ParamGridBuilder().addGrid(fit.getParam("batch_size"), [4, 8]).build()
    best = fitted(mlp(2)).setPredictionCol("prediction")
    found = CrossValidatorModel(best, avgMetrics=[1.0, 2.0], stdMetrics=[0.0, 0.0])
    evaluator = RegressionEvaluator(labelCol="y")
    found._set(estimator=fit, estimatorParamMaps=grid, evaluator=evaluator)
    path = str(tmp_path / "cv")
    for _ in range(2):
        found.write().overwrite().save(path)
    with pytest.warns(UserWarning, match="is loaded without its store"):
        loaded = CrossValidatorModel.load(path)
    assert loaded.avgMetrics == [1.0, 2.0]
    assert [list(m.values()) for m in loaded.getEstimatorParamMaps()] == [[4], [8]]
    assert isinstance(loaded.bestModel, TorchModel)
    vectors = df.select(array_to_vector("x").alias("x"), "y")
    assert outputs(loaded, vectors) == outputs(best, vectors)


@pytest.fixture
def mount_table(spark: SparkSession, tmp_path: Path) -> Iterator[Path]:
    """The folder for /models, where paths without a scheme belong to a mount table."""
    (tmp_path / "real").mkdir()
    conf = spark.sparkContext._jsc.hadoopConfiguration()  # type: ignore[union-attr]  # classic
    before = conf.get("fs.defaultFS")
    links = {"/models": f"file://{tmp_path}/real", "/tmp": "file:///tmp"}
    for at, folder in links.items():
        conf.set(f"fs.viewfs.mounttable.default.link.{at}", folder)
    conf.set("fs.defaultFS", "viewfs:///")
    yield tmp_path / "real"
    conf.set("fs.defaultFS", before)
    for at in links:
        conf.unset(f"fs.viewfs.mounttable.default.link.{at}")


def test_hadoop_mount_table_resolves_model_paths(df: DataFrame, mount_table: Path) -> None:
    model = fitted(mlp(2))
    for path in ("/models/a", "viewfs:///models/a"):
        model.write().overwrite().save(path)
    PipelineModel([model]).write().overwrite().save("/models/pipeline")
    assert_same(TorchModel.load("/models/a"), model)
    (stage,) = PipelineModel.load("viewfs:///models/pipeline").stages
    assert_same(stage, model)
    assert len(stage.transform(df).collect()) == 20
    assert sorted(p.name for p in mount_table.iterdir()) == ["a", "pipeline"]
    (weights,) = (mount_table / "a" / "weights").glob("part-*")
    mlp(2).load_state_dict(torch.load(weights, weights_only=True))


CONNECT = """
    import torch
    from pyspark.ml import PipelineModel
    from torch import nn
    from sparkhvd import Store, TorchEstimator, TorchModel

    rows = [([i / 10, 1 - i / 10], i % 2) for i in range(20)]
    df = spark.createDataFrame(rows, "x array<double>, y int")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 400), nn.ReLU(), nn.Linear(400, 800), nn.ReLU(), nn.Linear(800, 2))
    model = TorchEstimator(
        model=net, optimizer=torch.optim.Adam, loss=nn.CrossEntropyLoss(), feature_cols=["x"], label_cols=["y"],
        batch_size=4, num_proc=2, random_seed=1, verbose=1, predictionCol="prediction", probabilityCol="p",
        store=Store.create(sys.argv[1] if len(sys.argv) > 1 else {store!r}),
    ).fit(df)
    first = model.transform(df).collect()
    for _ in range(2):
        PipelineModel([model]).write().overwrite().save({path!r})
    loaded = PipelineModel.load({path!r})
    assert loaded.transform(df).collect() == first
    from pyspark.ml.evaluation import MulticlassClassificationEvaluator
    from pyspark.ml.tuning import CrossValidatorModel

    cross = CrossValidatorModel(model, avgMetrics=[0.5], stdMetrics=[0.0])
    estimator = TorchEstimator(model=net, loss=nn.CrossEntropyLoss(), feature_cols=["x"], label_cols=["y"])
    maps = [{{estimator.getParam("epochs"): 2}}]
    evaluator = MulticlassClassificationEvaluator(labelCol="y")
    cross._set(estimator=estimator, estimatorParamMaps=maps, evaluator=evaluator)
    for _ in range(2):
        cross.write().overwrite().save({path!r} + "-cross")
    assert CrossValidatorModel.load({path!r} + "-cross").transform(df).collect() == first
    # Rows of the file that holds weights are cut at newlines, and these are many.
    wide = nn.Sequential(nn.Linear(2, 10_000), nn.Linear(10_000, 2000), nn.Linear(2000, 2))
    with torch.no_grad():
        wide[1].bias.view(torch.uint8).fill_(10)
    model.setModel(wide).write().overwrite().save({path!r})
    weights = TorchModel.load({path!r}).getModel().state_dict()
    assert all(torch.equal(weights[n], t) for n, t in wide.state_dict().items())
    # And without any newline over more than one row.
    with torch.no_grad():
        [w.zero_() for w in wide.parameters()]
    model.setModel(wide).write().overwrite().save({path!r})
    weights = TorchModel.load({path!r}).getModel().state_dict()
    assert not any(t.any() for t in weights.values())
    with torch.no_grad():
        [w.fill_(1.0) for w in wide.parameters()]
    model.setModel(wide)
    assert model.transform(df).count() == 20
    # Code of a script, which Horovod's classes take where this process has saved it.
    from sparkhvd.horovod.spark.torch import TorchModel as HorovodModel

    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    own = HorovodModel(model=Doubled(2, 1), feature_columns=["x"], label_columns=["y"])
    own.save({path!r} + "-own")
    assert isinstance(HorovodModel.load({path!r} + "-own").getModel(), Doubled)
    print("rows", len(first), loaded.stages[0].history[0]["epoch"], [f.dataType.simpleString() for f in
          model.transform(df).schema.fields])
    print("large weights in the store:", len(list(model.getStore().list("models"))))
"""


@soak("cluster/test_fits[connect] saves and loads")
@pytest.mark.timeout(430)
def test_models_are_saved_and_loaded_over_connect(tmp_path: Path) -> None:
    body = CONNECT.format(store=str(tmp_path / "store"), path=str(tmp_path / "saved"))
    out = run_on("local[2]", body, tmp_path, remote=True, timeout_s=400)
    assert "rows 20 1 ['array<double>', 'int', 'vector', 'vector', 'vector', 'double']" in out
    assert "large weights in the store: 1" in out
