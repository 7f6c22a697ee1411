"""Reduce gradients in buckets.

Hooks of autograd fill buckets. A complete bucket is one operation of the engine, in place if possible. `reducer` runs the cycle
from the first gradient of a backward pass to reduced gradients in `.grad`.

Each module imports only those above it:

    dense        a bucket of dense gradients
    layout       tensors in flat memory, and their parts
    cuda         a bucket on a GPU
    sharded      a bucket that gives each rank its part
    powersgd     state of low-rank gradients with error feedback
    sparse       a bucket of sparse gradients
    plan         division of gradients into buckets
    buckets      the buckets of a reducer
    negotiation  parameters and options compared between ranks
    reducer      hooks, plan and cycles
"""
