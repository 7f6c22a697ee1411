"""Log to MLflow: a run per fit with Params, numbers of each epoch, the report, and the model in two flavours."""

from __future__ import annotations

import copy
import hashlib
import inspect
import json
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from sparkhvd._version import __version__
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.observe.loggers.base import Fit, Logger, Metric, Sink

if TYPE_CHECKING:
    from typing_extensions import Self


# Names of the logged model in the flavours `spark` and `pytorch`.
SPARK_NAME, PYTORCH_NAME = "model", "pytorch-model"
# Tag by which a resumed fit finds its run of MLflow.
_RUN_TAG = "sparkhvd.run_id"
# Limits of MLflow's servers.
_MOST_PARAMS, _LONGEST_TEXT = 100, 500
# Characters that MLflow rejects in names.
_NOT_IN_NAMES = re.compile(r"[^\w\-. /:]", re.ASCII)
# Longest wait in s for the server's answer to an availability check.
_ANSWER_S = 5.0


class MLflowLogger(Logger):
    """MLflow logger for the run active at the call of `fit`, or for a new run.

    Each fit of a grid or of folds has its own run below the active run.
    """

    def __init__(
        self,
        experiment: str | None = None,
        *,
        tracking_uri: str | None = None,
        run_name: str | None = None,
        run_id: str | None = None,
        tags: Mapping[str, str] | None = None,
        log_model: bool = True,
        registered_model_name: str | None = None,
        patience_s: float = 60.0,
    ) -> None:
        """Log with MLflow's settings, or with the given settings.

        Args:
            experiment: name of the experiment, created if missing; default MLflow's active experiment.
            tracking_uri: URI of the server; default `mlflow.get_tracking_uri()` when `fit` is called.
            run_name: name of the run; default the name of the run in the store.
            run_id: id of an existing run of MLflow to log to.
            tags: tags of the run.
            log_model: also log the model.
            registered_model_name: also register the logged model (flavour `spark`) under this name, created if missing,
                as a new version that knows the tables of the training.
            patience_s: seconds that a fit waits at its end for an unresponsive server.

        Raises:
            InvalidArgumentError: the package mlflow is missing, or a model is to be registered but not logged.
        """
        if util.find_spec("mlflow") is None:
            raise InvalidArgumentError(
                "MLflowLogger needs the package mlflow. Install it: pip install 'sparkhvd[mlflow]'."
            )
        self.experiment, self.tracking_uri = experiment, tracking_uri
        self.run_name, self.run_id, self.tags = run_name, run_id, dict(tags or {})
        if registered_model_name is not None and not log_model:
            raise InvalidArgumentError(
                f"MLflowLogger: registered_model_name is {registered_model_name!r}, but log_model is False, so there is no model to "
                "register. Leave one of them out."
            )
        self.log_model, self.patience_s = log_model, patience_s
        self.registered_model_name = registered_model_name
        self._parent = ""  # id of the parent run for the runs of a grid

    def __repr__(self) -> str:
        return f"MLflowLogger({self.experiment!r})" if self.experiment else "MLflowLogger()"

    def bound(self) -> Self:
        """Copy the logger. The copy makes its runs below the currently active run."""
        that = copy.copy(self)
        that._parent = self._parent or self._active()
        return that

    def _active(self) -> str:
        """Find the id of this thread's active run to use, or return "" without such a run."""
        import mlflow

        is_elsewhere = self.run_id or self.tracking_uri or self.experiment
        active = None if is_elsewhere else mlflow.active_run()
        return "" if active is None else str(active.info.run_id)

    def begin(self, fit: Fit) -> Sink:
        """Make the sink. The run is chosen here, because the active run belongs to the calling thread."""
        import mlflow

        active = self._parent or self._active()
        is_part = bool(self._parent or fit.label)
        run_id, parent = (self.run_id or "", active) if is_part else (self.run_id or active, "")
        uri = self.tracking_uri or mlflow.get_tracking_uri()
        return _Run(self, fit, uri=uri, run_id=run_id, parent=parent)

    @classmethod
    def of_autolog(cls) -> Self | None:
        """Make the logger for `mlflow.pyspark.ml.autolog()`, or return None if it is off, or no run is active."""
        if "mlflow.pyspark.ml" not in sys.modules:
            return None
        import mlflow
        from mlflow.utils import autologging_utils

        name = "pyspark.ml"
        if autologging_utils.autologging_is_disabled(name) or mlflow.active_run() is None:
            return None
        return cls(log_model=bool(autologging_utils.get_autologging_config(name, "log_models")))


class _Run(Sink):
    """MLflow run for one fit's numbers."""

    def __init__(
        self, logger: MLflowLogger, fit: Fit, *, uri: str, run_id: str, parent: str
    ) -> None:
        address = urlsplit(uri)
        self._server = uri if address.scheme in ("http", "https") else ""
        # The message shows the host without user name and password.
        host = address.netloc.rpartition("@")[2]
        self.place = f"MLflow at {host}" if self._server else "MLflow"
        self._logger, self._fit, self._uri = logger, fit, uri
        self._run_id, self._parent = run_id, parent
        self._is_own = not run_id
        self._logged_models: set[str] = set()
        self._registered = False
        self._data: Mapping[str, Any] = {}

    def start(self) -> None:
        """Find or make the run, and log the facts known at the start."""
        self._ask()
        from mlflow import MlflowClient
        from mlflow.entities import Param, RunTag

        self._client = MlflowClient(tracking_uri=self._uri)
        if not self._run_id:
            self._run_id = self._interrupted() or self._make()
        known = self._client.get_run(self._run_id).data.params
        params = [
            Param(name, text[:_LONGEST_TEXT])
            for name, text in self._fit.params.items()
            if name not in known  # MLflow does not allow changes of a run's Params
        ]
        tags = {**self._fit.tags, _RUN_TAG: self._fit.run_id, **self._logger.tags}
        marks = [RunTag(name, text) for name, text in tags.items()]
        for begin in range(0, max(1, len(params)), _MOST_PARAMS):
            part = params[begin : begin + _MOST_PARAMS]
            self._client.log_batch(self._run_id, params=part, tags=[] if begin else marks)

    def _experiment_id(self) -> str:
        import mlflow
        from mlflow.tracking import fluent

        name = self._logger.experiment
        if name is None:
            if self._parent:
                return str(self._client.get_run(self._parent).info.experiment_id)
            return str(fluent._get_experiment_id())
        found = self._client.get_experiment_by_name(name)
        if found is not None:
            return str(found.experiment_id)
        try:
            return str(self._client.create_experiment(name))
        except mlflow.MlflowException:  # another fit may have created the experiment meanwhile
            found = self._client.get_experiment_by_name(name)
            if found is None:
                raise
            return str(found.experiment_id)

    def _interrupted(self) -> str:
        """Find and reactivate the MLflow run of an interrupted fit, or return "" without it."""
        if not self._fit.epochs_done:
            return ""
        wanted = f"tags.`{_RUN_TAG}` = '{self._fit.run_id}'"
        found = self._client.search_runs([self._experiment_id()], wanted, max_results=1)
        if not found:
            return ""
        run_id = str(found[0].info.run_id)
        self._client.update_run(run_id, status="RUNNING")
        return run_id

    def _make(self) -> str:
        from mlflow.tracking.context import registry

        tags = {"mlflow.runName": self._logger.run_name or self._fit.label or self._fit.run_id}
        if self._parent:
            tags["mlflow.parentRunId"] = self._parent
        made = self._client.create_run(self._experiment_id(), tags=registry.resolve_tags(tags))
        return str(made.info.run_id)

    def log(self, metrics: Sequence[Metric]) -> None:
        """Log numbers in one request."""
        self._ask()
        from mlflow.entities import Metric as Number

        numbers = [
            Number(_NOT_IN_NAMES.sub("_", m.name), m.value, int(m.time * 1000), m.step)
            for m in metrics
        ]
        self._client.log_batch(self._run_id, metrics=numbers)

    def log_data(self, data: Mapping[str, Any]) -> None:
        """Log each table of the training as an input of the run, or the rows if they do not come from a table."""
        self._data = data
        self._ask()
        from mlflow.entities import Dataset, DatasetInput, InputTag

        profile = json.dumps({"num_rows": data["rows"]})
        columns = json.dumps({"columns": data["columns"]})
        inputs = [
            DatasetInput(
                Dataset(
                    name=table["name"][:_LONGEST_TEXT],
                    digest=_short_digest(table),
                    source_type=f"{table['format']}_table",
                    source=json.dumps({n: table[n] for n in ("url", "version", "uuid", "where")}),
                    schema=columns,
                    profile=profile,
                ),
                tags=[InputTag("mlflow.data.context", "training")],
            )
            for table in data["tables"]
            or [
                {
                    "name": "training rows",
                    "format": "spark",
                    "url": "",
                    "version": 0,
                    "uuid": data["digest"],
                    "where": "",
                }
            ]
        ]
        self._client.log_inputs(self._run_id, inputs)

    def log_model(self, model: Any) -> None:
        """Log the model in both flavours, once each, and register it.

        Raises:
            InvalidArgumentError: MLflow cannot save the model in a flavour.
        """
        if not self._logger.log_model:
            return
        self._ask()
        import mlflow.pytorch
        import mlflow.spark

        requirements = [f"sparkhvd=={__version__}", *_installed("torch", "pyspark")]
        flavours: dict[str, Callable[[str], object]] = {
            SPARK_NAME: lambda folder: mlflow.spark.save_model(
                model._for_mlflow(), folder, pip_requirements=requirements
            ),
            PYTORCH_NAME: lambda folder: mlflow.pytorch.save_model(
                model.getModel(), folder, pip_requirements=requirements[1:], **_as_pickle()
            ),
        }
        problems = []
        for name, save in flavours.items():
            if name in self._logged_models:
                continue
            with tempfile.TemporaryDirectory(prefix="sparkhvd-mlflow-") as parent:
                folder = str(Path(parent, "saved"))
                try:
                    save(folder)
                except Exception as e:  # noqa: BLE001 - a retry would not help, so the error becomes a warning
                    problems.append(f"{name}: {type(e).__name__}: {e}")
                else:
                    self._client.log_artifacts(self._run_id, folder, name)
            self._logged_models.add(name)
        if problems:
            raise InvalidArgumentError("; ".join(problems))
        self._register()

    def _register(self) -> None:
        """Register the logged model, once."""
        name = self._logger.registered_model_name
        if name is None or self._registered:
            return
        import mlflow

        try:
            self._client.create_registered_model(name)
        except mlflow.MlflowException as e:
            if e.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        tables = {
            f"sparkhvd.table.{number}": f"{table['name']}@{table['version']}"[:_LONGEST_TEXT]
            for number, table in enumerate(self._data.get("tables", ()))
        }
        source = f"{self._client.get_run(self._run_id).info.artifact_uri}/{SPARK_NAME}"
        self._client.create_model_version(
            name, source, self._run_id, tags={**tables, _RUN_TAG: self._fit.run_id}
        )
        self._registered = True

    def finish(self, state: str, files: Mapping[str, bytes]) -> None:
        """Log the report, and end the run if this fit started it."""
        self._ask()
        with tempfile.TemporaryDirectory(prefix="sparkhvd-mlflow-") as folder:
            for name, data in files.items():
                Path(folder, name).write_bytes(data)
            if files:
                self._client.log_artifacts(self._run_id, folder, "report")
        if self._is_own:
            ends = {"finished": "FINISHED", "interrupted": "KILLED"}
            self._client.set_terminated(self._run_id, ends.get(state, "FAILED"))

    def _ask(self) -> None:
        """Check that the server is available, because MLflow's own calls retry for minutes.

        Raises:
            ConnectionError: the server is not available.
        """
        if not self._server:
            return
        import requests

        gone = (requests.exceptions.ConnectionError, requests.exceptions.Timeout)
        try:
            requests.get(f"{self._server.rstrip('/')}/health", timeout=_ANSWER_S)
        except requests.exceptions.SSLError:
            return  # the server is available; MLflow has its own settings for certificates
        except gone as e:
            raise ConnectionError(type(e).__name__) from None

    def is_refused(self, error: Exception) -> bool:
        """True for an error of the request, and False for a failure of server or connection."""
        if isinstance(error, (ConnectionError, TimeoutError)):
            return False
        status = getattr(error, "get_http_status_code", None)
        if status is None:
            return not type(error).__module__.startswith(("requests", "urllib3"))
        return 400 <= status() < 500 and status() not in (408, 429)


def _short_digest(table: Mapping[str, Any]) -> str:
    """Make a digest of a table's version of at most 36 characters, MLflow's limit."""
    parts = [table["uuid"], table["version"], table["where"]]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _as_pickle() -> dict[str, str]:
    """Make the argument for pickling the module in MLflow.

    By default, newer versions need an example input.
    """
    import mlflow.pytorch

    name = "serialization_format"
    return (
        {name: "pickle"} if name in inspect.signature(mlflow.pytorch.save_model).parameters else {}
    )


def _installed(*packages: str) -> list[str]:
    return [f"{name}=={metadata.version(name).partition('+')[0]}" for name in packages]
