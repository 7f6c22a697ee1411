"""Request of a fit, checked on the driver before the first Spark job."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from sparkhvd.data.columns import heads
from sparkhvd.data.columns.binding import bind_inputs, each_column, model_dtype
from sparkhvd.data.columns.decoders import RowFunctions
from sparkhvd.data.columns.features import InputBinding
from sparkhvd.data.columns.labels import bind_labels, is_class_index, is_of_row
from sparkhvd.data.columns.schema import Column, DataSchema
from sparkhvd.data.store.default import default_store, is_temporary_store
from sparkhvd.data.store.run_lock import Held, hold
from sparkhvd.data.store.store import Store
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.estimator.fitting.cluster import Cluster, resolve_cluster
from sparkhvd.estimator.fitting.inputs import (
    FitSources,
    check_inputs,
    required_modules,
    row_functions,
)
from sparkhvd.estimator.fitting.loop import LoopOptions, loop_options
from sparkhvd.estimator.fitting.runs import Run, check_run_id, new_run_id, open_run
from sparkhvd.estimator.fitting.trial import Pairs, try_model
from sparkhvd.estimator.params.fit import changed_options, train_fn_effects
from sparkhvd.estimator.params.options import FitOptions
from sparkhvd.runner import preflight
from sparkhvd.spark import SparkShim
from sparkhvd.training.check_user_code import UserCode, check_user_code
from sparkhvd.training.loss_functions import construct_losses, resolve_losses
from sparkhvd.training.metrics import AnyMetric, resolve_metrics
from sparkhvd.training.model import build_model, check_model
from sparkhvd.training.optimizer import Overrides, check_compression, check_optimizer
from sparkhvd.training.others import Others
from sparkhvd.training.program import Program, dump_program

__all__ = ["Request", "bind_features", "check_request", "overrides"]


@dataclass(frozen=True)
class Request:
    """A fit whose arguments have been checked; no Spark job has run yet.

    Attributes:
        options: values of the Params.
        loop: options of the training loop that follow from several Params.
        sources: of the rows.
        shim: session whose tasks become ranks.
        store: where everything goes.
        cluster: how many ranks, and how they are started.
        schema: the columns that take part.
        program: the user's objects.
        pickled: the program as the ranks get it.
        sha256: of that.
        pairs: check of losses and metrics.
        links: per label, how probabilities follow from outputs.
        losses: per label, as the user gave it.
        loss_weights: per label.
        seed: of the run.
        run: in the store.
        held: the hold on it; released by who got the request.
        num_checkpoints: epochs whose checkpoints stay after the fit; 0: nothing of the run.
        short_steps: see `TrainSpec`.
    """

    options: FitOptions
    loop: LoopOptions
    sources: FitSources
    shim: SparkShim
    store: Store
    cluster: Cluster
    schema: DataSchema
    program: Program
    pickled: bytes
    sha256: str
    pairs: Pairs
    links: tuple[str, ...]
    losses: tuple[Any, ...]
    loss_weights: tuple[float, ...]
    seed: int
    run: Run
    held: Held
    num_checkpoints: int
    short_steps: bool

    @property
    def outlives_process(self) -> bool:
        """True if somebody may need the run's name: it has been given one, is kept, or stays when this process is killed."""
        is_kept = bool(self.options.run_id or self.num_checkpoints)
        return is_kept or not is_temporary_store(self.store)

    def tells_outputs(self, labels: Sequence[Column]) -> bool:
        """Return True if `loss` tells the meaning of outputs: it trains the model, by labels of whole rows."""
        return not self.program.user.computes_loss and all(map(is_of_row, labels))


@dataclass(frozen=True)
class _Losses:
    """The losses of a fit, one per label.

    Attributes:
        given: as the user gave them.
        used: as the training calls them; none where the user's code has its own.
        is_sum: of each in use, whether it adds rows up.
    """

    given: tuple[Any, ...]
    used: tuple[Any, ...]
    is_sum: tuple[bool, ...]

    @property
    def links(self) -> tuple[str, ...]:
        """Links from outputs to probabilities, one per label."""
        return tuple(heads.link_of(loss) for loss in self.given)


def check_request(
    options: FitOptions,
    sources: FitSources,
    uid: str,
    *,
    takes_slots: bool = True,
    short_steps: bool = False,
) -> Request:
    """Check everything that can be known before the first job: Params, columns, model, cluster, store and run.

    Args:
        options: of the fit.
        sources: of its rows.
        uid: of the estimator; names a run without a `run_id`.
        takes_slots: see `resolve_cluster`.
        short_steps: see `TrainSpec`.

    Raises:
        InvalidArgumentError: something is wrong.
    """
    model, user = _check_model(options, sources)
    labels = _required("label_cols", options.label_cols, "the columns with the labels")
    _required("feature_cols", options.feature_cols, "the columns that become the model's input")
    losses = _check_losses(options, model, user, len(labels))
    _check_optimizer(options, model, user, losses)
    functions = row_functions(options)
    metrics = resolve_metrics(options.metrics, labels, losses.links)
    pairs = Pairs(losses.used, metrics, is_asked=options.pairs_rows and user.train_fn is None)
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
    num_checkpoints = _num_checkpoints(options)
    loop = loop_options(
        options,
        model=model,
        metric_names=[m.name for m in program.metrics],
        has_validation=sources.has_validation,
    )
    loss_weights = _loss_weights(options, len(labels))
    unbuilt: Any = options.model  # a function makes the module in each rank
    pickled, sha256 = dump_program(replace(program, model=unbuilt))
    shim = SparkShim(sources.training.spark)
    cluster = resolve_cluster(shim, options, takes_slots=takes_slots)
    limit_s = cluster.start_timeout or cluster.settings.values.start_timeout_s
    preflight.check_workers(shim, required_modules(options), limit_s)
    store = default_store(shim.session, options.store).waiting(limit_s)
    run_id = check_run_id(options.run_id or new_run_id(uid))
    with contextlib.ExitStack() as stack:
        held = stack.enter_context(hold(store, run_id, verbose=cluster.verbose))
        run = open_run(store, run_id, warm_start=options.warm_start)
        seed = run.seed(options.random_seed)
        stack.pop_all()  # released by the caller
    return Request(
        options=options,
        loop=loop,
        sources=sources,
        shim=shim,
        store=store,
        cluster=cluster,
        schema=schema,
        program=program,
        pickled=pickled,
        sha256=sha256,
        pairs=pairs,
        links=losses.links,
        losses=losses.given,
        loss_weights=loss_weights,
        seed=seed,
        run=run,
        held=held,
        num_checkpoints=num_checkpoints,
        short_steps=short_steps,
    )


def _num_checkpoints(options: FitOptions) -> int:
    if options.keep_checkpoints is None:
        return 1 if options.run_id else 0
    if not options.keep_checkpoints and options.warm_start:
        raise InvalidArgumentError(
            "keep_checkpoints is 0, which deletes the run when its model is there, and warm_start trains further from a run "
            "that is there. Give keep_checkpoints=1 or leave it out."
        )
    return options.keep_checkpoints


def _required(name: str, columns: list[str] | None, meaning: str) -> list[str]:
    if not columns:
        raise InvalidArgumentError(f"{name} is required: name {meaning}.")
    return columns


def _check_model(options: FitOptions, sources: FitSources) -> tuple[torch.nn.Module, UserCode]:
    """Check the module and the user's code; return both."""
    model = check_model(build_model(options.model))
    # Validation rows may come from files, which no Param names.
    changed = {**changed_options(options), "validation": sources.has_validation}
    user = check_user_code(changed, train_fn_effects())
    return model, user


def _check_optimizer(
    options: FitOptions, model: torch.nn.Module, user: UserCode, losses: _Losses
) -> None:
    others = Others(losses.used, (), model, user.steps, trains=not user.computes_loss)
    if lazy := [name for name, p in others.parameters.items() if torch.nn.parameter.is_lazy(p)]:
        raise InvalidArgumentError(
            f"loss: parameter {lazy[0]!r} has no shape yet. Run the lazy module on one batch before fit."
        )
    if user.train_fn is None or options.optimizer is not None:
        optimizer = check_optimizer(options.optimizer, options.model, model, others)
        overrides(options).check(optimizer)


def overrides(options: FitOptions) -> Overrides:
    """Select the values that replace those of the optimizer's groups."""
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
    pairs: Pairs,
) -> DataSchema:
    """Check the columns of the sources, and where their shapes are known, that model and loss fit them."""
    named = zip(options.label_cols or [], losses.given, strict=True)
    schema = check_inputs(
        options,
        sources,
        functions=functions,
        model_dtype=model_dtype(model),
        class_labels=[name for name, loss in named if is_class_index(loss)],
        keeps_types=user.takes_rows,
    )
    labels = bind_labels(schema, losses.given, options.label_shapes)
    if not user.transformations:  # else what the model gets is known when there are data
        inputs = bind_features(options, model, user, schema)
        if not user.takes_rows:
            schema = replace(schema, features=inputs.with_casts(schema.features))
        if not user.feeds_model and all(c.row_shape is not None for c in schema.features):
            compared = None if user.computes_loss else labels
            try_model(
                model,
                inputs,
                schema,
                compared,
                metrics=metrics,
                precision=options.precision,
                compare=pairs,
            )
    return schema


def _loss_weights(options: FitOptions, num_labels: int) -> tuple[float, ...]:
    weights = options.loss_weights
    if weights is None:
        return (1.0 / num_labels,) * num_labels
    if len(weights) != num_labels:
        raise InvalidArgumentError(
            f"loss_weights has {len(weights)} numbers and label_cols {num_labels} columns. Give one per label."
        )
    return tuple(weights)


def bind_features(
    options: FitOptions, model: torch.nn.Module, user: UserCode, schema: DataSchema
) -> InputBinding:
    """Decide which columns become which argument of the model.

    Raises:
        InvalidArgumentError: they do not fit, and the user's code does not feed the model.
    """
    try:
        return bind_inputs(model, schema, input_shapes=options.input_shapes, inputs=options.inputs)
    except InvalidArgumentError:
        if not user.feeds_model:
            raise
        return each_column(schema)
