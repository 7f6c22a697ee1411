"""Parts of a fit on the driver, from the Params and a DataFrame to the task of the ranks.

Arguments are checked before the first Spark job.

Each module imports only those above it:

    cluster           ranks, GPUs and settings from the session
    cross_validation  fits that share their data
    inputs            data of a fit: sources, checked columns, prepared rows
    recorder          report of a fit
    runs              runs in the store, and which fits may resume them
    status_line       progress of this process's fits in one line
    on_parquet        sources of `fit_on_parquet`
    on_table          source of `fit_on_table`
    progress          reports of epochs while the ranks train
    request           checked request of a fit
    train_spec        spec of the ranks, from a checked request and prepared data
"""
