"""Save and load estimators and models.

What JSON and weights cannot hold is pickled, and a pickle runs only where somebody has said that its place is trusted.

Each module imports only those above it:

    trust           which files may run code
    encoding        values of Params as JSON and files
    decoding        values of Params from these
    persistence     Spark ML's writers and readers
    local_pipeline  files of a pipeline on this host, without a JVM
    run_model       model of a run in the store
"""
