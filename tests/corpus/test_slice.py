"""Some cases of the corpus: the estimator's checks and a rank's loop against the plain loop, without Spark.

`tests/corpus/test_fits.py` fits some cases. `make corpus` runs all.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.corpus.cases import find
from tests.corpus.fit import train_on_ranks
from tests.corpus.plain import train
from tests.corpus.run import difference

pytestmark = pytest.mark.ranks

LAYERS = ("Conv2d", "BatchNorm1d", "Dropout", "LSTM packed", "TransformerEncoder", "tied weights")
LOSSES = (
    "CrossEntropyLoss with ignored rows",
    "TripletMarginLoss",
    "contrastive",
    "trained weight",
    "two labels",
)
OPTIMIZERS = (
    "Adam",
    "LBFGS",
    "SparseAdam",
    "groups of an instance",
    "OneCycleLR",
    "ReduceLROnPlateau",
    "accumulate",
)
PROGRAMS = (
    "weight_norm",
    "own parametrization with parameters",
    "scripted",
    "lazy",
    "AveragedModel",
    "complex parameters",
    "called before",
    "inverts matrices",
    "fixed batches",
    "VAE",
    "GAN",
    "model's own loss",
    "returns a nested",
)
HABITS = (
    "Lookahead with a schedule",
    "SAM of two steps",
    "groups by a property",
    "own state_dict",
    "BYOL",
)
SLICE = [
    *(f"torch_layers.{name}" for name in LAYERS),
    *(f"torch_losses.{name}" for name in LOSSES),
    *(f"torch_optimizers.{name}" for name in OPTIMIZERS),
    *(f"torch_programs.{name}" for name in PROGRAMS),
    *(f"torch_habits.{name}" for name in HABITS),
]


@pytest.mark.parametrize("name", SLICE)
def test_rank_gives_the_results_of_a_plain_loop(name: str, tmp_path: Path) -> None:
    case = find(name)
    assert difference(train_on_ranks(case, tmp_path), train(case)) <= case.tolerance
