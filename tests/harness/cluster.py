"""A standalone cluster that tests share: programs of its driver, and of Spark Connect clients of the same application.

The start of its six JVMs takes longer than most tests there.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.harness.paths import ROOT
from tests.harness.processes import free_port, wait_for_port
from tests.harness.spark import CONF, run_on, standalone_cluster, with_folder, write_script
from tests.harness.waiting import wait_until

# Runs one program after the other in `__main__`, like a user's script, so that functions are pickled by value.
_DRIVER = """
import __main__, traceback

for line in sys.stdin:
    program, reply = json.loads(line)
    ended = "ok"
    try:
        with open(program) as file:
            text = file.read()
        exec(compile(text, program, "exec"), vars(__main__))
    except BaseException:
        traceback.print_exc()
        ended = "failed"
    sys.stderr.flush()
    with open(reply + ".part", "w") as file:
        file.write(ended)
    os.rename(reply + ".part", reply)
"""

# The driver logs as much as Spark's servers, with plans. By default, a pyspark driver logs only warnings.
_LOGGING = """
rootLogger.level = info
rootLogger.appenderRef.stdout.ref = console
appender.console.type = Console
appender.console.name = console
appender.console.target = SYSTEM_ERR
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{HH:mm:ss} %p %c{1}: %m%n%ex
logger.driver.name = org.apache.spark.api.python.PythonGatewayServer
logger.driver.level = info
"""


@dataclass(frozen=True)
class Cluster:
    """Two executors with a slot each, beside a driver that runs programs and is a Spark Connect server.

    Attributes:
        remote: address of the Connect server.
        directory: of the logs.
        driver: the driver's process, which reads programs from its standard input.
    """

    remote: str
    directory: Path
    driver: subprocess.Popen[bytes]

    @property
    def log(self) -> Path:
        """Output of the driver, its JVM and its programs."""
        return self.directory / "driver.log"

    def printed(self) -> str:
        """Return the output of all processes so far."""
        logs = [self.log, *self.directory.glob("worker-*/app-*/*/std*")]
        return "\n".join(log.read_text(errors="replace") for log in logs)

    def run(self, body: str, timeout_s: float = 250) -> str:
        """Run `body` in the driver with its classic session `spark`, and return what it printed, or fail with it."""
        number = len(list(self.directory.glob("program-*.py")))
        program = self.directory / f"program-{number}.py"
        reply = self.directory / f"reply-{number}"
        program.write_text(textwrap.dedent(body))
        before = self.log.stat().st_size
        assert self.driver.stdin is not None
        self.driver.stdin.write(json.dumps([str(program), str(reply)]).encode() + b"\n")
        self.driver.stdin.flush()
        with contextlib.suppress(AssertionError):  # the output says more
            wait_until(
                lambda: reply.exists() or self.driver.poll() is not None,
                "the program ends",
                within_s=timeout_s,
            )
        with self.log.open("rb") as log:
            log.seek(before)
            output = log.read().decode(errors="replace")
        ended = reply.read_text() if reply.exists() else f"no end within {timeout_s} s"
        assert ended == "ok", f"{ended}:\n{output}"
        return output


def run_client(
    remote: str,
    body: str,
    directory: Path,
    *,
    conf: Mapping[str, str] | None = None,
    prefix: Sequence[str] = (),
    timeout_s: float = 250,
) -> str:
    """Run `body` with `spark` in a fresh client of a Connect server, and return its output, or fail with it."""
    return run_on(
        remote,
        body,
        directory,
        remote=True,
        conf={**dict.fromkeys(CONF), **(conf or {})},
        timeout_s=timeout_s,
        prefix=prefix,
    )


@contextlib.contextmanager
def shared_cluster(directory: Path, conf: Mapping[str, str]) -> Iterator[Cluster]:
    """Start a standalone cluster with two workers on loopback, and the driver of an application with this conf."""
    port = free_port()
    with standalone_cluster(directory) as master:
        merged = {
            "spark.executor.memory": "512m",
            "spark.plugins": "org.apache.spark.sql.connect.SparkConnectPlugin",
            "spark.connect.grpc.binding.address": "127.0.0.1",
            "spark.connect.grpc.binding.port": str(port),
            **conf,
        }
        script = write_script(directory / "driver.py", _DRIVER, master=master, conf=merged)
        logging = directory / "log4j2.properties"
        logging.write_text(_LOGGING)
        options = f"{os.environ['SPARK_SUBMIT_OPTS']} -Dlog4j2.configurationFile={logging.as_uri()}"
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        with (directory / "driver.log").open("wb") as log:
            driver = subprocess.Popen(
                [sys.executable, str(script)],
                cwd=directory,
                env={
                    **os.environ,
                    "PYTHONPATH": path,
                    "PYTHONUNBUFFERED": "1",
                    "SPARK_SUBMIT_OPTS": options,
                },
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            wait_for_port(port, driver, directory / "driver.log")
            yield Cluster(f"sc://127.0.0.1:{port}", directory, driver)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(driver.pid, signal.SIGKILL)
            driver.wait()
            assert driver.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                driver.stdin.close()


# A folder with the same name for every process, but different contents.
OWN_FOLDER = Path("/proc/self/cwd")


def hiding(folder: Path) -> list[str] | None:
    """Return the prefix of a command for which a folder is another, empty one, or None if this user may not mount."""
    flags = "-m" if os.geteuid() == 0 else "-rm"
    mount = 'mount -t tmpfs none "$0" && exec "$@"'
    prefix = ["unshare", flags, "sh", "-c", mount, str(folder)]
    try:
        probe = subprocess.run([*prefix, "true"], capture_output=True, check=False)
    except FileNotFoundError:
        return None
    return prefix if probe.returncode == 0 else None


@dataclass(frozen=True)
class Unseen:
    """A Spark Connect server, and a folder that its executors see and its clients do not.

    Attributes:
        remote: address of the server.
        folder: as the executors see it.
        printed: returns the output of the server and its executors so far, with plans.
    """

    remote: str
    folder: Path
    printed: Callable[[], str]

    def run(self, body: str, directory: Path, timeout_s: float = 600) -> str:
        """Run a client whose FOLDER is not the server's of the same name, and return what it printed.

        The client is in its own mount namespace or, if that is not allowed, names a folder below its working
        directory.
        """
        client = directory / f"client-{len(list(directory.iterdir()))}"
        client.mkdir()
        prefix = hiding(self.folder)
        folder = OWN_FOLDER if prefix is None else self.folder
        # Nothing of that name was made silently.
        after = (
            "assert [n for n in os.listdir(FOLDER) if n != 'script.py'] == [], os.listdir(FOLDER)\n"
        )
        return run_client(
            self.remote,
            f"{with_folder(body, folder)}\n{after}",
            client,
            prefix=prefix or (),
            timeout_s=timeout_s,
        )
