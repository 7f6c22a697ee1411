"""Make the model of a run in the store from its description and a checkpoint's weights.

    runs/<run_id>/model.json    columns, links and Params of the model, and its module without weights; code as pickles

The fit writes the description before the ranks start, so that an interrupted run has it, too. It holds code only for
classes or functions without a JSON name, and then needs trust like a saved model.
"""

from __future__ import annotations

import base64
import re
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

from sparkhvd.data.store.locks import dump_sealed, load_sealed
from sparkhvd.data.store.store import Store
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.estimator.fitting.recorder import with_origin
from sparkhvd.estimator.fitting.runs import MODEL_NAME, Finished, Run, check_run_id, position_text
from sparkhvd.estimator.params.base import TorchParams
from sparkhvd.estimator.saving.encoding import (
    FORMAT_VERSION,
    Archive,
    Decoder,
    check_format,
    decode_fitted,
)
from sparkhvd.estimator.saving.persistence import encode_model
from sparkhvd.training.checkpoints.checkpoint import Checkpoint, Position
from sparkhvd.training.checkpoints.files import Checkpoints
from sparkhvd.training.checkpoints.resume import finish
from sparkhvd.training.loss_state import LossState

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


_WARM = re.compile(r"/warm-(\d+)$")

M = TypeVar("M", bound=TorchParams)


def store_run_model(store: Store, run_dir: str, model: TorchParams, epochs: int) -> None:
    """Write the description of a run's model, without its weights and its store.

    Args:
        store: store of the run.
        run_dir: folder of the run.
        model: `TorchModel` before the training.
        epochs: number of epochs of the run.
    """
    archive = Archive()
    content = encode_model(model, archive)
    content["params"].pop("store", None)
    code = {}
    for name, value in archive.code.items():
        try:
            pickled = archive.pickled(value)
        except Exception:  # noqa: BLE001 - ranks do not use the value, such as output_fn, so the fit needs no pickle
            continue
        code[name] = base64.b64encode(pickled).decode()
    values = {
        "format_version": FORMAT_VERSION,
        "uid": model.uid,
        "epochs": epochs,
        "model": content,
        "code": code,
    }
    store.write_bytes(f"{run_dir}/{MODEL_NAME}", dump_sealed(values))


def load_run_model(
    cls: type[M], store: Store, run_id: str, *, trusted: bool, spark: SparkSession | None
) -> M:
    """Make the model of a run, or of its last continuation with `warm_start`.

    Args:
        cls: `TorchModel`.
        store: store of the run, as this process reaches it.
        run_id: name of the run.
        trusted: True if the caller trusts code of the run.
        spark: session whose conf may name trusted path prefixes, or None.

    Raises:
        InvalidArgumentError: there is no such run, it has no checkpoint, or a file is damaged or missing.
        UntrustedError: the run holds code and is not trusted.
    """
    run = _last_run(store, run_id)
    url = store.full_url(run.run_dir)
    values = _description(store, run.run_dir)
    decoder = _RunDecoder(url, spark, trusted=trusted, run=run, code=values["code"])
    instance = cls()
    instance._resetUid(values["uid"])
    with decoder.reading(MODEL_NAME):
        fitted = decode_fitted(values["model"], decoder)
    for name, value in values["model"]["params"].items():
        if instance.hasParam(name):
            instance._set(**{name: decoder.decode(name, value)})
    state, finished = decoder.result.model, decoder.finished
    # Such values come from get_extra_state.
    if any(not isinstance(value, Tensor) for value in state.values()):
        fitted.module.load_state_dict(state)
    if fitted.loss is not None:
        losses = fitted.loss if isinstance(fitted.loss, list) else [fitted.loss]
        LossState(losses).load_state_dict(decoder.result.others, f"The state in {url} does")
        finish(fitted.module, decoder.result, losses)
    else:
        finish(fitted.module, decoder.result)
    fitted = replace(fitted, history=with_origin(decoder.history, fitted.data))
    if finished is None:
        warnings.warn(
            f"The run {run_id!r} in {store.url} has not finished: the model has the weights "
            f"{position_text(decoder.position, values['epochs'])}.",
            stacklevel=3,
        )
    else:
        widths = finished.widths or fitted.widths
        fitted = replace(fitted, widths=widths, timings=finished.timings)
    instance._fitted = fitted  # an attribute of TorchModel, which this module cannot import
    instance._set(store=store)
    return instance


class _RunDecoder(Decoder):
    """Decoder of a run's model. It loads the weights of a checkpoint on first use."""

    def __init__(
        self,
        url: str,
        spark: SparkSession | None,
        *,
        trusted: bool,
        run: Run,
        code: dict[str, str],
    ) -> None:
        super().__init__(url, spark, trusted=trusted)
        self.finished: Finished | None = run.finished()
        self.position: Position = (0, 0)
        self.history: list[dict[str, Any]] = []
        self.result = Checkpoint(0, {}, {}, None, [], "")
        self._checkpoints = Checkpoints(run.store, run.run_dir)
        self._pickles = code

    def _read_tensors(self) -> dict[str, Tensor]:
        if self.finished is not None:
            self.position = (self.finished.epoch, 0)
            self.history = self._records()
            path = self._checkpoints.path(self.finished.epoch)
            try:
                checkpoint = self._checkpoints.load_start(path)
            except FileNotFoundError:
                raise InvalidArgumentError(
                    f"{self.path} has no {path.rpartition('/')[2]}, the checkpoint with the weights of its model: the file was deleted. "
                    "Restore it from a copy, or fit again with another run_id."
                ) from None
        else:
            newest = self._checkpoints.newest_whole()
            if newest is None:
                raise InvalidArgumentError(
                    f"{self.path} has no complete checkpoint: its fit was interrupted before the first checkpoint was written, or all "
                    "checkpoints are damaged. Run a fit with this run_id, which writes a checkpoint."
                )
            checkpoint = newest
            self.position = checkpoint.position
            self.history = checkpoint.history
        self.result = checkpoint.result
        tensors = self.result.model.items()
        return {name: value for name, value in tensors if isinstance(value, Tensor)}

    def _records(self) -> list[dict[str, Any]]:
        try:
            return self._checkpoints.history()
        except ValueError as e:
            warnings.warn(
                f"The metrics.jsonl of {self.path} is damaged ({e}), so the model has its weights but no history.",
                stacklevel=4,
            )
            return []

    def _read_code(self, what: str) -> dict[str, bytes]:
        return {name: base64.b64decode(text) for name, text in self._pickles.items()}

    def _from_code(self, name: str, what: str) -> Any:
        if name not in self._pickles:
            raise InvalidArgumentError(
                f"{self.path} does not hold {name}, a {what}, because the fit could not pickle it. Save the model that the fit "
                "returns, with a function that can be pickled."
            )
        return super()._from_code(name, what)


def _last_run(store: Store, run_id: str) -> Run:
    """Find the run's newest continuation with a checkpoint, else the run itself.

    Raises:
        InvalidArgumentError: the store has no such run.
    """
    run_dir = f"runs/{check_run_id(run_id)}"
    parts = store.list(run_dir)
    if not parts:
        known = [path.rpartition("/")[2] for path in store.list("runs")]
        raise InvalidArgumentError(
            f"There is no run {run_id!r} in {store.url}. It has {', '.join(map(repr, known[:20])) or 'none'}"
            f"{f', and {len(known) - 20} more' if len(known) > 20 else ''}."
        )
    numbers = sorted((int(m[1]) for part in parts if (m := _WARM.search(part))), reverse=True)
    for number in numbers:
        run = Run(store, f"{run_dir}/warm-{number}")
        if Checkpoints(store, run.run_dir).latest_position() != (0, 0):
            return run
    return Run(store, run_dir)


def _description(store: Store, run_dir: str) -> dict[str, Any]:
    path = f"{run_dir}/{MODEL_NAME}"
    url = store.full_url(path)
    try:
        values = load_sealed(store.read_bytes(path))
    except (FileNotFoundError, NotADirectoryError):
        raise InvalidArgumentError(
            f"{url} does not exist: the fit ended before its ranks started, or it succeeded without keep_checkpoints and only left a report, or an "
            "older sparkhvd, which does not write the file, ran it. Fit "
            "with this run_id to resume from a checkpoint. If the run has finished, only its folder checkpoints/ has the weights."
        ) from None
    if values is None:
        raise InvalidArgumentError(
            f"{url} is damaged: its content has changed since it was written. Restore it from a copy. If the run has not finished, a fit "
            "with its run_id writes the file again."
        )
    check_format(url, values)
    return values
