"""Run the user's code inside training: callbacks, functions on batches, numbers to log.

Each module imports only those above it:

    context          `ctx`, as user code sees a run
    logs             numbers that user code reports
    watch            changes of the model by callbacks
    callbacks        callbacks
    transformations  functions on rows and batches
"""
