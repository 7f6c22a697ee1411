"""`TorchEstimator`: check arguments, prepare the data, launch the ranks and collect the trained model."""

from __future__ import annotations

import contextlib
import functools
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn

from sparkhvd import lazy_compiler
from sparkhvd.data.reuse import ReuseScope
from sparkhvd.data.source import Target
from sparkhvd.data.store.store import TIMELINE_NAME
from sparkhvd.estimator.base import RankEstimator
from sparkhvd.estimator.fitting.inputs import FitData, FitSources, prepare_inputs, required_modules
from sparkhvd.estimator.fitting.progress import (
    EpochReporter,
    announce_late,
    poll_interval,
    report_skipped,
)
from sparkhvd.estimator.fitting.recorder import Recorder
from sparkhvd.estimator.fitting.request import FitRequest, check_request
from sparkhvd.estimator.fitting.runs import Finished
from sparkhvd.estimator.fitting.status_line import of_this_process
from sparkhvd.estimator.fitting.train_spec import build_train_spec, initialized
from sparkhvd.estimator.model import TorchModel
from sparkhvd.estimator.params.base import with_signature
from sparkhvd.estimator.params.groups import TrainParams
from sparkhvd.estimator.saving.recipe import write_recipe
from sparkhvd.estimator.saving.run_model import store_run_model
from sparkhvd.estimator.transform.outputs import check_count
from sparkhvd.observe.loggers.base import Fit
from sparkhvd.observe.loggers.fanout import LoggerFanout
from sparkhvd.observe.report.page import HTML_NAME, JSON_NAME
from sparkhvd.runner.elastic.job import launch_elastic
from sparkhvd.runner.elastic.options import RankRange
from sparkhvd.runner.job import launch, prewarm
from sparkhvd.runner.live.files import Mailbox
from sparkhvd.runner.options import JobReport, LaunchOptions
from sparkhvd.runner.prewarm import Prewarm
from sparkhvd.settings import Settings
from sparkhvd.training.checkpoints.changes import has_losses
from sparkhvd.training.checkpoints.checkpoint import Checkpoint
from sparkhvd.training.checkpoints.files import Checkpoints
from sparkhvd.training.checkpoints.resume import finish
from sparkhvd.training.elastic import train_elastically
from sparkhvd.training.loss_state import returned_loss
from sparkhvd.training.modules.copies import copy_with
from sparkhvd.training.modules.fitted import TrainedState
from sparkhvd.training.modules.modes import in_mode
from sparkhvd.training.program import store_program
from sparkhvd.training.spec import TrainResult, TrainSpec
from sparkhvd.training.train import train
from sparkhvd.training.user_code.transformations import flat_columns

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from sparkhvd.estimator.params.generated import EstimatorKeywords, FitOptions


@with_signature
class TorchEstimator(TrainParams, RankEstimator[TorchModel]):
    """Estimator that trains a PyTorch module on a Spark DataFrame, with one rank per barrier task.

        estimator = TorchEstimator(
            model=net, optimizer=torch.optim.Adam(net.parameters()), loss=nn.CrossEntropyLoss(),
            feature_cols=["features"], label_cols=["label"], batch_size=32, epochs=10, num_proc=2)
        model = estimator.fit(df)  # TorchModel

    N ranks with batch size b train like one process with batch size N * b; the learning rate is used as given. The
    given module and optimizer are not modified. `explainParams()` describes all arguments.
    """

    _model_class: type[TorchModel] = TorchModel
    # Whether the last step of an epoch may have fewer batches than `accumulate` with `drop_last`.
    _short_steps = False

    def __init__(self, *positional: object, **keywords: Unpack[EstimatorKeywords]) -> None:
        super().__init__()
        self._set_keywords(positional, keywords)

    def _fit_sources(self, sources: FitSources) -> TorchModel:
        """Train on sources of rows. Raises the same errors as `fit`."""
        options = self._options()
        settings = options.settings or Settings.resolve()
        with lazy_compiler.installed() if settings.lazy_compiler else contextlib.nullcontext():
            return self._fit_with(options, sources)

    def _fit_with(self, options: FitOptions, sources: FitSources) -> TorchModel:
        recorder = Recorder()
        request = check_request(
            options,
            sources,
            self.uid,
            takes_slots=self._takes_slots(),
            short_steps=self._short_steps,
        )
        recorder.lap("check")
        options = request.options
        recorder.settled(options, request.cluster.settings.values, request.store)
        with self._fanout(request, recorder) as fanout:
            model = self._train_or_explain(request, recorder, fanout)
            if not request.num_checkpoints:
                # The run is deleted last, so that it keeps the weights if anything before fails.
                stays = [TIMELINE_NAME] if options.timeline else []
                if options.keep_checkpoints != 0:
                    stays += [JSON_NAME, HTML_NAME]
                request.run.delete(stays)
        return model

    def _train_or_explain(
        self, request: FitRequest, recorder: Recorder, fanout: LoggerFanout
    ) -> TorchModel:
        """Train and finish the run. On an error, note where the weights are, and write the report and loggers."""
        options, verbose = request.options, request.cluster.verbose
        try:
            with request.held:
                if verbose and request.outlives_process:
                    request.run.announce(options.epochs)
                model, epoch = self._train(request, recorder, fanout)
                if request.num_checkpoints:
                    fitted = model._require_fitted()
                    finished = Finished(epoch, fitted.widths, fitted.timings)
                    request.run.finish(finished, request.num_checkpoints)
            fitted = model._require_fitted()
            is_kept = options.keep_checkpoints != 0
            history = recorder.with_changes(fitted.history)
            recorder.write(request.store, request.run.run_dir, history=history, is_kept=is_kept)
            model._fitted = replace(fitted, history=history, report=recorder.document)
            self._write_recipe(request, model)
            fanout.finished(model, recorder.document)
            return model
        except BaseException as e:
            request.run.explain_failure(
                e,
                options.run_id,
                epochs=options.epochs,
                verbose=verbose,
                is_trained=recorder.is_trained,
            )
            recorder.write_failure(request.store, request.run.run_dir, e)
            fanout.failed(e, recorder.document)
            raise

    def _write_recipe(self, request: FitRequest, model: TorchModel) -> None:
        """Write the recipe for `sparkhvd reproduce` into a kept run on a table, and set its key on the model."""
        fitted = model._require_fitted()
        tables = fitted.data.get("tables", ())
        if not (request.num_checkpoints and len(tables) == 1 and tables[0]["source"]):
            return
        if request.run.start_from or request.cluster.least is not None:
            # Cannot be reproduced: the weights came from another run, or the number of ranks could change.
            return
        try:
            key = write_recipe(
                request.store,
                request.run.run_dir,
                self,
                model,
                seed=request.seed,
                num_proc=request.cluster.num_proc,
            )
        except Exception as e:  # noqa: BLE001 - the training is done, and its model is complete
            warnings.warn(
                f"The recipe of run {request.run.run_dir!r} was not written: {type(e).__name__}: {e}. The model is complete, but "
                "`sparkhvd reproduce` cannot repeat this run.",
                stacklevel=2,
            )
            return
        model._fitted = replace(fitted, run_key=key)

    def _fanout(self, request: FitRequest, recorder: Recorder) -> LoggerFanout:
        """Start the loggers of a fit."""
        cluster = request.cluster
        facts = {"num_proc": str(cluster.num_proc), "random_seed": str(request.seed)}
        tags = {"sparkhvd.store": request.store.url, "sparkhvd.estimator": type(self).__name__}

        def fit() -> Fit:
            return Fit(
                run_id=request.run.run_dir.removeprefix("runs/"),
                params={**recorder.params, **facts},
                tags=tags,
                label=self._label,
                epochs_done=request.run.position()[0],
            )

        say = of_this_process.print if cluster.verbose else lambda line: None
        return LoggerFanout(request.options.loggers or (), fit, say)

    def _train(
        self, request: FitRequest, recorder: Recorder, fanout: LoggerFanout
    ) -> tuple[TorchModel, int]:
        """Prepare the data and train, and return the model and the number of the epoch of its weights."""
        with contextlib.nullcontext(self._scope) if self._scope else ReuseScope() as scope:
            options = request.options
            target = Target(
                request.store,
                request.run.run_dir,
                scope,
                options.data_key,
                keep_data=options.keep_data,
                num_partitions=options.num_partitions,
                on_task_start=self._prewarm(request),
            )
            with announce_late("writing the columns into the store", request.cluster.verbose):
                data = prepare_inputs(
                    request.sources,
                    request.schema,
                    request.program,
                    target,
                    inputs=options.inputs,
                )
            recorder.lap("materialize")
            recorder.prepared(data.origin, data.training.reason)
            if request.sources.is_incremental and request.cluster.verbose:
                of_this_process.print(f"{request.sources.training.name}: {data.training.reason}")
            fanout.data(data.origin)
            report_skipped(data.skipped, request.cluster.verbose)
            request = initialized(request, data)
            spec, widths = build_train_spec(request, data)
            request.held.check()
            request.run.check(spec.fingerprint, spec.epochs)
            if data.is_other_each_time:
                request.run.warn_of_other_data()
            weights = store_program(
                request.store, spec.run_dir, request.pickled, request.options.model
            )
            spec = replace(spec, program_weights=weights)
            model = self._untrained(request, spec, data, widths)
            store_run_model(request.store, spec.run_dir, model, spec.epochs)
            recorder.lap("prepare")
            report = self._launch(request, spec, recorder, fanout)
            monitor = spec.monitor.name if spec.return_best else ""
            recorder.launched(report, request.store, monitor)
        _complete(model, request, spec, data, report)
        return model, report.results[0].epoch

    # -- run ------------------------------------------------------------------------------------------

    def _prewarm(self, request: FitRequest) -> Prewarm | None:
        """Make the function for prewarming ranks in the tasks that write the data.

        Returns None if ranks are not Spark tasks.
        """
        cluster = request.cluster
        if not self._takes_slots():
            return None
        options = LaunchOptions(settings=cluster.settings, use_gpu=cluster.use_gpu)
        return prewarm(request.shim, cluster.num_proc, options, is_barrier=cluster.least is None)

    def _launch(
        self, request: FitRequest, spec: TrainSpec, recorder: Recorder, fanout: LoggerFanout
    ) -> JobReport[TrainResult]:
        checkpoints = Checkpoints(request.store, spec.run_dir)
        cluster = request.cluster
        poll_s = poll_interval(request.store, cluster.num_proc, cluster.slots, cluster.verbose)
        reporter = EpochReporter(
            checkpoints,
            epochs=spec.epochs,
            verbose=cluster.verbose,
            progress=request.options.progress,
            fanout=fanout,
            poll_s=poll_s,
            name=spec.run_dir.removeprefix("runs/").removeprefix(f"{self.uid}-"),
            label=self._label,
        )
        options = LaunchOptions(
            settings=cluster.settings,
            start_timeout_s=cluster.start_timeout,
            max_retries=cluster.max_retries,
            verbose=cluster.verbose,
            shared=request.store,
            run_dir=spec.run_dir,
            progress=functools.partial(request.run.progress, spec.epochs),
            requirements=required_modules(request.options),
            use_gpu=cluster.use_gpu,
            is_alone=cluster.finds_gpu,
            mailbox=Mailbox(request.store.collect, poll_s),
            show_progress=reporter.show_step,
            relaunched=recorder.relaunched,
            ranks_changed=recorder.ranks_changed,
        )
        with reporter:
            report = self._run_ranks(request, spec, options)
            recorder.is_trained = True
        fanout.load(report.results[0].profile)
        result = report.results[0]
        reporter.ended(result.stopped, len(result.history))
        reporter.returns(result.epoch, result.history, spec.monitor.name)
        if request.options.timeline and cluster.verbose:
            of_this_process.print(
                f"timeline: {request.run.timeline_url} (open it in ui.perfetto.dev)"
            )
        report_skipped(report.results[0].skipped, cluster.verbose)
        if report.results[0].warning:
            warnings.warn(report.results[0].warning, stacklevel=4)
        return report

    def _takes_slots(self) -> bool:
        """Whether ranks run in Spark tasks."""
        return True

    def _run_ranks(
        self, request: FitRequest, spec: TrainSpec, options: LaunchOptions
    ) -> JobReport[TrainResult]:
        """Launch the ranks, as an elastic job if `num_proc` is a pair."""
        cluster = request.cluster
        if cluster.least is None:
            return launch(request.shim, train, (spec,), {}, cluster.num_proc, options)
        ranks = RankRange(least=cluster.least, most=cluster.num_proc)
        return launch_elastic(request.shim, train_elastically, (spec,), {}, ranks, options)

    def _untrained(
        self, request: FitRequest, spec: TrainSpec, data: FitData, widths: tuple[int, ...] | None
    ) -> TorchModel:
        """Create the fit's untrained TorchModel, with this estimator's uid and Params."""
        model = self._model_class()
        model._resetUid(self.uid)
        # Arguments of a model that computes its own loss.
        names = request.program.user.label_arguments
        inputs = spec.inputs.without(names)
        used = {name for argument in inputs.arguments for name in argument.columns}
        columns = (
            flat_columns(spec.transformed.features, data.schema.features)
            if spec.transformed
            else tuple(c.for_model() for c in data.schema.features)
        )
        labels = tuple(c.name for c in data.schema.labels)
        model._fitted = TrainedState(
            module=request.program.model,
            columns=tuple(c for c in columns if c.name in used),
            labels=labels or tuple(c.name for c in columns if c.name not in used),
            inputs=inputs,
            links=request.links,
            widths=widths or (),
            run_id=spec.run_dir.removeprefix("runs/"),
            loss=returned_loss(request.losses, request.program.model, request.program.model, {}),
            data=data.origin,
        )
        self._copyValues(model)
        if widths and (given := model._get("outputCols")) is not None:
            check_count(given, widths)
        if not request.tells_outputs((spec.transformed or data.schema).labels):
            model._name_no_outputs()
        if model._get("use_gpu"):  # True is meant for the ranks; a transform task may have no GPU
            model.clear(model.use_gpu)
        model._set(store=request.store, precision=request.options.precision)
        return model


def _complete(
    model: TorchModel,
    request: FitRequest,
    spec: TrainSpec,
    data: FitData,
    report: JobReport[TrainResult],
) -> None:
    """Set the trained weights, history and timings on the model."""
    result: TrainResult = report.results[0]
    checkpoints = Checkpoints(request.store, spec.run_dir)
    trained = checkpoints.load_start(checkpoints.path(result.epoch)).result
    module = copy_with(request.program.model, trained.model)
    for parameter in module.parameters():
        parameter.grad = None
    loss = _trained_loss(request, module, trained)
    finish(module, trained, loss if isinstance(loss, list) else [loss])
    fitted = model._require_fitted()
    model._fitted = replace(
        fitted,
        module=in_mode(module, is_training=False),
        loss=loss,
        widths=fitted.widths or result.widths,
        history=result.history,
        timings={
            "materialize": data.seconds,
            "launch": report.launch_s,
            "train": report.run_s,
        },
    )


def _trained_loss(request: FitRequest, module: nn.Module, trained: Checkpoint) -> object:
    """Copy the loss with its trained state, or warn and return None if the copy fails.

    The fit still returns its model.
    """
    model, is_changed = request.program.model, has_losses(trained.changes)
    try:
        return returned_loss(request.losses, model, module, trained.others, is_changed=is_changed)
    except Exception as e:  # noqa: BLE001 - the user's own code
        warnings.warn(
            f"The loss cannot be copied, so getLoss() will return None: {type(e).__name__}: {e}. The model is complete.",
            stacklevel=2,
        )
        return None
