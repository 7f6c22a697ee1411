"""GPUs of ranks on real clusters without a GPU: a discovery script that prints addresses, and a stand-in for CUDA's driver."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from sparkhvd.errors import PreflightError
from sparkhvd.runner import context, run
from sparkhvd.runner.gpu import decide
from sparkhvd.settings import Settings
from sparkhvd.spark import SparkShim
from tests.harness.by_value import by_value
from tests.harness.fake_driver import fake_driver, uuid_of
from tests.harness.processes import wait_for_no_trainers
from tests.harness.soak import soak
from tests.harness.spark import run_on

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

travels_by_value = by_value(__name__)


# The start of several JVMs may take long on a busy machine.
SLOW = pytest.mark.timeout(420)

# One executor with two GPUs and four cores, and half a GPU per task: without a profile two tasks share GPU 0.
PROGRAM = """
from pathlib import Path
from sparkhvd import cpus
from sparkhvd.errors import PreflightError
from sparkhvd.runner import context, run, slots
from sparkhvd.settings import Settings

def uuid_of(number):
    return f"GPU-00000000-0000-0000-0000-{{number:012x}}"

FAKE = Settings(cuda_library={driver!r})
NONE = Settings(cuda_library="/nowhere/libcuda.so.1")

def place():
    here = context()
    seen = os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("CUDA_DEVICE_ORDER")
    return here.size, *seen, here.gpu, here.num_threads

def refused(**options):
    try:
        run(place, spark=spark, **options)
    except PreflightError as e:
        return str(e)
    return "NOT REFUSED"

def script():
    # The lines of a Horovod script; torch.cuda is a stand-in over what the driver shows this process.
    import torch
    import sparkhvd.torch as hvd
    from sparkhvd.runner.gpu.probe import cuda_uuids

    uuids, chosen = cuda_uuids({driver!r}), [0]
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: len(uuids)
    torch.cuda.set_device = lambda ordinal: chosen.append(range(len(uuids))[ordinal])
    hvd.init()
    by_init = uuids[chosen[-1]]
    torch.cuda.set_device(hvd.local_rank())
    return by_init, uuids[chosen[-1]]

# The share of the cores reaches the rank's threads: 4 cores // 2 GPUs, as far as this machine has them.
threads = slots.threads_per_rank(2, cpus.allowed())
env = {{"FAKE_GPUS": "10,11,12,13,14,15"}}
places = run(place, spark=spark, env=env, settings=FAKE, use_gpu=True)
names = {names!r}
# Which rank has which is Spark's choice.
assert places[0][1] in (",".join(names), ",".join(names[::-1])), places
assert places == [(2, places[0][1], "PCI_BUS_ID", rank, threads) for rank in range(2)], places
print("OWN GPUS")

found = run(script, spark=spark, env=env, settings=FAKE)
uuids = [uuid_of(10 + int(name)) for name in names]
assert sorted(found) == [(uuid, uuid) for uuid in uuids], (found, uuids)
print("HOROVOD")

# A variable of the user's own stays.
mine = run(place, spark=spark, env={{**env, "CUDA_VISIBLE_DEVICES": "5"}}, settings=FAKE, num_proc=1)
assert mine[0][1:4] == ("5", "PCI_BUS_ID", 0), mine
print("USER")

# Automatic, without a library to ask for their UUIDs: the ranks run, and each sees its own.
expected = [(2, name, "PCI_BUS_ID", 0, threads) for name in names]
assert sorted(run(place, spark=spark, settings=NONE)) == expected
print("AUTOMATIC")

text = refused(env={{"FAKE_GPUS": "7,7,7,7,7,7"}}, settings=FAKE)
assert text.startswith("Ranks 0 and 1 on host "), text
assert "have the same GPU, {uuid} (CUDA_VISIBLE_DEVICES='" in text, text
assert "Set spark.task.resource.gpu.amount=1, and let the discovery script" in text, text
print("DUPLICATE")

text = refused(use_gpu=True, settings=NONE)
assert text.startswith("use_gpu is True, and rank 0 on host "), text
assert "sees no GPU (CUDA_VISIBLE_DEVICES='" in text and "/nowhere/libcuda.so.1" in text, text
print("NO DRIVER")

text = refused(num_proc=3)
assert "2 GPUs per executor and 1 per task), so a stage of 3 would never start." in text, text
print("TOO MANY")

assert run(place, num_proc=1, spark=spark, use_gpu=False)[0][1:4] == ("", None, None)
# No trace in the Python workers, which serve other jobs.
def left(batches):
    import os, pyarrow as pa
    for _ in batches:
        pass
    yield pa.RecordBatch.from_pydict({{"seen": [str(os.environ.get("CUDA_VISIBLE_DEVICES"))]}})
rows = spark.range(0, 4, 1, 2).mapInArrow(left, "seen string").collect()
assert {{row.seen for row in rows}} == {{{inherited!r}}}, rows
print("NO TRACE")
"""

FIT = """
import torch
from torch import nn
from sparkhvd import TorchEstimator
from sparkhvd.errors import PreflightError, RankError

net = nn.Linear(1, 1)
df = spark.createDataFrame([(float(i), 2.0 * i) for i in range(8)], "x double, y double")
def fit(**options):
    return TorchEstimator(
        model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.01), loss=nn.MSELoss(), feature_cols=["x"],
        label_cols=["y"], batch_size=4, store=os.path.dirname(os.path.abspath(__file__)), settings=NONE, verbose=0,
        **options).fit(df)

import warnings
assert torch.version.cuda is None
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    model = fit(num_proc=2)
said = [str(w.message) for w in caught if "although Spark gives them GPUs" in str(w.message)]
assert len(said) == 1, [str(w.message) for w in caught]
assert f"has torch {torch.__version__}, which is built without CUDA. Install" in said[0], said
assert len(model.history) == 1
text = ""
try:
    fit(use_gpu=True)
except PreflightError as e:
    text = str(e)
assert text.startswith("use_gpu is True, and rank 0 on host "), text
assert f"has torch {torch.__version__}, which is built without CUDA. Install torch" in text, text
print("FIT WITHOUT CUDA")
model = fit(num_proc=2, use_gpu=False)
assert model.getUseGpu() is False
assert len(model.transform(df).collect()) == 8
assert len(model.setUseGpu(None).transform(df).collect()) == 8
try:
    model.setUseGpu(True).transform(df).collect()
except Exception as e:
    text = str(e)
assert "transform: Spark gave the task the GPU with address " in text, text
print("TRANSFORM")
"""


def cluster_conf(folder: Path, **more: str) -> dict[str, str]:
    script = folder / "gpus.sh"
    script.write_text('#!/bin/sh\necho \'{"name": "gpu", "addresses": ["0", "1"]}\'\n')
    script.chmod(0o755)
    return {
        # A worker offers GPUs and an executor takes them, so Spark runs both scripts.
        "spark.worker.resource.gpu.amount": "2",
        "spark.worker.resource.gpu.discoveryScript": str(script),
        "spark.executor.resource.gpu.amount": "2",
        "spark.executor.resource.gpu.discoveryScript": str(script),
        "spark.task.resource.gpu.amount": "0.5",
        **more,
    }


def program(folder: Path, names: list[str], inherited: str) -> str:
    driver = fake_driver(folder)
    return PROGRAM.format(driver=driver, uuid=uuid_of(7), names=names, inherited=inherited)


def check(output: str, *more: str) -> None:
    said = (
        "OWN GPUS",
        "HOROVOD",
        "USER",
        "AUTOMATIC",
        "DUPLICATE",
        "NO DRIVER",
        "TOO MANY",
        "NO TRACE",
        *more,
    )
    for line in said:
        assert line in output, output
    assert wait_for_no_trainers() == set()


@soak("runner/test_gpu_plans, runner/test_gpu_agreement")
@SLOW
def test_ranks_of_one_executor_get_separate_gpus_from_fractional_amounts(tmp_path: Path) -> None:
    output = run_on(
        "local-cluster[1,4,1024]",
        program(tmp_path, ["0", "1"], "None") + FIT,
        tmp_path,
        conf=cluster_conf(tmp_path),
        env={"CUDA_VISIBLE_DEVICES": "", "CUDA_DEVICE_ORDER": ""},  # not set
        timeout_s=400,
    )
    check(output, "FIT WITHOUT CUDA", "TRANSFORM")


@soak("runner/test_gpu_plans")
@SLOW
def test_connect_ranks_use_only_gpus_visible_to_their_executor(tmp_path: Path) -> None:
    """Addresses are indices into the executor's CUDA_VISIBLE_DEVICES, which stays unchanged."""
    conf = cluster_conf(tmp_path, **{"spark.executorEnv.CUDA_VISIBLE_DEVICES": "3,5"})
    output = run_on(
        "local-cluster[1,4,1024]",
        program(tmp_path, ["3", "5"], "3,5"),
        tmp_path,
        conf=conf,
        remote=True,
        env={"CUDA_VISIBLE_DEVICES": "", "CUDA_DEVICE_ORDER": ""},
        timeout_s=400,
    )
    check(output)


def sees() -> tuple[str | None, int | None]:
    here = context()
    assert here is not None
    return os.environ.get("CUDA_VISIBLE_DEVICES"), here.gpu


def of_fake_driver(folder: Path) -> Settings:
    """Return settings of fresh processes: variables of CUDA would start another zygote for each launch."""
    return Settings(cuda_library=fake_driver(folder), nursery="0")


@soak("runner/test_gpu_probe: ranks of this host; runner/test_gpu_plans")
def test_local_master_assigns_gpus_by_local_rank(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    options = {"spark": spark, "num_proc": 2, "settings": of_fake_driver(tmp_path)}
    env = {"FAKE_GPUS": "1,2", "CUDA_VISIBLE_DEVICES": "0,1"}
    assert run(sees, env=env, use_gpu=True, **options) == [("0,1", 0), ("0,1", 1)]
    with pytest.raises(PreflightError) as e:
        run(sees, env={**env, "CUDA_VISIBLE_DEVICES": "1"}, use_gpu=True, **options)
    assert "is number 2 there, where a process sees 1 GPU (CUDA_VISIBLE_DEVICES='1')." in str(
        e.value
    )
    assert run(sees, env={"FAKE_GPUS": "1"}, **options) == [(None, None)] * 2


@soak("runner/test_gpu_plans")
def test_default_ranks_on_a_local_master_do_not_exceed_gpus(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    options = {"spark": spark, "settings": of_fake_driver(tmp_path), "use_gpu": True}
    for given, ranks in (("1", 1), ("1,2,3", 2)):
        found = run(sees, env={"FAKE_GPUS": given}, **options)
        assert found == [(None, rank) for rank in range(ranks)]
    with pytest.raises(PreflightError, match="rank 0 on host .* sees no GPU"):
        run(sees, **options)


def test_dynamic_allocation_raises_before_the_gpu_search(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    conf = SparkShim(spark).conf
    monkeypatch.setattr(
        SparkShim, "conf", lambda _, keys: {**conf(keys), "spark.dynamicAllocation.enabled": "true"}
    )
    with pytest.raises(PreflightError, match=r"with spark\.dynamicAllocation\.enabled=false"):
        run(sees, spark=spark, use_gpu=True)


def test_sessions_of_an_application_share_the_transform_profile(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark refuses a stage with two profiles, and a plan may combine DataFrames of two sessions."""
    monkeypatch.setattr(decide, "_shared", {})
    monkeypatch.setattr(decide, "_profile_to_share", lambda shim: object())
    first = decide.profile_to_share_gpus(SparkShim(spark))
    assert decide.profile_to_share_gpus(SparkShim(spark.newSession())) is first
