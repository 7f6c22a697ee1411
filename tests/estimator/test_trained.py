"""Report and curves of a model's training."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch

from sparkhvd.data.store.store import Store
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.estimator import TorchModel
from sparkhvd.estimator import model as onnx
from sparkhvd.horovod.spark.torch import TorchModel as TorchModelOfHorovods
from sparkhvd.observe.report.page import dumps
from tests.observe.documents import document

pytestmark = pytest.mark.pure

HISTORY = [
    {"epoch": e, "loss": 1 / e, "val_loss": 2 / e, "mae": 0.1, "rows": 5, "broken_rows": 1}
    for e in (1, 2)
]


def model(**options: object) -> TorchModel:
    net = torch.nn.Linear(1, 1)
    return TorchModel.from_module(net, feature_cols=["x"], label_cols=["y"], **options)  # type: ignore[arg-type]


def test_report_is_shown_in_a_frame_and_saved_as_a_page(tmp_path: Path) -> None:
    report = model(history=HISTORY).report()
    report.save(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert page == report.html
    assert page.count("<svg") == 2
    shown = report._repr_html_()
    assert shown.startswith('<iframe srcdoc="&lt;!DOCTYPE html&gt;')
    assert "sandbox" in shown
    assert "<svg" not in shown  # of the notebook itself


def test_loaded_model_shows_the_report_in_the_store(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "store")
    loaded = model(history=HISTORY, run_id="mine", store=store)
    assert "grads.0" not in loaded.report().html  # it is not there: history alone
    store.write_bytes("runs/mine/report.json", dumps(document()))
    assert "grads.0" in loaded.report().html
    assert "grads.0" not in loaded.setRunId("other").report().html


def test_plot_draws_training_and_validation_curves() -> None:
    pytest.importorskip("matplotlib")
    trained = model(history=HISTORY)
    figure = trained.plot()
    assert [axes.get_title() for axes in figure.axes] == ["loss", "mae"]
    lines = figure.axes[0].get_lines()
    assert [line.get_label() for line in lines] == ["training", "validation"]
    assert list(lines[1].get_ydata()) == [2.0, 1.0]
    assert len(trained.plot(["rows"]).axes) == 1
    of_a_loop = model(history=[{"epoch": 1, "val_error": 2.0}, {"epoch": 2, "val_error": 1.0}])
    (axes,) = of_a_loop.plot().axes
    assert axes.get_title() == "error"
    assert [line.get_label() for line in axes.get_lines()] == ["validation"]
    of_lightning = [{"epoch": e, "train_loss": 1.0 / e, "val_loss": 2.0 / e} for e in (1, 2)]
    (axes,) = model(history=of_lightning).plot().axes
    assert axes.get_title() == "loss"
    assert [line.get_label() for line in axes.get_lines()] == ["training", "validation"]
    for name, label in (("train_loss", "training"), ("val_loss", "validation")):
        (axes,) = model(history=of_lightning).plot([name]).axes
        assert [line.get_label() for line in axes.get_lines()] == [label]
    diverged = [{"epoch": 1, "loss": 500.0, "val_loss": math.nan}, {"epoch": 2, "loss": 1.0}]
    assert model(history=diverged).plot().axes[0].get_yscale() == "log"
    assert figure.axes[0].get_yscale() == "linear"
    never_finite = model(history=[{"epoch": 1, "loss": math.nan}])
    assert [axes.get_title() for axes in never_finite.plot().axes] == ["loss"]
    with pytest.raises(InvalidArgumentError, match="'nothing' is not in the history, which has 'l"):
        trained.plot(["nothing"])
    with pytest.raises(InvalidArgumentError, match="the model has no history"):
        model().plot()


def test_plot_without_matplotlib_raises_an_error_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(
        InvalidArgumentError, match=r"matplotlib is not installed. Run `pip install matpl"
    ):
        model(history=HISTORY).plot()


def test_onnx_export_without_packages_or_columns_raises_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(
        InvalidArgumentError,
        match=r"needs the package onnx. Install it: pip install 'sparkhvd\[onnx\]'",
    ):
        model().to_onnx(tmp_path / "model.onnx")
    monkeypatch.setattr(onnx, "_PACKAGES", ())
    with pytest.raises(InvalidArgumentError, match="no fit has trained this model"):
        model().to_onnx(tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []


def test_horovod_model_with_a_history_param_shows_the_same_report() -> None:
    pytest.importorskip("matplotlib")
    trained = TorchModelOfHorovods(history=[{"train": {"loss": 1.0}}])
    trained._take(model(history=HISTORY))
    assert [axes.get_title() for axes in trained.plot().axes] == ["loss", "mae"]
    assert trained.summary.objectiveHistory == [1.0, 0.5]
    assert "2 epochs" in repr(trained)
