"""Cost and gain of compressed gradients over a slow network: bytes, CPU, time and loss on two small tasks.

    .venv/bin/python benchmarks/compression.py [--steps 150] [--seeds 3] [--rate 100mbit] [--json FILE] [--write]

Two ranks on two hosts (network namespaces joined by a veth pair limited to `--rate`; needs root, `ip` and `tc`) train
the same model from the same seeds once per method, after a few steps that warm up. Bytes are what the cable counted,
per step and rank, with everything that packets need. CPU is of both ranks, per step; the loss is the mean over all
samples of the last tenth of the steps, over the seeds.

Methods: `none`, `bf16`, `powersgd r` are `Compression` of `DistributedOptimizer`. `1 bit` is what PowerSGD was chosen
over, and lives here alone: signs with one scale per row and error feedback (1-bit SGD, Seide et al., Interspeech 2014;
EF-SignSGD, Karimireddy et al., ICML 2019), packed by numpy and joined by one allgather, because signs do not add up.

Why PowerSGD (60 steps, one seed, 100 Mbit/s, a busy machine): on the digits it sent 52 kB per step with rank 4 and
ended at a loss of 0.21, 1 bit sent 47 kB and ended at 0.27, uncompressed gradients 1207 kB and 0.18; on the
transformer both ended at 3.419 (88 and 74 kB; 1640 kB and 3.417). Both took about as much CPU. What 1 bit receives and
decodes grows with the number of ranks; PowerSGD's sums do not.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]  # the ranks import this as a module
from common import Report, shown  # noqa: E402 - of this folder
from tests.harness.netns import two_hosts, why_not  # noqa: E402 - of the checkout
from tests.harness.ranks_on_hosts import ranks_on  # noqa: E402

METHODS = ("none", "bf16", "powersgd 1", "powersgd 2", "powersgd 4", "1 bit")
WARM_UP = 5
BATCH = 32
TIMEOUT_S = 600.0
VOCABULARY, LENGTH, WIDTH = 32, 32, 128


# --- The tasks. ---


class Sentences(nn.Module):
    """Transformer of two layers for the prediction of the next symbol."""

    def __init__(self) -> None:
        super().__init__()
        self.symbols = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.02)
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        hidden = self.layers(self.symbols(x) + self.places, mask=mask, is_causal=True)
        return self.out(hidden).flatten(0, 1)


def digits(seed: int) -> tuple[nn.Module, Callable[[], tuple[Tensor, Tensor]]]:
    """Make the task of scikit-learn's handwritten digits and an MLP."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    pixels, labels = torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y)
    model = nn.Sequential(
        nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    )
    generator = torch.Generator().manual_seed(seed)

    def batch() -> tuple[Tensor, Tensor]:
        rows = torch.randint(len(labels), (BATCH,), generator=generator)
        return pixels[rows], labels[rows]

    return model, batch


def sentences(seed: int) -> tuple[nn.Module, Callable[[], tuple[Tensor, Tensor]]]:
    """Make a small transformer, and batches of second-order Markov sequences for it."""
    rule = torch.Generator().manual_seed(0)
    odds = torch.rand((VOCABULARY, VOCABULARY, VOCABULARY), generator=rule).pow(8)
    generator = torch.Generator().manual_seed(seed)

    def batch() -> tuple[Tensor, Tensor]:
        text = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
        for place in range(2, LENGTH + 1):
            weights = odds[text[:, place - 2], text[:, place - 1]]
            text[:, place] = torch.multinomial(weights, 1, generator=generator)[:, 0]
        return text[:, :-1], text[:, 1:].flatten()

    return Sentences(), batch


TASKS = {"digits, MLP": digits, "generated text, transformer": sentences}


# --- The methods. ---


class OneBit:
    """Average of gradients as signs with a scale per row, with error feedback."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.matrices = [p for p in parameters if p.dim() > 1]
        self.others = [p for p in parameters if p.dim() <= 1]
        self.errors = [torch.zeros(len(p), p.numel() // len(p)) for p in self.matrices]

    def reduce(self) -> None:
        """Put the average of all ranks' signs into `.grad`."""
        import sparkhvd.torch as hvd

        small = hvd.grouped_allreduce_async_([p.grad for p in self.others], name="others")
        parts = []
        for p, error in zip(self.matrices, self.errors, strict=True):
            error += p.grad.view_as(error)
            bits = torch.from_numpy(np.packbits(error.numpy() >= 0))
            parts += [bits, error.abs().mean(dim=1).view(torch.uint8)]
        joined = hvd.allgather(torch.cat(parts).unsqueeze(0), name="bits")
        ranks = [each.split([len(part) for part in parts]) for each in joined]
        for number, (p, error) in enumerate(zip(self.matrices, self.errors, strict=True)):
            total = torch.zeros_like(error)
            for rank, found in enumerate(ranks):
                bits, scales = found[2 * number], found[2 * number + 1]
                signs = np.unpackbits(bits.numpy(), count=error.numel()).reshape(error.shape)
                scale = scales.clone().view(torch.float32).unsqueeze(1)
                values = torch.from_numpy(signs).float().mul_(2).sub_(1).mul_(scale)
                total += values
                if rank == hvd.rank():
                    error -= values
            p.grad.copy_(total.div_(len(ranks)).view_as(p))
        hvd.synchronize(small)


def compression_of(method: str) -> Any:
    import sparkhvd.torch as hvd

    if method.startswith("powersgd"):
        return hvd.Compression.powersgd(rank=int(method.split()[1]))
    return getattr(hvd.Compression, method)


# --- A rank. ---


def rank(rendezvous: Any, talk: Any) -> None:
    """Train by the driver's orders: {"task", "method", "seed", "steps"}. None ends the rank."""
    import sparkhvd.torch as hvd

    torch.set_num_threads(1)
    hvd.init(rendezvous)
    device = talk.hear()["device"]
    talk.say("ready")
    while (order := talk.hear()) is not None:
        talk.say(_train(device=device, **order))
    hvd.shutdown()


def _train(*, device: str, task: str, method: str, seed: int, steps: int) -> dict[str, Any]:
    import sparkhvd.torch as hvd

    torch.manual_seed(seed)
    model, batch = TASKS[task](100 * seed + hvd.rank())
    parameters = list(model.parameters())
    optimizer: Any = torch.optim.Adam(parameters, lr=1e-3)
    one_bit = OneBit(parameters) if method == "1 bit" else None
    if one_bit is None:
        optimizer = hvd.DistributedOptimizer(optimizer, compression=compression_of(method))
    walls, losses = [], []
    cpu = sent = 0.0
    for step in range(WARM_UP + steps):
        x, y = batch()
        if step == WARM_UP:
            hvd.barrier()
            cpu, sent = time.process_time(), _sent_bytes(device)
        began = time.perf_counter()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        if one_bit is not None:
            one_bit.reduce()
        optimizer.step()
        walls.append(time.perf_counter() - began)
        losses.append(float(loss.detach()))
    return {
        "wall": walls[WARM_UP:],
        "cpu": (time.process_time() - cpu) / steps,
        "bytes": (_sent_bytes(device) - sent) / steps,
        "loss": statistics.mean(losses[-max(1, steps // 10) :]),
    }


def _sent_bytes(device: str) -> int:
    return int(Path(f"/sys/class/net/{device}/statistics/tx_bytes").read_text())


# --- The driver. ---


def report_on(report: Report, task: str, found: dict[str, list[list[dict[str, Any]]]]) -> None:
    """Add the table of a task: `found` has the reports of both ranks, for every method and seed."""
    rows: list[list[Any]] = []
    for method, runs in found.items():
        both = [rank for run in runs for rank in run]
        walls = [wall for rank in both for wall in rank["wall"]]
        losses = [statistics.mean(rank["loss"] for rank in run) for run in runs]
        rows.append(
            [
                method,
                f"{statistics.mean(rank['bytes'] for rank in both) / 1e3:.1f} kB",
                shown(statistics.median(walls)),
                shown(2 * statistics.mean(rank["cpu"] for rank in both)),
                f"{statistics.mean(losses):.3f} ({min(losses):.3f} to {max(losses):.3f})",
            ]
        )
    report.table([task, "sent per step", "step", "CPU of a step", "loss at the end"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--json", help="a file for the raw numbers")
    parser.add_argument("--write", action="store_true", help="keep the tables in docs/results/")
    options = parser.parse_args()
    if reason := why_not():
        print(f"benchmarks/compression.py measures nothing here: {reason}.")
        return
    report = Report(f"Compressed gradients: two hosts, {options.rate}, {options.steps} steps")
    with (
        two_hosts() as hosts,
        ranks_on(hosts, "benchmarks.compression:rank", with_engine=False) as ranks,
    ):
        for each, host in zip(ranks, hosts, strict=True):
            each.tell({"device": host.device})
        for each in ranks:
            each.expect(TIMEOUT_S)
        for host in hosts:
            host.shape(options.rate)
        for task in TASKS:
            found: dict[str, list[list[dict[str, Any]]]] = {method: [] for method in METHODS}
            for seed in range(options.seeds):  # methods by turns, so that all meet the same noise
                for method in METHODS:
                    order = {"task": task, "method": method, "seed": seed, "steps": options.steps}
                    for each in ranks:
                        each.tell(order)
                    found[method].append([each.expect(TIMEOUT_S) for each in ranks])
            report.raw[task] = found
            report_on(report, task, found)
        for each in ranks:
            each.tell(None)
            each.expect(TIMEOUT_S)
    report.finish("benchmarks/compression.py", write=options.write, json_path=options.json)


if __name__ == "__main__":
    main()
