"""Fits on stores of every kind, on stores that fail during the fit, and without leaked secrets."""

from __future__ import annotations

import base64
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.fs as pafs
import pytest
import torch
from torch import nn

from sparkhvd import RankError, Store, TorchModel
from sparkhvd.data.store.temporary import default_store
from sparkhvd.errors import InvalidArgumentError, StoreError
from sparkhvd.training.checkpoints.files import Checkpoints
from tests.estimator.fits import assert_same_weights, estimator, mlp
from tests.harness.by_value import by_value
from tests.harness.mounts import tmpfs, unmount
from tests.harness.processes import wait_for_no_trainers
from tests.harness.sequential_mount import sequential_mount
from tests.harness.servers import S3, SECRET, cable
from tests.harness.soak import soak
from tests.harness.spark import run_on

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

travels_by_value = by_value(__name__)


pytestmark = [
    pytest.mark.spark,
    pytest.mark.leaks("file systems keep their connections open"),
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def df(spark: SparkSession) -> DataFrame:
    data = [([float(i % 5), float(i % 3)], float(i % 7)) for i in range(40)]
    return spark.createDataFrame(data, "x array<double>, y double")


@pytest.fixture(scope="module")
def expected(df: DataFrame, tmp_path_factory: pytest.TempPathFactory) -> nn.Module:
    store = Store.create(tmp_path_factory.mktemp("expected"))
    return estimator(mlp(2), store, epochs=2).fit(df).getModel()


def trained_alike(df: DataFrame, store: Store, expected: nn.Module) -> None:
    model = estimator(mlp(2), store, epochs=2, run_id="r").fit(df)
    assert_same_weights(model.getModel(), expected, 0.0)
    assert [record["epoch"] for record in model.history] == [1, 2]
    assert store.list("runs") == ["runs/r"]
    assert Checkpoints(store, "runs/r").latest_epoch() == 2
    rows = model.transform(df).collect()
    assert len(rows) == 40
    again = TorchModel.from_run(store, "r")
    assert_same_weights(again.getModel(), expected, 0.0)
    assert again.history == model.history
    assert again.transform(df).collect() == rows


def test_fit_on_s3_gives_the_expected_model(df: DataFrame, expected: nn.Module, s3: S3) -> None:
    trained_alike(df, Store.create("s3://bucket/fit", **s3.options()), expected)


@soak("test_fit_on_s3_gives_the_expected_model, here; data/test_store_servers: served by ftp")
def test_fit_through_fsspec_gives_the_expected_model(
    df: DataFrame, expected: nn.Module, ftp: str
) -> None:
    trained_alike(df, Store.create(f"{ftp}/store"), expected)


@soak("data/test_store_places")
@pytest.mark.usefixtures("mounts")
def test_fit_on_a_sequential_mount_gives_the_expected_model(
    df: DataFrame, expected: nn.Module, tmp_path: Path
) -> None:
    with sequential_mount(tmp_path / "folder", tmp_path / "mount") as mount:
        trained_alike(df, Store.create(mount / "store"), expected)


class Slow(nn.Module):
    """Slows an epoch, so that the driver can act meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        with torch.no_grad():
            self.layer.weight.fill_(0.1)
            self.layer.bias.fill_(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            time.sleep(0.05)
        return self.layer(x)


def disturbed(
    df: DataFrame,
    store: Store,
    disturb: Callable[[], None],
    repaired: Callable[[], Store],
    says: str,
) -> None:
    """Disturb the store of a fit after the first epoch. The fit must report it, and continue after the repair."""
    seen: list[int] = []

    def progress(record: dict[str, Any]) -> None:
        seen.append(record["epoch"])
        if len(seen) == 1:
            disturb()

    options = {"optimizer": lambda p: torch.optim.SGD(p, lr=0.01), "run_id": "r", "num_proc": 1}
    with pytest.raises(RankError) as failed:
        estimator(Slow(), store, epochs=500, progress=progress, **options).fit(df)
    assert wait_for_no_trainers() == set()
    assert failed.value.rank == 0
    text = str(failed.value)
    assert f"StoreError: The store {store.url} {says}" in text, text
    assert SECRET not in text + failed.value.traceback + failed.value.log_tail
    healthy = repaired()
    last = Checkpoints(healthy, "runs/r").latest()
    assert last is not None
    assert last.epoch >= seen[0]
    model = estimator(Slow(), healthy, epochs=last.epoch + 1, **options).fit(df)
    assert len(model.history) == last.epoch + 1


@pytest.mark.usefixtures("mounts")
def test_fit_on_a_full_store_raises_and_resumes_later(df: DataFrame, tmp_path: Path) -> None:
    with tmpfs(tmp_path / "small", 1 << 20) as place:
        store = Store.create(place / "store")
        ballast = place / "ballast"

        def fill() -> None:
            with ballast.open("wb", buffering=0) as file:
                while True:
                    try:
                        file.write(bytes(4096))
                    except OSError:
                        return

        def emptied() -> Store:
            ballast.unlink()
            return store

        disturbed(df, store, fill, emptied, "cannot be written (runs/r/")


@soak("a full store during a fit, here; data/test_store_places")
@pytest.mark.usefixtures("mounts")
def test_fit_on_an_unmounted_store_raises_and_resumes_later(df: DataFrame, tmp_path: Path) -> None:
    with tmpfs(tmp_path / "behind", 1 << 22) as behind:
        # Two names of one file system: the second is removed, and the first shows the written files.
        place = tmp_path / "mount"
        place.mkdir()
        subprocess.run(["mount", "--bind", str(behind), str(place)], check=True)
        try:
            store = Store.create(place / "store")
            disturbed(
                df,
                store,
                lambda: unmount(place),
                lambda: Store(f"{behind}/store"),
                "does not exist: ",
            )
            assert list(place.iterdir()) == []
        finally:
            unmount(place)


@soak("a full store during a fit, here")
def test_fit_on_an_unreachable_server_raises_and_resumes_later(df: DataFrame, s3: S3) -> None:
    with cable(s3.port) as line:
        url = "s3://bucket/cut"
        store = Store.create(url, **s3.options(line.port))
        disturbed(
            # The owner of the checkpoints is read before a checkpoint is written.
            df,
            store,
            line.cut,
            lambda: Store(url, s3.options()),
            "cannot be ",
        )


def test_error_names_an_unreachable_store_before_data_are_written(df: DataFrame, s3: S3) -> None:
    with cable(s3.port) as line:
        store = Store.create("s3://bucket/early", **s3.options(line.port))
        line.cut()
        with pytest.raises(StoreError, match="The store s3://bucket/early cannot be"):
            estimator(mlp(2), store).fit(df)


def test_a_password_in_the_conf_is_refused_because_spark_shows_it(spark: SparkSession) -> None:
    spark.conf.set("spark.sparkhvd.store", f"ftp://user:{SECRET}@localhost:1/store")
    try:
        with pytest.raises(InvalidArgumentError) as caught:
            default_store(spark)
    finally:
        spark.conf.unset("spark.sparkhvd.store")
    assert str(caught.value) == (
        "spark.sparkhvd.store is 'ftp://localhost:1/store' with a password or key, which Spark would show in its UI and "
        "event log. Give store=Store.create(...) instead, or configure credentials on the machines."
    )


SECRETS = """
import logging, traceback
import torch
from torch import nn
from sparkhvd import Store, TorchEstimator, TorchModel

logging.basicConfig(level=logging.INFO)
spark.sparkContext.setLogLevel("INFO")

class Failing(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x):
        if self.training:
            raise RuntimeError("on purpose")
        return self.layer(x)

def fit(store, model, **options):
    estimator = TorchEstimator(
        model=model, optimizer=lambda p: torch.optim.SGD(p, lr=0.01), loss=nn.MSELoss(), feature_cols=["x"],
        label_cols=["y"], num_proc=1, batch_size=8, max_retries=0, store=store, **options)
    print(estimator, estimator.explainParams(), estimator._paramMap)
    return estimator, estimator.fit(df)

rows = [([float(i % 5), float(i % 3)], float(i % 7)) for i in range(40)]
df = spark.createDataFrame(rows, "x array<double>, y double")
for number, store in enumerate([Store.create(S3, **OPTIONS), Store.create(FTP)]):
    print(store, repr(store), store.url)
    estimator, model = fit(store, nn.Linear(2, 1), run_id="whole", keep_data=True)
    out = model.transform(df)
    out.explain("extended")
    out.collect()
    print(model, model.explainParams(), model.timings)
    model.save(f"{FOLDER}/model-{number}")
    estimator.save(f"{FOLDER}/estimator-{number}")
    loaded = TorchEstimator.load(f"{FOLDER}/estimator-{number}", trust=True)
    print(loaded.getStore())
try:
    fit(store, Failing(), run_id="fails")
except Exception:
    traceback.print_exc()
print("DONE")
"""


def forms_of(secret: bytes) -> list[bytes]:
    """Return the forms of a secret: plain, and inside a base64 text at each of the three alignments."""
    forms = [secret]
    for before in range(3):
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            text = encode(bytes(before) + secret)
            # Without the characters that contain bits of neighbouring bytes.
            forms.append(text[-(-before * 8 // 6) : (before + len(secret)) * 8 // 6])
    return list(dict.fromkeys(forms))


def holds_secret(content: bytes) -> bool:
    return any(form in content for form in forms_of(SECRET.encode()))


@pytest.mark.parametrize("before", range(4))
def test_secret_check_finds_secrets_in_base64(before: int) -> None:
    assert holds_secret(base64.b64encode(b"x" * before + SECRET.encode() + b"behind"))
    assert holds_secret(base64.b64encode(b"x" * before + SECRET.encode()))
    assert not holds_secret(base64.b64encode(b"x" * before + SECRET[:-2].encode()))


@soak("data/test_store")
def test_credentials_are_absent_from_logs_plans_and_files(tmp_path: Path, s3: S3, ftp: str) -> None:
    """The test searches the output of a fit, its files and Spark's event log, in plain text and in base64."""
    out = tmp_path / "out"
    events = out / "events"
    events.mkdir(parents=True)
    bodies = f"FOLDER, S3, FTP, OPTIONS = {str(out)!r}, 's3://bucket/secrets', {ftp + '/secrets'!r}, {s3.options()!r}"
    conf = {
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": events.as_uri(),
        "spark.eventLog.compress": "false",
        "spark.eventLog.rolling.enabled": "false",
        "spark.sql.planChangeLog.level": "INFO",
    }
    printed = run_on("local[2]", f"{bodies}\n{SECRETS}", tmp_path, conf=conf, timeout_s=550)
    assert "DONE" in printed
    assert "on purpose" in printed
    lines = [line for line in printed.splitlines() if holds_secret(line.encode())]
    assert lines == []
    files = [p for p in out.rglob("*") if p.is_file()] + list((tmp_path / "ftp").rglob("*"))
    assert any(p.parent == events for p in files)
    found = [str(p) for p in files if p.is_file() and holds_secret(p.read_bytes())]
    assert found == []
    filesystem = pafs.S3FileSystem(**s3.options())
    objects = filesystem.get_file_info(pafs.FileSelector("bucket/secrets", recursive=True))
    paths = [o.path for o in objects if o.type == pafs.FileType.File]
    assert len(paths) > 5
    for path in paths:
        with filesystem.open_input_stream(path) as source:
            assert not holds_secret(source.read()), path
