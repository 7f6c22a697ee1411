"""Fixtures of tests that share one standalone cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.harness.cluster import Cluster, Unseen, hiding, run_client, shared_cluster
from tests.harness.spark import connect_server, run_on, with_folder


@pytest.fixture(scope="package")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A standalone cluster whose driver also serves Spark Connect."""
    # A setting that changes no result, for a test of the conf.
    with shared_cluster(tmp_path_factory.mktemp("cluster"), {"spark.sparkhvd.spin_us": "9"}) as one:
        yield one


@pytest.fixture(scope="package")
def unseen_store(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Unseen]:
    """A Connect server whose clients do not see a folder."""
    directory = tmp_path_factory.mktemp("unseen")
    folder = directory / "folder"
    folder.mkdir()
    if hiding(folder) is not None:
        cluster: Cluster = request.getfixturevalue("cluster")
        yield Unseen(cluster.remote, folder, cluster.printed)
        return
    # The folder is below the working directory, which the executors of a cluster do not share.
    with connect_server(directory / "server") as remote:
        log = directory / "server" / "server.log"
        yield Unseen(remote, folder, lambda: log.read_text(errors="replace"))


_LOCAL_CLUSTER = "local-cluster[2,1,1024]"


@pytest.fixture(
    params=["standalone", "connect", "local-cluster", "connect-local-cluster", "connect-unseen"]
)
def spark_mode(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str, Path], str]:
    """Run a program with `spark` in each mode, with two slots each: `spark_mode(body, folder)` returns its output.

    Programs of local-cluster have their own process. Over Connect it is also the server.
    """
    mode: str = request.param
    if mode == "connect-unseen":
        unseen: Unseen = request.getfixturevalue("unseen_store")
        return lambda body, folder: unseen.run(body, tmp_path)
    if mode.endswith("local-cluster"):
        remote = mode.startswith("connect")
        return lambda body, folder: run_on(
            _LOCAL_CLUSTER, with_folder(body, folder), tmp_path, remote=remote, timeout_s=600
        )
    cluster: Cluster = request.getfixturevalue("cluster")
    if mode == "connect":
        return lambda body, folder: run_client(
            cluster.remote, with_folder(body, folder), tmp_path, timeout_s=600
        )
    return lambda body, folder: cluster.run(with_folder(body, folder), timeout_s=600)
