"""Reduce gradients in buckets.

Hooks of autograd fill buckets; a complete bucket is one operation of the engine, reduced in place where that is possible. `reducer`
runs the cycle from the first gradient of a backward pass to reduced gradients in `.grad`, and says when each part happens.

Each module imports only those above it:

    backward_end      end of the outermost backward pass
    agreement         parameters and options compared between ranks
    layout            tensors in flat memory, and their parts
    entry             a parameter whose gradients are reduced
    registered_views  gradients as views of registered memory
    dense             a bucket of dense gradients
    sharded           a bucket of which each rank gets its part
    cuda_memory       gradients in flat memory of a GPU
    cuda              a bucket on a GPU
    cuda_sharded      the same, of which each rank gets its part
    sparse            a bucket of sparse gradients
    powersgd          state of low-rank gradients with error feedback
    low_rank          a bucket of low-rank gradients
    plan              division of gradients into buckets
    buckets           the buckets of a reducer
    ready_order       order in which gradients become ready
    settlement        agreement of the ranks before the first reduction
    cycle             states of a reduction cycle
    reducer           hooks, plan and cycles
"""
