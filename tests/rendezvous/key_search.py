"""Search for a running job's key in forbidden places, by one of its ranks."""

from __future__ import annotations

import base64
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.harness.meeting import meet


def forms_of(key: bytes) -> list[bytes]:
    """Return the forms in which the key could be written."""
    text = key.hex()
    return [
        key,
        text.encode(),
        text.upper().encode(),
        base64.b64encode(key).rstrip(b"="),
        base64.urlsafe_b64encode(key).rstrip(b"="),
        repr(key)[2:-1].encode(),
    ]


def places_in_proc(key: bytes) -> tuple[list[str], int]:
    """Return command lines and environments that contain the key, and the number of readable ones."""
    found, read = [], 0
    for entry in Path("/proc").iterdir():
        for name in ("cmdline", "environ"):
            try:
                data = (entry / name).read_bytes() if entry.name.isdigit() else b""
            except OSError:  # gone, or another user's
                continue
            read += bool(data)
            if any(form in data for form in forms_of(key)):
                found.append(f"{entry / name}: {data[:200]!r}")
    return found, read


def hunt() -> dict[str, Any]:
    """Search while every rank is alive. Return the places, and the reversed key for the search in the logs."""
    from sparkhvd.rendezvous import SocketRendezvous, current_rendezvous

    meeting = current_rendezvous()
    assert isinstance(meeting, SocketRendezvous)
    key = meeting.job.key
    engine = meet()
    print("a rank with a key prints", meeting.job, meeting, vars(meeting.settings.__class__).keys())
    # A key in a forbidden place is found there.
    bait = secrets.token_bytes(32)
    command = [sys.executable, "-c", "print(flush=True); input()", bait.hex()]
    code = base64.b64encode(bait).decode()
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env={"X": code}, **pipes) as child:
        assert child.stdout is not None
        child.stdout.readline()  # until it runs, the kernel may not show its arguments yet
        baits, _ = places_in_proc(bait)
        child.kill()
    found, read = places_in_proc(key)
    engine.barrier(name="until all have looked").wait()
    engine.shutdown()
    return {"found": found, "read": read, "baits": len(baits), "yek": key.hex()[::-1]}


def check(reports: list[dict[str, Any]]) -> bytes:
    """Check the ranks' reports and return the key."""
    keys = {report["yek"][::-1] for report in reports}
    assert len(keys) == 1
    for report in reports:
        assert report["baits"] == 2, "the search itself finds nothing"
        assert report["read"] > 4
        assert report["found"] == []
    return bytes.fromhex(keys.pop())
