"""The device of a rank, and moves to it."""

from __future__ import annotations

import functools
import gc
import types
import weakref
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils.rnn import pack_sequence

from sparkhvd.data.columns.binding import Argument, InputBinding
from sparkhvd.data.store.store import Store
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.runner import RankContext
from sparkhvd.torch.context import use_engine
from sparkhvd.training import to_device
from sparkhvd.training.checkpoints.checkpoint import load_rng
from sparkhvd.training.device import agree, choose_device
from sparkhvd.training.loss_functions import ClassMean
from sparkhvd.training.to_device import Mover, move_losses, move_optimizer, moved, to_cpu
from sparkhvd.training.user_step import batch_tensors
from tests.harness.ranks import RanksFailed, run_ranks
from tests.training.ranks import Case

pytestmark = pytest.mark.ranks

CPU = torch.device("cpu")


@pytest.fixture
def sees(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes torch see so many GPUs."""

    def make(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return make


def place(local_rank: int, gpu: int | None) -> RankContext:
    return RankContext(local_rank, 4, local_rank, 0, 1, gpu)


@pytest.mark.parametrize(
    ("count", "local_rank", "gpu", "looks", "expected", "problem"),
    [
        (0, 0, None, False, CPU, ""),
        (0, 0, None, True, CPU, ""),
        (2, 1, None, False, CPU, ""),  # a cluster that gives ranks no GPUs, or use_gpu=False
        (2, 1, None, True, torch.device("cuda", 1), ""),  # local[N], automatic
        (
            1,
            1,
            None,
            True,
            CPU,
            "is number 2 on its host, where torch sees 1 GPU. Give num_proc=1, or use_gpu=False",
        ),
        (1, 3, 0, False, torch.device("cuda", 0), ""),  # Spark's: device 0 of the process
        (4, 3, 3, False, torch.device("cuda", 3), ""),  # use_gpu=True, by local rank
        (0, 0, 0, False, CPU, "was given a GPU, and its torch "),
    ],
)
def test_device_of_a_rank_follows_gpu_and_local_rank(
    sees: Any,
    count: int,
    local_rank: int,
    gpu: int | None,
    looks: bool,
    expected: torch.device,
    problem: str,
) -> None:
    sees(count)
    device, reason = choose_device(place(local_rank, gpu), looks=looks)
    assert device == expected
    assert reason.startswith(problem)
    assert bool(reason) == bool(problem)


def test_a_process_without_a_launcher_uses_the_first_gpu(sees: Any) -> None:
    sees(1)
    assert choose_device(None, looks=True) == (torch.device("cuda", 0), "")
    assert choose_device(None, looks=False) == (CPU, "")


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ([("cpu", ""), ("cpu", "")], ""),
        ([("cuda", ""), ("cuda", "")], ""),
        (
            [("cuda", ""), ("cpu", "")],
            "use_gpu: rank 0 would train on cuda and rank 1 on cpu. Run on hosts",
        ),
        ([("cuda", ""), ("cpu", "was given none")], "use_gpu: rank 1 was given none."),
    ],
)
def test_ranks_use_one_kind_of_device_or_all_fail(
    devices: list[tuple[str, str]], message: str
) -> None:
    def work(engine: Any) -> str:
        with use_engine(engine):
            kind, problem = devices[engine.rank]
            try:
                agree(torch.device(kind), problem)
            except InvalidArgumentError as e:
                return str(e)
            return ""

    for text in run_ranks(2, work):
        assert text.startswith(message)
        assert bool(text) == bool(message)


def test_gpu_invisible_to_torch_fails_on_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sees: Any
) -> None:
    sees(0)
    from sparkhvd.training import train

    monkeypatch.setattr(train, "context", lambda: place(0, 0))
    model = nn.Linear(3, 1)
    case = Case(Store.create(tmp_path), model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(RanksFailed, match="use_gpu: rank 0 was given a GPU, and its torch"):
        case.train(2)


class Pair(NamedTuple):
    a: torch.Tensor
    b: Any


def test_moved_batches_keep_their_structure() -> None:
    batch = ((torch.ones(2),), {"x": [torch.ones(1), "text"], "y": Pair(torch.ones(3), None)})
    assert Mover(CPU)(batch) is batch
    moved = to_cpu(batch)
    assert type(moved[1]["y"]) is Pair
    assert moved[1]["x"][1] == "text"
    assert moved[0][0].device == CPU


def test_moved_packed_sequences_keep_lengths_on_the_cpu() -> None:
    packed = pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    there = moved({"x": (packed,)}, torch.device("meta"))["x"][0]
    assert (there.data.device.type, there.batch_sizes.device) == ("meta", CPU)
    assert to_cpu(packed).data.equal(packed.data)


def test_collated_batches_are_on_the_device_in_a_train_step() -> None:
    words = Argument("words", ("w",), "int64", None, False, True)
    labels = types.SimpleNamespace(columns=("y",), apply=lambda columns: [torch.ones(2)])
    spec = types.SimpleNamespace(
        inputs=InputBinding((words,)), labels=labels, sample_weight=None, group=None
    )
    columns = {"w": (np.arange(3), {"offsets": np.arange(2)})}
    batch: Any = batch_tensors(spec, None, columns, torch.device("meta"))  # type: ignore[arg-type]
    tokens, more = batch["words"]
    assert {t.device.type for t in (tokens, more["offsets"], batch["y"])} == {"meta"}


def test_batch_memory_is_kept_until_the_gpu_has_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader reuses the page-locked memory of a batch as soon as the batch is released."""
    events: list[Any] = []

    class Event:
        is_over = False

        def __init__(self) -> None:
            events.append(self)

        def record(self, stream: object) -> None:
            assert stream == "the stream of cuda:0"

        def query(self) -> bool:
            return self.is_over

    def copy(value: Any, device: torch.device, *, non_blocking: bool) -> Any:
        assert (device, non_blocking) == (torch.device("cuda", 0), True)
        return list(value)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the stream of {device}")
    monkeypatch.setattr(to_device, "_moved", copy)
    move = Mover(torch.device("cuda", 0))
    batches = [torch.ones(1) for _ in range(3)]
    held = [weakref.ref(b) for b in batches]
    for batch in batches:
        assert move([batch]) == [batch]
    del batch, batches
    gc.collect()
    assert all(ref() is not None for ref in held)
    events[0].is_over = events[2].is_over = (
        True  # a stream ends in order; events past the second are not queried
    )
    move([])
    gc.collect()
    assert [ref() is not None for ref in held] == [False, True, True]
    events[1].is_over = True
    move([])
    gc.collect()
    assert [ref() is not None for ref in held] == [False] * 3


def test_optimizers_and_losses_move_with_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """`double` stands for a device: an optimizer's state follows its parameters."""
    layer = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    groups = optimizer.param_groups
    move_optimizer(optimizer)
    assert optimizer.param_groups is groups
    layer.double()
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr("sparkhvd.training.to_device._CPU", torch.device("meta"))
        move_optimizer(optimizer)
    momenta = [state["momentum_buffer"] for state in optimizer.state.values()]
    assert [m.dtype for m in momenta] == [torch.float64] * 2
    fresh = torch.optim.Adam(nn.Linear(1, 1).parameters())
    move_optimizer(fresh)
    assert not fresh.state

    moved: list[torch.device] = []

    class Weighted(nn.CrossEntropyLoss):
        def _apply(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
            moved.append(CPU)
            return super()._apply(fn, *args, **kwargs)

    weight = torch.tensor([1.0, 2.0])
    partial = functools.partial(F.cross_entropy, weight=weight)
    losses = [Weighted(weight), ClassMean.of(Weighted(weight)), ClassMean.of(partial), F.mse_loss]
    move_losses(losses, CPU)
    assert len(moved) == 2
    assert partial.keywords["weight"] is weight
    trained = [nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))]
    partial = functools.partial(F.cross_entropy, weight=weight, trained=trained)
    move_losses([partial], torch.device("meta"))
    assert partial.keywords["trained"] is trained  # an optimizer holds them
    assert partial.keywords["weight"].device.type == "meta"


def test_a_gpu_random_state_is_ignored_without_a_gpu(sees: Any) -> None:
    import random

    import numpy as np

    sees(0)
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    words = (kind, torch.from_numpy(np.asarray(keys, dtype=np.int64)), position, has_gauss, gauss)
    version, numbers, following = random.getstate()
    torch_state = torch.get_rng_state()

    def draw() -> tuple[float, float, float]:
        return float(torch.rand(())), float(np.random.rand()), random.random()

    drawn = draw()
    load_rng(
        {
            "torch": torch_state,
            "numpy": words,
            "random": (version, list(numbers), following),
            "cuda": torch.zeros(16, dtype=torch.uint8),
        }
    )
    assert draw() == drawn


class Picture(nn.Module):
    """A convolution over (B, 3) read as one row of pixels, in channels-last memory."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, (1, 3)).to(memory_format=torch.channels_last)
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.conv(x.reshape(-1, 1, 1, 3).to(memory_format=torch.channels_last))
        return self.head(torch.relu(hidden).flatten(1))[:, 0]


@pytest.mark.parametrize("precision", ["32", "bf16-mixed"])
def test_channels_last_training_equals_one_process(tmp_path: Path, precision: str) -> None:
    from tests.training.ranks import assert_close

    torch.manual_seed(4)
    model = Picture()
    case = Case(
        Store.create(tmp_path),
        model,
        torch.optim.SGD(model.parameters(), lr=0.05),
        rows=64,
        options={"batch_size": 8, "epochs": 2, "seed": 5, "precision": precision},
    )
    case.train(2)
    assert model.conv.weight.is_contiguous(memory_format=torch.channels_last)
    reference = case.reference(2, 2)
    assert_close(case.weights(2), reference[1], 1e-5 if precision == "32" else 2e-2)
