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


def seen(browser: str, folder: Path, url: str) -> tuple[Any, str]:
    """Return the JSON that a page's script has written between FOUND and END into its text, and what the console says."""
    command = [
        browser,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
    ]
    command += [f"--user-data-dir={folder / 'profile'}", "--window-size=1200,900", "--dump-dom"]
    done = subprocess.run([*command, url], capture_output=True, text=True, timeout=120, check=True)
    found = re.search("FOUND(.*?)END", done.stdout, re.S)
    assert found is not None, done.stderr[-2000:]
    text = found[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
    console = "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)
    return json.loads(text), console
