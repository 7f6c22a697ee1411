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


@pytest.mark.parametrize(
    "torch", ["", STARTS_THREAD, WITHOUT_PROC], ids=["torch", "thread", "without /proc"]
)
def test_spark_workers_fork_from_a_single_threaded_process_with_torch(
    tmp_path: Path, torch: str
) -> None:
    """If torch has started a thread, or threads cannot be counted, pyspark's own daemon takes over."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
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
        assert module == (b"pyspark.daemon" if torch else b"sparkhvd.python_daemon")
        assert len(os.listdir(place / "task")) == 1
        assert ("libtorch" in place.joinpath("maps").read_text()) != bool(torch)
        daemon.stdin.close()  # as Spark ends it
        daemon.wait(20)
