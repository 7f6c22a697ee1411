"""Values of Params from JSON and files, as `encoding` writes them."""

from __future__ import annotations

import contextlib
import hashlib
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sparkhvd.data.columns.decoders import pad
from sparkhvd.data.columns.images import image
from sparkhvd.data.store.addresses import without_secrets
from sparkhvd.data.store.moved import StoreWithRuns
from sparkhvd.data.store.spark_files import read_file
from sparkhvd.errors import InvalidArgumentError, SparkhvdError
from sparkhvd.estimator.saving.encoding import COMPRESSIONS, torch_name
from sparkhvd.estimator.saving.trust import check_trusted
from sparkhvd.sessions import is_connect
from sparkhvd.settings import Settings
from sparkhvd.torch.gradients.powersgd import PowerSGD
from sparkhvd.training.modules import architecture, weights

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["Decoder", "shown_place"]

# The first torch whose torch.load(..., weights_only=True) runs no code of a crafted file, as far as is known:
# CVE-2025-32434 (fixed in 2.6) and CVE-2026-24747.
SAFE_TORCH = (2, 10)
# Settings that name files which a fit writes.
PATH_SETTINGS = tuple(f.name for f in fields(Settings) if f.metadata["unit"] == "path")
# Errors of reading JSON of others, besides our own.
_MALFORMED = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    AssertionError,
    RuntimeError,
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
            path: the saved directory.
            spark: session that reads its files; also its conf may trust it.
            trusted: the caller of `load` said so.
            own_code: SHA-256 of pickles that are trusted with what JSON holds, because this process has saved both.
            store_class: class of a store that is read.
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
        """Decode what `Archive.encode` wrote under this name.

        Raises:
            InvalidArgumentError: `Archive.encode` writes no such entry.
            UntrustedError: it is code, a store or a file to write, and the saved directory is not trusted.
        """
        with self.reading(name):
            if name == "store" and value is not None:  # a path or URL may be plain text
                self._check_place(f"the store {shown_place(value)}")
            return self._decode(name, value)

    @contextlib.contextmanager
    def reading(self, name: str) -> Iterator[None]:
        """Turn errors over parts of the file that are not as this package saves them into one error."""
        try:
            yield
        except SparkhvdError:
            raise
        except _MALFORMED as e:
            if e is self._raised_by_code:
                raise
            raise InvalidArgumentError(
                f"{self.path!r} holds an entry {name!r} that is not as sparkhvd saves it ({type(e).__name__}: {e}). The "
                "directory is damaged or of another version: save it again."
            ) from e

    def _check_place(self, what: str) -> None:
        why = "a fit would write where that file says"
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
        if name == "model" and isinstance(result, nn.Module):  # else a function that makes one
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
        """Return the saved tensors whose names begin with `name`, without it."""
        if torch.__version__ < SAFE_TORCH:  # type: ignore[operator]  # it compares with tuples, too
            safe = ".".join(map(str, SAFE_TORCH))
            why = f"a crafted file of them can run code where torch is below {safe} (here {torch.__version__})"
            check_trusted(self.path, "weights", self.spark, trusted=self.trusted, why=why)
        if self._tensors is None:
            self._tensors = self._read_tensors()
        start = self.prefixes.get(name, f"{name}." if name else "")
        return {n.removeprefix(start): t for n, t in self._tensors.items() if n.startswith(start)}

    def _read_tensors(self) -> dict[str, Tensor]:
        """Read the saved tensors by name."""
        assert self.spark is not None
        with read_file(self.spark, f"{self.path}/weights") as file:
            return weights.load(file)

    def _read_code(self, what: str) -> dict[str, bytes]:
        """Read the pickles of what JSON cannot name, `what` among them; called where the file is trusted, or is perhaps an own one."""
        assert self.spark is not None
        with read_file(self.spark, f"{self.path}/code") as file:
            read = Path(file).read_bytes()
        if self._own_code:
            # Where a client of Connect has saved, a separator stands behind the pickle, which ends where it ends.
            saved = {read, read[:-1]} if is_connect(self.spark) else {read}
            digests = {hashlib.sha256(each).hexdigest() for each in saved}
            trusted = self.trusted or not digests.isdisjoint(self._own_code)
            check_trusted(self.path, what, self.spark, trusted=trusted)
        code: dict[str, bytes] = pickle.loads(read)
        return code

    def _optimizer(self, saved: dict[str, Any]) -> torch.optim.Optimizer:
        data = _unmark(saved)
        assert self.module is not None
        parameters = list(self.module.parameters())
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
        # What refers to the module's parameters gets these, not copies.
        tensors = self.tensors("model") if self.module is None else _of_module(self.module)
        try:
            if self._code is None:
                self._code = self._read_code(what)
            return architecture.load_shell(self._code[name], tensors)
        except Exception as e:
            self._raised_by_code = e  # the user's own, to be seen as it is
            raise


# Kinds that JSON holds whole -> function that makes the value.
_KNOWN: Mapping[str, Callable[[Any], Any]] = {
    "bytes": bytes.fromhex,
    "path": Path,
    "settings": lambda content: Settings(**content),
    "powersgd": lambda content: PowerSGD(**content),
    "image": lambda content: image(**content),
    "pad": lambda content: pad(**content),
}


def shown_place(value: object) -> str:
    """Return a saved store, path or URL as messages show it: without secrets."""
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
