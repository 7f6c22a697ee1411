"""Predictions without Spark: saved models and `model.local()`, on data of every kind, and in a process without pyspark."""

from __future__ import annotations

import copy
import importlib.util
import io
import json
import pickle
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from torch import Tensor, nn

import sparkhvd
from sparkhvd import InvalidArgumentError, LocalModel, Store, TorchModel, UntrustedError, load_local
from sparkhvd.data.columns.binding import bind_inputs
from sparkhvd.data.columns.schema import Column, DataSchema
from sparkhvd.estimator import image, pad
from sparkhvd.estimator.params.generated import PredictOptions
from sparkhvd.estimator.saving import local_model
from sparkhvd.estimator.saving.encoding import KEY, Archive
from sparkhvd.estimator.saving.persistence import FORMAT_VERSION, encode_model
from sparkhvd.training.modules import weights
from sparkhvd.training.modules.fitted import TrainedState, output_widths
from tests.harness.by_value import by_value

pytestmark = pytest.mark.pure

FIXTURES = Path(__file__).parents[1] / "saving" / "fixtures"
VERSION_1 = FIXTURES / f"saved_model_v{FORMAT_VERSION}"
PIPELINE = FIXTURES / "before_merge" / "pipeline_model"

travels_by_value = by_value(__name__)

A = Column("a", "scalar", "float32", (), "double", "float32")
K = Column("k", "scalar", "int64", (), "int", "int64")
X = Column("x", "vector", "float32", (3,), "vector", "float32")


class Net(nn.Module):
    """Takes numbers joined from two columns, and an index into a table."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(4, 2)
        self.table = nn.Embedding(9, 2)

    def forward(self, joined: Tensor, index: Tensor) -> Tensor:
        result: Tensor = self.layer(joined) + self.table(index)
        return result


def trained(
    module: nn.Module, *columns: Column, link: str = "identity", **params: Any
) -> TorchModel:
    """Make a model as `fit` does, without the fit."""
    names = [c.name for c in columns]
    model = TorchModel(**{"feature_cols": names, "label_cols": ["y"], **params})
    inputs = bind_inputs(
        module,
        DataSchema(columns, ()),
        inputs=params.get("inputs"),
        input_shapes=params.get("input_shapes"),
    )
    # A trial of a copy, because modules of these tests keep their inputs or refuse zeros.
    is_tried = not any(c.is_collated or c.kind == "sparse" for c in columns)
    trial = copy.deepcopy(module).eval()
    found = output_widths(trial, inputs, columns) if is_tried else [1]
    model._fitted = TrainedState(
        module=module.eval(),
        columns=columns,
        labels=("y",),
        inputs=inputs,
        links=(link,),
        widths=tuple(found or ()),
    )
    return model


def net(**params: Any) -> TorchModel:
    inputs = {"joined": ["a", "x"], "index": "k"}
    return trained(Net(), A, X, K, inputs=inputs, **params)


def save(model: TorchModel, folder: Path) -> Path:
    """Write the files of `save` without Spark."""
    archive = Archive()
    content = {"format_version": FORMAT_VERSION, **encode_model(model, archive)}
    cls = type(model)
    metadata = {"class": f"{cls.__module__}.{cls.__name__}", "uid": model.uid, KEY: content}
    buffer = io.BytesIO()
    weights.dump(archive.tensors, buffer)
    files = {"metadata": json.dumps(metadata).encode(), "weights": buffer.getvalue()}
    if archive.code:
        files["code"] = pickle.dumps(archive.pickles())
    for name, data in files.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "part-00000").write_bytes(data)
        (folder / name / ".part-00000.crc").write_bytes(b"of Hadoop")
        (folder / name / "_SUCCESS").touch()
    return folder


ROWS = 5
VALUES = {
    "a": np.arange(ROWS) / 4,
    "x": np.linspace(-1, 1, 3 * ROWS).reshape(ROWS, 3),
    "k": np.arange(ROWS) % 3,
}


def expected(values: dict[str, np.ndarray] = VALUES) -> np.ndarray:
    joined = torch.tensor(np.column_stack([values["a"], values["x"]])).float()
    with torch.no_grad():
        found: np.ndarray = Net()(joined, torch.tensor(values["k"])).double().numpy()
    return found


# -- saved models, and a process without pyspark

WITHOUT_PYSPARK = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("pyspark", "py4j"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
try:
    import pyspark
except ModuleNotFoundError:
    pass
else:
    sys.exit("pyspark is there")
"""
_PREDICTS = """
import json
import numpy as np
import pandas as pd
import sparkhvd

plain, own, pipeline = sys.argv[1:]
x = np.array([[i / 8, 1 - i / 4] for i in range(12)])
model = sparkhvd.load_local(plain)
found = model.predict(pd.DataFrame({"x": list(x), "other": "text"}))
stage = sparkhvd.load_local(pipeline).predict({"features": [[i / 16, 1 - i / 8] for i in range(16)]})
try:
    sparkhvd.load_local(own)
except sparkhvd.UntrustedError as e:
    refused = str(e)
mine = sparkhvd.load_local(own, trust=True)
scored = mine.predict([{"name": "b", "z": [1, 2]}, {"name": "a", "z": [3]}])
there = sorted({name.partition(".")[0] for name in sys.modules} & {"pyspark", "py4j"})
print(json.dumps({
    "found": {name: values.tolist() for name, values in found.items()},
    "stage": stage["probability"].tolist(), "keys": sorted(stage),
    "refused": refused, "scored": scored["y__output"].tolist(), "there": there,
}))
"""


class Own(nn.Module):
    """A user's class, pickled by value."""

    def forward(self, name: Tensor, z: Tensor) -> Tensor:
        return name[:, None] * 100 + z.sum(1, keepdim=True)


def test_a_process_without_pyspark_predicts_with_models_saved_by_spark(tmp_path: Path) -> None:
    name = Column(
        "name", "string", "uint8", (-1,), "string", "float32", has_decoder=True, decoded=()
    )
    z = Column("z", "ragged", "float32", (-1,), "array<double>", "float32", is_collated=True)
    own = trained(
        Own(),
        name,
        z,
        decoders={"name": lambda text: np.float32(ord(text) - ord("a"))},
        collate_fn={"z": pad(0)},
        inputs={"name": "name", "z": "z"},
    )
    path = save(own, tmp_path / "own")
    (stage,) = (PIPELINE / "stages").glob("1_*")
    command = [
        sys.executable,
        "-c",
        WITHOUT_PYSPARK + _PREDICTS,
        str(VERSION_1 / "plain_model"),
        str(path),
        str(stage),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["there"] == []
    before = json.loads((VERSION_1 / "expected.json").read_text())["plain"]
    assert list(answer["found"]) == ["y__output", "rawPrediction", "p", "prediction"]
    for number, key in enumerate(("y__output", "prediction", "p")):
        wanted = [row[number] for row in before]
        np.testing.assert_allclose(answer["found"][key], wanted, rtol=1e-5, atol=1e-6)
    wanted = json.loads((PIPELINE.parent / "expected.json").read_text())
    np.testing.assert_allclose(answer["stage"], wanted, rtol=1e-5, atol=1e-6)
    assert answer["keys"] == ["prediction", "probability", "rawPrediction"]
    assert answer["scored"] == [103.0, 3.0]
    assert answer["refused"] == (
        f"{str(path)!r} holds {__name__}.Own, and loading it runs code from that file. If you trust the file, load it "
        "with trust=True, or inside `with sparkhvd.trust():`."
    )


def test_pickled_code_does_not_run_without_trust(tmp_path: Path) -> None:
    class Marks:
        def __reduce__(self) -> Any:
            return (tmp_path / "ran").touch, ()

    path = save(net(output_fn=lambda output: output), tmp_path / "model")
    (path / "code" / "part-00000").write_bytes(pickle.dumps({"output_fn": Marks()}))
    with pytest.raises(UntrustedError):
        load_local(path)
    assert not (tmp_path / "ran").exists()
    with sparkhvd.trust(), pytest.raises(KeyError):  # of the model, which this pickle lacks
        load_local(path)
    assert (tmp_path / "ran").exists()


def test_local_models_load_from_paths_urls_and_stores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(trained(nn.Linear(3, 1), X), tmp_path / "m")
    monkeypatch.chdir(tmp_path)
    remote = Store.create(f"memory://{tmp_path.name}/m")
    for file in (tmp_path / "m").rglob("*"):
        if file.is_file():
            remote.write_bytes(str(file.relative_to(tmp_path / "m")), file.read_bytes())
    places: list[Any] = ["m", tmp_path / "m", f"{tmp_path}/m/", (tmp_path / "m").as_uri(), remote]
    found = [load_local(place).predict({"x": VALUES["x"]}) for place in [*places, remote.url]]
    assert all(np.array_equal(f["y__output"], found[0]["y__output"]) for f in found)
    # A pipeline of this one stage.
    stage = tmp_path / "p" / "stages" / "0_m"
    shutil.copytree(tmp_path / "m", stage)
    (tmp_path / "p" / "metadata").mkdir()
    (tmp_path / "p" / "metadata" / "part-00000").write_text(
        json.dumps({"class": "pyspark.ml.pipeline.PipelineModel"})
    )
    assert repr(load_local(tmp_path / "p")) == "LocalModel of Linear: x -> y__output"


def test_folders_without_a_model_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        InvalidArgumentError, match=r"this process finds no saved model there\. .*URL"
    ):
        load_local(tmp_path / "empty")
    with pytest.raises(InvalidArgumentError, match=r"pipeline of 2 stages.*/stages/1_TorchClass"):
        load_local(PIPELINE)
    with pytest.raises(InvalidArgumentError, match="this is a sparkhvd.*TorchEstimator"):
        load_local(VERSION_1 / "plain_estimator")
    path = save(trained(nn.Linear(3, 1), X), tmp_path / "m")
    file = path / "metadata" / "part-00000"
    whole = json.loads(file.read_text())
    for metadata, says in (
        ("{", "is not the line that Spark writes"),
        ("[1]", "this is a None"),
        ({**whole, "class": "mine.Model"}, "this is a mine.Model"),
        ({**whole, KEY: {**whole[KEY], "format_version": 99}}, "has format version 99"),
        ({**whole, KEY: {**whole[KEY], "inputs": 3}}, "in a form that sparkhvd does not save"),
        ({**whole, KEY: {**whole[KEY], "params": None}}, "in a form that sparkhvd does not save"),
    ):
        file.write_text(metadata if isinstance(metadata, str) else json.dumps(metadata))
        with pytest.raises(InvalidArgumentError, match=says):
            load_local(path)
    (path / "metadata" / "part-00001").touch()
    with pytest.raises(InvalidArgumentError, match="holds 2 files; one is expected"):
        load_local(path)


def test_a_loaded_model_has_the_params_of_its_class(tmp_path: Path) -> None:
    from sparkhvd.horovod.spark.torch.estimator import TorchModel as OfHorovod

    kinds = {
        TorchModel: "value",
        sparkhvd.TorchClassificationModel: "sigmoid",
        sparkhvd.TorchRegressionModel: "value",
        OfHorovod: "value",
    }
    for number, (kind, link) in enumerate(kinds.items()):
        model = kind(feature_cols=["x"], label_cols=["y"])
        model._fitted = trained(nn.Linear(3, 1), X, link=link)._fitted
        path = save(model, tmp_path / str(number))
        mine, theirs = load_local(path)._options, model._read_options(PredictOptions)
        ours = {n: v for n, v in vars(theirs).items() if n not in ("use_gpu", "explicit")}
        assert {n: getattr(mine, n) for n in ours} == ours
        assert load_local(path).output_cols == model.local().output_cols
    # Horovod's model of a LightningModule differs only in its module. keras/test_params loads the Keras model.
    assert len(local_model.CLASSES) == len(kinds) + 2
    assert (
        local_model.CLASSES["sparkhvd.horovod.spark.lightning.estimator.TorchModel"]
        == (local_model.CLASSES["sparkhvd.horovod.spark.torch.estimator.TorchModel"])
    )

    class OwnRows(OfHorovod):
        def get_prediction_fn(self) -> Any:
            return lambda module, row: module(row)

    with pytest.raises(InvalidArgumentError, match="OwnRows has a get_prediction_fn of its own"):
        OwnRows(feature_cols=["x"], model=nn.Linear(3, 1)).local()


# -- data


def test_every_kind_of_data_gives_equal_predictions() -> None:
    model = net().local()
    frame = pd.DataFrame({"k": VALUES["k"], "x": list(VALUES["x"]), "a": VALUES["a"], "o": "other"})
    table = pa.table({n: v.tolist() for n, v in VALUES.items()})
    records = [{n: v[i].tolist() for n, v in VALUES.items()} for i in range(ROWS)]
    tensors = {n: torch.from_numpy(v) for n, v in VALUES.items()}
    fixed = pa.FixedSizeListArray.from_arrays(pa.array(VALUES["x"].ravel()), 3)
    whole = np.column_stack([VALUES["a"], VALUES["x"], VALUES["k"]])

    class Stream:
        def __arrow_c_stream__(self, schema: object = None) -> object:
            return table.__arrow_c_stream__(schema)

    for data in (
        VALUES,
        frame,
        frame.astype({"k": "Int8", "a": pd.ArrowDtype(pa.float64())}),
        table,
        pa.concat_tables([table, table]).slice(ROWS),
        pa.table({"a": VALUES["a"], "x": fixed, "k": VALUES["k"]}),
        table.to_batches()[0],
        records,
        tensors,
        {**tensors, "x": tensors["x"].requires_grad_(), "a": frame.a},
        {n: v.tolist() for n, v in VALUES.items()},
        {**VALUES, "x": list(VALUES["x"])},
        {**VALUES, "x": list(torch.from_numpy(VALUES["x"]))},
        {**VALUES, "x": VALUES["x"][::-1][::-1].astype(">f8")},
        {**VALUES, "a": VALUES["a"][:, None]},
        whole,
        torch.from_numpy(whole),
        Stream(),
    ):
        found = model.predict(data)
        assert list(found) == ["y__output"]
        assert found["y__output"].dtype == np.float64
        np.testing.assert_allclose(found["y__output"], expected(), rtol=1e-6)
    one = model.predict(records[1])["y__output"]
    np.testing.assert_allclose(one, expected()[1:2], rtol=1e-6)
    assert model.feature_cols == ["a", "x", "k"]
    assert model.output_cols == ["y__output"]


_POLARS = """
import sys
import polars as pl
import sparkhvd

x = [[i / 8, 1 - i / 4] for i in range(12)]
model = sparkhvd.load_local(sys.argv[1])
frame = pl.DataFrame({"x": x, "other": ["text"] * 12})
array = frame.with_columns(x=pl.col("x").cast(pl.Array(pl.Float64, 2)))
found = [model.predict(data)["y__output"].tolist() for data in ({"x": x}, frame, array)]
assert found[0] == found[1] == found[2], found
"""


@pytest.mark.skipif(
    importlib.util.find_spec("polars") is None,
    reason="polars is not installed; the test above has the stream of Arrow by which it is read",
)
def test_polars_dataframes_are_predicted() -> None:
    # In a separate process, because polars keeps threads and descriptors.
    command = [sys.executable, "-c", _POLARS, str(VERSION_1 / "plain_model")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_local_predictions_are_the_columns_of_transform() -> None:
    model = trained(
        nn.Linear(3, 3), X, link="softmax", outputCols=["o"], thresholds=[1.0, 0.1, 9.0]
    )
    found = model.local().predict({"x": VALUES["x"]})
    assert list(found) == ["o", "rawPrediction", "probability", "prediction"]
    np.testing.assert_allclose(found["probability"].sum(1), 1, rtol=1e-6)
    scaled = found["probability"] / [1.0, 0.1, 9.0]
    assert found["prediction"].tolist() == scaled.argmax(1).tolist()
    value = trained(nn.Linear(3, 1), X, link="value", predictionCol="p", outputCols=[""])
    assert {n: v.shape for n, v in value.local().predict(VALUES["x"]).items()} == {"p": (ROWS,)}
    with pytest.raises(InvalidArgumentError, match="^predict: two output columns have one name"):
        value.copy().setOutputCols(["p"]).local().predict(VALUES["x"])


def test_arrays_keep_their_shape_and_integers_their_type() -> None:
    grid = Column("g", "array", "float32", (2, 2), "array<array<double>>", "float32")
    images = np.arange(12.0).reshape(3, 2, 2)
    module = nn.Sequential(nn.Conv2d(1, 1, 2), nn.Flatten())
    model = trained(module, grid, input_shapes=[[-1, 1, 2, 2]]).local()
    with torch.no_grad():
        wanted = module(torch.tensor(images).float()[:, None]).reshape(-1).numpy()
    for given in (images, images[:, None], images.reshape(3, 4), torch.tensor(images).bfloat16()):
        found = model.predict(given)["y__output"]
        np.testing.assert_allclose(found, wanted, rtol=1e-5)
    # A whole number of JSON in a column of doubles is rounded like a double. In an integer column it stays exact.
    big = 2**24 + 1
    assert trained(nn.Identity(), A).local().predict([{"a": big}])["y__output"] == [2.0**24]
    with pytest.raises(InvalidArgumentError, match=r"cannot hold exactly, for example 16777217"):
        trained(nn.Identity(), A).local().predict({"a": np.array([big])})
    index = trained(nn.Embedding(9, 1), K)
    assert index.local().predict([{"k": 8}])["y__output"] == [index.getModel().weight[8].item()]


def test_sparse_vectors_of_torch_scipy_lists_and_spark_are_predicted() -> None:
    s = Column("s", "sparse", "float32", (6,), "vector", "float32", is_sparse=True)

    class Seen(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            assert x.is_sparse
            return x.to_dense() @ torch.arange(6.0)[:, None]

    model = trained(Seen(), s).local()
    dense = np.zeros((4, 6))
    dense[[0, 0, 1, 3], [5, 1, 2, 0]] = [2.0, 1.0, -3.0, 4.0]
    from pyspark.ml.linalg import Vectors

    rows: list[Any] = [
        Vectors.dense(dense[0]),
        *(Vectors.sparse(6, dict(enumerate(r))) for r in dense[1:]),
    ]
    struct = pa.StructArray.from_arrays(
        [
            pa.array([0] * 4, pa.int8()),
            pa.array([6] * 4, pa.int32()),
            pa.array([np.flatnonzero(r).astype(np.int32) for r in dense]),
            pa.array([r[r != 0] for r in dense]),
        ],
        names=["type", "size", "indices", "values"],
    )
    for values in (
        dense,
        torch.tensor(dense).to_sparse(),
        torch.tensor(dense).to_sparse_csr(),
        dense.tolist(),
        pd.Series(rows),
        struct,
    ):
        assert model.predict({"s": values})["y__output"].tolist() == [11.0, -6.0, 0.0, 0.0]
    with pytest.raises(InvalidArgumentError, match="^predict: column 's' is null"):
        model.predict(pd.DataFrame({"s": [*rows, None]}))
    scipy = pytest.importorskip("scipy.sparse", reason="scipy comes with the examples")
    matrix = scipy.coo_matrix(([1.0, 1.0, 1.0], ([0, 0, 1], [5, 5, 2])), shape=(2, 6))
    assert model.predict({"s": matrix})["y__output"].tolist() == [10.0, 2.0]
    with pytest.raises(InvalidArgumentError, match="'s' has 5 elements per row.* takes 6"):
        model.predict({"s": dense[:, :5]})


def test_local_models_apply_decoders_collate_functions_and_skipping() -> None:
    from PIL import Image

    def png(level: int) -> bytes:
        data = io.BytesIO()
        Image.new("L", (2, 2), level).save(data, "png")
        return data.getvalue()

    photo = Column("photo", "binary", "uint8", (-1,), "binary", "float32", has_decoder=True)
    level = Column("level", "string", "uint8", (-1,), "string", "int64", has_decoder=True)
    columns = (
        Column(**{**vars(photo), "decoded": (1, 2, 2)}),
        Column(**{**vars(level), "decoded": ()}),
    )

    class Sum(nn.Module):
        def forward(self, photo: Tensor, level: Tensor) -> Tensor:
            return photo.sum((1, 2, 3)) + level

    model = trained(
        Sum(),
        *columns,
        inputs={"photo": "photo", "level": "level"},
        decoders={
            "photo": image(2, 2, channels=1, broken="skip"),
            "level": {"low": 10, "high": 20},
        },
        handle_invalid={"level": "skip"},
    ).local()
    rows = [
        {"photo": png(255), "level": "low"},
        {"photo": b"broken", "level": "low"},
        {"photo": png(0), "level": None},
        {"photo": png(0), "level": "high"},
    ]
    nan = pytest.approx([14.0, float("nan"), float("nan"), 20.0], nan_ok=True)
    for data in (rows, pd.DataFrame(rows), pa.Table.from_pylist(rows)):
        assert model.predict(data)["y__output"] == nan
    assert np.isnan(model.predict(rows[2])["y__output"]).all()
    with pytest.raises(InvalidArgumentError, match="is a dict of 2 values without 'none'"):
        model.predict({**rows[0], "level": "none"})


def test_missing_numbers_follow_handle_invalid() -> None:
    rows = {"a": [0.5, None, float("nan"), 1.0]}
    module = nn.Identity()
    with pytest.raises(InvalidArgumentError, match="^predict: column 'a' is null"):
        trained(module, A).local().predict(rows)
    with pytest.raises(InvalidArgumentError, match="^predict: column 'a' is NaN"):
        trained(module, A).local().predict(pd.DataFrame(rows))
    filled = trained(module, A, handle_invalid={"a": 7.0}).local()
    assert filled.predict(rows)["y__output"].tolist() == [0.5, 7.0, 7.0, 1.0]
    assert filled.predict({"a": None})["y__output"].tolist() == [7.0]
    skipped = trained(module, A, handle_invalid="skip").local()
    assert skipped.predict(rows)["y__output"] == pytest.approx(
        [0.5, *[float("nan")] * 2, 1], nan_ok=True
    )


@pytest.mark.parametrize(
    "data",
    [
        [],
        pd.DataFrame({"a": [], "x": [], "k": []}),
        pa.table(
            {"a": pa.array([], pa.float64()), "x": pa.array([], pa.list_(pa.float64())), "k": []}
        ),
        {n: v[:0] for n, v in VALUES.items()},
        np.zeros((0, 5)),
    ],
)
def test_data_without_rows_give_empty_predictions(data: Any) -> None:
    assert net().local().predict(data)["y__output"].shape == (0, 2)
    vector = trained(nn.Linear(3, 1), X, link="sigmoid").local()
    shapes = {n: v.shape for n, v in vector.predict(np.zeros((0, 3))).items()}
    assert shapes == {
        "y__output": (0,),
        "rawPrediction": (0, 2),
        "probability": (0, 2),
        "prediction": (0,),
    }


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"a": [1.0], "x": [[1, 2, 3]]}, "column 'k', which the data does not have.* 'a', 'x'"),
        (pd.DataFrame({"A": [1.0]}).iloc[:0], "column 'a', which the data do not have.* 'A'"),
        (
            {**VALUES, "x": VALUES["x"][:, :2]},
            "'x' has 2 elements per row in a batch, but the model takes 3",
        ),
        (
            {**VALUES, "x": VALUES["a"]},
            "'x' is of type double, but the model was trained with vector",
        ),
        (
            {**VALUES, "k": np.array(["t"] * ROWS)},
            "'k' of type string, which cannot become a tensor",
        ),
        ({**VALUES, "k": VALUES["a"]}, "'k' has 3 rows in a batch that are not whole numbers"),
        ({**VALUES, "a": VALUES["a"][:2]}, "different numbers of rows: 'a' 2, 'x' 5, 'k' 5"),
        ({**VALUES, "a": [1.0, "t", 2.0, 3.0, 4.0]}, "column 'a' cannot be read: Arrow"),
        ({**VALUES, "a": object()}, "column 'a' is a object; give an array"),
        ({**VALUES, "a": np.ones(ROWS) * 1j}, "column 'a' cannot be read: Arrow"),
        (
            np.zeros((2, 4)),
            r"shape \(2, 4\), but the model needs \(rows, 5\): a row holds the numbers of 'a' \(1\), 'x' \(3\), 'k' \(1\)",
        ),
        (np.zeros(5), r"shape \(5,\), but the model needs"),
        (np.float64(3), r"got a numpy\.float64\. Give a pandas"),
        ([1, 2], r"got a builtins\.list\. Give"),
        (
            pd.DataFrame(np.zeros((1, 4)), columns=["a", "a", "x", "k"]),
            "'a', which the data has 2 times",
        ),
    ],
)
def test_data_that_mismatch_the_model_are_refused(data: Any, says: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^predict: .*{says}") as failed:
        net().local().predict(data)
    assert "transform: " not in str(failed.value)


def test_a_module_without_a_fit_is_bound_to_the_data() -> None:
    module = nn.Linear(4, 1)
    model = TorchModel.from_module(module, feature_cols=["a", "x"], label_cols="y").local()
    values = {"a": VALUES["a"], "x": VALUES["x"]}
    with torch.no_grad():
        wanted = module(torch.tensor(np.column_stack(list(values.values()))).float())[:, 0]
    np.testing.assert_allclose(model.predict(values)["y__output"], wanted, rtol=1e-6)
    assert repr(model) == "LocalModel of Linear: a, x -> ?"
    with pytest.raises(InvalidArgumentError, match="has no trained module"):
        TorchModel().local()


# -- a service


class Keeps(nn.Module):
    """Keeps its input during the computation, as a module with hidden states does."""

    def forward(self, x: Tensor) -> Tensor:
        self.kept = x
        time.sleep(0.002)
        return self.kept.sum(1, keepdim=True)


def test_concurrent_predictions_return_their_own_results() -> None:
    model = trained(Keeps(), X).local()
    before = torch.get_num_threads(), torch.is_grad_enabled()
    start = threading.Barrier(8)

    def ask(number: int) -> list[bool]:
        start.wait(10)
        rows = [np.full((1 + i % 3, 3), float(10 * number + i)) for i in range(12)]
        return [bool((model.predict(x)["y__output"] == x.sum(1)).all()) for x in rows]

    with ThreadPoolExecutor(8) as pool:
        assert all(map(all, pool.map(ask, range(8))))
    assert (torch.get_num_threads(), torch.is_grad_enabled()) == before


class Doubles(nn.Module):
    """Writes to its input."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_predict_does_not_change_data_of_the_caller(dtype: type[Any]) -> None:
    model = trained(Doubles(), X).local()
    values = VALUES["x"].astype(dtype)
    table = pa.table({"x": pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), 3)})
    for data in (values, {"x": torch.from_numpy(values)}, table):
        np.testing.assert_allclose(model.predict(data)["y__output"], 2 * VALUES["x"], rtol=1e-6)
        assert np.array_equal(values, VALUES["x"].astype(dtype))


def test_local_models_are_independent() -> None:
    fitted = trained(Keeps(), X)
    one, other = fitted.local(), fitted.local()
    assert isinstance(one, LocalModel)
    one.predict(VALUES["x"])
    assert not hasattr(fitted.getModel(), "kept")
    assert not hasattr(other._module, "kept")


def test_error_names_an_index_beyond_an_embedding() -> None:
    model = nn.Sequential(nn.Embedding(10, 1), nn.Flatten())
    local = TorchModel.from_module(model, feature_cols=["c"], label_cols=["y"]).local()
    assert len(local.predict({"c": np.array([1, 9])})["y__output"]) == 2
    with pytest.raises(
        InvalidArgumentError, match="'0' has 10 rows, and the model looks up index 99"
    ):
        local.predict({"c": np.array([1, 99])})
