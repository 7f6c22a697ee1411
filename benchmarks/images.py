"""Images read by a training loop: a DataFrame of paths with `decoders={"path": image(...)}`, beside a DataLoader of torch over the same files.

    python benchmarks/images.py [--images 10000] [--rounds 5] [--json FILE] [--write]

The benchmark makes JPEGs of 224 x 224. Both read shuffled batches of 32 with two workers: threads of one process, and processes of the
DataLoader, which open and decode by Pillow, too. They take turns; each round is one epoch, and a loader's first, which starts its workers, is
not counted. Stored bytes are those of what `sparkhvd.data.prepare` has written.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from common import Report, Target, local_session, median_and_quartiles

SIZE, BATCH, WORKERS = 224, 32, 2
AS_FAST, STORED = 0.95, 1.0


def make_images(folder: Path, count: int) -> list[str]:
    """Write camera-like JPEGs of about 10 KB: smooth areas with some noise."""
    rng = np.random.default_rng(0)
    paths = []
    for number in range(count):
        coarse = rng.integers(0, 256, (8, 8, 3), np.uint8)
        smooth = np.asarray(Image.fromarray(coarse).resize((SIZE, SIZE), Image.Resampling.BICUBIC))
        noisy = np.clip(smooth + rng.normal(0, 6, smooth.shape), 0, 255).astype(np.uint8)
        path = folder / f"{number:06}.jpg"
        Image.fromarray(noisy).save(path, quality=85)
        paths.append(str(path))
    return paths


class Files(torch.utils.data.Dataset[torch.Tensor]):
    """Images of files, one by one, as of a torch program."""

    def __init__(self, paths: list[str], dtype: str) -> None:
        self.paths, self.dtype = paths, dtype

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, number: int) -> torch.Tensor:
        with Image.open(self.paths[number]) as opened:
            pixels = torch.from_numpy(np.array(opened.convert("RGB"))).permute(2, 0, 1).contiguous()
        return pixels if self.dtype == "uint8" else pixels.float().div(255)


def epoch(batches: Iterable[Any], rows: int) -> float:
    """Measure the seconds of an epoch."""
    began = time.perf_counter()
    seen = sum(len(batch) for batch in batches)
    seconds = time.perf_counter() - began
    assert seen == rows, f"{seen} of {rows} rows"
    return seconds


def measure(dataset: Any, paths: list[str], dtype: str, rounds: int) -> tuple[list[float], ...]:
    """Measure the seconds of epochs of both loaders, in turns."""
    from sparkhvd.estimator import image

    decode = image(SIZE, SIZE, dtype=dtype)
    theirs = torch.utils.data.DataLoader(
        Files(paths, dtype), BATCH, shuffle=True, num_workers=WORKERS, persistent_workers=True
    )
    ours: list[float] = []
    other: list[float] = []
    with dataset.loader(0, 1, BATCH, decoders={"path": decode}, num_workers=WORKERS) as loader:
        assert np.abs(decode(paths[0]).astype(float) - Files(paths, dtype)[0].numpy()).max() < 1e-6
        for number in range(rounds + 1):
            seconds = epoch((batch["path"] for batch in loader), len(paths))
            compared = epoch(theirs, len(paths))
            if number:
                ours.append(seconds)
                other.append(compared)
    return ours, other


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()

    import sparkhvd.data

    report = Report(f"Images: {given.images:,} JPEGs of {SIZE} x {SIZE}, {WORKERS} workers")
    with tempfile.TemporaryDirectory(prefix="sparkhvd-bench-") as folder:
        paths = make_images(Path(folder), given.images)
        total = sum(Path(path).stat().st_size for path in paths)
        with local_session(2) as spark:
            df = spark.createDataFrame([(path,) for path in paths], ["path"])
            dataset = sparkhvd.data.prepare(df, f"{folder}/store", decoded=["path"])
        stored = sum(f.stat().st_size for f in Path(f"{folder}/store").rglob("*") if f.is_file())
        rows: list[list[str | list[Target]]] = []
        for dtype in ("uint8", "float32"):
            ours, theirs = measure(dataset, paths, dtype, given.rounds)
            report.raw[dtype] = {"sparkhvd": ours, "DataLoader": theirs}
            faster = float(np.median(theirs) / np.median(ours))
            rates = [f"{given.images / np.median(each):,.0f}" for each in (ours, theirs)]
            target = Target("DataLoader /", faster, AS_FAST, at_least=True)
            cells = [median_and_quartiles(each) for each in (ours, theirs)]
            rows.append([dtype, *cells, *rates, [target]])
    report.table(["", "sparkhvd", "DataLoader", "rows/s", "rows/s", "targets"], rows)
    share = Target("stored / images, %", 100 * stored / total, STORED, at_least=False)
    report.table(
        ["images", "stored", "targets"],
        [[f"{total / 2**20:.1f} MiB", f"{stored / 2**10:.0f} KiB", [share]]],
    )
    report.note(f"Times of one epoch, {given.rounds} rounds.")
    report.finish("benchmarks/images.py", write=given.write, json_path=given.json)


if __name__ == "__main__":
    main()
