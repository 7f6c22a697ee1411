"""Check a fit on the driver before the first Spark job."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from sparkhvd.data.columns.binding import (
    InputBinding,
    bind_inputs,
    each_column,
    label_arguments,
    model_dtype,
)
from sparkhvd.data.columns.decoders import RowFunctions
from sparkhvd.data.columns.labels import (
    LabelBinding,
    bind_labels,
    is_class_index,
    is_of_row,
    is_of_user,
    link_of,
    widths_of,
)
from sparkhvd.data.columns.schema import FLOATS, NUMERIC_TYPES, Column, DataSchema
from sparkhvd.data.store.locks import RunLock, acquire
from sparkhvd.data.store.store import Store
from sparkhvd.data.store.temporary import default_store, is_temporary_store
from sparkhvd.errors import InvalidArgumentError, listed
from sparkhvd.estimator.fitting.cluster import Cluster, resolve_cluster
from sparkhvd.estimator.fitting.inputs import (
    FitSources,
    check_inputs,
    required_modules,
    row_functions,
)
from sparkhvd.estimator.fitting.runs import Run, check_run_id, new_run_id, open_run
from sparkhvd.estimator.params.generated import FitOptions
from sparkhvd.estimator.params.groups import changed_options, train_fn_effects
from sparkhvd.runner import preflight
from sparkhvd.spark import SparkShim
from sparkhvd.training.check_user_code import UserCode, check_user_code
from sparkhvd.training.early_stopping import EarlyStopping, Monitor
from sparkhvd.training.loss_functions import construct_losses, resolve_losses
from sparkhvd.training.loss_state import LossState
from sparkhvd.training.metrics import AnyMetric, resolve_metrics, try_metrics
from sparkhvd.training.model import build_model, check_model, is_compiled, is_lazy, uncompiled
from sparkhvd.training.modules.copies import light_copy
from sparkhvd.training.modules.fitted import OrderError, fitted_widths, trial_outputs, zeros
from sparkhvd.training.modules.modes import in_mode
from sparkhvd.training.optimizer import (
    Overrides,
    check_clipping,
    check_compression,
    check_optimizer,
    needs_closure,
)
from sparkhvd.training.precision import check_precision
from sparkhvd.training.program import Program, dump_program, naming_unpicklable
from sparkhvd.training.row_pairs import check_ends, takes_only_integers, unpaired
from sparkhvd.training.types import Loss
from sparkhvd.training.user_step import model_loss


@dataclass(frozen=True)
class CheckedProgram:
    """The user's part of a fit, checked without Spark.

    Attributes:
        options: values of the Params.
        loop: options of the training loop that follow from several Params.
        sources: sources of the rows.
        schema: columns of the fit.
        program: the user's objects.
        pickled: program as the ranks receive it; empty for a lazy module, see `initialized`.
        sha256: SHA-256 of `pickled`.
        pairs: check that losses and metrics compare outputs with labels row by row.
        links: link from outputs to probabilities of each label.
        losses: loss of each label, as the user gave it.
        loss_weights: weight of each label's loss.
    """

    options: FitOptions
    loop: LoopOptions
    sources: FitSources
    schema: DataSchema
    program: Program
    pickled: bytes
    sha256: str
    pairs: PairingCheck
    links: tuple[str, ...]
    losses: tuple[Any, ...]
    loss_weights: tuple[float, ...]


@dataclass(frozen=True)
class FitRequest(CheckedProgram):
    """Request of a fit with checked arguments. No Spark job has run yet.

    Attributes:
        shim: session whose tasks become ranks.
        store: store of the run and its data.
        cluster: number and launch of the ranks.
        seed: seed of the run.
        run: run in the store.
        held: lock on the run; the receiver of the request releases it.
        num_checkpoints: number of epochs whose checkpoints are kept after the fit; 0 deletes the run.
        short_steps: see `TrainSpec`.
    """

    shim: SparkShim
    store: Store
    cluster: Cluster
    seed: int
    run: Run
    held: RunLock
    num_checkpoints: int
    short_steps: bool

    @property
    def outlives_process(self) -> bool:
        """True if the run may exist after this process: it is named, is kept, or remains if the process is killed."""
        is_kept = bool(self.options.run_id or self.num_checkpoints)
        return is_kept or not is_temporary_store(self.store)

    def tells_outputs(self, labels: Sequence[Column]) -> bool:
        """Whether the loss decides the meaning of outputs: it trains the model, and labels describe whole rows."""
        return not self.program.user.computes_loss and all(map(is_of_row, labels))


@dataclass(frozen=True)
class _Losses:
    """Losses of a fit, one per label.

    Attributes:
        given: losses as the user gave them.
        used: losses as the training calls them; empty if the user's code computes the loss.
        is_sum: for each used loss, whether it sums over rows.
    """

    given: tuple[Any, ...]
    used: tuple[Any, ...]
    is_sum: tuple[bool, ...]

    @property
    def links(self) -> tuple[str, ...]:
        """Links from outputs to probabilities, one per label."""
        return tuple(link_of(loss) for loss in self.given)


def check_request(
    options: FitOptions,
    sources: FitSources,
    uid: str,
    *,
    takes_slots: bool = True,
    short_steps: bool = False,
) -> FitRequest:
    """Check Params, columns, model, cluster, store and run before the first job.

    Args:
        options: options of the fit.
        sources: sources of its rows.
        uid: uid of the estimator, which names a run without a `run_id`.
        takes_slots: see `resolve_cluster`.
        short_steps: see `TrainSpec`.

    Raises:
        InvalidArgumentError: something is wrong.
    """
    num_checkpoints = _num_checkpoints(options)
    checked = check_program(options, sources)
    options = checked.options
    shim = SparkShim(sources.training.spark)
    cluster = resolve_cluster(shim, options, takes_slots=takes_slots)
    limit_s = cluster.start_timeout or cluster.settings.values.start_timeout_s
    preflight.check_workers(shim, required_modules(options), limit_s)
    store = default_store(shim.session, options.store).waiting(limit_s)
    run_id = check_run_id(options.run_id or new_run_id(uid))
    with contextlib.ExitStack() as stack:
        held = stack.enter_context(acquire(store, run_id, verbose=cluster.verbose))
        run = open_run(store, run_id, warm_start=options.warm_start)
        seed = run.seed(options.random_seed)
        stack.pop_all()  # the caller releases the lock
    return FitRequest(
        **vars(checked),
        shim=shim,
        store=store,
        cluster=cluster,
        seed=seed,
        run=run,
        held=held,
        num_checkpoints=num_checkpoints,
        short_steps=short_steps,
    )


def check_program(options: FitOptions, sources: FitSources) -> CheckedProgram:
    """Check Params, columns, model and the user's code, without a Spark session.

    Raises:
        InvalidArgumentError: something is wrong.
    """
    options, model, user = _check_model(options, sources)
    labels = options.label_cols or []
    if not user.computes_loss and not labels:
        raise InvalidArgumentError(
            "label_cols is required: name the columns with the labels. Without label columns, compute the loss in train_step or train_fn, "
            "or in the model: then inputs gives labels to an argument with the default None, as in forward(x, labels=None)."
        )
    if not options.feature_cols:
        raise InvalidArgumentError(
            "feature_cols is required: name the columns that become the model's input."
        )
    losses = _check_losses(options, model, user, len(labels))
    _check_optimizer(options, model, user, losses)
    functions = row_functions(options)
    metrics = resolve_metrics(options.metrics, labels, losses.links)
    pairs = PairingCheck(
        losses.used, metrics, is_asked=options.pairs_rows and user.train_fn is None
    )
    schema = _check_columns(options, sources, model, user, losses, metrics, functions, pairs)
    program = Program(
        model=model,
        optimizer=options.optimizer,
        losses=losses.used,
        is_sum=losses.is_sum,
        metrics=metrics,
        lr_scheduler=options.lr_scheduler,
        compression=check_compression(options.gradient_compression),
        functions=functions,
        user=user,
    )
    loop = loop_options(
        options,
        model=model,
        metric_names=[m.name for m in program.metrics],
        has_validation=sources.has_validation,
    )
    pickled, sha256 = b"", ""
    if not is_lazy(model):
        # `model` is a function, and each rank calls it to make the module.
        unbuilt: Any = options.model
        pickled, sha256 = dump_program(replace(program, model=unbuilt))
    return CheckedProgram(
        options=options,
        loop=loop,
        sources=sources,
        schema=schema,
        program=program,
        pickled=pickled,
        sha256=sha256,
        pairs=pairs,
        links=losses.links,
        losses=losses.given,
        loss_weights=_loss_weights(options, len(labels)),
    )


def _num_checkpoints(options: FitOptions) -> int:
    if options.keep_checkpoints is None:
        return 1 if options.run_id else 0
    if not options.keep_checkpoints and options.warm_start:
        raise InvalidArgumentError(
            "keep_checkpoints is 0, which deletes the run after its model is trained, but warm_start continues the training of "
            "an existing run. Give keep_checkpoints=1, or leave it out."
        )
    return options.keep_checkpoints


def _check_model(
    options: FitOptions, sources: FitSources
) -> tuple[FitOptions, torch.nn.Module, UserCode]:
    """Check the module and the user's code, and return the options without torch.compile's wrapper, the module and code."""
    built = build_model(options.model)
    if is_compiled(built):
        # The wrapper of torch.compile adds a prefix to the names of parameters.
        inner = uncompiled(options.model)
        options = replace(
            options, model=inner, compile=options.compile or "compile" not in options.explicit
        )
    model = check_model(uncompiled(built))
    with naming_unpicklable("model", model):
        light_copy(model)  # fails here if the module cannot be copied, before later copies
    # `validation_path` is not a Param, so the Param `validation` may be unset although rows validate.
    changed = {**changed_options(options), "validation": sources.has_validation}
    user = check_user_code(changed, train_fn_effects())
    has_loss = options.loss is not None or options.loss_constructors is not None
    if not has_loss and not user.computes_loss:
        user = _with_model_loss(options, model, user)
    return options, model, user


def _with_model_loss(options: FitOptions, model: torch.nn.Module, user: UserCode) -> UserCode:
    """Let the model compute the loss if `inputs` passes labels to it."""
    names = tuple(options.inputs or {})
    labels = label_arguments(model, names)
    if not labels:
        return user
    for param in ("metrics", "sample_weight_col"):
        if getattr(options, param):
            raise InvalidArgumentError(
                f"{param} would have no effect: loss is not given, so the model computes it from its argument {labels[0]!r}. Give loss, or "
                "train_step."
            )
    step = functools.partial(model_loss, names)
    return replace(
        user,
        train_step=step,
        validation_step=user.validation_step or step,
        label_arguments=labels,
    )


def _check_optimizer(
    options: FitOptions, model: torch.nn.Module, user: UserCode, losses: _Losses
) -> None:
    others = LossState(losses.used, (), model, user.steps, trains=not user.computes_loss)
    if lazy := [name for name, p in others.parameters.items() if torch.nn.parameter.is_lazy(p)]:
        raise InvalidArgumentError(
            f"loss: parameter {lazy[0]!r} of a lazy module has no shape yet. Run the module on one batch before fit."
        )
    if user.train_fn is None:
        check_clipping(
            model, options.gradient_clip_norm, options.gradient_clip_value, others.trained
        )
    if user.train_fn is None or options.optimizer is not None:
        optimizer = check_optimizer(options.optimizer, options.model, model, others)
        overrides(options).check(optimizer)
        if options.precision == "16-mixed" and user.train_fn is None and needs_closure(optimizer):
            raise InvalidArgumentError(
                f"precision is '16-mixed', but {type(optimizer).__name__} evaluates the loss several times per step, which torch's loss "
                "scaling does not allow. Give precision='bf16-mixed' or '32'."
            )


def overrides(options: FitOptions) -> Overrides:
    """Select the Params that override values in the optimizer's parameter groups."""
    return Overrides(options.learning_rate, options.weight_decay, options.lr_scaling)


def _check_losses(
    options: FitOptions, model: torch.nn.Module, user: UserCode, num_labels: int
) -> _Losses:
    loss = construct_losses(options.loss, options.loss_constructors, model)
    used: tuple[Any, ...] = ()
    is_sum: tuple[bool, ...] = ()
    if loss is not None or not user.computes_loss:
        per_row = options.sample_weight_col is not None
        used, is_sum = resolve_losses(loss, num_labels, per_row=per_row)
    given = tuple(loss) if isinstance(loss, (list, tuple)) else (loss,) * num_labels
    return _Losses(given, used, is_sum)


def _check_columns(
    options: FitOptions,
    sources: FitSources,
    model: torch.nn.Module,
    user: UserCode,
    losses: _Losses,
    metrics: Sequence[AnyMetric],
    functions: RowFunctions,
    pairs: PairingCheck,
) -> DataSchema:
    """Check the columns of the sources, and check model and loss against columns of known shape."""
    schema = check_inputs(
        options,
        sources,
        functions=functions,
        model_dtype=model_dtype(model),
        class_labels=_class_labels(options, sources, model, losses),
        keeps_types=user.takes_rows,
    )
    labels = bind_labels(schema, losses.given, options.label_shapes)
    # With transformations, the model's inputs are known only after data are read.
    if not user.transformations:
        inputs = bind_features(options, model, user, schema)
        if not user.takes_rows:
            schema = replace(schema, features=inputs.with_casts(schema.features))
        if not user.feeds_model and all(c.row_shape is not None for c in schema.features):
            is_compared = user.uses_loss(has_validation=sources.has_validation)
            compared = labels if is_compared else None
            try_model(
                model,
                inputs.without(user.label_arguments),
                schema,
                compared,
                metrics=metrics,
                precision=options.precision,
                compare=pairs,
                batch_size=options.batch_size,
            )
    return schema


def _class_labels(
    options: FitOptions, sources: FitSources, model: torch.nn.Module, losses: _Losses
) -> list[str]:
    """List the labels with class indices: a known loss needs them, or the user's loss raises an error for floats."""
    pairs = list(zip(options.label_cols or [], losses.given, strict=True))
    known = [name for name, loss in pairs if is_class_index(loss)]
    if not losses.used or not any(is_of_user(loss) for _, loss in pairs):
        return known
    types = {f.name: type(f.dataType).__name__ for f in sources.training.schema.fields}
    # Guess the widths of the outputs from the model's last linear layers, one per label, because no output is known
    # yet.
    widths = [m.out_features for m in model.modules() if isinstance(m, nn.Linear)] or [2]
    widths = [widths[0]] * len(pairs) + widths
    dtype = getattr(torch, model_dtype(model))
    return known + [
        name
        for (name, given), used, width in zip(
            pairs, losses.used, widths[-len(pairs) :], strict=True
        )
        if options.pairs_rows  # False forbids calling the user's functions here
        and is_of_user(given)
        and NUMERIC_TYPES.get(types.get(name, "")) in FLOATS
        and takes_only_integers(used, width, dtype)
    ]


def _loss_weights(options: FitOptions, num_labels: int) -> tuple[float, ...]:
    weights = options.loss_weights
    if weights is None:
        return (1.0 / max(1, num_labels),) * num_labels
    if len(weights) != num_labels:
        raise InvalidArgumentError(
            f"loss_weights has {len(weights)} numbers and label_cols {num_labels} columns. Give one per label."
        )
    return tuple(weights)


def bind_features(
    options: FitOptions, model: torch.nn.Module, user: UserCode, schema: DataSchema
) -> InputBinding:
    """Bind columns to the model's arguments.

    Raises:
        InvalidArgumentError: columns and arguments do not match, and the user's code does not feed the model.
    """
    try:
        return bind_inputs(model, schema, input_shapes=options.input_shapes, inputs=options.inputs)
    except InvalidArgumentError:
        if not user.feeds_model:
            raise
        return each_column(schema)


# ----------------------------------------------------------------------------------------------------
# Options of the training loop that follow from several Params: monitored number, returned epoch, early stopping.


@dataclass(frozen=True)
class LoopOptions:
    """Options for the fields of `TrainSpec` with the same names.

    Attributes:
        monitor: number of the history that selects the best epoch.
        return_best: return the weights of the best epoch instead of the last epoch.
        early_stopping: when to stop before the last epoch, or None.
    """

    monitor: Monitor = Monitor()
    return_best: bool = False
    early_stopping: EarlyStopping | None = None

    def describe(self, *, has_schedule: bool) -> dict[str, object]:
        """Describe what a resumed fit must share, because it decides the kept checkpoints and a scheduler's state.

        Args:
            has_schedule: True if the fit has a learning-rate scheduler.
        """
        is_seen = self.return_best or has_schedule
        return {
            "return_model": "best" if self.return_best else "last",
            "monitor": f"{self.monitor.mode} of {self.monitor.name}" if is_seen else None,
        }


def loop_options(
    options: FitOptions, *, model: nn.Module, metric_names: Sequence[str], has_validation: bool
) -> LoopOptions:
    """Derive the options of the training loop.

    Args:
        options: options of the fit.
        model: module to train.
        metric_names: names of the fit's metrics, which are prefixes of history keys.
        has_validation: True if some rows validate.

    Raises:
        InvalidArgumentError: two Params contradict each other.
    """
    check_precision(options.precision, model)
    if options.validation_steps_per_epoch is not None and not has_validation:
        raise InvalidArgumentError(
            "validation_steps_per_epoch is given, but there are no validation rows. Set validation, for example 0.1."
        )
    keys = _HistoryKeys.of(options, metric_names, has_validation=has_validation)
    default = "val_loss" if has_validation else "loss"
    name = options.monitor or default
    keys.check("monitor", name)
    monitor = Monitor(name, options.monitor_mode)
    return LoopOptions(
        monitor, _returns_best(options, has_validation), _early_stopping(options, monitor, keys)
    )


@dataclass(frozen=True)
class _HistoryKeys:
    """Keys of the history's records.

    Attributes:
        names: keys or prefixes known before the first epoch.
        is_open: True if user code may log other keys.
    """

    names: tuple[str, ...]
    is_open: bool

    @classmethod
    def of(
        cls, options: FitOptions, metric_names: Sequence[str], *, has_validation: bool
    ) -> _HistoryKeys:
        names = ("loss", *metric_names)
        functions = (options.train_step, options.validation_step, options.train_fn)
        is_open = bool(options.callbacks) or any(each is not None for each in functions)
        validated = tuple(f"val_{name}" for name in names) if has_validation else ()
        return cls(names + validated, is_open=is_open)

    def check(self, param: str, name: str) -> None:
        """Check that the records of the history will have the key `name`."""
        # A metric with several values has several keys, which are known only after the first epoch.
        if (
            self.is_open
            or name in self.names
            or name.startswith(tuple(f"{n}_" for n in self.names))
        ):
            return
        raise InvalidArgumentError(
            f"{param} is {name!r}, which the history will not have. It will have {listed(map(repr, self.names))}."
        )


def _returns_best(options: FitOptions, has_validation: bool) -> bool:
    if options.return_model != "best":
        return False
    if not has_validation and options.monitor is None:
        name = "return_model='best'" if "return_model" in options.explicit else "restore_best"
        raise InvalidArgumentError(
            f"{name} needs validation rows to decide which epoch is best. Set validation, for example 0.1, or set monitor to "
            "another key of the history."
        )
    return True


def _early_stopping(
    options: FitOptions, monitor: Monitor, keys: _HistoryKeys
) -> EarlyStopping | None:
    entries = options.early_stopping
    if entries is None:
        return None
    unknown = sorted(set(entries) - {"monitor", "mode", "patience", "min_delta"})
    if unknown:
        raise InvalidArgumentError(
            f"early_stopping has {', '.join(map(repr, unknown))}. It may have 'monitor', 'mode', 'patience' and "
            "'min_delta'."
        )
    name, mode = entries.get("monitor", monitor.name), entries.get("mode", monitor.mode)
    if mode not in ("min", "max"):
        raise InvalidArgumentError(
            f"early_stopping's monitor's mode is {mode!r}; it must be one of 'min', 'max'."
        )
    keys.check("early_stopping's monitor", name)
    patience, min_delta = entries.get("patience", 1), entries.get("min_delta", 0.0)
    if isinstance(patience, bool) or not isinstance(patience, int) or patience < 1:
        raise InvalidArgumentError(
            f"early_stopping's patience is {patience!r}; it must be a whole number of epochs, at least 1."
        )
    if not isinstance(min_delta, (int, float)) or not min_delta >= 0:
        raise InvalidArgumentError(
            f"early_stopping's min_delta is {min_delta!r}; it must be a number, at least 0."
        )
    return EarlyStopping(Monitor(name, mode), patience, float(min_delta))


# ----------------------------------------------------------------------------------------------------
# Try the model on two rows of zeros before any rank starts, to learn its outputs and to check loss and metrics.

Compare: TypeAlias = "Callable[[Sequence[Tensor], Sequence[Tensor]], None]"


class PairingCheck:
    """One-time check that loss and metrics compare row by row.

    It runs when the shapes of outputs and labels are known.
    """

    def __init__(
        self, losses: Sequence[Loss], metrics: Sequence[AnyMetric], *, is_asked: bool
    ) -> None:
        self._losses, self._metrics = losses, metrics
        self._is_asked = is_asked and bool(losses)
        # True until the check has run; the ranks run it if the driver could not.
        self.is_left = self._is_asked

    def __call__(self, outputs: Sequence[Tensor], labels: Sequence[Tensor]) -> None:
        """Warn if a loss or metric does not compare each row's output with its label."""
        if self.is_left:
            self.is_left = False
            if text := unpaired(self._losses, self._metrics, outputs, labels):
                warnings.warn(text, stacklevel=2)

    def with_ends(self, names: Sequence[str], ranges: Mapping[str, tuple[int, int]]) -> Compare:
        """Make a function that also rejects labels in `ranges` without a class in the output."""

        def compare(outputs: Sequence[Tensor], labels: Sequence[Tensor]) -> None:
            self(outputs, labels)
            if self._is_asked:
                check_ends(self._losses, outputs, labels, names, ranges)

        return compare


def try_model(
    model: torch.nn.Module,
    inputs: InputBinding,
    schema: DataSchema,
    labels: LabelBinding | None,
    examples: Mapping[str, Any] | None = None,
    metrics: Sequence[AnyMetric] = (),
    precision: str = "32",
    compare: Compare | None = None,
    batch_size: int = 2,
) -> tuple[int, ...] | None:
    """Run the model on rows of zeros and return the elements per row of each output, without changing the model.

    Returns None if only ranks can find the outputs, see `trial_outputs`, or if the user's code feeds the model and the
    trial fails.

    Args:
        model: the user's model.
        inputs: binding of columns to its arguments.
        schema: columns whose shapes are known.
        labels: binding of the labels that the loss compares with the outputs; None if the user's code computes the
            loss.
        examples: collated columns of two rows.
        metrics: metrics of the fit.
        precision: the Param.
        compare: function that is called with matching outputs and labels.
        batch_size: batch size of the training.

    Raises:
        InvalidArgumentError: the model does not accept the columns or returns another number of outputs, or a label or
            metric does not fit its output.
    """
    trial = in_mode(light_copy(model), is_training=False)
    names = [c.name for c in schema.labels]
    run = functools.partial(
        trial_outputs,
        inputs=inputs,
        columns=schema.features,
        examples=examples,
        precision=precision,
        batch_size=batch_size,
    )
    try:
        outputs = run(trial, labels=names)
    except InvalidArgumentError as e:
        if labels is None and not isinstance(e, OrderError):
            return None  # the user's code may call the model in another way
        raise
    if outputs is None:
        return None
    if labels is None:
        return widths_of(outputs)
    fitted = fitted_widths(widths_of(outputs), names)
    rows = _zero_labels(schema, labels)
    if rows is None or len(outputs[0]) != 2:
        return fitted
    if (problem := _mismatch(labels, outputs, rows, metrics, compare)) is None:
        return fitted
    # Some models return other outputs in training mode, so a mismatch counts only if it is there in both modes.
    with torch.random.fork_rng(devices=[]):
        trained = run(in_mode(trial, is_training=True))
    if trained is None or _mismatch(labels, trained, rows, metrics, compare) is None:
        return fitted
    raise InvalidArgumentError(f"model, tried on two rows of zeros: {problem}")


def _zero_labels(schema: DataSchema, labels: LabelBinding) -> tuple[Tensor, ...] | None:
    """Make two rows of the labels, or return None if a shape is unknown."""
    if any(c.row_shape is None or -1 in c.row_shape for c in schema.labels):
        return None
    return labels.apply({c.name: zeros(c) for c in schema.labels})


def _mismatch(
    labels: LabelBinding,
    outputs: tuple[Tensor, ...],
    rows: tuple[Tensor, ...],
    metrics: Sequence[AnyMetric],
    compare: Compare | None,
) -> InvalidArgumentError | None:
    try:
        matched = labels.match(outputs, rows)
        try_metrics(metrics, outputs, matched)
    except InvalidArgumentError as e:
        return e
    if compare is not None:
        compare(outputs, matched)
    return None
