"""The training loop that each rank runs: plain PyTorch around `sparkhvd.torch`.

`train` is one function with one dataclass in and one out. Read it from the top: connect, load, resume, then for
each epoch train, validate, save.

**N ranks with batch b train as one process with batch N * b.** A rank's loss is a mean over its own rows, so
before `backward` it is scaled by the rank's share of the global batch, and gradients are summed over ranks. A
rank without rows in a step calls neither `forward` nor `backward` and so adds zeros.

**A resumed run equals an uninterrupted one, bit by bit on CPU.** At the end of an epoch all ranks hold the same
state (buffers such as BatchNorm's running statistics are taken from rank 0), the checkpoint holds that state, the
order of rows is a function of (seed, epoch), and random numbers are seeded from (seed, epoch, rank).
"""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch

# The first optimizer of a process imports it, which takes as long as torch itself. Here it loads while the ranks
# wait for each other.
import torch._dynamo
from torch import Tensor, nn

import sparkhvd.torch as hvd
from sparkhvd.errors import CollectiveError, InvalidArgumentError
from sparkhvd.estimator.binding import InputBinding, LabelBinding
from sparkhvd.estimator.checkpoint import Checkpoint, Checkpoints
from sparkhvd.estimator.manifest import Manifest
from sparkhvd.estimator.metrics import Forward, Totals
from sparkhvd.estimator.program import Program, build_optimizer, load_program, outputs_of
from sparkhvd.estimator.reader import Batch, Reader
from sparkhvd.estimator.store import Store
from sparkhvd.runner import context

__all__ = ["PROGRAM_NAME", "TrainResult", "TrainSpec", "train"]

PROGRAM_NAME = "program.pkl"


@dataclass(frozen=True)
class TrainSpec:
    """Everything a rank needs to know; small, because it travels in the closure.

    Attributes:
        store: where everything is.
        run_dir: this run's folder in the store: the program, checkpoints, metrics.
        program_sha256: of `<run_dir>/program.pkl`; checked before it is unpickled.
        data_dir: folder of the materialized data.
        inputs: which columns become which argument of the model.
        labels: how label columns meet outputs.
        sample_weight: column with a weight per row, or None.
        loss_weights: factor of each label's loss.
        batch_size: rows per rank and step.
        val_batch_size: the same for validation.
        epochs: epochs to have trained in the end.
        seed: decides split, order and random numbers.
        shuffle: a new order each epoch.
        shuffle_bytes: see `Reader`.
        drop_last: leave out the last step of an epoch if it is not full.
        has_validation: whether there are validation rows.
        validation: their fraction; None if a column tells.
        gradient_clip_norm: largest norm of all gradients together, or None.
        restore_best: keep the checkpoint with the lowest validation loss.
        fingerprint: JSON object of what a checkpoint must share with this run.
    """

    store: Store
    run_dir: str
    program_sha256: str
    data_dir: str
    inputs: InputBinding
    labels: LabelBinding
    sample_weight: str | None = None
    loss_weights: tuple[float, ...] = (1.0,)
    batch_size: int = 32
    val_batch_size: int = 32
    epochs: int = 1
    seed: int = 0
    shuffle: bool = True
    shuffle_bytes: int = 1 << 30
    drop_last: bool = False
    has_validation: bool = False
    validation: float | None = None
    gradient_clip_norm: float | None = None
    restore_best: bool = False
    fingerprint: str = "{}"


@dataclass(frozen=True)
class TrainResult:
    """What rank 0 reports; equal on all ranks but for times.

    Attributes:
        history: one record per epoch: epoch, loss, metrics, val_..., rows_per_s, seconds, lr.
        epoch: whose checkpoint holds the result: the last, or the best with `restore_best`.
        order: in which order rows came, in words.
    """

    history: list[dict[str, Any]]
    epoch: int
    order: str


def train(spec: TrainSpec) -> TrainResult:
    """Train on every rank of a job; all ranks must call it with the same spec.

    Raises:
        InvalidArgumentError: outputs, labels or loss do not fit each other (on all ranks, before the first step), or
            a checkpoint in the run's folder belongs to another run.
        CollectiveError: another rank was lost. The last checkpoint is whole.
    """
    if (place := context()) is not None:
        torch.set_num_threads(place.num_threads)
    hvd.init()
    pickled = spec.store.read_bytes(f"{spec.run_dir}/{PROGRAM_NAME}")
    program = load_program(pickled, spec.program_sha256)
    model = program.model
    optimizer = hvd.DistributedOptimizer(
        build_optimizer(program.optimizer, model), model.named_parameters(), op=hvd.Sum
    )
    scheduler = program.lr_scheduler(optimizer) if program.lr_scheduler else None
    checkpoints = Checkpoints(spec.store, spec.run_dir)
    history = resume(spec, checkpoints, model, optimizer, scheduler)

    step = Step(spec, program, optimizer)
    with Data(spec) as data:
        for epoch in range(len(history), spec.epochs):
            seed_everything(spec.seed, epoch, hvd.rank())
            record = train_epoch(step, data.training, epoch)
            broadcast_buffers(model)
            if data.validation is not None:
                record |= validate(step, data.validation)
            if scheduler is not None:
                step_scheduler(scheduler, record)
            history.append(record)
            if hvd.rank() == 0:
                save(spec, checkpoints, model, optimizer, scheduler, history)
        order = data.training.description
    hvd.barrier()  # nobody leaves before the last checkpoint is written
    hvd.shutdown()
    return TrainResult(history, best_epoch(history) if spec.restore_best else len(history), order)


def train_epoch(step: Step, reader: Reader, epoch: int) -> dict[str, Any]:
    """One pass over the training rows; returns the record of the epoch, equal on all ranks."""
    step.model.train()
    totals = Totals(step.program.metrics)
    began = time.monotonic()
    for batch in reader.epoch(epoch):
        step.run(batch, totals)
    combine(totals)
    seconds = time.monotonic() - began
    rows = int(totals.values[2])
    return {
        "epoch": epoch + 1,
        **totals.means(),
        "rows": rows,
        "seconds": seconds,
        "rows_per_s": rows / max(seconds, 1e-9),
        "lr": learning_rate(step.optimizer),
    }


def validate(step: Step, reader: Reader) -> dict[str, float]:
    """Loss and metrics over the validation rows, equal on all ranks; the model is not changed."""
    step.model.eval()
    totals = Totals(step.program.metrics)
    with torch.no_grad():
        for batch in reader.epoch(0):
            if batch.num_rows:
                totals.add(step.forward(batch))
    combine(totals)
    return totals.means("val_")


class Step:
    """One training step, and what it remembers between steps."""

    def __init__(self, spec: TrainSpec, program: Program, optimizer: torch.optim.Optimizer) -> None:
        """`optimizer` is the distributed one."""
        self.spec = spec
        self.program = program
        self.model = program.model
        self.optimizer: Any = optimizer
        # Whether weights of a step are known only after `forward`; None before the first batch.
        self.is_weighted: bool | None = None

    def run(self, batch: Batch, totals: Totals) -> None:
        """Forward, backward and step for this rank's part of a global batch."""
        self.optimizer.zero_grad()
        if self.is_weighted is None:
            result = self.first_forward(batch)
        else:
            result = self.forward(batch) if batch.num_rows else None
        share = self.share(batch, result)
        if result is not None:
            if result.weight:  # a mean over nothing may be NaN, and adds nothing
                (result.loss * share).backward()
            totals.add(result)
        if self.spec.gradient_clip_norm is not None:
            self.optimizer.synchronize()  # clip what all ranks together would step along
            nn.utils.clip_grad_norm_(self.model.parameters(), self.spec.gradient_clip_norm)
        self.optimizer.step()

    def forward(self, batch: Batch) -> Forward:
        """Run the model and the loss on the rows of this rank."""
        arguments, keywords = self.spec.inputs.apply(batch.columns)
        outputs = outputs_of(self.model(*arguments, **keywords))
        labels = self.spec.labels.match(outputs, self.spec.labels.apply(batch.columns))
        if self.spec.sample_weight is None:
            return mean_loss(self.spec, self.program, outputs, labels)
        weights = torch.from_numpy(batch.columns[self.spec.sample_weight])
        return weighted_loss(self.spec, self.program, outputs, labels, weights)

    def first_forward(self, batch: Batch) -> Forward | None:
        """The first batch of a run: if it does not fit on some rank, every rank raises, before any step."""
        result, problem = None, ""
        cause: Exception | None = None
        if batch.num_rows:
            try:
                result = self.forward(batch)
                self.check_first(result)
            except CollectiveError:
                raise
            except InvalidArgumentError as e:
                problem, cause = str(e), e
            except Exception as e:  # noqa: BLE001 - raised again below, on every rank
                shapes = (f"{n} {v.shape} {v.dtype}" for n, v in batch.columns.items())
                problem = (
                    f"model or loss raised {type(e).__name__}: {e} (columns: {', '.join(shapes)})"
                )
                cause = e
        is_weighted = result is not None and result.is_weighted
        said = hvd.allgather_object((problem, is_weighted), name="first batch")
        for rank, (text, _) in enumerate(said):
            if text:
                own = cause if rank == hvd.rank() else None
                fail_together(f"The first batch, on rank {rank}: {text}", own)
        self.is_weighted = any(weighted for _, weighted in said)
        return result

    def check_first(self, result: Forward) -> None:
        """Refuse a loss without a gradient, and one that compares a label with its output by broadcasting."""
        if not result.loss.requires_grad:
            raise InvalidArgumentError(
                "loss returned a number that does not depend on the model's trainable parameters, so there is no "
                "gradient. Compute it from the output, without detach(), item() or torch.no_grad()."
            )
        for i, (output, label) in enumerate(zip(result.outputs, result.labels, strict=True)):
            if output.numel() == label.numel() or not _broadcast(output, label):
                continue
            # (3,) broadcasts over (3, 3), where three rows happen to be as many as classes. Then as many rows as no
            # other axis has tell a loss that takes class indices from one that would learn the mean.
            rows = max(output.shape + label.shape) + 1
            index = torch.arange(rows) % len(output)
            try:
                with torch.no_grad():
                    self.program.losses[i](output[index], label[index])
            except RuntimeError as e:
                raise InvalidArgumentError(
                    f"Label {self.spec.labels.columns[i]!r} has shape {tuple(label.shape)} and the model's output "
                    f"{tuple(output.shape)}: the loss broadcasts one over the other. Change the last layer or the "
                    "label so that they have the same number of elements per row."
                ) from e

    def share(self, batch: Batch, result: Forward | None) -> float:
        """What this rank's mean loss counts in the global batch."""
        own = result.weight if result is not None else 0.0
        if all(self.program.is_sum):
            return own  # back from the mean to the sum
        total: float = sum(batch.rows_per_rank)
        if self.is_weighted:
            mine = torch.tensor([own], dtype=torch.float64)
            total = float(hvd.allreduce(mine, name="step.weight", op=hvd.Sum))
        return own / total if total else 0.0


def mean_loss(
    spec: TrainSpec, program: Program, outputs: tuple[Tensor, ...], labels: tuple[Tensor, ...]
) -> Forward:
    """The loss as the user's functions give it: a mean over rows, or (mean, weight)."""
    num_rows = len(outputs[0])
    total: Tensor | None = None
    weight: float | None = None
    for i, loss_fn in enumerate(program.losses):
        value = loss_fn(outputs[i], labels[i])
        if isinstance(value, tuple):
            if len(value) != 2 or len(program.losses) > 1:
                raise InvalidArgumentError(
                    f"loss returned {len(value)} values for {len(program.losses)} labels. With one label it may "
                    "return (mean, weight); else it must return one number."
                )
            value, weight = value[0], float(value[1])
        _check_scalar(value, outputs[i], labels[i])
        value = value.reshape(())
        if program.is_sum[i]:
            value = value / num_rows
        if spec.loss_weights[i] != 1.0:
            value = value * spec.loss_weights[i]
        total = value if total is None else total + value
    assert total is not None
    if weight is None:
        return Forward(outputs, labels, total, float(num_rows), is_weighted=False)
    return Forward(outputs, labels, total, weight, is_weighted=True)


def weighted_loss(
    spec: TrainSpec,
    program: Program,
    outputs: tuple[Tensor, ...],
    labels: tuple[Tensor, ...],
    weights: Tensor,
) -> Forward:
    """The mean of the rows' losses by their weights, and the sum of the weights."""
    sum_of_weights = float(weights.double().sum())
    total: Tensor | None = None
    for i, loss_fn in enumerate(program.losses):
        per_row = loss_fn(outputs[i], labels[i])
        if per_row.ndim == 0 or len(per_row) != len(weights):
            raise InvalidArgumentError(
                f"loss gave shape {tuple(per_row.shape)} for {len(weights)} rows; with sample_weight_col it must "
                "give one value per row when called with reduction='none'."
            )
        per_row = per_row.reshape(len(weights), -1).mean(dim=1)
        value = (per_row * weights.to(per_row.dtype)).sum() * spec.loss_weights[i]
        total = value if total is None else total + value
    assert total is not None
    mean = total / sum_of_weights if sum_of_weights else total * 0.0
    return Forward(outputs, labels, mean, sum_of_weights, is_weighted=True)


def _check_scalar(value: Any, output: Tensor, label: Tensor) -> None:
    if not isinstance(value, Tensor) or value.numel() != 1:
        found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise InvalidArgumentError(
            f"loss returned {found} for an output of shape {tuple(output.shape)} and a label of shape "
            f"{tuple(label.shape)}; it must return one number, the mean over the rows."
        )


# --- data, state and what else the loop needs -----------------------------------------------------------------


class Data:
    """This rank's readers of training and validation rows; a context manager."""

    def __init__(self, spec: TrainSpec) -> None:
        """Open the materialized data; nothing large is read yet."""
        manifest = Manifest.load(spec.store, spec.data_dir)
        subset = "train" if spec.has_validation else "all"
        self.training = _reader(spec, manifest, subset, spec.batch_size)
        self.validation: Reader | None = None
        if spec.has_validation:
            self.validation = _reader(spec, manifest, "validation", spec.val_batch_size)
        for name, reader in (("training", self.training), ("validation", self.validation)):
            if reader is not None and reader.num_steps == 0:
                raise InvalidArgumentError(
                    f"There are no {name} steps: {reader.num_rows} of {manifest.num_rows} rows are {name} rows"
                    + (
                        ", and drop_last leaves out a step that is not full."
                        if spec.drop_last
                        else "."
                    )
                )

    def __enter__(self) -> Data:
        return self

    def __exit__(self, *error: object) -> None:
        self.training.close()
        if self.validation is not None:
            self.validation.close()


def _reader(spec: TrainSpec, manifest: Manifest, subset: str, batch_size: int) -> Reader:
    is_training = subset != "validation"
    return Reader(
        spec.store,
        manifest,
        rank=hvd.rank(),
        size=hvd.size(),
        batch_size=batch_size,
        seed=spec.seed,
        shuffle=spec.shuffle and is_training,
        subset=subset,
        validation=spec.validation,
        drop_last=spec.drop_last and is_training,
        shuffle_bytes=spec.shuffle_bytes,
    )


def resume(
    spec: TrainSpec,
    checkpoints: Checkpoints,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
) -> list[dict[str, Any]]:
    """Give every rank rank 0's state: the newest checkpoint's, or the initial one. Returns the epochs done."""
    found: Checkpoint | None = None
    said: dict[str, Any] = {"history": [], "scheduler": None, "problem": ""}
    if hvd.rank() == 0 and (found := checkpoints.latest()) is not None:
        said["problem"] = _difference(found.fingerprint, spec.fingerprint)
        if found.epoch > spec.epochs:
            said["problem"] = f"it has {found.epoch} epochs, and epochs is {spec.epochs}"
        said["history"], said["scheduler"] = found.history, found.scheduler
    said = hvd.broadcast_object(said, 0, name="resume")
    if said["problem"]:
        fail_together(
            f"{spec.run_dir} holds a checkpoint of another run: {said['problem']}. Give another run_id, or "
            "the same model, data and params."
        )
    if found is not None:
        model.load_state_dict(found.model)
        optimizer.load_state_dict(found.optimizer)
    hvd.broadcast_parameters(_tensors(model.state_dict()), 0)
    hvd.broadcast_optimizer_state(optimizer, 0)
    if scheduler is not None and said["scheduler"] is not None:
        scheduler.load_state_dict(said["scheduler"])
    history = said["history"]
    assert isinstance(history, list)
    return history


def _difference(theirs: str, ours: str) -> str:
    """What differs between two fingerprints, in words."""
    found, wanted = json.loads(theirs), json.loads(ours)
    names = [k for k in wanted if found.get(k) != wanted[k]]
    texts = []
    for name in names:
        before, now = json.dumps(found.get(name)), json.dumps(wanted[name])
        short = len(before) + len(now) < 80
        texts.append(f"{name} was {before} and is {now}" if short else f"{name} differs")
    return "; ".join(texts)


def save(
    spec: TrainSpec,
    checkpoints: Checkpoints,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
    history: list[dict[str, Any]],
) -> None:
    """Write the checkpoint of the epoch that has ended. Called by rank 0."""
    checkpoints.save(
        Checkpoint(
            epoch=len(history),
            model=model.state_dict(),
            optimizer=optimizer.state_dict(),
            scheduler=scheduler.state_dict() if scheduler is not None else None,
            history=list(history),
            fingerprint=spec.fingerprint,
        ),
        keep=(best_epoch(history),) if spec.restore_best else (),
    )


def best_epoch(history: Sequence[dict[str, Any]]) -> int:
    """The epoch with the lowest validation loss; NaN is never the lowest. The last where there is none."""
    known = [r for r in history if r.get("val_loss") is not None and r["val_loss"] == r["val_loss"]]
    return int(min(known, key=lambda r: r["val_loss"])["epoch"]) if known else len(history)


def step_scheduler(scheduler: Any, record: dict[str, Any]) -> None:
    """Tell the scheduler that an epoch has ended."""
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        scheduler.step(record.get("val_loss", record["loss"]))
    else:
        scheduler.step()


def seed_everything(seed: int, epoch: int, rank: int) -> None:
    """Seed torch, numpy and random for an epoch on a rank: a resumed epoch draws what it drew before."""
    state = np.random.SeedSequence([seed & (2**64 - 1), epoch, rank]).generate_state(3)
    torch.manual_seed(int(state[0]))
    np.random.seed(int(state[1]))
    random.seed(int(state[2]))


def fail_together(message: str, cause: Exception | None = None) -> NoReturn:
    """Raise InvalidArgumentError on every rank; every rank must call it with the same message."""
    # A rank that ended now would take the message from a slower one, which would see only its loss.
    with contextlib.suppress(CollectiveError):
        hvd.barrier()
    raise InvalidArgumentError(message) from cause


def _broadcast(output: Tensor, label: Tensor) -> bool:
    try:
        torch.broadcast_shapes(output.shape, label.shape)
    except RuntimeError:
        return False
    return True


def broadcast_buffers(model: nn.Module) -> None:
    """Give all ranks rank 0's buffers: running statistics are of its rows, in validation and checkpoint alike."""
    buffers = _tensors(dict(model.named_buffers()))
    if buffers:
        hvd.broadcast_parameters(buffers, 0)


def combine(totals: Totals) -> None:
    """Add up the totals of all ranks, in place."""
    hvd.allreduce_(totals.values, name="totals", op=hvd.Sum)


def learning_rate(optimizer: torch.optim.Optimizer) -> float | None:
    """The learning rate of the first parameter group, if it has one."""
    rate = optimizer.param_groups[0].get("lr")
    return None if rate is None else float(rate)


def _tensors(named: dict[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in named.items() if isinstance(value, Tensor)}
