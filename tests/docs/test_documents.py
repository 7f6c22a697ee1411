"""Checks of the pages: links lead to headings, names exist, the navigation has every page, versions agree."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

from sparkhvd import __version__
from tests.harness.paths import ROOT
from tools.docs_site import FENCED, LINK, PAGES, linked, moved, origin, place, target

pytestmark = pytest.mark.pure

DOCS = sorted((ROOT / "docs").rglob("*.md"))
DOCUMENTS = [path.relative_to(ROOT).as_posix() for path in DOCS] + list(PAGES)
# Files, and names that are no attributes.
NO_NAMES = {"sparkhvd.h", "sparkhvd.prom", "sparkhvd.so"}


def prose(page: str) -> str:
    return "".join(FENCED.split((ROOT / page).read_text())[::2])


@functools.cache
def anchors(page: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and the site make them."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ +(.*)$", prose(page), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").strip().lower()
        slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        numbers = (slug, *(f"{slug}-{number}" for number in range(1, 9)))
        found.add(next(one for one in numbers if one not in found))
    return found


@pytest.mark.parametrize("page", DOCUMENTS)
def test_links_to_headings_have_a_target(page: str) -> None:
    broken = []
    for _, link, anchor in LINK.findall(prose(page)):
        if anchor and "://" not in link:
            found = target(page, link) if link else page
            if found.endswith(".md") and anchor[1:] not in anchors(found):
                broken.append(f"{link}{anchor}")
    assert broken == []


@functools.cache
def names(module: Path) -> set[str]:
    """Return the names that a module has: what it defines and imports, and the strings by which `__getattr__` finds others."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            found |= names(file_of(f"{node.module}".split(".")))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found


def file_of(parts: list[str]) -> Path:
    path = ROOT.joinpath(*parts)
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def exists(name: str) -> bool:
    """Return whether a dotted name is a module, a name of one, or an attribute of such a name, without an import."""
    parts = name.split(".")
    depth = next((i for i in range(len(parts), 0, -1) if file_of(parts[:i]).exists()), 0)
    return depth == len(parts) or (depth > 0 and parts[depth] in names(file_of(parts[:depth])))


def test_package_names_on_pages_exist() -> None:
    # Not the conf spark.sparkhvd.*, paths, or a word after the package's name at the end of a sentence.
    pattern = re.compile(r"(?<![\w./-])sparkhvd(?:\.[A-Za-z_]\w*)+")
    named = {
        name: page for page in DOCUMENTS for name in pattern.findall((ROOT / page).read_text())
    }
    unknown = {name: page for name, page in named.items() if not exists(name)}
    assert {name: page for name, page in unknown.items() if name not in NO_NAMES} == {}
    assert len(named) > 40


def test_site_navigation_has_every_page() -> None:
    text = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1].split("\n\n")[0]
    listed = [origin(page) for page in re.findall(r": (\S+\.md)$", text, re.MULTILINE)]
    assert len(set(listed)) == len(listed)
    tables = {page for page in DOCUMENTS if re.fullmatch(r"docs/results/(?!README).*", page)}
    assert set(listed) == set(DOCUMENTS) - tables


def test_links_to_files_outside_docs_lead_to_copies_in_the_site() -> None:
    text = "[a](../examples/digits.py) [b](results) [c](inputs.md#groups) ![d](x.svg)\n```\n[e](../x)\n```\n"
    assert moved("docs/inputs.md", text) == (
        "[a](source/examples/digits.py) [b](results/README.md) [c](inputs.md#groups) ![d](x.svg)\n"
        "```\n[e](../x)\n```\n"
    )
    assert (
        moved("native/README.md", "[a](../docs/engine.md#threads)")
        == "[a](../../engine.md#threads)"
    )
    assert (
        moved("README.md", "[a](docs/inputs.md) [b](LICENSE)")
        == "[a](inputs.md) [b](source/LICENSE)"
    )
    for path in linked(DOCUMENTS):
        assert origin(place(path)) == path


def test_pyspark_is_an_optional_dependency() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    needed, optional = re.findall(
        r"^(?:dependencies|spark) = \[(.*?)^\]", text, re.MULTILINE | re.DOTALL
    )
    assert "pyspark" not in needed
    assert '"pyspark>=' in optional
    assert "cloudpickle" in needed  # of ranks that have no pyspark
    for page in ("README.md", "docs/install.md"):
        assert "\npip install '.[spark]'" in (ROOT / page).read_text()


def test_versions_in_documents_agree() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    sections = re.findall(r"^## \[([^\]]+)\]", changelog, re.MULTILINE)
    assert __version__ in sections
    citation = (ROOT / "CITATION.cff").read_text()
    assert re.search(rf"^version: {re.escape(__version__)}$", citation, re.MULTILINE)
    assert Path(ROOT / "SECURITY.md").exists()
