"""`run` under masters with separate executors: the same program gives the same results."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.harness.cluster import Cluster
from tests.harness.processes import wait_for_no_trainers
from tests.harness.soak import soak
from tests.harness.spark import run_on

pytestmark = pytest.mark.spark

# The start of several JVMs may take long on a busy machine.
SLOW = pytest.mark.timeout(450)

# Values by rank, a function of __main__, an exception with its rank, too many ranks, two runs side by side, lines while
# the ranks run, an interrupt, and a run after all that.
PROGRAM = """
import io, os, signal, subprocess, tempfile, threading
from concurrent.futures import ThreadPoolExecutor
from sparkhvd.errors import PreflightError, RankError
from sparkhvd.runner import context, run
from tests.harness.processes import TAG_VARIABLE, TRAINER, find

OFFSET = 100

class Place:  # a class of __main__ travels both ways
    def __init__(self, rank, size, parent):
        self.rank, self.size, self.parent = rank, size, parent

def place():
    here = context()
    return Place(OFFSET + here.rank, here.size, os.getppid())

def fails():
    if context().rank == 1:
        print("last words")
        raise ValueError("on purpose")
    time.sleep(60)

places = run(place, num_proc=2, spark=spark)
assert [(p.rank, p.size) for p in places] == [(100, 2), (101, 2)], places
assert type(places[0]) is Place
print("PARENTS", len({p.parent for p in places}))
try:
    run(fails, num_proc=2, spark=spark)
except RankError as e:
    assert (e.rank, e.exit, e.log_tail) == (1, "exception", "last words"), vars(e)
    assert 'raise ValueError("on purpose")' in e.traceback, e.traceback
    assert str(e).splitlines()[1].startswith("Rank 1 of 2 on host "), str(e)
    assert (e.error_type, repr(e.__cause__)) == ("ValueError", "ValueError('on purpose')"), vars(e)
    assert e.__context__ is None and "sparkhvd-outcome" not in str(e) + e.traceback
    print("RANK ERROR")
try:
    run(place, num_proc=50, spark=spark, start_timeout=1)
except PreflightError as e:
    assert str(e).startswith("num_proc=50: "), str(e)
    print("TOO MANY")

def meets(folder):
    open(os.path.join(folder, str(os.getpid())), "w").close()
    deadline = time.monotonic() + 60
    while len(os.listdir(folder)) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    return len(os.listdir(folder))

with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as threads:
    runs = [threads.submit(run, meets, (folder,), num_proc=1, spark=spark) for _ in range(2)]
    assert [one.result(120) for one in runs] == [[2], [2]]
    print("SIDE BY SIDE")

class Seen(io.StringIO):  # lets the ranks end once lines of both are here
    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def write(self, text):
        super().write(text)
        if all(f"[{rank}] line 9" in self.getvalue() for rank in range(2)):
            open(self.folder + "/seen", "w").close()

def prints(folder):
    for line in range(10):
        print("line", line)
    deadline = time.monotonic() + 60
    while not os.path.exists(folder + "/seen"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return "seen"

with tempfile.TemporaryDirectory() as folder:
    if "connect" not in type(spark).__module__:
        seen = Seen(folder)
        assert run(prints, (folder,), num_proc=2, spark=spark, stdout=seen) == ["seen"] * 2
        expected = sorted(f"[{rank}] line {line}" for rank in range(2) for line in range(10))
        assert sorted(seen.getvalue().splitlines()) == expected, seen.getvalue()
    print("LIVE")

def stays(folder):
    subprocess.Popen(["sleep", "300"])
    open(os.path.join(folder, os.environ["RANK"]), "w").close()
    try:
        time.sleep(300)
    except KeyboardInterrupt:
        open(os.path.join(folder, "saved" + os.environ["RANK"]), "w").close()

def press_ctrl_c(folder):
    while len(os.listdir(folder)) < 2:
        time.sleep(0.05)
    os.killpg(0, signal.SIGINT)  # as a terminal does

def left():
    tag = os.environ[TAG_VARIABLE]
    return find(TRAINER, tag) | find("sleep 300", tag)

with tempfile.TemporaryDirectory() as folder:
    threading.Thread(target=press_ctrl_c, args=(folder,)).start()
    try:
        run(stays, (folder,), num_proc=2, spark=spark)
    except KeyboardInterrupt:
        print("INTERRUPTED", sorted(os.listdir(folder)))
deadline = time.monotonic() + 15
while left() and time.monotonic() < deadline:
    time.sleep(0.05)
assert not left()
assert len(run(place, num_proc=2)) == 2  # the active session
print("ALL WELL")
"""


def check(output: str) -> None:
    saved = "INTERRUPTED ['0', '1', 'saved0', 'saved1']"
    for line in ("PARENTS 2", "RANK ERROR", "TOO MANY", "SIDE BY SIDE", "LIVE", saved, "ALL WELL"):
        assert line in output, output
    assert wait_for_no_trainers() == set()


@SLOW
def test_standalone_cluster_gives_results_errors_and_interrupts(cluster: Cluster) -> None:
    check(cluster.run(PROGRAM, timeout_s=400))


@soak("test_standalone_cluster_gives_results_errors_and_interrupts, here")
@pytest.mark.parametrize("remote", [False, True], ids=["local-cluster", "connect"])
@SLOW
def test_local_cluster_gives_results_errors_and_interrupts(tmp_path: Path, remote: bool) -> None:
    body = f"{PROGRAM}\nspark.stop()\n"
    check(run_on("local-cluster[2,1,1024]", body, tmp_path, remote=remote, timeout_s=400))


@soak("test_standalone_cluster_gives_results_errors_and_interrupts, here")
def test_run_works_in_a_session_without_network_settings(tmp_path: Path) -> None:
    # As a user writes it. Spark then names the host, and the name must be resolved.
    program = """
    from sparkhvd.runner import run

    def fn():
        import sparkhvd.torch as hvd
        hvd.init()
        print("rank", hvd.rank(), "is here")
        return hvd.broadcast_object("ALL WELL", root_rank=0)

    print(run(fn, num_proc=2, spark=spark))
    """
    conf = {"spark.driver.host": None, "spark.driver.bindAddress": None}
    output = run_on("local[2]", program, tmp_path, conf=conf, env={"SPARK_LOCAL_IP": ""})
    assert "['ALL WELL', 'ALL WELL']" in output, output
    # The executor is this program, so the ranks' output is on its terminal.
    lines = output.splitlines()
    assert lines.count("[0] rank 0 is here") == 1, output
    assert lines.count("[1] rank 1 is here") == 1, output


@soak("runner/test_preflight")
@SLOW
def test_too_little_memory_for_python_is_refused_with_the_conf_to_set(tmp_path: Path) -> None:
    """The limit passes from Spark's Python worker to the trainer, which could not import torch under it."""
    program = """
    from sparkhvd.errors import PreflightError
    from sparkhvd.runner import run

    def trains():
        import sparkhvd.torch as hvd
        hvd.init()

    def counts():
        return 1 + 1

    try:
        run(trains, num_proc=2, spark=spark)
    except PreflightError as e:
        print(e)
    print("WITHOUT TORCH", run(counts, num_proc=2, spark=spark))
    """
    conf = {"spark.executor.pyspark.memory": "1g", "spark.executor.cores": "2"}
    output = run_on("local-cluster[1,2,1024]", program, tmp_path, conf=conf)
    assert re.search(
        r"The processes of rank 0 on host \S+ may have 512 MiB of address space each \(RLIMIT_AS\), and a trainer with "
        r"torch \S+ needs \d+ MiB before its model and data\. Spark sets this limit to "
        r"spark\.executor\.pyspark\.memory, divided by spark\.executor\.cores where that is set: leave "
        r"spark\.executor\.pyspark\.memory unset, or set it to \d+m or more for each of these cores\.",
        output,
    ), output
    assert "WITHOUT TORCH [2, 2]" in output
