"""The loader of a data set: each step has the same rows with any number of ranks, and a run resumes at any row."""

from __future__ import annotations

import json
import pickle
import random
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from sparkhvd import topology
from sparkhvd.data import dataset as loader_module
from sparkhvd.data.columns.schema import DataSchema
from sparkhvd.data.dataset import Dataset, Loader, load
from sparkhvd.data.manifest import MANIFEST_NAME, Manifest
from sparkhvd.data.store.store import Store
from sparkhvd.errors import InvalidArgumentError, StoreError
from tests.data.test_reader import DATA_DIR, HELD_OUT, ID, X, make

pytestmark = pytest.mark.pure

ROWS = 1003


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    store = Store.create(tmp_path / "store")
    made = make(store, [300, 0, ROWS - 300])
    Manifest(made.files, DataSchema((X, ID), ()), ROWS).save(store, DATA_DIR)
    return load(store, DATA_DIR)


def steps(loaders: list[Loader]) -> list[list[int]]:
    """Return the rows of each step over all ranks, from the loaders' position to the end of the epoch."""
    return [
        [number for batch in batches for number in batch["id"].tolist()]
        for batches in zip(*loaders, strict=True)
    ]


def rows(loaders: list[Loader]) -> list[int]:
    return [number for step in steps(loaders) for number in step]


def ranks(dataset: Dataset, size: int, batch_size: int, **options: object) -> list[Loader]:
    return [dataset.loader(rank, size, batch_size, **options) for rank in range(size)]


def place_of(loader: Loader) -> tuple[int, int, int]:
    state = loader.state_dict()
    return state["epoch"], state["row"], state["rows"]


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_order_of_rows_is_equal_for_any_number_of_ranks(
    dataset: Dataset, shuffle: bool
) -> None:
    wanted = [rows(ranks(dataset, 1, 1, shuffle=shuffle, seed=3)) for _ in range(1)][0]
    assert sorted(wanted) == list(range(ROWS))
    assert (wanted == list(range(ROWS))) != shuffle
    for size in (1, 2, 4, 8):
        assert rows(ranks(dataset, size, 24 // size, shuffle=shuffle, seed=3)) == wanted


def test_each_iteration_of_a_loader_is_an_epoch_in_another_order(dataset: Dataset) -> None:
    loaders = ranks(dataset, 2, 10)
    assert len(loaders[0]) == len(steps(loaders)) == 51  # of 3 rows at the end
    second = rows(loaders)
    assert sorted(second) == list(range(ROWS))
    loaders = ranks(dataset, 2, 10)
    assert rows(loaders) != second
    assert place_of(loaders[0]) == (1, 0, ROWS)
    for each in loaders:
        each.set_epoch(1)
    assert rows(loaders) == second


def test_an_epoch_resumes_at_any_row_with_other_ranks_and_batches(dataset: Dataset) -> None:
    chooser = random.Random(11)
    wanted = rows(ranks(dataset, 1, 1, seed=5))
    for _ in range(30):
        loaders, got = ranks(dataset, 1, 7, seed=5), list[int]()
        state = loaders[0].state_dict()
        while state["epoch"] == 0:
            size, batch = chooser.randint(1, 4), chooser.randint(1, 90)
            loaders = ranks(dataset, size, batch, seed=5)
            for each in loaders:
                each.load_state_dict(state)
            streams = [iter(each) for each in loaders]
            for _ in range(chooser.randint(1, 6)):
                batches = [next(stream, None) for stream in streams]
                if batches[0] is None:
                    break
                got += [n for one in batches if one is not None for n in one["id"].tolist()]
            states = [each.state_dict() for each in loaders]
            assert states.count(states[0]) == size
            state = states[0]
            for each in loaders:
                each.close()
        assert got == wanted


def test_drop_last_ends_an_epoch_after_its_last_full_step(dataset: Dataset) -> None:
    loaders = ranks(dataset, 2, 10, drop_last=True)
    for each in loaders:
        each.load_state_dict({"epoch": 4, "row": 13, "rows": ROWS})
    assert [len(step) for step in steps(loaders)] == [20] * 49
    assert place_of(loaders[0]) == (5, 0, ROWS)


@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_beyond_memory_resumes_with_other_ranks(dataset: Dataset, shuffle: bool) -> None:
    options = {"shuffle_bytes": 2000, "seed": 1, "shuffle": shuffle}
    wanted = steps(ranks(dataset, 2, 10, **options))
    loaders = ranks(dataset, 2, 10, **options)
    for _ in zip(*[iter(each) for each in loaders], range(3), strict=False):
        state = loaders[0].state_dict()
    loaders = ranks(dataset, 2, 10, **options)
    for each in loaders:
        each.load_state_dict(state)
    assert steps(loaders) == wanted[3:]
    # This holds even where the position is a whole step of theirs.
    for size, batch_size in ((1, 7), (1, 20), (1, 60), (3, 10), (5, 2)):
        seen = [row for step in wanted[:3] for row in step]
        others = ranks(dataset, size, batch_size, **options)
        for each in others:
            each.load_state_dict(json.loads(json.dumps(state)))
        for rows, _ in zip(
            zip(*[iter(each) for each in others], strict=True), range(2), strict=False
        ):
            seen += [int(row) for batch in rows for row in batch["id"]]
            between = others[0].state_dict()
        # Once more with other ranks.
        third = ranks(dataset, 2, 9, **options)
        for each in third:
            each.load_state_dict(json.loads(json.dumps(between)))
        seen += [row for step in steps(third) for row in step]
        assert sorted(seen) == list(range(ROWS))
        assert place_of(third[0]) == (1, 0, ROWS)
        assert len(json.dumps(between)) < 1000
    stale = ranks(dataset, 3, 10, **options)[0]
    stale.load_state_dict({name: state[name] for name in ("epoch", "row", "rows")})
    with pytest.raises(InvalidArgumentError, match="exceed shuffle_bytes"):
        next(iter(stale))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"shuffle_bytes": 2000}),
        ({"shuffle_bytes": 2000}, {}),
        ({"shuffle_bytes": 2000}, {"shuffle_bytes": 3000}),
        ({"shuffle_bytes": 2000}, {"shuffle_bytes": 2000, "columns": ["id"]}),
        ({"shuffle_bytes": 2000}, {"shuffle_bytes": 2000, "drop_last": True}),
        ({"shuffle": False}, {"shuffle": False, "shuffle_bytes": 2000}),
    ],
)
def test_epoch_resumes_only_with_its_original_order_options(
    dataset: Dataset, before: dict[str, Any], after: dict[str, Any]
) -> None:
    begun, other = dataset.loader(0, 2, 10, **before), dataset.loader(0, 2, 10, **after)
    fresh = begun.state_dict()
    next(iter(begun))
    state = json.loads(json.dumps(begun.state_dict()))
    other.load_state_dict(state)
    with pytest.raises(InvalidArgumentError, match="The epoch began with .*, but this loader has "):
        next(iter(other))
    # A state saved again before any read is the same.
    again = dataset.loader(0, 2, 10, **before)
    again.load_state_dict(state)
    assert again.state_dict() == state
    next(iter(again))
    # A new epoch may have any order.
    other.load_state_dict(fresh)
    next(iter(other))
    other.load_state_dict(state)
    other.set_epoch(3)
    next(iter(other))
    for each in (begun, again, other):
        each.close()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"rows": 7}, "has rows=7, but this loader has rows=1003"),
        ({"seed": 1}, "has seed=1, but this loader has seed=0"),
        ({"shuffle": False}, "has shuffle=False, but this loader has shuffle=True"),
        ({"subset": "train"}, "has subset='train', but this loader has subset='all'"),
        ({"validation": 0.5}, "has validation=0.5, but this loader has validation=None"),
        ({"row": -5}, "Give what state_dict"),
        ({"epoch": -1}, "Give what state_dict"),
        ({"rows": None}, "Give what state_dict"),
    ],
)
def test_loader_refuses_a_state_with_other_options(
    dataset: Dataset, change: dict[str, object], text: str
) -> None:
    loader = dataset.loader(0, 1, 10)
    with pytest.raises(InvalidArgumentError, match=text):
        loader.load_state_dict({**loader.state_dict(), **change})
    with pytest.raises(InvalidArgumentError, match="Give what state_dict"):
        loader.load_state_dict({})


def test_loader_refuses_a_state_of_other_data(dataset: Dataset, tmp_path: Path) -> None:
    state = json.loads(json.dumps(dataset.loader(0, 1, 10).state_dict()))
    store = Store.create(tmp_path / "other")

    def loader_of(files: list[int], name: str = X.name, first: int = 0) -> Loader:
        made = make(store, files, first=first)
        schema = DataSchema((replace(X, name=name), ID), ())
        Manifest(made.files, schema, ROWS).save(store, DATA_DIR)
        return load(store, DATA_DIR).loader(0, 1, 10)

    equal = [300, 0, ROWS - 300]
    loader_of(equal).load_state_dict(state)  # a copy of the data
    for other in (loader_of(equal, first=1), loader_of([200, 803]), loader_of(equal, "y")):
        with pytest.raises(InvalidArgumentError, match="other columns or values, or the"):
            other.load_state_dict(state)
        other.load_state_dict({name: state[name] for name in state if name != "data"})


def test_error_says_that_the_data_set_was_deleted(dataset: Dataset) -> None:
    again = load(dataset.store, dataset.path)
    dataset.store.delete(f"{dataset.path}/{MANIFEST_NAME}")
    with pytest.raises(StoreError, match="does not exist any more: it was deleted"):
        next(iter(again.loader(0, 1, 10)))


def test_loader_resumes_within_a_second(dataset: Dataset) -> None:
    loader = dataset.loader(0, 1, 10)
    loader.load_state_dict({"epoch": 7, "row": 777, "rows": ROWS})
    began = time.monotonic()
    next(iter(loader))
    assert time.monotonic() - began < 1


def test_tensors_have_the_types_and_shapes_of_the_columns(dataset: Dataset) -> None:
    batch = next(iter(dataset.loader(0, 1, 10, columns=["x"])))
    assert set(batch) == {"x"}
    assert batch["x"].shape == (10, 3)
    assert batch["x"].dtype == torch.float32
    assert dataset.columns == ["x", "id"]
    assert len(dataset) == ROWS


def test_subsets_follow_the_validation_column(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "store")
    made = make(store, [100], flag=True)
    Manifest(made.files, DataSchema((X, ID), (), None, HELD_OUT), 100).save(store, DATA_DIR)
    dataset = Dataset(store, DATA_DIR)
    held_out = set(range(0, 100, 5))
    assert set(rows([dataset.loader(0, 1, 9)])) == set(range(100)) - held_out
    assert set(rows([dataset.loader(0, 1, 9, subset="validation")])) == held_out
    assert len(rows([dataset.loader(0, 1, 9, subset="all")])) == 100
    with pytest.raises(InvalidArgumentError, match="'held_out' of the data marks validation rows"):
        dataset.loader(0, 1, 9, validation=0.5)


def test_loaders_with_one_seed_agree_on_fractional_subsets(dataset: Dataset) -> None:
    training = ranks(dataset, 2, 50, seed=3, validation=0.25)
    held_out = rows([dataset.loader(0, 1, 80, seed=3, validation=0.25, subset="validation")])
    assert len(held_out) == len(set(held_out)) == round(0.25 * len(dataset))
    assert sorted(rows(training) + held_out) == list(range(len(dataset)))
    other = rows([dataset.loader(0, 1, 80, seed=4, validation=0.25, subset="validation")])
    assert set(other) != set(held_out)


def test_pickled_loader_continues_and_dataloader_accepts_loader(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = dataset.loader(0, 1, 10, seed=2)
    stream = iter(loader)
    first = [next(stream)["id"].tolist() for _ in range(3)]
    again = pickle.loads(pickle.dumps(loader))
    rest = rows([again])
    assert sorted([n for batch in first for n in batch] + rest) == list(range(ROWS))
    whole = DataLoader(dataset.loader(0, 1, 10, seed=2), batch_size=None)
    assert [batch["id"].tolist() for batch in whole][:3] == first
    with pytest.raises(InvalidArgumentError, match="would collate the loader's batches again"):
        iter(DataLoader(loader))
    own = DataLoader(dataset.loader(0, 1, 10, seed=2), collate_fn=lambda batches: batches[0])
    assert next(iter(own))["id"].tolist() == first[0]
    # The end of real workers takes torch 5 s.
    monkeypatch.setattr(loader_module, "get_worker_info", lambda: SimpleNamespace(num_workers=1))
    with pytest.raises(InvalidArgumentError, match="would read all rows"):
        next(iter(loader))


def test_rank_and_size_come_from_the_launcher(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topology, "_installed", [])
    for name, value in {"RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert loader_module.place() == (2, 3)
    assert dataset.loader(batch_size=5).rank == 2
    with pytest.raises(InvalidArgumentError, match="Give both"):
        dataset.loader(rank=1)


def test_loader_of_another_size_refuses_a_state_without_windows(dataset: Dataset) -> None:
    """Earlier versions wrote such states, with which other ranks could lose or repeat rows."""
    loaders = ranks(dataset, 2, 10, shuffle_bytes=2000)
    for _ in zip(*[iter(each) for each in loaders], range(3), strict=False):
        state = loaders[0].state_dict()
    del state["windows"]
    other = dataset.loader(0, 3, 10, shuffle_bytes=4000)
    other.load_state_dict(state)
    with pytest.raises(InvalidArgumentError, match="exceed shuffle_bytes"):
        next(iter(other))


@pytest.mark.parametrize(
    "wrong",
    [{"row": 3, "before": [[2, 3, 100]]}, {"size": 0}, {"batch_size": None}, {"size": "2"}],
    ids=str,
)
def test_loader_refuses_an_inconsistent_state(dataset: Dataset, wrong: dict[str, Any]) -> None:
    loader = dataset.loader(0, 2, 10, shuffle_bytes=2000)
    with pytest.raises(InvalidArgumentError, match="Give what state_dict"):
        loader.load_state_dict({**loader.state_dict(), **wrong})


def test_states_of_other_data_and_missing_data_sets_raise(dataset: Dataset, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="Load it with the same data"):
        dataset.loader(0, 1).load_state_dict({"epoch": 0, "row": 0, "rows": 5})
    with pytest.raises(InvalidArgumentError, match="There is no data set 'data/none'"):
        load(tmp_path / "store", "data/none")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 2, "size": 2}, "rank is 2 and size 2; expected 0 <= rank < size"),
        ({"rank": -1, "size": 2}, "rank is -1 and size 2"),
        ({"rank": 0.0, "size": 2}, "rank is 0.0; it must be a whole number."),
        ({"rank": 0, "size": 0}, "size is 0; it must be a whole number of at least 1"),
        ({"batch_size": 0}, "batch_size is 0; it must be a whole number of at least 1"),
        ({"batch_size": True}, "batch_size is True"),
        ({"batch_size": 2.5}, "batch_size is 2.5"),
        ({"seed": None}, "seed is None; it must be a whole number."),
        ({"num_workers": 0}, "num_workers is 0"),
        ({"shuffle_bytes": 0}, "shuffle_bytes is 0"),
        ({"prefetch_bytes": "1"}, "prefetch_bytes is '1'"),
        ({"subset": "test"}, "subset is 'test'; it must be one of 'all', 'train', 'validation'"),
        ({"subset": "validation"}, "the data have no validation column"),
        ({"validation": 1.0}, "validation is 1.0; it must be a fraction"),
        ({"validation": "id"}, "validation is 'id'; it must be a fraction"),
        ({"columns": "id"}, r"columns is 'id'; .* such as columns=\['id'\]"),
        ({"columns": []}, r"columns is \[\]; it must be a list of names"),
        ({"columns": ["id", "id"]}, "each once"),
        ({"columns": ["id", "none"]}, "Column 'none' is not part of the data"),
        ({"decoders": {"none": len}}, "Column 'none' is not part of the data"),
        ({"collate": {"none": len}}, "Column 'none' is not part of the data"),
        ({"decoders": {"id": 3}}, r"decoders\['id'\] is 3"),
        ({"batch_format": "list"}, "batch_format is 'list'; it must be 'dict' or 'tuple'"),
    ],
)
def test_wrong_loader_arguments_raise_in_the_constructor(
    dataset: Dataset, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        dataset.loader(**{"rank": 0, "size": 1, **options})
    assert dataset.loader(np.int64(0), np.int32(1), np.int64(3), seed=-1).batch_size == 3


def test_tuple_batches_follow_the_order_of_columns(dataset: Dataset) -> None:
    options = {"columns": ["id", X.name], "shuffle": False}
    with (
        dataset.loader(0, 1, 10, **options) as plain,
        dataset.loader(0, 1, 10, **options, batch_format="tuple") as tuples,
    ):
        for batch, wanted in zip(tuples, plain, strict=True):
            assert isinstance(batch, tuple)
            assert all(map(torch.equal, batch, (wanted["id"], wanted[X.name])))
