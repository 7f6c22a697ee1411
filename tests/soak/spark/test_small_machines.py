"""Fits on machines that are small, full or badly configured: they train, or an error names what is missing.

A jump of the wall clock is not tried. This process could only make it for the whole machine, and with libfaketime 0.9.10 neither Python's
sleep nor the JVM works.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.mounts import mounts, tmpfs  # noqa: F401 - a fixture
from tests.harness.paths import ROOT
from tests.harness.processes import wait_for_no_trainers
from tests.harness.spark import run_on, run_script, write_script
from tests.harness.waiting import wait_until

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]

PROGRAM = """
import hashlib
import torch
from torch import nn
from sparkhvd import TorchEstimator, TorchModel
from sparkhvd.errors import SparkhvdError

def estimator(hidden=8, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, hidden), nn.Tanh(), nn.Linear(hidden, 1))
    options = {"epochs": 3, "batch_size": 8, "num_proc": 2, **options}
    return TorchEstimator(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss="mse",
        feature_cols=["größe"], label_cols=["y"], random_seed=3, verbose=0, **options)

def table():
    return spark.range(0, 160, 1, 2).selectExpr("array(id % 7 / 7, id % 5 / 5) AS `größe`", "double(id % 3) AS y")

def digest(model):
    parts = [value.numpy().tobytes() for value in model.getModel().state_dict().values()]
    return hashlib.sha256(b"".join(parts)).hexdigest()
"""


def weights(output: str) -> list[str]:
    return re.findall(r"^WEIGHTS (\w+)$", output, re.MULTILINE)


def test_four_concurrent_fits_give_the_same_weights(tmp_path: Path) -> None:
    output = run_on(
        "local[4]",
        f"""{PROGRAM}
from concurrent.futures import ThreadPoolExecutor
df = table()
estimators = [estimator(store={str(tmp_path / "store")!r}) for _ in range(4)]
with ThreadPoolExecutor(4) as pool:
    models = list(pool.map(lambda each: each.fit(df), estimators))
for model in models:
    print("WEIGHTS", digest(model))
""",
        tmp_path,
    )
    found = weights(output)
    assert len(found) == 4
    assert len(set(found)) == 1


def test_second_driver_of_a_run_is_refused_or_sees_it_finished(tmp_path: Path) -> None:
    """One driver holds the run. The other is refused with the run's name, or comes later and gets the error of a finished run."""
    body = f"""{PROGRAM}
try:
    print("WEIGHTS", digest(estimator(store={str(tmp_path / "store")!r}, run_id="one", epochs=30).fit(table())))
except SparkhvdError as error:
    print("REFUSED", type(error).__name__, str(error).splitlines()[0])
"""
    outputs = {}

    def start(number: int) -> None:
        folder = tmp_path / f"driver-{number}"
        folder.mkdir()
        script = write_script(folder / "script.py", body, master="local[2]")
        outputs[number] = run_script(script).output

    threads = [threading.Thread(target=start, args=[n], name=f"driver {n}") for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    texts = "".join(outputs.values())
    assert len(weights(texts)) == 1, texts
    refused = re.findall(r"^REFUSED (\w+) (.*)$", texts, re.MULTILINE)
    assert len(refused) == 1, texts
    assert "'one'" in refused[0][1]


@pytest.mark.usefixtures("mounts")
def test_full_store_keeps_the_run_resumable(tmp_path: Path) -> None:
    """Weights of 8 MB and Adam's state rarely fit into 64 MB beside a file of 40 MB."""
    with tmpfs(tmp_path / "small", 64 << 20) as place:
        output = run_on(
            "local[2]",
            f"""{PROGRAM}
import os
from pathlib import Path
store, ballast = {str(place / "store")!r}, Path({str(place / "ballast")!r})
ballast.write_bytes(bytes(40 << 20))
wide = dict(hidden=1 << 19, store=store, run_id="full", epochs=2)
try:
    print("WEIGHTS", digest(estimator(**wide).fit(table())))
except SparkhvdError as error:
    print("REFUSED", type(error).__name__, str(error).splitlines()[0])
ballast.unlink()
print("WEIGHTS", digest(estimator(**wide).fit(table())))
""",
            tmp_path,
        )
    assert len(weights(output)) == 1, output
    assert re.search(r"^REFUSED \w+ .*(full|No space left)", output, re.MULTILINE), output


@pytest.mark.usefixtures("mounts")
def test_fit_works_with_64_mb_of_shared_memory(tmp_path: Path) -> None:
    """Containers have a small /dev/shm, which ranks do not need for their shared memory."""
    prefix = [
        "unshare",
        "-m",
        "sh",
        "-c",
        'mount -t tmpfs -o size=64m none /dev/shm && exec "$@"',
        "sh",
    ]
    body = f"""{PROGRAM}
assert os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize == 64 << 20
print("WEIGHTS", digest(estimator(hidden=1 << 23, store={str(tmp_path / "store")!r}, epochs=1).fit(table())))
"""
    assert len(weights(run_on("local[2]", body, tmp_path, prefix=prefix))) == 1


@pytest.fixture
def memory_group() -> Iterator[Path]:
    """A control group with 3 GB of memory. Processes join it by its `cgroup.procs`."""
    place = Path("/sys/fs/cgroup/memory")
    if not (place / "memory.limit_in_bytes").exists() or not os.access(place, os.W_OK):
        pytest.skip("a control group of memory (version 1) cannot be made here")
    group = place / f"sparkhvd-test-{os.getpid()}"
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text(str(3 << 30))
    yield group
    wait_until(lambda: not (group / "cgroup.procs").read_text(), "its processes have ended")
    group.rmdir()


def test_rank_beyond_its_container_memory_is_relaunched_or_named(
    memory_group: Path, tmp_path: Path
) -> None:
    """The kernel kills the largest process of the control group, which is the rank."""
    body = f"""{PROGRAM}
class Greedy(nn.Module):
    def __init__(self, flag):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.flag = nn.Linear(2, 1), flag

    def forward(self, x):
        if os.environ.get("RANK") == "1" and os.path.exists(self.flag):
            if self.flag.endswith("once"):
                os.remove(self.flag)
            self.all = torch.ones(1 << 30)
        return self.layer(x)

def fit(flag):
    made = estimator(max_retries=1, store={str(tmp_path / "store")!r})
    return made.setModel(Greedy(flag)).setOptimizer("sgd").fit(table())

print("WEIGHTS", digest(fit({str(tmp_path / "never")!r})))
print("WEIGHTS", digest(fit({str(tmp_path / "once")!r})))
try:
    fit({str(tmp_path / "always")!r})
except SparkhvdError as error:
    print("REFUSED", type(error).__name__, str(error).splitlines()[0])
"""
    (tmp_path / "once").touch()
    (tmp_path / "always").touch()
    prefix = ["sh", "-c", f'echo $$ > {memory_group}/cgroup.procs && exec "$@"', "sh"]
    output = run_on("local[2]", body, tmp_path, prefix=prefix)
    found = weights(output)
    assert len(found) == 2, output
    assert len(set(found)) == 1, output
    assert re.search(r"^REFUSED \w+ .*SIGKILL", output, re.MULTILINE), output


@pytest.mark.usefixtures("mounts")
def test_error_names_a_full_spark_folder(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "small", 1 << 20) as place:
        (place / "ballast").write_bytes(bytes(1 << 19))
        body = f"""{PROGRAM}
df = table().selectExpr("`größe`", "y", "repeat(uuid(), 4000) AS text").repartition(3)
try:
    print("WEIGHTS", digest(estimator(store={str(tmp_path / "store")!r}).fit(df)))
except Exception as error:
    print("REFUSED", type(error).__name__, [line for line in str(error).splitlines() if "space" in line][:1])
"""
        script = write_script(
            tmp_path / "script.py", body, master="local[2]", conf={"spark.local.dir": str(place)}
        )
        output = run_script(script).output
    # Spark prunes the column of texts, so the fit may succeed. Otherwise the error has the reason.
    assert len(weights(output)) == 1 or "No space left" in output, output


def test_fit_works_without_home_and_with_the_c_locale(tmp_path: Path) -> None:
    env = {"HOME": "", "USER": "", "LANG": "C", "LC_ALL": "C"}  # empty: not set
    body = f"""{PROGRAM}
assert "HOME" not in os.environ
model = estimator(store={str(tmp_path / "store")!r}).fit(table())
model.write().save({str(tmp_path / "saved")!r})
assert digest(TorchModel.load({str(tmp_path / "saved")!r})) == digest(model)
print("WEIGHTS", digest(model))
"""
    assert len(weights(run_on("local[2]", body, tmp_path, env=env))) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone can start an ordinary user's process")
def test_error_names_the_limit_on_processes(tmp_path: Path) -> None:
    """The test uses an ordinary user, because root has no limit, and no Spark, because a JVM has more threads than ranks."""
    if shutil.which("setpriv") is None or shutil.which("prlimit") is None:
        pytest.skip("setpriv and prlimit of util-linux are not installed")
    folder = tmp_path / "home"
    folder.mkdir()
    for each in (folder, *folder.parents[:3]):
        each.chmod(0o777)
    script = folder / "script.py"
    script.write_text(
        "from sparkhvd import run_local\n"
        "if __name__ == '__main__':\n"
        "    print(run_local(len, ([1, 2],), num_proc=2))\n"
    )
    user = ["setpriv", "--reuid", "4242", "--regid", "4242", "--clear-groups"]
    probe = subprocess.run(
        [*user, sys.executable, "-c", "import torch"], capture_output=True, check=False
    )
    if probe.returncode != 0:
        pytest.skip(f"another user cannot run this Python: {probe.stderr[-200:]!r}")
    ended = subprocess.run(
        ["prlimit", "--nproc=4", *user, sys.executable, str(script)],
        cwd=folder,
        env={**os.environ, "HOME": str(folder), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode != 0
    assert re.search(
        r"(RLIMIT_NPROC|processes|Resource temporarily unavailable|start new thread)", ended.stderr
    ), ended.stderr
    assert wait_for_no_trainers() == set()
