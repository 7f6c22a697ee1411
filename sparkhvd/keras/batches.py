"""Batches of a prepared data set, as Keras takes them: tuples of inputs, labels and weights."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from sparkhvd.data.columns.decoders import RowFunctions
from sparkhvd.data.columns.schema import DataSchema
from sparkhvd.data.dataset import Dataset
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.keras.network import arranged
from sparkhvd.observe.spans import Spans
from sparkhvd.training.user_code.transformations import Transformations

__all__ = ["Batches"]


class Batches(IterableDataset[Any]):
    """Batches of one rank; every iteration is the epoch `epoch` from its begin, because Keras looks at a first batch before it trains.

    Where the last step of an epoch has no row for this rank, rows of another batch come, and `rows` is 0.

    Attributes:
        epoch: that the next iteration gives.
        rows: of this rank in the batch that came last.
        spans: of a timeline, for the waits.
        spare: columns of a batch that had rows.
        skips: decoders leave rows out.
        is_uneven: ranks have unequally many rows in any step, because decoders leave some out, or groups stay together.
    """

    def __init__(
        self,
        model: Any,
        dataset: Dataset,
        columns: tuple[Sequence[str], Sequence[str], str | None],
        batch_size: int,
        transformed: tuple[Transformations, DataSchema] | None = None,
        *,
        is_training: bool = True,
        max_steps: int | None = None,
        **options: Any,
    ) -> None:
        """Describe the batches.

        Args:
            model: of Keras, which takes them.
            dataset: the rows.
            columns: features, labels, and that of weights.
            batch_size: rows per rank and step.
            transformed: the user's functions, and the columns that they return; None without these.
            is_training: what functions are told that ask.
            max_steps: of an epoch; None for all.
            **options: of `Loader`.
        """
        super().__init__()
        self._model = model
        self._features, self._labels, self._weight = columns
        self._transformed, self._is_training = transformed, is_training
        self._loader = dataset.loader(batch_size=batch_size, **options)
        self._loader.as_stored = transformed is not None
        self._max_steps = max_steps
        self.skips = RowFunctions(options.get("decoders") or {}).skips
        self.is_uneven = self.skips or dataset.schema.group is not None
        self.epoch = 0
        self.rows = 0
        self.spans = Spans()
        self.spare: dict[str, Tensor] | None = None

    def __len__(self) -> int:
        """Return the number of steps of an epoch, equal on every rank."""
        steps = len(self._loader)
        return steps if self._max_steps is None else min(steps, self._max_steps)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        """Yield the batches of the epoch."""
        self._loader.set_epoch(self.epoch)
        batches = itertools.islice(self._loader, len(self))
        for columns in self.spans.timed(batches, "data"):
            self.rows = len(next(iter(columns.values())))
            if self.rows:
                self.spare = columns
            elif self.spare is None and self.is_uneven:
                # Rows of zeros, whose loss and metrics count for nothing.
                self.spare = {n: each.new_zeros(1, *each.shape[1:]) for n, each in columns.items()}
            elif self.spare is None:
                raise InvalidArgumentError(
                    f"KerasEstimator: rank {self._loader.rank} of {self._loader.size} has no row to train on. Fit with fewer ranks (num_proc)."
                )
            yield self._arranged(columns if self.rows else self.spare)

    def _arranged(self, columns: dict[str, Tensor]) -> tuple[Any, ...]:
        if self._transformed is not None:
            functions, schema = self._transformed
            arrays = {name: each.numpy() for name, each in columns.items()}
            made = functions.apply(arrays, schema.columns, is_training=self._is_training)
            columns = {name: torch.from_numpy(each) for name, each in made.items()}
        inputs = arranged(self._model, [columns[name] for name in self._features])
        labels = [columns[name] for name in self._labels]
        weights = () if self._weight is None else (columns[self._weight],)
        return (inputs, labels[0] if len(labels) == 1 else labels, *weights)

    @property
    def num_broken(self) -> int:
        """Rows of this rank that decoders have left out since the epoch began."""
        return self._loader.num_broken

    def for_keras(self) -> DataLoader[Any]:
        """Return the batches as what Keras takes batches from."""
        return DataLoader(self, batch_size=None, collate_fn=_same)

    def close(self) -> None:
        """Stop reading."""
        self._loader.close()


def _same(batch: Any) -> Any:
    return batch
