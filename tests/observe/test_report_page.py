"""The page of a report in a real browser: no message in the console, and each figure in its place."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

import pytest

from sparkhvd.observe.report.page import render
from tests.harness.browser import find_browser, seen
from tests.harness.soak import soak
from tests.observe.documents import document

pytestmark = pytest.mark.processes

# Puts a page into a frame, and its layout into this document's own text.
FRAME = """<!DOCTYPE html><body style="margin:0"><iframe style="width:%dpx;height:3000px;border:0" srcdoc="%s"></iframe><pre></pre><script>
onload = () => {
  const page = document.querySelector("iframe").contentDocument, all = (name) => [...page.querySelectorAll(name)];
  const sizes = (name) => all(name).map((e) => [e.getBoundingClientRect().width, e.getBoundingClientRect().height]);
  document.querySelector("pre").textContent = "FOUND" + JSON.stringify({
    charts: sizes("svg"), bars: sizes(".bar i"), tables: sizes("table"), text: page.body.innerText,
    lines: all("polyline").map((e) => getComputedStyle(e).stroke), wide: page.documentElement.scrollWidth,
    background: getComputedStyle(page.body).backgroundColor}) + "END";
};
</script>"""


@pytest.fixture(scope="module")
def browser() -> str:
    return find_browser()


def seen_in_frame(
    browser: str, folder: Path, html: str, width: int = 1000
) -> tuple[dict[str, Any], str]:
    """Return the layout of a page in a frame of a width, and the browser's console output."""
    (folder / "frame.html").write_text(FRAME % (width, escape(html)))
    return seen(browser, folder, (folder / "frame.html").as_uri())


@soak("observe/test_report: elements, texts and addresses of the page")
@pytest.mark.parametrize("width", [1000, 400])
def test_report_page_shows_its_figures_without_console_messages(
    browser: str, tmp_path: Path, width: int
) -> None:
    found, console = seen_in_frame(browser, tmp_path, render(document(ranks=3)), width)
    assert console == ""
    assert len(found["charts"]) == 6
    assert all(w > 250 and h > 100 for w, h in found["charts"])
    # Two phases, and four parts of the time of three ranks, of which one waits for no other.
    assert len(found["bars"]) == 2 + 3 * 4 - 1
    assert all(w >= 1 and h > 10 for w, h in found["bars"])
    assert found["wide"] <= width  # tables scroll by themselves
    assert len(set(found["lines"])) == 3
    assert "none" not in found["lines"]
    assert "100 steps of all ranks" in found["text"]
    assert "The other ranks waited most for rank 1" in found["text"]


@soak("observe/test_report: elements, texts and addresses of the page")
def test_report_page_blocks_injected_scripts_and_images(browser: str, tmp_path: Path) -> None:
    evil = '<script>document.body.innerText = "owned"</script><img src="https://example.org/a.png">'
    page = render(document()).replace("</body>", f"{evil}</body>")
    found, console = seen_in_frame(browser, tmp_path, page)
    assert "owned" not in found["text"]
    assert "Content Security Policy" in console  # the other test would see an error
