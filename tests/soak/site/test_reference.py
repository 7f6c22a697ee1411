"""The API pages: each name has a docstring."""

from __future__ import annotations

import inspect
import pydoc
import re

import pytest

from tests.harness.paths import ROOT

pytestmark = pytest.mark.soak

NAMES = sorted(
    name
    for page in (ROOT / "docs/api").glob("*.md")
    for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
)


@pytest.mark.leaks(
    "imports every optional library, and these set environment variables and start threads"
)
@pytest.mark.parametrize("name", NAMES)
def test_every_name_in_the_api_reference_has_a_docstring(name: str) -> None:
    value = pydoc.locate(name)
    assert value is not None, f"{name} does not exist"
    parts = {name: value}
    if inspect.isclass(value) or inspect.ismodule(value):
        parts |= {
            f"{name}.{part}": member
            for part, member in vars(value).items()
            if not part.startswith("_")
            and (inspect.isroutine(member) or inspect.isclass(member))
            and (member.__module__ or "").startswith("sparkhvd")
        }
    # Of bases too: a method may override a documented method.
    assert [part for part, member in parts.items() if not inspect.getdoc(member)] == []
