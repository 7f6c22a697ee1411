"""Modules and their weights, apart and together.

Each module imports only those above it:

    attributes    values of attributes outside state dicts
    torchscript   TorchScript modules: their copies and their pickle
    copies        copies of a module
    weights       a file of weights
    architecture  a module without its weights
    modes         train and eval modes of a module
    fitted        a trained module, its columns and its history
    lookups       indices beyond the embeddings of a module
"""
