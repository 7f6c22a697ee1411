"""Save and load estimators and models.

Values that do not fit into JSON and weights are pickled, and a pickle is loaded only from a trusted place.

Each module imports only those above it:

    trust           which files may run code
    encoding        values of Params as JSON and files
    local_model     saved models without Spark
    persistence     Spark ML's writers and readers
    local_pipeline  a pipeline of one model in a folder of this host, for MLflow over Spark Connect
    run_model       model of a run in the store
    recipe          what a fit on a table needs to be done again
"""
