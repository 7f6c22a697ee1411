"""The daemon of Spark's Python workers with torch, started as Spark starts it."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.paths import ROOT

pytestmark = pytest.mark.processes

# Of pyspark's protocol: the daemon's answer.
PORT = struct.Struct("!i")


# A `torch.py` after which the daemon must not fork.
STARTS_THREAD = (
    "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
)
WITHOUT_PROC = """
import os
listdir = os.listdir
os.listdir = lambda path=".": listdir("/absent" if path.startswith("/proc") else path)
"""


# A transform, a pandas function, an RDD and a fit in a session with this daemon.
SESSION = """
import numpy as np
import torch
from pyspark.sql import SparkSession

spark = (
    SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    .config("spark.python.daemon.module", "sparkhvd.python_daemon").getOrCreate()
)
spark.sparkContext.setLogLevel("ERROR")

from torch import nn

from sparkhvd import TorchEstimator, TorchModel

def daemon(_):
    import os, sys
    from pathlib import Path

    module = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().split(b"\\0")[2].decode()
    return module, {"torch", "sparkhvd.estimator.transform.worker", "numpy.random"} <= set(sys.modules)

def draw(_):
    import time
    import numpy

    time.sleep(1)  # so that each worker gets a row
    yield float(numpy.random.rand())

assert spark.sparkContext.range(4, numSlices=2).map(daemon).distinct().collect() == [("sparkhvd.python_daemon", True)]
drawn = spark.sparkContext.range(2, numSlices=2).mapPartitions(draw).collect()
assert len(set(drawn)) == 2, drawn
df = spark.range(101, numPartitions=2).selectExpr("float(id) as a", "float(id % 3) as b", "float(id) as y")
module = nn.Linear(2, 1)
rows = TorchModel(model=module, feature_cols=["a", "b"], label_cols=["y"]).transform(df).collect()
with torch.no_grad():
    expected = module(torch.tensor([[row.a, row.b] for row in rows]))[:, 0]
np.testing.assert_allclose([row.y__output for row in rows], expected, rtol=1e-6)
doubled = df.mapInPandas(lambda tables: (2 * table[["a"]] for table in tables), "a float")
assert doubled.agg({"a": "sum"}).first()[0] == 2 * df.agg({"a": "sum"}).first()[0]
fitted = TorchEstimator(
    model=module, optimizer=torch.optim.Adam, loss=nn.MSELoss(), feature_cols=["a", "b"], label_cols=["y"],
    batch_size=8, epochs=2, num_proc=2, verbose=0,
).fit(df)
assert len(fitted.history) == 2
assert fitted.transform(df).count() == 101
spark.stop()
print("done")
"""


@pytest.mark.spark
def test_session_behind_the_daemon_transforms_and_fits(tmp_path: Path) -> None:
    # Some versions of numpy and torch import numpy.random, whose state forks would share.
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nif 'sparkhvd.python_daemon' in sys.orig_argv:\n    import numpy.random\n"
    )
    path = f"{tmp_path}:{ROOT}"
    done = subprocess.run(
        [sys.executable, "-c", SESSION],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path, "PYSPARK_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "done"


@pytest.mark.parametrize(
    ("torch", "threads"),
    [("", "1"), (STARTS_THREAD, "1"), (WITHOUT_PROC, "1"), ("", "2")],
    ids=["torch", "thread", "without /proc", "two CPUs per task"],
)
def test_spark_workers_fork_from_a_single_threaded_process_with_torch(
    tmp_path: Path, torch: str, threads: str
) -> None:
    """If a thread has started, or threads cannot be counted, pyspark's own daemon takes over."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": threads}
    can_fork = not torch and threads == "1"
    if torch:
        (tmp_path / "torch.py").write_text(torch)
        env["PYTHONPATH"] += f":{tmp_path}"
    env.pop("PYTHON_UNIX_DOMAIN_ENABLED", None)
    command = [sys.executable, "-m", "sparkhvd.python_daemon", "pyspark.worker"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env
    ) as daemon:
        assert daemon.stdin is not None
        assert daemon.stdout is not None
        (port,) = PORT.unpack(daemon.stdout.read(PORT.size))
        assert 0 < port < 65536
        place = Path(f"/proc/{daemon.pid}")
        module = place.joinpath("cmdline").read_bytes().split(b"\0")[2]
        assert module == (b"sparkhvd.python_daemon" if can_fork else b"pyspark.daemon")
        assert len(os.listdir(place / "task")) == 1
        assert ("libtorch" in place.joinpath("maps").read_text()) == can_fork
        daemon.stdin.close()  # as Spark ends it
        daemon.wait(20)
