"""Loggers of a Spark Connect client, for a fit and for `run`, with and without executors that reach the client."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.cluster import Cluster, Unseen, run_client
from tests.harness.soak import soak
from tests.harness.spark import with_folder

pytestmark = [pytest.mark.spark, pytest.mark.timeout(450)]

PROGRAM = """
import io, torch
from torch import nn
from sparkhvd import Logger, Store, TorchEstimator, log_metrics, run
from sparkhvd.observe.loggers.base import Sink
from sparkhvd.runner import context, live_output
from sparkhvd.spark import SparkShim

class Kept(Logger, Sink):
    def __init__(self):
        self.metrics, self.models, self.files, self.state = [], [], {}, ""

    def begin(self, fit):
        self.fit = fit
        return self

    def log(self, metrics):
        self.metrics += metrics

    def log_model(self, model):
        self.models.append(model)

    def finish(self, state, files):
        self.state, self.files = state, files

    def of(self, name):
        return sorted((m.step, m.value) for m in self.metrics if m.name == name)

def nodes(kept):
    return {m.name.split("/")[1].rpartition("-")[2] for m in kept.metrics if m.name.startswith("system/")}

class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, x):
        time.sleep(0.3)
        return self.layer(x)

df = spark.createDataFrame([([float(i % 5)], float(i % 7)) for i in range(32)], "x array<double>, y double")
kept = Kept()
fitted = TorchEstimator(
    model=Slow(), optimizer="sgd", loss="mse", feature_cols=["x"], label_cols=["y"], batch_size=4, epochs=2, num_proc=2,
    store=Store.create(FOLDER + "/store"), loggers=[kept], verbose=0).fit(df)
assert kept.state == "finished" and kept.models == [fitted] and set(kept.files) == {"report.json", "report.html"}, vars(kept)
assert kept.of("loss") == [(r["epoch"], r["loss"]) for r in fitted.history], kept.metrics
assert nodes(kept) == {"0", "1"}, kept.metrics

def train(seconds):
    for step in range(10):
        log_metrics({f"loss_{context().rank}": step / 2}, step)
    time.sleep(seconds)
    return context().rank

def follow(seconds):
    kept, shown = Kept(), io.StringIO()
    assert run(train, (seconds,), num_proc=2, spark=spark, loggers=[kept], stdout=shown) == [0, 1]
    assert "metrics" not in shown.getvalue(), shown.getvalue()
    for rank in range(2):
        assert kept.of(f"loss_{rank}") == [(step, step / 2) for step in range(10)], kept.metrics
    assert kept.state == "finished" and nodes(kept) == {"0", "1"}, kept.metrics

follow(1.5)
# As a client behind NAT: what ranks have logged comes in the end.
live_output._REACH_S = 1.0
SparkShim.own_addresses = lambda shim: ("127.0.0.1", "192.0.2.1")
follow(2.5)
print("ALL WELL")
"""


@soak("a classic session: runner/test_local, soak/users/test_mlflow")
def test_loggers_get_numbers_if_connect_client_sees_the_store(
    cluster: Cluster, tmp_path: Path
) -> None:
    output = run_client(cluster.remote, with_folder(PROGRAM, tmp_path), tmp_path)
    assert "ALL WELL" in output, output


@soak("a classic session: runner/test_local, soak/users/test_mlflow")
def test_loggers_get_numbers_if_connect_client_cannot_see_the_store(
    unseen_store: Unseen, tmp_path: Path
) -> None:
    output = unseen_store.run(PROGRAM, tmp_path)
    assert "ALL WELL" in output, output
