"""Load of a rank of `run(fn, loggers=...)`: reports during its function, and the function's view of it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sparkhvd import topology
from sparkhvd.observe import system
from sparkhvd.observe.system import Gpu
from sparkhvd.runner.loggers import WithSystemMetrics
from sparkhvd.runner.protocol import _names_in

pytestmark = [pytest.mark.pure, pytest.mark.timeout(60)]


@pytest.fixture(autouse=True)
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(system, "_INTERVAL_S", 0.05)
    before = topology.context()
    topology.install_rank_context(topology.RankContext(3, 4, 1, 0, 1))
    yield
    topology.install_rank_context(before)


def works(seconds: float, *, fails: bool = False) -> int:
    time.sleep(seconds)
    if fails:
        raise ValueError("as asked")
    return os.getpid()


def logged(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    lines = capsys.readouterr().err.splitlines()
    return [json.loads(line.removeprefix("metrics "))["values"] for line in lines]


def test_system_load_is_logged_while_the_function_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert WithSystemMetrics(works)(0.3) == os.getpid()
    values = logged(capsys)
    assert 1 <= len(values) <= 8
    names = {name.rpartition("/")[2] for name in values[0]}
    assert names == {"cpu_utilization_percentage", "rss_megabytes"}
    assert all("-rank-3/" in name for name in values[0])
    with pytest.raises(ValueError, match="as asked"):
        WithSystemMetrics(works)(0.0, fails=True)
    time.sleep(0.2)
    assert logged(capsys) == []  # the thread has ended with the function


def test_gpu_load_is_read_only_after_torch_initializes_cuda(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def find(uuid: str) -> Any:
        asked.append(uuid)
        return lambda: (75.0, 3000.0)

    monkeypatch.setattr(Gpu, "find", find)
    WithSystemMetrics(works)(0.12)
    assert asked == []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"of-{index}")
    )
    capsys.readouterr()
    WithSystemMetrics(works)(0.2)
    assert asked == ["GPU-of-1"]  # of its local rank
    numbers = {n.rpartition("/")[2]: v for n, v in logged(capsys)[-1].items()}
    assert numbers["gpu_utilization_percentage"] == 75.0
    assert numbers["gpu_memory_usage_megabytes"] == 3000.0


def test_load_monitor_keeps_the_function_name_and_preloaded_modules() -> None:
    wrapped = WithSystemMetrics(works)
    assert (wrapped.__name__, wrapped.__module__) == ("works", __name__)  # type: ignore[attr-defined]
    assert _names_in(wrapped) == _names_in(works)
