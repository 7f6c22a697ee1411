"""Input of a rank, and its result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sparkhvd.data.columns.binding import InputBinding
from sparkhvd.data.columns.labels import LabelBinding
from sparkhvd.data.columns.schema import DataSchema
from sparkhvd.data.store.store import Store
from sparkhvd.training.early_stopping import EarlyStopping, Monitor
from sparkhvd.training.modules.weights import Weights
from sparkhvd.training.optimizer import Overrides
from sparkhvd.training.torch_settings import TorchSettings
from sparkhvd.training.types import History


@dataclass(frozen=True)
class TrainSpec:
    """Input of a rank. It is small, because it is part of Spark's closure.

    Attributes:
        store: holds data, checkpoints and metrics.
        run_dir: this run's folder in the store: the program, checkpoints, metrics.
        start_from: file in the store with the initial weights; "" for the program's.
        checkpoint_interval_s: at most this many seconds of steps are lost with a rank.
        num_checkpoints: epochs whose checkpoints are kept, at least 1.
        program_sha256: SHA-256 of `<run_dir>/program.pkl`; checked before the file is unpickled.
        program_weights: the weights of a large model, in a separate file; otherwise None.
        data_dir: folder of the materialized data, or of the list of files that are read in place.
        data_store: holds those files; None means `store`.
        inputs: binding of columns to arguments of the model.
        labels: binding of label columns to outputs.
        sample_weight: column with a weight per row, or None.
        group: column of groups, whose rows stay together, or None.
        loss_weights: factor of each label's loss.
        batch_size: rows per rank and step.
        val_batch_size: rows per rank and validation batch.
        epochs: total epochs to train.
        seed: decides split, order and random numbers.
        shuffle: a new order each epoch.
        shuffle_bytes: see `Reader`.
        drop_last: drop the last step of an epoch if it is not full.
        short_steps: with `drop_last` and `accumulate`, drop only a partial batch: the last step may have fewer batches.
        has_validation: True if there are validation rows.
        validation: fraction of validation rows; None if a column selects them, or if they are separate data.
        validation_dir: folder of separate validation data, or None.
        validation_store: as `data_store`, for separate validation data.
        num_workers: threads that run decoders.
        val_num_workers: threads that run decoders in validation.
        overrides: changes of the optimizer's groups.
        precision: a key of `PRECISIONS`.
        accumulate: batches whose gradients are accumulated to one step of the optimizer.
        gradient_clip_norm: largest norm of all gradients together, or None.
        gradient_clip_value: largest absolute value of a gradient's element, or None.
        lr_scheduler_interval: "epoch" or "step".
        train_steps_per_epoch: maximum of optimizer steps per epoch; None for all rows.
        validation_steps_per_epoch: maximum of validation batches; None for all rows.
        monitor: selects the best epoch; a ReduceLROnPlateau follows it too.
        return_best: return the best epoch's weights instead of the last one's.
        early_stopping: when to stop before the last epoch, or None.
        terminate_on_nan: fail when a loss is not finite.
        compile: run the model through torch.compile.
        least_ranks: minimum of ranks of an elastic job; 0 for a fixed number.
        keeps_global_batch: the ranks share batches of `least_ranks * batch_size` rows, instead of `batch_size` on each.
        looks_for_gpu: if Spark assigned no GPU to the rank, use one that torch sees.
        transformed: the columns that the user's transformations return; None without transformations.
        finds_widths: the ranks run the trained model on their first batch to find the sizes of its outputs, because the
            driver could not.
        checks_pairs: rank 0 checks that loss and metrics pair rows, because the driver could not.
        timeline: steps of a launch in the run's timeline; 0 for no timeline.
        torch_settings: torch settings of the driver, see `torch_settings`.
        fingerprint: JSON object that the run's checkpoints must match.
    """

    store: Store
    run_dir: str
    program_sha256: str
    data_dir: str
    inputs: InputBinding
    labels: LabelBinding
    program_weights: Weights | None = None
    start_from: str = ""
    checkpoint_interval_s: float = 300.0
    num_checkpoints: int = 1
    sample_weight: str | None = None
    group: str | None = None
    loss_weights: tuple[float, ...] = (1.0,)
    batch_size: int = 32
    val_batch_size: int = 32
    epochs: int = 1
    seed: int = 0
    shuffle: bool = True
    shuffle_bytes: int = 1 << 30
    drop_last: bool = False
    short_steps: bool = False
    has_validation: bool = False
    validation: float | None = None
    overrides: Overrides = Overrides()
    validation_dir: str | None = None
    data_store: Store | None = None
    validation_store: Store | None = None
    num_workers: int = 1
    val_num_workers: int = 1
    precision: str = "32"
    accumulate: int = 1
    gradient_clip_norm: float | None = None
    gradient_clip_value: float | None = None
    lr_scheduler_interval: str = "epoch"
    train_steps_per_epoch: int | None = None
    validation_steps_per_epoch: int | None = None
    monitor: Monitor = Monitor()
    return_best: bool = False
    early_stopping: EarlyStopping | None = None
    terminate_on_nan: bool = False
    compile: bool = False
    least_ranks: int = 0
    keeps_global_batch: bool = False
    looks_for_gpu: bool = False
    transformed: DataSchema | None = None
    finds_widths: bool = False
    checks_pairs: bool = False
    timeline: int = 0
    torch_settings: TorchSettings = field(default_factory=dict)
    fingerprint: str = "{}"

    @property
    def training_subset(self) -> str:
        """Name of the subset of `data_dir` with the training rows, for `Reader`."""
        return "train" if self.has_validation and self.validation_dir is None else "all"


@dataclass(frozen=True)
class TrainResult:
    """Result of a rank. The driver uses rank 0's. All ranks have the same result except times.

    Attributes:
        history: one record per epoch: epoch, loss, metrics, val_..., rows_per_s, seconds, data_wait_s (the time that rank 0
            waited for batches), lr.
        epoch: the last, or the best with `return_best`; its checkpoint holds the result.
        order: the order of rows, in words.
        stopped: why the fit ended before its last epoch, or "".
        skipped: for "training" and "validation" the rows skipped by `handle_invalid` and the rows in total, if the
            ranks checked rows.
        warning: rank 0's message about damaged checkpoints and the training that was repeated for this reason, or "".
        widths: elements per row of the model's outputs, if the ranks tried the model (`TrainSpec.finds_widths`).
        profile: times of the training, see `Profile.gather`; {} on all ranks except rank 0.
    """

    history: History
    epoch: int
    order: str
    stopped: str = ""
    skipped: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    warning: str = ""
    widths: tuple[int, ...] = ()
    profile: Mapping[str, Any] = field(default_factory=dict)
