"""Checks before anything starts."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from sparkhvd.errors import PreflightError
from sparkhvd.runner.preflight import (
    RankFacts,
    address_space_needed,
    check_address_space,
    check_conf,
    check_databricks,
    check_ranks,
    check_tokens,
    patch_warning,
    rank_facts,
    write_token,
)
from sparkhvd.wire import rebuild

pytestmark = pytest.mark.pure

FACTS = RankFacts("h0", "/usr/bin/python", "3.11", "2.13.0+cpu", "0.1.0")


class Files:
    """A folder as shared files."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.url = "file:///store"

    def read_bytes(self, path: str) -> bytes:
        return (self.root / path).read_bytes()

    def write_bytes(self, path: str, data: bytes) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_bytes(data)

    def exists(self, path: str) -> bool:
        return (self.root / path).exists()


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        ("cuda: Optional[str] = None\nhip: Optional[str] = None\n", "7.1"),
        ("cuda = None\n", "7.1"),
        ("cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n", ""),
        ("nothing of the kind\n", ""),
    ],
)
def test_torch_without_cuda_is_recognized_without_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, build: str, expected: str
) -> None:
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('imported')\n")
    (package / "version.py").write_text(build)
    (tmp_path / "torch-7.1.dist-info").mkdir()
    (tmp_path / "torch-7.1.dist-info" / "METADATA").write_text("Name: torch\nVersion: 7.1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    facts = rank_facts(("torch",))
    assert facts.cpu_torch == expected
    assert rebuild(RankFacts, facts.to_dict()) == facts
    assert rank_facts(()).cpu_torch == ""  # a job that does not need it


def test_dynamic_allocation_is_refused_with_the_conf_to_set() -> None:
    with pytest.raises(PreflightError) as e:
        check_conf({"spark.dynamicAllocation.enabled": "true"})
    assert str(e.value) == (
        "spark.dynamicAllocation.enabled is true, and Spark refuses barrier stages then. Start the session "
        "with spark.dynamicAllocation.enabled=false and spark.executor.instances=<number>."
    )


@pytest.mark.parametrize(
    ("idle", "kill"),
    [
        (
            "spark.sql.execution.pyspark.udf.idleTimeoutSeconds",
            "spark.sql.execution.pyspark.udf.killOnIdleTimeout",
        ),
        ("spark.python.worker.idleTimeoutSeconds", "spark.python.worker.killOnIdleTimeout"),
    ],
)
def test_conf_that_kills_idle_python_workers_raises(idle: str, kill: str) -> None:
    with pytest.raises(PreflightError, match="would kill every rank after 60 s"):
        check_conf({idle: "60", kill: "true"})
    check_conf({idle: "60s"})  # a warning of Spark's only
    check_conf({idle: "0", kill: "true"})
    check_conf({})


@pytest.mark.parametrize(
    ("runtime", "kind"), [("16.4", "in standard access mode"), ("client.3.2", "serverless")]
)
def test_databricks_compute_that_isolates_tasks_is_refused(
    monkeypatch: pytest.MonkeyPatch, runtime: str, kind: str
) -> None:
    check_databricks(is_connect=True)  # a client elsewhere
    monkeypatch.setenv("DATABRICKS_RUNTIME_VERSION", runtime)
    check_databricks(is_connect=False)  # dedicated
    with pytest.raises(PreflightError) as e:
        check_databricks(is_connect=True)
    assert str(e.value) == (
        f"This Databricks compute is {kind} (runtime {runtime}), where tasks may not connect to each other. "
        "Attach the notebook or job to a cluster in dedicated access mode, with a fixed number of workers."
    )


def test_ranks_with_equal_versions_are_accepted() -> None:
    assert check_ranks(FACTS, [FACTS, replace(FACTS, host="h1")]) == ""
    assert check_ranks(replace(FACTS, torch=""), [FACTS]) == ""
    assert check_ranks(replace(FACTS, torch="2.13.0+cu130"), [FACTS]) == ""


def test_error_for_a_missing_module_names_the_python_and_remedy() -> None:
    assert check_ranks(FACTS, [FACTS, replace(FACTS, host="h1", missing=("pyarrow",))]) == (
        "The workers run /usr/bin/python (rank 1 on host h1), which has no pyarrow. Set PYSPARK_PYTHON "
        "(spark.pyspark.python) to a Python that has it, or install it there."
    )


def test_ranks_with_another_python_version_are_refused() -> None:
    assert check_ranks(FACTS, [replace(FACTS, python="3.12")]) == (
        "The driver runs Python 3.11, rank 0 on host h0 runs Python 3.12 (/usr/bin/python). "
        "Set PYSPARK_PYTHON to the driver's version."
    )


def test_ranks_with_other_package_versions_are_refused() -> None:
    assert "The driver has sparkhvd 0.1.0, rank 0" in check_ranks(
        FACTS, [replace(FACTS, sparkhvd="0.2.0")]
    )
    assert "The driver has torch 2.13.0+cpu, rank 0" in check_ranks(
        FACTS, [replace(FACTS, torch="2.12.1")]
    )
    # A build may differ from the driver's, and not between ranks.
    assert (
        "Rank 0 on host h0 has torch 2.13.0+cpu, rank 1 on host h0 has 2.13.0+cu130"
        in check_ranks(FACTS, [FACTS, replace(FACTS, torch="2.13.0+cu130")])
    )


SMALL = replace(FACTS, limit_bytes=512 << 20, needed_bytes=(800 << 20) - 1)


def test_address_space_error_names_limit_need_and_conf() -> None:
    # Under such a limit threads do not start either: the limit is the cause.
    short = replace(SMALL, error="RuntimeError: can't start new thread")
    assert check_ranks(FACTS, [FACTS, short]) == (
        "The processes of rank 1 on host h0 may have 512 MiB of address space each (RLIMIT_AS), and a trainer "
        "with torch 2.13.0+cpu needs 800 MiB before its model and data. Spark sets this limit to "
        "spark.executor.pyspark.memory, divided by spark.executor.cores where that is set: leave "
        "spark.executor.pyspark.memory unset, or set it to 800m or more for each of these cores."
    )
    with pytest.raises(PreflightError) as e:
        check_address_space(SMALL)
    assert str(e.value) == (
        "Processes that this process starts may have 512 MiB of address space each (RLIMIT_AS), and a trainer with torch "
        "2.13.0+cpu needs 800 MiB before its model and data. Raise the limit of this process, for example by "
        "'ulimit -v unlimited' in the shell that starts it."
    )


def test_worker_with_too_little_address_space_raises_before_importing_torch() -> None:
    program = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (300 << 20,) * 2);"
        "from sparkhvd.runner.preflight import check_worker\n"
        "try: check_worker()\n"
        "except Exception as e: print(e); assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert re.search(r"may have 300 MiB .* with torch it would be \d{3,} MiB", done.stdout)
    assert "spark.executor.pyspark.memory unset" in done.stdout


@pytest.mark.parametrize(
    "facts",
    [
        replace(SMALL, limit_bytes=0),
        replace(SMALL, needed_bytes=0),
        replace(SMALL, limit_bytes=SMALL.needed_bytes),
    ],
)
def test_enough_address_space_is_accepted(facts: RankFacts) -> None:
    check_address_space(facts)
    assert check_ranks(FACTS, [facts]) == ""


def test_address_space_estimate_counts_torch_arrow_and_shared_memory() -> None:
    torch = address_space_needed(["pyspark.cloudpickle", "sparkhvd.torch"], 0)
    assert torch > 500 << 20
    assert address_space_needed(["torch"], 64 << 20) == torch + (64 << 20)
    assert address_space_needed(["torch", "pyarrow"], 0) > torch
    assert address_space_needed(["json", "torchvision"], 0) == 0


def test_address_space_estimate_counts_libraries_of_a_cuda_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def library(path: str, mebibytes: int) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        with open(tmp_path / path, "wb") as file:
            file.truncate(mebibytes << 20)

    library("torch/__init__.py", 0)
    library("torch/lib/libtorch_cpu.so", 400)
    library("nvidia/cu13/lib/libcublas.so.13", 50)
    library("nvidia/cudnn/lib/libcudnn_engines_precompiled.so.9", 250)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    cpu = address_space_needed(["torch"], 0)
    library("torch/lib/libtorch_cuda.so", 500)
    assert address_space_needed(["torch"], 0) - cpu == 550 << 20


def test_address_space_estimate_suffices_for_torch_and_an_engine() -> None:
    """A training runs with little more than the estimate, and torch cannot be loaded with half of it."""
    needed = address_space_needed(["torch"], 0)
    script = (
        "import torch; from sparkhvd.engine.engine import Engine; from sparkhvd.rendezvous import SingleRendezvous; "
        "from sparkhvd.settings import Settings\n"
        "with Engine(SingleRendezvous(Settings()).connect(), Settings()): torch.ones(1000).sum().item()"
    )

    def run_with(limit: int) -> int:
        return subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
            stderr=subprocess.DEVNULL,
            check=False,
        ).returncode

    assert run_with(needed) == 0
    assert run_with(needed // 2) != 0


def test_check_of_ranks_reports_the_error_of_one_rank() -> None:
    assert check_ranks(FACTS, [FACTS, replace(FACTS, host="h1", error="OSError: no port")]) == (
        "Rank 1 on host h1 cannot start: OSError: no port"
    )


def test_different_patch_versions_of_torch_cause_a_warning() -> None:
    assert check_ranks(FACTS, [replace(FACTS, torch="2.13.1+cpu")]) == ""
    assert "torch 2.13.0+cpu, the ranks have 2.13.1+cpu" in patch_warning(
        FACTS, [replace(FACTS, torch="2.13.1+cpu")]
    )
    assert patch_warning(FACTS, [replace(FACTS, torch="2.13.0+cu130")]) == ""


def test_numpy_minor_difference_is_refused_and_patch_difference_warns() -> None:
    with_numpy = replace(FACTS, numpy="2.1.3")
    other = replace(with_numpy, host="h1", numpy="2.2.0")
    assert check_ranks(FACTS, [with_numpy, other]) == (
        "Rank 0 on host h0 has numpy 2.1.3, rank 1 on host h1 has 2.2.0; every rank draws the same random "
        "numbers, and minor releases of numpy may draw other numbers. Install the same release on every host."
    )
    patch = replace(other, numpy="2.1.1")
    assert check_ranks(FACTS, [with_numpy, patch]) == ""
    assert patch_warning(FACTS, [with_numpy, patch]) == (
        "Rank 0 on host h0 has numpy 2.1.3, rank 1 on host h1 has 2.1.1; same minor release."
    )
    # The driver draws no random numbers, and a job without numpy does not read its state.
    assert patch_warning(FACTS, [with_numpy, with_numpy]) == ""
    assert rank_facts(()).numpy == ""
    assert rank_facts(("numpy",)).numpy.count(".") >= 2


def test_rank_facts_list_missing_modules_and_survive_json() -> None:
    facts = rank_facts(("json", "surely_no_such_module", "surely.no.such"))
    assert facts.missing == ("surely_no_such_module", "surely.no.such")
    assert rebuild(RankFacts, facts.to_dict()) == facts


def test_token_files_prove_that_a_store_is_shared(tmp_path: Path) -> None:
    files = Files(tmp_path)
    for rank in (None, 0, 1):
        assert write_token(files, "runs/a", 0, rank, "job") == ""
    assert check_tokens(files, "runs/a", 0, "job", ["h0", "h1"], me=1) == ""


def test_error_for_a_missing_token_names_both_hosts_and_path(tmp_path: Path) -> None:
    files = Files(tmp_path)
    for rank in (None, 1):
        write_token(files, "runs/a", 0, rank, "job")
    answer = check_tokens(files, "runs/a", 0, "job", ["h0", "h1"], me=1)
    assert answer.startswith(
        "The store is not shared: rank 0 on host h0 wrote runs/a/attempts/0/token-rank-0 in file:///store, and "
        "on host h1 (rank 1) it cannot be read (FileNotFoundError"
    )
    assert answer.endswith("Use a path that the driver and all executors see.")


def test_token_of_another_job_is_ignored(tmp_path: Path) -> None:
    files = Files(tmp_path)
    for rank in (None, 0):
        write_token(files, "runs/a", 0, rank, "older")
    assert "the driver wrote" in check_tokens(files, "runs/a", 0, "job", ["h0"], me=0)
    assert "has other contents" in check_tokens(files, "runs/a", 0, "job", ["h0"], me=0)


def test_error_names_a_store_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file, not a folder")
    assert "cannot write runs/a/attempts/0/token-rank-0 in file:///store" in write_token(
        Files(tmp_path), "runs/a", 0, 0, "job"
    )
