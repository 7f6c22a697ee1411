"""`DistributedOptimizer`: the user's optimizer, stepping with reduced gradients.

Each module imports only those above it:

    arguments           arguments, checked
    shards              the part of each parameter that a rank steps
    cuda_shards         the same on a GPU
    shared_parameters   one copy of the parameters per host
    division            division of the parameters among the ranks
    parameter_exchange  stepped parameters given to the other ranks
    whole_gradients     gradients gathered and clipped
    sharded_state       state by part, gathered whole
    distributed         reduced gradients before every step
    sharded             each rank steps its part
    adasum              combines parameter changes instead of gradients
    factory             `DistributedOptimizer`
"""

from sparkhvd.torch.optimizer.factory import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
