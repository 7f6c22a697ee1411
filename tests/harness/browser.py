"""A real browser without a window, for pages."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def find_browser() -> str:
    """Return the program, or skip the test if no browser is installed."""
    for name in BROWSERS:
        if found := shutil.which(name):
            return found
    pytest.skip(f"none of {', '.join(BROWSERS)} is here: apt-get install chromium")


def _dump(browser: str, folder: Path, url: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [
        browser,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
    ]
    command += [f"--user-data-dir={folder / 'profile'}", "--window-size=1280,900", "--dump-dom"]
    return subprocess.run(
        [*command, *options, url], capture_output=True, text=True, timeout=120, check=True
    )


def rendered(browser: str, folder: Path, url: str) -> str:
    """Return the HTML of a page after its scripts ran for some seconds of virtual time."""
    return _dump(browser, folder, url, "--virtual-time-budget=8000").stdout


def seen(browser: str, folder: Path, url: str) -> tuple[Any, str]:
    """Return the JSON that a page's script has written between FOUND and END into its text, and the console's output."""
    done = _dump(browser, folder, url)
    found = re.search("FOUND(.*?)END", done.stdout, re.S)
    assert found is not None, done.stderr[-2000:]
    text = found[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
    console = "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)
    return json.loads(text), console
