"""Executor's side of a launch: from a barrier task to a running rank and back.

`make_task` builds the function that Spark ships. The task starts its trainer before it meets the other tasks, because
`BarrierTaskContext.allGather` takes up to a second (Spark polls its answer once per second; see `launchers.gathering`), in which the
trainer's Python and torch can load. The trainer gets its job, and thereby starts the user's function, only
after the checks on all ranks.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from sparkhvd.arrow_buffers import binary_array, int32_array
from sparkhvd.errors import InternalError, PreflightError, RankError
from sparkhvd.launchers import gathering
from sparkhvd.rank_settings import JobSettings
from sparkhvd.rendezvous import Endpoint, Job, Listener
from sparkhvd.runner import launching, preflight, stored
from sparkhvd.runner.driver_port import proof_between
from sparkhvd.runner.gpu import agreement, decide, task
from sparkhvd.runner.head_start import share_nursery, task_prologue
from sparkhvd.runner.interrupts import InterruptWatch
from sparkhvd.runner.live.connection import Connection
from sparkhvd.runner.live.files import ChunkWriter
from sparkhvd.runner.live.frames import PURPOSE
from sparkhvd.runner.live.sender import Carrier, Sender, Way
from sparkhvd.runner.outcomes import Kind, Outcome, chunks, describe, embed, refer
from sparkhvd.runner.payload import bytes_of
from sparkhvd.runner.preflight import RankFacts, SharedFiles
from sparkhvd.runner.trainer import Trainer, inherited

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark import BarrierTaskContext

    from sparkhvd.runner.payload import Payload

__all__ = ["OUTCOME_PART", "ROW_SCHEMA", "TaskSpec", "make_task", "run_task"]

ROW_SCHEMA = "rank int, part int, data binary"
# The row with this part number holds the outcome; parts 0, 1, ... are the result.
OUTCOME_PART = -1


@dataclass(frozen=True)
class TaskSpec:
    """Specification of one attempt, the same for all ranks; crosses as JSON inside Spark's closure.

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
        run_dir: folder of outcomes in the shared files; "" for none.
        gpu_mode: source of a rank's GPU, of `decide.Mode`.
        needs_gpu: whether a rank without a GPU is an error.
        driver_at: host and port of the driver for `InterruptWatch`; None where there is none.
        is_local: whether all tasks are children of one process.
        timestamps: whether lines of the rank begin with the local time.
        live: `Way.to_dict()` of live output; None for none.
        is_quiet: whether the ranks' lines stay off this task's stderr.
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
    gpu_mode: str = decide.Mode.FREE
    needs_gpu: bool = False
    driver_at: tuple[str, int] | None = None
    is_local: bool = False
    timestamps: bool = False
    live: dict[str, Any] | None = None
    is_quiet: bool = False

    def __repr__(self) -> str:
        return f"TaskSpec(job_id={self.job_id!r}, attempt={self.attempt}, size={self.size})"

    def to_json(self) -> str:
        """Return JSON from which `from_json` rebuilds this."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> TaskSpec:
        """Rebuild a specification from `to_json`."""
        data = json.loads(text)
        for name in ("requirements", "preload", "driver_at"):
            data[name] = None if data[name] is None else tuple(data[name])
        return cls(**data)


def make_task(
    spec: TaskSpec, program: Payload, shared: bytes
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return the function for `mapInArrow`.

    It is a closure on plain data, so it pickles by value and starts even where this package is not installed. It holds
    the job's key, so it must stay below the size at which pyspark writes a function to a file: `program` is a payload.
    """
    text = spec.to_json()

    def barrier_task(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import sys

        try:
            import sparkhvd._version  # noqa: F401 - raises where it is not installed
        except ModuleNotFoundError as e:
            # The driver finds the sentence between the brackets; the raising line itself, which a traceback
            # quotes, must not contain it.
            marked = (
                f"[sparkhvd-preflight:The workers run {sys.executable}, which has no module sparkhvd. Install "
                "it there, or set PYSPARK_PYTHON (spark.pyspark.python) to a Python that has it.]"
            )
            raise ModuleNotFoundError(marked) from e
        from sparkhvd.runner.task import run_task

        yield from run_task(batches, text, program, shared)

    return barrier_task


def run_task(
    batches: Iterable[pa.RecordBatch], text: str, program: Payload, shared: bytes
) -> Iterator[pa.RecordBatch]:
    """Run one rank inside a barrier task; yield its outcome and result as rows.

    Raises:
        RankError: the rank failed; its text embeds the outcome.
    """
    import pyarrow as pa
    from pyspark import BarrierTaskContext

    for _ in batches:  # a task that leaves input unread costs Spark the Python worker
        pass
    barrier = BarrierTaskContext.get()
    spec = TaskSpec.from_json(text)
    files: SharedFiles | None = pickle.loads(shared) if shared else None  # noqa: S301 - the driver's closure
    rank = barrier.partitionId()
    share_nursery()
    outcome, result = _run_rank(barrier, rank, spec, bytes_of(program), files)
    outcome = replace(outcome, job_id=spec.job_id)
    is_stored = stored.write(files, spec.run_dir, outcome)
    if outcome.kind != Kind.OK:
        cause = stored.await_cause(files, spec.run_dir, spec.size, outcome)
        # Another rank's outcome was read from the files; after a failed check nobody knows who sees them.
        is_seen = cause.kind != Kind.PREFLIGHT and (is_stored or cause is not outcome)
        token = refer(cause) if is_seen else embed(cause)
        raise RankError(f"{describe(cause, spec.size)}\n{token}", rank=cause.rank)
    parts = [(OUTCOME_PART, outcome.to_json().encode()), *enumerate(chunks(result))]
    for part, data in parts:
        columns = [int32_array(rank), int32_array(part), binary_array(data)]
        yield pa.RecordBatch.from_arrays(columns, names=["rank", "part", "data"])


def _run_rank(
    barrier: BarrierTaskContext,
    rank: int,
    spec: TaskSpec,
    program: bytes,
    files: SharedFiles | None,
) -> tuple[Outcome, bytes]:
    infos = barrier.getTaskInfos()
    host = host_of(infos[rank].address)
    chosen = JobSettings.from_json(spec.settings)
    settings = chosen.values
    with contextlib.ExitStack() as stack:
        output = stack.enter_context(_Output(spec, rank, files))
        trainer: Trainer | None = None
        visible: str | None = None
        error = ""
        port = 0
        endpoint: dict[str, str | int] = {}
        try:
            hosts = [host_of(info.address) for info in infos]
            address = launching.own_address(
                host, hosts, settings.interfaces, is_local=spec.is_local
            )
            with Listener.bind(address, settings) as listener:
                endpoint = listener.endpoint().to_dict()
                prologue = replace(
                    task_prologue(
                        barrier, chosen, spec.env, spec.fixed_threads, spec.gpu_mode, spec.preload
                    ),
                    listener=listener.filenos(),
                    endpoint=endpoint,
                )
                visible = prologue.env.get(
                    "CUDA_VISIBLE_DEVICES", inherited("CUDA_VISIBLE_DEVICES")
                )
                trainer = stack.enter_context(
                    Trainer(
                        rank,
                        prologue,
                        program,
                        output.line,
                        tell=output.message,
                        progress=output.progress,
                    )
                )
            if spec.driver_at is not None:
                watch = InterruptWatch(spec.driver_at, spec.key, spec.job_id, spec.attempt, trainer)
                stack.enter_context(watch)
            if rank == 0:
                port = stack.enter_context(launching.reserved_port(address))
        except Exception as e:  # noqa: BLE001 - every rank must reach the gathering, or the others would wait there
            error = f"{type(e).__name__}: {e}"
        if files is not None and not error:
            error = preflight.write_token(files, spec.run_dir, spec.attempt, rank, spec.job_id)
        same_host = [host_of(info.address) for info in infos].count(host)
        uuids, gpu_error = ((), "") if trainer is None else trainer.gpus()
        facts = preflight.rank_facts(
            spec.requirements,
            error,
            needed_bytes=preflight.address_space_needed(
                (*spec.requirements, *spec.preload),
                settings.slots * settings.slot_bytes * same_host,
            ),
        )
        facts = replace(facts, gpus=uuids, gpu_error=gpu_error, visible=visible)
        own = {"facts": facts.to_dict(), "endpoint": endpoint, "port": port}
        try:
            gathered = exchange_facts(barrier, spec, own, settings.start_timeout_s)
        except PreflightError as e:
            return _refusal(rank, host, spec, str(e)), b""
        ranks = [RankFacts.from_dict(answer["facts"]) for answer in gathered]
        driver = RankFacts.from_dict(spec.driver)
        endpoints: list[Endpoint] = []
        gpus: list[agreement.RankGpus] = []
        agreed = agreement.Agreement(spec.gpu_mode)
        problem = preflight.check_ranks(driver, ranks)
        if not problem:  # else one of them may have no endpoint
            endpoints = [Endpoint.from_dict(answer["endpoint"]) for answer in gathered]
            gpus = task.rank_gpus(ranks, endpoints)
            agreed = agreement.agree(spec.gpu_mode, gpus, is_required=spec.needs_gpu)
            problem = agreed.problem
        if not problem and files is not None:
            hosts = [facts.host for facts in ranks]
            problem = preflight.check_tokens(
                files, spec.run_dir, spec.attempt, spec.job_id, hosts, rank
            )
        if problem:
            return _refusal(rank, host, spec, problem), b""
        texts = (preflight.patch_warning(driver, ranks), agreed.warning)
        warnings = tuple(text for text in texts if text and rank == 0)
        for warning in warnings:  # at once; the driver receives it when the job has ended
            _log(f"sparkhvd: {warning}")
        if trainer is None:
            raise InternalError(f"rank {rank} passed the checks without a trainer.")
        job = Job(
            key=bytes.fromhex(spec.key),
            job_id=spec.job_id,
            attempt=spec.attempt,
            rank=rank,
            size=spec.size,
            endpoints=tuple(endpoints),
        )
        master = (str(gathered[0]["endpoint"]["address"]), int(gathered[0]["port"]))
        gpu = task.own_gpu(agreed.mode, rank, gpus, endpoints, trainer, spec.env)
        trainer.send(launching.job_frame(job, chosen, master, gpu))
        trainer.wait()
        outcome = trainer.outcome(host=host, attempt=spec.attempt)
        return replace(outcome, warnings=warnings, unsent=output.close()), trainer.result


class _Output:
    """Output of a rank: to the driver while it runs, and to this task's stderr; a context manager."""

    def __init__(self, spec: TaskSpec, rank: int, files: SharedFiles | None) -> None:
        self._timestamp = spec.timestamps
        way = None if spec.live is None else Way.from_dict(spec.live)
        # Where stderr is the driver's, a line goes one way only.
        self._is_doubled = way is None or not way.on_terminal
        self._is_quiet = spec.is_quiet
        self._sender: Sender | None = None
        if way is not None:
            self._sender = Sender(way, rank, _carrier(way, spec, rank, files))

    def line(self, line: str) -> None:
        """Pass a line of the trainer on."""
        self._echo(line, is_sent=self._sender is not None and self._sender.line(line))

    def message(self, text: str) -> None:
        """Pass a message for the driver on."""
        self._echo(text, is_sent=self._sender is not None and self._sender.message(text))

    def progress(self, text: str) -> None:
        """Pass a line on the progress of the training on; the log has none of it."""
        if self._sender is not None:
            self._sender.progress(text)

    def _echo(self, text: str, *, is_sent: bool) -> None:
        if not self._is_quiet and (self._is_doubled or not is_sent):
            for line in text.split("\n"):
                _log(line, timestamp=self._timestamp)

    def close(self) -> tuple[tuple[int, str, int], ...]:
        """Let the driver have the last lines; return those that it may not have got."""
        return () if self._sender is None else tuple(self._sender.close())

    def __enter__(self) -> _Output:
        if self._sender is not None:
            self._sender.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        if self._sender is not None:
            self._sender.__exit__()


def _carrier(way: Way, spec: TaskSpec, rank: int, files: SharedFiles | None) -> Carrier:
    if way.address is None:
        if files is None:
            raise InternalError("live output has neither an address nor files.")
        return ChunkWriter(files, way.folder, rank)
    proof = proof_between(PURPOSE, spec.key, spec.job_id, spec.attempt, rank + 1, spec.size + 1)
    return Connection(way.address, proof)


def _refusal(rank: int, host: str, spec: TaskSpec, message: str) -> Outcome:
    """Return the outcome of a rank that a check keeps from starting."""
    how = "not started"
    return Outcome(rank, Kind.PREFLIGHT, host=host, attempt=spec.attempt, exit=how, message=message)


def exchange_facts(
    barrier: BarrierTaskContext, spec: TaskSpec, facts: Mapping[str, object], timeout_s: float
) -> list[dict[str, Any]]:
    """Gather the facts of every rank, by rank. All tasks of the stage must call it."""
    text = json.dumps(facts)
    if spec.is_local:
        name = gathering.name_of(spec.key, spec.job_id, spec.attempt)
        point = gathering.on_this_host(name)
        texts = gathering.gather(point, barrier.partitionId(), spec.size, text, timeout_s)
    else:
        texts = barrier.allGather(text)
    return [json.loads(text) for text in texts]


def host_of(address: str) -> str:
    """Return the host of Spark's "host:port"; IPv6 hosts come with or without brackets."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit():
        host = address
    return host.strip("[]")


def _log(line: str, *, timestamp: bool = False) -> None:
    sys.stderr.write(launching.line_of(line, timestamp=timestamp))
    sys.stderr.flush()
