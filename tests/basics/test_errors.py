"""Exceptions travel between processes, and their classes say what a caller can do about them."""

from __future__ import annotations

import pickle

import pytest

from sparkhvd import errors
from sparkhvd.data.columns.schema import Column, DataSchema
from sparkhvd.errors import (
    CollectiveError,
    CollectiveTimeoutError,
    EngineUnavailableError,
    HorovodInternalError,
    InvalidArgumentError,
    MismatchError,
    NotInitializedError,
    PeerLostError,
    PreflightError,
    RankError,
    SparkhvdError,
    SparkUnavailableError,
    UntrustedError,
    listed,
)

pytestmark = pytest.mark.pure

CLASSES = [getattr(errors, name) for name in errors.__all__]


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_exception_pickles_with_its_message(kind: type[SparkhvdError]) -> None:
    copy = pickle.loads(pickle.dumps(kind("what happened")))
    assert type(copy) is kind
    assert str(copy) == "what happened"
    assert issubclass(kind, SparkhvdError)


def test_rank_error_pickles_with_its_data() -> None:
    error = RankError(
        "rank 3 failed",
        rank=3,
        host="h",
        exit="exception",
        error_type="KeyError",
        traceback="tb",
        log_tail="log",
        cause=KeyError("piece"),
    )
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == "rank 3 failed"
    assert vars(copy) == vars(error)
    assert (copy.rank, copy.host, copy.exit, copy.error_type, copy.traceback, copy.log_tail) == (
        3,
        "h",
        "exception",
        "KeyError",
        "tb",
        "log",
    )
    assert repr(copy.__cause__) == "KeyError('piece')"
    assert pickle.loads(pickle.dumps(RankError("x"))).__cause__ is None


def test_errors_are_caught_by_their_builtin_bases() -> None:
    assert issubclass(InvalidArgumentError, ValueError)
    assert issubclass(MismatchError, (InvalidArgumentError))
    assert issubclass(MismatchError, RuntimeError)
    assert issubclass(CollectiveTimeoutError, TimeoutError)
    assert issubclass(PeerLostError, ConnectionError)
    assert issubclass(CollectiveTimeoutError, CollectiveError)
    assert issubclass(PeerLostError, CollectiveError)
    assert issubclass(EngineUnavailableError, ImportError)
    assert issubclass(SparkUnavailableError, ModuleNotFoundError)
    for kind in (NotInitializedError, PreflightError, UntrustedError):
        assert issubclass(kind, InvalidArgumentError)
    assert HorovodInternalError is CollectiveError
    assert issubclass(
        NotInitializedError, HorovodInternalError
    )  # like Horovod's operations before init()
    # A retry loop on CollectiveError never retries a wrong call.
    assert not issubclass(InvalidArgumentError, CollectiveError)


def test_error_messages_list_at_most_thirty_columns() -> None:
    names = [f"feature_{i}" for i in range(10_000)]
    assert listed(map(repr, names[:30])).endswith("'feature_28', 'feature_29'")
    assert listed(map(repr, names)).endswith("'feature_28', 'feature_29', and 9,970 more")
    columns = tuple(Column(n, "scalar", "float32", (), "double") for n in names)
    with pytest.raises(InvalidArgumentError, match="and 9,970 more") as caught:
        DataSchema(columns, ()).column("other")
    assert len(str(caught.value)) < 1000
