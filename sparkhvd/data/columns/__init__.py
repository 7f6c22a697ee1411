"""Describe columns: their types and shapes, and the tensors that a model gets.

Each module imports only those above it:

    ragged    rows of variable length and sparse rows in memory
    heads     meaning of a model's outputs: classes, probabilities, values
    schema    type, shape and storage of each column
    storage   Spark types as stored types and tensors
    check     columns of a source, checked on the driver
    images    decoder of images
    texts     tokens of texts
    shapes    shapes of one row, as Params give them
    decoders  the user's functions from stored values to arrays
    features  batches of columns as the arguments of `forward`
    binding   an argument of `forward` for every feature column
    labels    label columns as the loss compares them
"""
