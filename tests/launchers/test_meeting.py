"""Scripts that torchrun and MPI start find each other. torchrun is real here, MPI in tests/soak/mpi."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.harness.paths import ROOT
from tests.harness.processes import TAG_VARIABLE, find, wait_until_gone
from tests.harness.soak import left_to_soak

pytestmark = pytest.mark.processes

# Only the engine, without torch. A process that a rank starts is no rank.
SCRIPT = """
import os, subprocess, sys
from sparkhvd import launchers, rank_context
from sparkhvd.engine.engine import Engine
rendezvous = launchers.find()
engine = Engine(rendezvous.connect(), rendezvous.settings)
engine.barrier().wait()
line = f"rank {engine.rank} of {engine.size} {rank_context.context().local_rank}\\n"
sys.stdout.write(line)  # in one piece: launchers mix the output of ranks
sys.stdout.flush()
if engine.rank == 0:
    code = "from sparkhvd import launchers; launchers.find()"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    print(child.stderr.splitlines()[-1], flush=True)
engine.shutdown()
again = Engine(launchers.find().connect(), rendezvous.settings)
again.barrier().wait()
again.shutdown()
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


def environment(**variables: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), **variables}


def check(output: str, size: int) -> None:
    for rank in range(size):
        assert f"rank {rank} of {size} {rank}\n" in output
    assert "is no rank itself" in output


def run(command: Sequence[str]) -> str:
    ended = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
        env=environment(),
    )
    assert ended.returncode == 0, ended.stdout
    return ended.stdout


def test_torchrun_ranks_on_one_host_connect(script: str) -> None:
    flags = ("--nproc-per-node", "2", "--master-port", "0", "--no-python")
    command = [sys.executable, "-W", "error", script]
    output = run([sys.executable, "-m", "torch.distributed.run", *flags, *command])
    check(output, 2)
    assert "ResourceWarning" not in output


def of_mpi(rank: int, size: int, **changed: str) -> dict[str, str]:
    names = {"PMI_RANK": rank, "PMI_SIZE": size, "MPI_LOCALRANKID": rank, "MPI_LOCALNRANKS": size}
    return environment(**{**{name: str(value) for name, value in names.items()}, **changed})


def start(script: str, env: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
    )


# A rank that neither SIGTERM nor its launcher's broken pipe ends.
STUBBORN = """
import os, signal, subprocess, time
from sparkhvd import launchers
if os.getpgrp() == os.getpid():
    subprocess.Popen(["sleep", "1000"])
signal.signal(signal.SIGTERM, signal.SIG_IGN)
launchers.find()
os.write(1, b"met\\n")  # in one piece
time.sleep(1000)
"""
# Starts two ranks as MPI does, each in a shell.
MPI = """
import os, subprocess, sys
for rank in range(2):
    env = {**os.environ, "PMI_RANK": str(rank), "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}
    last = subprocess.Popen(["sh", "-c", f"{sys.executable} {sys.argv[1]}; exit 0"], env=env)
last.wait()
"""


GROUP = """import torch.distributed
import sparkhvd.distributed
torch.distributed.init_process_group("sparkhvd")
"""


@pytest.mark.parametrize(
    ("launcher", "meeting"),
    [
        ("torchrun", "launchers.find()\n"),
        ("mpi", "launchers.find()\n"),
        *left_to_soak("torchrun and another meeting, here", ("torchrun", GROUP)),
    ],
)
def test_no_rank_survives_its_launcher(tmp_path: Path, launcher: str, meeting: str) -> None:
    """MPI's ranks are children of shells, not of the launcher. tests/soak/mpi has real MPI."""
    script, mpi = tmp_path / "train.py", tmp_path / "mpi.py"
    script.write_text(STUBBORN.replace("launchers.find()\n", meeting))
    mpi.write_text(MPI)
    flags = ("--nproc-per-node", "2", "--standalone")
    arguments = ["-m", "torch.distributed.run", *flags] if launcher == "torchrun" else [str(mpi)]
    check_that_none_is_left([sys.executable, *arguments, str(script)])


def check_that_none_is_left(command: Sequence[str]) -> None:
    """Kill a launcher after its two ranks have met and printed a line each."""
    tag = uuid.uuid4().hex
    env = environment(**{TAG_VARIABLE: tag, "SPARKHVD_START_TIMEOUT_S": "30"})
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as started:
        assert started.stdout is not None
        met = (line for line in started.stdout if line == "met\n")  # Gloo has lines, too
        try:
            assert [next(met), next(met)]
            there = find("", tag)
            assert len(there) >= 3
            began = time.monotonic()
        finally:
            started.kill()
        assert wait_until_gone(there, 10) == set()
        assert time.monotonic() - began < 5


def test_ranks_with_mpi_variables_connect(script: str) -> None:
    ranks = [start(script, of_mpi(rank, 3)) for rank in range(3)]
    output = [rank.communicate(timeout=60) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0, 0], output
    check("".join(out for out, _ in output), 3)


def test_launcher_inside_a_rank_starts_a_separate_job(script: str) -> None:
    """A rank of one job starts the ranks of another job. Only torch's variables describe the outer rank."""
    rank = {"SPARKHVD_RANK_PROCESS": "1 MASTER_ADDR/10.0.0.1/29500", "MASTER_PORT": "29500"}
    rank |= {"MASTER_ADDR": "10.0.0.1", "RANK": "1", "WORLD_SIZE": "2"}
    ranks = [start(script, of_mpi(number, 2, **rank)) for number in range(2)]
    output = [each.communicate(timeout=60) for each in ranks]
    assert [each.returncode for each in ranks] == [0, 0], output
    check("".join(out for out, _ in output), 2)
    code = "from sparkhvd import launchers; print(launchers.find())"
    alone = [sys.executable, "-c", code]
    ended = subprocess.run(
        alone, capture_output=True, text=True, timeout=60, check=True, env=environment(**rank)
    )
    assert ended.stdout == "None\n"
    # If the rank was made from these variables, a program that it starts must not train alone.
    made = f"from sparkhvd.launchers import mark; mark({'MASTER_ADDR/10.0.0.1/29500'!r}, by_variables=True)"
    code = f"import subprocess, sys; {made}; subprocess.run({alone!r})"
    ended = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env=environment(**rank),
    )
    assert "which is rank 1. Let the rank communicate" in ended.stderr


def test_errors_report_a_missing_rank_or_several_hosts(script: str) -> None:
    alone = start(script, of_mpi(1, 2, SPARKHVD_START_TIMEOUT_S="1"))
    _, errors = alone.communicate(timeout=60)
    assert "Rank 1 waited 1 s (start_timeout_s) for the other ranks" in errors
    assert "Look at the output of MPI" in errors
    apart = start(script, of_mpi(1, 2, MPI_LOCALNRANKS="1"))
    _, errors = apart.communicate(timeout=60)
    assert "MPI has started 2 ranks, 1 of them on this host: ranks on several hosts need" in errors
