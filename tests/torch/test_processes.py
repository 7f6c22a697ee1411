"""The torch API in real processes, as in a user's script. All tests share one start of two processes, which takes seconds."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from sparkhvd.runner import run_local
from tests.harness.inductor import lean_inductor
from tests.harness.soak import SOAK, soak
from tests.torch import test_sync_batch_norm as batch_norm
from tests.torch.exact import BOUNDS, MLP, STEPS, distance, mine, values

# Two processes that compile models before the first test.
pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]

DOUBLES = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
}

BATCH_NORM_SIZES = (6, 2)

SHARDED: dict[str, dict[str, Any]] = {
    "sharded": {"sharded": True},
    "shared": {"sharded": True, "share_parameters": True},
}


def build(dtype: torch.dtype, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv1d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(24, 16), nn.Tanh(), nn.Linear(16, 1)
    ).to(dtype)


def data(dtype: torch.dtype, rows: int = 96) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(rows, 1, 8, generator=generator, dtype=torch.float64).to(dtype)
    return x, x.sum((1, 2)).sin().unsqueeze(1)


def train(
    make: Callable[[Any], torch.optim.Optimizer],
    dtype: torch.dtype,
    hvd: Any = None,
    **options: Any,
) -> list[list[float]]:
    """Train four epochs of 8 steps. With `hvd`, use this rank's part of every batch."""
    model = build(dtype, seed=hvd.rank() if hvd else 0)
    optimizer = make(model.parameters())
    if hvd:
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), **options
        )
        if not options:
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    x, y = data(dtype)
    for _ in range(4):
        for xs, ys in zip(x.split(12), y.split(12), strict=True):
            if hvd:
                share = slice(hvd.rank(), None, hvd.size())
                xs, ys = xs[share], ys[share]
            optimizer.zero_grad()
            nn.functional.mse_loss(model(xs), ys).backward()
            optimizer.step()
    return [p.detach().double().flatten().tolist() for p in model.parameters()]


def in_a_forked_child(hvd: Any) -> int:
    """Check that a rank's forked child can query, but not communicate. Return 0 if so."""
    child = os.fork()
    if child == 0:
        try:
            hvd.allreduce(torch.ones(1), name="forked")
        except hvd.NotInitializedError as error:
            os._exit(0 if "created before fork" in str(error) else 2)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def everything() -> dict[str, Any]:
    """Run the checks of this file."""
    import sparkhvd.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    report: dict[str, Any] = {
        "topology": (size, hvd.local_rank(), hvd.local_size(), hvd.cross_size()),
        "objects": hvd.allgather_object({"rank": rank, "pad": "x" * rank}),
        "gather": hvd.allgather(torch.full((rank + 1, 2), rank)).tolist(),
        "sum": hvd.allreduce(torch.ones(1_000_003), op=hvd.Sum).sum().item(),
        "broadcast": hvd.broadcast(torch.tensor([float(rank)]), root_rank=size - 1).item(),
    }
    for name, make in DOUBLES.items():
        report[name] = train(make, torch.float64, hvd)
    report["float32"] = train(DOUBLES["sgd"], torch.float32, hvd)
    loader = torch.utils.data.DataLoader(
        range(100), batch_size=10, num_workers=1, multiprocessing_context="fork"
    )
    report["loader"] = [hvd.allreduce(batch, op=hvd.Sum).sum().item() for batch in loader]
    report["fork"] = in_a_forked_child(hvd)
    try:
        hvd.allreduce(torch.ones(rank + 1), name="odd")
    except hvd.MismatchError as error:
        report["mismatch"] = str(error)
    hvd.barrier()  # the engine stays usable
    hvd.shutdown()
    hvd.init()  # the same ranks meet again
    report["again"] = hvd.allreduce(torch.tensor(rank), op=hvd.Sum).item()
    report |= further_modes(hvd)
    return report  # leaves without shutdown(): the exit of the process does it


@pytest.fixture(scope="module")
def reports(zygote_has_compiler: None) -> list[dict[str, Any]]:
    return run_local(everything, num_proc=2, verbose=0)


def test_collectives_work_between_processes(reports: list[dict[str, Any]]) -> None:
    for rank, report in enumerate(reports):
        assert report["topology"] == (2, rank, 2, 1)
        assert report["objects"] == [{"rank": r, "pad": "x" * r} for r in range(2)]
        assert report["gather"] == [[0, 0], [1, 1], [1, 1]]
        assert report["sum"] == 2 * 1_000_003
        assert report["broadcast"] == 1.0
        assert "odd" in report["mismatch"]


def test_forked_children_do_not_affect_their_rank(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert sum(report["loader"]) == 2 * sum(range(100))
        assert report["fork"] == 0


@pytest.mark.parametrize("name", DOUBLES)
def test_training_equals_one_process(reports: list[dict[str, Any]], name: str) -> None:
    expected = train(DOUBLES[name], torch.float64)
    for report in reports:
        assert report[name] == reports[0][name]
        for ours, theirs in zip(report[name], expected, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-12, rel=0)


def test_training_equals_one_process_in_float32(reports: list[dict[str, Any]]) -> None:
    expected = train(DOUBLES["sgd"], torch.float32)
    for report in reports:
        for ours, theirs in zip(report["float32"], expected, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-5, rel=0)


def test_ranks_can_init_again_after_shutdown(reports: list[dict[str, Any]]) -> None:
    assert [report["again"] for report in reports] == [1, 1]


class Tagger(nn.Module):
    """Rows of a table by word, and a dense layer: gradients of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 6, sparse=True)
        self.last = nn.Linear(6, 3)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.last(self.table(words).mean(1))
        return scores


def train_tagger(hvd: Any = None) -> list[list[float]]:
    """Train five steps with sparse gradients. With `hvd`, use this rank's part of every batch."""
    torch.manual_seed(0)
    model = Tagger().double()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.5)
    if hvd:
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    words = torch.randint(50, (5, 12, 4), generator=torch.Generator().manual_seed(1))
    for batch in words:
        mine = batch[hvd.rank() :: hvd.size()] if hvd else batch
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(mine), mine[:, 0] % 3).backward()
        optimizer.step()
    return [p.detach().flatten().tolist() for p in model.parameters()]


def losses_with(hvd: Any, compression: Any) -> list[float]:
    """Losses over all ranks, step by step."""
    model = build(torch.float32, 0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        named_parameters=model.named_parameters(),
        compression=compression,
    )
    x, y = data(torch.float32)
    mine = slice(hvd.rank(), None, hvd.size())
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x[mine]), y[mine])
        loss.backward()
        optimizer.step()
        losses.append(hvd.allreduce(loss.detach()).item())
    return losses


def compiled_weights(hvd: Any = None) -> list[float]:
    """Train three steps of a model that inductor has compiled."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    fast: Any = model
    x, y = data(torch.float32)
    if hvd:
        if hvd.rank() == 0:  # the others find its compiled code in the cache
            first = torch.compile(copy.deepcopy(model))
            nn.functional.mse_loss(first(x.flatten(1)[:12]), y[:12]).backward()
        hvd.barrier()
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        fast = torch.compile(model)
    for xs, ys in zip(x.flatten(1).split(24)[:3], y.split(24)[:3], strict=True):
        if hvd:
            xs, ys = xs[hvd.rank() :: hvd.size()], ys[hvd.rank() :: hvd.size()]
        optimizer.zero_grad()
        nn.functional.mse_loss(fast(xs), ys).backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


def graphs_of(hvd: Any) -> list[tuple[torch.Tensor, int]]:
    """Train with torch.compile's captures: its gradients, views, and the whole step. Return weights and number of graphs."""
    found = []
    ways = [(False, False), (True, False)]
    if hasattr(torch._C._dynamo.eval_frame, "set_code_exec_strategy"):
        ways.append(
            (False, True)
        )  # torch before 2.7 traces our hooks in a compiled step (docs/install.md)
    for as_views, whole in ways:
        model = MLP.build()
        fast: Any = model if whole else torch.compile(model, backend="aot_eager")
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
            gradient_as_bucket_view=as_views,
        )
        stats = torch._dynamo.utils.counters["stats"]
        stats.clear()

        def train_on(batch: Any, fast: Any = fast, optimizer: Any = optimizer) -> None:
            optimizer.zero_grad()
            MLP.loss(fast, batch).backward()
            optimizer.step()

        train_step: Any = torch.compile(train_on, backend="aot_eager") if whole else train_on
        for step in range(STEPS):
            train_step(mine(MLP.batch(step, torch.float64)))
        found.append((values(model), stats["unique_graphs"]))
    return found


def further_modes(hvd: Any) -> dict[str, Any]:
    """Run further modes of an optimizer."""
    report: dict[str, Any] = {
        mode: train(DOUBLES["adam"], torch.float64, hvd, **options)
        for mode, options in SHARDED.items()
    }
    report["sparse"] = train_tagger(hvd)
    report["powersgd"] = losses_with(hvd, hvd.Compression.powersgd(rank=2))
    report["not compressed"] = losses_with(hvd, hvd.Compression.none)
    report["batch norm"] = batch_norm.train(is_sync=True, sizes=BATCH_NORM_SIZES)
    report["graphs"] = graphs_of(hvd)
    if SOAK:
        with lean_inductor():
            report["compiled"] = compiled_weights(hvd)
    return report


@pytest.mark.parametrize("mode", SHARDED)
def test_sharded_training_equals_one_process(reports: list[dict[str, Any]], mode: str) -> None:
    expected = train(DOUBLES["adam"], torch.float64)
    for report in reports:
        assert report[mode] == reports[0][mode]
        for ours, theirs in zip(report[mode], expected, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-12, rel=0)


def test_sparse_gradients_equal_one_process(reports: list[dict[str, Any]]) -> None:
    expected = train_tagger()
    for report in reports:
        assert report["sparse"] == reports[0]["sparse"]
        for ours, theirs in zip(report["sparse"], expected, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-12, rel=0)


def test_powersgd_reduces_the_loss_almost_like_uncompressed_training(
    reports: list[dict[str, Any]],
) -> None:
    losses = reports[0]["powersgd"]
    assert all(report["powersgd"] == losses for report in reports)
    fell_by = reports[0]["not compressed"][0] - reports[0]["not compressed"][-1]
    assert losses[0] - losses[-1] > 0.8 * fell_by > 0
    assert losses != reports[0]["not compressed"]


@soak(
    "aot_eager, whose graphs and hooks are the same: test_parameter_hooks_do_not_break_the_compiled_graph"
)
def test_a_model_that_inductor_compiled_equals_one_process(reports: list[dict[str, Any]]) -> None:
    expected = compiled_weights()
    for report in reports:
        assert report["compiled"] == reports[0]["compiled"]
        assert report["compiled"] == pytest.approx(expected, abs=1e-5, rel=0)


def test_training_with_sync_batch_norm_equals_one_process(reports: list[dict[str, Any]]) -> None:
    expected = batch_norm.train(is_sync=False, sizes=BATCH_NORM_SIZES)
    for report in reports:
        for found, wanted in zip(report["batch norm"], expected, strict=True):
            assert torch.allclose(found.double(), wanted.double(), rtol=0, atol=1e-10)


def test_parameter_hooks_do_not_break_the_compiled_graph(reports: list[dict[str, Any]]) -> None:
    model = MLP.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        MLP.loss(model, MLP.batch(step, torch.float64)).backward()
        optimizer.step()
    for report in reports:
        for number, (result, _) in enumerate(report["graphs"]):
            assert torch.equal(result, reports[0]["graphs"][number][0])
            assert distance(result, values(model)) <= BOUNDS[torch.float64]
        # The second training may find the first's.
        (_, first), (_, second), *_ = report["graphs"]
        assert first == 1
        assert second <= 1
