"""Outcomes as data: their text form, and the rank to blame."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from sparkhvd.errors import PreflightError, RankError
from sparkhvd.runner.outcomes import (
    Outcome,
    OutcomeKind,
    chunks,
    describe,
    embed,
    error_of,
    exit_text,
    find_embedded,
    find_referred,
    from_spark_failure,
    is_retryable,
    refer,
    root_cause,
)

pytestmark = pytest.mark.pure

RAISED = Outcome(
    1,
    OutcomeKind.EXCEPTION,
    host="h1",
    exit="exception",
    error="ValueError",
    message="bad",
    traceback='Traceback\n  File "x"\nValueError: bad\n',
    log_tail=("one", "two"),
)
KILLED = Outcome(2, OutcomeKind.CRASH, host="h2", exit="signal SIGKILL", peak_rss_bytes=300 << 20)
PEER = Outcome(
    0, OutcomeKind.COLLECTIVE, host="h0", exit="exception", error="PeerLostError", message="rank 2"
)
FINE = Outcome(3, OutcomeKind.OK, exit="ok")


def test_outcome_survives_json() -> None:
    assert Outcome.from_json(RAISED.to_json()) == RAISED


def test_outcome_of_another_version_is_read() -> None:
    text = json.dumps(
        {"rank": 3, "kind": "ok", "exit": "ok", "wall_s": 2.5, "of_a_later_version": 1}
    )
    assert Outcome.from_json(text) == FINE


def test_outcome_is_found_in_the_text_of_a_java_exception() -> None:
    text = f"PythonException: RankError: Rank 1\n{embed(RAISED)}\n\tat org.x(Y.scala:1)\n{embed(RAISED)}"
    assert find_embedded(text) == [RAISED]


def test_embedded_outcome_shortens_long_texts_in_the_middle() -> None:
    long = Outcome(0, OutcomeKind.EXCEPTION, message="m", traceback="first" + "x" * 50_000 + "last")
    noisy = Outcome(
        0, OutcomeKind.CRASH, log_tail=tuple(f"line {i} {'y' * 500}" for i in range(100))
    )
    found = find_embedded(embed(long))[0]
    assert found.traceback.startswith("first")
    assert found.traceback.endswith("last")
    assert len(found.traceback) < 7000
    assert find_embedded(embed(noisy))[0].log_tail[-1].startswith("line 99")


def test_stored_outcome_is_found_by_a_reference_in_error_text() -> None:
    raised = replace(RAISED, job_id="ab12")
    killed = replace(KILLED, job_id="ab12")
    text = "".join(
        f"PythonException: x.RankError: {describe(o, 4)}\n{refer(o)}\n\tat org.x(Y.scala:1)\n"
        for o in (raised, killed, raised)
    )
    assert "eNq" not in text
    assert find_embedded(text) == []
    first, second = find_referred(text)
    assert first == Outcome(
        1, OutcomeKind.EXCEPTION, exit="exception", error="ValueError", message="bad", job_id="ab12"
    )
    assert (second.rank, second.kind, second.exit) == (2, OutcomeKind.CRASH, "signal SIGKILL")
    assert is_retryable(second)
    assert find_referred(embed(raised)) == []


def test_shown_messages_omit_outcome_tokens() -> None:
    for token in (embed(RAISED), refer(RAISED), embed(RAISED)[:-9]):
        assert "outcome" not in from_spark_failure(f"odd {token}\n\tat x.y(Z.scala:3)").message


def test_truncated_or_foreign_outcome_token_is_ignored() -> None:
    assert find_embedded("[sparkhvd-outcome:AAAA] " + embed(RAISED)[:-9] + "]") == []


@pytest.mark.parametrize(
    ("outcomes", "cause"),
    [
        ([FINE], None),
        ([PEER, KILLED, RAISED, FINE], RAISED),
        ([PEER, KILLED], KILLED),
        ([PEER, Outcome(None, OutcomeKind.LOST)], Outcome(None, OutcomeKind.LOST)),
        ([PEER], PEER),
    ],
)
def test_root_cause_is_an_original_failure_and_not_a_consequence(
    outcomes: list[Outcome], cause: Outcome | None
) -> None:
    assert root_cause(outcomes) == cause


def test_root_cause_among_equal_errors_is_the_lowest_rank() -> None:
    other = Outcome(0, OutcomeKind.EXCEPTION, error="KeyError")
    assert root_cause([RAISED, other]) == other


def test_root_cause_of_equal_errors_is_the_rank_with_user_code() -> None:
    text = 'Traceback (most recent call last):\n  File "/home/me/train.py", line 7, in loss\n    raise ValueError("no")\n'
    echo = Outcome(0, OutcomeKind.EXCEPTION, error="ValueError", message="rank 1: no")
    raised = replace(echo, rank=1, traceback=f"{text}ValueError: rank 1: no\n")
    assert root_cause([echo, raised]) == raised
    lines = str(error_of(raised, 3, others=[echo, raised, replace(echo, rank=2)])).splitlines()
    assert lines[0] == '/home/me/train.py:7: raise ValueError("no")'
    assert lines[-3] == "Also: 2 more ranks raised the same error."
    assert lines[-1] == "ValueError: rank 1: no"


def test_only_losses_are_relaunched() -> None:
    kinds = {
        k for k in vars(OutcomeKind).values() if isinstance(k, str) and is_retryable(Outcome(0, k))
    }
    assert kinds & {
        OutcomeKind.CRASH,
        OutcomeKind.LOST,
        OutcomeKind.COLLECTIVE,
        OutcomeKind.EXCEPTION,
        OutcomeKind.PREFLIGHT,
    } == {
        OutcomeKind.CRASH,
        OutcomeKind.LOST,
        OutcomeKind.COLLECTIVE,
    }
    assert not is_retryable(Outcome(0, OutcomeKind.EXIT))
    assert not is_retryable(Outcome(0, OutcomeKind.CANCELLED))


def test_error_contains_rank_host_exit_traceback_and_output() -> None:
    error = error_of(RAISED, 4, others=[RAISED, PEER])
    assert isinstance(error, RankError)
    assert (error.rank, error.host, error.exit) == (1, "h1", "exception")
    assert error.traceback == RAISED.traceback
    assert error.log_tail == "one\ntwo"
    assert error.error_type == "ValueError"
    assert str(error) == (
        "Rank 1 of 4 on host h1 raised ValueError: bad\n"
        "Also: Rank 0 of 4 on host h0 stopped because of another rank: PeerLostError: rank 2"
    )


def test_only_the_root_cause_shows_a_remedy() -> None:
    echo = "broadcast('a.b'): rank 1 is lost: its connection closed, as seen by rank 0. Start the engine again."
    killed = Outcome(1, OutcomeKind.CRASH, host="h1", exit="signal SIGKILL")
    *_, last = str(error_of(killed, 2, others=[replace(PEER, message=echo), killed])).splitlines()
    assert last == (
        "Also: Rank 0 of 2 on host h0 stopped because of another rank: PeerLostError: broadcast('a.b'): rank 1 is lost: "
        "its connection closed, as seen by rank 0."
    )


def test_error_of_a_module_only_on_the_driver_suggests_addpyfile() -> None:
    lacks = Outcome(
        0, OutcomeKind.EXCEPTION, error="ModuleNotFoundError", message="No module named 'json'"
    )
    said = str(error_of(lacks, 1))
    assert said.startswith(
        f"Rank 0 of 1 raised ModuleNotFoundError: No module named 'json'. This process has it: {json.__file__}."
    )
    assert "addPyFile" in said
    others = [replace(lacks, message=f"No module named '{name}'") for name in ("no_such", "json.x")]
    for other in (*others, replace(lacks, error="E")):
        assert str(error_of(other, 1)).endswith(f" raised {other.error}: {other.message}")


@pytest.mark.parametrize("status", ["signal SIGKILL", "exit 137"])
def test_sigkill_without_report_suggests_lack_of_memory(status: str) -> None:
    outcome = Outcome(2, OutcomeKind.CRASH, host="h2", exit=status, peak_rss_bytes=300 << 20)
    assert describe(outcome, 4) == (
        f"Rank 2 of 4 on host h2 ended with {status} and left no report: probably memory (its peak memory was "
        "300 MiB). Run fewer ranks per host, or give each rank more memory (Spark on YARN or Kubernetes: raise "
        "spark.executor.memoryOverhead)."
    )


@pytest.mark.parametrize("status", ["signal SIGTERM", "exit 143"])
def test_sigterm_does_not_suggest_lack_of_memory(status: str) -> None:
    outcome = Outcome(2, OutcomeKind.CRASH, exit=status, peak_rss_bytes=300 << 20)
    assert describe(outcome, 4) == (
        f"Rank 2 of 4 ended with {status} and left no report: it was asked to end, for example by an operator or "
        "the cluster manager (its peak memory was 300 MiB). Look for the reason in their logs."
    )


def test_other_crashes_do_not_suggest_memory_limits() -> None:
    text = describe(Outcome(0, OutcomeKind.CRASH, exit="signal SIGSEGV", peak_rss_bytes=1 << 20), 2)
    assert (
        text
        == "Rank 0 of 2 ended with signal SIGSEGV and left no report; its peak memory was 1 MiB."
    )
    text = describe(Outcome(0, OutcomeKind.CRASH, exit="unknown exit"), 2)
    assert (
        text
        == "Rank 0 of 2 ended with unknown exit and left no report; its peak memory is not known."
    )


def test_preflight_outcome_raises_a_preflight_error() -> None:
    error = error_of(Outcome(0, OutcomeKind.PREFLIGHT, message="no pyarrow"), 2)
    assert isinstance(error, PreflightError)
    assert str(error) == "no pyarrow"


BARRIER = "Job aborted due to stage failure: Could not recover from a failed barrier ResultStage. Most recent"
WHICH = f"{BARRIER} failure reason: Stage failed because barrier task ResultTask(4, 1) finished unsuccessfully.\n"


@pytest.mark.parametrize(
    ("text", "rank", "kind", "says"),
    [
        (
            WHICH + "ExecutorLostFailure (executor 1 exited caused by one of the running tasks)",
            1,
            OutcomeKind.LOST,
            "ExecutorLost",
        ),
        (
            WHICH + "org.apache.spark.SparkException: Python worker exited unexpectedly (crashed)",
            1,
            OutcomeKind.LOST,
            "exited unexpectedly",
        ),
        (
            WHICH + "ModuleNotFoundError: No module named 'pyarrow'\n\tat x.y(Z.scala:3)",
            1,
            OutcomeKind.PREFLIGHT,
            "The workers run a Python, which has no pyarrow. Set PYSPARK_PYTHON",
        ),
        (
            WHICH + "ModuleNotFoundError: [sparkhvd-preflight:The workers run /x, which has no y.]",
            1,
            OutcomeKind.PREFLIGHT,
            "The workers run /x, which has no y.",
        ),
        (
            "Job 3 cancelled part of cancelled job tags [x]",
            None,
            OutcomeKind.CANCELLED,
            "cancelled",
        ),
        (
            "[PYTHON_VERSION_MISMATCH] Python in worker ...",
            None,
            OutcomeKind.PREFLIGHT,
            "another Python",
        ),
        ("something else", None, OutcomeKind.SPARK, "something else"),
    ],
)
def test_spark_failures_are_classified(text: str, rank: int | None, kind: str, says: str) -> None:
    outcome = from_spark_failure(text)
    assert (outcome.rank, outcome.kind) == (rank, kind)
    assert says in outcome.message
    assert "\tat " not in outcome.message


def test_exit_text_names_status_or_signal() -> None:
    assert [exit_text(s) for s in (0, 3, -9, -11, -64)] == [
        "exit 0",
        "exit 3",
        "signal SIGKILL",
        "signal SIGSEGV",
        "signal SIGRTMAX",
    ]


def test_result_chunks_contain_all_bytes() -> None:
    data = bytes(range(10))
    assert list(chunks(data, 4)) == [data[:4], data[4:8], data[8:]]
    assert list(chunks(b"", 4)) == []
