"""Calls that type checkers refuse. `make lint` runs mypy on this file: if it accepts a call, the call's ignore comment is unused."""

from __future__ import annotations

from sparkhvd import TorchEstimator, TorchModel

TorchEstimator(batch_size=3, epochs=2, feature_cols="x", labelCol="y")
TorchEstimator(batch_sise=3)  # type: ignore[call-arg]
TorchEstimator(epochs="many")  # type: ignore[arg-type]
TorchModel(epochs=1)  # type: ignore[call-arg]
TorchEstimator(reader_pool_type="thread")  # type: ignore[call-arg]
