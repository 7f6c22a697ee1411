"""Devices of Python workers in transform, and the limit of models that compute on one GPU at a time."""

from __future__ import annotations

import os
import socket
import threading
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.estimator.transform.worker import TaskGpus, choose, held

pytestmark = pytest.mark.pure

CPU = torch.device("cpu")


@pytest.fixture
def sees(monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(count: int) -> None:
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(
            torch.cuda,
            "get_device_properties",
            lambda index: types.SimpleNamespace(uuid=f"0000-{index}"),
        )

    return make


@pytest.mark.parametrize(
    ("use_gpu", "addresses", "partition", "count", "expected"),
    [
        (None, (), 3, 2, CPU),
        (False, ("0",), 3, 2, CPU),
        (None, ("1",), 3, 2, torch.device("cuda", 1)),
        (True, ("1",), 3, 2, torch.device("cuda", 1)),
        (None, ("GPU-0000-1",), 3, 2, torch.device("cuda", 1)),
        (True, (), 3, 2, torch.device("cuda", 1)),  # tasks are dealt out
        (True, (), 4, 2, torch.device("cuda", 0)),
    ],
)
def test_device_of_a_task_follows_use_gpu_and_addresses(
    sees: Any,
    use_gpu: bool | None,
    addresses: tuple[str, ...],
    partition: int,
    count: int,
    expected: torch.device,
) -> None:
    sees(count)
    assert choose(use_gpu, TaskGpus(addresses, partition)) == expected


def test_a_torch_without_cuda_uses_the_cpu_unless_use_gpu_is_set(
    sees: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sees(0)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.warns(UserWarning, match=r"although Spark gave the task a GPU: torch \S+ of the"):
        assert choose(None, TaskGpus(("0",))) == CPU
    with pytest.raises(InvalidArgumentError, match="use_gpu is True|Spark gave the task the GPU"):
        choose(True, TaskGpus(("0",)))


def test_missing_required_gpu_raises(sees: Any) -> None:
    host = socket.gethostname()
    sees(0)
    for use_gpu, addresses, why in (
        (True, (), "use_gpu is True"),
        (None, ("1",), "Spark gave the task the GPU with address 1"),
    ):
        with pytest.raises(InvalidArgumentError) as e:
            choose(use_gpu, TaskGpus(addresses))
        assert str(e.value) == (
            f"transform: {why}, but torch {torch.__version__} of the worker on host {host} sees no GPU. Install torch "
            "with CUDA there, or set use_gpu=False on the model."
        )
    sees(1)
    for address in ("1", "GPU-ffff"):
        with pytest.raises(InvalidArgumentError) as e:
            choose(None, TaskGpus((address,)))
        assert str(e.value) == (
            f"transform: Spark gave the task the GPU with address {address}, but the worker on host {host} sees 1 GPUs, "
            "numbered from 0. Let the discovery script print such numbers, or UUIDs; or set use_gpu=False on the model."
        )


def test_tasks_beyond_limit_wait_for_gpu(sees: Any, tmp_path: Path) -> None:
    sees(2)
    device, other = torch.device("cuda", 0), torch.device("cuda", 1)
    with held(device, limit=2, folder=tmp_path), held(device, limit=2, folder=tmp_path):
        with held(other, limit=2, folder=tmp_path):
            pass
        with held(CPU, limit=0, folder=tmp_path):
            pass
        with (
            pytest.raises(TimeoutError, match="2 other tasks of this host have computed on cuda:0"),
            held(device, limit=2, wait_s=0.1, folder=tmp_path),
        ):
            pass
    entered = threading.Event()

    def waits() -> None:
        with held(device, limit=1, wait_s=30, folder=tmp_path):
            entered.set()

    thread = threading.Thread(target=waits)
    with held(device, limit=1, folder=tmp_path):
        thread.start()
        assert not entered.wait(0.3)
    assert entered.wait(10)
    thread.join(10)


def test_models_of_one_task_share_a_gpu_slot(sees: Any, tmp_path: Path) -> None:
    """One model feeds the other. If each needed its own place, tasks would wait for each other without end."""
    sees(1)
    device, options = torch.device("cuda", 0), {"limit": 2, "wait_s": 5, "folder": tmp_path}
    upstream, results = threading.Barrier(2), list[str]()

    def task(name: str) -> None:
        with held(device, name, **options):
            upstream.wait(10)  # both places are taken
            with held(device, name, **options):
                results.append(name)
                upstream.wait(10)
                if name == "1-7":
                    with (
                        pytest.raises(TimeoutError),
                        held(device, "1-9", limit=2, wait_s=0.1, folder=tmp_path),
                    ):
                        pass
                upstream.wait(10)

    threads = [threading.Thread(target=task, args=(name,)) for name in ("1-7", "1-8")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(results) == ["1-7", "1-8"]


def test_gpu_slot_is_held_until_the_last_task_worker_ends(sees: Any, tmp_path: Path) -> None:
    sees(1)
    device, options = torch.device("cuda", 0), {"limit": 1, "folder": tmp_path}
    first = held(device, "1-7", **options)
    first.__enter__()
    with held(device, "1-7", **options):
        first.__exit__(None, None, None)
        with pytest.raises(TimeoutError), held(device, "1-8", wait_s=0.1, **options):
            pass
    with held(device, "1-8", wait_s=0.1, **options):
        pass


def test_gpus_of_containers_are_distinguished_in_a_shared_lock_folder(
    sees: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU has index 0 in every container."""
    sees(1)
    device = torch.device("cuda", 0)
    with held(device, limit=1, folder=tmp_path):
        other = types.SimpleNamespace(uuid="0000-9")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: other)
        with held(device, limit=1, wait_s=0.1, folder=tmp_path):
            pass


def test_lock_folder_of_another_user_is_refused_immediately(sees: Any, tmp_path: Path) -> None:
    """The owner could hold every lock, which would look like other tasks for a day."""
    sees(1)
    cuda = torch.device("cuda", 0)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "file").touch()
    names = ["link", "file"]
    if os.getuid() == 0:
        (tmp_path / "foreign").mkdir()
        os.chown(tmp_path / "foreign", 1234, 1234)
        names.append("foreign")
    for name in names:
        with (
            pytest.raises(
                InvalidArgumentError, match=f"{name} is not a folder, or belongs to user"
            ),
            held(cuda, folder=tmp_path / name, wait_s=1),
        ):
            pass
    (tmp_path / "wide").mkdir(mode=0o777)
    (tmp_path / "wide").chmod(0o777)
    with held(cuda, folder=tmp_path / "wide", wait_s=1):
        assert (tmp_path / "wide").stat().st_mode & 0o777 == 0o700
