"""The rules of the house that a program can check: layers, doors, words, generated pages."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparkhvd.settings import markdown_table

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "sparkhvd"
SOURCES = sorted(PACKAGE.rglob("*.py"))

# Who reads or writes the environment, and why. Settings themselves are read in settings.py only.
ENVIRONMENT = {
    "sparkhvd/runner/allocator.py": "glibc's own variables, by which a user configures the allocator",
    "sparkhvd/runner/gpu/probe.py": "CUDA's own, in a forked process that only asks CUDA's driver",
    "sparkhvd/settings.py": "the settings",
    "sparkhvd/runner/trainer.py": "the trainer process inherits its parent's environment",
    "sparkhvd/runner/child.py": "torch's, OpenMP's and the user's own variables, before user code runs",
}

# Every place that turns bytes into Python objects, and where those bytes come from.
# docs/security.md describes the same list.
UNPICKLING = {
    "sparkhvd/runner/child.py": "a rank: the driver's closure, through its parent process",
    "sparkhvd/runner/task.py": "a rank's task: the driver's closure, through Spark",
    "sparkhvd/runner/launching.py": "the driver: results through Spark or its own child's pipe",
    "sparkhvd/torch/broadcast.py": "object functions: authenticated peers of the same job",
    "sparkhvd/training/program.py": "a rank: the program whose SHA-256 came in the driver's closure",
    "sparkhvd/estimator/transform/worker.py": "a worker of transform: the driver's closure, through Spark",
    "sparkhvd/training/modules/architecture.py": "shells of modules: the driver's closure, or trusted files",
    "sparkhvd/estimator/saving/encoding.py": "saved models, behind the trust rules",
    "sparkhvd/training/checkpoints/files.py": "weights and optimizer state, by weights_only=True",
    "sparkhvd/training/modules/weights.py": "weights, by weights_only=True",
}

# Who may look below the DataFrame API, and why.
BELOW_DATAFRAMES = {
    "sparkhvd/spark.py": "tags, slots and the name of a classic application",
    "sparkhvd/runner/payload.py": "broadcast variables of a classic application, for large functions",
    "sparkhvd/data/store/spark_files.py": "the file systems of a classic driver's JVM, for saved files of any size",
    "sparkhvd/data/spark_plan.py": "the analyzed plan of a classic DataFrame, for the key of reuse",
}


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def dotted(node: ast.expr) -> str:
    """`a.b().c` of a chain of names and calls of names; empty for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value)
        return f"{inner}.{node.attr}" if inner else node.attr
    if isinstance(node, ast.Call) and (called := dotted(node.func)):
        return f"{called}()"
    return ""


def nodes(path: Path) -> Iterator[ast.AST]:
    yield from ast.walk(ast.parse(path.read_text(), str(path)))


def test_imports_point_downwards() -> None:
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_importing_the_package_loads_neither_torch_nor_spark() -> None:
    program = (
        "import sys, json, sparkhvd, sparkhvd.runner, sparkhvd.errors, sparkhvd.settings;"
        "heavy = {'torch', 'pyspark', 'pyarrow', 'pandas', 'numpy'} & set(sys.modules);"
        "print(json.dumps(sorted(heavy)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert json.loads(done.stdout) == []


def test_every_public_name_can_be_imported() -> None:
    import sparkhvd

    missing = [name for name in sparkhvd.__all__ if getattr(sparkhvd, name, None) is None]
    assert missing == []


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_only_listed_files_touch_the_environment(path: Path) -> None:
    uses = [
        node.lineno
        for node in nodes(path)
        if isinstance(node, ast.Attribute)
        and dotted(node) in {"os.environ", "os.environb", "os.getenv", "os.putenv", "os.unsetenv"}
    ]
    if relative(path) not in ENVIRONMENT:
        assert uses == [], f"{relative(path)} uses the environment in lines {uses}"


def unpickling(tree: Iterator[ast.AST]) -> list[str]:
    """Calls that turn bytes into Python objects; of modules by name, or as `cloudpickle()` gives them."""
    unpicklers = re.compile(
        r"(^|\.)(\w*pickle(\(\))?\.(loads?|Unpickler)|torch\.load|joblib\.load|marshal\.loads?|"
        r"dill\.loads?|shelve\.open|read_pickle|np\.load|numpy\.load)$"
    )
    return [
        f"{node.lineno}: {dotted(node.func)}"
        for node in tree
        if isinstance(node, ast.Call) and unpicklers.search(dotted(node.func))
    ]


@pytest.mark.parametrize(
    "call",
    [
        "pickle.loads(x)",
        "cloudpickle().loads(x)",
        "child.cloudpickle().loads(x)",
        "_pickle.load(x)",
        "pickle.Unpickler(x).load()",
        "torch.load(x)",
    ],
)
def test_every_form_of_unpickling_is_found(call: str) -> None:
    assert len(unpickling(ast.walk(ast.parse(call)))) == 1
    assert unpickling(ast.walk(ast.parse("cloudpickle().dumps(json.loads(x))"))) == []


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_only_listed_files_unpickle(path: Path) -> None:
    uses = unpickling(nodes(path))
    hidden = [
        node.lineno
        for node in nodes(path)
        if isinstance(node, ast.ImportFrom)
        and node.module in {"pickle", "cloudpickle", "marshal", "dill"}
        and any(alias.name in {"loads", "load", "Unpickler"} for alias in node.names)
    ]
    if relative(path) not in UNPICKLING:
        assert uses == [], f"{relative(path)} unpickles in {uses}"
    assert hidden == [], (
        f"{relative(path)} imports loads by name in lines {hidden}: call pickle.loads"
    )


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_only_listed_files_look_below_the_dataframe_api(path: Path) -> None:
    below = {"rdd", "_jvm", "_jsc", "_jdf", "_jsparkSession", "sparkContext", "_sc"}
    uses = [
        f"{node.lineno}: .{node.attr}"
        for node in nodes(path)
        if isinstance(node, ast.Attribute) and node.attr in below
    ]
    if relative(path) not in BELOW_DATAFRAMES:
        assert uses == [], f"{relative(path)} looks below the DataFrame API in {uses}"


def test_allow_lists_name_only_files_that_exist() -> None:
    listed = {*ENVIRONMENT, *UNPICKLING, *BELOW_DATAFRAMES}
    assert sorted(name for name in listed if not (ROOT / name).exists()) == []


def test_readme_settings_table_is_the_one_that_the_code_prints() -> None:
    text = (ROOT / "README.md").read_text()
    found = re.search(r"<!-- settings -->\n(.*?)\n<!-- /settings -->", text, re.DOTALL)
    assert found is not None, "README.md has no settings table"
    assert found[1].strip() == markdown_table(), (
        "README.md: put the output of sparkhvd.settings.markdown_table() between the markers"
    )


def test_readme_names_every_top_level_folder() -> None:
    done = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, timeout=30, check=False
    )
    if done.returncode != 0:
        pytest.skip("not a git checkout: " + done.stderr.strip())
    folders = {name.split("/")[0] for name in done.stdout.splitlines() if "/" in name}
    text = (ROOT / "README.md").read_text()
    assert sorted(f for f in folders if not f.startswith(".") and f"`{f}/`" not in text) == []


def test_links_in_the_documents_lead_somewhere() -> None:
    broken = []
    for page in [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "native").glob("*.md"),
    ]:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            if "://" not in target and not (page.parent / target).exists():
                broken.append(f"{relative(page)}: {target}")
    assert broken == []


def test_header_and_python_agree_on_the_abi_version() -> None:
    header = (ROOT / "native" / "include" / "sparkhvd.h").read_text()
    found = re.search(r"#define SPARKHVD_ABI_VERSION (\d+)", header)
    assert found is not None
    engine = (PACKAGE / "library.py").read_text()
    assert re.search(rf"ABI_VERSION\w*\s*(:\s*\w+\s*)?=\s*{found[1]}\b", engine)


def test_no_unfinished_marks_in_what_ships() -> None:
    # Spelt so that this file does not find itself.
    marks = re.compile(
        r"\b(" + "|".join(["TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK"]) + r")\b"
    )
    shipped = [*SOURCES, *(ROOT / "native").rglob("*.cc"), *(ROOT / "native").rglob("*.h")]
    found = [
        f"{relative(path)}:{number}"
        for path in shipped
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if marks.search(line)
    ]
    assert found == []


def test_words_that_mean_something_else_here_are_not_used() -> None:
    """One word per thing: see the table of words in CONTRIBUTING.md."""
    wrong = re.compile(r"\b(nproc|world_rank|comm_size|node_rank)\b")
    found = [
        f"{relative(path)}:{number}: {line.strip()}"
        for path in SOURCES
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if wrong.search(line)
    ]
    assert found == []
