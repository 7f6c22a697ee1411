"""`DistributedOptimizer`: the user's optimizer, stepping with reduced gradients.

Each module imports only those above it:

    arguments      checks of the arguments
    shards         the part of each parameter that a rank steps
    distributed    reduction of gradients before every step
    sharded_state  state of parts, and gathering it
    adasum         combines parameter changes instead of gradients
    sharded        each rank steps its part
    factory        `DistributedOptimizer`
"""

from sparkhvd.torch.optimizer.factory import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
