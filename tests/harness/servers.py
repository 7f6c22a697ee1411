"""Servers of stores on loopback, and a connection to them that can be cut."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.harness.processes import free_port, wait_for_port

# Tests search for these in all outputs of a fit.
SECRET = "sw0rdfish-that-no-one-may-read"


@dataclass(frozen=True)
class S3:
    """A server for S3 with one bucket.

    Attributes:
        port: on loopback.
        bucket: its name.
    """

    port: int
    bucket: str = "bucket"

    def options(self, port: int | None = None) -> dict[str, Any]:
        """Return storage options of a store there. Give `port` if another port leads to it."""
        return {
            "access_key": "AKIASPARKHVD",
            "secret_key": SECRET,
            "endpoint_override": f"127.0.0.1:{port or self.port}",
            "scheme": "http",
            "region": "us-east-1",
        }


@contextlib.contextmanager
def started(directory: Path, name: str, *command: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server as a separate process."""
    with (directory / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=directory, stdout=log, stderr=subprocess.STDOUT, env=dict(os.environ)
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    """moto's server: a real protocol with objects in memory."""
    import pyarrow.fs as pafs

    directory = tmp_path_factory.mktemp("s3")
    server = S3(free_port())
    command = (sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(server.port))
    with started(directory, "moto", *command) as process:
        wait_for_port(server.port, process, directory / "moto.log")
        filesystem = pafs.S3FileSystem(**server.options(), allow_bucket_creation=True)
        filesystem.create_dir(server.bucket)
        yield server


FTP = """
import sys
from pyftpdlib.authorizers import DummyAuthorizer
from pyftpdlib.handlers import FTPHandler
from pyftpdlib.servers import ThreadedFTPServer

users = DummyAuthorizer()
users.add_user("user", sys.argv[3], sys.argv[1], perm="elradfmwMT")
FTPHandler.authorizer = users
ThreadedFTPServer(("127.0.0.1", int(sys.argv[2])), FTPHandler).serve_forever()
"""


@pytest.fixture
def ftp(tmp_path: Path) -> Iterator[str]:
    """An FTP server over a folder: the URL of its root, with user and password."""
    folder = tmp_path / "ftp"
    folder.mkdir()
    port = free_port()
    with started(
        tmp_path, "ftp", sys.executable, "-c", FTP, str(folder), str(port), SECRET
    ) as process:
        wait_for_port(port, process, tmp_path / "ftp.log")
        yield f"ftp://user:{SECRET}@127.0.0.1:{port}"


@dataclass
class Cable:
    """Forwards its own port to another port until it is cut."""

    to: int
    listener: socket.socket = field(default_factory=lambda: socket.create_server(("127.0.0.1", 0)))
    ends: list[socket.socket] = field(default_factory=list)
    is_cut: bool = False

    def __post_init__(self) -> None:
        # Where clients connect.
        self.port: int = self.listener.getsockname()[1]

    def serve(self) -> None:
        """Accept and forward. Returns when the cable is cut."""
        while True:
            try:
                here, _ = self.listener.accept()
                there = socket.create_connection(("127.0.0.1", self.to))
            except OSError:
                return
            self.ends += [here, there]
            if self.is_cut:  # while this one was accepted
                self.cut()
                return
            threading.Thread(target=_forward, args=(here, there), daemon=True).start()

    def cut(self) -> None:
        """Refuse connections from now on, and close the open ones."""
        self.is_cut = True
        for end in [self.listener, *self.ends]:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


def _forward(one: socket.socket, other: socket.socket) -> None:
    with selectors.DefaultSelector() as selector, contextlib.suppress(OSError, ValueError):
        for source, sink in ((one, other), (other, one)):
            selector.register(source, selectors.EVENT_READ, sink)
        while True:
            for key, _ in selector.select():
                source = key.fileobj
                assert isinstance(source, socket.socket)
                data = source.recv(1 << 16)
                if not data:
                    one.close()
                    other.close()
                    return
                key.data.sendall(data)


@contextlib.contextmanager
def cable(to: int) -> Iterator[Cable]:
    """Make a connection to a port of this host that can be cut."""
    made = Cable(to)
    thread = threading.Thread(target=made.serve, daemon=True)
    thread.start()
    try:
        yield made
    finally:
        made.cut()
        thread.join(10)
