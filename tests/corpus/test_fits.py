"""Four programs of the corpus by `fit`, each with transform, save and load."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.corpus import page
from tests.corpus.cases import find
from tests.corpus.ddp import Ddp
from tests.corpus.run import Checks

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

NAMES = [
    "torch_layers.LSTM packed",
    "torch_optimizers.LBFGS",
    "torch_programs.VAE",
    "torch_programs.model's own loss",
]


@pytest.mark.parametrize("name", NAMES)
def test_fit_gives_the_results_of_a_plain_loop(
    name: str, spark: SparkSession, tmp_path: Path
) -> None:
    checks: dict[str, Any] = {}
    Checks(spark, Ddp(), tmp_path).one_rank(find(name), checks)
    record = {"case": name, "seconds": 0.0, "checks": checks}
    assert {*checks} == {"one rank", "transform", "saved"}, page.line(record)
    assert page.is_equal(record), page.line(record)
