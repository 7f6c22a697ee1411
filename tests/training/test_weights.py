"""Files of weights: one name for equal weights, complete or an error, and mapped if large."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path

import pytest
import torch

from sparkhvd import InvalidArgumentError, Store
from sparkhvd.errors import InternalError
from sparkhvd.training.checkpoints.checkpoint import Checkpoint
from sparkhvd.training.checkpoints.files import Checkpoints
from sparkhvd.training.modules import weights
from sparkhvd.training.modules.weights import Weights

pytestmark = pytest.mark.pure

TENSORS = {
    "a": torch.arange(6.0).reshape(2, 3),
    "n": torch.tensor(7),
    "half": torch.ones(2).bfloat16(),
}


def assert_equal(found: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(TENSORS)
    for name, tensor in TENSORS.items():
        assert torch.equal(found[name], tensor)
        assert found[name].dtype == tensor.dtype


def test_equal_weights_have_equal_file_names(tmp_path: Path) -> None:
    sink = io.BytesIO()
    name = weights.dump(TENSORS, sink)
    assert name == hashlib.sha256(sink.getvalue()).hexdigest()
    assert weights.dump({n: t.clone() for n, t in TENSORS.items()}) == name
    assert weights.dump({**TENSORS, "n": torch.tensor(8)}) != name
    assert_equal(Weights(name, sink.getvalue()).load())
    assert_equal(torch.load(io.BytesIO(sink.getvalue()), weights_only=True))


@pytest.mark.parametrize("url", ["{}", "memory://weights{}"])
@pytest.mark.parametrize("is_mapped", [False, True])
def test_weights_are_stored_once_and_loaded_as_private_copies(
    tmp_path: Path, url: str, is_mapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "MAPPED_BYTES", 0 if is_mapped else 1 << 30)
    store = Store.create(url.format(tmp_path))
    name = weights.dump(TENSORS)
    stored = weights.store_weights(TENSORS, name, store)
    assert store.list("models") == [f"models/{name}"]
    loaded = stored.load()
    assert_equal(loaded)
    assert_equal(weights.store_weights(TENSORS, name, store).load())
    loaded["a"] += 1  # private: the file stays as it is
    assert_equal(stored.load())
    store.delete(stored.path)
    loaded["a"] -= 1
    assert_equal(loaded)
    with pytest.raises(InvalidArgumentError) as missing:
        stored.load()
    assert str(missing.value) == (
        f"The weights {store.full_url(stored.path)} do not exist on this executor. Give a store that all executors "
        "share, and keep it as long as the model is used."
    )


def test_weights_file_with_a_wrong_checksum_raises(tmp_path: Path) -> None:
    store = Store.create(tmp_path)
    with pytest.raises(InternalError, match="changed while they were written"):
        weights.store_weights(TENSORS, "0" * 64, store)
    assert store.list("models") == []
    store.write_bytes(f"models/{'0' * 64}", b"other")
    with pytest.raises(
        InternalError, match="has other content than was written: its SHA-256 differs"
    ):
        Weights("0" * 64, None, store).load()


@pytest.mark.parametrize("url", ["{}", "memory://cut-off{}"])
def test_truncated_weights_file_is_rewritten(tmp_path: Path, url: str) -> None:
    store = Store.create(url.format(tmp_path))
    sink = io.BytesIO()
    stored = Weights(weights.dump(TENSORS, sink), None, store)
    whole = sink.getvalue()
    for left in (b"", whole[:10], whole[: len(whole) // 2], whole[:-1]):
        store.write_bytes(stored.path, left)
        assert_equal(weights.store_weights(TENSORS, stored.sha256, store).load())
        assert store.read_bytes(stored.path) == whole
    # A whole file is left as it is: other readers may have it open.
    store.write_bytes(stored.path, marked := b"x" + whole[1:])
    weights.store_weights(TENSORS, stored.sha256, store)
    assert store.read_bytes(stored.path) == marked


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("no memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] can't allocate memory: you tried"),
        OSError("input/output error"),
    ],
)
def test_lack_of_memory_does_not_mark_a_checkpoint_as_damaged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception
) -> None:
    """A checkpoint that does not fit into memory is intact, so the training must not continue from an older one."""
    store = Store.create(tmp_path / "store")
    checkpoints = Checkpoints(store, "runs/r")
    for epoch in (1, 2):
        checkpoints.save(Checkpoint(epoch, {"w": torch.ones(2)}, {}, None, [], "{}"))

    def load(*args: object, **options: object) -> object:
        raise error

    monkeypatch.setattr(torch, "load", load)
    with pytest.raises(type(error)) as caught:
        checkpoints.latest()
    assert caught.value is error or str(error) in str(caught.value)
