"""Number of GPUs in a rank's process, and the GPUs of ranks on this host."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from sparkhvd.errors import PreflightError
from sparkhvd.runner import context, run_local
from sparkhvd.runner.gpu import decide, probe
from sparkhvd.runner.trainer import Trainer
from sparkhvd.settings import Settings
from tests.harness.by_value import by_value
from tests.harness.fake_driver import fake_driver, uuid_of
from tests.harness.processes import wait_for_no_trainers
from tests.harness.soak import left_to_soak

pytestmark = pytest.mark.processes

travels_by_value = by_value(__name__)

ASK = "import sys, json; from sparkhvd.runner.gpu.probe import cuda_uuids; print(json.dumps(cuda_uuids(sys.argv[1])))"


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> str:
    return fake_driver(tmp_path_factory.mktemp("driver"))


@pytest.mark.parametrize(
    ("visible", "expected"),
    [(None, [5, 6, 7]), ("2", [7]), ("1,0", [6, 5])],
)
def test_gpu_uuids_follow_the_order_of_visible_gpus(
    driver: str, visible: str | None, expected: list[int]
) -> None:
    env = {**os.environ, "FAKE_GPUS": "5,6,7"}
    env.pop("CUDA_VISIBLE_DEVICES", None)
    if visible is not None:
        env["CUDA_VISIBLE_DEVICES"] = visible
    done = subprocess.run(
        [sys.executable, "-c", ASK, driver], env=env, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == [uuid_of(n) for n in expected]


def answers(library: str, *views: dict[str, str | None]) -> list[dict[str, object]]:
    said: list[bytes] = []
    answered = threading.Event()

    def notify(data: bytes) -> None:
        said.append(data)
        answered.set()

    probe.ask(library, views, notify)
    assert answered.wait(30)
    assert len(said) == 1
    return list(json.loads(said[0]))


def answer(library: str) -> dict[str, object]:
    (only,) = answers(library, {})
    return only


def test_gpu_probe_does_not_load_the_cuda_driver_in_its_caller(
    driver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_GPUS", "9")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert answer(driver) == {"uuids": [uuid_of(9)], "error": ""}
    assert driver not in Path("/proc/self/maps").read_text()


def test_gpu_probe_answers_each_environment_without_changing_this_process(
    driver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_GPUS", "5,6,7")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    name = "CUDA_VISIBLE_DEVICES"
    said = answers(driver, {}, {name: None}, {name: "2,0"})
    assert [one["uuids"] for one in said] == [
        [uuid_of(n) for n in seen] for seen in ([6], [5, 6, 7], [7, 5])
    ]
    assert os.environ[name] == "1"


STARTED = """
import ctypes, sys
from sparkhvd.runner.child import _visible
from sparkhvd.runner.protocol import JobFrame
from sparkhvd.runner.gpu.probe import cuda_uuids, has_started

library = sys.argv[1]
frame = JobFrame("", "", local_rank=1, gpu=1, env={"RANK": "1", "CUDA_VISIBLE_DEVICES": "0,1"})
assert not has_started(library) and not has_started("")  # not loaded
assert _visible(frame, library) == (frame.env, 1)
ctypes.CDLL(library)
assert not has_started(library)  # loaded, as by a library that is linked to it
assert _visible(frame, library) == (frame.env, 1)
cuda_uuids(library)
assert has_started(library)
assert _visible(frame, library) == ({"RANK": "1"}, 0)
plain = JobFrame("", "", gpu=2, env={"RANK": "1"})
assert _visible(plain, library) == (plain.env, 2)
print("ok")
"""


def test_process_with_initialized_cuda_keeps_its_gpu(driver: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", STARTED, driver],
        env={**os.environ, "FAKE_GPUS": "5,6", "CUDA_VISIBLE_DEVICES": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "ok\n", done.stderr


def test_gpu_probe_explains_a_missing_answer(
    driver: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    missing = str(tmp_path / "libcuda.so.1")
    assert missing in str(answer(missing)["error"])
    monkeypatch.delenv("FAKE_GPUS", raising=False)
    error = "cuInit gave error 100 (no CUDA-capable device is detected)"
    assert answer(driver) == {"uuids": [], "error": error}
    # A driver that crashes leaves this process alive.
    crash = fake_driver(tmp_path, "int cuInit(unsigned f) { return *(volatile int*)8; }", "crash")
    assert answer(crash)["error"] == "the process that asked CUDA's driver ended with -11"


def sees() -> tuple[str | None, int | None]:
    here = context()
    assert here is not None
    return os.environ.get("CUDA_VISIBLE_DEVICES"), here.gpu


def test_ranks_of_this_host_get_gpus_by_their_local_rank(
    driver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    # A zygote for each environment would take seconds.
    settings = Settings(cuda_library=driver, nursery="0")
    env = {"FAKE_GPUS": "1,2"}
    given = run_local(sees, num_proc=2, env=env, settings=settings, use_gpu=True)
    assert given == [(None, 0), (None, 1)]
    assert run_local(sees, num_proc=1, env=env, settings=settings) == [(None, None)]
    assert run_local(sees, num_proc=1, env=env, settings=settings, use_gpu=False) == [("", None)]


def test_too_few_gpus_raise_before_the_function_starts(driver: str) -> None:
    settings = Settings(cuda_library=driver)
    with pytest.raises(
        PreflightError, match=r"rank 1 on host \S+ is number 2 there, where a process sees 1 GPU "
    ):
        run_local(
            sees,
            num_proc=2,
            env={"FAKE_GPUS": "1,2", "CUDA_VISIBLE_DEVICES": "1"},
            settings=settings,
            use_gpu=True,
        )
    with pytest.raises(
        PreflightError, match=r"rank 0 on host \S+ sees no GPU.*: cuInit gave error 100 \("
    ):
        run_local(sees, num_proc=1, settings=settings, use_gpu=True)
    with pytest.raises(PreflightError, match="Ranks 0 and 1 on host .* have the same GPU"):
        run_local(sees, num_proc=2, env={"FAKE_GPUS": "3,3"}, settings=settings, use_gpu=True)


def test_hanging_cuda_driver_times_out_and_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hang = "#include <unistd.h>\nint cuInit(unsigned f) { for (;;) sleep(1000); }"
    settings = Settings(cuda_library=fake_driver(tmp_path, hang, "hang"))
    monkeypatch.setattr(Trainer, "gpus", functools.partialmethod(Trainer.gpus, 0.5))
    with pytest.raises(PreflightError, match=r": CUDA's driver did not answer in 0\.5 s\. Run on"):
        run_local(sees, num_proc=1, settings=settings, use_gpu=True)
    assert wait_for_no_trainers() == set()


@pytest.mark.parametrize(
    "then",
    ["for (;;) sleep(1000);", *left_to_soak("one that never answers, here", "sleep(2); return 1;")],
)
def test_rank_without_gpu_ignores_hanging_cuda_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    """A rank that requires no GPU runs without the driver's answer."""
    source = f"#include <unistd.h>\nint cuInit(unsigned f) {{ {then} }}"
    settings = Settings(cuda_library=fake_driver(tmp_path, source, "slow"))
    monkeypatch.setattr(Trainer, "gpus", functools.partialmethod(Trainer.gpus, 0.5))
    plan = decide.GpuPlan(decide.GpuMode.HOST, "automatic", is_required=False)
    monkeypatch.setattr(decide, "decide", lambda *_, **__: plan)
    assert run_local(time.sleep, args=(3.0,), num_proc=1, settings=settings) == [None]
    assert wait_for_no_trainers() == set()
