"""torch.compile in the ranks: the same training, and an early error where there is no compiler."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch._dynamo
import torch._inductor.config
from torch._dynamo.utils import counters

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.estimator.data.store import Store
from tests.harness.ranks import RanksFailed
from tests.unit.estimator.training.ranks import Case, assert_close, linear

# What torch asks for unless CXX is set, before any test changes the path.
COMPILER = torch._inductor.config.cpp.cxx[1]


def case(tmp_path: Path) -> Case:
    model = linear()
    return Case(
        Store.create(tmp_path),
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        rows=32,
        options={
            "batch_size": 8,
            "epochs": 2,
            "compile": True,
        },
    )


def test_a_compiled_model_trains_alike_and_keeps_its_names(tmp_path: Path) -> None:
    counters.clear()
    compiled, plain = case(tmp_path / "compiled"), case(tmp_path / "plain")
    try:
        found = compiled.train(1).history
    finally:
        graphs = counters["stats"]["unique_graphs"]
        torch._dynamo.reset()
    assert graphs >= 1  # it was compiled, and did not fall back
    expected = plain.train(1, compile=False).history
    assert list(compiled.weights(2)) == list(plain.weights(2))
    assert_close(compiled.weights(2), plain.weights(2), 1e-5)
    losses = [r["loss"] for r in expected]
    assert [r["loss"] for r in found] == pytest.approx(losses, rel=1e-5)


def test_a_rank_without_a_compiler_says_so_on_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RanksFailed) as failed:
        case(tmp_path).train(2)
    assert set(failed.value.errors) == {0, 1}
    for error in failed.value.errors.values():
        assert isinstance(error, InvalidArgumentError)
        assert str(error) == (
            "compile=True: torch.compile needs a C++ compiler and Python's headers on every executor, and on rank 0 none "
            f"of '{COMPILER}' was found. Install them there, set CXX to the compiler, or set compile=False."
        )
