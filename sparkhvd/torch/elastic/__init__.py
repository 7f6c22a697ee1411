"""Elastic training with Horovod's names. `sparkhvdrun --min-np` starts it (docs/elastic.md).

    batches = sampler.batches(32)  # of an ElasticSampler
    loader = DataLoader(dataset, batch_sampler=batches)

    @elastic.run
    def train(state):
        for state.epoch in range(state.epoch, 10):
            for step, (x, y) in enumerate(loader):
                ...  # a step
                batches.record(step)
                state.commit()
            sampler.set_epoch(state.epoch + 1)

    train(elastic.TorchState(model, optimizer, sampler=sampler, epoch=0))

**Memory**: a state holds up to two copies of its objects. **Failure**: see `run`.

Each module imports only those above it:

    sampler  divides the remaining rows of an epoch among the ranks
    state    saves, restores and synchronizes the training state
    loop     `run`
"""

from sparkhvd.elastic.rendezvous import HostsUpdatedInterrupt
from sparkhvd.torch.elastic.loop import run, run_fn
from sparkhvd.torch.elastic.sampler import ElasticBatches, ElasticSampler
from sparkhvd.torch.elastic.state import ObjectState, State, TorchState

__all__ = [
    "ElasticBatches",
    "ElasticSampler",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "TorchState",
    "run",
    "run_fn",
]
