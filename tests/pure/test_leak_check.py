"""The police see what a test leaves behind, and nothing else."""

from __future__ import annotations

import os
import socket
import threading

import pytest

from tests.conftest import belongings


def test_police_see_sockets_memory_files_threads_and_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = belongings()
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="sparkhvd-test")
    thread.start()
    memory = os.memfd_create("sparkhvd-test")
    monkeypatch.setenv("SPARKHVD_SPIN_US", "1")
    with socket.socket():
        found = belongings().beyond(before, sockets=True)
        assert len(belongings().beyond(before, sockets=False)) == len(found) - 1
    stop.set()
    thread.join()
    os.close(memory)
    monkeypatch.undo()
    assert [entry.split()[0] for entry in found] == [
        "thread",
        "descriptor",
        "descriptor",
        "environment",
    ]
    assert not belongings().beyond(before, sockets=True)


def test_police_ignore_files_and_foreign_threads() -> None:
    before = belongings()
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="somebody-else")
    thread.start()
    with open("/dev/null"):
        assert not belongings().beyond(before, sockets=True)
    stop.set()
    thread.join()
