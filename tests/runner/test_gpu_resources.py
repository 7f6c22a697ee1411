"""Numbers of GPUs and ranks that do not match, on clusters whose discovery scripts print addresses."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.fake_driver import fake_driver
from tests.harness.processes import wait_for_no_trainers
from tests.harness.soak import soak
from tests.harness.spark import run_on

# Each Spark process starts a JVM, which may take long on a busy machine.
pytestmark = [pytest.mark.spark, pytest.mark.timeout(420)]

PREAMBLE = """
from sparkhvd.errors import PreflightError
from sparkhvd.runner import context, run
from sparkhvd.settings import Settings

OPTIONS = {{
    "spark": spark, "settings": Settings(cuda_library={driver!r}), "env": {{"FAKE_GPUS": "10,11,12"}},
    "start_timeout": 300.0,
}}

def place():
    return os.environ.get("CUDA_VISIBLE_DEVICES"), context().gpu

def refused(**options):
    began = time.monotonic()
    try:
        run(place, **OPTIONS, **options)
    except PreflightError as e:
        assert time.monotonic() - began < 10, "refused, but late"
        return str(e)
    raise AssertionError("not refused")
"""
# Not set for Spark, whatever it is here.
NO_VARIABLES = {"CUDA_VISIBLE_DEVICES": "", "CUDA_DEVICE_ORDER": ""}


def conf_of(folder: Path, script: str, amount: int, **more: str) -> dict[str, str]:
    """GPUs of workers and executors by a discovery script."""
    path = folder / "gpus.sh"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    both = ("worker", "executor")
    return {
        **{f"spark.{who}.resource.gpu.amount": str(amount) for who in both},
        **{f"spark.{who}.resource.gpu.discoveryScript": str(path) for who in both},
        **more,
    }


def body(folder: Path, text: str) -> str:
    return PREAMBLE.format(driver=fake_driver(folder)) + text


@soak("runner/test_gpu_plans")
def test_gpus_shared_by_half_tasks_give_one_rank_per_gpu(tmp_path: Path) -> None:
    script = """echo '{"name": "gpu", "addresses": ["0", "1", "2"]}'"""
    conf = conf_of(tmp_path, script, 3, **{"spark.task.resource.gpu.amount": "0.5"})
    text = """
found = run(place, **OPTIONS)
visible = found[0][0]
assert sorted(visible.split(",")) == ["0", "1", "2"], found
assert found == [(visible, rank) for rank in range(3)], found
print("THREE")

# Fewer ranks than GPUs: those of the ranks, and no others.
found = run(place, num_proc=2, **OPTIONS)
visible = found[0][0]
assert len(set(visible.split(","))) == 2 and found == [(visible, 0), (visible, 1)], found
print("TWO")

text = refused(num_proc=4)
assert "3 GPUs per executor and 1 per task), so a stage of 4 would never start." in text, text
print("FOUR")
"""
    output = run_on(
        "local-cluster[1,4,1024]",
        body(tmp_path, text),
        tmp_path,
        conf=conf,
        env=NO_VARIABLES,
        timeout_s=400,
    )
    assert {"THREE", "TWO", "FOUR"} <= set(output.splitlines()), output
    assert wait_for_no_trainers() == set()


@soak("test_gpus: a local master gives GPUs by local rank; runner/test_gpu_plans")
def test_executors_of_one_host_give_each_rank_its_own_gpu(tmp_path: Path) -> None:
    """Each worker's script prints another address, as on a host that divides its GPUs among workers."""
    script = (
        f"for i in 0 1 2; do mkdir {tmp_path}/taken-$i 2>/dev/null && break; done\n"
        """echo "{\\"name\\": \\"gpu\\", \\"addresses\\": [\\"$i\\"]}\""""
    )
    conf = conf_of(tmp_path, script, 1, **{"spark.task.resource.gpu.amount": "1"})
    text = """
text = refused(num_proc=3)
assert "so a stage of 3 would never start" in text and "1 GPUs per executor and 1 per task" in text, text
print("EARLY")

found = run(place, **OPTIONS)
visible = found[0][0]
assert len(set(visible.split(","))) == 2 and found == [(visible, 0), (visible, 1)], found
print("NEIGHBOURS")
"""
    output = run_on(
        "local-cluster[2,1,1024]",
        body(tmp_path, text),
        tmp_path,
        conf=conf,
        env=NO_VARIABLES,
        timeout_s=400,
    )
    assert {"EARLY", "NEIGHBOURS"} <= set(output.splitlines()), output
    assert wait_for_no_trainers() == set()


@soak("test_gpus: dynamic allocation raises before the GPU search")
def test_dynamic_allocation_with_gpus_raises_early(tmp_path: Path) -> None:
    script = """echo '{"name": "gpu", "addresses": ["0"]}'"""
    dynamic = {
        "spark.dynamicAllocation.enabled": "true",
        "spark.dynamicAllocation.shuffleTracking.enabled": "true",
        "spark.dynamicAllocation.maxExecutors": "1",
    }
    text = """
text = refused(use_gpu=True)
assert "Start the session with spark.dynamicAllocation.enabled=false" in text, text
print("REFUSED")
"""
    output = run_on(
        "local-cluster[1,1,1024]",
        body(tmp_path, text),
        tmp_path,
        conf=conf_of(tmp_path, script, 1, **dynamic),
        env=NO_VARIABLES,
        timeout_s=400,
    )
    assert "REFUSED" in output.splitlines(), output


@soak("transform/test_gpu, runner/test_gpu_plans")
@pytest.mark.parametrize("remote", [False, True], ids=["classic", "connect"])
def test_transform_tasks_get_gpus_although_the_conf_assigns_none(
    tmp_path: Path, remote: bool
) -> None:
    """All models of the session share one resource profile for the stage."""
    script = """echo '{"name": "gpu", "addresses": ["0", "1"]}'"""
    text = """
import torch
from torch import nn
from sparkhvd import TorchEstimator

net = nn.Linear(1, 1)
df = spark.createDataFrame([(float(i), 2.0 * i) for i in range(8)], "x double, y double")
model = TorchEstimator(
    model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.01), loss=nn.MSELoss(), feature_cols=["x"],
    label_cols=["y"], batch_size=4, store=os.path.dirname(os.path.abspath(__file__)), verbose=0, num_proc=1,
    use_gpu=False).fit(df)
assert len(model.transform(df).collect()) == 8
print("WITHOUT")

# torch is built without CUDA here: automatic warns in the worker's log, and two models in one stage agree on it.
model.setUseGpu(None)
once = model.transform(df).drop("y__output", "prediction")
assert len(model.transform(once).collect()) == 8
print("AUTOMATIC")

# Who gives it to the task is what the error says.
try:
    model.setUseGpu(True).transform(df).collect()
except Exception as e:
    assert "transform: Spark gave the task the GPU with address " in str(e), e
    print("ASKED")
"""
    output = run_on(
        "local-cluster[1,2,1024]",
        body(tmp_path, text),
        tmp_path,
        conf=conf_of(tmp_path, script, 2),
        env=NO_VARIABLES,
        remote=remote,
        timeout_s=400,
    )
    assert {"WITHOUT", "AUTOMATIC", "ASKED"} <= set(output.splitlines()), output
