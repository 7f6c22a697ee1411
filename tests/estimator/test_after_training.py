"""Errors after the last step of a fit lose no weights: the message says where they are."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from sparkhvd import InvalidArgumentError, RankError, Store, TorchModel
from sparkhvd.data.store import temporary
from sparkhvd.data.store.temporary import TemporaryFolders
from sparkhvd.errors import SparkhvdError
from sparkhvd.estimator import Callback
from sparkhvd.observe.loggers.base import Fit, Logger, Sink
from tests.estimator.fits import estimator
from tests.harness.by_value import by_value

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

travels_by_value = by_value(__name__)
pytestmark = [
    pytest.mark.spark,
    pytest.mark.skipif(
        sys.version_info < (3, 11), reason="exceptions have notes from Python 3.11 on"
    ),
]


@pytest.fixture(scope="module")
def df(spark: SparkSession) -> DataFrame:
    data = [([float(i % 5), float(i % 3)], float(i % 7)) for i in range(40)]
    return spark.createDataFrame(data, "x array<double>, y double")


class Sore(nn.Module):
    """Takes no state on the driver while a file exists."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.sore = str(folder / "sore")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)

    def load_state_dict(self, *arguments: Any, **options: Any) -> Any:
        if os.path.exists(self.sore) and "RANK" not in os.environ:
            raise ValueError("takes no state")
        return super().load_state_dict(*arguments, **options)


class Ends(Callback):
    """Keeps the trained weights apart from the fit, and calls a function when the training ends."""

    def __init__(self, folder: Path, does: str = "") -> None:
        self.folder, self.does = str(folder), does

    def on_train_end(self, ctx: Any, history: Any) -> None:
        if ctx.rank == 0:
            torch.save(ctx.model.state_dict(), f"{self.folder}/trained.pt")
        if self.does == "raise":
            raise ValueError("of the callback")
        if self.does == "block":  # what the driver writes then
            os.mkdir(ctx.store.local_path(f"{ctx.run_dir}/finished.json"))


class Presses(Logger):
    """Presses Ctrl-C when it gets the model."""

    def begin(self, fit: Fit) -> Sink:
        return PressingSink()


class PressingSink(Sink):
    def log(self, metrics: Any) -> None: ...

    def log_model(self, model: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)


def explained(error: BaseException) -> tuple[str, str]:
    """Return store and run of the model that a note names."""
    (note,) = error.__notes__  # type: ignore[attr-defined,unused-ignore]
    named = re.search(
        r"TorchModel\.from_run\('([^']+)', '([^']+)', trust=True\) gives the model", note
    )
    assert note.startswith("The checkpoint after epoch 2 of 2 stays")
    assert named is not None
    return named[1], named[2]


def same(found: nn.Module, folder: Path) -> bool:
    trained = torch.load(folder / "trained.pt")
    return all(torch.equal(v, trained[n]) for n, v in found.state_dict().items())


@pytest.mark.parametrize(
    ("case", "run_id"),
    [("callback", None), ("store", "mine"), ("ctrl-c", None)],
)
def test_failure_after_training_names_the_saved_weights(
    tmp_path: Path, df: DataFrame, case: str, run_id: str | None
) -> None:
    store = Store.create(tmp_path / "store")
    does = {"callback": "raise", "store": "block"}.get(case, "")
    fit = estimator(
        Sore(tmp_path),
        store,
        optimizer=torch.optim.Adam,
        epochs=2,
        num_proc=1,
        run_id=run_id,
        callbacks=[Ends(tmp_path, does)],
        loggers=[Presses()] if case == "ctrl-c" else None,
    )
    kind: dict[str, type[BaseException]] = {
        "callback": RankError,
        "store": SparkhvdError,
        "ctrl-c": KeyboardInterrupt,
    }
    with pytest.raises(kind[case]) as failed:
        fit.fit(df)
    url, name = explained(failed.value)
    assert url == store.url
    if case == "store":
        os.rmdir(store.local_path(f"runs/{name}/finished.json") or "")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some runs have not finished
        model = TorchModel.from_run(url, name, trust=True)
    assert same(model.getModel(), tmp_path)
    again = fit.copy({fit.run_id: name, fit.callbacks: [Ends(tmp_path)], fit.loggers: []})
    assert "resumes from there" in failed.value.__notes__[0]  # type: ignore[attr-defined,unused-ignore]
    resumed = again.fit(df)
    assert same(resumed.getModel(), tmp_path)
    assert len(resumed.history) == 2


def test_error_of_the_second_param_map_keeps_the_first_model(tmp_path: Path, df: DataFrame) -> None:
    fit = estimator(nn.Linear(2, 1), Store.create(tmp_path / "store"), num_proc=1)
    with pytest.raises(InvalidArgumentError, match="epochs") as failed:
        fit.fit(df, [{}, {fit.epochs: 0}])
    note = "The models of the param maps [0] are in the attribute `models` of this error, by index."
    assert note in failed.value.__notes__  # type: ignore[attr-defined,unused-ignore]
    model: Any = failed.value
    assert model.models[0].transform(df).count() == 40


@pytest.fixture
def own_folders(monkeypatch: pytest.MonkeyPatch) -> Iterator[TemporaryFolders]:
    folders = TemporaryFolders()
    monkeypatch.setattr(temporary, "_temporary", folders)
    yield folders
    for folder in folders._folders.values():
        shutil.rmtree(folder)


def test_a_temporary_store_with_unreturned_weights_is_kept(
    tmp_path: Path, df: DataFrame, own_folders: TemporaryFolders
) -> None:
    (tmp_path / "sore").touch()
    fit = estimator(
        Sore(tmp_path),
        optimizer=torch.optim.Adam,
        epochs=2,
        num_proc=1,
        callbacks=[Ends(tmp_path)],
    )
    with pytest.raises(ValueError, match="takes no state") as failed:
        fit.fit(df)
    url, name = explained(failed.value)
    folder = url.removeprefix("file://")
    assert f"stays until you delete {folder}: " in failed.value.__notes__[0]  # type: ignore[attr-defined,unused-ignore]
    own_folders._remove(folder, os.getpid())  # as at the end of the process
    (tmp_path / "sore").unlink()
    with pytest.warns(UserWarning, match="has not finished"):
        model = TorchModel.from_run(url, name, trust=True)
    assert same(model.getModel(), tmp_path)
