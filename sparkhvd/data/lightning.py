"""Lightning's data module of a prepared data set."""

from __future__ import annotations

import importlib
from typing import Any

from sparkhvd.data.dataset import Dataset
from sparkhvd.data.loader import Loader
from sparkhvd.errors import InvalidArgumentError

__all__ = ["data_module"]

_LIGHTNING = ("lightning.pytorch", "pytorch_lightning")


def data_module(dataset: Dataset, batch_size: int = 32, **options: Any) -> Any:
    """Return a `LightningDataModule` whose loaders are the dataset's: rows of training, and of validation where a column marks them.

    Its state, in Lightning's checkpoints, is the place in the epoch.

    Args:
        dataset: the rows.
        batch_size: rows per rank and step.
        **options: of `Loader`, but for rank and size, which are the trainer's.

    Raises:
        InvalidArgumentError: Lightning is not installed.
    """

    class DataModule(_lightning().LightningDataModule):  # type: ignore[misc]  # of either package
        def __init__(self) -> None:
            super().__init__()
            self._training: Loader | None = None
            self._state: dict[str, int] | None = None
            if dataset.schema.validation is not None:
                self.val_dataloader = self._val_dataloader

        def train_dataloader(self) -> Loader:
            self._training = self._loader(**options)
            if self._state is not None:
                self._training.load_state_dict(self._state)
                self._state = None
            return self._training

        def _val_dataloader(self) -> Loader:
            return self._loader(**{**options, "subset": "validation", "shuffle": False})

        def _loader(self, **given: Any) -> Loader:
            ranks = (self.trainer.global_rank, self.trainer.world_size)
            return Loader(dataset, *ranks, batch_size, **given)

        def state_dict(self) -> dict[str, Any]:
            return {} if self._training is None else self._training.state_dict()

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self._state = state or None

        def teardown(self, stage: str) -> None:
            del stage
            if self._training is not None:
                self._training.close()

    return DataModule()


def _lightning() -> Any:
    for name in _LIGHTNING:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name.partition(".")[0]:
                raise
    raise InvalidArgumentError(
        f"data_module: neither of {' and '.join(_LIGHTNING)} is installed. Run `pip install lightning`, or give the loader to the "
        "trainer yourself."
    )
