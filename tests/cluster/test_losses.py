"""The manifest has each row once although writers are killed, overtaken or cancelled. An executor is killed during `run`."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests.harness.cluster import Cluster
from tests.harness.processes import wait_for_no_trainers
from tests.harness.soak import soak
from tests.harness.spark import run_on, standalone_cluster, with_folder

# Executors are killed and replaced, which may take long on a busy machine.
pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

# `fault` runs once per partition and fault, when a writer has written everything but has not closed its file.
PROGRAM = """
import contextlib
import numpy as np
from pathlib import Path
from pyspark import TaskContext
from sparkhvd.data.materialize import materialize
from sparkhvd.data.packed import read_packed
from sparkhvd.data.columns.check import (check_schema)
from sparkhvd.data.store.store import Store
from tests.harness import faults

class FaultyStore(Store):
    def __getstate__(self):
        return {**super().__getstate__(), "folder": self.folder, "fault": self.fault}

    def __setstate__(self, state):
        super().__setstate__(state)
        self.folder, self.fault = state["folder"], state["fault"]

    @contextlib.contextmanager
    def open_output(self, path):
        with super().open_output(path) as sink:
            yield sink
            context = TaskContext.get()
            if context is not None:
                sink.flush()
                number = context.partitionId()
                attempt = f"{number}-{context.taskAttemptId()}"
                Path(self.folder, f"attempt-{attempt}").touch()
                with contextlib.suppress(FileExistsError):
                    Path(self.folder, f"fault-{number}").touch(exist_ok=False)
                    self.fault(number)

def attempts(folder):
    return sorted(int(p.name.split("-")[1]) for p in Path(folder).glob("attempt-*"))

def run(name, fault, df=None):
    folder = Path(FOLDER, name)
    folder.mkdir()
    df = spark.range(0, 4000, 1, 4).selectExpr("id", "1 AS label") if df is None else df
    store = FaultyStore(Store.create(folder / "store").url)
    store.folder, store.fault = str(folder), fault
    schema = check_schema(df.schema, feature_cols=["id"], label_cols=["label"])
    began = time.monotonic()
    try:
        manifest = materialize(df, schema, store, "data/k/app")
    finally:
        print(name, "took", round(time.monotonic() - began, 1), "s, attempts of partitions", attempts(folder))
    assert (read_packed(str(folder / "store/data/k/app"))["id"] == np.arange(4000)).all()
    listed = {Path(f.path).name for f in manifest.files}
    assert len(listed) == 4
    found = {p.name for p in (folder / "store/data/k/app").iterdir()}
    assert found == {*listed, "_manifest.json"}, found
    return attempts(folder)
"""


def test_killed_writers_neither_repeat_nor_lose_rows(cluster: Cluster, tmp_path: Path) -> None:
    body = """
    def worker(number):
        if number == 1:
            faults.kill_self()

    def executor(number):
        if number == 2:
            os.kill(faults.parent_of(os.getppid()), 9)
            time.sleep(60)

    # A task whose writer was killed came again, and wrote again what was there already.
    assert run("worker", worker).count(1) == 2
    assert run("executor", executor).count(2) == 2
    print("DONE")
    """
    output = cluster.run(_program(body, tmp_path), timeout_s=400)
    assert "DONE" in output
    assert "ExecutorLostFailure" in output


FAILS_ONCE = """
from pathlib import Path
import numpy as np
from sparkhvd.data.columns.check import check_schema
from sparkhvd.data.store.store import Store
from sparkhvd.data.materialize import materialize
from sparkhvd.data.packed import read_packed

def fail_once(batches):
    for batch in batches:
        yield batch
    from pyspark import TaskContext
    if TaskContext.get().partitionId() == 1 and TaskContext.get().attemptNumber() == 0:
        Path(FOLDER, "mark").write_text("failed")
        raise RuntimeError("on purpose")

df = spark.range(0, 1000, 1, 3).selectExpr("id", "1 as label")
df = df.mapInArrow(fail_once, df.schema)
schema = check_schema(df.schema, feature_cols=["id"], label_cols=["label"])
manifest = materialize(df, schema, Store.create(FOLDER + "/store"), "data/k/app")
assert Path(FOLDER, "mark").exists()
assert (read_packed(FOLDER + "/store/data/k/app")["id"] == np.arange(1000)).all()
print("rows", manifest.num_rows)
"""


@soak("test_killed_writers_neither_repeat_nor_lose_rows, here")
def test_a_task_that_fails_once_writes_no_row_twice(cluster: Cluster, tmp_path: Path) -> None:
    assert "rows 1000" in cluster.run(with_folder(FAILS_ONCE, tmp_path))


EXECUTOR_LOSS = """
from sparkhvd.runner import context, run
from tests.harness import faults

def loses_its_executor():
    here = context()
    if here.attempt == 0:
        if here.rank == 1:
            faults.kill_executor()
        time.sleep(100)
    return here.attempt

assert run(loses_its_executor, num_proc=2, spark=spark, max_retries=1) == [1, 1]
print("ALL WELL")
"""


def test_job_survives_a_killed_executor(cluster: Cluster) -> None:
    output = cluster.run(EXECUTOR_LOSS, timeout_s=400)
    assert (
        "sparkhvd: Rank 1 of 2 was lost together with its Spark task: ExecutorLostFailure (executor"
        in output
    ), output
    assert "Relaunching (1 of 1)." in output, output
    assert "ALL WELL" in output, output
    assert wait_for_no_trainers() == set()


@soak("test_killed_writers_neither_repeat_nor_lose_rows, here")
def test_file_of_a_slower_task_attempt_is_not_used(tmp_path: Path) -> None:
    body = """
    data = Path(FOLDER, "speculation/store/data/k/app")

    def outrun(number):
        deadline = time.monotonic() + 120
        while number == 3 and not (data / "_manifest.json").exists() and time.monotonic() < deadline:
            time.sleep(0.05)

    # The other host runs a copy of the task that does not end.
    assert run("speculation", outrun).count(3) == 2
    before = sorted(data.iterdir())
    time.sleep(2)  # the first attempt still runs, or Spark has killed it
    assert sorted(data.iterdir()) == before
    print("DONE")
    """
    conf = {
        "spark.executor.memory": "512m",
        "spark.speculation": "true",
        "spark.speculation.interval": "100ms",
        "spark.speculation.multiplier": "1.1",
        "spark.speculation.quantile": "0.5",
        "spark.speculation.minTaskRuntime": "500ms",
    }
    # Spark starts no copy on the host of the first task.
    with standalone_cluster(tmp_path, are_hosts=True) as master:
        output = run_on(master, _program(body, tmp_path), tmp_path, conf=conf, timeout_s=400)
    assert "DONE" in output


@soak("test_killed_writers_neither_repeat_nor_lose_rows, here")
def test_late_writer_deletes_its_file_after_failed_materialization(tmp_path: Path) -> None:
    body = """
    def failing(batches):
        yield from batches
        if TaskContext.get().partitionId() == 0:
            # Once the other writer has begun.
            while not list(Path(FOLDER, "given up").glob("fault-1")):
                time.sleep(0.05)
            raise RuntimeError("on purpose")

    def slower(number):
        if number == 1:
            time.sleep(4)
            Path(FOLDER, "slower ended").touch()

    df = spark.range(0, 4000, 1, 2).selectExpr("id", "1 AS label")
    try:
        run("given up", slower, df.mapInArrow(failing, df.schema))
        raise SystemExit("no error")
    except Exception as e:
        assert "on purpose" in str(e), e
    store = Store(str(Path(FOLDER, "given up", "store")))
    gone = not store.list("data", recursive=True)
    # Spark kills the writer that is left over, or it ends by itself; either way nothing stays or comes back.
    deadline = time.monotonic() + 10
    while not Path(FOLDER, "slower ended").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(1)
    left = list(Path(FOLDER, "given up", "store").rglob("*"))
    assert gone and not [p for p in left if p.is_file()], left
    print("DONE, the writer ended by itself:", Path(FOLDER, "slower ended").exists())
    """
    conf = {
        "spark.task.maxFailures": "1",
        # Spark asks a cancelled task to stop, and kills its Python worker only after this time.
        "spark.python.task.killTimeout": "20s",
    }
    output = run_on(
        "local-cluster[2,1,1024]", _program(body, tmp_path), tmp_path, conf=conf, timeout_s=400
    )
    assert "DONE" in output


def _program(body: str, folder: Path) -> str:
    return f"FOLDER = {str(folder)!r}\n{PROGRAM}{textwrap.dedent(body)}"
