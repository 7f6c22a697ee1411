"""Reports of real fits have the figures of the training, and a report never makes a fit fail."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from sparkhvd import Callback, Store, TorchModel
from sparkhvd.estimator.fitting import recorder
from sparkhvd.observe.report.page import loads
from sparkhvd.training.user_code.callbacks import CallbackContext
from tests.estimator.fits import estimator, mlp
from tests.harness.by_value import by_value

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

travels_by_value = by_value(__name__)

NUM_PARAMETERS = 2 * 6 + 6 + 6 + 1


class Slow(Callback):
    """Takes 0.4 s between epochs."""

    def on_epoch_begin(self, ctx: CallbackContext) -> None:
        time.sleep(0.2)

    def on_epoch_end(self, ctx: CallbackContext, record: object) -> None:
        time.sleep(0.2)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(tmp_path / "store")


def test_a_fit_writes_a_report_with_the_figures_of_its_training(
    spark: SparkSession, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    df = spark.range(100).selectExpr("array(rand(1), rand(2)) AS x", "rand(3) AS y")
    options = {"epochs": 3, "metrics": ["mae"], "validation": 0.2, "timeline": True}
    est = estimator(mlp(2), store, **options, callbacks=[Slow()])
    model = est.fit(df)
    run = f"runs/{model.getRunId()}"
    document = loads(store.read_bytes(f"{run}/report.json"), run)
    assert model.report().document == document
    assert store.read_bytes(f"{run}/report.html").decode() == model.report().html
    _check_times(document, model)
    _check_counts(document, model)
    assert document["params"]["epochs"] == "3"
    assert document["relaunches"] == []
    assert list(model.history_frame().index) == [1, 2, 3]
    events = json.loads(store.read_bytes(f"{run}/timeline.json"))
    assert {e["pid"] for e in events if e.get("name") == "backward"} == {0, 1}
    # Only the report is left, and no resumable run.
    (stored,) = store.runs()
    assert (stored.state, stored.num_bytes > 10_000) == ("report", True)

    def fail(_: object) -> str:
        raise ValueError("no page")

    monkeypatch.setattr(recorder, "render", fail)
    with pytest.warns(UserWarning, match="report of this fit was not written: ValueError: no page"):
        again = est.setRunId("mine").fit(df)
    assert [r["loss"] for r in again.history] == [r["loss"] for r in model.history]


def _check_times(document: dict, model: TorchModel) -> None:  # type: ignore[type-arg]
    phases = {phase["name"]: phase["seconds"] for phase in document["phases"]}
    assert math.isclose(sum(phases.values()), document["seconds"], rel_tol=0.02, abs_tol=0.05)
    assert math.isclose(phases["launch"], model.timings["launch"])
    steps = sum(record["seconds"] for record in model.history)
    assert math.isclose(phases["train"] + phases["first step"], steps, rel_tol=0.1, abs_tol=0.05)
    assert 0.5 * model.timings["materialize"] <= phases["materialize"]
    assert phases["validate"] > 0
    assert phases["checkpoint"] > 0
    assert 3 * 0.4 <= phases["callbacks"] < 2 * 3 * 0.4
    assert phases["exchange"] > 0


def _check_counts(document: dict, model: TorchModel) -> None:  # type: ignore[type-arg]
    assert document["history"] == model.history
    assert [sum(epoch["rows"]) for epoch in document["epochs"]] == [
        record["rows"] for record in model.history
    ]
    for epoch, record in zip(document["epochs"], model.history, strict=True):
        waits = epoch["gradient_wait_s"]
        assert math.isclose(min(waits), record["comm_wait_s"], abs_tol=1e-5)
        assert waits.index(min(waits)) == record["slowest_rank"]
        assert math.isclose(epoch["data_wait_s"][0], record["data_wait_s"], abs_tol=1e-5)
    steps_per_epoch = math.ceil(model.history[0]["rows"] / 16)
    assert sum(document["steps"]["counts"]) == 2 * 3 * steps_per_epoch
    (bucket,) = document["buckets"]
    assert (bucket["parameters"], bucket["bytes"]) == (4, 4 * NUM_PARAMETERS)
    reduced = sum(c["bytes"] for c in document["collectives"] if c["collective"] == "allreduce")
    assert reduced >= 3 * steps_per_epoch * 4 * NUM_PARAMETERS
    assert [rank["device"] for rank in document["ranks"]] == ["cpu", "cpu"]
    assert all(rank["peak_rss_bytes"] > 10 << 20 for rank in document["ranks"])
