"""Architecture rules: layers, cycles, allow-lists, words, generated pages."""

from __future__ import annotations

import ast
import functools
import graphlib
import json
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from sparkhvd.settings import markdown_table
from tools import errors as errors_page
from tools import waits as waits_page

pytestmark = pytest.mark.pure

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "sparkhvd"
SOURCES = sorted(PACKAGE.rglob("*.py"))

# Files that read or write the environment, and why. Only settings.py reads settings.
ENVIRONMENT = {
    "sparkhvd/python_daemon.py": "jemalloc's own, before pyarrow loads it",
    "sparkhvd/as_horovod.py": "whether processes have the name horovod, for those that this one starts",
    "sparkhvd/import_path/horovod.py": "whether this process has the name horovod",
    "sparkhvd/torch/context.py": "Horovod's variables of a rank's place, for what reads them",
    "sparkhvd/distributed/inner.py": "Gloo's own, by which a user chooses its network interfaces",
    "sparkhvd/runner/allocator.py": "glibc's own variables, by which a user configures the allocator",
    "sparkhvd/runner/gpu/probe.py": "CUDA's own, in a forked process that only asks CUDA's driver",
    "sparkhvd/keras/backend.py": "Keras' own, the backend that its import takes",
    "sparkhvd/settings.py": "the settings; settings that a rank's function sets before init()",
    "sparkhvd/runner/preflight.py": "Databricks' own, by which its runtimes are known",
    "sparkhvd/launchers/bootstrap.py": "a rank's place, as its launcher tells it",
    "sparkhvd/data/dataset.py": "a rank's place, likewise",
    "sparkhvd/launchers/environment.py": "a rank's place, for a process group that a store brings together; Horovod's choice of a transport, and marks of MPI",
    "sparkhvd/launchers/mpi.py": "how many processes the launcher has started",
    "sparkhvd/launchers/rank_claim.py": "where a rank of sparkhvdrun, or a program that a rank starts, finds its job",
    "sparkhvd/elastic/rendezvous.py": "Horovod's variables of a rank's place, for what reads them",
    "sparkhvd/runner/doctor.py": "Java's and CUDA's own",
    "sparkhvd/runner/hosts/agent.py": "the ranks of an agent inherit a login's environment; sshd's, with this host's address",
    "sparkhvd/runner/hosts/connection.py": "Python's own path, which agents need",
    "sparkhvd/runner/orphans.py": "what a Python needs that ends leftovers",
    "sparkhvd/runner/launching.py": "ranks of sparkhvdrun inherit the shell's environment, on other hosts some of it",
    "sparkhvd/spark.py": "pyspark's own, by which a user chooses the workers' Python",
    "sparkhvd/runner/trainer.py": "the trainer process inherits its parent's environment; what the trainer process inherits of its parent",
    "sparkhvd/runner/child.py": "torch's, OpenMP's and the user's own variables, before user code runs; OpenBLAS's own, before and after a fork",
    "sparkhvd/runner/zygote.py": "a fork gets the environment that a fresh process would have",
}

# Every place that turns bytes into Python objects, and the origin of the bytes.
# docs/security.md describes the same list.
UNPICKLING = {
    "sparkhvd/runner/child.py": "a rank: the driver's closure, through its parent process",
    "sparkhvd/runner/task.py": "a rank's task: the driver's closure, through Spark",
    "sparkhvd/runner/launching.py": "the driver: results through Spark, its port for the tasks of an elastic job, a file with the attempt's proof, or its own child's pipe",
    "sparkhvd/torch/broadcast.py": "object functions: authenticated peers of the same job",
    "sparkhvd/training/program.py": "a rank: the program whose SHA-256 came in the driver's closure",
    "sparkhvd/estimator/transform/worker.py": "a worker of transform: the driver's closure, through Spark",
    "sparkhvd/horovod/spark/common/model.py": "a worker of transform: the driver's closure, through Spark",
    "sparkhvd/training/modules/architecture.py": "shells of modules: the driver's closure, or trusted files",
    "sparkhvd/estimator/saving/encoding.py": "saved models, behind the trust rules",
    "sparkhvd/estimator/saving/recipe.py": "a run on a table, with its key or behind the trust rules",
    "sparkhvd/training/checkpoints/checkpoint.py": "weights and optimizer state, by weights_only=True",
    "sparkhvd/training/modules/weights.py": "weights, by weights_only=True",
    "sparkhvd/training/host_memory.py": "frozen parameters of another rank of this host, by weights_only=True",
    "sparkhvd/lightning/loop.py": "a rank: files of Lightning whose SHA-256 this run has written down",
}

# Files that may use Spark below the DataFrame API, and why.
BELOW_DATAFRAMES = {
    "sparkhvd/spark.py": "the key of a classic session, and its context for Spark ML; tags, slots and the name of a classic application",
    "sparkhvd/horovod/spark/common/backend.py": "the default parallelism of a classic application, as Horovod takes it",
    "sparkhvd/runner/protocol.py": "broadcast variables of a classic application, for large functions",
    "sparkhvd/runner/live_output.py": "log4j of a classic driver's JVM",
    "sparkhvd/data/store/spark_files.py": "the file systems of a classic driver's JVM, for saved files of any size",
    "sparkhvd/data/tables.py": "the analyzed plan of a classic DataFrame, for the key of reuse and the paths of its scans",
}

# Files that import modules of this package inside functions, how many, and why: only the cost of starting, and functions that
# travel to other processes.
LAZY = {
    "sparkhvd/data/reading/source.py": (1, "packed data need no dataset reader of pyarrow"),
    "sparkhvd/horovod/__init__.py": (1, "the name horovod is there before what it stands for"),
    "sparkhvd/horovod/spark/common/model.py": (
        2,
        "the function of transform by rows, which runs in Spark's workers",
    ),
    "sparkhvd/estimator/transform/stage.py": (
        3,
        "the function of transform, which runs in Spark's workers",
    ),
    "sparkhvd/estimator/model.py": (1, "Spark ML's classes of Connect need a client's packages"),
    "sparkhvd/estimator/params/converters.py": (1, "the Params alone need no pyarrow"),
    "sparkhvd/runner/__init__.py": (11, "`import sparkhvd.runner` on a rank loads no launcher"),
    "sparkhvd/runner/elastic/function.py": (5, "likewise"),
    "sparkhvd/runner/command.py": (
        6,
        "ranks start without what the doctor, other hosts and elastic jobs need",
    ),
    "sparkhvd/run_commands.py": (1, "only `reproduce` needs torch and Spark"),
    "sparkhvd/__main__.py": (2, "the doctor tells what is missing, such as pyarrow"),
    "sparkhvd/runner/task.py": (1, "the function of a barrier task, which runs in Spark's workers"),
}

# Other packages that functions import, how often, and why: only the cost of starting, and packages that may be missing.
LAZY_PACKAGES = {
    "IPython": (1, "a kernel of Jupyter has imported it, and no other process uses it"),
    "PIL": (1, "optional: columns of images"),
    "importlib": (1, "the function of a task, pickled by value"),
    "fcntl": (9, "Unix only: everything imports on a client with another system"),
    "fsspec": (2, "optional: stores that pyarrow does not know"),
    "matplotlib": (1, "optional: curves of a fit and a model"),
    "mlflow": (15, "optional: a logger"),
    "pandas": (1, "a table for people; nothing else on the driver needs it"),
    "petastorm": (1, "optional: data sets with a Unischema"),
    "deltalake": (5, "optional: fit_on_table of Delta tables"),
    "py4j": (9, "classic Spark only: a client of Connect has none"),
    "pyarrow": (
        8,
        "a rank or a task that needs no Arrow, or no functions over it, starts without it",
    ),
    "pyiceberg": (10, "optional: fit_on_table of Iceberg tables"),
    "pyspark": (
        24,
        "ranks and workers start without it; some names are of one version, or of Connect",
    ),
    "requests": (1, "optional: comes with MLflow"),
    "resource": (4, "Unix only"),
    "sys": (1, "the function of a barrier task, pickled by value"),
    "tensorboard": (1, "optional: a logger"),
    "yaml": (1, "optional: sparkhvdrun --config-file"),
    "torch": (
        2,
        "readers of NumPy arrays start without it, compilers are slow to load, and executors may lack it",
    ),
}


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def dotted(node: ast.expr) -> str:
    """Return `a.b().c` for a chain of names and calls of names, or "" for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value)
        return f"{inner}.{node.attr}" if inner else node.attr
    if isinstance(node, ast.Call) and (called := dotted(node.func)):
        return f"{called}()"
    return ""


def nodes(path: Path) -> Iterator[ast.AST]:
    yield from ast.walk(parsed(path))


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def test_modules_import_only_from_lower_layers() -> None:
    # Its script is not in every environment that sees the package.
    program = "import importlinter.cli; importlinter.cli.lint_imports_command()"
    command = [sys.executable, "-c", program, "--no-cache"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@dataclass(frozen=True)
class Import:
    """Import of a module of this package.

    Attributes:
        module: the importing one.
        target: the imported one.
        is_lazy: whether a function imports it.
        is_typing: whether only type checkers see it.
    """

    module: str
    target: str
    is_lazy: bool
    is_typing: bool = False


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def imports() -> tuple[Import, ...]:
    """Return every import between modules of this package, except imports of names that a facade loads at their first use."""
    return tuple(find_imports())


def find_imports() -> Iterator[Import]:
    modules = {module_name(path) for path in SOURCES}
    for path in SOURCES:
        tree = parsed(path)
        typing, lazy = set(), set()
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                typing |= {id(child) for child in ast.walk(node)}
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lazy |= {id(child) for child in ast.walk(node)}
        for node in ast.walk(tree):
            if id(node) in typing and path.name == "__init__.py":
                continue
            if isinstance(node, ast.Import):
                found = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = {f"{node.module}.{alias.name}" for alias in node.names}
                found = sorted(names & modules) or [node.module]
            else:
                continue
            for target in found:
                if target in modules and target != module_name(path):
                    yield Import(module_name(path), target, id(node) in lazy, id(node) in typing)


def test_modules_have_no_import_cycles() -> None:
    graph: dict[str, set[str]] = defaultdict(set)
    for each in imports():
        graph[each.module].add(each.target)
    try:
        list(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as e:
        pytest.fail(" imports ".join(reversed(e.args[1])))


def test_imports_inside_functions_have_a_reason() -> None:
    found = Counter(each.module for each in imports() if each.is_lazy)
    listed = {module_name(ROOT / file): count for file, (count, _) in LAZY.items()}
    assert dict(found) == listed


def test_packages_imported_inside_functions_have_a_reason() -> None:
    found: Counter[str] = Counter()
    for path in SOURCES:
        statements = {
            id(node): node
            for function in nodes(path)
            if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
            for node in ast.walk(function)
            if isinstance(node, (ast.Import, ast.ImportFrom))
        }
        for node in statements.values():
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module]
            found.update(name.partition(".")[0] for name in names if name is not None)
    del found["sparkhvd"]
    assert dict(found) == {name: count for name, (count, _) in LAZY_PACKAGES.items()}


def test_packages_list_their_modules_in_dependency_order() -> None:
    """The list in a package's docstring names every module, and each module imports only modules above it."""
    pages, wrong = {}, []
    for path in SOURCES:
        if path.name == "__init__.py":
            page = ast.get_docstring(parsed(path)) or ""
            _, mark, after = page.partition("Each module imports only those above it:\n")
            pages[path] = re.findall(r"^    (\w+)  +\S", after, re.M)
            wrong += [] if mark else [f"{module_name(path)} has no list"]
    assert len(pages) >= 15
    for path, listed in pages.items():
        package = module_name(path)
        there = {q.stem for q in path.parent.glob("*.py")} - {"__init__"}
        there |= {q.parent.name for q in path.parent.glob("*/__init__.py")}
        wrong += [f"{package}: {name}" for name in there ^ set(listed)]
        place = {f"{package}.{name}": number for number, name in enumerate(listed)}

        def room(module: str, package: str = package) -> str:
            return f"{package}.{module.removeprefix(package + '.').partition('.')[0]}"

        wrong += [
            f"{each.module} imports {each.target}"
            for each in imports()
            if (here := room(each.module)) in place
            and (there_ := room(each.target)) in place
            and here != there_
            and place[there_] > place[here]
        ]
    assert wrong == []


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


def test_only_listed_files_use_environment_variables() -> None:
    names = {"os.environ", "os.environb", "os.getenv", "os.putenv", "os.unsetenv"}
    uses = [
        f"{relative(path)}:{node.lineno}"
        for path in SOURCES
        if relative(path) not in ENVIRONMENT
        for node in nodes(path)
        if isinstance(node, ast.Attribute) and dotted(node) in names
    ]
    assert uses == []


# Names in folders that all users share, where any user may have made them first. Other temporary files have random names.
SHARED_NAMES = {
    "sparkhvd/estimator/transform/worker.py": "locks of GPUs, in a folder whose owner and mode are checked",
    "sparkhvd/data/store/temporary.py": "lists its own random names, and looks at their owner",
    "sparkhvd/data/store/connect.py": "the prefix of a random name",
    "sparkhvd/data/store/atomic.py": "the place of a nameless file, for messages",
    "sparkhvd/runner/doctor.py": "free space there",
}


def test_only_listed_files_use_the_temporary_folder() -> None:
    uses = {
        relative(path)
        for path in SOURCES
        for node in nodes(path)
        if (
            isinstance(node, ast.Attribute)
            and node.attr in ("gettempdir", "mktemp", "NamedTemporaryFile")
        )
        or (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and node.value.startswith(("/tmp/", "/var/tmp", "/dev/shm/"))
        )
    }
    assert uses == SHARED_NAMES.keys()


def unpickling(tree: Iterator[ast.AST]) -> list[str]:
    """Return the calls that turn bytes into Python objects: of modules by name, or through `cloudpickle()`."""
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
def test_unpickling_check_finds_every_form(call: str) -> None:
    assert len(unpickling(ast.walk(ast.parse(call)))) == 1
    assert unpickling(ast.walk(ast.parse("cloudpickle().dumps(json.loads(x))"))) == []


def test_only_listed_files_unpickle() -> None:
    uses = [
        f"{relative(path)}:{use}"
        for path in SOURCES
        if relative(path) not in UNPICKLING
        for use in unpickling(nodes(path))
    ]
    assert uses == []


def test_only_one_function_reads_json() -> None:
    """`wire.read_json` limits size and depth. `tests/harness/parsers.py` lists its callers."""
    found = {
        str(path.relative_to(ROOT))
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and node.attr in ("load", "loads", "JSONDecoder")
        and isinstance(node.value, ast.Name)
        and node.value.id == "json"
    }
    assert found == {"sparkhvd/wire.py"}


def test_unpickling_functions_are_called_by_their_qualified_names() -> None:
    hidden = [
        f"{relative(path)}:{node.lineno}"
        for path in SOURCES
        for node in nodes(path)
        if isinstance(node, ast.ImportFrom)
        and node.module in {"pickle", "cloudpickle", "marshal", "dill"}
        and any(alias.name in {"loads", "load", "Unpickler"} for alias in node.names)
    ]
    assert hidden == []


def test_only_listed_files_use_spark_below_the_dataframe_api() -> None:
    below = {"rdd", "_jvm", "_jsc", "_jdf", "_jsparkSession", "sparkContext", "_sc"}
    uses = [
        f"{relative(path)}:{node.lineno}: .{node.attr}"
        for path in SOURCES
        if relative(path) not in BELOW_DATAFRAMES
        for node in nodes(path)
        if isinstance(node, ast.Attribute) and node.attr in below
    ]
    assert uses == []


def test_allow_lists_name_only_files_that_exist() -> None:
    listed = {*ENVIRONMENT, *UNPICKLING, *BELOW_DATAFRAMES, *LAZY}
    assert sorted(name for name in listed if not (ROOT / name).exists()) == []


def test_settings_page_has_the_table_that_the_code_prints() -> None:
    text = (ROOT / "docs" / "settings.md").read_text()
    found = re.search(r"<!-- settings -->\n(.*?)\n<!-- /settings -->", text, re.DOTALL)
    assert found is not None, "docs/settings.md has no settings table"
    assert found[1].strip() == markdown_table(), "Regenerate it: python -m tools.settings"


def test_errors_page_matches_the_sources() -> None:
    assert errors_page.FILE.read_text() == errors_page.page(), (
        "Regenerate it: python -m tools.errors"
    )


def test_waits_page_matches_the_sources() -> None:
    assert waits_page.FILE.read_text() == waits_page.page(), "Regenerate it: python -m tools.waits"


def test_contributing_names_every_top_level_folder() -> None:
    done = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, timeout=30, check=False
    )
    if done.returncode != 0:
        pytest.skip("needs a git checkout, which lists the folders")
    folders = {name.split("/")[0] for name in done.stdout.splitlines() if "/" in name}
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = set(re.findall(r"^(\w+)/\s", text, re.M))
    assert sorted(f for f in folders - named if not f.startswith(".")) == []


def test_words_that_select_cpp_tests_in_make_match_test_names() -> None:
    """A renamed C++ test must stay in the checks of `make test` that select tests by words."""
    sources = (ROOT / "native" / "tests").glob("*.cc")
    names = {n for path in sources for n in re.findall(r"^TEST\((\w+)", path.read_text(), re.M)}
    makefile = (ROOT / "Makefile").read_text()
    chosen = re.findall(r"^(?:THREADS_MEET|COMPUTE_LONG) = (.*)$", makefile, re.M)
    chosen += re.findall(r"^\tbuild/native/sparkhvd_tests (.*)$", makefile, re.M)
    assert len(chosen) == 3
    words = {word.strip("'") for line in chosen for word in line.split()}
    unknown = [
        word
        for word in words
        if not any(n.startswith(word[1:]) if word[0] == "^" else word in n for n in names)
    ]
    assert sorted(unknown) == []


def test_tests_named_in_the_makefile_exist() -> None:
    named = re.findall(r"(tests/[\w/]+\.py)::(\w+)", (ROOT / "Makefile").read_text())
    assert len(named) > 3
    missing = [
        (file, name) for file, name in named if f"def {name}(" not in (ROOT / file).read_text()
    ]
    assert missing == []


def test_links_in_the_documents_have_a_target() -> None:
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
    engine = (PACKAGE / "engine" / "library.py").read_text()
    assert re.search(rf"ABI_VERSION\w*\s*(:\s*\w+\s*)?=\s*{found[1]}\b", engine)


def test_new_collective_recipe_names_the_files_that_mention_scatter() -> None:
    recipe = (ROOT / "native" / "README.md").read_text().split("## How to add a collective")[1]
    steps = re.findall(r"^\d\. `([^`]+)`", recipe, flags=re.MULTILINE)
    named = {
        step.replace("<name>", "scatter")
        if step.startswith("sparkhvd/")
        else f"native/{step.replace('<name>', 'scatter')}"
        for step in steps
    }
    sources = [
        *(ROOT / "native" / "include").rglob("*.h"),
        *(ROOT / "native" / "src").rglob("*.h"),
        *(ROOT / "native" / "src").rglob("*.cc"),
        *(PACKAGE / "engine").rglob("*.py"),
    ]
    mentions = re.compile(r"kScatter|\bSCATTER\b|SPARKHVD_SCATTER")
    found = {relative(path) for path in sources if mentions.search(path.read_text())}
    assert found == named
    assert len(named) == 5


def test_engine_uses_only_mutexes_that_clang_checks() -> None:
    sources = [*(ROOT / "native" / "src").rglob("*.h"), *(ROOT / "native" / "src").rglob("*.cc")]
    others = re.compile(r"std::(\w*mutex|unique_lock|scoped_lock|lock_guard)\b")
    found = {relative(path) for path in sources if others.search(path.read_text())}
    assert found == {"native/src/sync.h"}


def test_shipped_sources_contain_no_unfinished_marks() -> None:
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


def test_sources_contain_no_ambiguous_words() -> None:
    """docs/architecture.md has one word for each thing."""
    wrong = re.compile(
        r"\b(nproc|world_rank|comm_size|(?<!def )node_rank)\b"
    )  # Lightning asks for it
    found = [
        f"{relative(path)}:{number}: {line.strip()}"
        for path in SOURCES
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if wrong.search(line)
    ]
    assert found == []
