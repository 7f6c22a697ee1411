"""Load a saved model without Spark, from a folder on this host or another file system.

This process opens the file system itself. This module does not import pyspark, because a prediction service may not
have it.
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

# Class of a saved model -> values that differ from the defaults of `PredictOptions`; `explicit` lists Params that count
# as set.
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
# Limit on the bytes of the metadata line, which holds the history of the training and dicts used as decoders.
_MAX_METADATA_BYTES = 1 << 30


def load_local(path: str | os.PathLike[str] | Store, *, trust: bool = False) -> LocalModel:
    """Load a saved model to predict in this process, without Spark or pyspark.

        model = sparkhvd.load_local("/models/price")
        model.predict({"x": [1.0, 2.0], "a": [3, 4]})["y__output"]  # (2,) float64

    Args:
        path: path that was given to `TorchModel.save`, or the folder of a pipeline's stage, or of a pipeline with only
            this stage: a path on this host, relative or absolute, or a URL. Give a `Store` at that path for storage
                options.
        trust: True lets the file run code. Required for modules with classes outside `torch.nn`, for functions, and
            with torch before 2.10. `with sparkhvd.trust():` has the same effect.

    Raises:
        InvalidArgumentError: there is no saved model, or it has another format or class.
        UntrustedError: the file holds code and is not trusted.
        StoreError: the files cannot be read.
    """
    store = path if isinstance(path, Store) else Store(_absolute(os.fspath(path)))
    shown = store.url if isinstance(path, Store) else os.fspath(path)
    metadata = _metadata(store, shown)
    name = present_name(str(metadata.get("class")))
    if name == _PIPELINE:
        stages = store.list("stages")
        if len(stages) == 1:
            return load_local(store.below(stages[0]), trust=trust)
        models = [stage for stage in stages if _class_of(store.below(stage), shown) in CLASSES]
        listed = " or ".join(repr(f"{shown.rstrip('/')}/{stage}") for stage in models or stages)
        raise InvalidArgumentError(
            f"load_local({shown!r}): this is a pipeline of {len(stages)} stages, but Spark's stages run only in Spark. Give the folder of "
            f"the model, {listed}, and predict on data that the earlier stages have transformed."
        )
    content = metadata.get(KEY)
    if name not in CLASSES or not isinstance(content, dict):
        raise InvalidArgumentError(
            f"load_local({shown!r}): this is a {name}, but only models of sparkhvd's own classes predict without Spark: "
            f"{', '.join(each.rpartition('.')[2] for each in list(CLASSES)[:4])}. Give the folder of such a model."
        )
    decoder = _LocalDecoder(store, shown, trusted=trust)
    with decoder.reading(KEY):
        check_format(shown, content)
        # The loss is left out: it may need trust, and predictions do not use it.
        fitted = decode_fitted({n: v for n, v in content.items() if n != "loss"}, decoder)
        saved = {n: v for n, v in content["params"].items() if n in _OPTIONS}
    options = {n: decoder.decode(n, value) for n, value in saved.items()}
    values = {**CLASSES[name], **options}
    values["explicit"] = frozenset({*saved, *CLASSES[name].get("explicit", ())})
    with decoder.reading("params"):
        return LocalModel(fitted, PredictOptions(**values))


# Params to load. Without a store, because only a transform on Spark uses it, to share large weights.
_OPTIONS = {each.name for each in fields(PredictOptions)} - {"store", "explicit"}


def _absolute(path: str) -> str:
    is_url = re.match(r"[A-Za-z][A-Za-z0-9+.-]*:/", path)
    return path if is_url else os.path.abspath(path)


def _metadata(store: Store, shown: str) -> dict[str, Any]:
    """Read the metadata line of a saved directory.

    Raises:
        InvalidArgumentError: the line is missing or malformed.
    """
    if not store.list("metadata"):
        raise InvalidArgumentError(
            f"load_local({shown!r}): this process finds no saved model there. Give the folder that save() has written. Without Spark, a "
            "path refers to this host; for another file system give a URL, such as 's3://bucket/folder'."
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


def _class_of(store: Store, shown: str) -> str:
    return present_name(str(_metadata(store, shown).get("class")))


def _only_file(store: Store, folder: str) -> str:
    # Skip files that Spark itself does not read: _SUCCESS and checksums.
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
