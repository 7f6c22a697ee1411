"""Loggers send a fit's numbers to MLflow, TensorBoard or, by a subclass of `Logger`, to other destinations.

All loggers run on the driver, in a separate thread for each fit and logger, so a logger cannot slow down or end a
training.
Failure: a failed delivery is retried until the server is available. After the end of the fit, retries last at most
`patience_s` seconds; then a warning counts the lost entries. If the server refuses an entry, there is a warning at
once.
Secrets: loggers have no access to a store or its credentials, and secrets in texts are masked before loggers get them.

Each module imports only those above it:

    base         interface of loggers, and of the sink of one fit
    mlflow       MLflow
    tensorboard  TensorBoard
    fanout       sends the driver's data to the loggers of a fit or a call of `run`
"""
