"""Describe columns: their types and shapes, and the model's tensors.

Each module imports only those above it:

    images    decoder of images
    ragged    rows of variable length and sparse rows in memory
    schema    type, shape and storage of each column
    check     columns of a source, checked on the driver
    texts     tokens of texts
    binding   an argument of `forward` for every feature column
    decoders  the user's functions from stored values to arrays
    labels    label columns as tensors for the loss
"""
