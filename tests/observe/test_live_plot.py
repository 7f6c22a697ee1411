"""`LivePlot` in IPython's shell, as in a kernel, and elsewhere."""

from __future__ import annotations

import pickle
import sys
from typing import Any

import pytest

from sparkhvd import LivePlot
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.observe import live_plot

pytestmark = pytest.mark.pure

pytest.importorskip("matplotlib")


def record(epoch: int, **more: float) -> dict[str, Any]:
    return {"epoch": epoch, "loss": 1 / epoch, "val_loss": 2 / epoch, "rows": 9, **more}


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, str, bool]]:
    """Return the display data that a kernel's shell publishes: figure, place, whether it replaces."""
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance()
    monkeypatch.setattr(shell, "kernel", object(), raising=False)
    found: list[tuple[Any, str, bool]] = []

    def publish(data: dict[str, Any], metadata: Any = None, **options: Any) -> None:
        found.append((data, options["transient"]["display_id"], options.get("update", False)))

    monkeypatch.setattr(shell.display_pub, "publish", publish)
    yield found
    InteractiveShell.clear_instance()


def test_each_epoch_replaces_the_single_figure_of_a_fit(
    published: list[tuple[Any, str, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    draw = live_plot.draw_curves
    monkeypatch.setattr(live_plot, "draw_curves", lambda *a: drawn.append(draw(*a)) or drawn[-1])
    plot = LivePlot()
    for each in (record(1), record(2, f1=0.5), record(1)):
        plot(each)
    (_, first, is_update), (_, second, is_second), (_, third, is_third) = published
    assert (is_update, is_second, is_third) == (False, True, False)
    assert first == second != third
    assert all("image/png" in data for data, _, _ in published)
    assert [axes.get_title() for axes in drawn[1].axes] == ["loss", "f1"]
    training, validation = drawn[1].axes[0].get_lines()
    assert (list(training.get_ydata()), list(validation.get_ydata())) == ([1, 0.5], [2, 1])
    assert validation.get_label() == "validation"
    LivePlot(["rows", "not there"])(record(1))
    assert [axes.get_title() for axes in drawn[-1].axes] == ["rows", "not there"]


def test_live_plot_does_nothing_without_matplotlib_or_a_notebook(
    published: list[tuple[Any, str, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    LivePlot()(record(1))
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "IPython", None)
    LivePlot()(record(1))
    assert published == []
    with pytest.raises(InvalidArgumentError, match=r"names must be a list, such as \['loss'\]"):
        LivePlot("loss")


def test_notebook_shows_the_curves_without_matplotlib_magic(
    published: list[tuple[Any, str, bool]],
) -> None:
    """IPython's formatters show a figure that is the value of a cell."""
    from IPython.core.interactiveshell import InteractiveShell

    figure = live_plot.draw_curves([record(1), record(2)], ["loss"])
    data, _ = InteractiveShell.instance().display_formatter.format(figure)
    assert data["image/png"].startswith(b"\x89PNG")
    copy = pickle.loads(pickle.dumps(figure))  # noqa: S301 - its own
    assert [axes.get_title() for axes in copy.axes] == ["loss"]
