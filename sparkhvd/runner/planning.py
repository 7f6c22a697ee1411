"""What the driver decides before a launch under Spark, and what its attempts share."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from sparkhvd import processors
from sparkhvd.errors import InvalidArgumentError, RankError, SparkhvdError
from sparkhvd.rank_settings import JobSettings
from sparkhvd.runner import launching, placement, preflight, task
from sparkhvd.runner.gpu import decide
from sparkhvd.runner.gpu.profiles import check_profile, default_slots, plan_gpus, slots_of
from sparkhvd.runner.live_output import Attempt, LiveOutput
from sparkhvd.runner.options import LaunchOptions
from sparkhvd.runner.pickling import dumps
from sparkhvd.runner.results import LIMIT_KEY, Pieces, pieces_for
from sparkhvd.settings import Settings, conf_keys
from sparkhvd.spark import SparkShim

__all__ = [
    "SHOWS_SPARKS_LOG",
    "Plan",
    "check_size",
    "make_plan",
    "no_progress",
    "print_line",
]

# From this `verbose` on Spark's own log of a failure is shown, too.
SHOWS_SPARKS_LOG = 2


@dataclass(frozen=True)
class Plan:
    """Launch that has been checked; the same for all its attempts.

    Attributes:
        shim: session.
        program: the pickled call.
        size: number of ranks, of an elastic job the most.
        options: of the launch.
        settings: of the launch.
        gpus: decision on the ranks' GPUs.
        fixed_threads: threads per rank; None means the task's cores.
        configured_slots: the most that the configuration can reach; None if that is unknown.
        shared: the pickled shared files; empty for none.
        is_local: whether all tasks are children of one process.
        is_dynamic: whether executors come and go by themselves.
        pieces: pieces in which results travel.
    """

    shim: SparkShim
    program: bytes = field(repr=False)
    size: int
    options: LaunchOptions
    settings: JobSettings
    gpus: decide.GpuPlan
    fixed_threads: int | None
    configured_slots: int | None
    shared: bytes = field(repr=False)
    is_local: bool
    is_dynamic: bool
    pieces: Pieces = Pieces()

    @property
    def is_terminal(self) -> bool:
        """Whether the tasks' stderr is this process's."""
        return self.is_local and self.shim.is_served_here()

    def slots(self) -> int | None:
        """Return the slots of the registered executors, on Spark Connect the configured ones."""
        registered = self.shim.registered_slots(self.options.profile)
        return self.configured_slots if registered is None else registered

    def spec(
        self, size: int, attempt: Attempt, driver_at: tuple[str, int] | None, live: LiveOutput
    ) -> task.TaskSpec:
        """Return what the tasks of an attempt get.

        Args:
            size: numbers that ranks may have there.
            attempt: its number and key.
            driver_at: a port of the driver; None for none.
            live: its output.
        """
        options = self.options
        return task.TaskSpec(
            size=size,
            attempt=attempt.number,
            job_id=attempt.job_id,
            key=attempt.key,
            settings=self.settings.to_json(),
            env=dict(options.env),
            driver=preflight.rank_facts(()).to_dict(),
            requirements=options.requirements,
            preload=tuple(launching.preload(self.program, options.requirements)),
            fixed_threads=self.fixed_threads,
            run_dir=options.run_dir or "",
            gpu_mode=self.gpus.mode,
            needs_gpu=self.gpus.is_required,
            driver_at=driver_at,
            is_local=self.is_local,
            timestamps=options.timestamps,
            live=None if live.way is None else live.way.to_dict(),
            is_quiet=self.is_terminal and options.verbose <= 0,
            piece_bytes=self.pieces.num_bytes,
        )

    def live_output(self, attempt: Attempt) -> LiveOutput:
        """Return the output of an attempt's ranks."""
        choice = self.settings.values.live_output
        return LiveOutput(self.shim, self.options, choice, attempt, on_terminal=self.is_terminal)


def make_plan(
    shim: SparkShim,
    num_proc: int | None,
    options: LaunchOptions,
    program: bytes,
    *,
    is_barrier: bool = True,
) -> Plan:
    """Decide on everything that all attempts of a launch share; see `launch` for the errors.

    Args:
        shim: session.
        num_proc: number of ranks; None for every slot.
        options: of the launch.
        program: the pickled call.
        is_barrier: whether all ranks start together; else there may be fewer slots than ranks.
    """
    env = launching.check_env(options.env)
    conf = shim.conf((*placement.CONF_KEYS, *preflight.CONF_KEYS, LIMIT_KEY))
    settings = _settings(shim, options.settings, env, conf.get("spark.master", ""))
    preflight.check_conf(conf, is_barrier=is_barrier)
    preflight.check_databricks(shim.is_connect)
    check_profile(options.profile, conf)
    gpu_plan, profile = plan_gpus(shim, conf, options.use_gpu, options.profile)
    slots = slots_of(conf, gpu_plan, options.profile)
    if num_proc is None and gpu_plan.mode == decide.Mode.HOST:
        slots = default_slots(shim, conf, slots, settings.values.cuda_library, env)
    waits_for_slots = num_proc is not None and not is_barrier
    size = placement.choose_num_proc(
        num_proc, placement.Slots(None, "", "") if waits_for_slots else slots
    )
    return Plan(
        shim=shim,
        program=program,
        size=size,
        options=replace(options, env=env, profile=profile),
        settings=settings,
        gpus=gpu_plan,
        fixed_threads=_fixed_threads(options, conf, size),
        configured_slots=slots.maximum,
        shared=b"" if options.shared is None else dumps(options.shared),
        is_local=placement.is_local(conf.get("spark.master", "")),
        is_dynamic=preflight.is_dynamic(conf),
        # What matters of a launch with files is in these; keeping its rows would cost it 30 ms.
        pieces=pieces_for(conf, size) if options.shared is None else Pieces(),
    )


def check_size(program: bytes, shim: SparkShim) -> None:
    """Refuse a call that is too large for the session.

    Raises:
        InvalidArgumentError: it is.
    """
    if shim.closure_limit is not None and len(program) > shim.closure_limit:
        raise InvalidArgumentError(
            f"fn and its arguments are {len(program) / 2**20:.0f} MiB when pickled; Spark Connect takes "
            f"{shim.closure_limit / 2**20:.0f} MiB. Put large data in a file or table and load it inside fn."
        )


def _settings(
    shim: SparkShim, given: Settings | JobSettings | None, env: Mapping[str, str], master: str
) -> JobSettings:
    if isinstance(given, JobSettings):
        chosen = given
    else:
        conf = shim.conf(conf_keys()) if given is None else {}
        chosen = launching.choose_settings(given, env, conf)
    if chosen.values.nursery == "auto" and master.startswith(("yarn", "k8s")):
        # Its memory would count against the container, and nobody has tried how they end it.
        chosen = replace(chosen, values=replace(chosen.values, nursery="0"))
    return chosen


def _fixed_threads(options: LaunchOptions, conf: Mapping[str, str], size: int) -> int | None:
    """Return the threads per rank: the user's number, or on `local[N]` an equal share; None leaves it to the task."""
    if options.threads_per_rank is not None:
        return options.threads_per_rank
    threads = placement.local_slots(conf.get("spark.master", ""), processors.whole())
    return None if threads is None else max(1, threads // size)


def print_line(verbose: int, text: str) -> None:
    """Print a line on the driver, unless `verbose` is 0."""
    if verbose > 0:
        launching.erase_line(sys.stderr)
        sys.stderr.write(f"sparkhvd: {text}\n")
        sys.stderr.flush()


def no_progress(error: SparkhvdError, losses: int, progress: object) -> SparkhvdError:
    """Return the error of a job whose ranks were lost twice at the same progress."""
    text = f"{error}\nNot relaunched: {losses} losses without progress in between (still at {progress})."
    if not isinstance(error, RankError):
        return error
    return RankError(text, **vars(error), cause=error.__cause__)
