"""The part of each parameter that a rank steps, and how the parts of all ranks become whole again.

A **cut** parameter is divided as `reducescatter` divides rows: of its n elements, in the order of its memory, each of
N ranks has n // N, and the first n % N ranks one more (on a GPU several are divided together, see `cuda_shards`).
That suits optimizers that treat every element by itself. Others (Muon looks at a matrix, Adafactor at rows and columns)
get **whole** parameters, each with one owner.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from sparkhvd.engine.engine import Call, Collective, Work
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.torch.collectives.tensors import engine_dtype, lend, paired
from sparkhvd.torch.context import Context
from sparkhvd.torch.gradients.layout import flat, same_places

__all__ = [
    "ELEMENTWISE",
    "Gatherer",
    "Shard",
    "owners_of",
]

# Their step of an element depends on that element's gradient and state, and on numbers that all elements share.
# Subclasses may do otherwise.
ELEMENTWISE: frozenset[type[torch.optim.Optimizer]] = frozenset(
    {
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    }
)


def owners_of(sizes: Sequence[int], num_ranks: int, before: Sequence[int] = ()) -> list[int]:
    """Return an owner for each whole parameter, so that all ranks have about as many elements: largest first.

    Args:
        sizes: elements of each parameter.
        num_ranks: how many ranks there are.
        before: elements that each rank has already.
    """
    loads = list(before) or [0] * num_ranks
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        owner = loads.index(min(loads))
        owners[index] = owner
        loads[owner] += sizes[index]
    return owners


class Shard:
    """Parameter with this rank's part.

    Args:
        param: the parameter.
        name: for messages.
        own: the first element that is this rank's, in the order of memory, and the one behind the last.
        owner: the number of the rank that has all of it; -1 if it is cut.

    Attributes:
        param: the parameter.
        name: of the parameter, for messages.
        is_cut: whether every rank has a part; if not, one rank has all of it.
        first: the first element that is this rank's, in the order of memory.
        last: the element behind the last one.
        owner: of one that is not cut, its owner's number among the ranks; else -1.
        part: this rank's part for the optimizer's own step, a view of the parameter's memory; None if it has none.
    """

    __slots__ = (
        "_address",
        "_shape",
        "_strides",
        "first",
        "is_cut",
        "last",
        "name",
        "owner",
        "param",
        "part",
    )

    def __init__(
        self,
        param: Tensor,
        name: str,
        own: tuple[int, int],
        *,
        owner: int = -1,
    ) -> None:
        self.param = param
        self.name = name
        self.is_cut = owner < 0
        self.owner = owner
        self.first, self.last = own
        self._address = param.data_ptr()
        self._shape = tuple(param.shape)
        self._strides = param.stride()
        self.part: Tensor | None = None
        if self.last > self.first:
            self.part = torch.nn.Parameter(self.of(param), requires_grad=param.requires_grad)

    def of(self, tensor: Tensor) -> Tensor:
        """Return this rank's part of a tensor that lies in memory as the parameter does: a view."""
        return flat(tensor)[self.first : self.last] if self.is_cut else tensor.detach()

    def follow(self) -> None:
        """Follow the parameter if the user has given it other memory."""
        if self.param.shape != self._shape:
            raise InvalidArgumentError(
                f"DistributedOptimizer(sharded=True): {self.name!r} had shape {self._shape} when the optimizer was "
                f"built, and has {tuple(self.param.shape)} now, but memory is divided. Build DistributedOptimizer "
                "after the model has its shape."
            )
        if self.param.data_ptr() == self._address:
            return
        if self.is_cut and not same_places(self._strides, self.param):
            raise InvalidArgumentError(
                f"DistributedOptimizer(sharded=True): {self.name!r} of shape "
                f"{self._shape} had strides {self._strides} when the optimizer was built, and has "
                f"{self.param.stride()} now, but memory is divided. Use model.to(memory_format=...) before."
            )
        if self.part is not None:
            self.part.data = self.of(self.param)
        self._address = self.param.data_ptr()

    def take_gradient(self) -> None:
        """Let the optimizer's own step find this rank's part of `param.grad`."""
        if self.part is None:
            return
        grad = self.param.grad
        if grad is not None and self.is_cut:
            if grad.stride() != self.param.stride() and not same_places(grad.stride(), self.param):
                grad = torch.empty_like(self.param).copy_(grad)
            self.part.grad = flat(grad)[self.first : self.last]
        else:
            self.part.grad = grad

    def drop_gradient(self) -> None:
        """Forget the gradient: the step has ended."""
        if self.part is not None:
            self.part.grad = None

    def is_own(self, value: object) -> bool:
        """Return True if a piece of optimizer state has an element for every element of this rank's part."""
        return (
            self.part is not None and isinstance(value, Tensor) and value.shape == self.part.shape
        )


class Gatherer:
    """Makes cut tensors whole in place: every rank has its part of each and gets the others'.

    Args:
        context: whose engine does it.
        name: of the operations.
        like: tensors as they will be gathered; every rank gives as many, with as many elements of the same dtypes.
        process_set: the engine's number of the ranks.
    """

    def __init__(
        self, context: Context, name: str, like: Iterable[Tensor], process_set: int
    ) -> None:
        self._engine = context.engine
        self._calls: list[tuple[str, Call, list[int], list[int]]] = []
        by_dtype: dict[torch.dtype, list[tuple[int, Tensor]]] = {}
        for index, tensor in enumerate(like):
            by_dtype.setdefault(tensor.dtype, []).append((index, tensor))
        for number, (kind, entries) in enumerate(by_dtype.items()):
            shapes = [paired((tensor.numel(),), kind)[0] for _, tensor in entries]
            dtype = engine_dtype(name, torch.empty(0, dtype=paired((), kind)[1]))
            call = Call(Collective.ALLGATHER_INTO, shapes, dtype, process_set=process_set)
            indices = [index for index, _ in entries]
            counts = [tensor.numel() for _, tensor in entries]
            self._calls.append((f"{name}.{number}", call, indices, counts))

    def start(self, tensors: Sequence[Tensor]) -> list[Work]:
        """Submit the operations; every rank must."""
        works = []
        for name, call, indices, counts in self._calls:
            own = [tensors[index] for index in indices]
            for position, (tensor, count) in enumerate(zip(own, counts, strict=True)):
                if tensor.numel() != count:
                    raise InvalidArgumentError(
                        f"{name}: a tensor had {count} elements when its ranks agreed on it, and has shape "
                        f"{tuple(tensor.shape)} now. Build DistributedOptimizer after the model has its shape."
                    )
                address = tensor.data_ptr()
                call.place(position, address, address)
            works.append(self._engine.start(call, name, lend(*own)))
        return works

    def gather(self, tensors: Sequence[Tensor]) -> None:
        """Make the tensors whole; every rank must."""
        for work in self.start(tensors):
            work.wait()
