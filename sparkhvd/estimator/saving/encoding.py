"""Encode values of Params as JSON and files, and decode them.

JSON refers by name to objects of torch itself (modules made of `torch.nn`, functions of `torch.nn.functional`, classes
of `torch.optim` and optimizers of these classes) and of this package. Reading such a name runs no code from the file.
Other objects are pickled, and loading a pickle runs code. Pickles, and values that decide where a fit writes, need
trust.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, fields
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sparkhvd import lazy_compiler
from sparkhvd.data.columns.binding import Argument, InputBinding
from sparkhvd.data.columns.decoders import pad
from sparkhvd.data.columns.images import image
from sparkhvd.data.columns.schema import Column
from sparkhvd.data.store.addresses import without_secrets
from sparkhvd.data.store.moved import StoreWithRuns
from sparkhvd.data.store.spark_files import read_file
from sparkhvd.data.store.store import Store
from sparkhvd.errors import InvalidArgumentError, SparkhvdError, UntrustedError
from sparkhvd.estimator.saving.trust import check_trusted
from sparkhvd.settings import Settings
from sparkhvd.spark import is_connect
from sparkhvd.torch.compression import Compression
from sparkhvd.torch.gradients.powersgd import PowerSGD
from sparkhvd.training.modules import architecture, weights
from sparkhvd.training.modules.fitted import TrainedState
from sparkhvd.training.modules.modes import in_mode
from sparkhvd.wire import read_json, rebuild

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


FORMAT_VERSION = 1
# Key of this package's entry in the metadata line.
KEY = "sparkhvd"

# Public name -> class of this package.
COMPRESSIONS = {
    "none": Compression.none,
    "fp16": Compression.fp16,
    "bf16": Compression.bf16,
}


class Archive:
    """Encoder of values as JSON. It also collects tensors by name and values to pickle."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.code: dict[str, Any] = {}
        # Name of a module -> prefix of its tensors' names, if it is not the module's name.
        self.prefixes: dict[str, str] = {}
        # Module of the estimator. A pickled optimizer refers to its tensors by name.
        self.module: nn.Module | None = None

    def pickles(self) -> dict[str, bytes]:
        """Pickle the values of `code`. They refer to the module's tensors by name."""
        return {name: self.pickled(value) for name, value in self.code.items()}

    def pickled(self, value: object) -> bytes:
        """Pickle a value. Tensors of the estimator's module are replaced by their names."""
        module = nn.Module() if self.module is None else self.module
        return architecture.dump_shell(module, value)

    def encode(self, name: str, value: object) -> object:
        """Encode a value as JSON data, or put a value without a JSON form into `code` as `name`."""
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, Store):
            places = value.described() if isinstance(value, StoreWithRuns) else {}
            return {"store": value.url, **places}
        if isinstance(value, Settings):
            return {"settings": read_json(value.to_json())}
        if isinstance(value, (list, tuple)):
            return [self.encode(f"{name}.{i}", v) for i, v in enumerate(value)]
        if isinstance(value, bytes):
            return {"bytes": value.hex()}
        # Other mappings, such as a defaultdict, hold more than their entries and are pickled.
        if isinstance(value, dict) and type(value) in (dict, OrderedDict):
            return self._encode_dict(name, value)
        if isinstance(value, nn.Module):
            return self._encode_module(name, value)
        if isinstance(value, torch.optim.Optimizer):
            return self._encode_optimizer(name, value)
        return _encode_known(value) or self._pickled(name, value)

    def _encode_dict(self, name: str, value: Mapping[object, object]) -> object:
        if all(isinstance(k, str) for k in value):
            return {"dict": {k: self.encode(f"{name}.{k}", v) for k, v in value.items()}}
        if all(isinstance(k, (str, bytes, bool, int, float)) for k in value):
            items = value.items()
            return {
                "pairs": [[self.encode(name, k), self.encode(f"{name}.{k}", v)] for k, v in items]
            }
        return self._pickled(name, value)

    def _encode_module(self, name: str, module: nn.Module) -> object:
        if name == "model":
            self.module = module
        tensors = architecture.tensors_of(module)
        prefix = self.prefixes.get(name, f"{name}.")
        if not prefix or not self.prefixes:
            self.tensors.update({prefix + n: t for n, t in tensors.items()})
        elif tensors:  # the weights file of a model must hold only the model's weights
            return self._pickled(name, module)
        description = architecture.describe(module)
        if description is not None:
            return {"module": description}
        return self._pickled(name, module, what=architecture.foreign_class(module))

    def _encode_optimizer(self, name: str, optimizer: torch.optim.Optimizer) -> object:
        reference = torch_name(type(optimizer))
        if reference is None or self.module is None:
            return self._pickled(name, optimizer)
        index = {id(p): i for i, p in enumerate(self.module.parameters())}
        # Make new dicts, because the dicts in `state_dict` belong to the optimizer.
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

    def _pickled(self, name: str, value: object, what: str | None = None) -> dict[str, str]:
        self.code[name] = value
        kind = value if callable(value) and hasattr(value, "__qualname__") else type(value)
        return {"code": name, "what": what or f"{kind.__module__}.{kind.__qualname__}"}


def _encode_known(value: object) -> dict[str, Any] | None:
    """Encode a value of torch or this package with a JSON form, or return None for other values."""
    if (reference := torch_name(value)) is not None:
        return {"torch": reference}
    if isinstance(value, type) and value in COMPRESSIONS.values():
        return {"compression": next(n for n, kind in COMPRESSIONS.items() if kind is value)}
    if type(value) is PowerSGD:
        return {"powersgd": {"rank": value.rank, "warm_up_steps": value.warm_up_steps}}
    if isinstance(value, (pad, image)) and type(value) in (pad, image) and _is_json(asdict(value)):
        return {type(value).__name__: asdict(value)}
    if isinstance(value, PurePath):
        return {"path": str(value)}
    return None


def torch_name(value: object) -> str | None:
    """Find torch's public name of a value, such as "torch.optim.Adam", or return None if it has no such name."""
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


def _is_json(value: object) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def _mark_tuples(value: object) -> object:
    """Convert tuples (such as Adam's betas) to {"tuple": [...]}, because JSON has only lists."""
    if isinstance(value, tuple):
        return {"tuple": [_mark_tuples(v) for v in value]}
    if isinstance(value, list):
        return [_mark_tuples(v) for v in value]
    if isinstance(value, dict):
        return {k: _mark_tuples(v) for k, v in value.items()}
    return value


# ----------------------------------------------------------------------------------------------------
# Decode values of Params from JSON and files.

# First version of torch in which torch.load(..., weights_only=True) is not known to run code from a crafted file:
# CVE-2025-32434 (fixed in 2.6) and CVE-2026-24747.
SAFE_TORCH = (2, 10)
# Settings that hold the path of a file that a fit writes.
PATH_SETTINGS = tuple(f.name for f in fields(Settings) if f.metadata["unit"] == "path")
# Errors that malformed JSON may cause, besides errors of this package.
_MALFORMED = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    AssertionError,
    RuntimeError,
    OverflowError,
    pickle.UnpicklingError,
)


class Decoder:
    """Decoder of JSON and files to values."""

    def __init__(
        self,
        path: str,
        spark: SparkSession | None,
        *,
        trusted: bool,
        own_code: frozenset[str] = frozenset(),
        store_class: type[StoreWithRuns] = StoreWithRuns,
    ) -> None:
        """Prepare a decoder.

        Args:
            path: saved directory.
            spark: session that reads the files; its conf may also trust the path.
            trusted: True if `load` was called with trust.
            own_code: SHA-256 of pickles that this process has saved with the same JSON, and so are trusted.
            store_class: class of decoded stores.
        """
        self.path = path
        self.spark = spark
        self.trusted = trusted
        self._own_code = own_code
        self._store_class = store_class
        # See `Archive`.
        self.prefixes: dict[str, str] = {}
        self._tensors: dict[str, Tensor] | None = None
        self.module: nn.Module | None = None
        self._code: dict[str, bytes] | None = None
        self._raised_by_code: BaseException | None = None

    def decode(self, name: str, value: object) -> Any:
        """Decode an entry of `Archive.encode`.

        Raises:
            InvalidArgumentError: `Archive.encode` never writes such an entry.
            UntrustedError: the entry is code, a store or a file to write, and the saved directory is not trusted.
        """
        with self.reading(name):
            # A store may also be plain text, a path or URL.
            if name == "store" and value is not None:
                self._check_place(f"the store {shown_place(value)}")
            return self._decode(name, value)

    @contextlib.contextmanager
    def reading(self, name: str) -> Iterator[None]:
        """Turn an error from a malformed part of the file into an InvalidArgumentError."""
        try:
            yield
        except SparkhvdError:
            raise
        except _MALFORMED as e:
            if e is self._raised_by_code:
                raise
            raise InvalidArgumentError(
                f"{self.path!r} holds an entry {name!r} in a form that sparkhvd does not save ({type(e).__name__}: {e}). The "
                "directory is damaged, or another version saved it: save it again."
            ) from e

    def _check_place(self, what: str) -> None:
        why = "that file would decide where a fit writes"
        trusted = self.trusted or bool(self._own_code)
        check_trusted(self.path, what, self.spark, trusted=trusted, why=why)

    def _decode(self, name: str, value: object) -> Any:
        if isinstance(value, list):
            return [self._decode(f"{name}.{i}", v) for i, v in enumerate(value)]
        if not isinstance(value, dict):
            return value
        ((kind, content), *_) = value.items()
        if kind == "dict":
            return {k: self._decode(f"{name}.{k}", v) for k, v in content.items()}
        if kind == "pairs":
            pairs = [(self._decode(name, k), v) for k, v in content]
            return {k: self._decode(f"{name}.{k}", v) for k, v in pairs}
        if kind == "module":
            result: Any = architecture.rebuild(content, self.tensors(name))
        elif kind == "code":
            result = self._from_code(content, value["what"])
        elif kind == "store":
            self._check_place(f"the store {shown_place(content)}")
            result = self._store_class.from_description(**value)
        else:
            return self._plain(kind, content)
        # "model" may also be a function that makes the module.
        if name == "model" and isinstance(result, nn.Module):
            self.module = result
        return result

    def _plain(self, kind: str, content: Any) -> object:
        if kind == "torch":
            return _torch_value(content)
        if kind == "optimizer":
            return self._optimizer(content)
        if kind == "compression" and content in COMPRESSIONS:
            return COMPRESSIONS[content]
        if kind == "settings":
            for setting in PATH_SETTINGS:
                if content.get(setting):
                    self._check_place(f"the setting {setting}={content[setting]!r}")
        if kind in _KNOWN:
            return _KNOWN[kind](content)
        raise InvalidArgumentError(
            f"{self.path!r} holds an entry of kind {kind!r}, which this version of sparkhvd does not know."
        )

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Select the saved tensors with the prefix `name`, and remove the prefix."""
        if torch.__version__ < SAFE_TORCH:  # type: ignore[operator]  # TorchVersion can be compared with a tuple
            safe = ".".join(map(str, SAFE_TORCH))
            why = f"a crafted file of them can run code where torch is below {safe} (here {torch.__version__})"
            check_trusted(self.path, "weights", self.spark, trusted=self.trusted, why=why)
        if self._tensors is None:
            self._tensors = self._read_tensors()
        start = self.prefixes.get(name, f"{name}." if name else "")
        return {n.removeprefix(start): t for n, t in self._tensors.items() if n.startswith(start)}

    def _file(self, name: str) -> contextlib.AbstractContextManager[str]:
        """Provide the only file of a folder in the saved directory as a local path inside a block."""
        assert self.spark is not None
        return read_file(self.spark, f"{self.path}/{name}")

    def _read_tensors(self) -> dict[str, Tensor]:
        """Read the saved tensors by name."""
        with self._file("weights") as file:
            try:
                return weights.load(file)
            except Exception as e:
                # The reader of torch may raise any class for bytes that are not weights.
                if weights.is_of_machine(e):
                    raise
                raise InvalidArgumentError(
                    f"{self.path!r} holds weights that torch cannot read ({type(e).__name__}: {e}). The directory is damaged: save it again."
                ) from e

    def _read_code(self, what: str) -> dict[str, bytes]:
        """Read the pickles with the value `what` if the file is trusted or from this process."""
        with self._file("code") as file:
            read = Path(file).read_bytes()
        if self._own_code:
            assert self.spark is not None
            # A Connect client saves files with an additional separator at the end, after the pickle's end marker.
            saved = {read, read[:-1]} if is_connect(self.spark) else {read}
            digests = {hashlib.sha256(each).hexdigest() for each in saved}
            trusted = self.trusted or not digests.isdisjoint(self._own_code)
            check_trusted(self.path, what, self.spark, trusted=trusted)
        code: dict[str, bytes] = pickle.loads(read)
        return code

    def _optimizer(self, saved: dict[str, Any]) -> torch.optim.Optimizer:
        data = _unmark(saved)
        assert self.module is not None
        with (
            lazy_compiler.installed()
            if Settings.resolve().lazy_compiler
            else contextlib.nullcontext()
        ):
            return self._optimizer_of(data, self.module)

    def _optimizer_of(self, data: dict[str, Any], module: nn.Module) -> torch.optim.Optimizer:
        parameters = list(module.parameters())
        groups = [
            {**options, "params": [parameters[i] for i in members]}
            for options, members in zip(data["groups"], data["params"], strict=True)
        ]
        optimizer: torch.optim.Optimizer = _torch_value(data["class"])(groups)
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
        if not self._own_code:
            check_trusted(self.path, what, self.spark, trusted=self.trusted)
        # References to the module's parameters must resolve to the parameters themselves, not to copies.
        tensors = self.tensors("model") if self.module is None else _of_module(self.module)
        try:
            if self._code is None:
                self._code = self._read_code(what)
            return architecture.load_shell(self._code[name], tensors)
        except Exception as e:
            self._raised_by_code = e  # `reading` raises an error of the user's code unchanged
            raise


# Kind of an entry without parts outside JSON -> function that makes the value.
_KNOWN: Mapping[str, Callable[[Any], Any]] = {
    "bytes": bytes.fromhex,
    "path": Path,
    "settings": lambda content: Settings(**content),
    "powersgd": lambda content: PowerSGD(**content),
    "image": lambda content: image(**content),
    "pad": lambda content: pad(**content),
}


def check_format(path: str, content: Mapping[str, Any]) -> None:
    """Reject a saved model or estimator with another format version."""
    if content["format_version"] != FORMAT_VERSION:
        raise InvalidArgumentError(
            f"{path!r} has format version {content['format_version']}, but this sparkhvd reads {FORMAT_VERSION}."
        )


def decode_fitted(content: dict[str, Any], decoder: Decoder) -> TrainedState:
    """Decode the module that `encode_model` encoded, with columns, links and history."""
    decoder.prefixes["model"] = ""
    module = decoder.decode("model", content["module"])
    arguments = tuple(rebuild(Argument, a) for a in content["inputs"])
    columns = [rebuild(Column, c) for c in content["columns"]]
    loss = None
    if "loss" in content:
        try:
            loss = decoder.decode("loss", content["loss"])
        except UntrustedError as e:
            warnings.warn(
                f"The model is loaded without its loss, and getLoss() returns None: {e}",
                stacklevel=4,
            )
    return TrainedState(
        module=in_mode(module, is_training=False),
        columns=tuple(columns),
        labels=rebuild(tuple[str, ...], content["labels"]),
        inputs=InputBinding(arguments),
        links=rebuild(tuple[str, ...], content["links"]),
        widths=rebuild(tuple[int, ...], content["widths"]),
        history=rebuild(list[dict[str, Any]], content["history"]),
        timings=rebuild(dict[str, float], content["timings"]),
        run_id=rebuild(str, content["run_id"]),
        loss=loss,
        data=rebuild(dict[str, Any], content.get("data", {})),
        run_key=rebuild(str, content.get("run_key", "")),
    )


def shown_place(value: object) -> str:
    """Format a saved store, path or URL without secrets, for messages."""
    ((_, value), *_) = value.items() if isinstance(value, dict) and value else [("", value)]
    return without_secrets(value) if isinstance(value, str) else repr(value)


def _of_module(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_buffers()), **dict(module.named_parameters())}


def _unmark(value: object) -> Any:
    if isinstance(value, list):
        return [_unmark(v) for v in value]
    if isinstance(value, dict):
        if set(value) == {"tuple"}:
            return tuple(_unmark(v) for v in value["tuple"])
        return {k: _unmark(v) for k, v in value.items()}
    return value


def _torch_value(reference: str) -> Any:
    home, _, name = reference.rpartition(".")
    module = {"torch.optim": torch.optim, "torch.nn.functional": nn.functional}.get(home)
    value = getattr(module, name, None)
    if module is None or name.startswith("_") or torch_name(value) != reference:
        raise InvalidArgumentError(
            f"The saved file names {reference!r}, which torch does not have."
        )
    return value
