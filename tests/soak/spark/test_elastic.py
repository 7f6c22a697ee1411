"""`run_elastic` on executors that Spark decommissions, allocates dynamically, or uses for two copies of a task."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.harness.cluster import shared_cluster
from tests.harness.processes import TRAINER, find, wait_until_gone
from tests.harness.spark import (
    CONF,
    run_on,
    standalone_cluster,
    started_script,
    with_folder,
    write_script,
)
from tests.harness.waiting import wait_until

pytestmark = [pytest.mark.soak, pytest.mark.timeout(400)]

# The training continues until the driver has marked the end of its fault, and two ranks have joined.
PROGRAM = """
import signal, threading
from sparkhvd.runner import run_elastic
from tests.harness.elastic_fn import train
from tests.harness.processes import find, wait_until_gone

def fit(**given):
    results = run_elastic(train, (FOLDER, 2, "elsewhere"), num_proc=2, min_num_proc=1, spark=spark, **given)
    assert [rank for rank, *_ in results] == [0, 1], results
    assert all(weight == -steps for _, _, steps, weight in results), results
    print("SIZES", results[0][1])

def mark():
    open(FOLDER + "/killed", "w").close()

def wait_for(name):
    while not os.path.exists(FOLDER + "/" + name):
        time.sleep(0.05)
"""

DECOMMISSION = """
def decommission():
    wait_for("whole")
    executors = sorted(find("CoarseGrainedExecutorBackend", os.environ["SPARKHVD_TEST_RUN"]))
    os.kill(executors[-1], signal.SIGPWR)
    assert not wait_until_gone({executors[-1]}, 60), executors
    mark()

threading.Thread(target=decommission).start()
fit()
"""


def test_ranks_leave_a_decommissioned_executor(tmp_path: Path) -> None:
    output = run_on(
        "local-cluster[2,1,1024]",
        with_folder(PROGRAM + DECOMMISSION, tmp_path),
        tmp_path,
        conf={"spark.decommission.enabled": "true"},
        timeout_s=300,
    )
    assert "SIZES [2, 1, 2]" in output, output
    assert "left: its slot is gone" in output, output
    assert "restores its last commit" not in output, output


GIVEN_UP = """
results = run_elastic(train, (FOLDER, 2, "executor"), num_proc=2, min_num_proc=1, max_retries=1, spark=spark)
print("RANKS", sorted(rank for rank, *_ in results))
"""


def test_aborted_spark_stage_is_relaunched(tmp_path: Path) -> None:
    """Spark aborts a stage after the allowed number of failures of a task, and all ranks are lost."""
    output = run_on(
        "local-cluster[2,1,1024]",
        with_folder(PROGRAM + GIVEN_UP, tmp_path),
        tmp_path,
        conf={"spark.task.maxFailures": "1"},
        timeout_s=300,
    )
    assert "Relaunching (1 of 1)" in output, output
    assert "RANKS [0, 1]" in output, output


DYNAMIC = """
def later():
    wait_for("whole")
    mark()

threading.Thread(target=later).start()
fit(max_num_proc=2)
"""


def test_elastic_job_uses_dynamically_allocated_executors(tmp_path: Path) -> None:
    output = run_on(
        "local-cluster[2,1,1024]",
        with_folder(PROGRAM + DYNAMIC, tmp_path),
        tmp_path,
        conf={
            "spark.dynamicAllocation.enabled": "true",
            "spark.dynamicAllocation.shuffleTracking.enabled": "true",
            "spark.dynamicAllocation.initialExecutors": "0",
            "spark.dynamicAllocation.minExecutors": "0",
            "spark.dynamicAllocation.maxExecutors": "2",
        },
        timeout_s=300,
    )
    assert "SIZES" in output, output


SPECULATIVE = """
def active_tasks():
    tracker = spark.sparkContext.statusTracker()
    stages = [tracker.getStageInfo(number) for number in tracker.getActiveStageIds()]
    return sum(stage.numActiveTasks for stage in stages if stage)

def later():
    wait_for("whole")
    while active_tasks() < 3:  # two tasks, and a copy
        time.sleep(0.1)
    time.sleep(1)
    mark()

threading.Thread(target=later).start()
fit()
"""


def test_speculative_task_copy_counts_as_a_slot(tmp_path: Path) -> None:
    conf = {
        "spark.executor.memory": "512m",
        "spark.speculation": "true",
        "spark.speculation.interval": "100ms",
        # For a stage whose tasks fit one executor's cores, by its conf. The copy runs on another host.
        "spark.executor.cores": "2",
        "spark.speculation.task.duration.threshold": "1s",
    }
    program = with_folder(PROGRAM + SPECULATIVE, tmp_path)
    with standalone_cluster(tmp_path, cores=2, are_hosts=True) as master:
        output = run_on(master, program, tmp_path, conf=conf, timeout_s=300)
    assert "SIZES [2]" in output, output


# Over Spark Connect, behind NAT: executors reach this client by the store alone.
BEHIND_NAT = """
import threading, torch
from sparkhvd import Store, TorchEstimator
from sparkhvd.estimator import Callback
from sparkhvd.runner import run_elastic
from sparkhvd.spark import SparkShim
from tests.harness import faults
from tests.harness.elastic_fn import train

SparkShim.own_addresses = lambda shim: ("127.0.0.1", "192.0.2.1")
FOLDER = os.path.dirname(os.path.abspath(__file__))
store = Store.create(FOLDER + "/store")
"""

LOST = """
def run(name, fault, **given):
    os.makedirs(FOLDER + "/" + name)
    results = run_elastic(train, (FOLDER + "/" + name, 2, fault), num_proc=2, min_num_proc=1, spark=spark, store=store, **given)
    assert [rank for rank, *_ in results] == [0, 1], results
    assert all(weight == -steps for _, _, steps, weight in results), results
    print("SIZES", name, results[0][1])

run("other", "executor")
run("task", "coordinator")
try:
    run("last", "coordinator", max_retries=0)
except Exception as e:
    print("FAILED", type(e).__name__, e)

class Kill(Callback):
    def on_step_end(self, ctx, loss):
        with open(FOLDER + "/epochs", "a") as log:
            log.write(f"{ctx.epoch}\\n")
        if ctx.epoch == 2 and faults.serves_elastic_job() and not os.path.exists(FOLDER + "/killed"):
            open(FOLDER + "/killed", "w").close()
            faults.kill_executor()

df = spark.range(200).selectExpr("cast(id as double) / 200 as x", "cast(id as double) as y")
fit = TorchEstimator(
    model=torch.nn.Linear(1, 1), optimizer="sgd", learning_rate=0.01, loss="mse", feature_cols=["x"], label_cols=["y"],
    batch_size=8, epochs=3, num_proc=(1, 2), callbacks=[Kill()], store=store)
history = fit.fit(df).history
assert [(record["epoch"], record["rows"]) for record in history] == [(1, 200), (2, 200), (3, 200)], history
print("FIRST EPOCH", open(FOLDER + "/epochs").read().split().count("1"))
"""


def test_unreachable_client_survives_the_loss_of_executors(
    tmp_path: Path,
) -> None:
    output = run_on(
        "local-cluster[2,1,1024]",
        BEHIND_NAT + LOST,
        tmp_path,
        remote=True,
        timeout_s=380,
    )
    lost = "The elastic job cannot continue: its coordinator was lost with its Spark task"
    assert re.search(r"SIZES task \[(1, )?2\]", output), output
    assert f"FAILED ElasticError {lost}" in output, output
    assert output.count("Relaunching (1 of 2)") == 2, output
    # The first epoch is not repeated: 13 steps of two ranks, or up to 25 of one.
    (steps,) = re.findall(r"FIRST EPOCH (\d+)", output)
    assert int(steps) <= 30, output


BY_PORT = """
from sparkhvd.runner import run_elastic

FOLDER, store = os.path.dirname(os.path.abspath(__file__)), None
"""

INTERRUPTED = """
def saves(name):
    import sparkhvd.torch as hvd

    def note(what):
        open(os.path.join(FOLDER, f"{name}-{what}{hvd.rank()}"), "w").close()

    hvd.init()

    @hvd.elastic.run
    def loop(state):
        note("ready")
        while True:
            try:
                time.sleep(0.05)
                state.commit()
            except KeyboardInterrupt:
                note("saved")
                raise

    loop(hvd.elastic.ObjectState(step=0))

try:
    run_elastic(saves, ("first",), num_proc=2, spark=spark, store=store)
except KeyboardInterrupt:
    open(os.path.join(FOLDER, "first-ended"), "w").close()
run_elastic(saves, ("second",), num_proc=2, spark=spark, store=store)
"""


@pytest.mark.parametrize("remote", [False, True])
def test_ranks_save_at_an_interrupt_and_end_with_the_driver(tmp_path: Path, remote: bool) -> None:
    body = (BEHIND_NAT if remote else BY_PORT) + INTERRUPTED
    master = "local-cluster[2,1,1024]"
    script = write_script(tmp_path / "driver.py", body, master=master, remote=remote)
    with started_script(script) as driver:

        def wait_for(*names: str) -> None:
            def found() -> bool:
                return all((tmp_path / name).exists() for name in names)

            wait_until(lambda: found() or driver.poll() is not None, str(names), within_s=120)
            assert found(), driver.stdout and driver.stdout.read()

        wait_for("first-ready0", "first-ready1")
        os.kill(driver.pid, signal.SIGINT)
        wait_for("first-saved0", "first-saved1", "first-ended")
        wait_for("second-ready0", "second-ready1")
        ranks = find(TRAINER)
        assert len(ranks) == 2
        driver.kill()
        assert wait_until_gone(ranks, 30) == set()


FOREVER = """
from sparkhvd import run

FOLDER = os.path.dirname(os.path.abspath(__file__))

def stay():
    import sparkhvd.torch as hvd

    hvd.init()
    open(os.path.join(FOLDER, f"first-ready{hvd.rank()}"), "w").close()
    time.sleep(3600)

run(stay, num_proc=2, spark=spark)
"""


@pytest.mark.parametrize("body", [FOREVER, BEHIND_NAT + INTERRUPTED], ids=["run", "elastic"])
def test_ranks_of_a_killed_connect_client_end_with_its_operation(tmp_path: Path, body: str) -> None:
    conf = {
        "spark.connect.execute.reattachable.senderMaxStreamDuration": "5s",
        "spark.connect.execute.manager.detachedTimeout": "5s",
        "spark.connect.execute.manager.maintenanceInterval": "1s",
    }
    with shared_cluster(tmp_path, conf) as cluster:
        folder = tmp_path / "client"
        folder.mkdir()
        script = write_script(
            folder / "driver.py",
            body,
            master=cluster.remote,
            remote=True,
            conf=dict.fromkeys(CONF),
        )
        with started_script(script) as client:
            ready = [folder / f"first-ready{rank}" for rank in (0, 1)]
            wait_until(
                lambda: all(map(Path.exists, ready)) or client.poll() is not None,
                "both ranks are ready",
                within_s=150,
            )
            assert client.poll() is None, client.stdout and client.stdout.read()
            ranks = find(TRAINER)
            assert len(ranks) == 2
            client.kill()
            assert wait_until_gone(ranks, 60) == set()
