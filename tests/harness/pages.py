"""Code blocks of the pages, combined to programs: README.md, docs/, native/ and the notes for contributors.

All Python blocks of a page are one program, in their order. A comment above a block changes that:

    <!-- NAME -->                  names the block, for tests and for `after`
    <!-- NAME, alone -->           the block is its own program
    <!-- NAME, after OTHER -->     a program of the named block, the blocks before it by `after`, and this block
    <!-- not run: REASON -->       the block is only compiled

A comment may have both a name and a reason: `<!-- NAME, not run: REASON -->`.
"""

from __future__ import annotations

import ast
import functools
import re
from dataclasses import dataclass

from tests.harness.paths import ROOT

PAGES = tuple(
    sorted(
        path.relative_to(ROOT).as_posix()
        for path in (
            *(ROOT / "docs").rglob("*.md"),
            *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "native/README.md")),
        )
    )
)
# Languages of blocks; "" is output, a configuration or a file's lines.
LANGUAGES = {"python", "sh", "diff", "mermaid", ""}

_FENCE = re.compile(
    r"^(?:<!-- (?P<comment>[^\n]*) -->\n)?```(?P<language>[\w-]*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A fenced block: its place, and the comment above it."""

    page: str
    line: int
    language: str
    text: str
    name: str = ""
    alone: bool = False
    after: str = ""
    not_run: str = ""


@dataclass(frozen=True)
class Program:
    """Blocks that run one after the other in one process."""

    page: str
    name: str
    text: str

    @property
    def title(self) -> str:
        return f"{self.page}:{self.name}" if self.name else self.page

    @property
    def modules(self) -> set[str]:
        """The packages that the program imports."""
        return imported(self.text)

    @property
    def uses_spark(self) -> bool:
        return "pyspark" in self.modules


def imported(text: str) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found


def _block(page: str, text: str, match: re.Match[str]) -> Block:
    words: dict[str, str] = {}
    comment, _, reason = (match["comment"] or "").partition("not run:")
    for part in filter(None, (part.strip() for part in comment.split(","))):
        if part == "alone":
            words["alone"] = part
        elif part.startswith("after "):
            words["after"] = part.removeprefix("after ")
        else:
            words["name"] = part
    return Block(
        page=page,
        line=text[: match.start()].count("\n") + 1,
        language=match["language"],
        text=match["text"],
        name=words.get("name", ""),
        alone="alone" in words,
        after=words.get("after", ""),
        not_run=reason.strip(),
    )


@functools.cache
def blocks(page: str) -> tuple[Block, ...]:
    """Return the blocks of a page, of every language."""
    text = (ROOT / page).read_text()
    return tuple(_block(page, text, match) for match in _FENCE.finditer(text))


def python_blocks(page: str) -> list[Block]:
    return [block for block in blocks(page) if block.language == "python"]


def named(page: str, name: str) -> Block:
    """Return the block of a page with this name, which must be unique."""
    found = [block for block in blocks(page) if block.name == name]
    assert len(found) == 1, f"{page} has {len(found)} blocks named {name}"
    return found[0]


def _chain(block: Block) -> list[Block]:
    before = _chain(named(block.page, block.after)) if block.after else []
    return [*before, block]


def programs(page: str) -> list[Program]:
    """Return the programs of a page: its blocks in order, and the blocks that a comment separates."""
    run = [block for block in python_blocks(page) if not block.not_run]
    own = [_chain(block) for block in run if block.alone or block.after]
    # A block that another one follows is tested with that one.
    followed = {block for chain in own for block in chain[:-1]}
    chains = [chain for chain in own if chain[-1] not in followed]
    main = [block for block in run if not block.alone and not block.after]
    if main and not (len(main) == 1 and main[0] in followed):
        chains.insert(0, main)
    return [
        Program(
            page,
            "" if chain is main else chain[-1].name or f"line {chain[-1].line}",
            "\n".join(block.text for block in chain),
        )
        for chain in chains
    ]


ALL = [program for page in PAGES for program in programs(page)]
