"""`SyncBatchNorm`: batch normalization with statistics over all ranks' rows."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.torch.collectives import Sum, allreduce
from sparkhvd.torch.context import context, is_initialized
from sparkhvd.torch.process_sets import ProcessSet, ProcessSets, global_process_set, members, set_id

# Counters for the layers' names: of layers numbered at creation, and of layers numbered at their first batch.
MADE = "sync_batch_norm"
LATE = "sync_batch_norm.late"

HALVES = (torch.float16, torch.bfloat16)

# Programs import the class from this module.
__all__ = ["SyncBatchNorm"]


class SyncBatchNorm(_BatchNorm):
    """Batch normalization over the batches of all ranks, as if they were one batch.

    In training every rank of the process set must call it, and run the backward pass, equally often. A rank
    without rows passes a batch of 0 rows, and the numbers of rows may differ. Evaluation does not communicate,
    nor does training on one rank or on a rank outside of the process set: there it is torch's own batch
    normalization. Gradients of weight and bias cover this rank's rows, and `DistributedOptimizer` reduces them
    like all others. A gradient of the gradient is an error.

    Accepts batches of 2 to 5 dimensions and more, (rows, channels, ...), in any memory format; 16-bit types have
    their statistics in float32. State is exchangeable with `torch.nn.BatchNorm1d` and its siblings.

    Layers may run in any order and on several threads, because each has its own name. Layers created after
    `init()` are numbered at creation: every rank must create its layers in the same order, as with
    `DistributedOptimizer`. Use torch's own layer for one rank alone. A layer created before `init()`, and
    a copy by `copy.deepcopy`, are numbered at their first batch, which must come in the same order on every
    rank; a rank may create copies that it does not train. A pickled layer keeps its name, as does a layer
    that outlives `shutdown()`. Ranks that have called `join()` count as ranks without rows.

    Args:
        num_features: channels.
        eps: added to the variance.
        momentum: weight of a batch in the running statistics; None means the average of all batches.
        affine: whether it has a weight and a bias.
        track_running_stats: whether it keeps running statistics, for evaluation.
        process_set: the ranks whose batches count as one. It need not be registered yet.
        device: of parameters and buffers.
        dtype: of parameters and buffers.

    Raises (in `forward`):
        InvalidArgumentError: the batch has fewer than 2 dimensions or other channels, or all ranks together have
            1 value per channel, which is raised on every rank.
        NotInitializedError: in training, `init()` was not called.
        MismatchError, CollectiveTimeoutError, PeerLostError: as for `allreduce`.

    Cost: in training one allreduce of 2 num_features + 1 numbers times ranks in the forward pass, and one of
    2 num_features in the backward pass if the input needs a gradient.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        process_set: ProcessSet = global_process_set,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype
        )
        if not isinstance(process_set, ProcessSet):
            raise InvalidArgumentError(
                f"SyncBatchNorm(process_set={process_set!r}): expected a ProcessSet. Give what add_process_set() "
                "returned."
            )
        self.process_set = process_set
        self._name: str | None = None
        # The counter that numbers the layer at its first batch, if it has no name.
        self._counted_as = LATE
        if is_initialized() and (number := _find(process_set).process_set_id) is not None:
            self._name = f"{MADE}.{context().number(MADE, number)}"

    @classmethod
    def convert_sync_batchnorm(
        cls, module: nn.Module, process_set: ProcessSet = global_process_set
    ) -> nn.Module:
        """Replace every `BatchNorm1d`, `2d`, `3d` and `torch.nn.SyncBatchNorm` by a layer of this class.

        The new layers use the parameters and buffers of the old layers, so an optimizer that was built before stays
        valid. A layer that occurs twice is replaced in both places. Every rank must call this with the same module.

        Returns:
            The changed module; if the module itself is a batch normalization, the new layer.

        Raises:
            InvalidArgumentError: a lazy layer has no number of channels yet.
        """
        return _convert(cls, module, process_set, {})

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise InvalidArgumentError(
                f"SyncBatchNorm: expected at least 2D input (got {input.dim()}D input). Give (rows, channels, ...)."
            )
        if input.shape[1] != self.num_features and (self.affine or self.track_running_stats):
            raise InvalidArgumentError(
                f"SyncBatchNorm({self.num_features}): the input of shape {tuple(input.shape)} has "
                f"{input.shape[1]} channels. Give {self.num_features}."
            )

    def forward(self, input: Tensor) -> Tensor:
        """Normalize a batch, in training with the statistics of all ranks' rows."""
        if not self.training:
            return super().forward(input)
        process_set = _find(self.process_set)
        number, ranks = set_id(process_set), members(process_set)
        if len(ranks) < 2 or context().engine.topology.rank not in ranks:
            return super().forward(input)
        self._check_input_dim(input)
        group = _Group(self._take_name(number), process_set)
        input = _dense(input)
        statistics = _global_statistics(input, group)
        self._track(statistics)
        normalized: Tensor = _Normalize.apply(  # type: ignore[no-untyped-call]  # torch's
            input, self.weight, self.bias, *statistics, self.eps, group
        )
        return normalized

    def _take_name(self, process_set: int) -> str:
        if self._name is None:
            self._name = context().name(self._counted_as, None, process_set)
        return self._name

    @torch.no_grad()
    def _track(self, statistics: _Statistics) -> None:
        """Update the running statistics as torch's own layers do."""
        if not self.track_running_stats:
            return
        factor = self.momentum or 0.0
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                factor = 1.0 / float(self.num_batches_tracked)
        if self.running_mean is None or self.running_var is None:
            return
        mean, variance, total = statistics
        # The clamp makes the weight 0 if no rank has rows. A comparison on the host would have to wait for the GPU.
        weight = total.clamp(max=1) * factor
        unbiased = variance * (total / (total - 1).clamp(min=1))
        for running, new in ((self.running_mean, mean), (self.running_var, unbiased)):
            running.copy_(running.to(new.dtype).lerp(new, weight))

    def __deepcopy__(self, memo: dict[int, object]) -> SyncBatchNorm:
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        # The copy needs another name, because it may run at the same time as the original. It is numbered at its first
        # batch, so a rank may create copies that it does not train.
        if made._name is not None:
            made._name, made._counted_as = None, f"{made._name}.copy"
        return made

    def __getstate__(self) -> dict[str, object]:
        # Save the ranks of the process set, because the object belongs to this process.
        is_global = self.process_set is global_process_set
        return {**self.__dict__, "process_set": None if is_global else self.process_set.ranks}

    def __setstate__(self, state: dict[str, Any]) -> None:
        ranks = state["process_set"]
        process_set = global_process_set if ranks is None else ProcessSet(ranks)
        super().__setstate__({**state, "process_set": process_set})  # type: ignore[no-untyped-call]  # torch's


class _Group(NamedTuple):
    """Process set of a layer's statistics, and the name of the layer's operations."""

    name: str
    process_set: ProcessSet


class _Statistics(NamedTuple):
    """Mean and biased variance per channel of all ranks' rows, and the number of values per channel."""

    mean: Tensor
    variance: Tensor
    total: Tensor


class _NormalizeContext(Protocol):
    """The attributes and methods of autograd's context that `_Normalize` uses."""

    bias_dtype: torch.dtype | None
    arguments: tuple[float, _Group]
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keep tensors for the backward pass."""


class _Normalize(torch.autograd.Function):
    """Normalization with given statistics.

    Its gradient treats the statistics as functions of all ranks' inputs.
    """

    @staticmethod
    def forward(  # noqa: D102
        ctx: _NormalizeContext,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        variance: Tensor,
        total: Tensor,
        eps: float,
        group: _Group,
    ) -> Tensor:
        ctx.save_for_backward(input, weight, mean, variance, total)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.arguments = (eps, group)
        return _affine(input, mean, variance, weight, bias, eps)

    @staticmethod
    @once_differentiable
    def backward(  # noqa: D102
        ctx: _NormalizeContext, gradient: Tensor
    ) -> tuple[Tensor | None, ...]:
        input, weight, mean, variance, total = ctx.saved_tensors
        eps, group = ctx.arguments
        gradient = gradient.contiguous(memory_format=_format(input))
        sums = _gradient_sums(gradient, input, mean, variance, eps)
        of_input = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            name = f"{group.name}.backward"
            everywhere = allreduce(sums, name=name, op=Sum, process_set=group.process_set)
            scale = (variance + eps).rsqrt()
            scale = scale if weight is None else scale * weight.to(scale.dtype)
            # The clamp avoids a division by 0 if no rank has rows.
            average = everywhere * (-scale / total.clamp(min=1))
            of_input = _affine(input, mean, variance, average[1], average[0], eps)
            of_input.addcmul_(gradient, scale.view(-1, *[1] * (input.dim() - 2)))
        if weight is not None and ctx.needs_input_grad[1]:
            of_weight = sums[1].to(weight.dtype)
        if ctx.bias_dtype is not None and ctx.needs_input_grad[2]:
            of_bias = sums[0].to(ctx.bias_dtype)
        return of_input, of_weight, of_bias, None, None, None, None, None


def _affine(
    input: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    """Compute `(input - mean) / sqrt(variance + eps) * weight + bias` per channel, in one pass."""
    weight, bias = (None if each is None else each.to(mean.dtype) for each in (weight, bias))
    return nn.functional.batch_norm(input, mean, variance, weight, bias, eps=eps)


def _gradient_sums(
    gradient: Tensor, input: Tensor, mean: Tensor, variance: Tensor, eps: float
) -> Tensor:
    """Sum the gradient, and its products with the normalized input, over this rank's rows for each channel."""
    if input.numel() == 0:
        return mean.new_zeros(2, len(mean))
    # The CPU kernel reads the running statistics, and the GPU kernel reads the saved statistics, so both get the same
    # values. The weight would matter only for the input's gradient, which is not requested, but the GPU kernel gives
    # its sums the weight's type.
    saved = mean, (variance + eps).rsqrt()
    _, products, plain = torch.ops.aten.native_batch_norm_backward(
        gradient, input, mean, mean, variance, *saved, False, eps, [False, True, True]
    )
    return torch.stack([plain, products])


@torch.no_grad()
def _global_statistics(input: Tensor, group: _Group) -> _Statistics:
    """Compute the statistics of all ranks' rows, with the same bits on every rank.

    Raises:
        InvalidArgumentError: there is only one value per channel; raised on every rank.
    """
    channels = input.shape[1]
    local = _local_statistics(input.detach())
    # Each rank fills its own row of zeros, and a sum collects the rows. For small operations this is faster than an
    # allgather, and ranks that wait in `hvd.join()` count as ranks without rows.
    ranks = members(group.process_set)
    rows = local.new_zeros(len(ranks), len(local))
    rows[ranks.index(context().engine.topology.rank)] = local
    name = f"{group.name}.forward"
    parts = allreduce(rows, name=name, op=Sum, process_set=group.process_set)
    # Compute in float64, so that equal float32 means of all ranks give exactly that mean, whatever the counts are.
    means, variances, counts = parts.double().split([channels, channels, 1], dim=1)
    total = counts.sum()
    # Read the total, which waits for the GPU, only if this rank has at most 1 value per channel.
    if input.numel() <= channels and total.item() == 1:
        raise InvalidArgumentError(
            "SyncBatchNorm: Expected more than 1 value per channel when training, got input size "
            f"{tuple(input.shape)} on this rank and 1 value per channel on all {len(parts)} ranks together. "
            "Give more rows, or call eval()."
        )
    # Combine the ranks' means and variances by differences of means (Chan, Golub, LeVeque 1979), because differences of
    # large sums of squares would lose precision.
    divisor = total.clamp(min=1)
    mean = (counts * means).sum(0) / divisor
    variance = (counts * (variances + (means - mean).square())).sum(0) / divisor
    return _Statistics(*(each.to(parts.dtype) for each in (mean, variance, total)))


def _local_statistics(input: Tensor) -> Tensor:
    """Compute this rank's mean and variance by channel, then the number of values per channel."""
    channels = input.shape[1]
    dtype = torch.float32 if input.dtype in HALVES else input.dtype
    if input.numel() == 0:
        return input.new_zeros(2 * channels + 1, dtype=dtype)
    running: tuple[Tensor | None, Tensor | None] = (None, None)
    if input.dtype in HALVES:
        # Pass float32 running statistics, because they make the CPU kernel compute in float32.
        running = input.new_zeros(channels, dtype=dtype), input.new_zeros(channels, dtype=dtype)
    mean, variance = torch.batch_norm_update_stats(input, *running, 0.0)
    return torch.cat([mean, variance, mean.new_full((1,), input.numel() // channels)])


def _format(input: Tensor) -> torch.memory_format:
    if not input.is_contiguous():
        for dimensions, each in ((4, torch.channels_last), (5, torch.channels_last_3d)):
            if input.dim() == dimensions and input.is_contiguous(memory_format=each):
                return each
    return torch.contiguous_format


def _dense(input: Tensor) -> Tensor:
    """Copy the tensor unless it is dense in a format with fast kernels in torch."""
    return input.contiguous(memory_format=_format(input))


def _find(process_set: ProcessSet) -> ProcessSet:
    """Find the registered set with the same ranks, if any.

    A copied layer and a new `init()` have a new object for the same ranks.
    """
    if process_set is global_process_set:
        return process_set
    return context().part(ProcessSets).by_ranks.get(tuple(process_set.ranks or ()), process_set)


def _convert(
    kind: type[SyncBatchNorm],
    module: nn.Module,
    process_set: ProcessSet,
    made: dict[nn.Module, nn.Module],
) -> nn.Module:
    if module not in made:
        result = module
        if isinstance(module, _BatchNorm):
            result = _converted(kind, module, process_set)
        made[module] = result
        for name, child in list(module._modules.items()):
            if child is not None:
                result._modules[name] = _convert(kind, child, process_set, made)
    return made[module]


def _converted(
    kind: type[SyncBatchNorm], layer: _BatchNorm, process_set: ProcessSet
) -> SyncBatchNorm:
    if isinstance(layer, nn.modules.lazy.LazyModuleMixin):
        raise InvalidArgumentError(
            f"convert_sync_batchnorm: {type(layer).__name__} does not know its channels before its first batch. "
            "Run one batch through the model first, or use the class that takes num_features (without 'Lazy')."
        )
    made = kind(
        layer.num_features,
        layer.eps,
        layer.momentum,
        layer.affine,
        layer.track_running_stats,
        process_set=process_set,
        device="meta",  # without memory, because the tensors come from the old layer
    )
    made._parameters.update(layer._parameters)
    made._buffers.update(layer._buffers)
    made.training = layer.training
    if hasattr(layer, "qconfig"):
        made.qconfig = layer.qconfig
    return made
