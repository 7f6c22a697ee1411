"""Build the spec of the ranks from a checked request and prepared data."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace

import torch
from torch import nn

from sparkhvd.data.columns.decoders import pad
from sparkhvd.data.columns.labels import bind_labels
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.estimator.fitting.inputs import FitData, check_split
from sparkhvd.estimator.fitting.request import FitRequest, bind_features, overrides, try_model
from sparkhvd.estimator.params.groups import fingerprint_options, rank_options
from sparkhvd.training.model import build_model, is_lazy, uncompiled
from sparkhvd.training.modules.architecture import dump_shell, load_shell
from sparkhvd.training.modules.fitted import trial_outputs
from sparkhvd.training.modules.lookups import check_lookups
from sparkhvd.training.modules.modes import in_mode
from sparkhvd.training.program import describe_program, dump_program
from sparkhvd.training.spec import TrainSpec
from sparkhvd.training.torch_settings import settings_here
from sparkhvd.training.user_code.transformations import bind_transformed


def build_train_spec(
    request: FitRequest, data: FitData
) -> tuple[TrainSpec, tuple[int, ...] | None]:
    """Build the spec of the ranks from the known column shapes, and try the model on them.

    Returns:
        The spec, and the elements per row of each output of the model (None if only ranks can find them).
    """
    options, program, transformed = request.options, request.program, data.transformed
    schema = data.schema if transformed is None else transformed
    inputs = bind_features(options, program.model, program.user, schema)
    if transformed is not None:
        inputs = bind_transformed(inputs, transformed)
    labels = bind_labels(schema, request.losses, options.label_shapes, data.ranges)
    is_compared = program.user.uses_loss(has_validation=request.sources.has_validation)
    compared = labels if is_compared else None
    widths: tuple[int, ...] | None = None
    # If the user's code feeds the model, the model need not accept the columns themselves.
    with contextlib.suppress(*[InvalidArgumentError] if program.user.feeds_model else []):
        if not program.user.changes_columns:
            widths = try_model(
                program.model,
                inputs.without(program.user.label_arguments),
                schema,
                compared,
                data.examples,
                program.metrics,
                options.precision,
                request.pairs.with_ends(labels.columns, data.ranges),
                options.batch_size,
            )
    # Check embedding indices only if they reach the model unchanged; a user's own step may change them before.
    if not program.user.computes_loss or program.user.label_arguments:
        padded = [name for name, f in program.functions.collate.items() if isinstance(f, pad)]
        ranges, examples = data.ranges, data.examples
        predicted = inputs.without(program.user.label_arguments)
        check_lookups(program.model, predicted, schema.features, ranges, examples, padded)
    split, held_out = request.sources.split, data.validation
    step = request.cluster.num_proc * options.batch_size
    if not request.short_steps:
        step *= options.accumulate
    check_split(data.manifest, split, step if options.drop_last and not options.group_col else 1)
    weight = schema.sample_weight
    spec = TrainSpec(
        store=request.store,
        run_dir=request.run.run_dir,
        start_from=request.run.start_from,
        num_checkpoints=max(1, request.num_checkpoints),
        program_sha256=request.sha256,
        data_dir=data.training.data_dir,
        data_store=data.training.files,
        inputs=inputs,
        labels=labels,
        sample_weight=weight.name if weight is not None else None,
        group=options.group_col,
        loss_weights=request.loss_weights,
        val_batch_size=options.val_batch_size or options.batch_size,
        seed=request.seed,
        has_validation=request.sources.has_validation,
        validation=float(split) if split and not isinstance(split, str) else None,
        validation_dir=held_out.data_dir if held_out is not None else None,
        validation_store=held_out.files if held_out is not None else None,
        val_num_workers=options.val_reader_num_workers or options.num_workers,
        **rank_options(options),
        overrides=overrides(options),
        monitor=request.loop.monitor,
        return_best=request.loop.return_best,
        early_stopping=request.loop.early_stopping,
        short_steps=request.short_steps,
        least_ranks=request.cluster.least or 0,
        keeps_global_batch=options.elastic_batch == "global",
        looks_for_gpu=request.cluster.looks_for_gpu,
        transformed=transformed,
        finds_widths=widths is None and not program.user.feeds_model,
        torch_settings=settings_here(),
        checks_pairs=request.pairs.is_left,
        fingerprint=fingerprint(request, data),
    )
    return spec, widths


def initialized(request: FitRequest, data: FitData) -> FitRequest:
    """Initialize the parameters of lazy modules by a forward on two rows.

    The seed of the run decides their values. The caller's module is not changed.

    Raises:
        InvalidArgumentError: the forward failed, or left a parameter without a shape.
    """
    if not is_lazy(request.program.model):
        return request
    program = request.program
    if isinstance(request.options.model, nn.Module):
        # A copy, because the optimizer must be copied, too.
        program = load_shell(dump_shell(nn.Module(), program), {})
    else:
        program = replace(
            program, model=uncompiled(build_model(request.options.model, request.seed))
        )
    model = program.model
    schema = data.transformed or data.schema
    inputs = bind_features(request.options, model, program.user, schema)
    if data.transformed is not None:
        inputs = bind_transformed(inputs, data.transformed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(request.seed)
        trial_outputs(
            in_mode(model, is_training=False),
            inputs.without(program.user.label_arguments),
            schema.features,
            data.examples,
            precision=request.options.precision,
        )
    if is_lazy(model):
        names = [n for n, p in model.named_parameters() if nn.parameter.is_lazy(p)]
        raise InvalidArgumentError(
            f"model: parameter {names[0]!r} of a lazy module has no shape, even after a forward on two rows of zeros. Run the module on one "
            "batch before fit."
        )
    in_mode(model, is_training=True)
    pickled, sha256 = dump_program(program)
    options = replace(request.options, model=model)
    return replace(request, program=program, pickled=pickled, sha256=sha256, options=options)


def fingerprint(request: FitRequest, data: FitData) -> str:
    """Encode as JSON the facts that must not change when a fit resumes the run."""
    options, program = request.options, request.program
    values = fingerprint_options(options)
    if data.validation is not None:
        values["validation"] = "a DataFrame"
    facts = {
        **describe_program(program),
        **values,
        **program.functions.describe(),
        **data.describe(),
        **request.loop.describe(has_schedule=program.lr_scheduler is not None),
        "num_proc": request.cluster.num_proc
        if request.cluster.least is None
        else request.cluster.ranks,
        "random_seed": request.seed,
        # shuffle_bytes decides between a full permutation of rows and a shuffle inside windows.
        "shuffle_bytes": options.shuffle_bytes if options.shuffle else None,
    }
    return json.dumps(facts, sort_keys=True)
