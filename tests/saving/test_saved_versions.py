"""Directories saved by earlier versions load and give the same results."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from pyspark.ml import Pipeline, PipelineModel

from sparkhvd import TorchClassifier, TorchEstimator, TorchModel, UntrustedError
from sparkhvd.estimator.saving.persistence import FORMAT_VERSION
from tests.saving import saved_store
from tests.saving.saved_models import FIXTURES, Scaled, data, estimators, outputs

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

FOLDERS = sorted(FIXTURES.glob("saved_model_v*"))


def test_current_save_format_has_a_fixture() -> None:
    assert f"saved_model_v{FORMAT_VERSION}" in [folder.name for folder in FOLDERS]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_models_of_earlier_versions_predict_the_same(spark: SparkSession, folder: Path) -> None:
    expected = json.loads((folder / "expected.json").read_text())
    with pytest.raises(UntrustedError, match=r"\.saved_models\.Scaled"):
        TorchModel.load(f"{folder}/own_model")
    for name in ("plain", "own"):
        model = TorchModel.load(f"{folder}/{name}_model", trust=name == "own")
        found = outputs(model, data(spark))
        assert len(found) == len(expected[name]) == 12
        for row, before in zip(found, expected[name], strict=True):
            for value, other in zip(row, before, strict=True):
                np.testing.assert_allclose(value, other, rtol=1e-5, atol=1e-6)
        assert model.history[0]["epoch"] == 1
        (weights,) = (folder / f"{name}_model" / "weights").iterdir()
        model.getModel().load_state_dict(torch.load(weights, weights_only=True))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_estimators_saved_by_earlier_versions_load(spark: SparkSession, folder: Path) -> None:
    for name, now in estimators().items():
        found = TorchEstimator.load(f"{folder}/{name}_estimator", trust=name == "own")
        for param in ("feature_cols", "label_cols", "batch_size", "random_seed", "metrics"):
            assert found._get(param) == now._get(param)
        assert found.getLoss() is now.getLoss() or repr(found.getLoss()) == repr(now.getLoss())
    plain = TorchEstimator.load(f"{folder}/plain_estimator")
    assert plain.getLoss().label_smoothing == 0.1
    assert plain.getOptimizer().param_groups[0]["betas"] == (0.8, 0.9)
    assert plain.getOptimizer().param_groups[0]["params"][0] is next(plain.getModel().parameters())
    for mine, theirs in zip(
        estimators()["plain"].getModel().parameters(), plain.getModel().parameters(), strict=True
    ):
        assert torch.equal(mine, theirs)
    with pytest.raises(UntrustedError):
        TorchEstimator.load(f"{folder}/own_estimator")
    own = TorchEstimator.load(f"{folder}/own_estimator", trust=True)
    assert type(own.getModel()) is Scaled
    assert own.getOptimizer() is torch.optim.SGD


def test_run_of_an_earlier_version_resumes(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(saved_store.FIXTURE / "store", tmp_path / "store")
    resumed = saved_store.estimator(str(tmp_path / "store"), run_id=saved_store.RUN_ID)
    model = resumed.setVerbose(1).fit(saved_store.rows(spark))
    assert "after 4 steps" in capsys.readouterr().out  # where it continues
    whole = saved_store.estimator(str(tmp_path / "new")).fit(saved_store.rows(spark))
    assert [record["epoch"] for record in model.history] == [1, 2, 3, 4]
    # If this CPU rounds like the CPU of the first epochs, the bits are equal. Otherwise Adam and batch normalization
    # magnify a difference in the eighth digit, most of all in a bias before the normalization, which has no effect.
    is_equal = model.history[0]["loss"] == whole.history[0]["loss"]
    for record, other in zip(model.history, whole.history, strict=True):
        assert record["loss"] == pytest.approx(other["loss"], rel=0 if is_equal else 1e-3, abs=0)
    for mine, theirs in zip(
        model.getModel().parameters(), whole.getModel().parameters(), strict=True
    ):
        assert torch.equal(mine, theirs) or not is_equal
    again = TorchModel.from_run(str(tmp_path / "store"), saved_store.RUN_ID, trust=True)
    for mine, theirs in zip(
        model.getModel().parameters(), again.getModel().parameters(), strict=True
    ):
        assert torch.equal(mine, theirs)


def test_pipelines_and_pickles_of_an_earlier_version_load(spark: SparkSession) -> None:
    expected = json.loads((saved_store.FIXTURE / "expected.json").read_text())
    model = PipelineModel.load(f"{saved_store.FIXTURE}/pipeline_model")
    found = [
        list(map(float, row["probability"]))
        for row in model.transform(saved_store.columns(spark)).collect()
    ]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    pickled = pickle.loads((saved_store.FIXTURE / "model.pkl").read_bytes())
    assembled = model.stages[0].transform(saved_store.columns(spark))
    again = [list(map(float, r["probability"])) for r in pickled.transform(assembled).collect()]
    assert again == found
    stages = Pipeline.load(f"{saved_store.FIXTURE}/pipeline").getStages()
    assert type(stages[1]) is TorchClassifier
    assert stages[1].getMaxIter() == 2
