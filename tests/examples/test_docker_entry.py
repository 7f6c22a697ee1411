"""The entry script of the images in examples/docker, without a container engine."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from sparkhvd.launchers.gather import key_from_file
from tests.harness.paths import ROOT
from tests.harness.waiting import wait_until

pytestmark = pytest.mark.processes

ENTRY = str(ROOT / "examples" / "docker" / "entry.sh")
SHOW = 'echo "$$ ${RANK:-none} ${LOCAL_RANK:-none} ${SPARKHVD_JOB_KEY_FILE:-none}"; exit 3'


def run(tmp_path: Path, **variables: str) -> list[str]:
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "TMPDIR": str(tmp_path), **variables}
    with subprocess.Popen(
        [ENTRY, "sh", "-c", SHOW], env=env, stdout=subprocess.PIPE, text=True
    ) as process:
        words = process.communicate(timeout=20)[0].split()
        assert process.returncode == 3
        assert int(words[0]) == process.pid  # signals of Kubernetes reach the command
    return words[1:]


def test_mounted_key_is_copied_to_a_private_file(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(range(32)))
    secret.chmod(0o440)
    *_, file = run(tmp_path, SPARKHVD_JOB_KEY_SECRET=str(secret))
    assert file != str(secret)
    assert key_from_file(Path(file)) == bytes(range(32))
    assert (
        run(tmp_path, SPARKHVD_JOB_KEY_SECRET=str(secret), SPARKHVD_JOB_KEY_FILE="mine")[-1]
        == "mine"
    )
    assert run(tmp_path, SPARKHVD_JOB_KEY_SECRET="/nowhere")[-1] == "none"


def test_pod_index_is_the_rank_unless_rank_is_set(tmp_path: Path) -> None:
    assert run(tmp_path)[:2] == ["none", "none"]
    assert run(tmp_path, JOB_COMPLETION_INDEX="5")[:2] == ["5", "0"]
    assert run(tmp_path, JOB_COMPLETION_INDEX="5", RANK="7", LOCAL_RANK="1")[:2] == ["7", "1"]


@pytest.mark.skipif(shutil.which("ssh-keygen") is None or not os.path.exists("/usr/sbin/sshd"), reason="no ssh server")  # fmt: skip
def test_entry_script_starts_an_ssh_server_for_mpi_workers(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    if os.getuid() == 0:
        os.makedirs("/run/sshd", exist_ok=True)
    env = {**os.environ, "HOME": str(tmp_path), "SPARKHVD_SSHD_PORT": str(port)}
    with subprocess.Popen([ENTRY, "sshd"], env=env, stderr=subprocess.PIPE, text=True) as server:
        try:
            banners: list[bytes] = []

            def answers() -> bool:
                assert server.poll() is None, server.communicate()[1]
                try:
                    with socket.create_connection(("127.0.0.1", port), 1) as client:
                        banners.append(client.recv(64))
                except OSError:
                    return False
                return True

            wait_until(answers, "the ssh server answers")
        finally:
            server.terminate()
            server.communicate(timeout=20)
    assert banners[-1].startswith(b"SSH-2.0-")
