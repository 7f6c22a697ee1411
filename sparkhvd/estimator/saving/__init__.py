"""Save and load estimators and models.

Values that JSON and a weights file cannot hold are pickled, and a pickle is loaded only if it is trusted.

Each module imports only those above it:

    trust           decide which files may run code
    encoding        values of Params as JSON and files
    local_model     load saved models without Spark
    persistence     Spark ML's writers and readers
    local_pipeline  write a pipeline of one model to a folder of this host, for MLflow over Spark Connect
    run_model       model of a run in the store
    recipe          recipe for repeating a fit on a table
"""
