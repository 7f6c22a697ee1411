"""Images by path and text for a LightningModule: `sparkhvd.lightning.TorchEstimator` in classic Spark and over Connect."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

pl = pytest.importorskip("lightning", reason="runs where lightning is: make test-users")
Image = pytest.importorskip("PIL.Image", reason="runs where Pillow is: make test-users")
pytest.importorskip("transformers", reason="runs where transformers is: make test-users")

import torch  # noqa: E402 - after importorskip
from torch import nn  # noqa: E402

from sparkhvd.estimator import image, tokenizer  # noqa: E402
from sparkhvd.lightning import TorchEstimator  # noqa: E402
from tests.harness.by_value import by_value  # noqa: E402
from tests.harness.cluster import run_client  # noqa: E402
from tests.harness.spark import connect_server  # noqa: E402

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]
travels_by_value = by_value(__name__)
SIDE, ROWS = 4, 40
# The first, and all rows of the third batch of 4.
BROKEN = {0, 8, 9, 10, 11, 17}


class Flat(pl.LightningModule):  # type: ignore[misc]  # untyped
    """A linear layer on the values of a column."""

    def __init__(self, column: str, width: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.column, self.layer = column, nn.Linear(width, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x.flatten(1).float())
        return out

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self(batch[self.column]), batch["y"])
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Texts(pl.LightningModule):  # type: ignore[misc]  # untyped
    """The mean of the words' vectors, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.words, self.layer = nn.Embedding(10, 8), nn.Linear(8, 2)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        kept = attention_mask[..., None]
        out: torch.Tensor = self.layer((self.words(input_ids) * kept).sum(1) / kept.sum(1))
        return out

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        scores = self(**batch["input_ids"])
        return nn.functional.cross_entropy(scores, batch["y"])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.05)


def pictures(spark: SparkSession, folder: Path, broken: set[int]) -> DataFrame:
    """Dark and bright pictures by their paths. Some files are truncated."""
    folder.mkdir()
    rng = np.random.default_rng(3)
    rows = []
    for number in range(ROWS):
        pixels = rng.integers(0, 100, (SIDE, SIDE, 3), np.uint8) + 150 * (number % 2)
        path = folder / f"{number}.png"
        Image.fromarray(pixels.astype(np.uint8)).save(path)
        if number in broken:
            path.write_bytes(path.read_bytes()[:40])
        rows.append((number, str(path), number % 2))
    return spark.createDataFrame(rows, ["number", "path", "y"]).coalesce(1)


def of_pictures(folder: Path, num_proc: int, **options: Any) -> TorchEstimator:
    given = {
        "model": Flat("path", 3 * SIDE * SIDE),
        "feature_cols": ["path"],
        "label_cols": ["y"],
        "label_dtypes": ["int64"],
        "decoders": {"path": image(SIDE, SIDE, broken="skip")},
        "num_workers": 2,
        "num_proc": num_proc,
        "batch_size": 4 // num_proc,
        "epochs": 2,
        "shuffle": False,
        "store": str(folder / "store"),
        "verbose": 0,
    }
    return TorchEstimator(**{**given, **options})


def test_one_and_two_ranks_skip_the_same_broken_images(spark: SparkSession, tmp_path: Path) -> None:
    df = pictures(spark, tmp_path / "pictures", BROKEN)
    one, two = (of_pictures(tmp_path, ranks).fit(df) for ranks in (1, 2))
    wanted = Flat("path", 3 * SIDE * SIDE)
    optimizer, decode = wanted.configure_optimizers(), image(SIDE, SIDE)
    rows = df.collect()
    for _ in range(2):
        for start in range(0, ROWS, 4):
            good = [row for row in rows[start : start + 4] if row.number not in BROKEN]
            if good:
                x = torch.from_numpy(np.stack([decode(row.path) for row in good]))
                optimizer.zero_grad()
                nn.functional.cross_entropy(wanted(x), torch.tensor([r.y for r in good])).backward()
                optimizer.step()
    for fitted in (one, two):
        for a, b in zip(fitted.getModel().parameters(), wanted.parameters(), strict=True):
            torch.testing.assert_close(a, b.detach(), rtol=0, atol=1e-6)
        assert [record["rows"] for record in fitted.history] == [ROWS - len(BROKEN)] * 2
        assert fitted.history[1]["train_loss"] == pytest.approx(two.history[1]["train_loss"])
    found = {row.number for row in two.transform(df).collect() if row.y__output is None}
    assert found == BROKEN


def fit_inputs(spark: SparkSession, folder: Path) -> None:
    """Fit and transform pictures by path, and text that a tokenizer of Hugging Face turns into numbers."""
    df = pictures(spark, folder / "pictures", set())
    fitted = of_pictures(folder, 2, epochs=10).fit(df)
    found = fitted.transform(df).select("y", "y__output").collect()
    right = sum(int(np.argmax(row.y__output)) == row.y for row in found)
    assert right > 0.9 * ROWS, right

    from transformers import BertTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "fine", "bad", "poor", "thing"]
    (folder / "vocab.txt").write_text("\n".join(words))
    texts = [(f"{'good fine' if n % 2 else 'bad poor'} thing", n % 2) for n in range(ROWS)]
    text = spark.createDataFrame(texts, ["text", "y"])
    fitted = TorchEstimator(
        model=Texts(),
        feature_cols=["text"],
        label_cols=["y"],
        label_dtypes=["int64"],
        inputs={"input_ids": "text"},
        collate_fn={"text": tokenizer(BertTokenizerFast(str(folder / "vocab.txt")))},
        num_proc=2,
        batch_size=4,
        epochs=4,
        store=str(folder / "store"),
        verbose=0,
    ).fit(text)
    found = fitted.transform(text).select("y", "y__output").collect()
    right = sum(int(np.argmax(row.y__output)) == row.y for row in found)
    assert right > 0.9 * ROWS, right


def test_lightning_inputs_fit_over_connect(tmp_path: Path) -> None:
    body = f"""
from pathlib import Path
from tests.soak.users.test_lightning_inputs import fit_inputs
fit_inputs(spark, Path({str(tmp_path)!r}))
print("FITTED")
"""
    with connect_server(tmp_path / "server") as remote:
        assert "FITTED" in run_client(remote, body, tmp_path, timeout_s=300)
