"""A real sshd for tests with its own keys: on loopback addresses, which represent hosts, or in a network namespace.

Debian's openssh-server is installed if this user may install it. `why_not()` says what is missing.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SSHD = "/usr/sbin/sshd"
INSTALL_S = 120.0


@cache
def why_not() -> str | None:
    """Return the reason why there is no sshd here, or None if there is one."""
    if not Path(SSHD).exists() and os.geteuid() == 0 and shutil.which("apt-get"):
        command = ["apt-get", "install", "-y", "-q", "openssh-server"]
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(
                command, capture_output=True, check=False, timeout=INSTALL_S, env=environment
            )
    missing = [name for name in (SSHD, "ssh", "ssh-keygen") if shutil.which(name) is None]
    return f"not installed: {', '.join(missing)}" if missing else None


@dataclass(frozen=True)
class Server:
    """Running sshd.

    Attributes:
        ssh: command of a client with mutual authentication.
        port: listening port.
        process: its process id.
    """

    ssh: str
    port: int
    process: subprocess.Popen[bytes]


@contextlib.contextmanager
def serving(folder: Path, addresses: Sequence[str], prefix: Sequence[str] = ()) -> Iterator[Server]:
    """Run sshd on some addresses of this machine.

    Args:
        folder: for keys and configuration. Only this user may write there.
        addresses: to listen at.
        prefix: command before sshd's, for example of a namespace.
    """
    port = _free_port()
    for name in ("host", "user"):
        keygen = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(keygen, check=True, timeout=30)
    shutil.copy(folder / "user.pub", folder / "authorized")
    key = (folder / "host.pub").read_text().strip()
    (folder / "known").write_text("".join(f"[{each}]:{port} {key}\n" for each in addresses))
    (folder / "sshd_config").write_text(
        f"Port {port}\n"
        + "".join(f"ListenAddress {each}\n" for each in addresses)
        + f"HostKey {folder}/host\nAuthorizedKeysFile {folder}/authorized\nPidFile none\n"
        "StrictModes no\nUsePAM no\nPermitRootLogin prohibit-password\nPasswordAuthentication no\n"
        "MaxStartups 100\n"
        # This user's shell files may wait for a lock of a killed session (pyenv's does).
        f"SetEnv HOME={folder}\n"
    )
    (folder / "ssh_config").write_text(
        f"IdentityFile {folder}/user\nIdentitiesOnly yes\nUserKnownHostsFile {folder}/known\nPort {port}\n"
    )
    with contextlib.suppress(PermissionError):
        Path("/run/sshd").mkdir(exist_ok=True)
    command = [*prefix, SSHD, "-D", "-e", "-f", str(folder / "sshd_config")]
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(command, stderr=log, stdin=subprocess.DEVNULL)
    try:
        _wait(folder / "log", len(addresses), process)
        yield Server(f"ssh -F {folder}/ssh_config", port, process)
    finally:
        process.terminate()
        process.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _wait(log: Path, count: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 20
    while log.read_text().count("Server listening") < count:
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.02)
