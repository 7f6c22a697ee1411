"""Time and error of one regression with each tool of docs/comparison.md.

    .venv/bin/pip install xgboost "ray[train]"
    .venv/bin/python benchmarks/comparison.py [--rounds 3] [--write]

200,000 rows of 32 floats in four Parquet files, of which five determine the label (Friedman's first function plus noise of deviation 1), and 20,000 rows to
test. sparkhvd, TorchDistributor, Ray Train and Lightning train the same network with the same optimizer for 5 epochs on 2 ranks, XGBoost grows 100 trees
on 2 tasks. A tool that is not installed is left out.

A round starts a new process for each tool in turn. It starts its session (Spark, Ray, or nothing), then trains twice: `first` and `later` are the times of these
calls, from the files to a trained model on the driver. The error is the root of the mean square on the test rows; 1.0 is the noise, so no model is below it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from common import Report, local_session, spread

ROWS, TEST_ROWS, WIDTH, FILES = 200_000, 20_000, 32, 4
RANKS, EPOCHS, BATCH, LEARNING_RATE, TREES = 2, 5, 256, 0.02, 100
NAMES = [f"x{i}" for i in range(WIDTH)]
HERE = Path(__file__).resolve().parent
Array = npt.NDArray[np.float32]


# --- The data and the network. ---


def write_rows(folder: Path) -> None:
    """Write the training and the test rows as Parquet files."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    generator = np.random.default_rng(0)
    for name, rows, files in (("train", ROWS, FILES), ("test", TEST_ROWS, 1)):
        x = generator.random((rows, WIDTH), dtype=np.float32)
        y = 10 * np.sin(np.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2
        y += 10 * x[:, 3] + 5 * x[:, 4] + generator.standard_normal(rows, dtype=np.float32)
        table = pa.table({**dict(zip(NAMES, x.T, strict=True)), "y": y.astype(np.float32)})
        (folder / name).mkdir()
        for number in range(files):
            size = rows // files
            pq.write_table(table.slice(number * size, size), folder / name / f"{number}.parquet")


def read_rows(folder: str, name: str) -> tuple[Array, Array]:
    """Read rows and labels, as arrays (rows, WIDTH) and (rows, 1)."""
    import pyarrow.parquet as pq

    table = pq.read_table(Path(folder) / name)
    x = np.stack([table.column(each).to_numpy() for each in NAMES], axis=1)
    return x, table.column("y").to_numpy().reshape(-1, 1)


def network() -> Any:
    """Build the network of all tools, with the same weights each time."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)
    )


def error_of(model: Any, folder: str) -> float:
    """Compute the error of a network on the test rows."""
    import torch

    x, y = read_rows(folder, "test")
    with torch.no_grad():
        predicted = model.cpu().eval()(torch.from_numpy(x)).numpy()
    return float(np.sqrt(np.mean((predicted - y) ** 2)))


def train_with_ddp(folder: str) -> float:
    """Train a rank's share of the rows with DDP in a running process group, and return the error on the test rows."""
    import torch
    import torch.distributed as dist
    from torch import nn

    torch.set_num_threads(1)  # one rank per core
    rank, size = dist.get_rank(), dist.get_world_size()
    x, y = (torch.from_numpy(each) for each in read_rows(folder, "train"))
    # Equal steps on every rank, or DDP waits for ever.
    x, y = x[rank : len(x) // size * size : size], y[rank : len(y) // size * size : size]
    model = network()
    ddp = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=LEARNING_RATE)
    for epoch in range(EPOCHS):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
        for rows in order.split(BATCH):
            optimizer.zero_grad()
            nn.functional.mse_loss(ddp(x[rows]), y[rows]).backward()
            optimizer.step()
    return error_of(model, folder)


# --- The tools. ---

Train = Callable[[], float]


@contextmanager
def sparkhvd(folder: str) -> Iterator[Train]:
    """TorchEstimator on a DataFrame."""
    import torch

    from sparkhvd import TorchEstimator

    with local_session(RANKS) as spark:

        def train() -> float:
            model = network()
            estimator = TorchEstimator(
                model=model,
                optimizer=torch.optim.Adam(model.parameters(), lr=LEARNING_RATE),
                loss=torch.nn.MSELoss(),
                feature_cols=NAMES,
                label_cols=["y"],
                batch_size=BATCH,
                epochs=EPOCHS,
                num_proc=RANKS,
                verbose=0,
            )
            return error_of(estimator.fit(spark.read.parquet(f"{folder}/train")).getModel(), folder)

        yield train


@contextmanager
def torch_distributor(folder: str) -> Iterator[Train]:
    """TorchDistributor of pyspark: a function of DDP on Spark's tasks."""
    from pyspark.ml.torch.distributor import TorchDistributor

    def rank(folder: str, train: Callable[[str], float]) -> float:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        error = train(folder)
        dist.destroy_process_group()
        return error

    with local_session(RANKS):
        distributor = TorchDistributor(num_processes=RANKS, local_mode=False, use_gpu=False)
        yield lambda: distributor.run(rank, folder, train_with_ddp)


@contextmanager
def ray_train(folder: str) -> Iterator[Train]:
    """Ray Train's TorchTrainer: the same function on Ray's workers."""
    import ray
    from ray import train
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    found = Path(folder) / "ray-error"

    def loop(config: dict[str, str]) -> None:
        error = train_with_ddp(config["folder"])
        if train.get_context().get_world_rank() == 0:
            found.write_text(str(error))  # `fit` returns metrics only with a checkpoint

    ray.init(num_cpus=RANKS, include_dashboard=False, log_to_driver=False)
    trainer = TorchTrainer(
        loop,
        train_loop_config={"folder": folder},
        scaling_config=ScalingConfig(num_workers=RANKS, resources_per_worker={"CPU": 1}),
        torch_config=TorchConfig(backend="gloo"),
        run_config=RunConfig(storage_path=f"{folder}/ray"),
    )

    def fit() -> float:
        trainer.fit()
        return float(found.read_text())

    yield fit
    ray.shutdown()


@contextmanager
def xgboost(folder: str) -> Iterator[Train]:
    """XGBoost's estimator on a DataFrame."""
    from xgboost.spark import SparkXGBRegressor

    with local_session(RANKS) as spark:

        def train() -> float:
            estimator = SparkXGBRegressor(
                features_col=NAMES, label_col="y", num_workers=RANKS, n_estimators=TREES
            )
            booster = estimator.fit(spark.read.parquet(f"{folder}/train")).get_booster()
            x, y = read_rows(folder, "test")
            predicted = booster.inplace_predict(x).reshape(-1, 1)
            return float(np.sqrt(np.mean((predicted - y) ** 2)))

        yield train


@contextmanager
def lightning(folder: str) -> Iterator[Train]:
    """Lightning's Trainer with DDP over Gloo, without Spark. It forks the ranks, because forks start faster than new interpreters."""
    import torch
    from lightning import LightningModule, Trainer
    from torch import Tensor, nn
    from torch.utils.data import DataLoader, TensorDataset

    class Regression(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = network()

        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
            x, y = batch
            return nn.functional.mse_loss(self.network(x), y)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=LEARNING_RATE)

        def train_dataloader(self) -> Any:
            torch.set_num_threads(1)  # one rank per core
            rows = TensorDataset(*(torch.from_numpy(each) for each in read_rows(folder, "train")))
            return DataLoader(rows, batch_size=BATCH, shuffle=True)

    def train() -> float:
        module = Regression()
        trainer = Trainer(
            accelerator="cpu",
            devices=RANKS,
            strategy="ddp_fork",
            max_epochs=EPOCHS,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module)
        return error_of(module.network, folder)

    yield train


TOOLS = {
    "sparkhvd": (sparkhvd, "sparkhvd"),
    "TorchDistributor + DDP": (torch_distributor, "pyspark"),
    "Ray Train + DDP": (ray_train, "ray"),
    "Lightning alone, DDP": (lightning, "lightning"),
    "XGBoost on Spark": (xgboost, "xgboost"),
}


# --- The table. ---


def one_tool(name: str, folder: str) -> dict[str, float]:
    """Train twice in this process."""
    began = time.monotonic()
    with TOOLS[name][0](folder) as train:
        seconds = [time.monotonic() - began]
        for _ in range(2):
            began = time.monotonic()
            error = train()
            seconds.append(time.monotonic() - began)
    return {**dict(zip(("session", "first", "later"), seconds, strict=True)), "error": error}


def in_new_process(name: str, folder: str) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, __file__, "--tool", name, "--folder", folder],
        env={**os.environ, "PYTHONPATH": str(HERE)},  # ranks import the functions from here
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=600,
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="keep the table in docs/results/")
    parser.add_argument("--tool", choices=TOOLS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    given = parser.parse_args()
    # Otherwise `import lightning` finds the benchmark of this name.
    sys.path[:] = [each for each in sys.path if Path(each).resolve() != HERE]
    if given.tool:
        print(json.dumps(one_tool(given.tool, given.folder)))
        return
    names = [name for name, (_, package) in TOOLS.items() if importlib.util.find_spec(package)]
    report = Report(f"comparison: {ROWS:,} rows x {WIDTH} with each tool")
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory(prefix="sparkhvd-bench-") as folder:
        write_rows(Path(folder))
        for number in range(given.rounds):
            for name in names:
                found[name].append(in_new_process(name, folder))
                print(f"round {number + 1}, {name}: {found[name][-1]}", flush=True)
    rows = [
        [
            name,
            *(
                spread([one[what] for one in rounds])
                for what in ("session", "first", "later", "error")
            ),
        ]
        for name, rounds in found.items()
    ]
    header = [
        "tool",
        "before the first training, s",
        "first, s",
        "later, s",
        "RMSE (1.0 is the best possible)",
    ]
    report.table(header, rows)
    report.raw.update(found)
    report.note(
        f"Median (smallest to largest) of {given.rounds} new processes. sparkhvd's times include writing the rows for training, shuffling them across "
        "ranks, and checkpoints. TorchDistributor, Ray Train and Lightning run the benchmark's own reader, which keeps its half of the rows in memory."
    )
    report.finish("benchmarks/comparison.py", write=given.write, json_path=None)


if __name__ == "__main__":
    main()
