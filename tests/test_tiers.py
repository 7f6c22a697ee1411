"""Each test module has one tier."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("marks", "found"),
    [("[]", "has no tier"), ("[pytest.mark.pure, pytest.mark.spark]", "has pure and spark")],
)
def test_module_without_exactly_one_tier_fails_collection(
    request: pytest.FixtureRequest, tmp_path: Path, marks: str, found: str
) -> None:
    path = tmp_path / "test_without_one_tier.py"
    path.write_text(f"import pytest\n\npytestmark = {marks}\n\n\ndef test() -> None: ...\n")
    module = pytest.Module.from_parent(request.session, path=path)
    report = request.config.hook.pytest_make_collect_report(collector=module)
    assert report.failed
    assert report.result == []
    assert "test_without_one_tier.py" in report.longrepr
    assert found in report.longrepr
    assert "pytestmark = pytest.mark.ranks" in report.longrepr


def test_module_with_one_tier_is_collected(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    path = tmp_path / "test_with_one_tier.py"
    path.write_text(
        "import pytest\n\npytestmark = pytest.mark.ranks\n\n\ndef test() -> None: ...\n"
    )
    module = pytest.Module.from_parent(request.session, path=path)
    report = request.config.hook.pytest_make_collect_report(collector=module)
    assert report.passed
    assert len(report.result) == 1
