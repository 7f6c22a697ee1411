"""Settings of a fit from the Spark conf, the environment and its arguments."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from sparkhvd import Settings, TorchEstimator
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.estimator.fitting.cluster import Cluster, resolve_cluster
from sparkhvd.settings import JobSettings
from sparkhvd.spark import SparkShim
from tests.harness.fake_driver import fake_driver

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

CONF = {
    "spark.sparkhvd.num_proc": "1",
    "spark.sparkhvd.max_retries": "5",
    "spark.sparkhvd.start_timeout": "12.5",
    "spark.sparkhvd.verbose": "0",
    "spark.sparkhvd.spin_us": "9",
}


@pytest.fixture
def conf(spark: SparkSession) -> Iterator[dict[str, str]]:
    """The conf above for one test."""
    for key, value in CONF.items():
        spark.conf.set(key, value)
    yield CONF
    for key in CONF:
        spark.conf.unset(key)


def resolve(spark: SparkSession, **params: object) -> Cluster:
    return resolve_cluster(SparkShim(spark), TorchEstimator(**params)._options())


def test_argument_overrides_conf_overrides_environment_overrides_default(
    spark: SparkSession, conf: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARKHVD_SPIN_US", "8")
    monkeypatch.setenv("SPARKHVD_SLOTS", "6")
    # A local master gives no GPUs; a rank takes one that torch sees.
    also: dict[str, Any] = {"slots": 2, "looks_for_gpu": True}
    assert resolve(spark) == Cluster(
        1, 5, 12.5, 0, JobSettings(Settings(spin_us=9, slots=6)), **also
    )
    given = {"num_proc": 2, "max_retries": 2, "start_timeout": 3.0, "verbose": 1}
    assert resolve(spark, **given, settings=Settings(spin_us=7)) == Cluster(
        2, 2, 3.0, 1, JobSettings(Settings(spin_us=7), ("spin_us",)), **also
    )
    for key in conf:
        spark.conf.unset(key)
    of_environment = JobSettings(Settings(spin_us=8, slots=6))
    assert resolve(spark) == Cluster(2, 2, None, 1, of_environment, **also)
    for use_gpu in (True, False):  # decided before it starts
        found = resolve(spark, use_gpu=use_gpu)
        assert (found.use_gpu, found.looks_for_gpu) == (use_gpu, False)


def test_the_default_number_of_ranks_is_printed(
    spark: SparkSession, capsys: pytest.CaptureFixture[str]
) -> None:
    resolve(spark)
    line = "num_proc is not given: 2 ranks, one per task slot ("
    assert capsys.readouterr().out.startswith(line)
    resolve(spark, verbose=0)
    resolve(spark, num_proc=2)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("build", "use_gpu", "num_proc"),
    [("13.0", None, 1), (None, None, 2), (None, True, 1), ("13.0", False, 2)],
)
def test_a_local_master_with_one_gpu_defaults_to_one_gpu_rank(
    spark: SparkSession,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    build: str | None,
    use_gpu: bool | None,
    num_proc: int,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("FAKE_GPUS", "5")
    monkeypatch.setattr(torch.version, "cuda", build)
    settings = Settings(cuda_library=fake_driver(tmp_path))
    found = resolve(spark, use_gpu=use_gpu, settings=settings)
    assert (found.num_proc, found.slots) == (num_proc, 2)
    # With use_gpu=True the launch decides.
    assert found.finds_gpu == (build is not None and use_gpu is None)
    said = capsys.readouterr().out
    one = "num_proc is not given: 1 rank, one per GPU (master 'local[2]' on a host with 1 GPU).\n"
    assert said == one if num_proc == 1 else "2 ranks, one per task slot (" in said
    # A given number has priority.
    assert resolve(spark, use_gpu=use_gpu, settings=settings, num_proc=2).num_proc == 2


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "num_proc",
            "two",
            "spark.sparkhvd.num_proc is 'two'; it must be a whole number. Set another value, or give num_proc to fit.",
        ),
        ("num_proc", "0", "spark.sparkhvd.num_proc is 0; it must be at least 1."),
        ("start_timeout", "0", "spark.sparkhvd.start_timeout is 0.0; it must be more than 0."),
        (
            "slots",
            "1",
            "spark.sparkhvd.slots is 1; it must be from 2 to 64.",
        ),
        (
            "isa",
            "sse",
            "spark.sparkhvd.isa is 'sse'; it must be one of auto, scalar, avx2, avx512, neon.",
        ),
    ],
)
def test_error_names_the_conf_key_of_a_wrong_value(
    spark: SparkSession, key: str, value: str, message: str
) -> None:
    spark.conf.set(f"spark.sparkhvd.{key}", value)
    try:
        with pytest.raises(InvalidArgumentError) as failed:
            resolve(spark)
    finally:
        spark.conf.unset(f"spark.sparkhvd.{key}")
    assert str(failed.value) == message
