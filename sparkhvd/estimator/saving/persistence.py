"""Save and load estimators and models, on classic Spark and on Spark Connect.

All parts of a saved directory are on the file system to which Spark resolves its path, because Spark writes and reads
them:

    metadata/     one line of JSON: class, uid, params, and for a model its columns, links and history
    weights/      one file, which torch.load(..., weights_only=True) reads: tensors by name
    code/         one file, a pickle; only for classes or functions without a JSON name. Needs trust.

Values that decide where a fit writes need trust, too: paths in an estimator's settings, and its store. Without trust an
estimator is loaded without its store, with a warning. A model is loaded without its store, too, because it uses the
store only to share large weights.

`encoding.py` encodes values, `data.store.spark_files` moves files to the path as Spark resolves it.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import pickle
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pyspark.ml.util import DefaultParamsReader, DefaultParamsWriter, MLReader, MLWriter

from sparkhvd._moved import present_name
from sparkhvd.data.store.spark_files import staging_folder, write_file
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.estimator.params.base import TorchParams
from sparkhvd.estimator.saving.encoding import (
    FORMAT_VERSION,
    KEY,
    Archive,
    Decoder,
    check_format,
    decode_fitted,
    shown_place,
)
from sparkhvd.estimator.saving.trust import TRUST_CONF, OwnFiles, is_trusted
from sparkhvd.spark import is_connect, is_dataframe, ml_context
from sparkhvd.training.loss_state import LossState
from sparkhvd.training.modules import weights
from sparkhvd.training.modules.fitted import TrainedState


@dataclass(frozen=True)
class _Encoded:
    """Encoded estimator or model.

    Attributes:
        content: entry of this package in the metadata.
        files: name of a part -> file on this host.
    """

    content: dict[str, Any]
    files: dict[str, str]


def write_metadata(folder: str, metadata: str) -> None:
    """Write a metadata line below a folder of this host in Spark's layout."""
    file = Path(folder, "metadata", "part-00000")
    file.parent.mkdir(parents=True)
    file.write_text(f"{metadata}\n", encoding="utf-8")


class _Writer(MLWriter):
    """Writer of metadata, weights and code."""

    def __init__(self, instance: TorchParams) -> None:
        super().__init__()
        self.instance = instance

    def _handleOverwrite(self, path: str) -> None:  # noqa: N802 - overrides Spark's
        if not is_connect(self.sparkSession):
            super()._handleOverwrite(path)
            return
        # The base class uses the JVM, which a Connect client does not have. The server has a helper that overwrites
        # instead.
        from pyspark.ml.util import ML_CONNECT_HELPER_ID
        from pyspark.ml.wrapper import JavaWrapper

        JavaWrapper(java_obj=ML_CONNECT_HELPER_ID)._call_java("handleOverwrite", path, True)

    def save(self, path: str) -> None:
        """Write all parts below `path`. If encoding fails, an older save stays unchanged."""
        with self._encoded(path) as encoded:
            if self.shouldOverwrite:
                self._handleOverwrite(path)
            self._write(path, encoded)

    def saveImpl(self, path: str) -> None:  # noqa: N802 - overrides Spark's
        """Write all parts below `path`. The path must not exist."""
        with self._encoded(path) as encoded:
            self._write(path, encoded)

    @contextlib.contextmanager
    def _encoded(self, path: str) -> Iterator[_Encoded]:
        """Encode all parts for `path` into files of this host."""
        archive = Archive()
        content = {"format_version": FORMAT_VERSION, **self._content(archive)}
        json.dumps(content)
        with staging_folder(self.sparkSession, path) as folder:
            files = {"weights": f"{folder}/weights"}
            with open(files["weights"], "wb") as sink:
                weights.dump(archive.tensors, sink)
            code = pickle.dumps(archive.pickles()) if archive.code else b""
            if code:
                files["code"] = f"{folder}/code"
                Path(files["code"]).write_bytes(code)
            yield _Encoded(content, files)
        if self.instance._trusts_own_files:
            OwnFiles.add(content, code)

    def save_on_this_host(self, path: str) -> None:
        """Write all parts to a new folder of this host, without Spark."""
        with self._encoded(path) as encoded:
            metadata = DefaultParamsWriter._get_metadata_to_save(*self._metadata(encoded))
            for name, file in encoded.files.items():
                os.makedirs(f"{path}/{name}")
                shutil.move(file, f"{path}/{name}/part-00000")
            write_metadata(path, metadata)

    def _write(self, path: str, encoded: _Encoded) -> None:
        bare, *rest = self._metadata(encoded)
        DefaultParamsWriter.saveMetadata(bare, path, *rest)
        for name, file in encoded.files.items():
            write_file(self.sparkSession, f"{path}/{name}", file)

    def _metadata(self, encoded: _Encoded) -> tuple[Any, Any, dict[str, Any], dict[str, Any]]:
        """Make the arguments of Spark's metadata writer: instance, context, extra metadata and map of Params."""
        # The instance has no Params, because Spark can only write plain JSON; `content` has their encoded values.
        bare = copy.copy(self.instance)
        bare._paramMap, bare._defaultParamMap = {}, {}
        return bare, ml_context(self.sparkSession), {KEY: encoded.content}, {}

    def _content(self, archive: Archive) -> dict[str, Any]:
        """Encode the instance as JSON data. The module is first, because other values refer to its tensors."""
        values = {p.name: v for p, v in self.instance._paramMap.items()}
        names = sorted(values, key=lambda name: (name != "model", name))
        return {"params": {name: archive.encode(name, values[name]) for name in names}}


class EstimatorWriter(_Writer):
    """Writer of an estimator."""

    def _content(self, archive: Archive) -> dict[str, Any]:
        if is_dataframe(self.instance._get("validation")):
            raise InvalidArgumentError(
                "validation is a DataFrame, which cannot be saved. Save a copy without it, "
                "estimator.copy().setValidation(None), and give the DataFrame again in fit(df, {estimator.validation: df2})."
            )
        return super()._content(archive)


class ModelWriter(_Writer):
    """Writer of a model."""

    def _content(self, archive: Archive) -> dict[str, Any]:
        fitted = self.instance._require_fitted()
        # Without a prefix, so that module.load_state_dict(torch.load(file, weights_only=True)) works.
        archive.prefixes["model"] = ""
        return {
            "module": archive.encode("model", fitted.module),
            "columns": [asdict(c) for c in fitted.columns],
            "labels": list(fitted.labels),
            "inputs": [asdict(a) for a in fitted.inputs.arguments],
            "links": list(fitted.links),
            "widths": list(fitted.widths),
            "history": fitted.history,
            "timings": dict(fitted.timings),
            "data": dict(fitted.data),
            **({"run_key": fitted.run_key} if fitted.run_key else {}),
            "run_id": fitted.run_id,
            **_loss_of(fitted, archive),
            **super()._content(archive),
        }


def _loss_of(fitted: TrainedState, archive: Archive) -> dict[str, Any]:
    """Encode the loss of a model if the loss has a state, such as parameters, or return {} for other losses."""
    losses = fitted.loss if isinstance(fitted.loss, (list, tuple)) else [fitted.loss]
    return {"loss": archive.encode("loss", fitted.loss)} if LossState(losses) else {}


class _Reader(MLReader[Any]):
    """Reader of directories from `_Writer`."""

    def __init__(self, cls: type[Any], *, trusted: bool = False) -> None:
        super().__init__()
        self.cls = cls
        self.trusted = trusted

    def load(self, path: str) -> Any:
        """Load the instance saved at `path`.

        Raises:
            InvalidArgumentError: the path holds another class, or another format.
            UntrustedError: it holds code and is not trusted.
        """
        spark = self.sparkSession
        metadata = DefaultParamsReader.loadMetadata(path, ml_context(spark))
        expected = f"{self.cls.__module__}.{self.cls.__name__}"
        content = metadata.get(KEY)
        if present_name(metadata["class"]) != expected or content is None:
            raise InvalidArgumentError(
                f"{path!r} holds a {metadata['class']}, not a {expected}. Load it with its own class."
            )
        check_format(path, content)
        instance = self.cls()
        instance._resetUid(metadata["uid"])
        own_code = OwnFiles.digests_of_code(content) if self.cls._trusts_own_files else frozenset()
        decoder = Decoder(
            path,
            spark,
            trusted=self.trusted,
            own_code=own_code,
            store_class=self.cls._store_class,
        )
        with decoder.reading("sparkhvd"):
            self._restore(instance, content, decoder)
        for name, value in content["params"].items():
            is_wanted = bool(own_code) or self._is_wanted(name, value, path)
            if instance.hasParam(name) and is_wanted:
                instance._set(**{name: decoder.decode(name, value)})
        return instance

    def _is_wanted(self, name: str, value: object, path: str) -> bool:
        """Whether a Param is loaded from the file. A store is loaded only with trust."""
        return (
            name != "store"
            or value is None
            or is_trusted(path, self.sparkSession, trusted=self.trusted)
        )

    def _restore(self, instance: TorchParams, content: dict[str, Any], decoder: Decoder) -> None:
        """Restore all parts except Params."""


class EstimatorReader(_Reader):
    """Reader of an estimator."""

    def _is_wanted(self, name: str, value: object, path: str) -> bool:
        is_wanted = super()._is_wanted(name, value, path)
        if not is_wanted:
            warnings.warn(
                f"The estimator in {path!r} is loaded without its store {shown_place(value)}, because a fit would write there "
                f"and the file is not trusted. Set a store with setStore, or load the estimator with trust=True, "
                f"inside `with sparkhvd.trust():`, or with {TRUST_CONF} set to a prefix of the path.",
                stacklevel=2,
            )
        return is_wanted


class ModelReader(_Reader):
    """Reader of a model."""

    def _restore(self, instance: TorchParams, content: dict[str, Any], decoder: Decoder) -> None:
        instance._fitted = decode_fitted(content, decoder)


def encode_model(model: TorchParams, archive: Archive) -> dict[str, Any]:
    """Encode a `TorchModel`: its Params, and its module with columns, links and history."""
    return ModelWriter(model)._content(archive)
