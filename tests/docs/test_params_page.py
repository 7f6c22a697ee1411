"""docs/params.md lists every Param, its default, and what replaces each Param of Horovod."""

from __future__ import annotations

import re

import pytest

from sparkhvd import TorchEstimator, TorchModel
from sparkhvd.estimator.params.table import rows_of
from tests.harness.paths import ROOT

pytestmark = pytest.mark.pure

PAGE = ROOT / "docs" / "params.md"
ROWS = rows_of(TorchEstimator)
ALIASES = {alias: name for name, row in ROWS.items() for alias in row.aliases}
ACCESSORS = {camel: name for name, row in ROWS.items() for camel in row.accessors}
NO_EFFECT = {name: row.no_effect for name, row in ROWS.items() if row.no_effect}

# Params of horovod.spark.torch.TorchEstimator 0.28, and those of horovod.spark.lightning that exist here.
HOROVODS = set(
    re.findall(
        r"\w+",
        """
        num_proc backend store model optimizer loss loss_constructors metrics loss_weights sample_weight_col
        feature_cols label_cols continuous_cols categorical_cols validation gradient_compression compress_sparse_cols
        batch_size val_batch_size epochs train_steps_per_epoch validation_steps_per_epoch callbacks random_seed
        shuffle_buffer_size shuffle verbose partitions_per_process run_id transformation_fn transformation_edit_fields
        transformation_removed_fields train_reader_num_workers val_reader_num_workers reader_pool_type label_shapes
        inmemory_cache_all use_gpu mp_start_method backward_passes_per_step tensorflow_dataset_prefetch_buffer_size
        data_module input_shapes train_minibatch_fn outputCols terminate_on_nan
        """,
    )
)


def table(mark: str) -> list[list[str]]:
    """Return the cells of a table between marks."""
    kind = mark.split()[0]
    found = re.search(rf"<!-- {mark} -->\n(.*?)\n<!-- /{kind} -->", PAGE.read_text(), re.DOTALL)
    assert found is not None
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in found[1].splitlines()[2:]]
    return [[cell.strip() for cell in row] for row in rows]


# The table of each group of the code; "" for names kept for compatibility.
GROUPS = {
    "model": "model",
    "data": "data",
    "training": "training",
    "cluster": "cluster",
    "": "names",
}
PARAMS = {group: table(f"params {title}") for group, title in GROUPS.items()}
EVERY = [row for rows in PARAMS.values() for row in rows]


def plain(cell: str) -> str:
    assert re.fullmatch("`[^`]+`", cell), cell
    return cell[1:-1]


def test_documented_params_equal_existing_params() -> None:
    documented = [plain(row[0]) for row in EVERY]
    assert len(documented) == len(set(documented))
    assert set(documented) == {p.name for p in TorchEstimator().params}
    assert {p.name for p in TorchModel().params} <= set(documented)


def test_each_param_is_in_the_table_of_its_group() -> None:
    for group, rows in PARAMS.items():
        assert {ROWS[plain(row[0])].group for row in rows} == {group}


@pytest.mark.parametrize("row", EVERY, ids=lambda row: row[0])
def test_defaults_and_horovod_status_match_the_code(row: list[str]) -> None:
    name, default, fate, meaning = row
    estimator = TorchEstimator()
    param = estimator.getParam(plain(name))
    assert default == (
        f"`{estimator.getOrDefault(param)!r}`" if estimator.hasDefault(param) else ""
    )
    is_horovods = {param.name, *(a for a, n in ALIASES.items() if n == param.name)} & HOROVODS
    assert fate in (("works", "differs", "warns") if is_horovods else ("own",))
    assert (fate == "warns") == (param.name in NO_EFFECT)
    assert meaning.endswith(".")
    if fate == "warns":
        text = meaning.replace("`", "").rstrip(".")
        assert text[:1].lower() + text[1:] == NO_EFFECT[param.name]


def test_every_horovod_param_is_a_param_or_alias() -> None:
    assert {p.name for p in TorchEstimator().params} | set(ALIASES) >= HOROVODS


def test_documented_aliases_match_the_code() -> None:
    assert {plain(a): plain(b) for a, b in table("names")} == ALIASES
    text = PAGE.read_text()
    assert [camel for camel in ACCESSORS if f"`set{camel}`" not in text] == []
