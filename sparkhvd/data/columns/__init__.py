"""Describe columns: their types and shapes, and what becomes of them in a model.

Each module imports only those above it:

    ragged    rows of variable length and sparse rows in memory
    heads     what a model's outputs mean: classes, probabilities, values
    schema    how each column is stored, and all checks of it
    check     columns of a DataFrame, checked on the driver
    decoders  the user's functions from stored values to arrays
    features  columns to the arguments of `forward`
    labels    label columns to what the loss compares
"""
