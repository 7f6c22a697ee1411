"""Batch normalization over all ranks during a fit: `Trainer(sync_batchnorm=True)`."""

from __future__ import annotations

from torch import nn

from sparkhvd.torch import SyncBatchNorm

__all__ = ["SynchronizedLayers"]


class SynchronizedLayers:
    """Replaces layers of batch normalization, and puts them back.

    torch's own synchronized layer runs on GPUs only; this one is `sparkhvd.torch.SyncBatchNorm`, which shares parameters, buffers and
    names with the layer that it stands for.
    """

    def __init__(self) -> None:
        self._replaced: dict[nn.Module, nn.Module] = {}

    def apply(self, model: nn.Module) -> nn.Module:
        """Replace every layer of batch normalization; every rank must call it."""
        before = dict(model.named_modules(remove_duplicate=False))
        model = SyncBatchNorm.convert_sync_batchnorm(model)
        for name, layer in model.named_modules(remove_duplicate=False):
            if layer is not before[name]:
                self._replaced[layer] = before[name]
        return model

    def revert(self, model: nn.Module) -> nn.Module:
        """Put the layers back, with what the others have learned."""
        for parent in list(model.modules()):
            for name, child in parent._modules.items():
                if child in self._replaced:
                    parent._modules[name] = _with_state_of(child, self._replaced[child])
        self._replaced = {}
        return model


def _with_state_of(new: nn.Module, layer: nn.Module) -> nn.Module:
    layer._parameters.update(new._parameters)
    layer._buffers.update(
        new._buffers
    )  # a module that moves to another device or type has new ones
    layer.train(new.training)
    return layer
