"""Save and load estimators and models, on classic Spark and on Spark Connect.

A saved directory lies wholly where Spark resolves its path, because Spark writes and reads every part:

    metadata/     one line of JSON: class, uid, params, and for a model its columns, links and history
    weights/      one file, which torch.load(..., weights_only=True) reads: tensors by name
    code/         one file, a pickle; only if there are classes or functions that JSON cannot name. Needs trust.

JSON names what belongs to torch itself: modules made of `torch.nn`, functions of `torch.nn.functional`, classes of
`torch.optim` and optimizers of these classes. Reading them runs no code of the file.

How the files get where Spark resolves the path: `files.py`.
"""

from __future__ import annotations

import copy
import json
import pickle
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pyspark.ml.util import DefaultParamsReader, DefaultParamsWriter, MLReader, MLWriter
from torch import Tensor, nn

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.estimator import architecture, weights
from sparkhvd.estimator.binding import Argument, InputBinding
from sparkhvd.estimator.data.schema import Column
from sparkhvd.estimator.data.store import Store
from sparkhvd.estimator.files import read_file, scratch_file, write_file
from sparkhvd.estimator.inputs import is_dataframe
from sparkhvd.estimator.trusting import check_trusted
from sparkhvd.runner.spark_shim import SparkShim
from sparkhvd.settings import Settings

if TYPE_CHECKING:
    from sparkhvd.estimator.model import Fitted

__all__ = ["EstimatorReader", "EstimatorWriter", "ModelReader", "ModelWriter"]

FORMAT_VERSION = 1
# What the metadata line calls our part.
KEY = "sparkhvd"


# --- values as JSON ---------------------------------------------------------------------------------------------


class Archive:
    """What JSON cannot hold: tensors by name, and values that need a pickle."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.code: dict[str, Any] = {}
        # What the names of a module's tensors begin with, where that is not its name.
        self.prefixes: dict[str, str] = {}
        # The estimator's module, whose tensors a pickled optimizer names.
        self.module: nn.Module | None = None

    def encode(self, name: str, value: Any) -> Any:
        """The value as JSON-able data; what has none goes to `code` under `name`."""
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, Store):
            return {"store": value.url}
        if isinstance(value, Settings):
            return {"settings": json.loads(value.to_json())}
        if isinstance(value, (list, tuple)):
            return [self.encode(f"{name}.{i}", v) for i, v in enumerate(value)]
        if isinstance(value, bytes):
            return {"bytes": value.hex()}
        # Other mappings, such as a defaultdict, do more than hold entries.
        if type(value) in (dict, OrderedDict):
            return self._encode_dict(name, value)
        if isinstance(value, nn.Module):
            return self._encode_module(name, value)
        if isinstance(value, torch.optim.Optimizer):
            return self._encode_optimizer(name, value)
        if (reference := _torch_name(value)) is not None:
            return {"torch": reference}
        return self._pickled(name, value)

    def _encode_dict(self, name: str, value: Mapping[Any, Any]) -> Any:
        if all(isinstance(k, str) for k in value):
            return {"dict": {k: self.encode(f"{name}.{k}", v) for k, v in value.items()}}
        if all(isinstance(k, (str, bytes, bool, int, float)) for k in value):
            items = value.items()
            return {
                "pairs": [[self.encode(name, k), self.encode(f"{name}.{k}", v)] for k, v in items]
            }
        return self._pickled(name, value)

    def _encode_module(self, name: str, module: nn.Module) -> Any:
        if name == "model":
            self.module = module
        tensors = architecture.tensors_of(module)
        prefix = self.prefixes.get(name, f"{name}.")
        if not prefix or not self.prefixes:
            self.tensors.update({prefix + n: t for n, t in tensors.items()})
        elif tensors:  # a model's file of weights holds nothing but its weights
            return self._pickled(name, module)
        description = architecture.describe(module)
        if description is not None:
            return {"module": description}
        return self._pickled(name, module, what=architecture.foreign_class(module))

    def _encode_optimizer(self, name: str, optimizer: torch.optim.Optimizer) -> Any:
        reference = _torch_name(type(optimizer))
        if reference is None or self.module is None:
            return self._pickled(name, optimizer)
        index = {id(p): i for i, p in enumerate(self.module.parameters())}
        # New dicts: those of `state_dict` are the optimizer's own.
        state: dict[str, dict[str, Any]] = {}
        for number, entries in optimizer.state_dict()["state"].items():
            state[str(number)] = {}
            for key, value in entries.items():
                full = f"{name}.{number}.{key}"
                is_tensor = isinstance(value, Tensor)
                state[str(number)][key] = {"tensor": full} if is_tensor else value
                if is_tensor:
                    self.tensors[full] = value
        groups = [
            {k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups
        ]
        data = {
            "class": reference,
            "params": [[index.get(id(p), -1) for p in g["params"]] for g in optimizer.param_groups],
            "groups": groups,
            "state": state,
        }
        if not _is_json(data) or any(-1 in group for group in data["params"]):
            return self._pickled(name, optimizer)
        return {"optimizer": _mark_tuples(data)}

    def _pickled(self, name: str, value: Any, what: str | None = None) -> dict[str, str]:
        self.code[name] = value
        kind = value if callable(value) and hasattr(value, "__qualname__") else type(value)
        return {"code": name, "what": what or f"{kind.__module__}.{kind.__qualname__}"}


def _torch_name(value: Any) -> str | None:
    """The name under which torch itself exports a value, for example "torch.optim.Adam"; else None."""
    name = getattr(value, "__name__", "")
    for home, module in (("torch.optim", torch.optim), ("torch.nn.functional", nn.functional)):
        if (
            name
            and not name.startswith("_")
            and getattr(module, name, None) is value
            and callable(value)
        ):
            return f"{home}.{name}"
    return None


def _torch_value(reference: str) -> Any:
    home, _, name = reference.rpartition(".")
    module = {"torch.optim": torch.optim, "torch.nn.functional": nn.functional}.get(home)
    value = getattr(module, name, None)
    if module is None or name.startswith("_") or _torch_name(value) != reference:
        raise InvalidArgumentError(
            f"The saved file names {reference!r}, which torch does not have."
        )
    return value


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def _mark_tuples(value: Any) -> Any:
    """Tuples (such as Adam's betas) survive JSON as {"tuple": [...]}."""
    if isinstance(value, tuple):
        return {"tuple": [_mark_tuples(v) for v in value]}
    if isinstance(value, list):
        return [_mark_tuples(v) for v in value]
    if isinstance(value, dict):
        return {k: _mark_tuples(v) for k, v in value.items()}
    return value


class Decoder:
    """From JSON and files back to values."""

    def __init__(self, path: str, spark: Any, *, trusted: bool) -> None:
        self.path = path
        self.spark = spark
        self.trusted = trusted
        # As in `Archive`.
        self.prefixes: dict[str, str] = {}
        self._tensors: dict[str, Tensor] | None = None
        self.module: nn.Module | None = None
        self._code: dict[str, Any] | None = None

    def decode(self, name: str, value: Any) -> Any:
        """The value that `Archive.encode` wrote under this name."""
        if isinstance(value, list):
            return [self.decode(f"{name}.{i}", v) for i, v in enumerate(value)]
        if not isinstance(value, dict):
            return value
        ((kind, content), *_) = value.items()
        if kind == "dict":
            return {k: self.decode(f"{name}.{k}", v) for k, v in content.items()}
        if kind == "pairs":
            pairs = [(self.decode(name, k), v) for k, v in content]
            return {k: self.decode(f"{name}.{k}", v) for k, v in pairs}
        if kind == "module":
            result: Any = architecture.rebuild(content, self.tensors(name))
        elif kind == "code":
            result = self._from_code(content, value["what"])
        else:
            return self._plain(kind, content)
        if name == "model":
            self.module = result
        return result

    def _plain(self, kind: str, content: Any) -> Any:
        if kind == "store":
            return Store(content)
        if kind == "bytes":
            return bytes.fromhex(content)
        if kind == "settings":
            return Settings(**content)
        if kind == "torch":
            return _torch_value(content)
        if kind == "optimizer":
            return self._optimizer(content)
        raise InvalidArgumentError(
            f"{self.path!r} holds an entry of kind {kind!r}, which this version of sparkhvd does not know."
        )

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The saved tensors whose names begin with `name`, without it."""
        if self._tensors is None:
            with read_file(self.spark, f"{self.path}/weights") as file:
                self._tensors = weights.load(file)
        start = self.prefixes.get(name, f"{name}." if name else "")
        return {n.removeprefix(start): t for n, t in self._tensors.items() if n.startswith(start)}

    def _optimizer(self, saved: dict[str, Any]) -> Any:
        data = _unmark(saved)
        assert self.module is not None
        parameters = list(self.module.parameters())
        groups = [
            {**options, "params": [parameters[i] for i in members]}
            for options, members in zip(data["groups"], data["params"], strict=True)
        ]
        optimizer = _torch_value(data["class"])(groups)
        tensors = self.tensors("")
        state = {
            int(number): {
                k: tensors[v["tensor"]] if isinstance(v, dict) and "tensor" in v else v
                for k, v in entries.items()
            }
            for number, entries in data["state"].items()
        }
        optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
        return optimizer

    def _from_code(self, name: str, what: str) -> Any:
        check_trusted(self.path, what, self.spark, trusted=self.trusted)
        if self._code is None:
            with read_file(self.spark, f"{self.path}/code") as file:
                self._code = pickle.loads(Path(file).read_bytes())
        # What refers to the module's parameters gets these, not copies.
        tensors = self.tensors("model") if self.module is None else _of_module(self.module)
        return architecture.load_shell(self._code[name], tensors)


def _of_module(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_buffers()), **dict(module.named_parameters())}


def _unmark(value: Any) -> Any:
    if isinstance(value, list):
        return [_unmark(v) for v in value]
    if isinstance(value, dict):
        if set(value) == {"tuple"}:
            return tuple(_unmark(v) for v in value["tuple"])
        return {k: _unmark(v) for k, v in value.items()}
    return value


# --- Spark ML's writers and readers ---------------------------------------------------------------------------------


class _Writer(MLWriter):
    """Writes metadata, weights and code."""

    def __init__(self, instance: Any) -> None:
        super().__init__()
        self.instance = instance

    def _handleOverwrite(self, path: str) -> None:  # noqa: N802 - overrides Spark's
        if not SparkShim(self.sparkSession).is_connect:
            super()._handleOverwrite(path)
            return
        # The base class asks the JVM, which a Connect client does not have; the server has a helper for it.
        from pyspark.ml.util import ML_CONNECT_HELPER_ID
        from pyspark.ml.wrapper import JavaWrapper

        JavaWrapper(java_obj=ML_CONNECT_HELPER_ID)._call_java("handleOverwrite", path, True)

    def saveImpl(self, path: str) -> None:  # noqa: N802 - overrides Spark's
        """Write everything below `path`, which must not exist."""
        archive = Archive()
        content = {"format_version": FORMAT_VERSION, **self._content(archive)}
        # What Spark writes as plain JSON must hold no objects: the values are ours, in `content`.
        bare = copy.copy(self.instance)
        bare._paramMap, bare._defaultParamMap = {}, {}
        spark = self.sparkSession
        DefaultParamsWriter.saveMetadata(
            bare, path, spark, extraMetadata={KEY: content}, paramMap={}
        )
        with scratch_file() as file:
            with open(file, "wb") as sink:
                weights.dump(archive.tensors, sink)
            write_file(spark, f"{path}/weights", file)
        if archive.code:
            module = archive.module or nn.Module()
            code = {n: architecture.dump_shell(module, v) for n, v in archive.code.items()}
            with scratch_file() as file:
                Path(file).write_bytes(pickle.dumps(code))
                write_file(spark, f"{path}/code", file)

    def _content(self, archive: Archive) -> dict[str, Any]:
        """The instance as JSON-able data. The module comes first: others refer to its tensors."""
        values = {p.name: v for p, v in self.instance._paramMap.items()}
        names = sorted(values, key=lambda name: (name != "model", name))
        return {"params": {name: archive.encode(name, values[name]) for name in names}}


class EstimatorWriter(_Writer):
    """Writes an estimator."""

    def _content(self, archive: Archive) -> dict[str, Any]:
        if is_dataframe(self.instance._get("validation")):
            raise InvalidArgumentError(
                "validation is a DataFrame, which cannot be saved. Save a copy without it, "
                "estimator.copy().setValidation(None), and give it again in fit(df, {estimator.validation: df2})."
            )
        return super()._content(archive)


class ModelWriter(_Writer):
    """Writes a model."""

    def _content(self, archive: Archive) -> dict[str, Any]:
        fitted = self.instance._require_fitted()
        # Plain names, so that module.load_state_dict(torch.load(file, weights_only=True)) works.
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
            "run_id": fitted.run_id,
            **super()._content(archive),
        }


class _Reader(MLReader[Any]):
    """Reads what `_Writer` wrote."""

    def __init__(self, cls: type[Any], *, trusted: bool = False) -> None:
        super().__init__()
        self.cls = cls
        self.trusted = trusted

    def load(self, path: str) -> Any:
        """The instance saved at `path`.

        Raises:
            InvalidArgumentError: the path holds another class, or another format.
            UntrustedError: it holds code that nobody trusts.
        """
        spark = self.sparkSession
        metadata = DefaultParamsReader.loadMetadata(path, spark)
        expected = f"{self.cls.__module__}.{self.cls.__name__}"
        content = metadata.get(KEY)
        if metadata["class"] != expected or content is None:
            raise InvalidArgumentError(
                f"{path!r} holds a {metadata['class']}, and {expected} was asked for. Load it with its own class."
            )
        if content["format_version"] != FORMAT_VERSION:
            raise InvalidArgumentError(
                f"{path!r} has format version {content['format_version']}; this sparkhvd reads {FORMAT_VERSION}."
            )
        instance = self.cls()
        instance._resetUid(metadata["uid"])
        decoder = Decoder(path, spark, trusted=self.trusted)
        self._restore(instance, content, decoder)
        for name, value in content["params"].items():
            if instance.hasParam(name):
                instance._set(**{name: decoder.decode(name, value)})
        return instance

    def _restore(self, instance: Any, content: dict[str, Any], decoder: Decoder) -> None:
        """What is not a Param."""


class EstimatorReader(_Reader):
    """Reads an estimator."""


class ModelReader(_Reader):
    """Reads a model."""

    def _restore(self, instance: Any, content: dict[str, Any], decoder: Decoder) -> None:
        instance._fitted = _fitted(content, decoder)


def _fitted(content: dict[str, Any], decoder: Decoder) -> Fitted:
    from sparkhvd.estimator.model import Fitted

    decoder.prefixes["model"] = ""
    module = decoder.decode("model", content["module"])
    arguments = []
    for a in content["inputs"]:
        shape = None if a["shape"] is None else tuple(a["shape"])
        arguments.append(Argument(**{**a, "columns": tuple(a["columns"]), "shape": shape}))
    columns = [Column.from_dict(c) for c in content["columns"]]
    return Fitted(
        module=module.eval(),
        columns=tuple(columns),
        labels=tuple(content["labels"]),
        inputs=InputBinding(tuple(arguments)),
        links=tuple(content["links"]),
        widths=tuple(content["widths"]),
        history=content["history"],
        timings=content["timings"],
        run_id=content["run_id"],
    )
