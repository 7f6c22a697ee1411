"""`DistributedOptimizer`: the user's optimizer, stepping with reduced gradients.

Each module imports only those above it:

    arguments      arguments, checked
    shards         the part of each parameter that a rank steps
    distributed    reduced gradients before every step
    sharded_state  state by part, gathered
    adasum         combines parameter changes instead of gradients
    sharded        each rank steps its part
    factory        `DistributedOptimizer`
"""

from sparkhvd.torch.optimizer.factory import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
