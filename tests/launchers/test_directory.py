"""Ranks on two hosts with numbers from their launcher find each other at rank 0's port."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.harness import sshd
from tests.harness.netns import Host, two_hosts, why_not
from tests.harness.paths import ROOT
from tests.harness.soak import left_to_soak, soak

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(why_not() is not None, reason=f"two hosts: {why_not()}"),
]

# Only the engine, without torch.
SCRIPT = """
import subprocess, sys
from sparkhvd import launchers, rank_context, rendezvous
from sparkhvd.engine.engine import Engine
found = launchers.find()
engine = Engine(found.connect(), found.settings)
engine.barrier().wait()
place = rank_context.context()
address = found.job.endpoints[engine.rank].address
sys.stdout.write(f"rank {engine.rank} of {engine.size} local {place.local_rank} at {address}\\n")
sys.stdout.flush()
engine.shutdown()
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


@pytest.fixture
def key(tmp_path: Path) -> str:
    path = tmp_path / "key"
    path.touch(0o600)
    path.write_bytes(os.urandom(32))
    return str(path)


def start(host: Host, command: Sequence[str], **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        host.command(*command),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
    )


def outputs(processes: Sequence[subprocess.Popen[str]]) -> list[str]:
    try:
        return [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def of_rank(rank: int, size: int, **more: str) -> dict[str, str]:
    """Return the variables of a pod, as Kubernetes' operators set them."""
    return {
        **{"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": "0"},
        **{"MASTER_ADDR": "10.57.0.1", "MASTER_PORT": "29500"},
        **more,
    }


def test_torchrun_ranks_on_two_hosts_connect(script: str, key: str) -> None:
    flags = ("--nnodes", "2", "--nproc-per-node", "1", "--master-port", "29500")
    torchrun = [sys.executable, "-m", "torch.distributed.run", *flags, "--master-addr", "10.57.0.1"]
    with two_hosts() as hosts:
        ended = outputs(
            [
                start(host, [*torchrun, "--node-rank", str(n), script], SPARKHVD_JOB_KEY_FILE=key)
                for n, host in enumerate(hosts)
            ]
        )
    for rank in range(2):
        line = f"rank {rank} of 2 local 0 at {hosts[rank].address}\n"
        assert line in ended[rank], ended


@pytest.mark.parametrize("ipv6_only", [True, *left_to_soak("IPv6, here", False)])
def test_ranks_with_only_torch_variables_connect(script: str, key: str, ipv6_only: bool) -> None:
    with two_hosts(ipv6_only=ipv6_only) as hosts:
        master = {"MASTER_ADDR": hosts[0].address, "SPARKHVD_JOB_KEY_FILE": key}
        ended = outputs(
            [
                start(host, [sys.executable, script], **of_rank(n, 2, **master))
                for n, host in enumerate(hosts)
            ]
        )
    assert ended == [f"rank {n} of 2 local 0 at {hosts[n].address}\n" for n in range(2)]


def test_mpi_ranks_connect_through_the_directory_setting(script: str) -> None:
    """Two of three ranks are on the second host, and the user trusts the network."""
    with two_hosts() as (a, b):
        processes = []
        for rank, host in enumerate((a, b, b)):
            mpi = {"PMI_RANK": rank, "PMI_SIZE": 3, "MPI_LOCALNRANKS": 1 if host is a else 2}
            own = {"SPARKHVD_DIRECTORY": "10.57.0.1:29600", "SPARKHVD_TRUST_NETWORK": "1"}
            variables = {name: str(value) for name, value in mpi.items()} | own
            processes.append(start(host, [sys.executable, script], **variables))
        ended = outputs(processes)
    places = [(0, a.address), (0, b.address), (1, b.address)]
    assert ended == [
        f"rank {rank} of 3 local {local} at {address}\n"
        for rank, (local, address) in enumerate(places)
    ]


def test_interfaces_are_chosen_and_a_down_interface_is_reported(script: str, key: str) -> None:
    with two_hosts() as (a, b):
        for host, peer in ((a, "v1"), (b, "v1")):
            host.run("ip", "link", "add", "v0", "type", "veth", "peer", "name", peer)
            host.run("ip", "address", "add", "10.58.0.1/24", "dev", "v0")
            host.run("ip", "link", "set", "v0", "up")  # its peer is down: there is no carrier
        names = (a.device, "10.57.0.0/16")
        ended = outputs(
            [
                start(
                    host,
                    [sys.executable, script],
                    **of_rank(
                        n, 2, SPARKHVD_JOB_KEY_FILE=key, SPARKHVD_INTERFACES=f"v0,{names[n]}"
                    ),
                )
                for n, host in enumerate((a, b))
            ]
        )
        assert [text.split()[-1] for text in ended] == [a.address, b.address], ended
        dead = of_rank(1, 2, SPARKHVD_JOB_KEY_FILE=key, SPARKHVD_INTERFACES="v0")
        (text,) = outputs([start(b, [sys.executable, script], **dead)])
        assert "no interface of this choice that is up (all of them are down)" in text
        assert "v0 (10.58.0.1, down)" in text


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        (of_rank(1, 2), "MASTER_ADDR has started 2 ranks: ranks on several hosts need a key"),
        (of_rank(2, 2, SPARKHVD_TRUST_NETWORK="1"), "rank 2 of 2; ranks count from 0"),
        (
            {
                "PMI_RANK": "1",
                "PMI_SIZE": "2",
                "MPI_LOCALNRANKS": "1",
                "SPARKHVD_TRUST_NETWORK": "1",
            },
            "2 ranks, 1 of them on this host, and nothing says where rank 0 is. Set SPARKHVD_DIRECTORY",
        ),
        (
            of_rank(1, 2, SPARKHVD_TRUST_NETWORK="1", SPARKHVD_START_TIMEOUT_S="1"),
            "waited 1 s (start_timeout_s) for the other ranks at 10.57.0.1, port 29501-29508: rank 0 has not answered",
        ),
    ],
)
def test_missing_or_wrong_launcher_variables_are_reported(
    script: str, variables: dict[str, str], text: str
) -> None:
    ended = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
    )
    assert text in ended.stderr


@soak("MPI's variables, here")
@pytest.mark.skipif(sshd.why_not() is not None, reason=f"sshd: {sshd.why_not()}")
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun (openmpi-bin) is not installed")
def test_mpirun_ranks_over_ssh_connect(script: str, key: str, tmp_path: Path) -> None:
    """Open MPI starts the ranks on two hosts. Variables give them the directory and a key file."""
    folder = tmp_path / "sshd"
    folder.mkdir()
    with two_hosts() as (a, b), sshd.serving(folder, [b.address], b.command()):
        own = {"SPARKHVD_DIRECTORY": "10.57.0.1:29600", "SPARKHVD_JOB_KEY_FILE": key}
        flags = ["--allow-run-as-root", "-np", "3", "-H", f"{a.address}:1,{b.address}:2"]
        flags += ["-mca", "plm_rsh_args", f"-F {folder}/ssh_config"]
        flags += [word for name in ("PYTHONPATH", *own) for word in ("-x", name)]
        (output,) = outputs([start(a, ["mpirun", *flags, sys.executable, script], **own)])
    for rank, (local, address) in enumerate([(0, a.address), (0, b.address), (1, b.address)]):
        assert f"rank {rank} of 3 local {local} at {address}\n" in output
