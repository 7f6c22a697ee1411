"""Two applications use one store, each with its own data: one ends while the other trains, and the other is killed."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from sparkhvd import Store
from sparkhvd.data.ownership import sweep
from tests.harness.processes import wait_for_no_trainers
from tests.harness.soak import soak
from tests.harness.spark import run_on, started_script, write_script
from tests.harness.waiting import wait_until

# The start of two JVMs may take long on a busy machine.
pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

PROGRAM = """
import torch
from pathlib import Path
from torch import nn
from sparkhvd import Store, TorchEstimator

class Waiting(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, x):
        if self.training and WAITS:
            Path(FOLDER, "trains").touch()
            while not Path(FOLDER, "continue").exists():
                time.sleep(0.05)
        return self.layer(x.reshape(-1, 1))

df = spark.range(50).selectExpr("id * 0.1D AS x", "id * 0.2D AS y")
model = TorchEstimator(
    model=Waiting(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), loss=nn.MSELoss(), feature_cols=["x"],
    label_cols=["y"], batch_size=10, num_proc=1, store=Store.create(FOLDER + "/store"), verbose=0, epochs=2).fit(df)
assert [r["rows"] for r in model.history] == [50, 50]
"""


def program(folder: Path, *, waits: bool) -> str:
    return f"FOLDER, WAITS = {str(folder)!r}, {waits}\n{PROGRAM}"


@soak("data/test_reuse, data/test_contents")
def test_ended_or_killed_application_leaves_data_of_the_other(tmp_path: Path) -> None:
    dying = program(tmp_path, waits=True) + '\nPath(FOLDER, "fitted").touch()\ntime.sleep(600)'
    script = write_script(tmp_path / "dying.py", dying, master="local[1]")
    store = Store(str(tmp_path / "store"))
    with started_script(script) as process:
        wait_until((tmp_path / "trains").exists, "the first one trains", within_s=200)
        (data_dir,) = store.data_directories()
        run_on("local[1]", program(tmp_path, waits=False), tmp_path, timeout_s=300)
        # The other application wrote and deleted its own.
        assert store.data_directories() == [data_dir]
        assert process.poll() is None
        assert not (tmp_path / "fitted").exists()
        (tmp_path / "continue").touch()
        wait_until((tmp_path / "fitted").exists, "the second one has fitted", within_s=100)
        process.kill()
        process.wait(10)
    assert wait_for_no_trainers() == set()
    assert store.data_directories() == [data_dir]
    # Its death is unknown until its lease has expired.
    now = time.time()
    assert sweep(store, now=now + 23 * 3600) == []
    assert sweep(store, now=now + 25 * 3600) == [data_dir]
    assert store.list("data", recursive=True) == []
