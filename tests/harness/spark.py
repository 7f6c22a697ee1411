"""Real Spark for tests: one shared `local[2]` session, and scripts under any other master.

A process has one classic session for its whole life, so everything that needs another master (local-cluster,
standalone, Connect) runs as a script in a fresh process: `run_script`.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.harness.processes import TAG, TAG_VARIABLE

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).resolve().parents[2]

# Set when the plugin loads, before any JVM starts: the JVM, its Python workers and the trainers inherit it.
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
os.environ[TAG_VARIABLE] = TAG

CONF = {
    "spark.ui.enabled": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "1g",
    "spark.sql.shuffle.partitions": "2",
    "spark.ui.showConsoleProgress": "false",
}


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """The classic `local[2]` session that all tests of this process share."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[2]").appName("sparkhvd-tests")
    for key, value in CONF.items():
        builder = builder.config(key, value)
    warehouse = tmp_path_factory.mktemp("warehouse")
    session = builder.config("spark.sql.warehouse.dir", str(warehouse)).getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()


_PREAMBLE = """
import json, os, sys, time
from pyspark.sql import SparkSession

def make_session():
    builder = SparkSession.builder.appName("sparkhvd-script")
    if {remote!r}:
        builder = builder.remote({master!r})
    else:
        builder = builder.master({master!r})
    for key, value in {conf!r}.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()

if __name__ == "__main__":
    spark = make_session()
"""


@dataclass(frozen=True)
class ScriptResult:
    """How a script ended and what it printed (both streams, in order)."""

    returncode: int
    output: str
    seconds: float


def write_script(
    path: Path,
    body: str,
    *,
    master: str,
    remote: bool = False,
    conf: Mapping[str, str | None] | None = None,
) -> Path:
    """Write a script whose `spark` is a session on `master`; `body` is its text after that.

    `body` runs at the top level of `__main__`, so its functions are pickled by value, as in a user's script. A `conf` value of
    None leaves out what tests set otherwise.
    """
    merged = {key: value for key, value in {**CONF, **(conf or {})}.items() if value is not None}
    preamble = _PREAMBLE.format(master=master, remote=remote, conf=merged)
    path.write_text(preamble + textwrap.dedent(body))
    return path


@contextlib.contextmanager
def started_script(
    path: Path, *args: str, env: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """Run a script as its own process group with this checkout on its path; ends the group on exit."""
    environ = {**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})}
    environ = {name: value for name, value in environ.items() if value}
    environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(ROOT), environ.get("PYTHONPATH", "")])
    )
    process = subprocess.Popen(
        [sys.executable, str(path), *args],
        cwd=path.parent,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdout:
            process.stdout.close()


def run_script(
    path: Path, *args: str, env: dict[str, str] | None = None, timeout_s: float = 100
) -> ScriptResult:
    """Run a script to its end; past `timeout_s` it is killed and the test fails with its output."""
    began = time.monotonic()
    with started_script(path, *args, env=env) as process:
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired as e:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            raise AssertionError(f"{path} ran longer than {timeout_s} s:\n{output}") from e
        return ScriptResult(process.returncode, output, time.monotonic() - began)


def run_on(
    master: str,
    body: str,
    directory: Path,
    *,
    remote: bool = False,
    conf: Mapping[str, str | None] | None = None,
    env: dict[str, str] | None = None,
    timeout_s: float = 100,
) -> str:
    """Run `body` with `spark` on `master` in a fresh process; return what it printed, or fail with it."""
    script = write_script(directory / "script.py", body, master=master, remote=remote, conf=conf)
    result = run_script(script, env=env, timeout_s=timeout_s)
    assert result.returncode == 0, f"exit {result.returncode}:\n{result.output}"
    return result.output


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_for_port(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        if process.poll() is not None:
            break
        time.sleep(0.1)
    raise AssertionError(f"nothing listens on {port}:\n{log.read_text(errors='replace')}")


@contextlib.contextmanager
def standalone_cluster(directory: Path, *, workers: int = 2, cores: int = 1) -> Iterator[str]:
    """A standalone master and its workers on loopback; yields the master's `spark://` address."""
    import pyspark

    home = Path(pyspark.__file__).parent
    spark_class = str(home / "bin" / "spark-class")
    environ = {**os.environ, "SPARK_HOME": str(home), "PYTHONPATH": str(ROOT)}
    port, web = _free_port(), _free_port()
    started: list[subprocess.Popen[bytes]] = []

    def start(name: str, *command: str) -> subprocess.Popen[bytes]:
        with (directory / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [spark_class, *command],
                cwd=directory,
                env=environ,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        started.append(process)
        return process

    deploy = "org.apache.spark.deploy"
    try:
        master = start(
            "master",
            f"{deploy}.master.Master",
            *("--host", "127.0.0.1", "--port", str(port), "--webui-port", str(web)),
        )
        _wait_for_port(port, master, directory / "master.log")
        for index in range(workers):
            work = directory / f"worker-{index}"
            work.mkdir()
            start(
                f"worker-{index}",
                f"{deploy}.worker.Worker",
                *("--host", "127.0.0.1", "--cores", str(cores), "--memory", "1g"),
                *("--work-dir", str(work), "--webui-port", str(_free_port())),
                f"spark://127.0.0.1:{port}",
            )
        yield f"spark://127.0.0.1:{port}"
    finally:
        for process in reversed(started):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in started:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


# --- Every Spark mode, through one fixture. ---

MODES = ("local", "local-cluster", "standalone", "connect")


@pytest.fixture(params=MODES)
def spark_mode(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[Callable[[str, Path], str]]:
    """Runs a program with `spark` in each mode, two slots each: `spark_mode(body, folder)` gives what it printed.

    Locally it is the shared session; each other mode has a process of its own, because a process has one session.
    """
    mode: str = request.param
    if mode == "local":
        session = request.getfixturevalue("spark")
        yield lambda body, folder: run_here(session, body, folder)
    elif mode == "standalone":
        with standalone_cluster(tmp_path) as master:
            conf = {"spark.executor.memory": "512m"}
            yield lambda body, folder: run_on(
                master, _with_folder(body, folder), tmp_path, conf=conf, timeout_s=600
            )
    else:
        yield lambda body, folder: run_on(
            "local-cluster[2,1,1024]",
            _with_folder(body, folder),
            tmp_path,
            remote=mode == "connect",
            timeout_s=600,
        )


def run_here(session: SparkSession, body: str, folder: Path) -> str:
    """Run a program in this process with a session; returns what it printed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(_with_folder(body, folder), {"__name__": "__main__", "spark": session})  # noqa: S102
    return printed.getvalue()


def _with_folder(body: str, folder: Path) -> str:
    return f"FOLDER = {str(folder)!r}\n{textwrap.dedent(body)}"
