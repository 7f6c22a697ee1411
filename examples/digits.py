"""Train a classifier of handwritten digits on Spark, with two tasks that start together.

    .venv/bin/python examples/digits.py                                      # starts local[2] itself
    .venv/bin/python examples/digits.py --master 'local-cluster[2,1,1024]'   # two executor processes
    .venv/bin/python examples/digits.py --remote 'local-cluster[2,1,1024]'   # the same through Spark Connect
    spark-submit --master spark://host:7077 examples/digits.py --store /shared/folder

The same code and the same seed give the same weights in all four; the last line shows their hash.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

CLASSES = 10


class DigitsNet(nn.Module):
    """Two hidden layers over the 64 pixels of an 8x8 image."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, CLASSES)
        )

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.layers(pixels / 16.0)  # a pixel is 0 to 16


def accuracy(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the share of rows whose most likely digit is the right one."""
    return (outputs.argmax(dim=1) == labels).float().mean()


def train_and_test_rows() -> tuple[list[Any], list[Any]]:
    """Load scikit-learn's 1,797 images as (pixels, digit), one in five kept for the test."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, digits = load_digits(return_X_y=True)
    rows = [(pixels.tolist(), int(digit)) for pixels, digit in zip(images, digits, strict=True)]
    train, test = train_test_split(rows, test_size=0.2, random_state=7, stratify=digits)
    return train, test


def main(argv: Sequence[str] | None = None) -> None:
    options = parse_arguments(argv)
    spark = start_spark(options)

    from sparkhvd import Store, TorchEstimator

    train_rows, test_rows = train_and_test_rows()
    columns = "features array<float>, digit bigint"
    train_df = spark.createDataFrame(train_rows, columns)
    test_df = spark.createDataFrame(test_rows, columns)

    torch.manual_seed(options.seed)  # the first weights
    model = DigitsNet()
    with tempfile.TemporaryDirectory(prefix="sparkhvd-digits-") as scratch:
        estimator = TorchEstimator(
            model=model,
            optimizer=torch.optim.Adam(model.parameters(), lr=2e-3),
            loss=nn.CrossEntropyLoss(),
            metrics={"accuracy": accuracy},
            feature_cols=["features"],
            label_cols=["digit"],
            batch_size=32,
            epochs=options.epochs,
            num_proc=2,
            store=Store.create(options.store or scratch),
            random_seed=options.seed,
            verbose=1,  # one line per epoch, as it happens
        )
        fitted = estimator.fit(train_df)

        began = time.monotonic()
        predicted = fitted.setPredictionCol("prediction").transform(test_df)
        pairs = predicted.select("digit", "prediction").collect()
        transform_s = time.monotonic() - began

    test_accuracy = sum(row.digit == row.prediction for row in pairs) / len(pairs)
    plot = save_loss_curve(fitted.history, options.plot)
    seconds = fitted.timings
    print(
        f"\n{len(train_rows)} images trained on, {len(pairs)} tested:"
        f" test accuracy {test_accuracy:.4f}"
        f"\nmaterialize {seconds['materialize']:.1f} s, launch {seconds['launch']:.1f} s,"
        f" train {seconds['train']:.1f} s, transform {transform_s:.1f} s"
        f"\nloss curve: {plot}"
        f"\nweights sha256: {weights_sha256(fitted.getModel())}"
    )
    spark.stop()
    if test_accuracy < 0.95:
        sys.exit(f"The test accuracy is {test_accuracy:.4f}; this example should reach 0.95.")


def weights_sha256(model: nn.Module) -> str:
    """Hash the names and bytes of all weights."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def save_loss_curve(history: Sequence[dict[str, Any]], path: str | None) -> Path:
    """Draw loss and accuracy per epoch into a PNG."""
    if path is None:
        path = os.path.join(tempfile.mkdtemp(prefix="sparkhvd-digits-"), "digits-loss.png")
    # matplotlib keeps its font list in the home directory by default.
    os.environ.setdefault("MPLCONFIGDIR", tempfile.mkdtemp(prefix="matplotlib-"))
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    epochs = range(1, len(history) + 1)
    figure, axes = plt.subplots(figsize=(7, 4))
    axes.plot(epochs, [record["loss"] for record in history], marker="o", label="loss")
    axes.plot(epochs, [record["accuracy"] for record in history], marker=".", label="accuracy")
    axes.set_xlabel("epoch")
    axes.set_title("Handwritten digits, two ranks")
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    return Path(path).resolve()


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--master", help="a Spark master; default local[2]")
    where.add_argument("--remote", help="a Spark Connect address: sc://host, or a local master")
    parser.add_argument("--store", help="folder that driver and executors share; default temporary")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--plot", help="where the PNG of the loss curve goes; default temporary")
    return parser.parse_args(argv)


def start_spark(options: argparse.Namespace) -> Any:
    """Start a session on the chosen master; under spark-submit, take the one that was submitted."""
    submitted = "PYSPARK_GATEWAY_PORT" in os.environ
    # Tasks run this Python too, so the environment need not be activated.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    if not submitted and not (options.remote or "").startswith("sc://"):
        find_java()
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName("digits")
    if options.remote:
        builder = builder.remote(options.remote)
    elif not submitted:
        builder = builder.master(options.master or "local[2]")
    if not submitted:
        # Everything is on this machine: no web page, and no port that others can reach.
        builder = (
            builder.config("spark.ui.enabled", "false")
            .config("spark.ui.showConsoleProgress", "false")
            .config("spark.driver.host", "127.0.0.1")
            .config("spark.driver.bindAddress", "127.0.0.1")
            .config("spark.sql.warehouse.dir", tempfile.gettempdir() + "/spark-warehouse")
        )
    return builder.getOrCreate()


def find_java() -> None:
    """Point Spark at an installed Java 17 or newer that is not on PATH; exit without one."""
    homes = [os.environ.get("JAVA_HOME", "")]
    if on_path := shutil.which("java"):
        homes.append(str(Path(on_path).resolve().parents[1]))
    homes += sorted(str(home) for home in Path("/usr/lib/jvm").glob("*"))
    for home in filter(None, homes):
        java = Path(home) / "bin" / "java"
        if java.exists():
            says = subprocess.run([java, "-version"], capture_output=True, text=True, check=False)
            version = re.search(r'version "(\d+)', says.stderr)
            if version and int(version[1]) >= 17:
                os.environ["JAVA_HOME"] = home
                return
    sys.exit(
        "Spark needs Java 17 or newer and none was found: install one, for example with"
        " `sudo apt-get install openjdk-17-jre-headless`, or set JAVA_HOME."
    )


if __name__ == "__main__":
    main()
