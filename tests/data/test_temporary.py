"""Temporary folders are deleted with their process, even a killed one. Folders of living processes stay."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from sparkhvd.data.store.temporary import TemporaryFolders

pytestmark = [pytest.mark.processes, pytest.mark.timeout(60)]
CODE = """
import os, sys
from sparkhvd.data.store.temporary import TemporaryFolders
folders = TemporaryFolders()
folder = folders.folder("app")
open(folder + "/weights", "w").close()
print(folder, flush=True)
if os.fork() == 0:
    sys.exit()
os.wait()
print(os.path.exists(folder + "/weights"), flush=True)
if sys.stdin.read():
    folders.keep(folder, ("runs",))
    os.mkdir(folder + "/runs")
    os.mkdir(folder + "/data")
"""


def start(folder: Path) -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", CODE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(folder)},
    )
    assert process.stdout is not None
    place = Path(process.stdout.readline().strip())
    assert process.stdout.readline() == "True\n"  # a forked child that has ended deletes nothing
    assert place.stat().st_mode & 0o777 == 0o700
    return process, place


def test_only_temporary_folders_of_ended_processes_are_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed, living, ended, kept = (start(tmp_path) for _ in range(4))
    foreign = tmp_path / "sparkhvd-store-without-owner"
    foreign.mkdir()
    try:
        ended[0].communicate()
        assert not ended[1].exists()
        kept[0].communicate("keep")
        for sent in (signal.SIGTERM, signal.SIGKILL):
            killed[0].send_signal(sent)
            killed[0].wait(30)
            assert killed[1].exists()
            monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
            folders = TemporaryFolders()
            own = Path(folders.folder("a"))
            assert folders.folder("a") == str(own) != folders.folder("b")
            assert not killed[1].exists()
            assert (living[1] / "weights").exists()
            assert own.exists()
            assert foreign.exists()
            assert [each.name for each in kept[1].iterdir()] == ["runs"]
            killed = start(tmp_path)
    finally:
        for process, _ in (killed, living, ended, kept):
            process.kill()
            process.communicate()
