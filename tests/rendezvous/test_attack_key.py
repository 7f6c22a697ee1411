"""The key of a running job is in no command line, environment or log. tests/cluster/test_key.py checks Spark's jobs."""

from __future__ import annotations

import pytest

from sparkhvd.runner import run_local
from tests.rendezvous.key_search import check, forms_of, hunt

pytestmark = pytest.mark.processes


def test_key_of_a_local_job_never_leaks(capfd: pytest.CaptureFixture[str]) -> None:
    key = check(run_local(hunt, num_proc=2, verbose=2))
    captured = capfd.readouterr()
    output = (captured.out + captured.err).encode()
    assert b"a rank with a key prints" in output
    assert not any(form in output for form in forms_of(key))
