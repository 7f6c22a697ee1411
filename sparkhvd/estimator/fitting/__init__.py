"""Fit: from the Params and a DataFrame to the ranks' task, on the driver.

Everything is checked before the first Spark job.

Each module imports only those above it:

    cluster           ranks, GPUs and settings that the session gives
    inputs            data of a fit: sources, checked columns, prepared rows
    loop              options of the training loop
    runs              runs of the store, and the fits that may resume them
    trial             model and labels, tried on zeros
    request           checked request of a fit
    specify           the ranks' spec
    status_line       how far the fits of this process are, in one line
    progress          epochs, shown while the ranks train
    recorder          report of a fit
    cross_validation  fits that share their data
    on_parquet        sources of `fit_on_parquet`
"""
