"""Modules and their weights: copies, pickles, files.

Each module imports only those above it:

    attributes    values of attributes outside state dicts
    torchscript   copies and pickles of TorchScript modules
    copies        copies of a module
    weights       a file of weights
    architecture  a module without its weights
    modes         train and eval modes of a module
    fitted        a trained module, its columns and its history
    lookups       indices that are out of range of an embedding
"""
