"""Loggers: where the numbers of a fit go besides its report. MLflow and TensorBoard are here; a subclass of `Logger` is any other.

Everything runs on the driver, in a thread of its own for each fit and logger: no logger can slow down a training, or end one. Failure: what a server
does not take is tried again until it is there, after the end of the fit for `patience_s` more seconds; then a warning counts what is lost. What a
server refuses is a warning at once. Nothing here knows a store or its credentials: texts are masked before they come.

Each module imports only those above it:

    base         interface: a logger, and where one fit's numbers go
    mlflow       MLflow
    tensorboard  TensorBoard
    fanout       loggers of one fit, or of one call of `run`, fed with what the driver gets anyway: records of epochs, the report, the model
"""
