"""Arguments in other forms work as meant, or raise an `InvalidArgumentError` with the remedy at once."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import sparkhvd.torch as hvd
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.torch.arguments import to_integer
from tests.torch.on_ranks import on_ranks

pytestmark = pytest.mark.ranks

try:
    from torch.distributed.tensor import Shard, distribute_tensor
except ImportError:  # torch 2.4
    from torch.distributed._tensor import Shard, distribute_tensor


def ones(count: int = 2) -> Tensor:
    return torch.ones(count)


def each(*tensors: Tensor) -> Iterator[Tensor]:
    """Yield the tensors, once."""
    return (tensor for tensor in tensors)


def refused(call: Callable[[], Any], message: str, size: int = 1) -> None:
    """Check that the call raises an error on every rank, that its message begins with `message`, and that the next operation works."""

    def body() -> Any:
        with pytest.raises(InvalidArgumentError, match="^" + re.escape(message)):
            call()
        return hvd.allreduce(ones(), op=hvd.Sum, name="after").tolist()

    assert on_ranks(size, body) == [[float(size)] * 2] * size


# --- Lists. ---


@pytest.mark.parametrize("gradient", [False, True], ids=["plain", "gradient"])
@pytest.mark.parametrize(
    "call",
    [
        lambda made: hvd.grouped_allreduce(made, op=hvd.Sum),
        lambda made: hvd.grouped_allreduce(made, op=hvd.Sum, compression=hvd.Compression.bf16),
        lambda made: hvd.grouped_allreduce_async(made, op=hvd.Sum).wait(),
        lambda made: hvd.grouped_reducescatter(made, op=hvd.Sum),
        lambda made: hvd.grouped_reducescatter_async(made, op=hvd.Sum).wait(),
        lambda made: hvd.grouped_allgather(made),
        lambda made: hvd.grouped_allgather_async(made).wait(),
    ],
)
def test_grouped_operations_accept_generators(call: Callable[[Any], Any], gradient: bool) -> None:
    def body() -> Any:
        x, y = torch.ones(2).requires_grad_(gradient), torch.ones(4, dtype=torch.float64)
        found, wanted = call(each(x, y)), call([x, y])
        assert len(found) == 2
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))

    on_ranks(2, body)


def test_in_place_grouped_operations_accept_generators() -> None:
    def body() -> Any:
        x, y = ones(), ones(3)
        hvd.grouped_allreduce_(each(x, y), op=hvd.Sum)
        hvd.grouped_allreduce_async_(each(x, y), op=hvd.Sum).wait()
        return x.tolist(), y.tolist()

    assert on_ranks(2, body) == [([4.0] * 2, [4.0] * 3)] * 2


@pytest.mark.parametrize(
    "name",
    [
        "grouped_allreduce",
        "grouped_allreduce_",
        "grouped_allreduce_async",
        "grouped_allreduce_async_",
        "grouped_reducescatter",
        "grouped_reducescatter_async",
        "grouped_allgather",
        "grouped_allgather_async",
    ],
)
@pytest.mark.parametrize(
    ("given", "found"), [(None, "NoneType"), (5, "int"), (torch.tensor(1.0), "Tensor")]
)
def test_invalid_group_raises(name: str, given: Any, found: str) -> None:
    def body() -> Any:
        message = rf"^grouped_\w+(\.noname\.0)?: expected a list of tensors, got {found}\. Put it"
        with pytest.raises(InvalidArgumentError, match=message):
            getattr(hvd, name)(given)
        with pytest.raises(InvalidArgumentError, match=r"expected a torch\.Tensor, got NoneType"):
            getattr(hvd, name)([ones(), None])

    on_ranks(1, body)


def test_exceptions_of_a_generator_pass_through() -> None:
    def broken() -> Iterator[Tensor]:
        yield ones()
        raise TypeError("mine")

    def body() -> Any:
        with pytest.raises(TypeError, match="^mine$"):
            hvd.grouped_allreduce(broken())

    on_ranks(1, body)


# --- Factors. ---

FACTORS: list[tuple[str, Callable[..., Any]]] = [
    ("allreduce", lambda x, **f: hvd.allreduce(x, op=hvd.Sum, **f)),
    ("allreduce", lambda x, **f: hvd.allreduce_(x.clone(), op=hvd.Sum, **f)),
    ("allreduce", lambda x, **f: hvd.allreduce_async(x, op=hvd.Sum, **f).wait()),
    ("allreduce", lambda x, **f: hvd.allreduce_async_(x.clone(), op=hvd.Sum, **f).wait()),
    ("grouped_allreduce", lambda x, **f: hvd.grouped_allreduce([x], op=hvd.Sum, **f)[0]),
    ("grouped_allreduce", lambda x, **f: hvd.grouped_allreduce_([x.clone()], op=hvd.Sum, **f)[0]),
    ("reducescatter", lambda x, **f: hvd.reducescatter(torch.cat([x, x]), op=hvd.Sum, **f)),
    ("grouped_reducescatter", lambda x, **f: hvd.grouped_reducescatter([torch.cat([x, x])], op=hvd.Sum, **f)[0]),
]  # fmt: skip


@pytest.mark.parametrize("argument", ["prescale_factor", "postscale_factor"])
@pytest.mark.parametrize(("name", "call"), FACTORS)
def test_tensor_factor_is_read_at_the_call(
    name: str, call: Callable[..., Any], argument: str
) -> None:
    del name

    def body() -> Any:
        factor, results = torch.tensor(2.0), []
        for value in (2.0, 5.0):
            factor.fill_(value)
            results.append(call(ones(), **{argument: factor}).tolist())
        for value in (np.float32(3.0), 3, np.int64(3)):
            results.append(call(ones(), **{argument: value}).tolist())
        return results

    assert on_ranks(2, body) == [[[4.0] * 2, [10.0] * 2] + [[6.0] * 2] * 3] * 2


@pytest.mark.parametrize("op", ["allreduce", "reducescatter"])
def test_gradients_use_the_factor_of_the_forward_pass(op: str) -> None:
    def body() -> Any:
        x, factor = torch.ones(2, requires_grad=True), torch.tensor(2.0)
        result = getattr(hvd, op)(x, op=hvd.Sum, prescale_factor=factor)
        factor.fill_(7.0)
        result.sum().backward()
        assert x.grad is not None
        return x.grad.tolist()

    assert on_ranks(2, body) == [[4.0, 4.0]] * 2


@pytest.mark.parametrize("argument", ["prescale_factor", "postscale_factor"])
@pytest.mark.parametrize(("name", "call"), FACTORS)
def test_invalid_factor_raises(name: str, call: Callable[..., Any], argument: str) -> None:
    def body() -> Any:
        message = rf"^{name}[\w.]*: {argument}=.* is not one number\. Give a float\.$"
        for value in ("a", "2", None, [1.0], 1j, torch.ones(2), 10**400):
            with pytest.raises(InvalidArgumentError, match=message):
                call(ones(), **{argument: value})
            with pytest.raises(InvalidArgumentError, match=message):
                call(ones().requires_grad_(), **{argument: value})

    on_ranks(1, body)


@pytest.mark.parametrize("op", ["allreduce", "grouped_allreduce", "reducescatter"])
def test_wrong_factor_on_one_rank_keeps_unnamed_operations_in_step(op: str) -> None:
    def body() -> Any:
        start, data = getattr(hvd, f"{op}_async"), ones(2)
        tensors = [data] if op == "grouped_allreduce" else data
        if hvd.rank() == 0:
            with pytest.raises(InvalidArgumentError, match=rf"^{op}\.noname\.0: postscale_factor"):
                start(tensors, op=hvd.Sum, postscale_factor=None)
        else:
            data.fill_(100.0)
            start(tensors, op=hvd.Sum)
        result = getattr(hvd, op)([ones()] if op == "grouped_allreduce" else ones(), op=hvd.Sum)
        return (result[0] if op == "grouped_allreduce" else result).flatten()[0].item()

    assert on_ranks(2, body) == [2.0] * 2


# --- Names, compression, splits. ---


def test_operation_name_of_another_type_raises() -> None:
    refused(
        lambda: hvd.allreduce(ones(), name=5),  # type: ignore[arg-type]  # that is the test
        "allreduce: the name is 5, a int. Give a string",
    )


@pytest.mark.parametrize("compression", ["fp16", None, hvd.Compression, 16], ids=str)
@pytest.mark.parametrize("size", [1, 2])
def test_invalid_compressors_raise(compression: Any, size: int) -> None:
    calls: dict[str, Callable[[], Any]] = {
        "allreduce": lambda: hvd.allreduce(ones(), compression=compression),
        "grouped_allreduce": lambda: hvd.grouped_allreduce([ones()], compression=compression),
        "reducescatter": lambda: hvd.reducescatter(ones(), compression=compression),
        "grouped_reducescatter": lambda: hvd.grouped_reducescatter(
            [ones()], compression=compression
        ),
        "DistributedOptimizer": lambda: hvd.DistributedOptimizer(sgd(), compression=compression),
    }

    def body() -> Any:
        for what, call in calls.items():
            message = f"{what}: compression={compression!r} has no compress() and decompress(). Give hvd.Compression."
            with pytest.raises(InvalidArgumentError, match="^" + re.escape(message)):
                call()

    on_ranks(size, body)


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        (4, "alltoall.noname.0: expected a list of splits, got int. Put it into a list."),
        ([None], "alltoall.noname.0: splits are [None]; they must be integers"),
        ([True], "alltoall.noname.0: splits are [True]; they must be integers"),
        ([1.5], "alltoall.noname.0: splits are [1.5]; they must be integers"),
        (["1"], "alltoall.noname.0: splits are ['1']; they must be integers"),
        ([[1]], "alltoall.noname.0: splits are [[1]]; they must be integers"),
        (torch.tensor([1.5]), "alltoall.noname.0: splits have dtype torch.float32"),
    ],
    ids=str,
)
def test_wrong_alltoall_splits_raise(splits: Any, message: str) -> None:
    refused(lambda: hvd.alltoall(ones(), splits), message)


@pytest.mark.parametrize(
    "splits",
    [np.array([1, 1]), (1, np.int32(1)), torch.tensor([1, 1]), each(*torch.tensor([1, 1]))],
    ids=["array", "tuple", "tensor", "generator"],
)
def test_alltoall_accepts_splits_of_any_sequence_type(splits: Any) -> None:
    given = [splits, [1, 1]] if isinstance(splits, Iterator) else [splits, splits]

    def body() -> Any:
        output, received = hvd.alltoall(torch.full((2,), float(hvd.rank())), given[hvd.rank()])
        return output.tolist(), received.tolist()

    assert on_ranks(2, body) == [([0.0, 1.0], [1, 1])] * 2


# --- Root ranks and parameters. ---


@pytest.mark.parametrize("root", [True, "0", 0.0, None, 2, -1, torch.tensor(0.0), torch.tensor(True)], ids=str)  # fmt: skip
def test_wrong_root_ranks_raise(root: Any) -> None:
    def body() -> Any:
        message = r"root_rank is .*; with 2 ranks it must be from 0 to 1\.$"
        for call in (hvd.broadcast, hvd.broadcast_, hvd.broadcast_async, hvd.broadcast_async_):
            with pytest.raises(InvalidArgumentError, match=r"^broadcast\.noname\.\d: " + message):
                call(ones(), root)
        with pytest.raises(InvalidArgumentError, match=message):
            hvd.broadcast_parameters({"a": ones()}, root)
        with pytest.raises(InvalidArgumentError, match=message):
            hvd.broadcast_object(1, root)

    on_ranks(2, body)


@pytest.mark.parametrize("root", [np.int64(1), torch.tensor(1)], ids=str)
def test_root_rank_may_be_a_numpy_or_torch_integer(root: Any) -> None:
    def body() -> Any:
        x = torch.full((1,), float(hvd.rank()), requires_grad=True)
        sent = hvd.broadcast(x, root)
        sent.backward()
        assert x.grad is not None
        return sent.item(), x.grad.item(), hvd.broadcast_object(hvd.rank(), root)

    assert on_ranks(2, body) == [(1.0, 0.0, 1), (1.0, 1.0, 1)]


@pytest.mark.parametrize("form", [list, iter, lambda given: dict(enumerate(given)).values()])
def test_broadcast_parameters_accepts_lists_of_tensors(form: Callable[[Any], Any]) -> None:
    def body() -> Any:
        model = nn.Linear(2, 3)
        for parameter in model.parameters():
            nn.init.constant_(parameter, float(hvd.rank()))
        hvd.broadcast_parameters(form([*model.parameters(), None]), 1)
        return [parameter.detach().unique().tolist() for parameter in model.parameters()]

    assert on_ranks(2, body) == [[[1.0], [1.0]]] * 2


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (5, "expected a list of tensors, got int. Put it into a list."),
        (None, "expected a list of tensors, got NoneType. Put it into a list."),
        (nn.Linear(1, 1), "expected a dict or a list, got Linear. Give model.state_dict()"),
        (nn.Sequential(nn.Linear(1, 1)), "expected a dict or a list, got Sequential. Give"),
        (torch.ones(2), "expected a dict or a list, got Tensor. Give"),
        ([5], "expected tensors or (name, tensor) pairs, found int. Give"),
        ([("a", 5)], "expected tensors or (name, tensor) pairs, found int for 'a'. Give"),
        ([(0, torch.ones(1))], "expected tensors or (name, tensor) pairs, found Tensor for 0."),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_arguments_without_parameters_raise(params: Any, message: str) -> None:
    refused(lambda: hvd.broadcast_parameters(params, 0), f"broadcast_parameters: {message}")


# --- Process sets. ---


def test_process_set_constructor_and_text_match_horovod() -> None:
    made = hvd.ProcessSet(ranks_or_comm=[np.int64(1), torch.tensor(0)])
    assert made.ranks == [0, 1]
    assert [type(rank) for rank in made.ranks] == [int, int]
    assert made.mpi_comm is None
    assert str(made) == "ProcessSet(process_set_id=None, ranks=[0, 1], mpi_comm=None)"
    assert hvd.ProcessSet(np.arange(2)).ranks == [0, 1]
    assert hvd.ProcessSet(rank for rank in (1, 0)).ranks == [0, 1]


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (0, "ProcessSet(0): expected a list of ranks, got int. Put it into a list."),
        (None, "ProcessSet(None): expected a list of ranks, got NoneType. Put it into a list."),
        ([0.0], "ProcessSet([0.0]): ranks must be integers. Give a list such as [0, 1]."),
        ([True], "ProcessSet([True]): ranks must be integers. Give a list such as [0, 1]."),
        ("01", "ProcessSet(['0', '1']): ranks must be integers. Give a list such as [0, 1]."),
    ],
    ids=str,
)
def test_invalid_process_set_ranks_raise(ranks: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match="^" + re.escape(message) + "$"):
        hvd.ProcessSet(ranks)
    refused(lambda: hvd.add_process_set(ranks), message)


def test_remove_process_set_refuses_other_objects() -> None:
    refused(
        lambda: hvd.remove_process_set(5),  # type: ignore[arg-type]  # that is the test
        "remove_process_set(5): expected a ProcessSet. Give what add_process_set() returned.",
    )


# --- Registered memory. ---


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [
        ((), ()),
        (np.int64(3), (3,)),
        (torch.tensor(3), (3,)),
        ((np.int32(2), 3), (2, 3)),
        (torch.Size([2, 0]), (2, 0)),
        (np.array([2, 2]), (2, 2)),
    ],
    ids=str,
)
def test_registered_empty_accepts_any_shape_type(shape: Any, wanted: tuple[int, ...]) -> None:
    def body() -> Any:
        made = hvd.registered_empty(shape)
        return tuple(made.shape), made.dtype, int(made.count_nonzero())

    assert on_ranks(2, body) == [(wanted, torch.float32, 0)] * 2


INTEGERS = "every length must be an integer of 0 or more."
TOO_LARGE = "bytes, more than any memory has. Ask for less."


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2**40, 2**40), f"a tensor of shape .* and torch.float32 would need {4 << 80} {TOO_LARGE}"),
        (2**70, f"would need {4 << 70} {TOO_LARGE}"),
        ((0, 2**70), TOO_LARGE),
        ((0, 2**40, 2**40), TOO_LARGE),
        (None, "expected a list of lengths, got NoneType. Put it into a list."),
        (1.5, "expected a list of lengths, got float. Put it into a list."),
        (True, "expected a list of lengths, got bool. Put it into a list."),
        ((2, 1.5), f"the shape is .*; {INTEGERS}"),
        ((True,), f"the shape is .*; {INTEGERS}"),
        ("3", f"the shape is '3'; {INTEGERS}"),
        (-1, f"the shape is -1; {INTEGERS}"),
    ],
    ids=str,
)  # fmt: skip
def test_registered_empty_refuses_impossible_shapes(shape: Any, message: str) -> None:
    def body() -> Any:
        with pytest.raises(InvalidArgumentError, match=f"^registered_empty: .*{message}$"):
            hvd.registered_empty(shape)

    on_ranks(1, body)


@pytest.mark.parametrize("dtype", ["float32", float, 0, ""], ids=repr)
def test_registered_empty_refuses_invalid_dtypes(dtype: Any) -> None:
    refused(
        lambda: hvd.registered_empty(1, dtype),
        f"registered_empty: dtype={dtype!r} is not a torch dtype. Give for example torch.float32.",
    )


# --- Optimizers. ---


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(1))], lr=0.1)


def one_parameter() -> Tensor:
    return nn.Parameter(torch.ones(2))


PASSES = "it must be an integer of 1 or more."
FINITE = "it and 1 divided by it must be finite and more than 0."
GROUPS = "it must be an integer of 1 or more, or lists of parameters. Give"

OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"backward_passes_per_step": 1.5}, f"backward_passes_per_step is 1.5; {PASSES}"),
    ({"backward_passes_per_step": "2"}, f"backward_passes_per_step is '2'; {PASSES}"),
    ({"backward_passes_per_step": None}, f"backward_passes_per_step is None; {PASSES}"),
    ({"backward_passes_per_step": True}, f"backward_passes_per_step is True; {PASSES}"),
    ({"backward_passes_per_step": 0}, f"backward_passes_per_step is 0; {PASSES}"),
    ({"groups": True}, f"groups is True; {GROUPS}"),
    ({"groups": 1.5}, f"groups is 1.5; {GROUPS}"),
    ({"groups": "ab"}, f"groups is 'ab'; {GROUPS}"),
    ({"groups": [1]}, f"groups holds int; {GROUPS}"),
    ({"groups": [one_parameter()]}, f"groups holds Parameter; {GROUPS}"),
    ({"groups": [[[one_parameter()]]]}, f"groups holds list in one of its lists; {GROUPS}"),
    ({"groups": 0}, "groups is 0; give 1 or more, or None for buckets by size."),
    ({"named_parameters": [("a", 5)]}, "named_parameters holds (str, int); it must hold (name,"),
    ({"named_parameters": [one_parameter()]}, "named_parameters holds Parameter; it must hold"),
    ({"named_parameters": []}, "2 of the optimizer's 2 parameters are not in named_parameters"),
]  # fmt: skip


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum], ids=["average", "adasum"])
@pytest.mark.parametrize(("options", "message"), OPTIONS, ids=str)
def test_wrong_optimizer_options_raise(
    options: dict[str, Any], message: str, op: Any, size: int
) -> None:
    refused(
        lambda: hvd.DistributedOptimizer(sgd(), op=op, **options),
        f"DistributedOptimizer: {message}",
        size,
    )


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (float("inf"), f" is inf; {FINITE}"),
        (float("nan"), f" is nan; {FINITE}"),
        (0, f" is 0.0; {FINITE}"),
        (-1.0, f" is -1.0; {FINITE}"),
        (1e-320, f" is 1e-320; {FINITE}"),
        ("x", "='x' is not one number. Give a float."),
        (None, "=None is not one number. Give a float."),
    ],
    ids=str,
)
def test_wrong_gradient_predivide_factor_raises(value: Any, message: str) -> None:
    refused(
        lambda: hvd.DistributedOptimizer(sgd(), gradient_predivide_factor=value),
        f"DistributedOptimizer: gradient_predivide_factor{message}",
    )


def test_named_parameters_of_wrong_form_raise() -> None:
    refused(
        lambda: hvd.DistributedOptimizer(sgd(), 5),  # type: ignore[arg-type]  # that is the test
        "DistributedOptimizer(named_parameters=...): expected a list of (name, parameter) pairs, got int.",
    )


@pytest.mark.parametrize(
    ("given", "found"), [(nn.Linear(1, 1), "Linear"), (None, "NoneType"), ([], "list")], ids=str
)
def test_invalid_optimizer_raises(given: Any, found: str) -> None:
    refused(
        lambda: hvd.DistributedOptimizer(given),
        f"DistributedOptimizer: expected an optimizer of torch, got {found}. Give for example torch.optim.SGD(",
    )


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ({"rank": 1.5}, "rank=1.5, warm_up_steps=0"),
        ({"rank": "a"}, "rank='a', warm_up_steps=0"),
        ({"rank": True}, "rank=True, warm_up_steps=0"),
        ({"warm_up_steps": None}, "rank=4, warm_up_steps=None"),
    ],
    ids=str,
)
def test_wrong_powersgd_numbers_raise(arguments: dict[str, Any], shown: str) -> None:
    message = f"Compression.powersgd({shown}): rank must be 1 or more, and warm_up_steps 0 or more; both must be integers."
    with pytest.raises(InvalidArgumentError, match="^" + re.escape(message) + "$"):
        hvd.Compression.powersgd(**arguments)


@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum], ids=["average", "adasum"])
def test_set_backward_passes_per_step_refuses_invalid_values(op: Any) -> None:
    def body() -> Any:
        optimizer: Any = hvd.DistributedOptimizer(sgd(), op=op)
        for wrong in ("a", 1.5, None, 0):
            with pytest.raises(InvalidArgumentError, match=f"is {wrong!r}; {PASSES}$"):
                optimizer.set_backward_passes_per_step(wrong)
        optimizer.set_backward_passes_per_step(np.int64(2))

    on_ranks(2, body)


@pytest.mark.parametrize("sharded", [False, True])
def test_optimizer_accepts_numpy_and_torch_numbers_and_generators(sharded: bool) -> None:
    def body() -> Any:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        for parameter in model.parameters():
            nn.init.ones_(parameter)
        optimizer: Any = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0),
            named_parameters=iter(model.named_parameters()),
            backward_passes_per_step=np.int64(1),  # type: ignore[arg-type]  # that is the test
            gradient_predivide_factor=torch.tensor(2.0),  # type: ignore[arg-type]
            groups=((p for p in layer.parameters()) for layer in model),  # type: ignore[arg-type]
            sharded=sharded,
        )
        reducers = optimizer._reducers
        assert sum(len(group) for each in reducers for group in each.options.groups) == 4
        model(torch.full((1, 2), float(hvd.rank()))).sum().backward()
        optimizer.step()
        return model[0].weight.tolist()

    # The gradient of the first weights is the mean of the inputs 0 and 1.
    assert on_ranks(2, body) == [[[0.5, 0.5], [0.5, 0.5]]] * 2


def test_more_groups_than_parameters_give_one_group_per_parameter() -> None:
    def body() -> Any:
        optimizer: Any = hvd.DistributedOptimizer(sgd(), groups=10**15)
        return len(optimizer._reducers)

    assert on_ranks(2, body) == [1, 1]


def test_adasum_optimizer_names_parameters_and_clips_gradients() -> None:
    def body() -> Any:
        model = nn.Linear(2, 1)
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer: Any = hvd.DistributedOptimizer(
            plain, named_parameters=model.named_parameters(), op=hvd.Adasum
        )
        assert list(optimizer._parameter_names.values()) == ["weight", "bias"]
        extra = nn.Parameter(torch.ones(1))
        optimizer.add_param_group({"params": [extra]})
        assert optimizer._parameter_names[extra] == "allreduce.noname.1.0"
        model(torch.ones(1, 2)).sum().backward()
        norm = optimizer.clip_grad_norm_(1.0)
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        optimizer.step()
        return norm.item(), torch.cat([grad.flatten() for grad in grads]).norm().item()

    for norm, clipped in on_ranks(2, body):
        assert norm == pytest.approx(3**0.5)
        assert clipped == pytest.approx(1.0, rel=1e-5)


# --- Starting. ---


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"comm": 5}, "init(comm=5): expected a list of ranks, got int. Put it into a list."),
        (
            {"comm": ["a", 0]},
            "init(comm=['a', 0]): expected a list of ranks, which are integers. Leave",
        ),
        ({"process_sets": 5}, "init(process_sets=5): give a list of process sets, 'dynamic'"),
        ({"process_sets": "all"}, "init(process_sets='all'): give a list of process sets"),
        ({"process_sets": [5]}, "ProcessSet(5): expected a list of ranks, got int."),
    ],
    ids=str,
)
def test_init_with_wrong_arguments_stays_uninitialized(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidArgumentError, match="^" + re.escape(message)):
        hvd.init(**arguments)
    assert not hvd.is_initialized()


@pytest.mark.parametrize(("path", "found"), [(None, "NoneType"), (5, "int"), (b"x", "bytes")])
def test_start_timeline_refuses_values_other_than_paths(path: Any, found: str) -> None:
    refused(
        lambda: hvd.start_timeline(path),
        f"start_timeline({path!r}): expected a path, got {found}. Give the name of the file.",
    )


@pytest.mark.parametrize("value", [True, np.bool_(True), torch.tensor(True), 1.0, "1", None], ids=repr)  # fmt: skip
def test_bool_float_and_text_are_not_integers(value: Any) -> None:
    assert to_integer(value) is None


def test_dtensor_is_refused_before_data_are_sent() -> None:
    def body() -> None:
        part = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
        optimizer = torch.optim.SGD([nn.Parameter(part)], lr=1.0)
        for what in (
            lambda: hvd.DistributedOptimizer(optimizer),
            lambda: hvd.allreduce(part),
            lambda: hvd.broadcast_parameters({"w": part}, 0),
        ):
            with pytest.raises(InvalidArgumentError, match=r"is a DTensor.*to_local\(\)"):
                what()

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)  # type: ignore[no-untyped-call]
    try:
        mesh = init_device_mesh("cpu", (1,))
        on_ranks(2, body)
    finally:
        dist.destroy_process_group()


def test_adasum_reducescatter_raises_notimplementederror() -> None:
    def body() -> None:
        for call in (hvd.reducescatter, hvd.reducescatter_async):
            with pytest.raises(NotImplementedError, match="Adasum is for allreduce only"):
                call(torch.ones(4), op=hvd.Adasum)
        with pytest.raises(InvalidArgumentError, match="Adasum is for allreduce only"):
            hvd.grouped_reducescatter([torch.ones(4)], op=hvd.Adasum)
        assert torch.equal(hvd.allreduce(torch.ones(4), op=hvd.Sum), torch.full((4,), 2.0))

    on_ranks(2, body)
