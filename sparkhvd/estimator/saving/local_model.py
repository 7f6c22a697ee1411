"""Load a saved model without Spark, from a folder of this host or of a file system that this process opens itself.

Imports no pyspark, which a service need not have.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from sparkhvd._moved import present_name
from sparkhvd.data.store.store import Store
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.estimator.params.generated import PredictOptions
from sparkhvd.estimator.saving.encoding import KEY, Decoder, check_format, decode_fitted
from sparkhvd.estimator.transform.local import LocalModel
from sparkhvd.training.modules import weights
from sparkhvd.wire import read_json

# Values of the classes of saved models that differ from those of `PredictOptions`; `explicit` are Params that count as set.
_OUTPUTS_ALONE = {"predictionCol": "", "probabilityCol": "", "rawPredictionCol": ""}
CLASSES: Mapping[str, Mapping[str, Any]] = {
    "sparkhvd.estimator.model.TorchModel": {},
    "sparkhvd.estimator.predictors.TorchClassificationModel": {
        "outputCols": [""],
        "explicit": frozenset(_OUTPUTS_ALONE),
    },
    "sparkhvd.estimator.predictors.TorchRegressionModel": {
        "outputCols": [""],
        "explicit": frozenset({"predictionCol"}),
    },
    "sparkhvd.keras.model.KerasModel": {},
    "sparkhvd.horovod.spark.torch.estimator.TorchModel": _OUTPUTS_ALONE,
    "sparkhvd.horovod.spark.lightning.estimator.TorchModel": _OUTPUTS_ALONE,
}
_PIPELINE = "pyspark.ml.pipeline.PipelineModel"
# Limit of the metadata line, which holds the history of the training and dicts of decoders.
_MAX_METADATA_BYTES = 1 << 30


def load_local(path: str | os.PathLike[str] | Store, *, trust: bool = False) -> LocalModel:
    """Load a saved model to predict in this process, without Spark: pyspark need not be installed.

        model = sparkhvd.load_local("/models/price")
        model.predict({"x": [1.0, 2.0], "a": [3, 4]})["y__output"]  # (2,) float64

    Args:
        path: as given to `TorchModel.save`, or the folder of a pipeline's stage, or of a pipeline with this one stage; a path of
            this host, relative or absolute, or a URL. A `Store` of it may have storage options.
        trust: the file may run code. Required for modules with classes outside `torch.nn`, for functions, and with torch before
            2.10. `with sparkhvd.trust():` is the same.

    Raises:
        InvalidArgumentError: there is no saved model, or it has another format or class.
        UntrustedError: the file holds code and is not trusted.
        StoreError: it cannot be read.
    """
    store = path if isinstance(path, Store) else Store(_absolute(os.fspath(path)))
    shown = store.url if isinstance(path, Store) else os.fspath(path)
    metadata = _metadata(store, shown)
    name = present_name(str(metadata.get("class")))
    if name == _PIPELINE:
        stages = store.list("stages")
        if len(stages) == 1:
            return load_local(store.below(stages[0]), trust=trust)
        listed = ", ".join(repr(f"{shown.rstrip('/')}/{stage}") for stage in stages)
        raise InvalidArgumentError(
            f"load_local({shown!r}): this is a pipeline of {len(stages)} stages, and those of Spark run in Spark alone. Give the folder of "
            f"the model, and data as the stages before it make them: {listed}."
        )
    content = metadata.get(KEY)
    if name not in CLASSES or not isinstance(content, dict):
        raise InvalidArgumentError(
            f"load_local({shown!r}): this is a {name}; only models of sparkhvd's own classes predict without Spark: "
            f"{', '.join(each.rpartition('.')[2] for each in list(CLASSES)[:4])}. Give the folder of one."
        )
    decoder = _LocalDecoder(store, shown, trusted=trust)
    with decoder.reading(KEY):
        check_format(shown, content)
        # A prediction needs no loss, which may need trust.
        fitted = decode_fitted({n: v for n, v in content.items() if n != "loss"}, decoder)
        saved = {n: v for n, v in content["params"].items() if n in _OPTIONS}
    options = {n: decoder.decode(n, value) for n, value in saved.items()}
    values = {**CLASSES[name], **options}
    values["explicit"] = frozenset({*saved, *CLASSES[name].get("explicit", ())})
    with decoder.reading("params"):
        return LocalModel(fitted, PredictOptions(**values))


# A store is where a transform shares large weights.
_OPTIONS = {each.name for each in fields(PredictOptions)} - {"store", "explicit"}


def _absolute(path: str) -> str:
    is_url = re.match(r"[A-Za-z][A-Za-z0-9+.-]*:/", path)
    return path if is_url else os.path.abspath(path)


def _metadata(store: Store, shown: str) -> dict[str, Any]:
    """Read the metadata line of a saved directory.

    Raises:
        InvalidArgumentError: it is missing, or is no such line.
    """
    if not store.list("metadata"):
        raise InvalidArgumentError(
            f"load_local({shown!r}): there is no saved model here for this process. Give the folder that save() has written; without Spark "
            "a path is one of this host, and another file system needs its URL, such as 's3://bucket/folder'."
        )
    file = _only_file(store, "metadata")
    if (size := store.num_bytes(file)) > _MAX_METADATA_BYTES:
        raise InvalidArgumentError(
            f"load_local({shown!r}): {file} has {size} bytes, more than sparkhvd writes. The directory is damaged: save it again."
        )
    try:
        values = read_json(store.read_bytes(file), most_bytes=None)
    except ValueError as e:
        raise InvalidArgumentError(
            f"load_local({shown!r}): {file} is not the line that Spark writes ({e}). The directory is damaged: save it again."
        ) from e
    return values if isinstance(values, dict) else {}


def _only_file(store: Store, folder: str) -> str:
    # Without names that Spark itself does not read: _SUCCESS, checksums.
    files = [file for file in store.list(folder) if file.rpartition("/")[2][:1] not in "_."]
    if len(files) != 1:
        raise InvalidArgumentError(
            f"{store.full_url(folder)!r} holds {len(files)} files; one is expected."
        )
    return files[0]


class _LocalDecoder(Decoder):
    """Decoder that reads files through a store."""

    def __init__(self, store: Store, shown: str, *, trusted: bool) -> None:
        super().__init__(shown, None, trusted=trusted)
        self._store = store

    def _file(self, name: str) -> contextlib.AbstractContextManager[str]:
        return weights.local_copy(self._store, _only_file(self._store, name))
