"""The place of a rank in its launcher's variables."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.launchers.bootstrap import meet
from sparkhvd.launchers.environment import LauncherEnv, place_in

pytestmark = pytest.mark.pure

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "1",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-7@1",
}
MPICH = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_LOCALID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "3(x2)",
}
OF_TORCHRUN = LauncherEnv(
    "torchrun", 3, 4, 2, "torchrun/none/localhost/29500/1", 0, ("localhost", 29500), 1
)
PLAIN = {"MASTER_ADDR": "job-0.job", "MASTER_PORT": "29500", "RANK": "1", "WORLD_SIZE": "4"}
OF_PLAIN = LauncherEnv(
    "MASTER_ADDR", 1, 4, 0, "MASTER_ADDR/job-0.job/29500", 0, ("job-0.job", 29500)
)
JOB = {**{name: PLAIN[name] for name in PLAIN if name != "RANK"}, "JOB_COMPLETION_INDEX": "1"}
TRAIN_JOB = {
    "PET_MASTER_ADDR": "job-0.job",
    "PET_MASTER_PORT": "29500",
    "PET_NODE_RANK": "1",
    "PET_NNODES": "4",
    "PET_NPROC_PER_NODE": "1",
}
OF_OPEN_MPI = LauncherEnv("Open MPI", 1, 2, 2, "Open MPI/prterun-7@1")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        (TORCHRUN, OF_TORCHRUN),
        (OPEN_MPI, OF_OPEN_MPI),
        (MPICH, LauncherEnv("MPI", 0, 2, 2, "MPI", 9)),
        (SLURM, LauncherEnv("srun", 5, 6, 3, "srun/77/0")),
        # Started by one another.
        ({**SLURM, **TORCHRUN}, OF_TORCHRUN),
        ({**SLURM, **OPEN_MPI}, OF_OPEN_MPI),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1", **TORCHRUN}, OF_TORCHRUN),
        # The script of a batch job, which srun has not started. One process. torch's variables set manually.
        ({name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"}, None),
        ({**TORCHRUN, "WORLD_SIZE": "1", "RANK": "0"}, None),
        # What Kubernetes' operators set.
        (PLAIN, OF_PLAIN),
        ({**PLAIN, "LOCAL_WORLD_SIZE": "2"}, replace(OF_PLAIN, local_size=2)),
        (JOB, OF_PLAIN),
        (TRAIN_JOB, OF_PLAIN),
        ({**SLURM, "PMI_RANK": "5", "PMI_SIZE": "6"}, LauncherEnv("srun", 5, 6, 3, "srun/77/0")),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, LauncherEnv("MPI", 0, 2, 0, "MPI", 9)),
        ({**PLAIN, **MPICH}, LauncherEnv("MPI", 0, 2, 2, "MPI", 9, ("job-0.job", 29500))),
    ],
)
def test_rank_and_size_are_read_from_launcher_variables(
    variables: dict[str, str], expected: LauncherEnv | None
) -> None:
    assert place_in(variables, 9) == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, False),
        ({"local_size": 4}, True),
        ({"local_size": 2, "master": ("localhost", 1)}, False),
        ({"master": ("127.0.0.1", 1)}, True),
    ],
)
def test_local_size_or_loopback_master_address_means_one_host(
    changes: dict[str, Any], expected: bool
) -> None:
    assert replace(OF_PLAIN, **changes).is_on_one_host is expected


def test_wrong_variables_raise_a_clear_error() -> None:
    with pytest.raises(InvalidArgumentError, match="WORLD_SIZE='four', a variable of torchrun"):
        place_in({**TORCHRUN, "WORLD_SIZE": "four"}, 9)
    text = r"two launchers: torchrun \(rank 3 of 4\) and Open MPI \(rank 1 of 2\)"
    with pytest.raises(InvalidArgumentError, match=text):
        place_in({**TORCHRUN, **OPEN_MPI}, 9)
    with pytest.raises(
        InvalidArgumentError, match=r"two launchers: Open MPI .* and MPI \(rank 2 of 3\)"
    ):
        place_in({**OPEN_MPI, "PMI_RANK": "2", "PMI_SIZE": "3"}, 9)
    with pytest.raises(
        InvalidArgumentError, match="RANK=0 and WORLD_SIZE=2 are set and MASTER_ADDR"
    ):
        place_in({"RANK": "0", "WORLD_SIZE": "2"}, 9)
    assert place_in({"RANK": "0", "WORLD_SIZE": "1"}, 9) is None
    with pytest.raises(InvalidArgumentError, match="WORLD_SIZE=4 are set and RANK is not"):
        place_in({name: value for name, value in PLAIN.items() if name != "RANK"}, 9)
    with pytest.raises(InvalidArgumentError, match="PMIX_RANK=1 is set, and nothing says how many"):
        place_in({"PMIX_RANK": "1", "PMIX_NAMESPACE": "x"}, 9)
    assert place_in({"PMIX_RANK": "0", **OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1"}, 9) is None
    with pytest.raises(InvalidArgumentError, match="PET_NPROC_PER_NODE=2, so this pod has several"):
        place_in({**TRAIN_JOB, "PET_NPROC_PER_NODE": "2"}, 9)


@pytest.mark.parametrize("address", ["localhost", "job-0.job"])
def test_an_address_without_a_port_raises_a_clear_error(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"MASTER_ADDR": address, "RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    with pytest.raises(InvalidArgumentError, match=f"MASTER_ADDR={address}.* Set MASTER_PORT="):
        meet()


def test_an_invalid_port_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="MASTER_PORT=99999 is no port"):
        place_in({**PLAIN, "MASTER_PORT": "99999"}, 1)
