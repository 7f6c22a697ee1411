"""Recipe for repeating a run on a table with the same rows, settings and seed.

    runs/<run_id>/recipe.json   table and version, seed, ranks, versions of libraries, losses, digests of the weights;
                                signed with the run's key (HMAC)
    runs/<run_id>/recipe.pkl    the estimator's Params as a pickle, whose SHA-256 is in recipe.json

Trust: loading the pickle runs code. It is loaded only if recipe.json is signed with the run's key, or if the caller
trusts the run. Only the model of the fit holds the key (`TorchModel.run_key`); it is never stored in the store.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import platform
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import cloudpickle
import torch
from torch import Tensor, nn

from sparkhvd._version import __version__
from sparkhvd.data.manifest import TableVersion
from sparkhvd.data.store.locks import dump_sealed, load_sealed
from sparkhvd.data.store.store import Store
from sparkhvd.errors import InvalidArgumentError, UntrustedError
from sparkhvd.estimator.fitting.on_table import TableChoice
from sparkhvd.wire import read_json, rebuild

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from sparkhvd.estimator.params.base import TorchParams

RECIPE_NAME, PARAMS_NAME = "recipe.json", "recipe.pkl"
_FORMAT = 1
_KEY_BYTES = 32
_KEY = re.compile(f"[0-9a-fA-F]{{{2 * _KEY_BYTES}}}")
# Params that are not in the recipe, because another fit writes and shows its output elsewhere.
_OTHERS = frozenset(
    {"store", "run_id", "loggers", "verbose", "progress", "num_proc", "random_seed"}
)


class Model(Protocol):
    """Members of `TorchModel` used by this module.

    This module cannot import the class from a layer above.
    """

    @property
    def history(self) -> list[dict[str, Any]]:
        """One record per epoch, as in `TorchModel.history`."""

    @property
    def training_data(self) -> dict[str, Any]:
        """Description of the training rows of the fit."""

    def getModel(self) -> nn.Module:  # noqa: N802 - Spark's form
        ...


@dataclass(frozen=True)
class Environment:
    """Versions and CPU that affect the bits of a training, besides its program and rows.

    Attributes:
        torch: version of torch.
        python: version of Python.
        sparkhvd: version of sparkhvd.
        cpu: instruction set that torch uses on the driver.
    """

    torch: str
    python: str
    sparkhvd: str
    cpu: str


@dataclass(frozen=True)
class Recipe:
    """Table, seed and other facts for training a run again.

    Attributes:
        table: version of the table, with the filter.
        seed: seed of the run.
        num_proc: number of ranks.
        environment: environment of the fit.
        params: SHA-256 of the pickle of the Params.
        losses: losses of the epochs.
        weights: SHA-256 of each tensor of the trained module.
    """

    table: TableVersion
    seed: int
    num_proc: int
    environment: Environment
    params: str
    losses: tuple[float, ...] = ()
    weights: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Reproduction:
    """Result of repeating a fit.

    Attributes:
        model: new model.
        is_equal: True if all losses and weights have equal bits.
        text: "equal bits", or the first difference.
        environment: name -> (then, now) for each difference of the environments.
    """

    model: Model
    is_equal: bool
    text: str
    environment: Mapping[str, tuple[str, str]]


def this_environment() -> Environment:
    return Environment(
        torch.__version__,
        platform.python_version(),
        __version__,
        str(torch.backends.cpu.get_cpu_capability()),
    )


def write_recipe(
    store: Store,
    run_dir: str,
    estimator: TorchParams,
    model: Model,
    *,
    seed: int,
    num_proc: int,
) -> str:
    """Write the recipe of a finished run on one table and return its key, or "" if the Params cannot be pickled.

    Args:
        store: store of the run.
        run_dir: folder of the run.
        estimator: estimator of the fit, with unchanged Params.
        model: trained model, whose rows come from one table.
        seed: seed of the run.
        num_proc: number of ranks.
    """
    (table,) = model.training_data["tables"]
    values = {p.name: v for p, v in estimator._paramMap.items() if p.name not in _OTHERS}
    try:
        data = cloudpickle.dumps((type(estimator), values))
    except Exception:  # noqa: BLE001 - only the recipe needs these Params as a pickle, and the fit has succeeded
        return ""
    module = model.getModel()
    recipe = Recipe(
        rebuild(TableVersion, table),
        seed,
        num_proc,
        this_environment(),
        hashlib.sha256(data).hexdigest(),
        _losses(model.history),
        _digests(module.state_dict()),
    )
    key = secrets.token_bytes(_KEY_BYTES)
    facts = {"format": _FORMAT, **asdict(recipe)}
    store.write_bytes(f"{run_dir}/{PARAMS_NAME}", data)
    store.write_bytes(f"{run_dir}/{RECIPE_NAME}", dump_sealed({**facts, "hmac": _mac(facts, key)}))
    return key.hex()


def reproduce(
    run: Store,
    spark: SparkSession,
    *,
    key: str | None = None,
    trusted: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    catalog: object = None,
) -> Reproduction:
    """Repeat the fit of a run, and compare losses and weights bit by bit.

    Args:
        run: folder of the run, `<store>/runs/<run_id>`, as a store.
        spark: session whose tasks become ranks.
        key: key of the run, from `TorchModel.run_key`.
        trusted: True if the caller trusts the run, which holds code.
        storage_options: storage options of the table, as for `fit_on_table`.
        catalog: catalog of an Iceberg table, as for `fit_on_table`, used if the metadata file of the fit was deleted.

    Raises:
        InvalidArgumentError: the run has no recipe, the recipe is damaged, or its version of the table cannot be read.
        UntrustedError: the key does not match the recipe, and the run is not trusted.
    """
    recipe, estimator = load_recipe(run, key=key, trusted=trusted)
    table = recipe.table
    choice = TableChoice(
        table.source,
        where=table.where or None,
        storage_options=storage_options,
        schema_id=table.schema_id,
        uuid=table.uuid,
        version=table.version if table.format == "delta" else None,
        snapshot_id=table.version if table.format == "iceberg" else None,
    )
    try:
        sources = estimator._open_table(choice, spark)
    except InvalidArgumentError as e:
        # The catalog may have deleted the metadata file of the fit but kept the snapshot, so open the table by its
        # name.
        if table.format != "iceberg" or "/" in table.name:
            raise
        try:
            by_name = replace(choice, table=table.name, catalog=catalog)
            sources = estimator._open_table(by_name, spark)
        except InvalidArgumentError as second:
            raise InvalidArgumentError(
                f"{e} Reading the table by its name failed, too: {second} Give the catalog with reproduce(..., catalog=)."
            ) from None
    model = estimator._fit_sources(sources)
    text = _first_difference(recipe, model)
    return Reproduction(model, not text, text or "equal bits", differences(recipe))


def load_recipe(run: Store, *, key: str | None = None, trusted: bool = False) -> tuple[Recipe, Any]:
    """Load a run's recipe, and its estimator with seed and number of ranks.

    Raises the same errors as `reproduce`.
    """
    url = run.full_url(RECIPE_NAME)
    try:
        values = load_sealed(run.read_bytes(RECIPE_NAME))
        data = run.read_bytes(PARAMS_NAME)
    except (FileNotFoundError, NotADirectoryError):
        raise InvalidArgumentError(
            f"{url} does not exist. A finished fit_on_table with run_id or keep_checkpoints writes it; give the folder of such a run, "
            "<store>/runs/<run_id>. Elastic runs and runs with warm_start have no recipe."
        ) from None
    facts = dict(values or {})
    seal = facts.pop("hmac", None)
    try:
        if facts.pop("format", None) != _FORMAT:
            raise ValueError("it is damaged, or another version of sparkhvd wrote it")
        recipe = rebuild(Recipe, facts)
    except ValueError as e:
        raise InvalidArgumentError(f"{url} cannot be used: {e}. Restore it from a copy.") from e
    _check_trust(url, {"format": _FORMAT, **facts}, seal, key, trusted=trusted)
    if hashlib.sha256(data).hexdigest() != recipe.params:
        raise InvalidArgumentError(
            f"{run.full_url(PARAMS_NAME)} has changed since the fit wrote it: its SHA-256 differs. It was not loaded. Restore it from a copy."
        )
    kind, params = cloudpickle.loads(data)
    estimator = kind()._set(**params)
    return recipe, estimator._set(num_proc=recipe.num_proc, random_seed=recipe.seed)


def differences(recipe: Recipe) -> dict[str, tuple[str, str]]:
    """Map changed parts of the environment to (then, now), compared with the fit."""
    then, now = asdict(recipe.environment), asdict(this_environment())
    return {name: (then[name], now[name]) for name in then if then[name] != now[name]}


def _check_trust(
    url: str, facts: Mapping[str, Any], seal: object, key: str | None, *, trusted: bool
) -> None:
    if trusted:
        return
    if key is None:
        raise UntrustedError(
            f"{url} refers to code of the run, which reproducing would run. Give the key of the run, TorchModel.run_key of its model, "
            "or trust the run: --trust."
        )
    if not key.strip():
        raise UntrustedError(
            f"The key for {url} is empty. A fit has no run_key if it is elastic, uses warm_start, or has Params that cannot be "
            "pickled. Give TorchModel.run_key of the run's own model."
        )
    if not _KEY.fullmatch(key.strip()):
        raise UntrustedError(
            f"The key for {url} is invalid: it has {len(key.strip())} characters, but a key has {2 * _KEY_BYTES} hexadecimal digits. Give "
            "TorchModel.run_key of the run's model."
        )
    expected = _mac(facts, bytes.fromhex(key.strip()))
    if not (isinstance(seal, str) and hmac.compare_digest(seal, expected)):
        raise UntrustedError(
            f"{url} was not written by the fit with this key: its signature differs. Check whether run and key belong together; if the "
            "file was changed, do not use it."
        )


def _mac(facts: Mapping[str, Any], key: bytes) -> str:
    # A round trip through JSON converts tuples to lists, as in the stored recipe.
    plain = read_json(json.dumps(facts), most_bytes=None)
    return hmac.new(key, json.dumps(plain, sort_keys=True).encode(), hashlib.sha256).hexdigest()


def _losses(history: Sequence[Mapping[str, Any]]) -> tuple[float, ...]:
    return tuple(float(record["loss"]) for record in history if "loss" in record)


def _digests(state: Mapping[str, Any]) -> dict[str, str]:
    return {
        name: hashlib.sha256(b"".join(map(_bits, _parts(value.detach().cpu())))).hexdigest()
        for name, value in state.items()
        if isinstance(value, Tensor)
    }


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """Split a tensor into dense tensors, such as the indices and values of a sparse tensor."""
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
        return tensor.indices(), tensor.values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)


def _bits(tensor: Tensor) -> bytes:
    plain = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
    return bytes(plain.view(torch.uint8).numpy().tobytes())


def _first_difference(recipe: Recipe, model: Model) -> str:
    """Describe the first difference between the recipe and a new model in words, or return "" if they are equal."""
    rows = zip(recipe.losses, _losses(model.history), strict=False)
    for epoch, (then, now) in enumerate(rows, 1):
        if then != now and not (math.isnan(then) and math.isnan(now)):
            return f"the loss of epoch {epoch} is {now!r} instead of {then!r}"
    if len(recipe.losses) != len(model.history):
        return f"{len(model.history)} epochs instead of {len(recipe.losses)}"
    found = _digests(model.getModel().state_dict())
    for name in {**recipe.weights, **found}:
        if recipe.weights.get(name) != found.get(name):
            return (
                f"the tensor {name!r} of the trained model differs, although all losses are equal"
            )
    return ""
