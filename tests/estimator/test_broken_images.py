"""Images that are missing, truncated or not images: an error, or rows that a fit omits and transform makes null."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from sparkhvd import InvalidArgumentError
from sparkhvd.errors import RankError
from sparkhvd.estimator import image
from tests.estimator.fits import estimator
from tests.harness.by_value import by_value

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

Image = pytest.importorskip("PIL.Image", reason="needs Pillow")
travels_by_value = by_value(__name__)
SIDE = 4
# The first row, and in one order whole batches of a rank.
BROKEN = {0, 1, 2, 3, 9, 14}


class Flat(nn.Module):
    """A linear layer on pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3 * SIDE * SIDE, 1)
        nn.init.constant_(self.layer.weight, 0.01)
        nn.init.zeros_(self.layer.bias)

    def forward(self, pixels: Tensor) -> Tensor:  # noqa: D102
        out: Tensor = self.layer(pixels.flatten(1))
        return out


@pytest.fixture(scope="module")
def df(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> DataFrame:
    folder = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    rows = []
    for number in range(24):
        pixels = rng.integers(0, 255, (SIDE, SIDE, 3), np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "PNG")
        data = buffer.getvalue()
        path = folder / f"{number}.png"
        if number not in BROKEN:
            path.write_bytes(data)
        elif number % 3:
            path.write_bytes(data[: len(data) // 2] if number % 3 == 1 else b"text")
        rows.append((number, str(path), float(pixels.mean() / 255), number % 4 == 3))
    return spark.createDataFrame(rows, ["number", "path", "y", "held_out"]).coalesce(1)


def fit_of(ranks: int, broken: str, **options: Any) -> Any:
    given: dict[str, Any] = {
        "feature_cols": ["path"],
        "label_cols": ["y"],
        "inputs": {"pixels": "path"},
        "decoders": {"path": image(SIDE, SIDE, broken=broken)},
        "loss": "mse",
        "metrics": ["mae"],
        "validation": "held_out",
        "num_proc": ranks,
        "batch_size": 4 // ranks,
        "epochs": 2,
        "random_seed": 5,
        "shuffle": False,
        "verbose": 1,
    }
    model = Flat()
    return estimator(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        **{**given, **options},
    )


def test_skipped_rows_do_not_change_the_mean_gradient_of_others(
    df: DataFrame, capfd: pytest.CaptureFixture[str]
) -> None:
    one, two = (fit_of(ranks, "skip").fit(df) for ranks in (1, 2))
    for a, b in zip(one.getModel().parameters(), two.getModel().parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
    for record, other in zip(one.history, two.history, strict=True):
        for name in ("loss", "mae", "val_loss", "val_mae"):
            assert record[name] == pytest.approx(other[name], abs=1e-6)
        assert (record["rows"], record["broken_rows"], record["val_broken_rows"]) == (13, 5, 1)
        assert (other["rows"], other["broken_rows"], other["val_broken_rows"]) == (13, 5, 1)
    # In plain torch: the first two batches of four have one row and two rows.
    model = Flat()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rows = [r for r in df.collect() if not r.held_out]
    decode = image(SIDE, SIDE)
    for _ in range(2):
        for start in range(0, len(rows), 4):
            good = [r for r in rows[start : start + 4] if r.number not in BROKEN]
            if not good:
                continue
            x = torch.from_numpy(np.stack([decode(r.path) for r in good]))
            y = torch.tensor([[r.y] for r in good])
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    for a, b in zip(model.parameters(), two.getModel().parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
    out = capfd.readouterr()
    assert "6 broken rows left out" in out.out
    assert "a row is skipped because of image(broken='skip'): path '" in out.out + out.err

    found = {r.number: r for r in two.transform(df).collect()}
    assert {n for n, r in found.items() if r.y__output is None} == BROKEN
    assert {n for n, r in found.items() if r.prediction is None} == BROKEN
    with torch.no_grad():
        for r in rows:
            if r.number not in BROKEN:
                wanted = float(model(torch.from_numpy(decode(r.path))[None]))
                assert found[r.number].y__output == pytest.approx(wanted, abs=1e-5)
    only = two.transform(df.where("number < 3")).collect()
    assert [r.y__output for r in only] == [None] * 3


def train(ctx: Any) -> None:
    """Train as the estimator's own loop does."""
    for _ in range(ctx.epochs):
        rows = 0
        for batch in ctx.train_loader:
            ctx.optimizer.zero_grad()
            loss = nn.functional.mse_loss(ctx.model(batch["path"]), batch["y"][:, None])
            ctx.backward(loss)
            ctx.optimizer.step()
            rows += ctx.num_global_rows
        ctx.log({"rows": rows})


def test_train_fn_gets_gradients_of_the_readable_rows(df: DataFrame) -> None:
    wanted = fit_of(2, "skip").fit(df)
    given = {"loss": None, "metrics": None, "inputs": None, "train_fn": train}
    for ranks in (1, 2):
        found = fit_of(ranks, "skip", **given).fit(df)
        assert [record["rows"] for record in found.history] == [13, 13]
        for a, b in zip(found.getModel().parameters(), wanted.getModel().parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_fit_fails_if_all_images_or_any_unskipped_image_is_broken(df: DataFrame) -> None:
    few = df.where("number in (0, 1, 2, 3)")
    with pytest.raises(RankError, match="images of all 3 training rows are missing or"):
        fit_of(1, "skip").fit(few)
    with pytest.raises(InvalidArgumentError, match=r"decoders\['path'\] failed for '.*/0.png'"):
        fit_of(1, "error").fit(df)
