"""Real Spark for tests: one shared `local[2]` session, and scripts under any other master.

A process has one classic session for its whole life, so everything that needs another master (local-cluster,
standalone, Connect) runs as a script in a fresh process: `run_script`.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.harness import jvm, warm_daemon
from tests.harness.paths import ROOT
from tests.harness.processes import TAG, TAG_VARIABLE, free_port, wait_for_port
from tests.harness.waiting import wait_until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.harness.netns import Host

# Set when the plugin loads, before any JVM starts: the JVM, its Python workers and the trainers inherit it.
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
for _variable, _options in jvm.environment().items():
    os.environ.setdefault(_variable, _options)
os.environ[TAG_VARIABLE] = TAG

CONF = {
    "spark.ui.enabled": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "1g",
    # Smaller than the results of some ranks.
    "spark.driver.maxResultSize": "4m",
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
    if Path.cwd() == ROOT:  # where the JVM starts a daemon that is a module of this checkout
        builder = builder.config("spark.python.daemon.module", warm_daemon.MODULE)
    warehouse = tmp_path_factory.mktemp("warehouse")
    session = builder.config("spark.sql.warehouse.dir", str(warehouse)).getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()


_PREAMBLE = """
import json, os, sys, time
from pyspark.sql import SparkSession

# A line is one write: the JVM may write to the same pipe.
sys.stdout.reconfigure(write_through=False, line_buffering=True)

def make_session():
    builder = SparkSession.builder.appName("sparkhvd-script")
    if {remote!r}:
        builder = builder.remote({master!r})
        if not {master!r}.startswith("sc://"):
            any_port(builder)
    else:
        builder = builder.master({master!r})
    for key, value in {conf!r}.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()

def any_port(builder):
    # The server that pyspark starts in this process takes a free port, and its client asks which: two tests at once
    # would meet at 15002. (pyspark does so by itself under SPARK_TESTING, which changes other things too.)
    from pyspark.sql.connect.client.core import DefaultChannelBuilder
    from pyspark.sql.session import SparkSession as Classic

    def port():
        service = "org.apache.spark.sql.connect.service.SparkConnectService$"
        return getattr(getattr(Classic._instantiatedSession._jvm, service), "MODULE$").localPort()

    builder.config("spark.connect.grpc.binding.port", "0")
    DefaultChannelBuilder.default_port = staticmethod(port)

if __name__ == "__main__":
    spark = make_session()
"""


@dataclass(frozen=True)
class ScriptResult:
    """Exit status and output (both streams, in order) of a script."""

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
    """Write a script whose `spark` is a session on `master`; `body` is the text after it.

    `body` runs at the top level of `__main__`, so its functions are pickled by value, as in a user's script. A `conf` value of
    None omits the tests' own value.
    """
    merged = {key: value for key, value in {**CONF, **(conf or {})}.items() if value is not None}
    preamble = _PREAMBLE.format(master=master, remote=remote, conf=merged)
    path.write_text(preamble + textwrap.dedent(body))
    return path


@contextlib.contextmanager
def started_script(
    path: Path,
    *args: str,
    env: dict[str, str] | None = None,
    prefix: Sequence[str] = (),
    python: Sequence[str] = (sys.executable,),
) -> Iterator[subprocess.Popen[str]]:
    """Run a script as its own process group with this checkout on its path. Ends the group on exit."""
    environ = {**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})}
    environ = {name: value for name, value in environ.items() if value}
    environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(ROOT), environ.get("PYTHONPATH", "")])
    )
    process = subprocess.Popen(
        [*prefix, *python, str(path), *args],
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
    path: Path,
    *args: str,
    env: dict[str, str] | None = None,
    timeout_s: float = 250,
    prefix: Sequence[str] = (),
) -> ScriptResult:
    """Run a script to its end. After `timeout_s` it is killed, and the test fails with its output."""
    began = time.monotonic()
    with started_script(path, *args, env=env, prefix=prefix) as process:
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
    timeout_s: float = 250,
    prefix: Sequence[str] = (),
) -> str:
    """Run `body` with `spark` on `master` in a fresh process, and return its output, or fail with it."""
    script = write_script(directory / "script.py", body, master=master, remote=remote, conf=conf)
    result = run_script(script, env=env, timeout_s=timeout_s, prefix=prefix)
    assert result.returncode == 0, f"exit {result.returncode}:\n{result.output}"
    return result.output


def _start_daemon(
    directory: Path, name: str, *command: str, on: Host | None = None
) -> subprocess.Popen[bytes]:
    """Start a Spark server in its own process group. Its log is `name`.log."""
    import pyspark

    home = Path(pyspark.__file__).parent
    words = [str(home / "bin" / "spark-class"), *command]
    place = {} if on is None else {"SPARK_LOCAL_IP": on.address}
    with (directory / f"{name}.log").open("wb") as log:
        return subprocess.Popen(
            words if on is None else on.command(*words),
            cwd=directory,
            env={**os.environ, "SPARK_HOME": str(home), "PYTHONPATH": str(ROOT), **place},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def start_worker(
    directory: Path,
    name: str,
    master: str,
    *,
    cores: int = 1,
    host: str = "127.0.0.1",
    on: Host | None = None,
) -> subprocess.Popen[bytes]:
    """Start a worker of a standalone cluster. Its executors are in its process group."""
    work = directory / name
    work.mkdir()
    return _start_daemon(
        directory,
        name,
        *("org.apache.spark.deploy.worker.Worker", "--host", host),
        *("--cores", str(cores), "--memory", "1g"),
        *("--work-dir", str(work), "--webui-port", "0"),
        master,
        on=on,
    )


@contextlib.contextmanager
def standalone_cluster(
    directory: Path, *, workers: int = 2, cores: int = 1, are_hosts: bool = False
) -> Iterator[str]:
    """Start a standalone master and its workers on loopback, and yield the master's `spark://` address.

    With `are_hosts` every worker has its own address, so that Spark treats them as different hosts.
    """
    port = free_port()
    started: list[subprocess.Popen[bytes]] = []
    try:
        master = _start_daemon(
            directory,
            "master",
            "org.apache.spark.deploy.master.Master",
            *("--host", "127.0.0.1", "--port", str(port), "--webui-port", "0"),
        )
        started.append(master)
        wait_for_port(port, master, directory / "master.log")
        address = f"spark://127.0.0.1:{port}"
        for index in range(workers):
            host = f"127.0.0.{1 + index * are_hosts}"
            name = f"worker-{index}"
            started.append(start_worker(directory, name, address, cores=cores, host=host))
        yield address
    finally:
        _end_daemons(started)


def _end_daemons(started: list[subprocess.Popen[bytes]]) -> None:
    for process in reversed(started):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
    for process in started:
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextlib.contextmanager
def cluster_of_hosts(directory: Path, hosts: Sequence[Host]) -> Iterator[str]:
    """Start a standalone master on the first host and a worker on each, and yield the master's `spark://` address."""
    port = 7077  # no other process has it: the hosts are new
    started: list[subprocess.Popen[bytes]] = []
    first = hosts[0]
    try:
        words = ["org.apache.spark.deploy.master.Master", "--host", first.address]
        words += ["--port", str(port), "--webui-port", "0"]
        started.append(_start_daemon(directory, "master", *words, on=first))
        log = directory / "master.log"
        wait_until(
            lambda: "I have been elected leader" in log.read_text(), "a master", within_s=150
        )
        address = f"spark://{first.address}:{port}"
        for index, host in enumerate(hosts):
            name = f"worker-{index}"
            started.append(start_worker(directory, name, address, host=host.address, on=host))
        yield address
    finally:
        _end_daemons(started)


@contextlib.contextmanager
def connect_server(directory: Path, master: str = "local[2]") -> Iterator[str]:
    """Start a Spark Connect server on loopback, with `directory` as its working directory; yields its address."""
    import pyspark

    directory.mkdir(parents=True)
    home = Path(pyspark.__file__).parent
    environ = {**os.environ, "SPARK_HOME": str(home), "PYTHONPATH": str(ROOT)}
    port = free_port()
    conf = {**CONF, "spark.connect.grpc.binding.address": "127.0.0.1"}
    conf["spark.connect.grpc.binding.port"] = str(port)
    log = directory / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                str(home / "bin" / "spark-submit"),
                *("--class", "org.apache.spark.sql.connect.service.SparkConnectServer"),
                *("--master", master),
                *(word for item in conf.items() for word in ("--conf", "=".join(item))),
                "spark-internal",
            ],
            cwd=directory,
            env=environ,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_for_port(port, process, log)
        yield f"sc://127.0.0.1:{port}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def run_here(session: SparkSession, body: str, folder: Path) -> str:
    """Run a program in this process with a session, and return its output."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(with_folder(body, folder), {"__name__": "__main__", "spark": session})  # noqa: S102
    return printed.getvalue()


def with_folder(body: str, folder: Path) -> str:
    return f"FOLDER = {str(folder)!r}\n{textwrap.dedent(body)}"
