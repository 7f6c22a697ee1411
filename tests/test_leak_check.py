"""The leak check finds the resources that a test leaves behind, and nothing else."""

from __future__ import annotations

import os
import socket
import threading

import pytest

from tests.conftest import resources

pytestmark = pytest.mark.pure


def test_leak_check_finds_sockets_memory_files_threads_and_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = resources()
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="sparkhvd-test")
    thread.start()
    memory = os.memfd_create("sparkhvd-test")
    monkeypatch.setenv("SPARKHVD_SPIN_US", "1")
    with socket.socket():
        leaks = resources().beyond(before, sockets=True)
        assert len(resources().beyond(before, sockets=False)) == len(leaks) - 1
    stop.set()
    thread.join()
    os.close(memory)
    monkeypatch.undo()
    assert [entry.split()[0] for entry in leaks] == [
        "thread",
        "descriptor",
        "descriptor",
        "environment",
    ]
    assert not resources().beyond(before, sockets=True)


def test_leak_check_ignores_files_and_foreign_threads() -> None:
    before = resources()
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="somebody-else")
    thread.start()
    with open("/dev/null"):
        assert not resources().beyond(before, sockets=True)
    stop.set()
    thread.join()
