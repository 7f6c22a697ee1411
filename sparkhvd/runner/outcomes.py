"""Outcomes of ranks as data, on their way to the driver.

An `Outcome` travels three ways: as rows of the barrier task, as a file below the run's folder, and, because Spark keeps
only the text of a failure, inside the text of the exception that ends the stage: complete without a run's folder
(`embed`), else as a reference (`refer`). Everything here is pure.
"""

from __future__ import annotations

import base64
import json
import re
import signal
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace

from sparkhvd.errors import PreflightError, RankError, SparkhvdError
from sparkhvd.runner import tracebacks
from sparkhvd.wire import MOST_BYTES, parse, rebuild

# Spark Connect sends rows in Arrow batches of at most 4 MiB.
CHUNK_BYTES = 1 << 20
# Longest traceback or output in the text of an exception; the run's folder and the log have all of it.
_TEXT_LIMIT = 6000
# Limits of an error's text: last lines of a rank's output, lines of Spark's error, other ranks named.
_TAIL_LINES, _SPARK_LINES, _OTHERS = 10, 5, 2


class OutcomeKind:
    """Kind of outcome. `_BLAME` orders the kinds from root cause to consequence."""

    OK = "ok"
    PREFLIGHT = "preflight"  # the rank could not start, and would not at the next attempt
    EXCEPTION = "exception"  # the function raised
    EXIT = "exit"  # the function called sys.exit with a code
    CRASH = "crash"  # the process ended without a report: a signal, or os._exit
    LOST = "lost"  # the Spark task, executor or host is gone
    COLLECTIVE = "collective"  # the function raised because another rank was lost
    CANCELLED = "cancelled"  # the Spark job was cancelled
    SPARK = "spark"  # Spark failed without mention of a rank


_BLAME = (
    OutcomeKind.PREFLIGHT,
    OutcomeKind.EXCEPTION,
    OutcomeKind.EXIT,
    OutcomeKind.CRASH,
    OutcomeKind.LOST,
    OutcomeKind.CANCELLED,
    OutcomeKind.SPARK,
    OutcomeKind.COLLECTIVE,
)


@dataclass(frozen=True)
class Outcome:
    """Outcome of one rank.

    Attributes:
        rank: the rank; None if Spark's text does not name it.
        kind: one of `OutcomeKind`.
        host: its host; "" if unknown.
        attempt: 0 for the first launch, then one more per relaunch.
        exit: "ok", "exception", "exit 3", "signal SIGKILL", "lost", ...
        error: class name of the exception; "" without one.
        message: its message, or another explanation.
        traceback: the Python traceback; "" without one.
        log_tail: the last lines that the rank printed.
        peak_rss_bytes: largest resident memory of the process; 0 if unknown.
        pid: process id of the trainer; 0 if it never started.
        num_threads: threads of the rank.
        started_at: time.time() on its host when the function started; 0.0 if it did not.
        run_s: seconds that the function ran.
        job_id: of the launch, because a later fit with the same run_id may find the file; "" if no task ran.
        warnings: messages for the caller about the ranks; on rank 0 only.
        unsent: numbers, texts, lines and kinds of live output records that the driver may not have shown; see
            `live.frames.Record`.
        num_parts: rows of its result.
    """

    rank: int | None
    kind: str
    host: str = ""
    attempt: int = 0
    exit: str = ""
    error: str = ""
    message: str = ""
    traceback: str = ""
    log_tail: tuple[str, ...] = ()
    peak_rss_bytes: int = 0
    pid: int = 0
    num_threads: int = 0
    started_at: float = 0.0
    run_s: float = 0.0
    job_id: str = ""
    warnings: tuple[str, ...] = ()
    unsent: tuple[tuple[int, str, int, bool], ...] = ()
    num_parts: int = field(default=0, compare=False)  # describes the transfer, not the rank

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Outcome:
        """Rebuild an outcome from `to_json`. Unknown fields of a newer version are ignored.

        Raises:
            ValueError: the text is no outcome.
        """
        return rebuild(cls, parse(text), is_strict=False)


def chunks(data: bytes, size: int = CHUNK_BYTES) -> Iterator[bytes]:
    """Cut bytes into pieces of at most `size`. No bytes give no piece."""
    for start in range(0, len(data), size):
        yield data[start : start + size]


# --- outcomes inside the text of an exception ---------------------------------------------------------------

# Tokens: the job's id, then the whole outcome, or its kind, rank, exit and error if the run's folder has the outcome.
_EMBEDDED = re.compile(r"\[sparkhvd-outcome:([0-9a-f]*):([A-Za-z0-9_=-]+)\]")
_REFERENCE = re.compile(r"\[sparkhvd-outcome:([0-9a-f]*):(\w+):(\d+):([^:\[\]]*):([^:\[\]]*)\]")
_TOKEN = re.compile(r"\[sparkhvd-outcome:[^\]\s]*\]?")


def embed(outcome: Outcome) -> str:
    """Make a token for the text of an exception. `find_embedded` rebuilds the outcome from it.

    Traceback and output are shortened, because Spark Connect shortens long messages.
    """
    last = max((number for number, *_ in outcome.unsent), default=0)
    short = replace(
        outcome,
        message=_middle_cut(outcome.message),
        traceback=_middle_cut(outcome.traceback),
        log_tail=tuple(_tail_lines(outcome.log_tail)),
        unsent=tuple(
            (n, _middle_cut(text) * (n == last), k, m) for n, text, k, m in outcome.unsent
        ),
    )
    packed = base64.urlsafe_b64encode(zlib.compress(short.to_json().encode(), 9)).decode()
    return f"[sparkhvd-outcome:{outcome.job_id}:{packed}]"


def refer(outcome: Outcome) -> str:
    """Make a token for an outcome in the run's folder. `find_referred` finds it."""
    facts = (outcome.kind, outcome.rank, outcome.exit, outcome.error)
    return f"[sparkhvd-outcome:{outcome.job_id}:{':'.join(map(str, facts))}]"


def find_embedded(text: str) -> list[Outcome]:
    """Outcomes in tokens of `embed`, each once, in order of appearance."""
    outcomes = []
    for _, packed in dict.fromkeys(_EMBEDDED.findall(text)):
        try:
            unpacked = zlib.decompressobj().decompress(base64.urlsafe_b64decode(packed), MOST_BYTES)
            outcomes.append(Outcome.from_json(unpacked.decode()))
        except (ValueError, zlib.error):  # a message that Spark has cut
            continue
    return outcomes


def find_referred(text: str) -> list[Outcome]:
    """Outcomes in tokens of `refer`, each once, as far as the text describes them."""
    outcomes: dict[str, Outcome] = {}
    for match in _REFERENCE.finditer(text):
        job_id, kind, rank, exit_, error = match.groups()
        before = text[: match.start()].rpartition("RankError: ")[2].strip()
        message = before.partition(f" raised {error}: ")[2] if error else before
        outcomes.setdefault(
            rank, Outcome(int(rank), kind, exit=exit_, error=error, message=message, job_id=job_id)
        )
    return list(outcomes.values())


def _middle_cut(text: str) -> str:
    if len(text) <= _TEXT_LIMIT:
        return text
    half = _TEXT_LIMIT // 2
    return f"{text[:half]}\n... [{len(text) - 2 * half} characters left out] ...\n{text[-half:]}"


def _tail_lines(lines: Iterable[str]) -> list[str]:
    kept: list[str] = []
    room = _TEXT_LIMIT
    for line in reversed(list(lines)):
        room -= len(line) + 1
        if room < 0:
            break
        kept.insert(0, line)
    return kept


# --- errors of Spark ----------------------------------------------------------------------------------------

_TASK = re.compile(r"barrier task ResultTask\(\d+, (\d+)\)")
_PREFLIGHT = re.compile(r"\[sparkhvd-preflight:([^\]]+)\]")
_MISSING_MODULE = re.compile(r"ModuleNotFoundError: No module named '([^']+)'")
_LOST = (
    "ExecutorLostFailure",
    "Python worker exited unexpectedly",
    "Python worker failed to connect back",
    "Executor heartbeat timed out",
    "Remote RPC client disassociated",
    "FetchFailed",
    "Slave lost",
    "Worker lost",
)
_CANCELLED = ("cancelled part of cancelled job tag", "OPERATION_CANCELED", "cancelled as part of")


def from_spark_failure(text: str, worker_python: str = "a Python") -> Outcome:
    """Derive an outcome from Spark's error text, for a job without a report of a rank."""
    task = _TASK.search(text)
    rank = int(task.group(1)) if task else None
    summary = _summary(text)
    refused = _PREFLIGHT.search(text)
    if refused:
        return Outcome(rank, OutcomeKind.PREFLIGHT, exit="not started", message=refused.group(1))
    missing = _MISSING_MODULE.search(text)
    if missing:
        message = (
            f"The workers run {worker_python}, which has no {missing.group(1)}. Set PYSPARK_PYTHON "
            "(spark.pyspark.python) to a Python that has it before the session starts (on one host: "
            f"PYSPARK_PYTHON={sys.executable}), or install it there."
        )
        return Outcome(rank, OutcomeKind.PREFLIGHT, exit="not started", message=message)
    if "PYTHON_VERSION_MISMATCH" in text:
        message = (
            f"The workers run another Python than the driver: {summary} "
            "Set PYSPARK_PYTHON (spark.pyspark.python) to the same version."
        )
        return Outcome(rank, OutcomeKind.PREFLIGHT, exit="not started", message=message)
    if any(sign in text for sign in _LOST):
        return Outcome(rank, OutcomeKind.LOST, exit="lost", message=summary)
    if any(sign in text for sign in _CANCELLED) or re.search(r"Job \d+ cancelled", text):
        return Outcome(rank, OutcomeKind.CANCELLED, exit="cancelled", message=summary)
    return Outcome(rank, OutcomeKind.SPARK, exit="failed in Spark", message=summary)


_FRAME = re.compile(r"^\s+at [\w$.<>/]+\(.*\)$|^Driver stacktrace:|^\s*\.\.\. \d+ more$")
_PREAMBLE = re.compile(r".*?finished unsuccessfully\.\s*", re.DOTALL)


def _summary(text: str) -> str:
    """Shorten Spark's error: without wrappers, Java frames and Spark's package name."""
    text = _TOKEN.sub("", _PREAMBLE.sub("", text, count=1))
    lines = [line for line in text.splitlines() if line.strip() and not _FRAME.match(line)]
    return _middle_cut("\n".join(lines).replace("org.apache.spark.", ""))


# --- blame --------------------------------------------------------------------------------------------------


def root_cause(outcomes: Iterable[Outcome]) -> Outcome | None:
    """Choose the root cause: an exception before a crash, a crash before a lost peer, or return None if all ranks succeeded.

    Ties prefer a traceback with the user's code, because ranks may raise an error of one rank together, then
    the lowest rank, so that the result does not depend on timing.
    """
    failed = [outcome for outcome in outcomes if outcome.kind != OutcomeKind.OK]

    def key(outcome: Outcome) -> tuple[int, bool, int]:
        rank = outcome.rank if outcome.rank is not None else 1 << 30
        return _BLAME.index(outcome.kind), not tracebacks.shows_user(outcome.traceback), rank

    return min(failed, key=key, default=None)


def is_retryable(cause: Outcome) -> bool:
    """Whether another launch may help: a process, executor or host was lost."""
    return cause.kind in (OutcomeKind.CRASH, OutcomeKind.LOST, OutcomeKind.COLLECTIVE)


def error_of(
    cause: Outcome, size: int, *, others: Sequence[Outcome] = (), spark_text: str = ""
) -> SparkhvdError:
    """Make the driver's exception for a failed job.

    Args:
        cause: the root cause.
        size: number of ranks of the job.
        others: further outcomes; each failed one gets a line.
        spark_text: Spark's error about a lost executor; appended.
    """
    if cause.kind == OutcomeKind.PREFLIGHT:
        return PreflightError(cause.message)
    said = describe(cause, size).splitlines()
    if not cause.traceback and cause.log_tail:
        said += ["Its last lines:", *(f"  {line}" for line in cause.log_tail[-_TAIL_LINES:])]
    rest = _consequences(cause, size, others)
    if (
        spark_text
        and cause.kind in (OutcomeKind.LOST, OutcomeKind.COLLECTIVE)
        and spark_text not in cause.message
    ):
        rest += tracebacks.cut(f"Spark said: {spark_text}".splitlines(), _SPARK_LINES)
    raised = f"{cause.error}: {cause.message}" if cause.message else cause.error
    is_raised = cause.kind in (OutcomeKind.EXCEPTION, OutcomeKind.COLLECTIVE)
    return RankError(
        tracebacks.failure_text(said, cause.traceback, raised, rest),
        rank=cause.rank,
        host=cause.host or None,
        exit=cause.exit,
        error_type=cause.error,
        traceback=cause.traceback,
        log_tail="\n".join(cause.log_tail),
        cause=tracebacks.rebuild(cause.error, cause.message) if is_raised else None,
    )


def _consequences(cause: Outcome, size: int, others: Sequence[Outcome]) -> list[str]:
    """Describe the first other failed ranks in a line each, and count the rest."""
    failed = [o for o in others if o.kind != OutcomeKind.OK and o.rank != cause.rank]
    same = [o for o in failed if (o.error, o.message) == (cause.error, cause.message) != ("", "")]
    failed = [o for o in failed if o not in same]
    lines = [tracebacks.also(describe(other, size)) for other in failed[:_OTHERS]]
    left = len(failed) - len(lines)
    if left:
        lines.append(f"Also: {left} more rank{'s' * (left != 1)} failed.")
    if same:
        lines.append(f"Also: {len(same)} more rank{'s' * (len(same) != 1)} raised the same error.")
    return lines


def describe(outcome: Outcome, size: int) -> str:
    """Describe a failed rank in a sentence or two."""
    where = f" on host {outcome.host}" if outcome.host else ""
    who = f"Rank {outcome.rank} of {size}{where}"
    if outcome.rank is None:
        who = f"A job of {size} ranks"
    if outcome.kind == OutcomeKind.EXCEPTION:
        hint = tracebacks.module_hint(outcome.error, outcome.message)
        return f"{who} raised {outcome.error}: {outcome.message}{hint}"
    if outcome.kind == OutcomeKind.COLLECTIVE:
        return f"{who} stopped because of another rank: {outcome.error}: {outcome.message}"
    if outcome.kind == OutcomeKind.EXIT:
        return f"{who} ended with {outcome.exit}. {outcome.message}".rstrip()
    if outcome.kind == OutcomeKind.CRASH:
        return f"{who} ended with {outcome.exit}{_crash_hint(outcome)}"
    if outcome.kind == OutcomeKind.LOST and outcome.exit == "connection lost":
        return f"{who} was lost with the connection to its host: {outcome.message}"
    if outcome.kind == OutcomeKind.LOST:
        return f"{who} was lost together with its Spark task: {outcome.message}"
    if outcome.kind == OutcomeKind.CANCELLED:
        return f"{who} was cancelled in Spark: {outcome.message}"
    return f"{who} failed in Spark: {outcome.message}"


def _crash_hint(outcome: Outcome) -> str:
    mib = outcome.peak_rss_bytes / 2**20
    peak = f"its peak memory was {mib:.0f} MiB" if mib else "its peak memory is not known"
    if outcome.exit in ("signal SIGTERM", "exit 143"):
        return (
            f" and left no report: it was asked to end, for example by an operator or the cluster manager ({peak}). Look for "
            "the reason in their logs."
        )
    if outcome.exit in ("signal SIGKILL", "exit 137"):
        return (
            f" and left no report: probably memory ({peak}). Run fewer ranks per host, or give "
            "each rank more memory (Spark on YARN or Kubernetes: raise spark.executor.memoryOverhead)."
        )
    return f" and left no report; {peak}."


def exit_text(status: int | None) -> str:
    """Describe an exit status of subprocess. A negative status is a signal, and None is unknown."""
    if status is None:
        return "unknown exit"
    if status >= 0:
        return f"exit {status}"
    try:
        return f"signal {signal.Signals(-status).name}"
    except ValueError:
        return f"signal {-status}"


def all_ok(outcomes: Sequence[Outcome], size: int) -> bool:
    """Whether every rank has reported success."""
    return len(outcomes) == size and all(outcome.kind == OutcomeKind.OK for outcome in outcomes)
