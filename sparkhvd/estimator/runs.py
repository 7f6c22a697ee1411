"""Runs in the store, seen from the driver: new, unfinished or finished, and what may go on from them.

    runs/<run_id>/             a fit: program, checkpoints, metrics, outcomes of its attempts
    runs/<run_id>/finished.json    written when the driver has got the model; the run is over
    runs/<run_id>/warm-<n>/    the n-th fit that started from the finished weights; laid out like a run

`fit` with a `run_id`: one that does not exist begins; an unfinished one goes on from its last checkpoint; a
finished one is an error, or with `warm_start` the next `warm-<n>` begins (or goes on) from its weights.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
import time
import warnings
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.estimator.data.store import Store
from sparkhvd.estimator.training.checkpoint import Checkpoints
from sparkhvd.estimator.training.fingerprint import differences

__all__ = ["Folds", "Run", "new_run_id", "open_run"]

_FINISHED = "finished.json"
_FINGERPRINT = "fingerprint.json"
_SEED = "seed.json"


@dataclass(frozen=True)
class Run:
    """One run in the store.

    Attributes:
        store: where it is.
        run_dir: its folder, relative to the store.
        start_from: file with the weights that it starts from, relative to the store; "" for the model's own.
    """

    store: Store
    run_dir: str
    start_from: str = ""

    def seed(self, given: int | None) -> int:
        """The seed given; else the one that this run had before; else a new one, which the run remembers."""
        seed = given
        if seed is None:
            noted = self._read(_FINGERPRINT)
            # First where its end shows that it is whole: a number that is cut off is still a number.
            for found in (
                noted.get("random_seed") if isinstance(noted, dict) else None,
                self._read(_SEED),
            ):
                if isinstance(found, int):
                    return found
            seed = secrets.randbits(32)
        self._write(_SEED, json.dumps(seed))
        return seed

    def _read(self, name: str) -> Any:
        """What a JSON file of the run holds; None if there is none, or one that a kill has cut off."""
        try:
            return json.loads(self.store.read_bytes(f"{self.run_dir}/{name}"))
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return None

    def _write(self, name: str, text: str) -> None:
        self.store.write_bytes(f"{self.run_dir}/{name}", text.encode())

    def check(self, fingerprint: str, epochs: int) -> None:
        """Refuse to go on with other data, params, model or optimizer than the run's checkpoints have.

        Args:
            fingerprint: of this fit; the run remembers it.
            epochs: that this fit asks for.

        Raises:
            InvalidArgumentError: they differ; the message lists how.
        """
        if self.start_from:
            self._check_start(fingerprint)
        done = Checkpoints(self.store, self.run_dir).latest_position()
        before = self._read(_FINGERPRINT)
        if done != (0, 0) and isinstance(before, dict):  # else the ranks find what differs
            problem = differences(json.dumps(before), fingerprint)
            if not problem and done > (epochs, 0):
                problem = f"it has {done[0]} epochs, and epochs is {epochs}"
            if problem:
                raise InvalidArgumentError(
                    f"{self.store.full_url(self.run_dir)} holds a checkpoint of another run: {problem}. Give "
                    "another run_id, or the same model, data and params."
                )
        self._write(_FINGERPRINT, fingerprint)

    def warn_of_other_data(self) -> None:
        """Warn that the data of this fit are not those of the run's checkpoints, if it has one to go on from."""
        done = Checkpoints(self.store, self.run_dir).latest_position()
        if done != (0, 0):
            warnings.warn(
                f"{self.store.full_url(self.run_dir)} goes on after epoch {done[0]} with data that may differ from those before: the "
                "DataFrame has rand(), the clock or the like in its plan, and Spark has computed it anew. Write it to a table first "
                "and fit that.",
                stacklevel=2,
            )

    def _check_start(self, fingerprint: str) -> None:
        """Refuse to start from the weights of another model."""
        before = Run(self.store, self.start_from.partition("/checkpoints/")[0])._read(_FINGERPRINT)
        if not isinstance(before, dict) or "model" not in before:
            return  # it is gone or cut off: the ranks find what does not fit
        models = [json.dumps({"model": f["model"]}) for f in (before, json.loads(fingerprint))]
        if problem := differences(*models):
            raise InvalidArgumentError(
                f"warm_start: the weights of {self.store.full_url(self.start_from)} do not fit: {problem}. Give the "
                "same model, or another run_id."
            )

    def finish(self, epoch: int) -> None:
        """Note that the driver has the model: the weights after `epoch` epochs."""
        self._write(_FINISHED, json.dumps({"epoch": epoch}))

    def finished_weights(self) -> str:
        """The file with the weights of a finished run, relative to the store; "" if it has not finished."""
        finished = self._read(_FINISHED)
        if not isinstance(finished, dict):
            return ""
        return Checkpoints(self.store, self.run_dir).path(finished["epoch"])


def new_run_id(uid: str) -> str:
    """A name that no other fit has."""
    return f"{uid}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"


class Folds:
    """Names the fits of several `fitMultiple` with one run_id: a CrossValidator calls it once per fold."""

    def __init__(self) -> None:
        """No fold is known yet."""
        self._lock = threading.Lock()
        self._seen: dict[str, list[Hashable]] = {}

    def name(self, run_id: str, data: Hashable, index: int) -> str:
        """The run id of a param map: mine-0, mine-1; of the second fold mine-fold2-0, mine-fold2-1.

        Args:
            run_id: that the estimator or the param map has.
            data: equal for equal data; equal data are one fold.
            index: of the param map.
        """
        with self._lock:
            seen = self._seen.setdefault(run_id, [])
            if data not in seen:
                seen.append(data)
            number = seen.index(data) + 1
        return f"{run_id}-fold{number}-{index}" if number > 1 else f"{run_id}-{index}"


def open_run(store: Store, run_id: str, *, warm_start: bool) -> Run:
    """The run to begin or to go on with.

    Raises:
        InvalidArgumentError: `run_id` is no name of a folder, or the run has finished and `warm_start` is False.
    """
    if not re.fullmatch(r"[A-Za-z0-9._-]*[A-Za-z0-9_-][A-Za-z0-9._-]*", run_id):
        raise InvalidArgumentError(
            f"run_id is {run_id!r}; it names a folder and may hold letters, digits, '.', '_' and '-'."
        )
    run = Run(store, f"runs/{run_id}")
    number = 0
    while weights := run.finished_weights():
        if not warm_start:
            raise InvalidArgumentError(
                f"run_id is {run_id!r}, and that run has finished: {store.full_url(f'runs/{run_id}')}. Give another "
                "run_id, or warm_start=True to train `epochs` more epochs from its weights."
            )
        number += 1
        run = Run(store, f"runs/{run_id}/warm-{number}", start_from=weights)
    return run
