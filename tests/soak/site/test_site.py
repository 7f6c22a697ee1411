"""Pages of the site from `make docs`, on a wide and on a narrow screen."""

from __future__ import annotations

import functools
import json
import re
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.harness.browser import find_browser, rendered, seen
from tests.harness.paths import ROOT

pytestmark = pytest.mark.soak

SITE = ROOT / "build" / "site"
PAGES = (
    *("index", "install", "quickstart", "inputs", "models", "choosing", "outputs", "monitoring"),
    *(
        "serving",
        "datasets",
        "clusters",
        "launchers",
        "elastic",
        "lightning",
        "keras",
        "comparison",
    ),
    *("params", "settings", "errors", "compatibility", "coming_from_horovod", "architecture"),
    *("engine", "runner", "estimator", "api/estimator", "api/torch", "results/step"),
    *("source/notebooks/quickstart", "source/notebooks/when_it_fails", "source/CHANGELOG"),
)
# Each page in a separate frame, and the layout in the frames.
FRAMES = """<!DOCTYPE html><body style="margin:0">%s<pre></pre><script>
onload = () => {
  const found = [...document.querySelectorAll("iframe")].map((frame) => {
    const page = frame.contentDocument, inside = page.querySelector(".md-content") || page.body;
    const out = [...inside.querySelectorAll("p, li, h1, h2, h3, img, svg, .admonition")]
      .filter((e) => e.getBoundingClientRect().right > frame.clientWidth + 1 && !e.closest(".md-typeset__scrollwrap, pre, table"));
    const cut = [...inside.querySelectorAll(".language-python pre > code, .language-sh pre > code")]
      .filter((e) => e.scrollWidth > e.clientWidth + 1);
    const stuck = [...inside.querySelectorAll("table:not([class])")].filter((e) => {
      const wrap = e.closest(".md-typeset__scrollwrap");
      return e.getBoundingClientRect().right > frame.clientWidth + 1 && !(wrap && getComputedStyle(wrap).overflowX == "auto");
    });
    return {cut: cut.map((e) => e.innerText.slice(0, 80)), stuck: stuck.length, page: frame.dataset.page, title: page.querySelector("h1")?.innerText || "", wide: page.documentElement.scrollWidth,
      text: inside.innerText.length, out: out.map((e) => e.innerText.slice(0, 80))};
  });
  document.querySelector("pre").textContent = "FOUND" + JSON.stringify(found) + "END";
};
</script>"""


class Handler(SimpleHTTPRequestHandler):
    """The site, and pages of frames at /frames/<width>."""

    def do_GET(self) -> None:
        if not self.path.startswith("/frames/"):
            super().do_GET()
            return
        width = self.path.removeprefix("/frames/")
        frames = "".join(
            f'<iframe data-page="{page}" src="/{page}.html" style="width:{width}px;height:900px;border:0"></iframe>'
            for page in PAGES
        )
        data = (FRAMES % frames).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name
        """Log nothing."""


@pytest.fixture
def server() -> Iterator[str]:
    if not (SITE / "index.html").exists():
        pytest.skip("the site is not built: make docs")
    made = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(SITE)))
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{made.server_port}"
    made.shutdown()
    thread.join(10)
    made.server_close()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("width", [1280, 390])
def test_site_pages_fit_the_screen_without_console_messages(
    server: str, tmp_path: Path, width: int
) -> None:
    found, console = seen(find_browser(), tmp_path, f"{server}/frames/{width}")
    assert console == ""
    assert [each["page"] for each in found] == list(PAGES)
    assert [each["page"] for each in found if not each["title"] or each["text"] < 200] == []
    assert {each["page"]: each["wide"] for each in found if each["wide"] > width} == {}
    assert {each["page"]: each["out"] for each in found if each["out"]} == {}, json.dumps(found)
    assert {each["page"]: each["cut"] for each in found if each["cut"]} == {}
    assert {each["page"]: each["stuck"] for each in found if each["stuck"]} == {}


@pytest.mark.timeout(120)
def test_site_search_works_from_local_files(tmp_path: Path) -> None:
    if not (SITE / "index.html").exists():
        pytest.skip("the site is not built: make docs")
    page = rendered(find_browser(), tmp_path, f"{SITE.as_uri()}/index.html?q=elastic")
    found = re.search(r"(\d+) matching documents", page)
    assert found, "the search gave no results"
    assert int(found[1]) > 3
    assert "elastic.html" in page


def test_site_pages_load_nothing_from_the_internet() -> None:
    if not (SITE / "index.html").exists():
        pytest.skip("the site is not built: make docs")
    text = (SITE / "index.html").read_text()
    loaded = re.findall(r'<(?:script|img|iframe)[^>]* src="([^"]+)"', text)
    loaded += re.findall(
        r'<link[^>]* rel="(?:stylesheet|preconnect|preload)"[^>]* href="([^"]+)"', text
    )
    assert loaded
    assert [address for address in loaded if "//" in address] == []
