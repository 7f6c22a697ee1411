"""Subclasses of Horovod's Lightning estimator fit and transform, in classic Spark and over Spark Connect."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("lightning", reason="runs where lightning is: make test-users")
pytest.importorskip("PIL", reason="runs where Pillow is: make test-users")

from tests.harness.cluster import run_client  # noqa: E402 - after importorskip
from tests.harness.spark import connect_server, run_on  # noqa: E402

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]
CASES = ["fit_pictures", "fit_texts"]
# A separate process, because `horovod` stays imported there.
PROGRAM = """
from pathlib import Path
from tests.soak.users.horovod_subclass import {case}
{case}(spark, Path({folder!r}))
print("FITTED")
"""


@pytest.mark.parametrize("case", CASES)
def test_lightning_estimator_subclass_fits_and_transforms(tmp_path: Path, case: str) -> None:
    body = PROGRAM.format(case=case, folder=str(tmp_path))
    assert "FITTED" in run_on("local[2]", body, tmp_path, timeout_s=300)


@pytest.fixture(scope="module")
def remote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with connect_server(tmp_path_factory.mktemp("connect") / "server") as address:
        yield address


@pytest.mark.parametrize("case", CASES)
def test_lightning_estimator_subclass_fits_and_transforms_over_connect(
    remote: str, tmp_path: Path, case: str
) -> None:
    body = PROGRAM.format(case=case, folder=str(tmp_path))
    assert "FITTED" in run_client(remote, body, tmp_path, timeout_s=300)
