"""Checks of sessions, without Spark."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from pyspark.sql import SparkSession

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.spark import check_session

pytestmark = pytest.mark.pure


def test_a_stopped_session_is_refused() -> None:
    session = object.__new__(SparkSession)
    session._sc = SimpleNamespace(_jsc=object())  # type: ignore[assignment]
    check_session(session)
    session._sc = SimpleNamespace(_jsc=None)  # type: ignore[assignment]
    with pytest.raises(InvalidArgumentError, match="has been stopped. Start a new one, and make"):
        check_session(session)
