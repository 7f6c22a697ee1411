"""Hooks of mkdocs (`make docs`): files outside docs/ that pages link to become part of the site.

The pages are written for a checkout, where a link to ../examples/digits.py leads to that file. Here README.md becomes
the first page. Other Markdown files and sources keep their place, below `source/`, and a link to a folder leads to its
README.md. A notebook becomes a page with its cells.
"""

from __future__ import annotations

import json
import os.path
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
HOME = "README.md"
NOTEBOOK = ".ipynb"
# Pages of the navigation that lie outside docs/.
PAGES = (HOME, "CONTRIBUTING.md", "CHANGELOG.md", "native/README.md", "benchmarks/README.md")
LINK = re.compile(r"(?<!!)(\[(?:[^\[\]]|\[[^\]]*\])*\])\(([^)#\s]*)(#[^)\s]*)?\)")
FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def place(path: str) -> str:
    """Map a file's path in the checkout to its path in the site. Both are relative to the roots."""
    if path == HOME:
        return "index.md"
    if path.endswith(NOTEBOOK):
        path = path.removesuffix(NOTEBOOK) + ".md"
    return path.removeprefix("docs/") if path.startswith("docs/") else f"source/{path}"


def origin(path: str) -> str:
    """Map a file's path in the site to its path in the checkout: the inverse of `place`."""
    if path == "index.md":
        return HOME
    if not path.startswith("source/"):
        return f"docs/{path}"
    found = path.removeprefix("source/")
    notebook = found.removesuffix(".md") + NOTEBOOK
    return notebook if found.endswith(".md") and (ROOT / notebook).is_file() else found


def as_page(notebook: str) -> str:
    """Convert the cells of a notebook to Markdown."""
    parts = []
    for cell in json.loads((ROOT / notebook).read_text())["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
    return "\n\n".join(parts) + "\n"


def target(page: str, link: str) -> str:
    """Resolve a link of a page to a file of the checkout, or "" if the file does not exist."""
    path = os.path.normpath(os.path.join(os.path.dirname(page), link))
    if (ROOT / path).is_dir():
        path = f"{path}/README.md"
    return path if (ROOT / path).is_file() else ""


def moved(page: str, text: str) -> str:
    """Rewrite the links in a page's text to the site's files."""
    here = os.path.dirname(place(page))

    def one(match: re.Match[str]) -> str:
        words, link, anchor = match[1], match[2], match[3] or ""
        if not link or "://" in link or link.startswith("mailto:"):
            return match[0]
        found = target(page, link)
        # Keep broken links, which mkdocs reports.
        return f"{words}({os.path.relpath(place(found), here) if found else link}{anchor})"

    parts = FENCED.split(text)
    return "".join(part if i % 2 else LINK.sub(one, part) for i, part in enumerate(parts))


def linked(pages: list[str]) -> set[str]:
    """Find the files outside docs/ linked from these pages."""
    found = set()
    for page in pages:
        prose = "".join(FENCED.split((ROOT / page).read_text())[::2])
        links = (link for _, link, _ in LINK.findall(prose) if link and "://" not in link)
        found |= {path for link in links if (path := target(page, link))}
    return {path for path in found if not path.startswith("docs/")}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files outside docs/."""
    from mkdocs.structure.files import File

    pages = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    paths = {*PAGES, *linked([*pages, *PAGES])}
    paths |= linked([path for path in paths if path.endswith(NOTEBOOK)])
    for path in sorted(paths):
        if path.endswith(NOTEBOOK):
            files.append(File.generated(config, place(path), content=as_page(path)))
        else:
            files.append(File.generated(config, place(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the links of a page to the site's files."""
    return moved(origin(page.file.src_uri), markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Break names in tables after dots and underscores."""

    def breaking(code: re.Match[str]) -> str:
        text = re.sub(r"([._/=])(?=[^._/=])", r"\1<wbr>", code[1])
        return f"<code>{text}</code>"

    def cell(match: re.Match[str]) -> str:
        return re.sub(r"<code>([^<]*)</code>", breaking, match[0])

    return re.sub(r"<td[ >].*?</td>", cell, html, flags=re.DOTALL)
