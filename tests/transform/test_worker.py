"""Trial of a model on two rows of zeros, and values that a transform worker cannot give to a model."""

from __future__ import annotations

import gc
import subprocess
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyspark
import pytest
import torch
from torch import Tensor, nn

import sparkhvd.torch as hvd
from sparkhvd import InvalidArgumentError, cpus
from sparkhvd.data.columns import labels
from sparkhvd.data.columns.binding import bind_inputs
from sparkhvd.data.columns.schema import Column, DataSchema
from sparkhvd.estimator.transform import worker
from sparkhvd.estimator.transform.worker import (
    NO_GPUS,
    Output,
    PredictSpec,
    TaskGpus,
    feature,
    predict,
    task_gpus,
    to_arrow,
)
from sparkhvd.training.modules.fitted import TrainedState, output_widths, trial_outputs
from sparkhvd.training.precision import autocast, widened

pytestmark = pytest.mark.pure

COLUMN = Column("x", "vector", "float32", (4,), "vector", "float32")


def widths(model: nn.Module, precision: str = "32") -> tuple[int, ...] | None:
    inputs = bind_inputs(model, DataSchema((COLUMN,), ()))
    return output_widths(model.eval(), inputs, [COLUMN], precision=precision)


class Calls(nn.Module):
    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.function(x)
        return result


def test_output_widths_of_all_outputs_are_found() -> None:
    assert widths(nn.Linear(4, 3)) == (3,)
    assert widths(Calls(lambda x: (x, x.sum(1), x.reshape(2, 2, 2)))) == (4, 1, 4)


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(3, 1),
        nn.Linear(4, 1).double(),
        nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(3, 1, 1)),
        nn.Embedding(3, 2),
        nn.LayerNorm(5),
        nn.BatchNorm1d(3),
        nn.LSTM(3, 2),
        Calls(lambda x: x + torch.zeros(3)),
        Calls(lambda x: torch.cat([x, torch.zeros(3, 1)], 1)),
        Calls(lambda x: x.reshape(3, 3)),
        Calls(lambda x: x.sum(2)),
        Calls(lambda: None),  # type: ignore[misc, arg-type]  # takes no argument
        Calls(lambda x: x.sum()),
        Calls(lambda x: "no tensor"),
    ],
)
def test_model_that_no_rank_could_run_raises(model: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(InvalidArgumentError, match=r"^model[:.]"):
            widths(model)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * hvd.rank(),
        lambda x: hvd.allreduce(x),
        lambda x: torch.load("/of/the/executors/table.pt"),
        lambda x: x.to("cuda") if torch.version.cuda else x.to("meta").item(),
        lambda x: __import__("of_the_executors"),
        # Values of real rows, which made-up rows may lack:
        lambda x: torch.linalg.cholesky(x @ x.T - 100 * torch.eye(2)),
        lambda x: x[:, x.std(0) > 0.4] @ torch.ones(4, 1),
    ],
)
def test_trial_accepts_a_forward_that_needs_ranks_or_real_rows(
    function: Callable[[Tensor], Any],
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert widths(Calls(function)) is None


def test_a_forward_that_rejects_two_zero_rows_is_tried_on_other_rows() -> None:
    def packed(x: Tensor) -> Tensor:
        lengths = x[:, 0].ceil().long()
        padded = x.unsqueeze(-1)
        sequence = nn.utils.rnn.pack_padded_sequence(padded, lengths, True, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(sequence, batch_first=True, total_length=4)[0]

    assert widths(Calls(packed)) == (4,)
    inputs = bind_inputs(nn.Linear(4, 1), DataSchema((COLUMN,), ()))
    fixed = Calls(lambda x: x.reshape(8, 2, 2).sum(2))
    outputs = trial_outputs(fixed, inputs, [COLUMN], batch_size=8)
    assert outputs is not None
    assert outputs[0].shape == (8, 2)
    with pytest.raises(InvalidArgumentError, match="invalid for input of size 8"):
        trial_outputs(fixed, inputs, [COLUMN], batch_size=7)


class Energy(nn.Module):
    """A force field: its output is a gradient by its input, which it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.kept = torch.zeros(0)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (force,) = torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)
        self.kept = force.detach()
        return force


class Narrow(nn.Module):
    """Takes its input in 16 bits. With a float32 weight it works only under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x.bfloat16(), self.weight)


def transformed(
    model: nn.Module,
    rows: Tensor,
    link: str,
    precision: str = "32",
    task: TaskGpus = NO_GPUS,
    **options: Any,
) -> Tensor:
    """Compute an output column as a worker does."""
    spec = PredictSpec(
        shell=TrainedState(model).shell,
        weights=TrainedState(model).weights,
        columns=(COLUMN,),
        sources=(0,),
        names=("x",),
        inputs=bind_inputs(model, DataSchema((COLUMN,), ())),
        links=(link,),
        outputs=(Output("o", "probability" if link == labels.SOFTMAX else "output", 0, True),),
        use_gpu=False,
        precision=precision,
        **options,
    )
    batches = iter([pa.record_batch([to_arrow(rows.double().numpy())], names=["c0"])])
    (batch,) = predict(spec, batches, task)
    return torch.tensor(batch.column(1).field("values").flatten().to_numpy()).reshape(len(rows), -1)


@pytest.mark.parametrize(
    ("precision", "model", "link"),
    [
        ("32", Energy, labels.IDENTITY),
        ("bf16-mixed", Energy, labels.IDENTITY),
        ("bf16-mixed", Narrow, labels.SOFTMAX),
        ("32", lambda: Narrow().bfloat16(), labels.SOFTMAX),
    ],
)
def test_transform_gives_the_outputs_of_validation(
    precision: str, model: Callable[[], nn.Module], link: str
) -> None:
    torch.manual_seed(3)
    module = model().eval()
    rows = torch.randn(6, 4)
    assert widths(module, precision) is not None
    with torch.no_grad(), autocast(precision, torch.device("cpu")):
        (expected,) = widened([module(rows)])
    if link == labels.SOFTMAX:
        expected = expected.softmax(1)
    with torch.no_grad():
        found = transformed(module, rows, link, precision)
    assert torch.equal(found.float(), expected)


class Threads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :1] * self.weight + torch.get_num_threads()


def test_task_uses_as_many_threads_as_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = torch.get_num_threads()
    monkeypatch.setattr(cpus, "allowed", lambda: 4.5)
    try:
        for cores, threads in ((2, 2), (1, 1), (8, 4)):  # the worker may run further tasks
            context = types.SimpleNamespace(
                cpus=lambda cores=cores: cores,
                resources=dict,
                partitionId=lambda: 0,
                taskAttemptId=lambda: 3,
            )
            monkeypatch.setattr(pyspark.TaskContext, "get", lambda context=context: context)
            task = task_gpus()
            assert task.num_threads == threads
            found = transformed(Threads(), torch.zeros(2, 4), labels.IDENTITY, task=task)
            assert found.tolist() == [[threads], [threads]]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ([1.0, 2.0, 3.0], "has 3 elements per row in a batch, but the model takes 4."),
        ([1.0, None, 1.0, 1.0], "is null, or has a null element, in 1 rows of a batch. Fill or"),
        (
            None,
            "is null, or has a null element, in 1 rows of a batch. Fill or drop them first, or set handle_invalid to 'skip' or "
            "{column: value}.",
        ),
        (
            [1.0, float("nan"), 1.0, 1.0],
            "is NaN in 1 rows of a batch. Fill or drop them first, or set handle_invalid to 'skip' or {column: value}. If NaN is "
            "meant, set handle_invalid={'x': 'keep'}.",
        ),
        (
            [1.0, float("-inf"), 1.0, 1.0],
            "is infinite in 1 rows of a batch, for example -inf. Cap or drop them first, or set handle_invalid.",
        ),
    ],
)
def test_values_that_the_model_cannot_accept_raise_a_clear_error(
    row: list[float] | None, says: str
) -> None:
    column = Column("x", "array", "float32", (4,), "array", "float32")
    good = [1.0, 2.0, 3.0, 4.0]
    rows = pa.array([row] if row and len(row) == 3 else [good, row], pa.list_(pa.float64()))
    with pytest.raises(InvalidArgumentError) as failed:
        feature(rows, column, "z")
    assert str(failed.value).startswith(f"transform: column 'z' {says}")


_WORKER = """
import sys
import sparkhvd.runner.preflight, sparkhvd.data.arrow_types, sparkhvd.estimator.transform.worker
print([m for m in ("pandas", "pyspark", "sparkhvd.torch", "sparkhvd.engine", "sparkhvd.rendezvous") if m in sys.modules])
"""


def test_worker_garbage_collection_skips_imported_objects() -> None:
    worker._freeze_imports.cache_clear()
    before = gc.get_freeze_count()
    kept: list[list[int]] = [[] for _ in range(1000)]
    transformed(nn.Linear(4, 1), torch.zeros(2, 4), labels.IDENTITY)
    assert gc.get_freeze_count() >= before + len(kept)


def test_transform_worker_imports_neither_pyspark_nor_the_engine() -> None:
    # Every Python worker of every executor pays for its imports.
    done = subprocess.run([sys.executable, "-c", _WORKER], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
