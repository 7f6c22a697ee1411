"""`KerasModel`: a trained model of Keras as a Spark ML transformer."""

from __future__ import annotations

from typing import Any

from sparkhvd.estimator import TorchModel
from sparkhvd.keras.network import Network
from sparkhvd.training.modules.copies import copied

__all__ = ["KerasModel"]


class KerasModel(TorchModel):
    """Trained model of Keras. `transform` adds its outputs to a DataFrame, a column `<label>__output` for each label.

    It comes from `KerasEstimator.fit` or `load`, which reads classes and so needs `trust=True`.
    """

    def getModel(self) -> Any:  # noqa: N802 - Horovod's name
        """Return a copy of the trained model of Keras; not compiled."""
        network = copied(self._require_fitted().module)
        assert isinstance(network, Network)
        return network.model

    def setModel(self, module: Any) -> Any:  # noqa: N802
        """Predict with a copy of another model of Keras that takes the same columns; returns this object."""
        return super().setModel(module if isinstance(module, Network) else Network(module))

    def getHistory(self) -> Any:  # noqa: N802
        """Return the metrics as Keras' `History` has them: lists by name, with an element per epoch."""
        records = self._records()
        names = {name: None for record in records for name in record if name != "epoch"}
        return {name: [record[name] for record in records if name in record] for name in names}
