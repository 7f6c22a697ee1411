"""Run the user's code inside training: callbacks, functions on batches, numbers to log.

Each module imports only those above it:

    transformations  functions on rows and batches
    watch            changes of the model by callbacks
    callbacks        the user's callbacks
"""
