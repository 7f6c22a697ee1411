"""Train a PyTorch model on a Spark DataFrame and use it as a Spark ML transformer.

    from sparkhvd.estimator import Store, TorchEstimator

    model = TorchEstimator(model=net, optimizer=torch.optim.Adam, loss=nn.CrossEntropyLoss(), ...).fit(df)
    model.transform(df)

Names are imported on first use, so that ranks and Python workers load only the modules that they need.

Processes: everything runs on the driver, except that `transform.worker` runs in Spark's Python workers. Ranks run
`sparkhvd.training`.

Threads: several threads may call `fit` at once, as a CrossValidator does. A thread prints epochs while ranks train.

Trust: a saved model or estimator with the user's classes, functions or paths is loaded only from a trusted place
(`saving`).

Failure: errors that the driver can detect are raised before the first Spark job. If a rank fails, the last checkpoint
stays, and a fit with the same `run_id` resumes from it.

Each module imports only those above it:

    evaluation  measures of predictions
    importance  permutation importance of features
    params      the table of Params
    fitting     the parts of a fit
    transform   the parts of a transform
    saving      saved models and estimators
    base        base of estimators that launch ranks
    model       `TorchModel`
    estimator   `TorchEstimator`
    predictors  `TorchClassifier`, `TorchRegressor` and their models
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from sparkhvd.spark import needs_pyspark

if TYPE_CHECKING:
    from sparkhvd.data.columns.decoders import pad as pad
    from sparkhvd.data.columns.images import image as image
    from sparkhvd.data.columns.texts import tokenizer as tokenizer
    from sparkhvd.data.packed import read_packed as read_packed
    from sparkhvd.data.store.store import Store as Store
    from sparkhvd.estimator.estimator import TorchEstimator as TorchEstimator
    from sparkhvd.estimator.model import TorchModel as TorchModel
    from sparkhvd.estimator.predictors import TorchClassificationModel as TorchClassificationModel
    from sparkhvd.estimator.predictors import TorchClassifier as TorchClassifier
    from sparkhvd.estimator.predictors import TorchRegressionModel as TorchRegressionModel
    from sparkhvd.estimator.predictors import TorchRegressor as TorchRegressor
    from sparkhvd.estimator.saving.local_model import load_local as load_local
    from sparkhvd.estimator.saving.trust import trust as trust
    from sparkhvd.estimator.transform.local import LocalModel as LocalModel
    from sparkhvd.training.user_code.callbacks import Callback as Callback

_HOMES = {
    "Callback": "sparkhvd.training.user_code.callbacks",
    "LocalModel": "sparkhvd.estimator.transform.local",
    "Store": "sparkhvd.data.store.store",
    "TorchClassificationModel": "sparkhvd.estimator.predictors",
    "TorchClassifier": "sparkhvd.estimator.predictors",
    "TorchEstimator": "sparkhvd.estimator.estimator",
    "TorchModel": "sparkhvd.estimator.model",
    "TorchRegressionModel": "sparkhvd.estimator.predictors",
    "TorchRegressor": "sparkhvd.estimator.predictors",
    "image": "sparkhvd.data.columns.images",
    "load_local": "sparkhvd.estimator.saving.local_model",
    "pad": "sparkhvd.data.columns.decoders",
    "read_packed": "sparkhvd.data.packed",
    "tokenizer": "sparkhvd.data.columns.texts",
    "trust": "sparkhvd.estimator.saving.trust",
}

__all__ = sorted(_HOMES)  # noqa: PLE0605 - computed, so that each name is written only once


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'sparkhvd.estimator' has no attribute {name!r}")
    with needs_pyspark(f"sparkhvd.estimator.{name}"):
        return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
