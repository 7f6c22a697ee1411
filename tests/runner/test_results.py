"""Parts of results, by Spark's limit for the results of tasks."""

from __future__ import annotations

import pytest

from sparkhvd.runner import results
from sparkhvd.runner.outcomes import Outcome, OutcomeKind

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("limit", "size", "pieces"),
    [
        ("", 2, (1 << 20, 511)),  # Spark's own, 1g
        ("0", 2, (1 << 20, None)),
        ("4m", 2, (1 << 20, 1)),
        ("1m", 2, ((512 - 32) << 10, 1)),
        ("1048576", 2, ((512 - 32) << 10, 1)),
        ("8GB", 1000, (1 << 20, 4080)),
        ("2k", 2, (64 << 10, 1)),
        ("words", 2, (1 << 20, 511)),
    ],
)
def test_result_pieces_stay_below_the_spark_limit(
    limit: str, size: int, pieces: tuple[int, int | None]
) -> None:
    conf = {results.LIMIT_KEY: limit} if limit else {}
    found = results.pieces_for(conf, size)
    assert (found.num_bytes, found.at_once) == pieces


def test_missing_results_are_fetched_in_jobs_of_a_few_pieces() -> None:
    def row(rank: int, part: int, num_parts: int = 0) -> dict[str, object]:
        outcome = Outcome(rank, OutcomeKind.OK, num_parts=num_parts)
        return {"rank": rank, "part": part, "data": outcome.to_json().encode()}

    rows = [row(1, -1, 5), row(1, 0), row(0, -1, 2), row(0, 0), row(2, -1)]
    assert list(results._rest(rows, 3)) == [
        "(rank = 0 and part between 1 and 1) or (rank = 1 and part between 1 and 2)",
        "(rank = 1 and part between 3 and 4)",
    ]


def test_a_job_for_results_has_its_own_tag() -> None:
    tags = "SparkConnect_Session_Tag_sparkhvd-12-results,other"
    assert results.is_of_rest(tags, "sparkhvd-12")
    assert not results.is_of_rest("sparkhvd-12,other", "sparkhvd-12")
    assert not results.is_of_rest(tags, "sparkhvd-34")
    assert not results.is_of_rest(None, "sparkhvd-12")
