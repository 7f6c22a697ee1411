"""`init(comm=...)` with real MPIs and mpi4py: the wheels of Open MPI and MPICH, and Debian's Open MPI if it is installed."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.harness import netns
from tests.harness.paths import ROOT
from tests.launchers.test_meeting import STUBBORN, check_that_none_is_left

pytestmark = pytest.mark.soak

FOLDER = ROOT / "build" / "mpi"
DEBIAN = "/usr/bin/mpirun.openmpi"


@dataclass(frozen=True)
class Mpi:
    """An MPI in its own environment.

    Attributes:
        name: of its package, or "debian".
        python: with mpi4py.
        mpirun: its launcher with the flags that it always needs.
    """

    name: str
    python: str
    mpirun: tuple[str, ...]

    def start(self, program: str, size: int, **variables: str) -> subprocess.CompletedProcess[str]:
        return run([*self.mpirun, "-np", str(size), *self.command(program)], **variables)

    def command(self, program: str) -> list[str]:
        """Return the command line of a rank."""
        return [self.python, "-m", "tests.soak.mpi.programs", program]


def run(command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    path = f"{ROOT}:{sysconfig.get_paths()['purelib']}"
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env=env, cwd=ROOT
    )


def installed(name: str, packages: list[str]) -> Path:
    """Return an environment with packages, which is made once and kept."""
    folder = FOLDER / name
    if not (folder / "done").exists():
        venv.create(folder, with_pip=True, clear=True)
        pip = [str(folder / "bin" / "pip"), "install", "-q", *packages]
        made = subprocess.run(pip, capture_output=True, text=True, check=False, timeout=600)
        if made.returncode != 0:
            pytest.skip(f"no index has {packages}: {made.stderr[-300:]}")
        (folder / "done").touch()
    return folder


@pytest.fixture(scope="session", params=["openmpi", "mpich", "debian"])
def mpi(request: pytest.FixtureRequest) -> Mpi:
    name = request.param
    if name == "debian" and not os.path.exists(DEBIAN):
        pytest.skip("Debian's Open MPI is not installed: apt-get install openmpi-bin")
    folder = installed(name, ["mpi4py"] if name == "debian" else ["mpi4py", name])
    mpirun = DEBIAN if name == "debian" else str(folder / "bin" / "mpirun")
    flags = () if name == "mpich" else ("--allow-run-as-root", "--oversubscribe")
    return Mpi(name, str(folder / "bin" / "python"), (mpirun, *flags))


def check(ended: subprocess.CompletedProcess[str], size: int) -> str:
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert sorted(line for line in ended.stdout.splitlines() if line.startswith("ok ")) == [
        f"ok {rank}" for rank in range(size)
    ]
    return ended.stderr


@pytest.mark.parametrize("program", ["jobs", "sets", "mixed", "children"])
def test_programs_with_mpi4py_run_under_mpirun(mpi: Mpi, program: str) -> None:
    errors = check(mpi.start(program, 3, HOROVOD_CPU_OPERATIONS="mpi"), 3)
    notes = [
        line for line in errors.splitlines() if "HOROVOD_CPU_OPERATIONS=mpi: MPI places" in line
    ]
    assert 1 <= len(notes) <= 3  # rank 0 of each job, once per process


def test_several_communicators_form_process_sets_but_only_one_job(mpi: Mpi) -> None:
    check(mpi.start("several", 4), 4)


def test_rank_that_does_not_call_init_causes_a_timeout(mpi: Mpi) -> None:
    check(mpi.start("alone", 2, SPARKHVD_START_TIMEOUT_S="2"), 2)


def test_no_rank_survives_a_killed_mpirun(mpi: Mpi, tmp_path: Path) -> None:
    """The ranks do not use MPI, which could end them."""
    script = tmp_path / "train.py"
    script.write_text(STUBBORN)
    check_that_none_is_left([*mpi.mpirun, "-np", "2", sys.executable, str(script)])


def test_mpi4py_of_another_mpi_than_mpirun_is_refused(mpi: Mpi) -> None:
    if mpi.name != "mpich":
        pytest.skip("under Open MPI's launcher MPICH itself refuses to start")
    python = str(installed("openmpi", ["mpi4py", "openmpi"]) / "bin" / "python")
    ended = run([*mpi.mpirun, "-np", "2", python, "-m", "tests.soak.mpi.programs", "unnoticed"])
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("ok 0") == 2


def test_mpirun_jobs_run_on_two_hosts(mpi: Mpi, tmp_path: Path) -> None:
    """Two network namespaces have their own host names, and a script replaces the ssh by which `mpirun` starts ranks."""
    if (reason := netns.why_not()) is not None:
        pytest.skip(f"two hosts on one machine: {reason}")
    if shutil.which("unshare") is None:
        pytest.skip("unshare (util-linux) is not installed")
    with netns.two_hosts() as (a, b):
        agent = tmp_path / "agent.sh"
        agent.write_text(
            f"""#!/bin/bash
while [[ $1 == -* ]]; do shift; done
case $1 in {a.address}) host={a.namespace} name=host-a;; *) host={b.namespace} name=host-b;; esac
shift
exec ip netns exec $host unshare --uts sh -c "hostname $name; $*"
"""
        )
        agent.chmod(0o755)
        hostfile = tmp_path / "hosts"
        hostfile.write_text(f"{a.address} slots=1\n{b.address} slots=2\n")
        flags = {
            "openmpi": f"--prtemca plm_ssh_agent {agent} --prtemca plm ssh --hostfile {hostfile} --mca btl tcp,self --mca pml ob1",
            "debian": f"--mca plm_rsh_agent {agent} --mca plm rsh --hostfile {hostfile} --mca btl tcp,self --mca pml ob1",
            "mpich": f"-launcher ssh -launcher-exec {agent} -hosts {a.address}:1,{b.address}:2",
        }[mpi.name]
        # Variables that ssh does not pass on: Open MPI needs their names.
        names = "" if mpi.name == "mpich" else "-x PYTHONPATH -x OMP_NUM_THREADS"
        mpirun = [word for word in mpi.mpirun if word != "--oversubscribe"]  # all on the first host
        words = [*mpirun, *flags.split(), *names.split(), "-np", "3", *mpi.command("hosts")]
        command = f"hostname host-a; exec {shlex.join(words)}"
        check(run(a.command("unshare", "--uts", "sh", "-c", command)), 3)
