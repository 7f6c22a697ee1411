"""What a fit was asked for, checked on the driver before the first Spark job."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from sparkhvd.data.columns import heads
from sparkhvd.data.columns.binding import bind_inputs, model_dtype
from sparkhvd.data.columns.decoders import RowFunctions
from sparkhvd.data.columns.features import InputBinding
from sparkhvd.data.columns.labels import bind_labels, is_class_index
from sparkhvd.data.columns.schema import DataSchema
from sparkhvd.data.store.default import default_store
from sparkhvd.data.store.run_lock import Held, hold
from sparkhvd.data.store.store import Store
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.estimator.fitting.cluster import Cluster, Given, resolve_cluster
from sparkhvd.estimator.fitting.inputs import FitSources, check_inputs, row_functions
from sparkhvd.estimator.fitting.options import training_options
from sparkhvd.estimator.fitting.runs import Run, check_run_id, new_run_id, open_run
from sparkhvd.estimator.param_table import rows_of
from sparkhvd.estimator.params import TrainParams
from sparkhvd.spark import SparkShim
from sparkhvd.training.building import (
    Overrides,
    build_model,
    check_compression,
    given_loss,
)
from sparkhvd.training.check_user_code import UserCode, check_user_code
from sparkhvd.training.metrics import resolve_metrics
from sparkhvd.training.modules.architecture import light_copy
from sparkhvd.training.modules.output_widths import fitted_widths, output_widths
from sparkhvd.training.program import (
    Program,
    check_model,
    check_optimizer,
    dump_program,
    resolve_losses,
)

if TYPE_CHECKING:
    pass

__all__ = ["Request", "bind_features", "check_request", "to_ranks", "train_fn_effects", "try_model"]


@dataclass(frozen=True)
class Request:
    """A fit whose arguments have been checked; no Spark job has run yet.

    Attributes:
        shim: the session.
        sources: of the rows.
        store: where everything goes.
        cluster: how many ranks, and how they are started.
        schema: the columns that take part.
        program: the user's objects.
        pickled: the program as the ranks get it.
        sha256: of that.
        links: per label, how probabilities follow from outputs.
        losses: per label, as the user gave it.
        loss_weights: per label.
        seed: of the run.
        run: in the store.
        held: the hold on it; released by who got the request.
        num_checkpoints: epochs whose checkpoints stay after the fit; 0: nothing of the run.
        data_key: the user's name for the data, or None.
        training: more fields of `TrainSpec`.
    """

    shim: SparkShim
    sources: FitSources
    store: Store
    cluster: Cluster
    schema: DataSchema
    program: Program
    pickled: bytes
    sha256: str
    links: tuple[str, ...]
    losses: tuple[Any, ...]
    loss_weights: tuple[float, ...]
    seed: int
    run: Run
    held: Held
    num_checkpoints: int
    data_key: str | None
    training: dict[str, Any]


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
        """How probabilities follow from outputs."""
        return tuple(heads.link_of(loss) for loss in self.given)


def check_request(params: TrainParams, sources: FitSources) -> Request:
    """Check everything that can be known before the first job: Params, columns, model, cluster, store and run.

    Raises:
        InvalidArgumentError: something is wrong.
    """
    get = params._get
    params._check_values()
    model, user, overrides = _check_model(params, sources)
    labels = _required(params, "label_cols", "the columns with the labels")
    _required(params, "feature_cols", "the columns that become the model's input")
    losses = _check_losses(params, model, user, len(labels))
    functions = row_functions(get)
    schema = _check_columns(params, sources, model, user, losses, functions)
    program = Program(
        model=model,
        optimizer=get("optimizer"),
        losses=losses.used,
        is_sum=losses.is_sum,
        metrics=resolve_metrics(get("metrics"), labels, losses.links),
        lr_scheduler=get("lr_scheduler"),
        compression=check_compression(get("gradient_compression")),
        functions=functions,
        user=user,
    )
    num_checkpoints = _num_checkpoints(params)
    options = training_options(
        get,
        to_ranks(params),
        model=model,
        metric_names=[m.name for m in program.metrics],
        has_validation=sources.has_validation,
    )
    loss_weights = _loss_weights(params, len(labels))
    pickled, sha256 = dump_program(replace(program, model=get("model")))
    shim = SparkShim(sources.training.spark)
    cluster = resolve_cluster(shim, Given(get, params.isSet))
    limit_s = cluster.start_timeout or cluster.settings.values.start_timeout_s
    store = default_store(shim.session, get("store")).waiting(limit_s)
    run_id = check_run_id(get("run_id") or new_run_id(params.uid))
    with contextlib.ExitStack() as stack:
        held = stack.enter_context(hold(store, run_id, verbose=cluster.verbose))
        run = open_run(store, run_id, warm_start=params.getOrDefault("warm_start"))
        seed = run.seed(get("random_seed"))
        stack.pop_all()  # released by the caller
    return Request(
        shim=shim,
        sources=sources,
        store=store,
        cluster=cluster,
        schema=schema,
        program=program,
        pickled=pickled,
        sha256=sha256,
        links=losses.links,
        losses=losses.given,
        loss_weights=loss_weights,
        seed=seed,
        run=run,
        held=held,
        num_checkpoints=num_checkpoints,
        data_key=get("data_key"),
        training={"overrides": overrides, **options},
    )


def _num_checkpoints(params: TrainParams) -> int:
    given = params._get("keep_checkpoints")
    if given is None:
        return 1 if params._get("run_id") else 0
    if not given and params.getOrDefault("warm_start"):
        raise InvalidArgumentError(
            "keep_checkpoints is 0, which deletes the run when its model is there, and warm_start trains further from a run "
            "that is there. Give keep_checkpoints=1 or leave it out."
        )
    return int(given)


def _required(params: TrainParams, name: str, meaning: str) -> list[str]:
    value = params._get(name)
    if not value:
        raise InvalidArgumentError(f"{name} is required: name {meaning}.")
    return list(value)


def to_ranks(params: TrainParams) -> dict[str, Any]:
    """Fields of `TrainSpec` that are Params as they are."""
    return {n: params._get(n) for n, row in rows_of(type(params)).items() if row.to_ranks}


def train_fn_effects(params: TrainParams) -> dict[str, str]:
    """Params that a `train_fn` does not see, or sees by way of the optimizer."""
    return {name: row.train_fn for name, row in rows_of(type(params)).items() if row.train_fn}


def _changed(params: TrainParams) -> dict[str, Any]:
    """The params with another value than their default."""
    set_params = {p.name: value for p, value in params._paramMap.items()}
    defaults = {p.name: value for p, value in params._defaultParamMap.items()}
    return {n: v for n, v in set_params.items() if n not in defaults or v != defaults[n]}


def _check_model(
    params: TrainParams, sources: FitSources
) -> tuple[torch.nn.Module, UserCode, Overrides]:
    """The module, the user's code, and what Params change of the optimizer."""
    given, optimizer = params._get("model"), params._get("optimizer")
    model = check_model(build_model(given))
    # Validation rows may come from files, which no Param names.
    changed = {**_changed(params), "validation": sources.has_validation}
    user = check_user_code(changed, train_fn_effects(params))
    overrides = Overrides.of(params._get)
    if user.train_fn is None or optimizer is not None:
        check_optimizer(optimizer, given, model)
        overrides.check(optimizer, model)
    return model, user, overrides


def _check_losses(
    params: TrainParams, model: torch.nn.Module, user: UserCode, num_labels: int
) -> _Losses:
    loss = given_loss(params._get("loss"), params._get("loss_constructors"), model)
    used: tuple[Any, ...] = ()
    is_sum: tuple[bool, ...] = ()
    if loss is not None or not user.computes_loss:
        per_row = params._get("sample_weight_col") is not None
        used, is_sum = resolve_losses(loss, num_labels, per_row=per_row)
    given = tuple(loss) if isinstance(loss, (list, tuple)) else (loss,) * num_labels
    return _Losses(given, used, is_sum)


def _check_columns(
    params: TrainParams,
    sources: FitSources,
    model: torch.nn.Module,
    user: UserCode,
    losses: _Losses,
    functions: RowFunctions,
) -> DataSchema:
    """Check the columns of the sources, and where their shapes are known, that model and loss fit them."""
    labels = params._get("label_cols")
    pairs = zip(labels, losses.given, strict=True)
    schema = check_inputs(
        params._get,
        sources,
        functions=functions,
        model_dtype=model_dtype(model),
        class_labels=[name for name, loss in pairs if is_class_index(loss)],
    )
    bind_labels(schema, losses.given, params._get("label_shapes"))
    if not user.transformations:  # else what the model gets is known when there are data
        inputs = bind_features(params, model, schema)
        schema = replace(schema, features=inputs.with_casts(schema.features))
        if all(c.row_shape is not None for c in schema.features):
            try_model(model, inputs, schema)
    return schema


def _loss_weights(params: TrainParams, num_labels: int) -> tuple[float, ...]:
    given = params._get("loss_weights")
    if given is None:
        return (1.0 / num_labels,) * num_labels
    if len(given) != num_labels:
        raise InvalidArgumentError(
            f"loss_weights has {len(given)} numbers and label_cols {num_labels} columns. Give one per label."
        )
    return tuple(given)


def bind_features(params: TrainParams, model: torch.nn.Module, schema: DataSchema) -> InputBinding:
    """Which columns become which argument of the model."""
    shapes, inputs = params._get("input_shapes"), params._get("inputs")
    return bind_inputs(model, schema, input_shapes=shapes, inputs=inputs)


def try_model(
    model: torch.nn.Module,
    inputs: InputBinding,
    schema: DataSchema,
    examples: Mapping[str, Any] | None = None,
) -> tuple[int, ...] | None:
    """Elements per row of the model's outputs, one per label, from a run on zeros; the model is not changed.

    None where only ranks can tell, see `output_widths`.

    Raises:
        InvalidArgumentError: it does not fit the columns, or has another number of outputs.
    """
    trial = light_copy(model).eval()
    widths = output_widths(trial, inputs, schema.features, examples)
    return None if widths is None else fitted_widths(widths, [c.name for c in schema.labels])
