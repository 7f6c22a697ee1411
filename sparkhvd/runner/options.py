"""Options and result of a launch under Spark."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TextIO, TypeVar

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.runner.live.files import Mailbox
from sparkhvd.runner.outcomes import Outcome
from sparkhvd.runner.preflight import SharedFiles
from sparkhvd.settings import JobSettings, Settings, check_seconds

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile


R = TypeVar("R")


@dataclass(frozen=True)
class RankChange:
    """Change of the ranks of an elastic job. Its text is a line for the user.

    Attributes:
        generation: counted from 1 within a launch.
        before: previous number of ranks; 0 at the start.
        after: new number of ranks.
        seconds: until the ranks had connected.
        why: lost and joined processes with reasons; at the start the initial ones.
        at: time of the notification, by the clock of the coordinator's host.
    """

    generation: int
    before: int
    after: int
    seconds: float
    why: str
    at: float = 0.0

    def __str__(self) -> str:
        ranks = "rank" if self.after == 1 else "ranks"
        arrow = f"{self.before} -> " if self.before else ""
        return f"{arrow}{self.after} {ranks} in {self.seconds:.2f} s: {self.why}"


@dataclass(frozen=True)
class LaunchOptions:
    """Options of a launch.

    Attributes:
        env: environment variables of the ranks.
        settings: engine settings given in code; None means those of the Spark conf and of the environment;
            `JobSettings` are final.
        start_timeout_s: longest wait for enough task slots; None means the setting.
        max_retries: relaunches after a lost process, executor or host.
        verbose: 0 prints nothing on the driver; 1 prints the ranks' output, waits and relaunches; 2 also keeps Spark's
            own log of a failed rank.
        threads_per_rank: threads of a rank; None means the task's cores, on `local[N]` N // num_proc.
        shared: files that the driver and every rank reach. The launch checks that they are shared, and writes outcomes
            there.
        run_dir: folder of this run in `shared`; required with it.
        progress: returns the progress of the job, for example the newest checkpoint's number. Two consecutive losses
            with an equal value are final.
        requirements: modules that the workers' Python must have, for example ("torch", "pyarrow").
        use_gpu: whether every rank gets a GPU of its own; None: if Spark gives tasks GPUs. See `gpu.decide`.
        profile: Spark resource profile of the stage; None: one that requests a GPU per rank where necessary.
        is_alone: whether ranks choose GPUs by local rank themselves, so that two such launches at once would share
            them.
        timestamps: whether lines of ranks start with the local time.
        stream: receives the ranks' output.
        metrics: called from a thread with the rank and each entry of `log_metrics`, as JSON; None shows it as a line.
        show_progress: called from a thread with each line about the training's progress.
        relaunched: called with the cause before ranks are launched again.
        ranks_changed: called with each change of the ranks of an elastic job, at the end of a launch.
        mailbox: how this process reads and deletes files of `shared`, for live output where executors cannot reach it.
    """

    env: Mapping[str, str] = field(default_factory=dict)
    settings: Settings | JobSettings | None = None
    start_timeout_s: float | None = None
    max_retries: int = 2
    verbose: int = 1
    threads_per_rank: int | None = None
    shared: SharedFiles | None = None
    run_dir: str | None = None
    progress: Callable[[], object] | None = None
    requirements: tuple[str, ...] = ()
    use_gpu: bool | None = None
    profile: ResourceProfile | None = None
    is_alone: bool = False
    timestamps: bool = False
    stream: TextIO | None = None
    mailbox: Mailbox | None = None
    metrics: Callable[[int, str], None] | None = None
    show_progress: Callable[[str], None] = lambda _: None
    relaunched: Callable[[str], None] = lambda _: None
    ranks_changed: Callable[[RankChange], None] = lambda _: None

    def __post_init__(self) -> None:
        retries = self.max_retries
        if isinstance(retries, bool) or not isinstance(retries, int) or retries < 0:
            raise InvalidArgumentError(
                f"max_retries is {retries!r}; it must be a whole number, 0 or more."
            )
        if self.start_timeout_s is not None:
            check_seconds("start_timeout", self.start_timeout_s, 600)
        if self.threads_per_rank is not None and self.threads_per_rank < 1:
            raise InvalidArgumentError(
                f"threads_per_rank is {self.threads_per_rank!r}; it must be at least 1."
            )
        if (self.shared is None) != (self.run_dir is None):
            raise InvalidArgumentError("shared and run_dir belong together; give both or neither.")


@dataclass(frozen=True)
class JobReport(Generic[R]):
    """Result of a launch.

    Attributes:
        results: results of the function, by rank.
        attempts: launches that were needed; 1 if nothing was lost.
        launch_s: seconds from the submission of the last attempt until every rank ran the function (by the clocks of
            the hosts).
        run_s: seconds that the slowest rank ran the function.
        outcomes: outcomes of the last attempt, by rank.
    """

    results: list[R]
    attempts: int
    launch_s: float
    run_s: float
    outcomes: tuple[Outcome, ...]
