"""State of a fit between epochs, in the store: what a fit with the same `run_id` goes on from."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import torch

from sparkhvd.data.store.default import is_temporary_store, keep_temporary_store
from sparkhvd.data.store.store import Store
from sparkhvd.errors import InvalidArgumentError, SparkhvdError
from sparkhvd.training.modules import weights

__all__ = ["Progress"]

_RECORDS = "records"


@dataclass(frozen=True)
class Progress:
    """File of a run, written by rank 0.

    Attributes:
        store: that all executors see.
        run_id: name of the run.
    """

    store: Store
    run_id: str

    @classmethod
    def of(cls, store: Store, run_dir: str) -> Progress:
        """Return that of a run's folder."""
        return cls(store, run_dir.removeprefix("keras_runs/"))

    @property
    def path(self) -> str:
        """The file in the store."""
        return f"keras_runs/{self.run_id}/state"

    def save(self, model: Any, records: list[dict[str, float]]) -> None:
        """Write the variables of the model and of its optimizer, behind as many epochs as there are records."""
        tensors = {str(number): each.detach() for number, each in enumerate(_values(model))}
        text = bytearray(json.dumps(records).encode())
        buffer = io.BytesIO()
        weights.dump({**tensors, _RECORDS: torch.frombuffer(text, dtype=torch.uint8)}, buffer)
        self.store.write_bytes(self.path, buffer.getvalue())

    def num_epochs(self) -> int:
        """Return the number of epochs that are done; 0 where the run is new."""
        if not self.store.exists(self.path):
            return 0
        found = weights.Weights("", self.store.read_bytes(self.path)).load()
        return len(json.loads(bytes(found[_RECORDS].tolist())))

    def explain_failure(self, error: BaseException, epochs: int) -> bool:
        """Say in a note at an error, before Python 3.11 on stderr, how the run goes on; return False if it is known to have no state.

        A temporary store with the state of a training that is over stays.
        """
        if not self.store.is_seen:
            return True
        with contextlib.suppress(OSError, SparkhvdError):  # the error itself says more
            if not (done := self.num_epochs()):
                return False
            stays = "stays"
            if is_temporary_store(self.store):
                stays = "stays while this process lives"
                if done >= epochs:
                    keep_temporary_store(self.store)
                    stays = f"stays until you delete {urlsplit(self.store.url).path}"
            note = (
                f"The state after epoch {done} of {epochs} {stays}: a fit with run_id={self.run_id!r} and store={self.store.url!r} goes on "
                "from there."
            )
            if hasattr(error, "add_note"):
                error.add_note(note)
            else:
                sys.stderr.write(f"sparkhvd: {note}\n")
        return True

    def restore(self, model: Any) -> list[dict[str, float]]:
        """Give the model the state of the run; return the records of its epochs, none where the run is new.

        Raises:
            InvalidArgumentError: the run is one of another model.
        """
        if not self.store.exists(self.path):
            return []
        found = weights.Weights("", self.store.read_bytes(self.path)).load()
        text = found.pop(_RECORDS)
        values = _values(model)
        if [each.shape for each in found.values()] != [each.shape for each in values]:
            raise InvalidArgumentError(
                f"KerasEstimator: run_id={self.run_id!r} is a run of another model or optimizer: {len(found)} variables, and this one has "
                f"{len(values)}, or their shapes differ. Give another run_id."
            )
        with torch.no_grad():
            for value, each in zip(values, found.values(), strict=True):
                value.copy_(each)
        records: list[dict[str, float]] = json.loads(bytes(text.tolist()))
        return records


def _values(model: Any) -> list[torch.Tensor]:
    return [each.value for each in (*model.variables, *model.optimizer.variables)]
