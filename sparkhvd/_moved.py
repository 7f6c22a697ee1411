"""Modules under the names of earlier versions, for saved models, checkpoints and pickles."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

# Former and present name, below `sparkhvd`.
_TABLE = """
connect spark
data.arrow_memory data.arrow_types
data.buffers data.files
data.columns.features data.columns.binding
data.columns.heads data.columns.labels
data.columns.shapes data.columns.schema
data.columns.storage data.columns.schema
data.converter data.dataset
data.findings data.arrow
data.group_numbers data.arrow
data.lightning data.dataset
data.loader data.dataset
data.narrowing data.arrow
data.open_files data.files
data.packed.blocks data.packed.checksums
data.packed.layout data.packed.file
data.packed.reading data.packed.rows
data.packed.requests data.packed.rows
data.packed.spans data.packed.rows
data.parquet.folders data.parquet.dataset
data.parquet.footers data.parquet.manifest
data.parquet.passes data.parquet.source
data.reading.batch data.reading.reader
data.reading.decoding data.reading.reader
data.reading.groups data.reading.subset
data.reading.prefetch data.reading.reader
data.reading.resident data.reading.reader
data.spark_plan data.tables
data.store.checksummed data.store.locks
data.store.cleaning data.store.store
data.store.contents data.store.store
data.store.default data.store.temporary
data.store.leases data.store.locks
data.store.listing data.store.store
data.store.place data.store.store
data.store.processes data.store.locks
data.store.remote_calls data.store.remote
data.store.remote_store data.store.remote
data.store.run_lock data.store.locks
data.store.task_errors data.store.remote
data.store.writer data.store.store
data.vectors data.arrow_types
distributed.checks distributed.launch
distributed.collectives distributed.process_group
distributed.errors distributed.work
distributed.forms distributed.process_group
distributed.futures distributed.work
distributed.group distributed.process_group
distributed.launcher distributed.launch
distributed.messages distributed.process_group
distributed.operands distributed.launch
distributed.reducing distributed.process_group
distributed.reductions distributed.launch
distributed.routed distributed.process_group
distributed.store_meeting distributed.engines
distributed.teams distributed.engines
distributed.works distributed.work
elastic.channel elastic.coordinator
elastic.interrupt elastic.rendezvous
elastic.member elastic.coordinator
elastic.messages elastic.membership
elastic.service elastic.coordinator
engine.call engine.calls
engine.memfd engine.library
engine.session engine.engine
engine.state engine.library
engine.status engine.library
engine.submission engine.engine
estimator.classification estimator.predictors
estimator.fitting.loop estimator.fitting.request
estimator.fitting.specify estimator.fitting.train_spec
estimator.fitting.trial estimator.fitting.request
estimator.onnx estimator.model
estimator.params.cluster estimator.params.groups
estimator.params.compatibility estimator.params.groups
estimator.params.data estimator.params.groups
estimator.params.explain estimator.params.table
estimator.params.fit estimator.params.groups
estimator.params.foreign estimator.params.base
estimator.params.keywords estimator.params.generated
estimator.params.model estimator.params.groups
estimator.params.options estimator.params.generated
estimator.params.prediction estimator.params.groups
estimator.params.training estimator.params.groups
estimator.predictor estimator.predictors
estimator.regression estimator.predictors
estimator.saving.decoding estimator.saving.encoding
estimator.summary estimator.evaluation
estimator.trained estimator.model
estimator.transform.columns estimator.transform.binding
estimator.transform.computation estimator.transform.worker
estimator.transform.gpu estimator.transform.worker
estimator.transform.single estimator.transform.local
keras.batches keras.training
keras.epoch_rows keras.training
keras.following keras.training
keras.loading keras.optimizer
keras.meaning keras.model
keras.params keras.estimator
keras.progress keras.training
knobs settings
launchers.communicator launchers.mpi
launchers.gathering launchers.gather
launchers.handover launchers.bootstrap
launchers.horovod launchers.environment
launchers.lifetime launchers.environment
launchers.meeting launchers.bootstrap
launchers.network launchers.gather
launchers.place launchers.rank_claim
lightning.batches lightning.loop
lightning.bridge lightning.loop
lightning.checkpoints lightning.loop
lightning.devices lightning.strategy
lightning.environment lightning.strategy
lightning.layers lightning.strategy
lightning.optimizers lightning.strategy
lightning.packages lightning.strategy
lightning.params lightning.estimator
lightning.process_group lightning.strategy
observe.loggers.delivery observe.loggers.base
observe.loggers.followers observe.loggers.fanout
observe.loggers.logger observe.loggers.base
observe.report.document observe.report.page
observe.report.load observe.report.page
observe.spans observe.timeline
processors cpus
rank_context topology
rank_settings settings
rendezvous.blame rendezvous.mesh
rendezvous.connections rendezvous.handshake
rendezvous.descriptors rendezvous.listener
rendezvous.dialing rendezvous.mesh
rendezvous.endpoints rendezvous.handshake
rendezvous.installed rendezvous.rendezvous
rendezvous.links rendezvous.mesh
rendezvous.loop rendezvous.event_loop
rendezvous.meeting rendezvous.mesh
rendezvous.memory rendezvous.mesh
rendezvous.reception rendezvous.listener
rendezvous.sockets rendezvous.rendezvous
rendezvous.suspects rendezvous.mesh
runner.admission runner.slots
runner.blas runner.child
runner.config_file runner.command
runner.crew runner.local_processes
runner.elastic.attempt_result runner.elastic.coordinator
runner.elastic.cooldown runner.elastic.slots
runner.elastic.coordination runner.elastic.coordinator
runner.elastic.coordinator_files runner.elastic.coordinator
runner.elastic.coordinators runner.elastic.job
runner.elastic.discovery runner.elastic.options
runner.elastic.ends runner.elastic.coordinator
runner.elastic.entry runner.elastic.coordinator
runner.elastic.host_group runner.elastic.function_hosts
runner.elastic.hosts runner.elastic.processes
runner.elastic.report runner.elastic.launcher
runner.elastic.shared runner.elastic.job
runner.elastic.stage runner.elastic.job
runner.elastic.tasks runner.elastic.coordinator
runner.forwarding runner.host_names
runner.frames runner.protocol
runner.gpu.profiles runner.gpu.decide
runner.guard runner.orphans
runner.head_start runner.prewarm
runner.hosts.channel runner.hosts.protocol
runner.hosts.function runner.hosts.run
runner.hosts.function_members runner.hosts.agent
runner.hosts.members runner.hosts.agent
runner.hosts.order runner.hosts.protocol
runner.hosts.script runner.hosts.run
runner.leftovers runner.orphans
runner.lines runner.output
runner.live.backlog runner.live.sender
runner.live.display runner.live.receiver
runner.live.throttle runner.live.sender
runner.metric_lines runner.loggers
runner.nurseries runner.zygote_client
runner.nursery runner.zygote
runner.payload runner.protocol
runner.pickling runner.protocol
runner.placement runner.slots
runner.planning runner.job
runner.preflight.address_space runner.preflight
runner.preflight.conf runner.preflight
runner.preflight.databricks runner.preflight
runner.preflight.facts runner.preflight
runner.preflight.shared_files runner.preflight
runner.preflight.workers runner.preflight
runner.rank_load runner.loggers
runner.rank_output runner.task
runner.screen runner.supervisor
runner.script_ranks runner.local_processes
runner.scripts runner.script
runner.slot_wait runner.job
runner.spark_log runner.live_output
runner.spawning runner.child
runner.starting runner.trainer
runner.stored runner.outcome_files
runner.trainers runner.local
runner.watch runner.supervisor
runner.watching runner.supervisor
sessions spark
torch.collectives.cuda_adasum torch.collectives.cuda
torch.collectives.cuda_gathers torch.collectives.cuda
torch.collectives.cuda_reductions torch.collectives.cuda
torch.collectives.groups torch.collectives.tensors
torch.collectives.handles torch.collectives.tensors
torch.collectives.reductions torch.collectives.tensors
torch.elastic.agreement torch.elastic.state
torch.elastic.sharded torch.elastic.state
torch.elastic.snapshots torch.elastic.state
torch.elastic.states torch.elastic.state
torch.extensions torch.startup
torch.gradients.agreement torch.gradients.negotiation
torch.gradients.backward_end torch.gradients.reducer
torch.gradients.cuda_memory torch.gradients.cuda
torch.gradients.cuda_sharded torch.gradients.cuda
torch.gradients.cycle torch.gradients.reducer
torch.gradients.entry torch.gradients.dense
torch.gradients.low_rank torch.gradients.powersgd
torch.gradients.ready_order torch.gradients.negotiation
torch.gradients.registered_views torch.gradients.dense
torch.gradients.settlement torch.gradients.negotiation
torch.joining torch.startup
torch.optimizer.cuda_shards torch.optimizer.shards
torch.optimizer.division torch.optimizer.shards
torch.optimizer.parameter_exchange torch.optimizer.sharded
torch.optimizer.shared_parameters torch.optimizer.shards
torch.optimizer.whole_gradients torch.optimizer.sharded
torch.own_gpu torch.startup
torch.untraced torch.arguments
training.checkpoints.cadence training.checkpoints.saver
training.checkpoints.compression_state training.checkpoints.resume
training.checkpoints.fingerprint training.checkpoints.resume
training.checkpoints.module_state training.checkpoints.checkpoint
training.checkpoints.rank_state training.checkpoints.checkpoint
training.class_mean training.loss_functions
training.class_metrics training.metrics
training.compile training.device
training.describe_program training.program
training.hashing training.modules.weights
training.host_rows training.host_memory
training.host_weights training.host_memory
training.metric_states training.metrics
training.modules.attached training.modules.copies
training.modules.output_widths training.modules.fitted
training.others training.loss_state
training.progress training.profile
training.run_timeline training.profile
training.schedulers training.schedule
training.together training.rank_sync
training.user_code.context training.user_code.callbacks
training.user_code.logs training.user_code.callbacks
training.waits training.profile
"""

MOVED: dict[str, str] = {
    f"sparkhvd.{former}": f"sparkhvd.{present}"
    for former, present in (line.split() for line in _TABLE.strip().splitlines())
}


def present_name(dotted: str) -> str:
    """Map the dotted name of a class or function in a saved file to its present module."""
    home, _, name = dotted.rpartition(".")
    return f"{MOVED.get(home, home)}.{name}" if home else name


class _Finder:  # not a subclass of importlib.abc's finder: that module imports `tempfile`
    """Imports the present module under a former name."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in MOVED else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(MOVED[spec.name])
        self._specs[spec.name] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The import system has set `__spec__` to the spec of the former name: restore the module's own.
        assert module.__spec__ is not None
        module.__spec__ = self._specs.pop(module.__spec__.name)

    def __init__(self) -> None:
        self._specs: dict[str, ModuleSpec | None] = {}


def install() -> None:
    """Install the finder of former names, after all other finders."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
