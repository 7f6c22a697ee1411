"""A Spark Connect client that does not see the store reaches it through tasks, and creates nothing on its own host."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.harness.cluster import Unseen, hiding
from tests.harness.servers import S3, SECRET
from tests.harness.soak import soak

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]

STORE = """
import os, pickle, warnings
from sparkhvd import Store
from sparkhvd.errors import InvalidArgumentError

store = Store.create(FOLDER + "/store")
assert not store.is_seen and not store.is_local and store.local_path("x") is None
assert pickle.loads(pickle.dumps(store)).is_seen  # what executors get
# Above what travels in a closure, and above what one job brings back.
data = os.urandom(70 << 20)
store.write_bytes("runs/big", data)
assert store.read_bytes("runs/big") == data and store.num_bytes("runs/big") == len(data)
with store.open_input("runs/big") as file:
    file.seek(66 << 20)
    assert file.read(5 << 20) == data[66 << 20:]
    file.seek(10)
    assert file.read(3) == data[10:13]
store.write_bytes("runs/1/small", b"one")
store.write_bytes("runs/1/small", b"two")
assert store.read_bytes("runs/1/small") == b"two" and store.exists("runs/1") and not store.exists("runs/2")
assert store.list("runs") == ["runs/1", "runs/big"] and store.list("runs", recursive=True)[0] == "runs/1/small"
try:
    with store.open_output("runs/1/small") as sink:
        sink.write(b"half")
        raise KeyError("midway")
except KeyError:
    assert store.read_bytes("runs/1/small") == b"two"
store.delete("runs/big")
store.delete("runs/1")
for wrong, kind in (("runs/none", FileNotFoundError), ("../up", InvalidArgumentError)):
    try:
        store.read_bytes(wrong)
        raise AssertionError(wrong)
    except kind as e:
        print("REFUSED", type(e).__name__, e)
try:
    Store.create("/proc/no/store")
    raise AssertionError("made")
except InvalidArgumentError as e:
    print("REFUSED", e)
# One that was made before there was a session.
early = Store(FOLDER + "/early")
early.prove_writable()
assert os.listdir(FOLDER + "/early") == []
from sparkhvd.data.store.temporary import default_store
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    again = default_store(spark, early)
assert not again.is_seen and not os.path.exists(FOLDER + "/early")
print("WARNED", [str(w.message) for w in caught if "Store.create" in str(w.message)])
"""

FIT = """
import os, torch
from torch import nn
from sparkhvd import Store, TorchEstimator
from sparkhvd.data.store.remote import RemoteStore

torch.manual_seed(0)
rows = [([float(i % 5), float(i % 3)], float(i % 7)) for i in range(40)]
df = spark.createDataFrame(rows, "x array<double>, y double")
seen, asked, ask = [], [], RemoteStore.ask

def counted(store, call, *arguments):
    asked.append((call.__name__, str(arguments)[:80]))
    return ask(store, call, *arguments)

RemoteStore.ask = counted
estimator = TorchEstimator(
    model=nn.Linear(2, 1), optimizer=lambda p: torch.optim.SGD(p, lr=0.01), loss=nn.MSELoss(), feature_cols=["x"],
    label_cols=["y"], batch_size=4, epochs=2, num_proc=NUM_PROC, max_retries=0, random_seed=1, run_id="r",
    warm_start=True, progress=lambda record: seen.append(record["epoch"]), store=Store.create(GIVEN) if GIVEN else None)
model = estimator.fit(df)
assert seen == [1, 2], seen
# A task takes some ten milliseconds at best; more of them than these are not worth it.
assert len(asked) <= 60, asked
print("ASKED", len(asked), asked)
assert [r["epoch"] for r in model.history] == [1, 2]
assert model.transform(df).count() == 40
print("RUNS", model.getStore().list("runs/r"))
"""


PARQUET = """
import torch, warnings
from torch import nn
from sparkhvd import Store, TorchEstimator, TorchModel
from sparkhvd.errors import InvalidArgumentError

df = spark.range(40).selectExpr("array(id % 5 / 5, 1.0D) AS x", "id % 7 / 7 AS y", "id % 2 AS half")
df.write.partitionBy("half").parquet(FOLDER + "/table")
estimator = TorchEstimator(
    model=nn.Linear(2, 1), optimizer=lambda p: torch.optim.SGD(p, lr=0.01), loss=nn.MSELoss(), feature_cols=["x"],
    label_cols=["y"], batch_size=4, num_proc=1, max_retries=0, verbose=0, store=FOLDER + "/store-of-parquet", run_id="p")
model = estimator.fit_on_parquet(FOLDER + "/table", spark=spark)
again = TorchModel.from_run(FOLDER + "/store-of-parquet", "p")
assert torch.equal(again.getModel().weight, model.getModel().weight)
print("ROWS", model.history[0]["rows"])
for path, column in ((FOLDER + "/none", "x"), (FOLDER + "/table", "z")):
    try:
        estimator.copy({estimator.feature_cols: [column]}).fit_on_parquet(path, spark=spark)
    except InvalidArgumentError as e:
        print("REFUSED", e)
# A part of a table whose log tells its rows, as files and as a DataFrame.
from sparkhvd.data.tables import warn_of_tables
spark.sql("SELECT '{}' AS value").write.text(FOLDER + "/table/_delta_log")
try:
    estimator.fit_on_parquet(FOLDER + "/table/half=0", spark=spark)
except InvalidArgumentError as e:
    print("REFUSED", e)
part = spark.read.parquet(FOLDER + "/table/half=0").where("y > 0")
for store in (model.getStore(), model.getStore().direct):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_tables(part, store)
    print("WARNED", [str(w.message) for w in caught])
"""


ON_S3 = """
from sparkhvd.data.store.remote import RemoteStore

store = Store.create("s3://bucket/connect", **OPTIONS)
assert store.is_seen  # this client reaches the server
for given in (store, RemoteStore(store, spark)):
    given.write_bytes("runs/a", b"x")
    assert given.read_bytes("runs/a") == b"x"
try:
    RemoteStore(Store("s3://none/p", OPTIONS), spark).read_bytes("runs/a")
    raise AssertionError("read")
except Exception as e:
    print("REFUSED", type(e).__name__, e)
"""


@pytest.fixture(scope="module")
def printed(
    unseen_store: Unseen, tmp_path_factory: pytest.TempPathFactory, s3: S3
) -> dict[str, str]:
    """Output of the programs above, by name, in one client, because its start takes longer than most of them."""
    bodies = {"store": STORE, "s3": f"OPTIONS = {s3.options()!r}\n{ON_S3}", "parquet": PARQUET}
    body = "\n".join(f"print('--- {name}')\n{text}" for name, text in bodies.items())
    output = unseen_store.run(body, tmp_path_factory.mktemp("client"))
    found = dict(re.findall(r"^--- (\w+)\n(.*?)(?=^--- |\Z)", output, re.DOTALL | re.MULTILINE))
    assert list(found) == list(bodies), output
    return found


def refused(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("REFUSED")]


@soak("a client of Connect: test_fits; files in Parquet: estimator/test_fit_on_parquet")
def test_a_client_trains_on_files_that_only_executors_see(printed: dict[str, str]) -> None:
    output = printed["parquet"]
    assert "ROWS 40" in output
    first, second, part = refused(output)
    assert "'../_delta_log' above it shows that this is a part of a Delta table" in part
    warned = [line for line in output.splitlines() if line.startswith("WARNED")]
    assert "without the '_delta_log' there" in warned[0]
    assert warned[1] == "WARNED []"  # this client itself sees nothing there
    assert "/none'): there is no such file or folder" in first
    assert "names column 'z'" in second


@soak("data/test_store_places; a client that saves and loads: test_fits")
def test_client_uses_an_unseen_store_and_gets_its_errors(printed: dict[str, str]) -> None:
    output = printed["store"]
    said = refused(output)
    assert said[0].startswith("REFUSED FileNotFoundError")
    assert said[1].startswith("REFUSED InvalidArgumentError '../up' is not a path inside a store")
    assert "Store.create('file:///proc/no/store'): the folder cannot be written" in said[2]
    assert "Store.create was called before the Spark Connect session" in output


@soak("credentials in no file and no message: estimator/test_stores, data/test_store_servers")
def test_credentials_are_not_in_the_log_of_the_server(
    unseen_store: Unseen, printed: dict[str, str]
) -> None:
    assert "REFUSED" in printed["s3"]
    assert SECRET not in "".join(printed.values())
    log = unseen_store.printed()
    assert "map_partitions" in log  # it includes plans
    assert SECRET not in log


@soak("test_a_client_trains_on_files_that_only_executors_see, here; estimator/test_runs")
def test_client_resumes_run_of_another_client_in_an_unseen_store(
    unseen_store: Unseen, tmp_path: Path
) -> None:
    """A fit that takes both slots prints its epochs at its end, and a fit with one rank prints them at once."""
    given = 'GIVEN = FOLDER + "/runs-of-others"\n'
    first = unseen_store.run(f"{given}NUM_PROC = 2\n{FIT}", tmp_path)
    assert (
        "Epochs and lines of ranks are printed when the training ends: this client does not see file://"
        in first
    )
    second = unseen_store.run(f"{given}NUM_PROC = 2\n{FIT}", tmp_path)
    third = unseen_store.run(f'GIVEN = ""\nNUM_PROC = 1\n{FIT}', tmp_path)
    assert "Epochs and lines of ranks are printed when the training ends" not in third
    print(*(line for out in (first, second, third) for line in out.splitlines() if "ASKED" in line))
    # Without a mount namespace, the folder is relative to the process that looks, and every session has its own.
    if hiding(unseen_store.folder) is not None:
        assert "warm-1" in second
        assert (unseen_store.folder / "runs-of-others/runs/r/warm-1/finished.json").exists()
        # Prepared data was deleted with the clients.
        assert list((unseen_store.folder / "runs-of-others").glob("data/*")) == []


@soak("a coordinator in a task, by a client that sees the store: test_elastic")
def test_elastic_fit_works_in_a_store_unseen_by_the_client(
    unseen_store: Unseen, tmp_path: Path
) -> None:
    given = 'GIVEN = FOLDER + "/come-and-go"\nNUM_PROC = (1, 2)\n'
    output = unseen_store.run(given + FIT, tmp_path)
    assert re.search(r"^sparkhvd: [12] ranks? in ", output, re.MULTILINE), output


NO_SLOT = """
import os, threading, time
from sparkhvd.data.store.remote import RemoteStore
from sparkhvd.data.store.store import Store

store = RemoteStore(Store(FOLDER), spark)
store.exists("a")  # the executors are there now

def holds(batches):
    list(batches)
    time.sleep(25)
    yield from ()

held = spark.range(0, 2, 1, 2).mapInArrow(holds, "id bigint")
holder = threading.Thread(target=held.collect)
holder.start()
os.environ["SPARKHVD_START_TIMEOUT_S"] = "4"
until = time.monotonic() + 20
while time.monotonic() < until:  # until both slots are taken
    began = time.monotonic()
    try:
        store.exists("a")
        time.sleep(0.5)
    except Exception as e:
        print("REFUSED", round(time.monotonic() - began), type(e).__name__, e)
        break
holder.join(100)
os.environ["SPARKHVD_START_TIMEOUT_S"] = "100"
print("AGAIN", store.exists("a"))
"""


@soak("test_a_client_trains_on_files_that_only_executors_see, here")
def test_unseen_store_without_a_free_slot_raises_in_time(
    unseen_store: Unseen, tmp_path: Path
) -> None:
    output = unseen_store.run(NO_SLOT, tmp_path)
    assert re.search(
        r"REFUSED \d+ StoreError .* had not answered after 4 s\. Check whether", output
    )
    assert "AGAIN False" in output


TWO_FITS = """
import os, threading, time, torch
from torch import nn
from sparkhvd import Store, TorchEstimator

os.environ["SPARKHVD_START_TIMEOUT_S"] = "500"
df = spark.range(32).selectExpr("array(id/64D) AS x", "id%5/5D AS y")

class Slow(nn.Linear):
    def forward(self, x):
        if self.training:
            time.sleep(2.0)
        return super().forward(x)

def fit(name):
    began = time.monotonic()
    try:
        TorchEstimator(
            model=Slow(1, 1), optimizer=lambda p: torch.optim.SGD(p, lr=0.01), loss=nn.MSELoss(), feature_cols=["x"],
            label_cols=["y"], batch_size=1, num_proc=2, max_retries=0, verbose=0, start_timeout=20.0,
            store=Store.create(FOLDER + "/two-fits")).fit(df)
        print("RESULT", name, "ok", round(time.monotonic() - began))
    except Exception as e:
        print("RESULT", name, type(e).__name__, e)

first = threading.Thread(target=fit, args=("first",))
first.start()
time.sleep(12)  # it trains, for longer than the second one may wait for slots
second = threading.Thread(target=fit, args=("second",))
second.start()
first.join(200), second.join(200)
"""


@soak("runner/test_admission")
def test_fit_waits_for_an_earlier_fit_of_the_same_client(
    unseen_store: Unseen, tmp_path: Path
) -> None:
    output = unseen_store.run(TWO_FITS, tmp_path)
    results = [line for line in output.splitlines() if line.startswith("RESULT")]
    assert sorted(line.split()[1:3] for line in results) == [["first", "ok"], ["second", "ok"]]
