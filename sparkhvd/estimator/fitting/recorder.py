"""Collect the report of a fit while it runs, and write it into the run's folder at the end.

Failure: every error here becomes a warning, so that a fit never fails because of its report. Secrets: values of
environment variables are left out, and the passwords, keys and tokens of the store are masked in the whole document.
"""

from __future__ import annotations

import contextlib
import functools
import platform
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from importlib import metadata
from os import PathLike
from typing import Any

from sparkhvd._version import __version__
from sparkhvd.data.store import addresses
from sparkhvd.data.store.store import Store
from sparkhvd.estimator.params.generated import FitOptions
from sparkhvd.estimator.params.table import short_repr
from sparkhvd.observe.report.page import HTML_NAME, JSON_NAME, dumps, loads, render
from sparkhvd.runner.options import JobReport, RankChange
from sparkhvd.settings import Settings
from sparkhvd.training.checkpoints.files import Checkpoints
from sparkhvd.training.spec import TrainResult

_PACKAGES = ("torch", "pyspark", "pyarrow", "numpy", "pandas", "lightning")


class Recorder:
    """Collector of facts for the report of a fit.

    Attributes:
        document: document that `write` made last; {} before.
        is_trained: True if the ranks have finished without an error.
    """

    def __init__(self) -> None:
        """Start the clock of the fit."""
        self.document: Mapping[str, Any] = {}
        self.is_trained = False
        self._began = self._lap = time.time()
        self._phases: list[tuple[str, float]] = []
        self._relaunches: list[dict[str, Any]] = []
        self._changes: list[tuple[int, RankChange]] = []  # (number of relaunches before, change)
        self._facts: dict[str, Any] = {}
        self._origin: Mapping[str, Any] = {}

    @property
    def params(self) -> Mapping[str, str]:
        """Params that were set, as text without secrets."""
        found: Mapping[str, str] = self._facts.get("params", {})
        return found

    def lap(self, name: str) -> None:
        """Record a phase of the driver, from the end of the previous phase until now."""
        now = time.time()
        self._phases.append((name, now - self._lap))
        self._lap = now

    def prepared(self, origin: Mapping[str, Any], reading: str = "") -> None:
        """Record the origin of the rows. See `FitData.origin`.

        Args:
            origin: origin of the training rows.
            reading: description of the data that were written or read for this fit.
        """
        self._origin = origin
        texts = {"rows": f"{origin['rows']:,}", "digest": origin["digest"], "reading": reading}
        texts["columns"] = ", ".join(origin["columns"])
        for number, table in enumerate(origin["tables"]):
            name = f"table {number + 1}" if len(origin["tables"]) > 1 else "table"
            texts[name] = f"{table['format']} {table['name']}"
            kind = "version" if table["format"] == "delta" else "snapshot"
            texts[f"{kind} of {name}"] = f"{table['version']} of {table['committed']}".rstrip(" of")
            texts |= {f"filter of {name}": table["where"]} if table["where"] else {}
        self._facts["data"] = texts

    def relaunched(self, cause: str) -> None:
        """Record that ranks were lost and are launched again."""
        self._relaunches.append({"cause": cause, "seconds": time.time() - self._began})

    def ranks_changed(self, change: RankChange) -> None:
        """Record a change of the set of ranks."""
        self._changes.append((len(self._relaunches), change))

    def with_changes(self, history: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Add rank changes as text, and the tables of `with_origin`, to the records of epochs."""
        places = self._places()
        lines: dict[int, list[str]] = {}
        for attempt, change in self._changes:
            if change.before and (place := places.get((attempt, change.generation))):
                again = f", {place['repeated_rows']:,} rows again" if place["repeated_rows"] else ""
                lines.setdefault(place["epoch"], []).append(f"{change}{again}")
        records = [dict(record) for record in history]
        for record in records:
            if found := lines.get(record["epoch"]):
                record["rank_changes"] = found
        return with_origin(records, self._origin)

    def _places(self) -> dict[tuple[int, int], dict[str, int]]:
        """Start position of each set of ranks by (attempt, generation)."""
        return {(g["attempt"], g["generation"]): g for g in self._facts.get("generations", ())}

    def _rank_changes(self) -> list[dict[str, Any]]:
        places, found = self._places(), []
        for attempt, change in self._changes:
            place: dict[str, int] = places.get((attempt, change.generation)) or {}
            entry: dict[str, Any] = {"seconds": change.at - self._began, "before": change.before}
            entry |= {"after": change.after, "took_s": change.seconds, "why": change.why}
            entry |= {name: place[name] for name in ("epoch", "repeated_rows") if name in place}
            found.append(entry)
        return found

    def settled(self, options: FitOptions, settings: Settings, store: Store) -> None:
        """Record the inputs of the fit.

        Args:
            options: values of the Params, of which the report shows those that were set.
            settings: settings of the engine, of which the report shows those that differ from the defaults.
            store: store of the run, whose secrets are masked.
        """
        with _harmless(store):
            values = vars(options)  # a subclass may have other Params
            params = {name: values[name] for name in options.explicit if name in values}
            defaults = asdict(Settings())
            changed = {n: v for n, v in asdict(settings).items() if v != defaults[n]}
            self._facts |= {
                "params": masked_params(params, store.hide),
                "settings": {name: str(value) for name, value in changed.items()},
            }

    def launched(self, report: JobReport[TrainResult], store: Store, monitor: str = "") -> None:
        """Record how the ranks ended, and end the launch phase.

        Args:
            report: report of the ranks.
            store: store of the run.
            monitor: number that has chosen the epoch of the model's weights; "" for the last epoch.
        """
        with _harmless(store):
            self._launched(report, monitor)

    def _launched(self, report: JobReport[TrainResult], monitor: str) -> None:
        now = time.time()
        result = report.results[0]
        for record in result.history:
            if record.get("epoch") == result.epoch and monitor in record:
                best = {"name": monitor, "epoch": result.epoch, "value": record[monitor]}
                self._facts |= {"best": best}
        whole, self._lap = now - self._lap, now
        ranks = [dict(rank) for rank in result.profile.get("ranks", ())]
        own = ranks[0]["phases"] if ranks else {}
        of_ranks = {**own, "train": own.get("train", 0.0) - own.get("first step", 0.0)}
        # Rank 0 may have waited in "connect" for the last rank, but that time counts as launch.
        starts = [outcome.started_at for outcome in report.outcomes]
        waited = max(starts) - starts[0] if starts else 0.0
        of_ranks["connect"] = max(0.0, own.get("connect", 0.0) - waited)
        # The times of the slowest rank and the launch may overlap, because that rank may have started before the last
        # rank.
        run_s = min(report.run_s, max(0.0, whole - report.launch_s))
        lost = max(0.0, whole - report.launch_s - run_s)
        order = (
            "connect",
            "load",
            "first step",
            "train",
            "validate",
            "exchange",
            "callbacks",
            "checkpoint",
        )
        phases = [(name, of_ranks.get(name, 0.0)) for name in order]
        rest = max(0.0, run_s - sum(seconds for _, seconds in phases))
        name = "lost launches" if self._relaunches else "end of launch"
        self._phases += [("launch", report.launch_s), *phases, ("end of ranks", rest)]
        self._phases.append((name, lost))
        for rank, outcome in zip(ranks, report.outcomes, strict=False):
            rank |= {"host": outcome.host, "peak_rss_bytes": outcome.peak_rss_bytes}
        self._facts |= {**result.profile, "ranks": ranks}

    def write(
        self,
        store: Store,
        run_dir: str,
        *,
        history: Sequence[Mapping[str, Any]] | None = None,
        error: BaseException | None = None,
        is_kept: bool = True,
    ) -> None:
        """Write the report into the run's folder. A failure is a warning.

        Args:
            store: store of the run.
            run_dir: folder of the run.
            history: records of the epochs; None reads the metrics file of the ranks.
            error: error that ended the fit; None if it succeeded.
            is_kept: False builds the document and does not write it.
        """
        with _harmless(store):
            data = self._make(store, run_dir, history, error)
            if is_kept:
                store.write_bytes(f"{run_dir}/{JSON_NAME}", data)
                store.write_bytes(f"{run_dir}/{HTML_NAME}", render(self.document).encode())

    def write_failure(self, store: Store, run_dir: str, error: BaseException) -> None:
        """Write the report of a failed fit, if this process sees the store and the run's folder has files."""
        is_there = False
        with contextlib.suppress(Exception):  # the error of the fit is more useful
            is_there = store.is_seen and bool(store.list(run_dir))
        if is_there:
            self.write(store, run_dir, error=error)

    def _make(
        self,
        store: Store,
        run_dir: str,
        history: Sequence[Mapping[str, Any]] | None,
        error: BaseException | None,
    ) -> bytes:
        if history is None:
            checkpoints = Checkpoints(store, run_dir)
            history = checkpoints.history()
            self._facts = {**checkpoints.profile(), **self._facts}
        self.lap("collect" if error is None else "until the failure")
        document = {
            "run_id": run_dir.removeprefix("runs/"),
            "store": store.url,
            "state": _state(error),
            "error": "" if error is None else f"{type(error).__name__}: {error}",
            "began": _utc(self._began),
            "seconds": self._lap - self._began,
            "phases": [{"name": name, "seconds": seconds} for name, seconds in self._phases],
            "history": list(history),
            "relaunches": self._relaunches,
            **({"rank_changes": self._rank_changes()} if self._changes else {}),
            "versions": _versions(),
            **self._facts,
        }
        # Secrets are masked before the conversion to JSON, because JSON escapes quotes and line breaks in them.
        data = dumps(_masked(document, store))
        self.document = loads(data, JSON_NAME)
        return data


def with_origin(
    history: Sequence[Mapping[str, Any]], origin: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Add the versions of the training's tables, if known, to the records of epochs as "data"."""
    versions = [
        f"{table['name']}@{table['version']}"
        + (f" where {table['where']}" if table["where"] else "")
        for table in origin.get("tables", ())
    ]
    extra = {"data": ", ".join(versions)} if versions else {}
    return [{**record, **extra} for record in history]


@contextlib.contextmanager
def _harmless(store: Store) -> Iterator[None]:
    """Turn an error in the block into a warning, because a fit must not fail because of its report."""
    try:
        yield
    except Exception as e:  # noqa: BLE001 - see above
        text = store.hide(f"{type(e).__name__}: {e}")
        warnings.warn(f"The report of this fit was not written: {text}", stacklevel=5)


def _state(error: BaseException | None) -> str:
    if error is None:
        return "finished"
    return "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"


def _utc(moment: float) -> str:
    return datetime.fromtimestamp(moment, timezone.utc).isoformat(timespec="seconds")


def _masked(value: Any, store: Store) -> Any:
    """Mask the store's secrets in JSON values."""
    if isinstance(value, str):
        return store.hide(value)
    if isinstance(value, Mapping):
        return {_masked(str(name), store): _masked(each, store) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_masked(each, store) for each in value]
    return value


def masked_params(params: Mapping[str, object], hide: Callable[[str], str]) -> dict[str, str]:
    """Format values of Params as short text: objects by class, and values with a secret's name as "***".

    Args:
        params: values by name.
        hide: function that masks secrets of the store in a text, called before the text is shortened.
    """
    return {name: short_repr(_safe(value, hide)) for name, value in params.items()}


# A number counts as a secret only under these names; "max_tokens" does not match.
_SECRET_NUMBER = re.compile(r"passw|passphrase|pwd|secret|(^|_)(pass|pin)($|_)", re.I)


def _is_secret(name: str, value: object) -> bool:
    if value is None or isinstance(value, bool):
        return False
    if _SECRET_NUMBER.search(name):
        return True
    return not isinstance(value, (int, float)) and bool(addresses.SECRET_NAME.search(name))


def _safe(value: object, hide: Callable[[str], str]) -> object:
    if isinstance(value, (str, PathLike)):
        return hide(str(value))
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {
            _safe(name, hide) if isinstance(name, str) else name: "***"
            if _is_secret(str(name), each)
            else _safe(each, hide)
            for name, each in value.items()
        }
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str):
        name, of_name = value  # an item of a dict
        return [_safe(name, hide), "***" if _is_secret(name, of_name) else _safe(of_name, hide)]
    if isinstance(value, (list, tuple)):
        return [_safe(each, hide) for each in value]
    is_plain = value is None or isinstance(value, (int, float, bool, type, Store))
    is_shown = is_plain or hasattr(value, "state_dict") or hasattr(value, "__qualname__")
    return value if is_shown else type(value)


@functools.cache
def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "sparkhvd": __version__}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
