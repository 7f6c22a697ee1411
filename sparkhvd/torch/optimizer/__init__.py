"""`DistributedOptimizer`: the user's optimizer, stepping with reduced gradients.

Each module imports only those above it:

    shards             the part of each parameter that a rank steps
    cuda_shards        the same on a GPU
    shared_parameters  one copy of the parameters per host
    distributed        reduced gradients before every step
    sharded            each rank steps its part
    adasum             combines parameter changes instead of gradients
    factory            `DistributedOptimizer`
"""
