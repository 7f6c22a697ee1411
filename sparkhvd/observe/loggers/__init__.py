"""Loggers: destinations of a fit's numbers besides its report. MLflow and TensorBoard are included; others subclass `Logger`.

Everything runs on the driver, in a separate thread for each fit and logger: no logger can slow down or end a training. Failure: a
delivery that fails is retried until the server is available, after the end of the fit for at most `patience_s` seconds; then a
warning counts the losses. A refusal by the server is a warning at once. Nothing here has access to a store or its credentials:
texts are masked before.

Each module imports only those above it:

    base         interface: a logger, and the sink of one fit
    mlflow       MLflow
    tensorboard  TensorBoard
    fanout       loggers of one fit or one call of `run`, fed from the driver's own data
"""
