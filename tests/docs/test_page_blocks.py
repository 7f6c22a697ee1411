"""Code blocks of the pages: each compiles and uses names that exist, and each that does not run states the reason.

`tests/docs/test_page_runs.py` runs the others.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import subprocess
from collections.abc import Iterator

import pytest

from sparkhvd.estimator.params.table import rows_of
from tests.docs.test_documents import exists
from tests.harness.pages import LANGUAGES, PAGES, Block, blocks, programs, python_blocks
from tests.harness.paths import ROOT

pytestmark = pytest.mark.pure

WITH_BLOCKS = [page for page in PAGES if blocks(page)]
WITH_PYTHON = [page for page in PAGES if python_blocks(page)]
# Blocks that cannot run in the tests. A new one needs its reason in the page, and a line here.
NOT_RUN = {
    ("docs/clusters.md", "a notebook of Databricks"),
    ("docs/coming_from_ddp.md", "a test runs the same file with a script"),
    ("docs/coming_from_horovod.md", "a test runs the same file with a script"),
    ("docs/datasets.md", "needs petastorm's data and environment"),
    ("docs/fault_tolerance.md", "a test runs it with torch 2.14, and kills a rank"),
    ("docs/fault_tolerance.md", "a test runs it with torchft and torch 2.14, and kills a rank"),
    ("docs/inputs.md", "downloads a model"),
    ("docs/launchers.md", "needs an MPI"),
    ("docs/stores.md", "needs a bucket"),
}


def sparkhvd_names(text: str) -> Iterator[tuple[str, str]]:
    """Yield (module, name) of imports from sparkhvd, and of attributes of its modules."""
    modules: dict[str, str] = {}
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "sparkhvd":
                    modules[alias.asname or "sparkhvd"] = alias.name if alias.asname else "sparkhvd"
                    yield alias.name, ""
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "sparkhvd":
            for alias in node.names:
                yield str(node.module), alias.name
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and (module := modules.get(node.value.id))
        ):
            yield module, node.attr


@pytest.mark.parametrize("page", WITH_PYTHON)
def test_code_blocks_compile_and_refer_to_existing_names(page: str) -> None:
    for block in python_blocks(page):
        compile(block.text, f"{page}:{block.line}", "exec")
        for module, name in sparkhvd_names(block.text):
            found = f"{module}.{name}" if name else module
            assert exists(found), f"{page}:{block.line}: there is no {found}"


def calls(block: Block, names: set[str]) -> Iterator[ast.Call]:
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in names:
            yield node


@pytest.mark.parametrize("page", WITH_PYTHON)
def test_params_and_arguments_in_code_blocks_exist(page: str) -> None:
    import sparkhvd.torch as hvd
    from sparkhvd import TorchEstimator, run, run_local

    estimators = {"TorchEstimator", "TorchClassifier", "TorchRegressor"}
    rows = rows_of(TorchEstimator)
    params = {*rows, *(alias for row in rows.values() for alias in row.aliases)}
    params |= {re.sub(r"_(\w)", lambda m: m[1].upper(), name) for name in params}
    known = {"run": run, "run_local": run_local, "DistributedOptimizer": hvd.DistributedOptimizer}
    for block in python_blocks(page):
        if "lightning" not in block.text and "horovod" not in block.text.replace("sparkhvd", ""):
            for call in calls(block, estimators):
                given = {word.arg for word in call.keywords if word.arg}
                assert given <= params, f"{page}:{block.line}: {given - params}"
        for name, function in known.items():
            if f"{name}(" not in block.text or "keras" in block.text:
                continue
            arguments = set(inspect.signature(function).parameters)
            for call in calls(block, {name}):
                given = {word.arg for word in call.keywords if word.arg}
                if name.startswith("run") and ast.unparse(call.func) not in (
                    name,
                    f"sparkhvd.{name}",
                ):
                    continue
                assert given <= arguments, f"{page}:{block.line}: {given - arguments}"


def test_code_blocks_that_do_not_run_give_a_reason() -> None:
    found = {(page, block.not_run) for page in PAGES for block in blocks(page) if block.not_run}
    assert found == NOT_RUN


def test_every_code_block_has_a_checked_language() -> None:
    other = {
        (page, block.line, block.language)
        for page in PAGES
        for block in blocks(page)
        if block.language not in LANGUAGES
    }
    assert other == set()
    for page in WITH_BLOCKS:
        text = (ROOT / page).read_text()
        assert text.count("```") == 2 * len(blocks(page)), f"{page}: a fence that is no block"


def test_every_python_block_runs_or_gives_a_reason() -> None:
    for page in WITH_PYTHON:
        texts = [program.text for program in programs(page)]
        for block in python_blocks(page):
            assert block.not_run or any(block.text in text for text in texts), (page, block.line)


def shell_blocks() -> list[Block]:
    return [block for page in PAGES for block in blocks(page) if block.language == "sh"]


@pytest.mark.parametrize("block", shell_blocks(), ids=lambda block: f"{block.page}:{block.line}")
def test_shell_blocks_parse_and_name_targets_and_files_that_exist(block: Block) -> None:
    done = subprocess.run(
        ["bash", "-n"], input=block.text.replace("<", "").replace(">", ""), text=True,
        capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make ([a-z][\w-]*)", block.text, re.MULTILINE):
        assert re.search(rf"^{target}\b.*:", makefile, re.MULTILINE), target
    for name in re.findall(r"(?<![/\w.-])(?:examples|benchmarks|tools)/[\w./-]+\w", block.text):
        assert (ROOT / name).exists(), name
    for line in re.findall(r"^sparkhvdrun (.*)$", block.text, re.MULTILINE):
        assert {
            *re.findall(r"(?<=\s)(--?[a-zA-Z][\w-]*)", " " + line.split(" python ")[0])
        } <= flags()


@functools.cache
def flags() -> set[str]:
    sources = (path.read_text() for path in (ROOT / "sparkhvd" / "runner").rglob("*.py"))
    return set(re.findall(r'"(--?[a-zA-Z][\w-]*)"', "".join(sources)))
