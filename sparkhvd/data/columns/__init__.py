"""Describe columns: their types and shapes, and what becomes of them in a model.

Each module imports only those above it:

    ragged    rows of variable length and sparse rows in memory
    heads     what a model's outputs mean: classes, probabilities, values
    schema    how each column is stored, and all checks of it
    check     columns of a DataFrame, checked on the driver
    decoders  the user's functions from stored values to arrays
    shapes    shapes of one row, as Params give them
    features  batches of columns as the arguments of `forward`
    binding   an argument of `forward` for every feature column
    labels    label columns as the loss compares them
"""
