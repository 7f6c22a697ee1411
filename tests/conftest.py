"""Fixtures and hooks of every test: the leak check, markers of tiers, a folder for temporary files.

The leak check compares threads, descriptors and environment before and after each test. Function-scoped autouse
fixtures start after session-scoped ones, so a shared Spark session is part of "before".
"""

from __future__ import annotations

import functools
import gc
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from sparkhvd.runner import zygote_client

# Every harness module is a plugin, so its fixtures are known everywhere. Some import others, so all are registered first.
pytest.register_assert_rewrite("tests.harness")
HARNESS = sorted(
    f"tests.harness.{path.stem}"
    for path in (Path(__file__).parent / "harness").glob("*.py")
    if path.stem != "__init__"
)

# Seconds that a test's leftovers may take to end: a thread that was asked to stop needs a moment, and so does a garbage
# collection on a busy machine (it frees the engines of ranks that were threads).
SETTLE_S = 10.0
# Limit of a test's call on an idle machine, outside of tiers whose tests start JVMs or other environments.
LONG_S = 10.0
LONG_TIERS = ("spark", "soak")
MANY_MODULES = 100
SLOW_COLLECTION_S = 0.05
# Variables that pytest, the JVM gateway, MLflow or BLAS set by themselves.
FOREIGN_VARIABLES = (
    "PYTEST_",
    "PYSPARK_",
    "SPARK_",
    "KMP_",
    "TORCHINDUCTOR_",
    "_TORCHINDUCTOR_",
    "MLFLOW_",
    "_MLFLOW_",
)


# What tests need. Each module has one of these markers: `pytestmark = pytest.mark.pure`.
TIERS = {
    "pure": "one process, and no rank in it",
    "ranks": "ranks that are threads of the test's process",
    "processes": "processes, sockets and servers",
    "spark": "Spark sessions",
    "soak": "long; `make soak` runs it. With an argument: where its behaviour is tested on every run",
}
# Collected only by name, `pytest tests/soak/mpi`: these tests need other environments.
collect_ignore = ["soak"]


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    # The process that only distributes tests would import torch for seconds before the others begin.
    if os.environ.get("PYTEST_XDIST_WORKER") or not config.getoption("numprocesses", None):
        for name in HARNESS:
            config.pluginmanager.import_plugin(name)
    for tier, meaning in TIERS.items():
        config.addinivalue_line("markers", f"{tier}: {meaning}")
    config.addinivalue_line(
        "markers", "leaks(reason): the leak check lets this test leave resources behind"
    )
    # A shell's background job ignores it, and so would the processes that tests start.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Test files run in parallel. Each process has its own temporary files, because some tests count them.
    if worker := os.environ.get("PYTEST_XDIST_WORKER"):
        os.environ["TMPDIR"] = tempfile.mkdtemp(prefix=f"{worker}-")
        os.chmod(os.environ["TMPDIR"], 0o1777)  # like /tmp, for tests about other users
        tempfile.tempdir = None
        config.add_cleanup(
            functools.partial(shutil.rmtree, os.environ["TMPDIR"], ignore_errors=True)
        )


def tiers(module: pytest.Module) -> list[str]:
    """Return the tiers of a collected module."""
    return [mark.name for mark in module.own_markers if mark.name in TIERS]


def tier(item: pytest.Item) -> str:
    """Return the tier of a test."""
    module = item.getparent(pytest.Module)
    assert module is not None
    return tiers(module)[0]


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Fail a module without a tier, or with several."""
    report = yield
    if isinstance(collector, pytest.Module) and report.passed and len(tiers(collector)) != 1:
        report.outcome, report.result = "failed", []
        report.longrepr = (
            f"{collector.nodeid} has {' and '.join(tiers(collector)) or 'no tier'}. Give it one, behind its imports:\n"
            + "\n".join(f"pytestmark = pytest.mark.{name}  # {TIERS[name]}" for name in TIERS)
        )
    return report


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order tests by their tiers, without those of `make soak`."""
    from tests.harness.soak import SOAK  # a plugin, which must be registered first

    # The longest tests start whole clusters. They run first, because at the end the other workers would wait for them. The other
    # Spark tests follow, all on one worker, because each worker with Spark tests starts its own session.
    order = list(reversed(TIERS))
    items.sort(key=lambda item: ("cluster" not in item.path.parts, order.index(tier(item))))
    if SOAK:
        return
    left_out = [
        item
        for item in items
        if (marker := item.get_closest_marker("soak")) is not None and marker.args
    ]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


class Lasting:
    """Objects that stay until the end, excluded from later garbage collections, because the leak check has many.

    These are objects of the test collection, of imports (torch's compiler alone makes a collection take half a second), and of
    tests that keep them, such as the syntax trees of all sources.
    """

    def __init__(self) -> None:
        self._num_modules = 0
        self._are_many = False

    def collect(self) -> None:
        """Collect garbage, and note whether the permanent objects make it slow."""
        begin = time.thread_time()
        gc.collect()
        self._are_many = time.thread_time() - begin > SLOW_COLLECTION_S

    def freeze(self) -> None:
        """Freeze all objects if collections are slow or many modules were imported. No object may be about to be freed."""
        if self._are_many or len(sys.modules) > self._num_modules + MANY_MODULES:
            gc.collect()
            gc.freeze()
            self._num_modules = len(sys.modules)
            self._are_many = False


LASTING = Lasting()


def pytest_collection_finish() -> None:
    """Freeze the objects of the test collection, and let torch compute on the thread that calls it.

    Otherwise each rank that is a thread would have a team of spinning threads, which would only wait for each other.
    """
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
    LASTING.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Warn of long tests outside of Spark's tiers. A sweep belongs to `make soak`, and a start to a fixture of the module."""
    from tests.harness.soak import SOAK  # a plugin, which must be registered first

    reports = [
        report
        for outcome in ("passed", "failed")
        for report in terminalreporter.stats.get(outcome, [])
        if report.when == "call" and report.duration > LONG_S
    ]
    for report in sorted(reports, key=lambda report: report.duration, reverse=True):
        if not SOAK and not any(name in report.keywords for name in LONG_TIERS):
            terminalreporter.write_line(
                f"Warning: {report.nodeid} took {report.duration:.1f} s; a test that is not of "
                f"{' or '.join(LONG_TIERS)} has at most {LONG_S:g} s.",
                yellow=True,
            )


@dataclass(frozen=True)
class Resources:
    """Resources that a test could leave behind."""

    threads: frozenset[str]
    descriptors: frozenset[str]
    environment: frozenset[tuple[str, str]]

    def beyond(self, before: Resources, *, sockets: bool) -> list[str]:
        """Describe the resources that did not exist before."""
        descriptors = self.descriptors - before.descriptors
        if not sockets:
            descriptors = frozenset(d for d in descriptors if "socket:" not in d)
        leaks = [f"thread {name}" for name in sorted(self.threads - before.threads)]
        leaks += [f"descriptor {name}" for name in sorted(descriptors)]
        leaks += [
            f"environment {name}" for name, _ in sorted(self.environment ^ before.environment)
        ]
        return leaks


def resources() -> Resources:
    """Return our threads (Python and native), sockets, memory files and event descriptors, and the environment."""
    threads = {
        f"{t.name} ({t.ident})" for t in threading.enumerate() if t.name.startswith("sparkhvd")
    }
    for task in Path("/proc/self/task").iterdir():
        try:
            name = (task / "comm").read_text().strip()
        except OSError:  # ended meanwhile
            continue
        # Threads inherit the name of their creator; the main thread of a tool may have any name.
        if name.startswith("sparkhvd") and int(task.name) != os.getpid():
            threads.add(f"{name} (native {task.name})")
    descriptors = set()
    kept = str(zygote_client.of_this_process.descriptor())  # kept for later launches
    for entry in os.listdir("/proc/self/fd"):
        if entry == kept:
            continue
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:  # the listing's own descriptor
            continue
        if target.startswith(("socket:", "/memfd:sparkhvd", "anon_inode:[pidfd]")):
            descriptors.add(f"{entry} -> {target}")
        elif target.startswith("anon_inode:[event"):  # eventfd, eventpoll
            descriptors.add(f"{entry} -> {target} (socket: or loop of its owner)")
    environment = frozenset(
        (name, value)
        for name, value in os.environ.items()
        if not name.startswith(FOREIGN_VARIABLES)
    )
    return Resources(frozenset(threads), frozenset(descriptors), environment)


@pytest.fixture(autouse=True)
def leak_check(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves threads of ours, descriptors or environment variables behind."""
    before = resources()
    yield
    if request.node.get_closest_marker("leaks"):
        return
    from tests.harness.descriptors import gateway_port  # a plugin, which must be registered first

    # The JVM gateway may open sockets at any time, also in later tests, when Java objects are collected.
    uses_spark = (
        gateway_port() is not None
        or request.node.get_closest_marker("spark") is not None
        or request.node.get_closest_marker("soak") is not None
        or any("spark" in name or "cluster" in name for name in request.fixturenames)
    )
    deadline = time.monotonic() + SETTLE_S
    pause_s = 0.001  # a collection is usually enough
    while leaks := resources().beyond(before, sockets=not uses_spark):
        if time.monotonic() > deadline:
            pytest.fail("The test left behind: " + "; ".join(leaks))
        LASTING.collect()  # may take seconds on a busy machine, so the resources are read once more after it
        time.sleep(pause_s)
        pause_s = 0.02
    LASTING.freeze()
