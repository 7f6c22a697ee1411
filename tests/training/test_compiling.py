"""torch.compile in the ranks: the same training, and an early error without a compiler."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

import pytest
import torch
import torch._dynamo
import torch._inductor.config
from torch._dynamo.utils import counters

from sparkhvd.data.store.store import Store
from sparkhvd.engine.engine import Engine
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.rendezvous import in_process
from sparkhvd.settings import Settings
from sparkhvd.torch.context import use_engine
from sparkhvd.training.device import missing_tools
from sparkhvd.training.train import train
from tests.harness.inductor import lean_inductor
from tests.harness.ranks import RanksFailed
from tests.harness.soak import left_to_soak
from tests.training.ranks import Case, assert_close, linear

pytestmark = pytest.mark.ranks

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


@pytest.mark.parametrize(
    "backend",
    [
        "aot_eager",
        *left_to_soak("aot_eager, here; inductor in torch/test_processes", "inductor"),
    ],
)
def test_compiled_model_gives_the_same_weights_and_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    counters.clear()
    compiled, plain = case(tmp_path / "compiled"), case(tmp_path / "plain")
    (meeting,) = in_process(1)
    try:
        # On this thread, which the options of inductor are for.
        with lean_inductor(), Engine(meeting.connect(), Settings()) as engine, use_engine(engine):
            found = train(compiled.spec()).history
    finally:
        graphs = counters["stats"]["unique_graphs"]
        torch._dynamo.reset()
    assert graphs >= 1  # it was compiled, and did not fall back
    expected = plain.train(1, compile=False).history
    assert list(compiled.weights(2)) == list(plain.weights(2))
    assert_close(compiled.weights(2), plain.weights(2), 1e-5)
    losses = [r["loss"] for r in expected]
    assert [r["loss"] for r in found] == pytest.approx(losses, rel=1e-5)


def test_missing_compiler_on_one_rank_raises_on_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RanksFailed) as failed:
        case(tmp_path).train(2)
    assert set(failed.value.errors) == {0, 1}
    for error in failed.value.errors.values():
        assert isinstance(error, InvalidArgumentError)
        assert str(error) == (
            "compile=True: torch.compile needs a C++ compiler and Python's headers on every executor, and Triton for GPUs, "
            f"but on rank 0 none of '{COMPILER}' was found. Install them there, set CXX to the compiler, or set "
            "compile=False."
        )


@pytest.mark.parametrize(
    ("has_triton", "capability", "expected"),
    [
        (True, (9, 0), ""),
        (True, (7, 0), ""),
        (True, (6, 1), "the GPU has the compute capability 6.1, but Triton needs 7.0"),
        (False, (9, 0), "the module triton was not found"),
    ],
)
def test_compiling_on_a_gpu_needs_triton_and_a_capability(
    monkeypatch: pytest.MonkeyPatch, has_triton: bool, capability: tuple[int, int], expected: str
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: (object() if has_triton else None) if name == "triton" else find(name),
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert missing_tools(torch.device("cuda", 1)) == expected
    assert missing_tools(torch.device("cpu")) == ""
