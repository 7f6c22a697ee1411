"""examples/recipes: each script runs as a user runs it, and its evaluation must reach a bound. soak/users has text.py and language_model.py."""

from __future__ import annotations

import re
from importlib.util import find_spec

import pytest

from tests.harness.soak import soak
from tests.harness.spark import ROOT, run_script

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

RECIPES = ROOT / "examples" / "recipes"


def numbers(name: str, pattern: str, *options: str) -> list[float]:
    """Run a recipe, and return the numbers in its last line."""
    result = run_script(RECIPES / f"{name}.py", *options, timeout_s=280)
    assert result.returncode == 0, result.output
    found = re.search(pattern, result.output)
    assert found, result.output
    return [float(text.replace(",", "")) for text in found.groups()]


@soak("data/test_images; estimator/test_inputs")
def test_images_recipe_reaches_its_score() -> None:
    pytest.importorskip("PIL", reason="needs Pillow")
    (accuracy,) = numbers("images", r"accuracy (\S+)")
    assert accuracy > 0.9


@soak("estimator/test_fit; soak/users/test_lightning_estimator")
@pytest.mark.skipif(find_spec("lightning") is None, reason="needs Lightning")
def test_lightning_module_recipe_reaches_its_score() -> None:
    (accuracy,) = numbers("lightning_module", r"test accuracy ([\d.]+)")
    assert accuracy > 0.95


@soak("estimator/test_fit")
def test_recommender_recipe_reaches_its_score() -> None:
    hits, by_chance = numbers("recommender", r"hit rate at 10: (\S+), by chance (\S+)")
    assert hits > 8 * by_chance


@soak("estimator/test_fit")
def test_forecasting_recipe_reaches_its_score() -> None:
    ours, last_week = numbers(
        "forecasting",
        r"mean absolute error (\S+), as the last week (\S+)",
        *("--series", "20", "--epochs", "16"),
    )
    assert ours < 0.95 * last_week
