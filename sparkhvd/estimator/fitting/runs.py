"""Runs in the store: how the driver starts, resumes, finishes and deletes them.

    runs/<run_id>/                 a fit: program, checkpoints, metrics, outcomes of its attempts
    runs/<run_id>/model.json       description of its model, see `saving/run_model.py`
    runs/<run_id>/finished.json    marks the run as finished: the driver has received the model
    runs/<run_id>/holder.json      lock of a running fit, with its process, see `data/store/locks.py`
    runs/<run_id>/warm-<n>/        the n-th fit that started from the finished weights, with the same files as a run

`fit` with a `run_id` starts a new run, or resumes an unfinished run from its last checkpoint. If the run is finished,
`fit` raises an error, or with `warm_start` starts (or resumes) the next `warm-<n>` from the finished weights.
A run without a `run_id` is deleted after the fit, except its report and timeline, unless `keep_checkpoints` is given.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import sys
import threading
import time
import warnings
from collections.abc import Collection, Hashable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import urlsplit

from sparkhvd.data.store.locks import dump_sealed, load_sealed
from sparkhvd.data.store.store import FINISHED_NAME, TIMELINE_NAME, Store
from sparkhvd.data.store.temporary import is_temporary_store, keep_temporary_store
from sparkhvd.errors import InvalidArgumentError, SparkhvdError, StoreError
from sparkhvd.training.checkpoints.checkpoint import Position
from sparkhvd.training.checkpoints.files import Checkpoints
from sparkhvd.training.checkpoints.resume import differences
from sparkhvd.wire import read_json, rebuild

MODEL_NAME = "model.json"
_FINGERPRINT = "fingerprint.json"
_SEED = "seed.json"


@dataclass(frozen=True)
class Finished:
    """Facts about a finished run. The driver has received its model.

    Attributes:
        epoch: epoch of the model's weights.
        widths: elements per row of each output; () if unknown.
        timings: seconds of the phases of the last fit.
    """

    epoch: int
    widths: tuple[int, ...] = ()
    timings: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """Run kept in the store.

    Attributes:
        store: store of the run.
        run_dir: folder of the run, relative to the store.
        start_from: file with the initial weights, relative to the store; "" for the weights of the given model.
    """

    store: Store
    run_dir: str
    start_from: str = ""

    def seed(self, given: int | None) -> int:
        """Choose the given seed, the run's stored seed or a new seed, and store it in the run."""
        seed = given
        if seed is None:
            for name in (_FINGERPRINT, _SEED):
                values = self._read(name)
                if values is not None and isinstance(values.get("random_seed"), int):
                    return int(values["random_seed"])
            seed = secrets.randbits(32)
        self._write(_SEED, {"random_seed": seed})
        return seed

    def _read(self, name: str) -> dict[str, Any] | None:
        """Read a JSON file of the run, or return None if it is missing or damaged."""
        try:
            return load_sealed(self.store.read_bytes(f"{self.run_dir}/{name}"))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _write(self, name: str, values: dict[str, object]) -> None:
        self.store.write_bytes(f"{self.run_dir}/{name}", dump_sealed(values))

    def check(self, fingerprint: str, epochs: int) -> None:
        """Check that data, Params, model and optimizer match the run's checkpoints.

        Args:
            fingerprint: fingerprint of this fit, which is stored in the run.
            epochs: number of epochs that this fit requests.

        Raises:
            InvalidArgumentError: they differ; the message lists the differences.
        """
        if self.start_from:
            self._check_start(fingerprint)
        done = self.position()
        before = self._read(_FINGERPRINT)
        # Without the earlier fingerprint, the ranks find differences.
        if done != (0, 0) and before is not None:
            problem = differences(json.dumps(before), fingerprint)
            if not problem and done > (epochs, 0):
                problem = f"it has {done[0]} epochs, but epochs is {epochs}"
            if problem:
                raise InvalidArgumentError(
                    f"{self.store.full_url(self.run_dir)} holds a checkpoint of another run: {problem}. Give "
                    "another run_id, or the same model, data and params."
                )
        self._write(_FINGERPRINT, read_json(fingerprint))

    def warn_of_other_data(self) -> None:
        """Warn if this fit resumes from a checkpoint with possibly different data."""
        done = self.position()
        if done != (0, 0):
            warnings.warn(
                f"{self.store.full_url(self.run_dir)} resumes after epoch {done[0]} with data that may differ from the earlier data: the "
                "DataFrame's plan calls rand(), reads the clock or the like, and Spark has computed it again. Write the DataFrame to "
                "a table first, and fit on the table.",
                stacklevel=2,
            )

    def _check_start(self, fingerprint: str) -> None:
        """Reject initial weights of another model."""
        before = Run(self.store, self.start_from.partition("/checkpoints/")[0])._read(_FINGERPRINT)
        if before is None or "model" not in before:
            return  # the file is missing or damaged, so the ranks check whether the weights fit
        models = [json.dumps({"model": f["model"]}) for f in (before, read_json(fingerprint))]
        if problem := differences(*models):
            raise InvalidArgumentError(
                f"warm_start: the weights of {self.store.full_url(self.start_from)} do not fit: {problem}. Give the "
                "same model, or another run_id."
            )

    def finish(self, finished: Finished, num_checkpoints: int) -> None:
        """Record that the driver has the model, and delete the other checkpoints.

        Args:
            finished: facts about the finished run; the checkpoint of its epoch is kept.
            num_checkpoints: number of last epochs whose checkpoints are kept, at least 1.
        """
        self._write(FINISHED_NAME, asdict(finished))
        with _warning_of_orphans():
            Checkpoints(self.store, self.run_dir).finish(finished.epoch, num_checkpoints)

    def finished(self) -> Finished | None:
        """Read the facts about a finished run, or return None if the run is not finished.

        Raises:
            InvalidArgumentError: the file that marks the run as finished is damaged.
        """
        values = self._read(FINISHED_NAME)
        if values is not None:
            with contextlib.suppress(ValueError):
                return rebuild(Finished, values, is_strict=False)
        path = f"{self.run_dir}/{FINISHED_NAME}"
        if self.store.exists(path):
            raise InvalidArgumentError(
                f"{self.store.full_url(path)} is damaged: its content has changed since it was written. Delete it: a fit with this "
                "run_id and the same params then returns the finished model again, without training."
            )
        return None

    def delete(self, keeps: Collection[str] = ()) -> None:
        """Delete the run except the files named in `keeps`.

        Errors and Ctrl-C become warnings, so that the model is not lost.
        """
        with _warning_of_orphans():
            paths = self.store.list(self.run_dir)
            kept = [path for path in paths if path.rpartition("/")[2] in keeps]
            if not kept:
                self.store.delete(self.run_dir)
                return
            for path in paths:
                if path not in kept:
                    self.store.delete(path)

    @property
    def timeline_url(self) -> str:
        """URL of the run's timeline."""
        return self.store.full_url(f"{self.run_dir}/{TIMELINE_NAME}")

    def position(self) -> Position:
        """Read the position of the newest checkpoint: (epochs, steps of the next epoch), or return (0, 0) if there is none."""
        return Checkpoints(self.store, self.run_dir).latest_position()

    def progress(self, epochs: int) -> str:
        """Describe the newest checkpoint in words."""
        position = self.position()
        if position == (0, 0):
            return "the beginning, without a checkpoint"
        return f"the checkpoint {position_text(position, epochs)}"

    def announce(self, epochs: int) -> None:
        """Print the run, its store and its start position."""
        line = f"run {self.name!r} in {self.store.url}"
        if is_temporary_store(self.store):
            line += ", which is deleted when this process ends,"
        if (position := self.position()) != (0, 0):
            line += f" resumes {position_text(position, epochs)}"
        elif self.start_from:
            line += f" starts from the weights of {self.start_from}"
        sys.stdout.write(line.rstrip(",") + "\n")
        sys.stdout.flush()

    @property
    def name(self) -> str:
        """Run id, the name of the folder under `runs/`."""
        return self.run_dir.removeprefix("runs/").partition("/")[0]

    def explain_failure(
        self,
        error: BaseException,
        run_id: str | None,
        *,
        epochs: int,
        verbose: int,
        is_trained: bool = False,
    ) -> None:
        """Explain the saved weights and how to resume in a note on the error.

        After Ctrl-C, the note is also printed on stderr. A run without a `run_id` and without a checkpoint is deleted.
        A temporary store with the weights of a finished training is kept.

        Args:
            error: error that ends the fit.
            run_id: run id that the user gave, or None.
            epochs: number of epochs of the fit.
            verbose: 0 prints nothing.
            is_trained: True if the ranks have finished without an error.
        """
        is_interrupt = isinstance(error, KeyboardInterrupt)
        if not self.store.is_seen:
            return
        with contextlib.suppress(OSError, SparkhvdError):  # the error of the fit is more useful
            position = self.position()
            if position == (0, 0):
                # After an interrupt, ranks may still be writing into the run.
                if not is_interrupt and not run_id:
                    self.store.delete(self.run_dir)
                return
            note = f"The checkpoint {position_text(position, epochs)} {self._stays(is_trained or position >= (epochs, 0))}: "
            is_over = False
            # The file finished.json may be damaged or unreadable.
            with contextlib.suppress(OSError, SparkhvdError):
                is_over = self.finished() is not None
            if not is_over:
                note += f"a fit with run_id={self.name!r} and store={self.store.url!r} resumes from there. "
            trust = ", trust=True" if self._holds_code() else ""
            gives = f"TorchModel.from_run({self.store.url!r}, {self.name!r}{trust}) gives the model"
            note += f"{gives} so far." if not is_trained else f"{gives}."
            has_notes = hasattr(error, "add_note")  # True since Python 3.11
            if has_notes:
                error.add_note(note)
            elif not verbose:
                warnings.warn(note, stacklevel=2)
            if verbose and (
                is_interrupt or not has_notes
            ):  # a notebook does not show the notes of a KeyboardInterrupt
                what = "interrupted" if is_interrupt else "the fit has failed"
                sys.stderr.write(f"sparkhvd: {what}. {note}\n")
                sys.stderr.flush()

    def _holds_code(self) -> bool:
        """Check the run's description for the user's classes or functions. They need trust."""
        with contextlib.suppress(OSError, SparkhvdError):
            values = load_sealed(self.store.read_bytes(f"{self.run_dir}/{MODEL_NAME}"))
            return bool(values and values["code"])
        return False

    def _stays(self, is_trained: bool) -> str:
        """Describe how long the store stays, and keep a temporary store with finished weights."""
        if not is_temporary_store(self.store):
            return "stays"
        if not is_trained:
            return "stays while this process lives"
        keep_temporary_store(self.store)
        return f"stays until you delete {urlsplit(self.store.url).path}"

    def finished_weights(self) -> str:
        """Find the weights file of a finished run, relative to the store, or "" if unfinished.

        Raises:
            InvalidArgumentError: the file that marks the run as finished is damaged.
        """
        finished = self.finished()
        if finished is None:
            return ""
        return Checkpoints(self.store, self.run_dir).path(finished.epoch)


def position_text(position: Position, epochs: int) -> str:
    """Describe a position: "after epoch 3 of 10", "after 7 steps of epoch 4 of 10"."""
    epoch, step = position
    if step:
        return f"after {step} steps of epoch {epoch + 1} of {epochs}"
    return f"after epoch {epoch} of {epochs}"


@contextlib.contextmanager
def _warning_of_orphans() -> Iterator[None]:
    """Warn if files cannot be deleted, because the model exists and leftover files only cost disk space."""
    try:
        yield
    except StoreError as e:
        warnings.warn(f"Files of a finished run could not be deleted: {e}", stacklevel=5)
    except KeyboardInterrupt:
        warnings.warn(
            "Ctrl-C came after the model was trained, so the fit returns the model; some files of its run were not deleted.",
            stacklevel=5,
        )


def new_run_id(uid: str) -> str:
    """Make a unique run id."""
    return f"{uid}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"


def check_run_id(run_id: str) -> str:
    """Raise InvalidArgumentError unless a run id can name a folder."""
    if not re.fullmatch(r"[A-Za-z0-9._-]*[A-Za-z0-9_-][A-Za-z0-9._-]*", run_id):
        raise InvalidArgumentError(
            f"run_id is {run_id!r}; it names a folder and may hold only letters, digits, '.', '_' and '-'."
        )
    return run_id


class Folds:
    """Run ids and labels for several calls of `fitMultiple`, one per fold of a CrossValidator."""

    def __init__(self) -> None:
        """Start without folds."""
        self._lock = threading.Lock()
        self.end()

    def end(self) -> None:
        """End a search: the next one begins with its first fold. A CrossValidator ends by a fit of the best Params."""
        with self._lock:
            self._seen: dict[str, list[Hashable]] = {}
            self._num_calls = 0

    def label(self) -> str:
        """Count the calls of `fitMultiple` and return a label such as "fold 2" from the second call on, before that ""."""
        with self._lock:
            self._num_calls += 1
            return f"fold {self._num_calls}" if self._num_calls > 1 else ""

    def name(self, run_id: str, data: Hashable, index: int) -> str:
        """Make the run id of a param map, such as mine-0, or mine-fold2-0 in the second fold.

        Args:
            run_id: run id of the estimator or the param map.
            data: value that is equal for equal data; equal data are one fold.
            index: index of the param map.
        """
        with self._lock:
            seen = self._seen.setdefault(run_id, [])
            if data not in seen:
                seen.append(data)
            number = seen.index(data) + 1
        return f"{run_id}-fold{number}-{index}" if number > 1 else f"{run_id}-{index}"


def open_run(store: Store, run_id: str, *, warm_start: bool) -> Run:
    """Open the run to start or resume.

    Raises:
        InvalidArgumentError: the run has finished and `warm_start` is False.
    """
    check_run_id(run_id)
    run = Run(store, f"runs/{run_id}")
    number = 0
    while weights := run.finished_weights():
        if not warm_start:
            raise InvalidArgumentError(
                f"run_id is {run_id!r}, but this run has finished: {store.full_url(f'runs/{run_id}')}. Give another "
                "run_id, or warm_start=True to train `epochs` more epochs from its weights; TorchModel.from_run returns its model."
            )
        number += 1
        run = Run(store, f"runs/{run_id}/warm-{number}", start_from=weights)
    return run
