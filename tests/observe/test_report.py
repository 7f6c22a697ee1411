"""Pages and comparisons of reports, made from documents."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser

import pytest

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.observe.report.charts import Series, format_seconds, histogram, lines
from sparkhvd.observe.report.compare import compare
from sparkhvd.observe.report.page import dumps, loads, paired, render
from tests.observe.documents import document

pytestmark = pytest.mark.pure

# Elements without an end.
_VOID = {"meta", "line", "circle", "polyline", "rect"}


class Page(HTMLParser):
    """The text of a page. Rejects elements that do not nest, and attributes with external content."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.tags: list[str] = []
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        assert not {name for name, _ in attrs} & {"src", "href", "xlink:href", "onload", "onclick"}
        if tag not in _VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in _VOID:
            assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return "\n".join(self.texts)


def test_report_page_shows_every_part_of_the_document() -> None:
    page = Page(render(document()))
    shown = page.text
    for expected in (
        "mine",
        "finished",
        "/data/store",
        "materialize",
        "4 s, 40%",
        "100 steps of all ranks: 50% below ",
        "computing 65%, waiting for data 10%, waiting for slower ranks 20%, waiting for gradients 5%",
        "The other ranks waited most for rank 1, up to 2.4 s. It spent 85% computing and 10% waiting for data.",
        "rank 1 was killed",
        "grads.0",
        "CPU of each rank, percent of one",
        "host-1",
        "avx2",
        "2.13.0",
    ):
        assert expected in shown
    # loss, accuracy, rows/s, durations, CPU and memory. lr never changes, and GPU load is unknown.
    assert page.tags.count("svg") == 6
    assert "script" not in page.tags
    assert "link" not in page.tags


def test_report_page_shows_ranks_that_joined_and_left() -> None:
    made = document()
    for name, values in made["epochs"][1].items():  # one rank alone
        made["epochs"][1][name] = values[:1] if isinstance(values, list) else values
    made["rank_changes"] = [
        {"seconds": 1.0, "before": 0, "after": 2, "took_s": 0.1, "why": "2 on a", "epoch": 1},
        {"seconds": 4.0, "before": 2, "after": 1, "took_s": 0.2, "why": "process 1 was lost", "epoch": 2, "repeated_rows": 640},
        {"seconds": 5.0, "before": 1, "after": 2, "took_s": 0.1, "why": "process 2 joined"},
    ]  # fmt: skip
    made["history"][1] |= {"ranks": 1, "repeated_rows": 640, "rank_changes": ["2 -> 1"]}
    page = Page(render(made))
    for expected in ("changes of ranks", "2 \u2192 1", "process 1 was lost", "640", "rank 1"):
        assert expected in page.text
    # The number of ranks has no curve.
    assert page.tags.count("svg") == Page(render(document())).tags.count("svg")


def test_report_page_loads_nothing_and_has_dark_and_print_styles() -> None:
    html = render(document())
    assert not re.search(r"https?://|@import|url\(", html)
    assert "default-src 'none'" in html
    assert "prefers-color-scheme:dark" in html
    assert "@media print" in html


@pytest.mark.parametrize(
    ("entries", "headings"),
    [
        ({}, []),
        ({"history": []}, []),
        ({"history": [{"epoch": 1, "seconds": 0.0, "note": "text"}]}, ["Epochs"]),
        ({"history": [{"epoch": 1, "loss": math.nan}]}, ["Epochs"]),
        (
            {"history": [{"epoch": 1, "loss": 0.0}, {"epoch": 2, "loss": math.inf}]},
            ["Losses and metrics", "Epochs"],
        ),
        ({"steps": {"first_s": 1.0, "per_octave": 4, "counts": [0, 0]}}, []),
        ({"state": "failed", "error": "RankError: no\nline two"}, []),
    ],
)
def test_report_page_omits_parts_missing_from_the_document(
    entries: dict[str, object], headings: list[str]
) -> None:
    html = render(loads(dumps(entries), "here"))
    assert re.findall("<h2>(.*?)</h2>", html) == headings
    assert "Cannot be shown" not in Page(html).text


def test_report_page_shows_values_that_were_never_finite() -> None:
    given = document()
    for record in given["history"]:
        record |= {"loss": math.nan, "accuracy": math.inf, "auc": math.nan}
    page = Page(render(loads(dumps(given), "here")))
    for expected in ("loss", "accuracy", "auc", "nan", "inf"):
        assert expected in page.texts
    # val_loss, rows/s, durations, CPU and memory. accuracy and loss have no curve.
    assert page.tags.count("svg") == 5
    table = {line.split("  ")[0]: line for line in compare(document(), given).splitlines()}
    assert table["loss"].split() == ["loss", "0.3333", "nan"]
    assert table["accuracy"].split() == ["accuracy", "0.8", "inf"]
    assert table["auc"].split() == ["auc", "-", "nan"]


def test_report_page_of_many_ranks_and_epochs_stays_small() -> None:
    html = render(document(ranks=64, epochs=500))
    page = Page(html)
    assert len(html) < 300_000
    assert "16 of 64 ranks are shown" in page.text
    assert page.text.count("1,000") == 0
    assert "fastest rank" in page.text
    assert "One in 13 of the 500 epochs, and the last." in page.texts
    # The last epoch is in the table.
    assert "500" in page.texts


def test_report_page_escapes_texts_of_the_document() -> None:
    evil = "<script>alert(1)</script>\"'&"
    given = document(run_id=evil, error=evil, params={evil: evil})
    given["history"][0][evil] = 1.0
    given["phases"][0]["name"] = given["ranks"][0]["host"] = evil
    html = render(given)
    assert "<script" not in html
    assert Page(html).text.count("<script>") >= 6


def test_curve_has_a_gap_where_a_value_is_not_finite() -> None:
    drawn = lines("loss", [Series("loss", [1, 2, 3, 4, 5], [1.0, 2.0, math.nan, 2.0, 3.0])])
    assert drawn.count("<polyline") == 2
    assert "nan" not in drawn
    assert lines("loss", [Series("loss", [1], [math.nan])]) == ""


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["loss", "val_loss", "mae"], {"loss": ("loss", "val_loss"), "mae": ("mae", "")}),
        (["train_loss", "val_loss"], {"loss": ("train_loss", "val_loss")}),
        (["val_loss", "train_loss"], {"loss": ("train_loss", "val_loss")}),
        (["train_loss", "val_acc"], {"train_loss": ("train_loss", ""), "acc": ("", "val_acc")}),
        (
            ["loss", "train_loss", "val_loss"],
            {"loss": ("loss", "val_loss"), "train_loss": ("train_loss", "")},
        ),
    ],
)
def test_validation_and_training_curves_share_a_chart(
    names: list[str], found: dict[str, tuple[str, str]]
) -> None:
    assert paired(names) == found
    epoch = {"epoch": 1, **dict.fromkeys(names, 1.0)}
    page = Page(render({"history": [epoch, {**epoch, "epoch": 2}]}))
    assert page.tags.count("svg") == len(found)


def test_axis_labels_are_complete_and_distinct() -> None:
    drawn = lines("auc", [Series("auc", [1, 1000], [0.99981, 0.99985])])
    left = re.findall(r'text-anchor="end">([^<]+)<', drawn)
    assert len(set(left)) == len(left) > 2
    counts, edges = [0.0, 3.0, 1.0, 1.0, 1.0], [0.001, 0.01, 0.02, 0.04, 0.08, 0.11]
    for chart, last in ((drawn, "1,000"), (histogram("steps", counts, edges), "110 ms")):
        (place,) = re.findall(rf'x="([\d.]+)" y="\d+" text-anchor="middle">{last}<', chart)
        assert float(place) + 3 * len(last) <= 440


def test_report_document_with_non_finite_numbers_survives_json() -> None:
    given = document()
    data = dumps(given)
    json.loads(data, parse_constant=pytest.fail)
    found = loads(data, "here")
    assert found["history"][1]["val_loss"] == "nan"
    assert render(found) == render(given)
    with pytest.raises(InvalidArgumentError, match=r"^here is not a report"):
        loads(b"{}", "here")
    newer = data.replace(b'"format": 1', b'"format": 2')
    with pytest.raises(InvalidArgumentError, match="has format version 2"):
        loads(newer, "here")


def test_compare_shows_different_settings_and_relative_changes() -> None:
    first = document(params={"batch_size": "32", "epochs": "3"})
    second = document(epochs=2, run_id="other", params={"epochs": "2", "batch_size": "32"})
    second["phases"] = [{"name": "materialize", "seconds": 5.0}]
    table = {line.split("  ")[0]: line for line in compare(first, second).splitlines()}
    assert table["settings that differ"].split() == ["settings", "that", "differ", "mine", "other"]
    assert table["epochs"].split() in (["epochs", "3", "2"], ["epochs", "3", "2", "(-33.3%)"])
    assert "batch_size" not in table
    assert table["loss"].split() == ["loss", "0.3333", "0.5", "(+50.0%)"]
    assert table["val_loss"].split() == ["val_loss", "0.5", "nan"]
    assert table["materialize"].split() == ["materialize", "4", "s", "5", "s", "(+25.0%)"]
    assert table["train"].split() == ["train", "6", "s", "-"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(2e-5, "20 us"), (0.0125, "12.5 ms"), (3.416, "3.42 s"), (125, "2 min 5 s")]
    + [(11400, "3 h 10 min"), (math.nan, "not known"), (59.999, "60 s")],
)
def test_durations_are_formatted_as_short_text(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_summary_tiles_show_validation_and_the_best_epoch() -> None:
    losses = [(0.9, 0.7), (0.5, 0.4), (0.3, 0.6), (0.2, math.nan)]
    history = [
        {"epoch": n, "loss": loss, "val_loss": validation}
        for n, (loss, validation) in enumerate(losses, 1)
    ]
    page = render(document(history=history))
    assert "<b>0.4</b><span>lowest val_loss, epoch 2</span>" in page
    assert "<b>0.2</b><span>loss</span>" in page
    assert "lowest" not in render(document(history=history[:1]))
    chosen = {"name": "val_auc", "epoch": 1, "value": 0.9}
    assert "<b>0.9</b><span>best val_auc, epoch 1</span>" in render(
        document(history=history, best=chosen)
    )
