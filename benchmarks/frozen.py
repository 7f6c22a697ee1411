"""Memory of a host's ranks for the frozen parameters of LoRA: a BERT of PEFT's, passed whole or by a function, and a resumed fit.

For each rank the kernel reports its private pages of the frozen parameters and the pages of a file, in the store or in memory, that its ranks
share (/proc/self/pagemap), and the rank's share of all its pages (PSS, /proc/self/smaps_rollup). Read before the first step and at the end of
the last epoch. 1.0 is one copy for the host. Needs peft and transformers, so it runs in the environment of `make test-users`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import sparkhvd
from common import Report, Target, local_session
from sparkhvd import TorchEstimator
from sparkhvd.estimator import Callback

# Copies of the frozen parameters on the host.
AT_MOST = 1.1
PAGE = os.sysconf("SC_PAGESIZE")
IN_A_FILE = 1 << 61
# Width and layers.
SIZES = {"large": (512, 8), "small": (256, 4)}


class Regression(nn.Module):
    def __init__(self, size: str) -> None:
        super().__init__()
        import peft
        import transformers

        torch.manual_seed(0)
        width, layers = SIZES[size]
        config = transformers.BertConfig(
            vocab_size=30_522,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=8,
            intermediate_size=4 * width,
            max_position_embeddings=128,
        )
        lora = peft.LoraConfig(r=4, target_modules=["query", "value"])
        self.body = peft.get_peft_model(transformers.BertModel(config), lora)
        self.head = nn.Linear(width, 1)

    def forward(self, ids: torch.Tensor) -> Any:
        return self.head(self.body(input_ids=ids.long()).last_hidden_state[:, 0])


def frozen_of(model: nn.Module) -> list[nn.Parameter]:
    return [each for each in model.parameters() if not each.requires_grad]


def pages(model: nn.Module) -> tuple[int, int]:
    """Count the frozen parameters' bytes in this process's own pages, and in pages of files."""
    own = of_files = 0
    with open("/proc/self/pagemap", "rb") as table:
        for each in frozen_of(model):
            begin = each.data_ptr() // PAGE
            count = -(-(each.data_ptr() + each.nbytes) // PAGE) - begin
            table.seek(8 * begin)
            entries = struct.unpack(f"<{count}Q", table.read(8 * count))
            shared = sum(bool(entry & IN_A_FILE) for entry in entries) / count
            own += round(each.nbytes * (1 - shared))
            of_files += round(each.nbytes * shared)
    return own, of_files


class Looks(Callback):
    """Notes the memory of each rank, and may end the first attempt."""

    def __init__(self, folder: str, fails: bool) -> None:
        self.folder, self.fails = folder, fails

    def on_train_begin(self, ctx: Any) -> None:
        self._note(ctx, "begin")

    def on_epoch_begin(self, ctx: Any) -> None:
        mark = Path(self.folder, "failed")
        if self.fails and ctx.epoch == 2 and ctx.rank == 0 and not mark.exists():
            mark.touch()
            raise ValueError("once")

    def on_train_end(self, ctx: Any, history: Any) -> None:
        self._note(ctx, "end")

    def _note(self, ctx: Any, when: str) -> None:
        own, of_files = pages(ctx.model)
        text = Path("/proc/self/smaps_rollup").read_text()
        found = re.search(r"^Pss:\s+(\d+)", text, re.MULTILINE)
        assert found
        note = {"own": own, "of_files": of_files, "pss": int(found[1]) << 10}
        Path(self.folder, f"{when}-{ctx.rank}.json").write_text(json.dumps(note))


def measure(
    spark: Any, model: nn.Module | Callable[[], nn.Module], ranks: int, *, goes_on: bool
) -> dict[str, list[dict[str, int]]]:
    """Fit a model, and collect the records of each rank by moment."""
    numbers = np.random.default_rng(0).integers(0, 30_000, (16 * ranks, 16)).tolist()
    rows = [(each, float(n % 5)) for n, each in enumerate(numbers)]
    df = spark.createDataFrame(rows, "ids array<int>, y float")
    with tempfile.TemporaryDirectory(prefix="sparkhvd-frozen-") as folder:

        def fit() -> None:
            TorchEstimator(
                model=model,
                optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
                loss=nn.MSELoss(),
                feature_cols=["ids"],
                label_cols=["y"],
                input_shapes=[[-1, 16]],
                num_proc=ranks,
                batch_size=4,
                epochs=2,
                store=f"{folder}/store",
                run_id="run",
                verbose=0,
                callbacks=[Looks(folder, goes_on)],
            ).fit(df)

        try:
            fit()
        except sparkhvd.RankError:
            if not goes_on:
                raise
            fit()
        return {
            when: [json.loads(f.read_text()) for f in sorted(Path(folder).glob(f"{when}-*.json"))]
            for when in ("begin", "end")
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--json")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    report = Report("LoRA: frozen parameters in the memory of a host")
    cases = [
        ("large, a module", "large", False, False),
        ("large, of a function", "large", True, False),
        ("large, a resumed fit", "large", False, True),
        ("small, a module", "small", False, False),
    ]
    lines = []
    with local_session(max(given.ranks)) as spark:
        for name, size, by_function, goes_on in cases:
            whole = Regression(size)
            frozen = sum(each.nbytes for each in frozen_of(whole))
            make = lambda size=size: Regression(size)  # noqa: E731 - travels by value
            for ranks in given.ranks:
                found = measure(spark, make if by_function else whole, ranks, goes_on=goes_on)
                report.raw[f"{name}, {ranks}"] = found
                cells: list[Any] = [f"{name}, {frozen / 2**20:.0f} MiB frozen", str(ranks)]
                for noted in found.values():
                    own = sum(each["own"] for each in noted)
                    held = own + max(each["of_files"] for each in noted)
                    cells.append([Target("copies", held / frozen, AT_MOST, at_least=False)])
                    cells.append(f"{sum(each['pss'] for each in noted) / 2**20:,.0f} MiB")
                print(*cells, flush=True)
                lines.append(cells)
    columns = ["BERT", "ranks", "before the first step", "PSS of all", "at the end", "PSS of all"]
    report.table(columns, lines)
    report.finish("frozen.py", write=given.write, json_path=given.json)


if __name__ == "__main__":
    main()
