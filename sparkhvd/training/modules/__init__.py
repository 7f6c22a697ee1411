"""Modules and their weights, apart and together.

Each module imports only those above it:

    attached       hooks and attributes of parameters
    attributes     values of attributes that state dicts leave out
    copies         copies of a module
    architecture   a module without its weights
    modes          train and eval modes of a module
    weights        a file of weights
    output_widths  widths of a module's outputs
    fitted         a trained module, its columns and its history
"""
