"""Executor's side of a launch: run a rank from a barrier task.

`make_task` builds the function that Spark ships. The task starts its trainer before it exchanges facts with the other
tasks, because `BarrierTaskContext.allGather` takes up to a second (Spark polls once per second; see
`launchers.gather`), in which the trainer can load Python and torch. The trainer gets its job, and so starts the user's
function, only after the checks of all ranks.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from sparkhvd.errors import InternalError, PreflightError, RankError
from sparkhvd.launchers import gather
from sparkhvd.rendezvous import Endpoint, Job, Listener
from sparkhvd.runner import launching, outcome_files, preflight, results
from sparkhvd.runner.driver_port import proof_between
from sparkhvd.runner.gpu import agreement, decide, task
from sparkhvd.runner.interrupts import InterruptWatch
from sparkhvd.runner.launching import line_of
from sparkhvd.runner.live.connection import LiveConnection
from sparkhvd.runner.live.files import ChunkWriter
from sparkhvd.runner.live.frames import PURPOSE
from sparkhvd.runner.live.sender import Carrier, OutputRoute, Sender
from sparkhvd.runner.outcomes import CHUNK_BYTES, Outcome, OutcomeKind, describe, embed, refer
from sparkhvd.runner.preflight import RankFacts, SharedFiles
from sparkhvd.runner.prewarm import share_zygote, task_prologue
from sparkhvd.runner.protocol import bytes_of
from sparkhvd.runner.trainer import Trainer, inherited
from sparkhvd.settings import JobSettings
from sparkhvd.wire import read_json, rebuild

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark import BarrierTaskContext

    from sparkhvd.runner.protocol import Payload


@dataclass(frozen=True)
class TaskSpec:
    """Specification of one attempt, equal for all ranks. Spark's closure carries it as JSON.

    Attributes:
        size: number of ranks.
        attempt: 0 for the first launch.
        job_id: names the attempt; not secret.
        key: the attempt's key in hex; secret.
        settings: `JobSettings.to_json()`.
        env: variables for the ranks.
        driver: the driver's `RankFacts`.
        requirements: modules that the workers' Python must have.
        preload: modules that the trainers import early.
        fixed_threads: threads per rank; None means the task's cores.
        run_dir: folder of outcomes in the shared files; "" without shared files.
        gpu_mode: source of a rank's GPU, of `decide.GpuMode`.
        needs_gpu: whether a rank without a GPU is an error.
        driver_at: host and port of the driver for `InterruptWatch`, or for tasks of an elastic job; None without one.
        is_local: whether all tasks are children of one process.
        timestamps: whether lines of the rank start with the local time.
        live: `OutputRoute.to_dict()` of live output; None without it.
        is_quiet: whether the ranks' lines stay off this task's stderr.
        elastic: `CoordinatorTerms.to_dict()` of an elastic job; None for a barrier stage.
        piece_bytes: most bytes of a row of a result.
    """

    size: int
    attempt: int
    job_id: str
    key: str
    settings: str
    env: dict[str, str]
    driver: dict[str, Any]
    requirements: tuple[str, ...]
    preload: tuple[str, ...]
    fixed_threads: int | None
    run_dir: str
    gpu_mode: str = decide.GpuMode.FREE
    needs_gpu: bool = False
    driver_at: tuple[str, int] | None = None
    is_local: bool = False
    timestamps: bool = False
    live: dict[str, Any] | None = None
    is_quiet: bool = False
    elastic: dict[str, Any] | None = None
    piece_bytes: int = CHUNK_BYTES

    @property
    def tag(self) -> str:
        """Tag of the Spark job."""
        return f"sparkhvd-{self.job_id}"

    def __repr__(self) -> str:
        return f"TaskSpec(job_id={self.job_id!r}, attempt={self.attempt}, size={self.size})"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> TaskSpec:
        """Rebuild a specification from `to_json`. Any other text raises ValueError."""
        return rebuild(cls, read_json(text))


def make_task(
    spec: TaskSpec, program: Payload, shared: bytes, module: str = "sparkhvd.runner.task"
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Make the function for `mapInArrow`.

    It is a closure on plain data, so it pickles by value and starts even where this package is not installed. It holds
    the job's key, so it must stay below the size at which pyspark writes a function to a file. Hence `program` is a
    payload.

    Args:
        spec: what the ranks need.
        program: the pickled call.
        shared: the pickled shared files; empty without them.
        module: its `run_task` is called.
    """
    text = spec.to_json()

    def rank_task(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import importlib
        import sys

        try:
            import sparkhvd._version  # noqa: F401 - raises where it is not installed
        except ModuleNotFoundError as e:
            # The driver finds the sentence between the brackets. The raising line, which a traceback
            # quotes, must not contain it.
            marked = (
                f"[sparkhvd-preflight:The workers run {sys.executable}, which has no module sparkhvd. Install "
                "it there, or set PYSPARK_PYTHON (spark.pyspark.python) to a Python that has it.]"
            )
            raise ModuleNotFoundError(marked) from e
        yield from importlib.import_module(module).run_task(batches, text, program, shared)

    return rank_task


def run_task(
    batches: Iterable[pa.RecordBatch], text: str, program: Payload, shared: bytes
) -> Iterator[pa.RecordBatch]:
    """Run one rank inside a barrier task, and yield its outcome and result as rows.

    Raises:
        RankError: the rank failed; its text embeds the outcome.
    """
    from pyspark import BarrierTaskContext

    for _ in batches:  # Spark discards a Python worker that leaves input unread
        pass
    barrier = BarrierTaskContext.get()
    spec = TaskSpec.from_json(text)
    files = files_of(shared)
    rank = barrier.partitionId()
    if results.is_of_rest(barrier.getLocalProperty("spark.job.tags"), spec.tag):
        raise results.lost(rank, spec.size, spec.attempt, spec.job_id)
    share_zygote()
    outcome, result = _run_rank(barrier, rank, spec, bytes_of(program), files)
    outcome = replace(outcome, job_id=spec.job_id)
    is_stored = outcome_files.write(files, spec.run_dir, outcome)
    if outcome.kind != OutcomeKind.OK:
        cause = outcome_files.await_cause(files, spec.run_dir, spec.size, outcome)
        # If the cause is another rank's outcome, this rank has read it from the files, so they are shared. After a
        # failed check it is unknown who sees the files.
        is_seen = cause.kind != OutcomeKind.PREFLIGHT and (is_stored or cause is not outcome)
        token = refer(cause) if is_seen else embed(cause)
        raise RankError(f"{describe(cause, spec.size)}\n{token}", rank=cause.rank)
    yield from results.rows_of(rank, outcome, result, spec.piece_bytes)


def files_of(shared: bytes) -> SharedFiles | None:
    """Unpickle the shared files of the driver's closure, or return None without them."""
    return pickle.loads(shared) if shared else None  # noqa: S301


def _run_rank(
    barrier: BarrierTaskContext,
    rank: int,
    spec: TaskSpec,
    program: bytes,
    files: SharedFiles | None,
) -> tuple[Outcome, bytes]:
    """Start the rank's trainer, check it with the others and run it, and return its outcome and the bytes of its result."""
    hosts = [host_of(info.address) for info in barrier.getTaskInfos()]
    chosen = JobSettings.from_json(spec.settings)
    with contextlib.ExitStack() as stack:
        output = stack.enter_context(output_of(spec, rank, files))
        started = _start(stack, barrier, rank, spec, program, hosts, output)
        error = started.error
        if files is not None and not error:
            error = preflight.write_token(files, spec.run_dir, spec.attempt, rank, spec.job_id)
        facts = _facts(spec, chosen, started, error, num_ranks_here=hosts.count(hosts[rank]))
        own = {"facts": facts.to_dict(), "endpoint": started.endpoint, "port": started.port}
        try:
            gathered = exchange_facts(barrier, spec, own, chosen.values.start_timeout_s)
            checked = _check(gathered, rank, spec, files)
        except PreflightError as e:
            return _refusal(rank, hosts[rank], spec, str(e)), b""
        for (
            warning
        ) in checked.warnings:  # log them now; the driver receives them when the job has ended
            log(f"sparkhvd: {warning}")
        trainer = started.trainer
        if trainer is None:
            raise InternalError(f"rank {rank} passed the checks without a trainer.")
        job = Job(
            key=bytes.fromhex(spec.key),
            job_id=spec.job_id,
            attempt=spec.attempt,
            rank=rank,
            size=spec.size,
            endpoints=checked.endpoints,
        )
        master = (str(gathered[0]["endpoint"]["address"]), int(gathered[0]["port"]))
        gpu = task.own_gpu(
            checked.gpu_mode, rank, checked.gpus, checked.endpoints, trainer, spec.env
        )
        trainer.send(launching.job_frame(job, chosen, master, gpu))
        trainer.wait()
        outcome = trainer.outcome(host=hosts[rank], attempt=spec.attempt)
        outcome = replace(outcome, warnings=checked.warnings, unsent=output.close())
        return outcome, trainer.result


@dataclass
class _Started:
    """Start of a rank as far as it succeeded: a trainer, its endpoint, and on rank 0 a reserved port."""

    trainer: Trainer | None = None
    endpoint: dict[str, str | int] = field(default_factory=dict)
    port: int = 0
    visible: str | None = None  # CUDA_VISIBLE_DEVICES of the trainer
    error: str = ""


def _start(
    stack: contextlib.ExitStack,
    barrier: BarrierTaskContext,
    rank: int,
    spec: TaskSpec,
    program: bytes,
    hosts: Sequence[str],
    output: RankOutput,
) -> _Started:
    """Start the trainer of a rank, with cleanup on the stack. An exception becomes the start's `error`."""
    started = _Started()
    chosen = JobSettings.from_json(spec.settings)
    try:
        address = launching.own_address(
            hosts[rank], hosts, chosen.values.interfaces, is_local=spec.is_local
        )
        with Listener.bind(address, chosen.values) as listener:
            started.endpoint = listener.endpoint().to_dict()
            prologue = replace(
                task_prologue(
                    barrier, chosen, spec.env, spec.fixed_threads, spec.gpu_mode, spec.preload
                ),
                listener=listener.filenos(),
                endpoint=started.endpoint,
            )
            started.visible = prologue.env.get(
                "CUDA_VISIBLE_DEVICES", inherited("CUDA_VISIBLE_DEVICES")
            )
            started.trainer = stack.enter_context(
                Trainer(
                    rank,
                    prologue,
                    program,
                    output.line,
                    notify=output.message,
                    metrics=output.metrics,
                    progress=output.progress,
                )
            )
        if spec.driver_at is not None:
            watch = InterruptWatch(
                spec.driver_at, spec.key, spec.job_id, spec.attempt, started.trainer
            )
            stack.enter_context(watch)
        if rank == 0:
            started.port = stack.enter_context(launching.reserved_port(address))
    except Exception as e:  # noqa: BLE001 - every rank must reach the exchange, or the others would wait
        started.error = f"{type(e).__name__}: {e}"
    return started


def _facts(
    spec: TaskSpec, chosen: JobSettings, started: _Started, error: str, *, num_ranks_here: int
) -> RankFacts:
    """Facts of this rank, for the checks of all ranks."""
    uuids, gpu_error = ((), "") if started.trainer is None else started.trainer.gpus()
    facts = preflight.rank_facts(
        spec.requirements,
        error,
        needed_bytes=preflight.address_space_needed(
            (*spec.requirements, *spec.preload),
            chosen.values.slots * chosen.values.slot_bytes * num_ranks_here,
        ),
    )
    return replace(facts, gpus=uuids, gpu_error=gpu_error, visible=started.visible)


@dataclass(frozen=True)
class _Checked:
    """Checked ranks, with their endpoints and their agreed GPUs."""

    endpoints: tuple[Endpoint, ...]
    gpus: list[agreement.RankGpus]
    gpu_mode: str
    warnings: tuple[str, ...]


def _check(
    gathered: list[dict[str, Any]], rank: int, spec: TaskSpec, files: SharedFiles | None
) -> _Checked:
    """Check the facts of all ranks.

    Raises:
        PreflightError: the ranks cannot run together.
    """
    ranks = [rebuild(RankFacts, answer["facts"]) for answer in gathered]
    driver = rebuild(RankFacts, spec.driver)
    # Check before the endpoints are read: a failed rank may have none.
    _refuse_if(preflight.check_ranks(driver, ranks))
    endpoints = tuple(rebuild(Endpoint, answer["endpoint"]) for answer in gathered)
    gpus = task.rank_gpus(ranks, endpoints)
    agreed = agreement.agree(spec.gpu_mode, gpus, is_required=spec.needs_gpu)
    _refuse_if(agreed.problem)
    if files is not None:
        names = [facts.host for facts in ranks]
        _refuse_if(
            preflight.check_tokens(files, spec.run_dir, spec.attempt, spec.job_id, names, rank)
        )
    texts = (preflight.patch_warning(driver, ranks), agreed.warning)
    warnings = tuple(text for text in texts if text and rank == 0)
    return _Checked(endpoints, gpus, agreed.mode, warnings)


def _refuse_if(problem: str) -> None:
    if problem:
        raise PreflightError(problem)


def output_of(spec: TaskSpec, rank: int, files: SharedFiles | None) -> RankOutput:
    way = None if spec.live is None else rebuild(OutputRoute, spec.live)
    return RankOutput(
        rank,
        None if way is None else Sender(way, rank, _carrier(way, spec, rank, files)),
        timestamp=spec.timestamps,
        # If stderr is the driver's, a line takes one route only.
        on_stderr="never" if spec.is_quiet else "unsent" if way and way.on_terminal else "always",
    )


def _carrier(way: OutputRoute, spec: TaskSpec, rank: int, files: SharedFiles | None) -> Carrier:
    if way.address is None:
        if files is None:
            raise InternalError("live output has neither an address nor files.")
        return ChunkWriter(files, way.folder, rank)
    proof = proof_between(PURPOSE, spec.key, spec.job_id, spec.attempt, rank + 1, spec.size + 1)
    return LiveConnection(way.address, proof)


def _refusal(rank: int, host: str, spec: TaskSpec, message: str) -> Outcome:
    """Make the outcome of a rank with a failed check before its start."""
    how = "not started"
    return Outcome(
        rank, OutcomeKind.PREFLIGHT, host=host, attempt=spec.attempt, exit=how, message=message
    )


def exchange_facts(
    barrier: BarrierTaskContext, spec: TaskSpec, facts: Mapping[str, object], timeout_s: float
) -> list[dict[str, Any]]:
    """Gather the facts of every rank, by rank. All tasks of the stage must call it."""
    text = json.dumps(facts)
    if spec.is_local:
        name = gather.name_of(spec.key, spec.job_id, spec.attempt)
        point = gather.on_this_host(name)
        texts = gather.gather(point, barrier.partitionId(), spec.size, text, timeout_s)
    else:
        texts = barrier.allGather(text)
    return [read_json(text) for text in texts]


def host_of(address: str) -> str:
    """Host of Spark's "host:port", without the brackets of IPv6."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit():
        host = address
    return host.strip("[]")


# ----------------------------------------------------------------------------------------------------
# Output of a rank in its task: live to the driver, and to the task's stderr.


class RankOutput:
    """Router of a rank's output. A context manager.

    Args:
        rank: the rank.
        sender: sends it to the driver; None without live output.
        timestamp: whether lines on stderr start with the local time.
        on_stderr: whether stderr gets all of it, nothing, or what the sender did not accept.
    """

    def __init__(
        self,
        rank: int,
        sender: Sender | None,
        *,
        timestamp: bool,
        on_stderr: Literal["always", "unsent", "never"],
    ) -> None:
        self._rank = rank
        self._sender = sender
        self._timestamp = timestamp
        self._on_stderr = on_stderr

    def line(self, line: str) -> None:
        """Route a line of the trainer."""
        self._echo(line, is_sent=self._sender is not None and self._sender.line(line))

    def message(self, text: str) -> None:
        """Route a message for the driver."""
        self._echo(text, is_sent=self._sender is not None and self._sender.message(text))

    def metrics(self, entry: str) -> None:
        """Route an entry of `log_metrics`."""
        is_sent = self._sender is not None and self._sender.metrics(entry)
        self._echo(f"[{self._rank}] metrics {entry}", is_sent=is_sent)

    def progress(self, text: str) -> None:
        """Route a line about the training's progress. It is not written to stderr."""
        if self._sender is not None:
            self._sender.progress(text)

    def _echo(self, text: str, *, is_sent: bool) -> None:
        if self._on_stderr == "always" or (self._on_stderr == "unsent" and not is_sent):
            for line in text.split("\n"):
                log(line, timestamp=self._timestamp)

    def close(self) -> tuple[tuple[int, str, int, bool], ...]:
        """Send the last lines to the driver and return the unacknowledged records."""
        return () if self._sender is None else tuple(self._sender.close())

    def __enter__(self) -> RankOutput:
        if self._sender is not None:
            self._sender.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        if self._sender is not None:
            self._sender.__exit__()


def log(line: str, *, timestamp: bool = False) -> None:
    """Write a line to the task's stderr."""
    sys.stderr.write(line_of(line, timestamp=timestamp))
    sys.stderr.flush()
