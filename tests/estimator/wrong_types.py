"""Calls that type checkers refuse. mypy checks this file in `make lint`: a refusal that is missing is an unused comment there."""

from __future__ import annotations

from sparkhvd import TorchEstimator, TorchModel

TorchEstimator(batch_size=3, epochs=2, feature_cols="x", labelCol="y")
TorchEstimator(batch_sise=3)  # type: ignore[call-arg]
TorchEstimator(epochs="many")  # type: ignore[arg-type]
TorchModel(epochs=1)  # type: ignore[call-arg]
TorchEstimator(reader_pool_type="thread")  # type: ignore[call-arg]
