"""Reduce gradients in buckets.

Hooks of autograd fill buckets. A complete bucket is one operation of the engine, in place if possible. `reducer` runs the cycle
from the first gradient of a backward pass to reduced gradients in `.grad`.

Each module imports only those above it:

    dense        a bucket of dense gradients
    layout       positions of tensors, and of ranks' parts, in flat memory
    cuda         a bucket on a GPU
    sharded      a bucket that reduces only this rank's part
    powersgd     low-rank gradients with error feedback
    sparse       a bucket of sparse gradients
    plan         division of gradients into buckets
    buckets      the buckets of a reducer
    negotiation  comparison of parameters and options between ranks
    reducer      hooks on parameters, and the reduction cycle
"""
