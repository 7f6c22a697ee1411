"""Take modules apart from their weights, and put them together again.

Each module imports only those above it:

    architecture   a module without its weights
    weights        a file of weights
    output_widths  widths of a module's outputs
    fitted         a trained module, its columns and its history
"""
