"""Imports of programs, ranks and transform workers: no compiler, and few modules beyond torch and pyspark."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sparkhvd import lazy_compiler
from tests.harness.paths import ROOT

pytestmark = pytest.mark.spark

# Modules of other packages beyond `BASE`: today at most 5, of the standard library and of torch.
MOST_OTHERS = 15
REPORT = "import json, sys; print(json.dumps(sorted(sys.modules)))"
PROGRAMS = {
    "package": "import sparkhvd",
    "optimizer": """
import torch, sparkhvd.torch as hvd
hvd.init()
p = torch.nn.Parameter(torch.ones(2))
o = hvd.DistributedOptimizer(torch.optim.Adam([p]))
p.sum().backward()
o.step()
hvd.shutdown()
""",
    "estimator": "from sparkhvd import TorchEstimator",
    "rank": "import sparkhvd.runner.child, sparkhvd.training.train",
    "worker": "import sparkhvd.estimator.transform.worker",
}
BASE = "import torch, pyspark.ml, pyarrow.compute, pyarrow.fs, pyarrow.parquet"

# A fit and a transform in a new session. Each process writes the compiler's modules that it has.
SESSION = """
import json, os, sys, tempfile
from pathlib import Path

import numpy as np
from pyspark.sql import SparkSession

spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
spark.sparkContext.setLogLevel("ERROR")

import torch
from torch import nn

from sparkhvd import Callback, TorchEstimator

folder, driver = Path(sys.argv[1]), os.getpid()

def note(process):
    import os, sys
    from sparkhvd import lazy_compiler

    names = ("sympy", "torch._inductor", lazy_compiler.REAL)
    with (folder / f"{process}-{os.getpid()}").open("w") as file:
        file.write(" ".join(n for n in names if n in sys.modules))

class Noting(Callback):
    def on_train_end(self, ctx, history):
        note("rank")

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x):
        if not self.training and os.getpid() != driver:
            note("worker")
        return self.layer(x)

model = Net()
df = spark.createDataFrame([(float(i), float(i % 3), float(i)) for i in range(64)], ["a", "b", "y"])
estimator = TorchEstimator(
    model=model, optimizer=torch.optim.Adam, loss=nn.MSELoss(), feature_cols=["a", "b"],
    label_cols=["y"], batch_size=8, epochs=2, num_proc=2, callbacks=[Noting()], verbose=0,
)
fitted = estimator.fit(df)
note("driver")
assert fitted.transform(df.repartition(2)).count() == 64
assert len(fitted.transform(df.repartition(2)).select("y__output").collect()) == 64
spark.stop()
"""


def run(text: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", text, str(folder)],
        capture_output=True,
        text=True,
        timeout=250,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    return set(json.loads(run(f"{BASE}\n{REPORT}", tmp_path_factory.mktemp("base"))))


@pytest.mark.parametrize("program", PROGRAMS)
def test_program_imports_little_beyond_torch_and_pyspark(
    tmp_path: Path, base: set[str], program: str
) -> None:
    found = set(json.loads(run(f"{PROGRAMS[program]}\n{REPORT}", tmp_path)))
    assert not found & {"sympy", "torch._inductor", lazy_compiler.REAL}
    others = [name for name in found - base if not name.startswith("sparkhvd")]
    assert len(others) <= MOST_OTHERS, sorted(others)
    if program in ("package", "rank", "worker"):
        assert not found & {"pandas", "pyspark"}
    if program == "package":
        assert not found & {"torch", "numpy"}


def test_fit_and_transform_import_no_compiler_in_any_process(tmp_path: Path) -> None:
    run(SESSION, tmp_path)
    notes = list(tmp_path.iterdir())
    assert {note.name.partition("-")[0] for note in notes} == {"driver", "rank", "worker"}
    assert len([note for note in notes if note.name.startswith("rank")]) == 2
    assert {note.read_text() for note in notes} == {""}
