from __future__ import annotations

import threading

import pytest

from sparkhvd import trust
from sparkhvd.errors import UntrustedError
from sparkhvd.estimator.saving.trust import check_trusted

pytestmark = pytest.mark.pure


class Session:
    """A session's conf, as far as trust needs it."""

    def __init__(self, prefixes: str | None = None) -> None:
        self.prefixes = prefixes
        self.conf = self

    def get(self, key: str, default: str) -> str | None:
        assert key == "spark.sparkhvd.trust"
        return self.prefixes if self.prefixes is not None else default


@pytest.mark.parametrize(
    ("prefixes", "path", "is_trusted"),
    [
        (None, "/models/a", False),
        ("", "/models/a", False),
        ("/models", "/models/a", True),
        ("/models/", "/models/a", True),
        ("/models", "/models", True),
        ("/models", "/models-of-others/a", False),
        ("/models", "/models/../others/a", False),
        ("/x, s3://bucket/models", "s3://bucket/models/a", True),
        ("s3://bucket/models", "s3://bucket/other", False),
        ("/", "/anything", True),
    ],
)
def test_conf_prefixes_decide_which_paths_are_trusted(
    prefixes: str | None, path: str, is_trusted: bool
) -> None:
    session = Session(prefixes)
    if is_trusted:
        check_trusted(path, "a.B", session)
        return
    with pytest.raises(UntrustedError) as failed:
        check_trusted(path, "a.B", session)
    assert str(failed.value) == (
        f"{path!r} holds a.B, and loading it runs code from that file. If you trust the file, load it with trust=True, "
        "or inside `with sparkhvd.trust():`, or set spark.sparkhvd.trust to a prefix of the path."
    )


def test_trust_applies_only_within_its_block_and_thread() -> None:
    session = Session()
    elsewhere: list[BaseException] = []

    def in_another_thread() -> None:
        try:
            check_trusted("/a", "a.B", session)
        except UntrustedError as e:
            elsewhere.append(e)

    with trust():
        check_trusted("/a", "a.B", session)
        thread = threading.Thread(target=in_another_thread)
        thread.start()
        thread.join()
    assert len(elsewhere) == 1
    with pytest.raises(UntrustedError):
        check_trusted("/a", "a.B", session)
    check_trusted("/a", "a.B", session, trusted=True)
