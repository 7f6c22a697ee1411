"""A small fit of the estimator without Spark: packed data, the program, and what must come out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from sparkhvd.estimator.data.store import Store
from tests.unit.estimator.training.ranks import Case, linear

EPOCHS = 3


def prepare(folder: str, *, size: int) -> tuple[Any, list[float]]:
    """The spec for `size` ranks that take a GPU each, and the loss of every epoch in one process on the CPU."""
    case = Case(
        Store(Path(folder).as_uri()),
        linear(),
        lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        rows=1000,
        options={"batch_size": 32, "epochs": EPOCHS, "looks_for_gpu": True},
    )
    return case.spec(), [state["loss"] for state in case.reference(size, EPOCHS)]
