"""`ElasticSampler`: gives each row of an epoch to one rank, also if the ranks change during the epoch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass

import torch
from torch import Tensor

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.torch.collectives import Max, allreduce
from sparkhvd.torch.context import context


@dataclass(frozen=True)
class EpochProgress:
    """Rows recorded as done by the ranks since the last division of the rows.

    Attributes:
        counts: by rank, the number of its recorded rows, counted from the rank's first row.
        places: indices into `remaining_indices` of rows that were recorded out of order.
    """

    counts: tuple[int, ...]
    places: frozenset[int] = frozenset()


@dataclass(frozen=True)
class _Snapshot:
    """State of a sampler for `restore`. Nobody changes the objects shared with the sampler."""

    epoch: int
    before: frozenset[int]
    remaining: list[int]
    rank: int
    num_replicas: int
    marks: bytes
    agreed: EpochProgress | None


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Sampler of an epoch's remaining rows, divided among the ranks.

    When ranks join or leave, the rows are divided again. Rows recorded at a commit (`TorchState.commit`) are not
    repeated, but a lost rank's rows since the last commit are. A loader with this sampler and a batch size has equally
    many rows on every rank. For this up to size - 1 rows come twice, as with Horovod. A loader with `batches(...)` has
    every row once. Then the ranks' numbers of rows may differ by one, and `num_steps` is the number of steps on every
    rank. Record every batch after its step.

    Args:
        dataset: provides the length.
        shuffle: whether rows come in a random order, the same on every rank, different in each epoch.
        seed: seed of the random order.
        repeat: whether up to size - 1 rows come twice, so that every rank has equally many rows. None means True until
            `batches` is called.

    Attributes:
        epoch: the current epoch.
        num_replicas: number of ranks that share the rows.
        rank: this rank.
        remaining_indices: remaining rows at the last division.
        num_samples: rows of this rank.
        total_size: rows of all ranks.
    """

    def __init__(
        self,
        dataset: Sized,
        shuffle: bool = True,
        seed: int = 0,
        *,
        repeat: bool | None = None,
    ) -> None:
        if not isinstance(dataset, Sized):
            raise InvalidArgumentError(
                f"ElasticSampler: the dataset is {type(dataset).__name__}, which has no length. Give a dataset with __len__."
            )
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.remaining_indices: list[int] = []
        self.num_replicas, self.rank = 1, 0
        self._repeat = repeat is not False
        self._repeats_always = repeat is True
        self._before: frozenset[int] = frozenset()  # rows recorded before the last division
        self._marks = bytearray()  # 1 for each recorded row of this rank, else 0
        # All ranks' rows recorded between the last division and the last commit.
        self._agreed: EpochProgress | None = None
        self._share: list[int] = []
        self._places: dict[int, int] | None = None  # index of each row in `_share`
        self.reset()

    # --- Horovod's names. ---

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch. Call this after the last epoch or before the new one. The current epoch has no effect."""
        if epoch != self.epoch:
            self.epoch = epoch
            self._divide(frozenset())

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record batch number `batch_idx` of a loader with this batch size as done."""
        first = batch_idx * batch_size
        last = min(first + batch_size, len(self._share))
        if not 0 <= first <= len(self._share) or batch_size < 1:
            raise InvalidArgumentError(
                f"ElasticSampler.record_batch({batch_idx}, {batch_size}): since the rows were last divided, this rank has had only {len(self._share)} "
                "rows. Count batches from 0 in each pass over the loader."
            )
        self.mark(first, last)

    def record_indices(self, indices: Iterable[int]) -> None:
        """Record rows of this rank as done. Rows of other ranks are ignored."""
        if self._places is None:
            self._places = {row: place for place, row in enumerate(self._share)}
        for row in indices:
            if (place := self._places.get(int(row))) is not None:
                self._marks[place] = 1

    @property
    def processed_indices(self) -> set[int]:
        """The epoch's done rows, as far as this rank knows.

        These are its own rows, and other ranks' rows up to the last commit.
        """
        done = set(self._before)
        size, rows = self.num_replicas, self.remaining_indices
        if self._agreed is not None:
            for rank, count in enumerate(self._agreed.counts):
                done.update(rows[rank::size][:count])
            done.update(rows[place] for place in self._agreed.places)
        done.update(row for row, mark in zip(self._share, self._marks, strict=True) if mark)
        return done

    @property
    def processed_num(self) -> int:
        """Estimate the number of done rows of the epoch on all ranks.

        As with Horovod this assumes that every rank has done as many rows as this rank since the last commit: a
        recorded batch counts as `batch_size * num_replicas` rows, and a repeated row counts twice.
        """
        agreed = self._agreed or EpochProgress((0,) * self.num_replicas)
        counts, places = agreed.counts, agreed.places
        own = counts[self.rank] + sum(place % self.num_replicas == self.rank for place in places)
        since = max(0, self._marks.count(1) - own)
        return len(self._before) + sum(counts) + len(places) + since * self.num_replicas

    def state_dict(self) -> dict[str, object]:
        """The epoch, the processed rows and their number, for a checkpoint."""
        done = sorted(self.processed_indices)
        return {
            "epoch": self.epoch,
            "processed_indices": done,
            "processed_num": self.processed_num,
        }

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Resume with the current ranks from a `state_dict` of this class or of Horovod (`processed_num`).

        Raises:
            InvalidArgumentError: it is not a sampler's state.
        """
        epoch, rows = state_dict.get("epoch"), state_dict.get("processed_indices")
        number = state_dict.get("processed_num")
        if not isinstance(epoch, int) or (not isinstance(rows, Iterable) and number is None):
            raise InvalidArgumentError(
                f"ElasticSampler.load_state_dict: the state has the keys {sorted(map(str, state_dict))}; it must have epoch and "
                "processed_indices (or processed_num). Give what state_dict() returned."
            )
        self.epoch = epoch
        if isinstance(rows, Iterable):
            done = frozenset(map(int, rows))
        else:
            done = frozenset(self._order()[: int(str(number))])
        self._divide(done)

    def batches(self, batch_size: int) -> ElasticBatches:
        """Create batches for a loader (`batch_sampler=`), with the same number of steps on every rank.

        Raises:
            InvalidArgumentError: the size is not an integer of at least 1.
        """
        made = ElasticBatches(self, batch_size)
        if self._repeat and not self._repeats_always:
            self._repeat = False
            self.reset()
        return made

    def reset(self) -> None:
        """Divide the remaining rows among the current ranks."""
        self._divide(frozenset(self.processed_indices))

    def __iter__(self) -> Iterator[int]:
        return iter(list(self._share))

    def __len__(self) -> int:
        return len(self._share)

    # --- For `ElasticBatches` and `TorchState`. ---

    def share(self) -> list[int]:
        """The rows of this rank."""
        return list(self._share)

    def mark(self, first: int, last: int) -> None:
        """Record rows of this rank by their positions."""
        self._marks[first:last] = b"\1" * (last - first)

    def progress(self) -> tuple[int, bool]:
        """Count this rank's recorded rows, and check whether they are in order, without gaps."""
        count = self._marks.count(1)
        gap = self._marks.find(0)
        return count, gap in (-1, count)

    def marks_of_all(self) -> Tensor:
        """Mark each of the remaining rows: 1 if this rank has recorded it, else 0."""
        marks = torch.zeros(len(self.remaining_indices), dtype=torch.int32)
        own = torch.frombuffer(self._marks, dtype=torch.uint8) if self._marks else torch.empty(0)
        places = torch.arange(self.rank, len(self.remaining_indices), self.num_replicas)
        marks[places] = own[: len(places)].to(torch.int32)
        return marks

    def share_of(self, rank: int) -> int:
        """The number of rows of a rank, without repeated rows."""
        return len(range(rank, len(self.remaining_indices), self.num_replicas))

    def agree(self, progress: EpochProgress) -> None:
        """Store the recorded rows of all ranks."""
        self._agreed = progress

    def snapshot(self) -> _Snapshot:
        """The state for `restore`."""
        return _Snapshot(
            self.epoch,
            self._before,
            self.remaining_indices,
            self.rank,
            self.num_replicas,
            bytes(self._marks),
            self._agreed,
        )

    def restore(self, snapshot: _Snapshot) -> None:
        """Restore a snapshot with its division of rows. The division holds until `reset`."""
        self.epoch = snapshot.epoch
        self._before, self._agreed = snapshot.before, snapshot.agreed
        self.remaining_indices = snapshot.remaining
        self.rank, self.num_replicas = snapshot.rank, snapshot.num_replicas
        self._take_share()
        self._marks = bytearray(snapshot.marks)

    def sync(self, epoch: int) -> None:
        """Adopt rank 0's epoch and all ranks' recorded rows of that epoch. Every rank must call this."""
        done = torch.zeros(len(self.dataset), dtype=torch.uint8)
        if epoch == self.epoch:
            done[list(self.processed_indices)] = 1
        done = allreduce(done, op=Max, name="elastic.sampler")
        self.epoch = epoch
        self._divide(frozenset(torch.nonzero(done).flatten().tolist()))

    # --- Division. ---

    def _order(self) -> list[int]:
        count = len(self.dataset)
        if not self.shuffle:
            return list(range(count))
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order: list[int] = torch.randperm(count, generator=generator).tolist()
        return order

    def _divide(self, done: frozenset[int]) -> None:
        place = context().engine.topology
        self._before, self._agreed = done, None
        self.remaining_indices = [row for row in self._order() if row not in done]
        self.rank, self.num_replicas = place.rank, place.size
        self._take_share()
        self._marks = bytearray(len(self._share))

    def _take_share(self) -> None:
        rows: Sequence[int] = self.remaining_indices
        if self._repeat and rows:
            missing = -len(rows) % self.num_replicas
            rows = [*rows, *(list(rows) * missing)[:missing]]
        self._share = list(rows[self.rank :: self.num_replicas])
        self._places = None

    @property
    def num_samples(self) -> int:
        """Rows of this rank."""
        return len(self._share)

    @property
    def total_size(self) -> int:
        """Rows of all ranks."""
        left = len(self.remaining_indices)
        return left + (-left % self.num_replicas if self._repeat else 0)


class ElasticBatches(torch.utils.data.Sampler[list[int]]):
    """Divides a rank's rows from an `ElasticSampler` into batches of almost equal size.

    All ranks have the same number of steps. If the last step has rows for some ranks only, the other ranks have a batch
    less, and take part in this step without rows (`optimizer.zero_grad(); optimizer.step()`), as in

        rows = iter(loader)
        for step in range(batches.num_steps):
            optimizer.zero_grad()
            if (batch := next(rows, None)) is not None:
                loss(model(batch)).backward()
            optimizer.step()
            batches.record(step)
            state.commit()

    Args:
        sampler: provides the rows.
        batch_size: largest number of rows of a batch.
    """

    def __init__(self, sampler: ElasticSampler, batch_size: int) -> None:
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise InvalidArgumentError(
                f"ElasticSampler.batches({batch_size!r}): the batch size must be a whole number of at least 1."
            )
        self.sampler = sampler
        self.batch_size = batch_size

    @property
    def num_steps(self) -> int:
        """Number of steps on every rank: the largest number of batches of a rank."""
        return -(-self.sampler.total_size // (self.sampler.num_replicas * self.batch_size))

    def record(self, step: int) -> None:
        """Record a step as done. Steps count from 0 since the rows were last divided."""
        if not 0 <= step < self.num_steps:
            raise InvalidArgumentError(
                f"ElasticBatches.record({step}): there are only {self.num_steps} steps since the rows were last divided. Count steps "
                "from 0 in each pass over the loader."
            )
        self.sampler.mark(*self._bounds(step))

    def __iter__(self) -> Iterator[list[int]]:
        rows = self.sampler.share()
        for step in range(self.num_steps):
            first, last = self._bounds(step)
            if first < last:
                yield rows[first:last]

    def __len__(self) -> int:
        return min(self.num_steps, len(self.sampler))

    def _bounds(self, step: int) -> tuple[int, int]:
        """Compute the range of a step's rows.

        Sizes differ by at most one row, and larger steps come first.
        """
        size, extra = divmod(len(self.sampler), self.num_steps)
        first = step * size + min(step, extra)
        return first, first + size + (step < extra)
