"""`DistributedOptimizer`: makes a Keras optimizer step with gradients reduced over all ranks.

On the torch backend the variables of a model are torch parameters. So a `DistributedOptimizer` of `sparkhvd.torch`,
over a torch optimizer without any other effect, reduces their gradients during backward. Keras' own optimizer then
steps.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

import sparkhvd.torch as hvd
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.keras.backend import keras
from sparkhvd.torch.arguments import check_compression, to_integer
from sparkhvd.torch.collectives.tensors import to_op
from sparkhvd.torch.gradients.reducer import after_backward
from sparkhvd.torch.optimizer.arguments import check_arguments, group_lists
from sparkhvd.torch.process_sets import members

_Gradients = Sequence["Tensor | None"]


def follows_schedule(optimizer: Any) -> bool:
    """Whether the learning rate of an optimizer is a schedule, and so cannot be set."""
    schedule = keras.optimizers.schedules.LearningRateSchedule
    return isinstance(getattr(optimizer, "_learning_rate", None), schedule)


class _Reduction(torch.optim.Optimizer):
    """Torch optimizer without updates: made distributed, it only reduces gradients."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Do nothing."""
        del closure


@dataclass(frozen=True)
class _Options:
    """Arguments of a `DistributedOptimizer`.

    Attributes:
        passes: batches whose gradients are accumulated before reduction.
        is_mean: whether these sums are divided by `passes`.
        reduction: further arguments of torch's.
    """

    passes: int
    is_mean: bool
    reduction: dict[str, Any]


class Distributed:
    """Mixin to reduce gradients before the optimizer's own class applies them.

    Attributes:
        loss_share: factor of the loss in the next backward pass. If the ranks have different numbers of rows, the
            factor must be the rank's number divided by the mean over ranks; then the reduced gradient is the mean over
            all rows.
    """

    loss_share = 1.0
    _plain_class: type[Any]
    _options: _Options | None = None
    _reducing: Any = None
    _held: contextlib.ExitStack | None = None
    _sums: tuple[Tensor | None, ...] = ()
    _pass = 0
    _end_part: Callable[[str], object] | None = None
    # Keras'.
    built: bool
    _trainable_variables: list[Any]

    @classmethod
    def from_config(cls, config: dict[str, Any], **options: Any) -> Any:
        """Make a plain optimizer, the form for pickling and saving."""
        return cls._plain_class.from_config(config, **options)

    def __reduce__(self) -> tuple[Any, ...]:
        made: Any = super().__reduce__()
        return self._plain_class._unpickle_model, *made[1:]

    def build(self, variables: Sequence[Any]) -> None:
        """Make the optimizer's variables. The first backward pass on these starts the reduction."""
        super().build(variables)  # type: ignore[misc]
        self._watch()

    def _watch(self) -> None:
        """Start reducing at the end of the first backward pass.

        The ranks synchronize at the start, so it must not be earlier: a rank may build an optimizer that other ranks do
        not.
        """
        if self._options is None or self._options.passes > 1:
            return
        reference = weakref.ref(self)
        hooks: list[RemovableHandle] = []

        def end() -> None:
            optimizer = reference()
            if optimizer is not None:
                optimizer._attach()
                optimizer._reducing.synchronize()

        def begin(_: Tensor) -> None:
            if hooks:
                after_backward(end)
            while hooks:
                hooks.pop().remove()

        hooks += [
            variable.value.register_post_accumulate_grad_hook(begin)
            for variable in self._trainable_variables
        ]

    def _attach(self) -> None:
        if self._options is None or self._reducing is not None:
            return
        options = self._options
        variables = self._trainable_variables
        named = [(f"{number}.{v.path}", v.value) for number, v in enumerate(variables)]
        reducing = hvd.DistributedOptimizer(
            _Reduction([parameter for _, parameter in named]), named, **options.reduction
        )
        held = contextlib.ExitStack()
        if options.passes > 1:
            # Disable the hooks: Keras drops the gradients after every batch, so this class accumulates them itself.
            held.enter_context(reducing.no_sync())  # type: ignore[attr-defined]
        # Bypass `setattr`, because Keras' version searches the value for variables.
        vars(self).update(_reducing=reducing, _held=held)

    def watch_parts(self, end_part: Callable[[str], object]) -> None:
        """Call a function with the name of each finished part of a step: "forward", "backward", "wait for gradients",
        "optimizer".
        """
        vars(self)["_end_part"] = end_part

    def _ended(self, part: str) -> None:
        if self._end_part is not None:
            self._end_part(part)

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Scale the loss for backward."""
        self._ended("forward")
        scaled: Tensor = super().scale_loss(loss)  # type: ignore[misc]
        return scaled if self.loss_share == 1.0 else scaled * self.loss_share

    def apply(self, grads: _Gradients, trainable_variables: Sequence[Any] | None = None) -> None:
        """Step with the gradients of all ranks. Every rank must call it equally often.

        Args:
            grads: of this rank, or the program's modified reduced gradients from `.grad` after `backward()`.
            trainable_variables: of the gradients; None = all.
        """
        options = self._options
        if options is None or not grads:
            super().apply(grads, trainable_variables)  # type: ignore[misc]
            return
        self._ended("backward")
        if not self.built:
            with keras.name_scope(vars(self)["name"]):
                self.build(list(trainable_variables or ()))
        variables = (
            self._trainable_variables if trainable_variables is None else list(trainable_variables)
        )
        sums = self._add_up(grads, options)
        if sums is None:
            return
        reduced = self._reduced(sums, [variable.value for variable in variables])
        self._ended("wait for gradients")
        super().apply(reduced, variables)  # type: ignore[misc]
        self._ended("optimizer")

    def _add_up(self, grads: _Gradients, options: _Options) -> _Gradients | None:
        """Add up the gradients of `backward_passes_per_step` batches.

        The result is None before the last batch.
        """
        if options.passes == 1:
            return grads
        before = self._sums or (None,) * len(grads)
        # Copy the gradients, because a program may set them to zero in place.
        sums = [
            (None if g is None else g.clone()) if s is None else (s if g is None else s + g)
            for s, g in zip(before, grads, strict=True)
        ]
        passed = self._pass + 1
        is_last = passed == options.passes
        vars(self).update(_sums=() if is_last else tuple(sums), _pass=0 if is_last else passed)
        if not is_last:
            return None
        return (
            [None if s is None else s / options.passes for s in sums] if options.is_mean else sums
        )

    def _reduced(self, grads: _Gradients, parameters: Sequence[Tensor]) -> _Gradients:
        self._attach()
        reducing = self._reducing
        if not reducing._reducers:  # one rank
            return grads
        if all(reducer.is_reduced for reducer in reducing._reducers):
            with reducing.skip_synchronize():
                reducing.step()  # ends the use of the reduced gradients
            return grads
        every = [p for group in reducing.param_groups for p in group["params"]]
        kept = [p.grad for p in every]
        for parameter in every:
            parameter.grad = None
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = None if grad is None else grad.detach().to(parameter.dtype)
        try:
            reducing.step()
            return [parameter.grad for parameter in parameters]
        finally:
            for parameter, grad in zip(every, kept, strict=True):
                parameter.grad = grad


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = hvd.Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Any = hvd.Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: hvd.ProcessSet = hvd.global_process_set,
) -> Any:
    """Wrap a Keras optimizer to step with gradients reduced over all ranks.

    Every rank must make it, and train a model with the same variables in the same order; ranks that differ get a `MismatchError`
    in their first step. Gradients are reduced in buckets during `loss.backward()`, and are in `.grad` when it returns, so that
    changes of them by the user's `train_step` are the same on every rank. Gradients from elsewhere, such as
    `torch.autograd.grad`, are reduced in `apply`.

    The result's class is a subclass of the optimizer's own with the same name. It shares variables with the given optimizer,
    which should not be used any more. Saved with its model, pickled or copied it is the plain optimizer: `load_model` makes it
    distributed again. With one rank nothing is communicated.

    Args:
        optimizer: any of Keras, also a built one, or a `LossScaleOptimizer`.
        name: of the optimizer; None = its own.
        device_dense: Horovod's, without effect.
        device_sparse: the same.
        compression: `Compression.fp16`, `.bf16`, or `Compression.powersgd(rank=4)`, one for each optimizer.
        sparse_as_dense: send sparse gradients as dense ones.
        gradient_predivide_factor: with Average, divide by this before and by size / this after the sum.
        op: Average, Sum, Min, Max or Product.
        backward_passes_per_step: batches whose gradients are accumulated before they are reduced and applied. Batches
            between do not count as iterations.
        average_aggregated_gradients: divide these sums by `backward_passes_per_step`.
        num_groups: deprecated; give `groups`.
        groups: a number of buckets, or lists of variables that share one.
        process_set: the ranks whose gradients are combined.

    Raises:
        InvalidArgumentError: an argument is wrong; of groups only in the first step.
        NotInitializedError: `init()` was not called.
    """
    del device_dense, device_sparse
    if isinstance(optimizer, Distributed):
        raise InvalidArgumentError(
            "DistributedOptimizer: the optimizer is already a DistributedOptimizer. Give the plain optimizer."
        )
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise InvalidArgumentError(
            f"DistributedOptimizer: expected an optimizer of Keras, got {type(optimizer).__name__}. Give for example "
            "keras.optimizers.SGD(0.1)."
        )
    op = to_op(op)
    passes, predivide = check_arguments(op, backward_passes_per_step, gradient_predivide_factor)
    check_compression("DistributedOptimizer", compression)
    members(process_set)
    if op is hvd.Adasum:
        raise InvalidArgumentError(
            "DistributedOptimizer: op=Adasum is not supported for Keras, because it combines the optimizer's steps and not the gradients. "
            "Give op=Average, or train with sparkhvd.torch."
        )
    if groups is not None and to_integer(groups) is None:
        variables: list[list[Any]] = group_lists(groups)
        groups = [[variable.value for variable in group] for group in variables]
    reduction = {
        "compression": compression,
        "op": op,
        "gradient_predivide_factor": predivide,
        "num_groups": num_groups,
        "groups": groups,
        "sparse_as_dense": sparse_as_dense,
        "process_set": process_set,
    }
    own: Any = type(optimizer)
    kind = _distributed_class(own)
    made = kind.__new__(kind)
    vars(made).update(vars(optimizer))
    options = _Options(passes, average_aggregated_gradients, reduction)
    vars(made).update(_options=options, **({} if name is None else {"name": name}))
    if made.built:
        made._watch()
    return made


@functools.cache
def _distributed_class(kind: Any) -> Any:
    """Make the subclass of an optimizer's class, once per class."""
    made = type(
        kind.__name__,
        (Distributed, kind),
        {"__module__": kind.__module__, "__doc__": kind.__doc__, "_plain_class": kind},
    )
    registered = keras.saving.get_registered_name(kind)
    package, separator, name = registered.partition(">")
    if separator:  # saved models must have the name of the user's class to load as before
        for each in (made, kind):
            keras.saving.register_keras_serializable(package, name)(each)
    return made


# ----------------------------------------------------------------------------------------------------
# Keras models from files, with distributed optimizers.


def load_model(
    filepath: str | PathLike[str],
    custom_optimizers: Iterable[type[Any]] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Any = hvd.Compression.none,
) -> Any:
    """Load a saved model. Its optimizer continues, with its state, as a `DistributedOptimizer`.

    Every rank must load it, or get its variables by `BroadcastGlobalVariablesCallback`. An uncompiled model stays uncompiled.

    Args:
        filepath: a `.keras` or `.h5` file.
        custom_optimizers: classes of the user's own optimizers.
        custom_objects: other classes and functions by name.
        compression: of gradients.
    """
    own = {kind.__name__: kind for kind in custom_optimizers or ()}
    model = keras.saving.load_model(filepath, custom_objects={**own, **(custom_objects or {})})
    if getattr(model, "optimizer", None) is not None:
        model.optimizer = DistributedOptimizer(model.optimizer, compression=compression)
    return model
