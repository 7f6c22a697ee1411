from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import sparkhvd.torch as hvd
from sparkhvd.errors import InvalidArgumentError, MismatchError
from tests.harness.waiting import wait_until
from tests.torch.on_ranks import on_ranks

pytestmark = pytest.mark.ranks

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Small integers, exact in every type."""
    count = torch.Size(shape).numel()
    data = (torch.arange(count) * (rank + 1) + rank) % 7
    return data.to(dtype).reshape(shape)


@pytest.mark.parametrize("dtype", FLOATS + INTS, ids=str)
def test_allreduce_combines_every_dtype(dtype: Any) -> None:
    def body() -> Any:
        x = values(hvd.rank(), (3, 5), dtype)
        every = [values(r, (3, 5), dtype).double() for r in range(3)]
        stack = torch.stack(every)
        expected = {
            hvd.Sum: stack.sum(0),
            hvd.Min: stack.amin(0),
            hvd.Max: stack.amax(0),
            hvd.Product: stack.prod(0),
        }
        for op, result in expected.items():
            assert torch.equal(hvd.allreduce(x, op=op), result.to(dtype)), op
        average = hvd.allreduce(x)
        if dtype.is_floating_point:
            assert torch.allclose(average.double(), stack.mean(0), rtol=torch.finfo(dtype).eps * 2)
        else:
            assert torch.equal(average, (stack.sum(0) * (1 / 3)).to(dtype))
        assert torch.equal(x, values(hvd.rank(), (3, 5), dtype))

    on_ranks(3, body)


def test_allreduce_of_bool_is_a_logical_operation() -> None:
    def body() -> Any:
        x = torch.tensor([hvd.rank() == 0, True, False])
        either = hvd.allreduce(x, op=hvd.Sum)
        both = hvd.allreduce(x, op=hvd.Product)
        return either.tolist(), both.tolist()

    assert on_ranks(2, body) == [([True, True, False], [False, True, False])] * 2


@pytest.mark.parametrize("shape", [(), (0,), (1,), (0, 4), (7,), (2, 0, 3), (100_003,)], ids=str)
def test_collectives_accept_empty_scalar_and_large_shapes(shape: Any) -> None:
    def body() -> Any:
        x = values(hvd.rank(), shape, torch.float32)
        expected = values(0, shape, torch.float32) + values(1, shape, torch.float32)
        result = hvd.allreduce(x, op=hvd.Sum)
        assert result.shape == x.shape
        assert torch.equal(result, expected)
        assert torch.equal(hvd.broadcast(x, 1), values(1, shape, torch.float32))
        if shape:
            both = torch.cat([values(r, shape, torch.float32) for r in range(2)])
            assert torch.equal(hvd.allgather(x), both)

    on_ranks(2, body)


def test_noncontiguous_tensors_are_made_contiguous_out_of_place() -> None:
    def body() -> Any:
        x = values(hvd.rank(), (4, 6), torch.float32).t()
        expected = sum(values(r, (4, 6), torch.float32).t() for r in range(2))
        assert torch.equal(hvd.allreduce(x, op=hvd.Sum), expected)
        assert torch.equal(hvd.broadcast(x, 0), values(0, (4, 6), torch.float32).t())
        assert hvd.allgather(x[::2]).shape == (6, 4)

    on_ranks(2, body)


def test_tensors_with_the_negative_bit_are_sent_with_their_sign() -> None:
    """`z.conj().imag` of one element is contiguous, but its memory has the opposite sign."""

    def body() -> Any:
        x = torch._neg_view(torch.tensor([1.0, 2.0]))
        assert x.is_neg()
        assert x.is_contiguous()
        named = {"x": torch._neg_view(torch.tensor([1.0, 2.0]) + hvd.rank())}
        hvd.broadcast_parameters(named, 1)
        return [
            named["x"].tolist(),
            hvd.allreduce(x).tolist(),
            hvd.allreduce(x, compression=hvd.Compression.fp16).tolist(),
            hvd.grouped_allreduce([x])[0].tolist(),
            hvd.broadcast(x, 1).tolist(),
            hvd.allgather(x).tolist(),
            hvd.grouped_allgather([x])[0].tolist(),
            hvd.alltoall(x, [2 - hvd.rank(), hvd.rank()])[0].tolist(),
            hvd.reducescatter(x).tolist(),
        ]

    both, double = [-1.0, -2.0], [-1.0, -2.0, -1.0, -2.0]
    common = [[-2.0, -3.0], both, both, both, both, double, double]
    assert on_ranks(2, body) == [
        [*common, [-1.0, -2.0, -1.0], [-1.0]],
        [*common, [-2.0], [-2.0]],
    ]


@pytest.mark.parametrize(
    "call",
    [
        lambda x: hvd.allreduce_(x),
        lambda x: hvd.allreduce_async_(x),
        lambda x: hvd.grouped_allreduce_([x]),
        lambda x: hvd.broadcast_(x, 0),
        lambda x: hvd.broadcast_async_(x, 0),
    ],
)
def test_in_place_operation_on_negative_bit_tensor_raises(call: Any) -> None:
    def body() -> None:
        with pytest.raises(InvalidArgumentError, match="has them with the opposite sign"):
            call(torch._neg_view(torch.ones(2)))

    on_ranks(1, body)


@pytest.mark.parametrize("hosts", [False, True], ids=["one host", "hosts"])
@pytest.mark.parametrize("size", [3, 5, 6, 7])
def test_averages_equal_the_sum_divided_once(size: Any, hosts: Any) -> None:
    seeds = [torch.Generator().manual_seed(rank) for rank in range(size)]
    everyone = [torch.randn(1001, generator=seed, dtype=torch.float64) for seed in seeds]

    def body() -> None:
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            every = [x.to(dtype) for x in everyone]
            wide = torch.float64 if dtype is torch.float64 else torch.float32
            expected = (sum(x.to(wide) for x in every) / size).to(dtype)
            x = every[hvd.rank()]
            assert torch.equal(hvd.allreduce(x), expected)
            assert torch.equal(torch.cat(hvd.grouped_allreduce([x[:7], x[7:]])), expected)
            rows = [1001 // size + (rank < 1001 % size) for rank in range(size)]
            assert torch.equal(hvd.reducescatter(x), expected.split(rows)[hvd.rank()])
            equal = torch.arange(-128.0, 128.0, dtype=dtype)  # sums are exact
            assert torch.equal(hvd.allreduce(equal), equal)
        integers = torch.arange(-100, 100)
        assert torch.equal(hvd.allreduce(integers), integers)

    on_ranks(size, body, hosts=list(range(size)) if hosts else None)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_allreduce_supports_complex_numbers(dtype: torch.dtype) -> None:
    def body() -> None:
        here = torch.tensor([[1 + 2j, 3 - 1j, 0.5j]], dtype=dtype) * (hvd.rank() + 1)
        total = torch.tensor([[1 + 2j, 3 - 1j, 0.5j]], dtype=dtype) * 6
        assert torch.equal(hvd.allreduce(here.t(), op=hvd.Sum), total.t())
        assert torch.equal(hvd.allreduce(here.conj()), total.conj().resolve_conj() / 3)
        scalar = hvd.allreduce(here[0, 0], postscale_factor=2.0)
        assert scalar.shape == ()
        assert scalar == total[0, 0] / 3 * 2
        in_place = here.clone()
        assert hvd.allreduce_(in_place, op=hvd.Sum) is in_place
        assert torch.equal(in_place, total)
        real = torch.ones(2, dtype=torch.float32)
        mixed = hvd.grouped_allreduce([here, real], op=hvd.Sum)
        assert torch.equal(mixed[0], total)
        assert torch.equal(mixed[1], real * 3)
        shared = hvd.registered_empty((1, 3), dtype)
        shared.copy_(here)
        handle = hvd.grouped_allreduce_async_([shared], op=hvd.Sum)
        assert hvd.synchronize(handle)[0] is shared
        assert torch.equal(shared, total)
        wanted = here.clone().requires_grad_()
        hvd.allreduce(wanted, op=hvd.Sum).abs().square().sum().backward()
        assert torch.allclose(wanted.grad, 2 * 3 * total)  # of each rank the same

    on_ranks(3, body)


def test_allreduce_applies_prescale_and_postscale_factors() -> None:
    def body() -> Any:
        x = torch.full((3,), float(hvd.rank() + 1))
        scaled = hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=10)
        halves = hvd.allreduce(torch.ones(2, dtype=torch.int32), op=hvd.Sum, postscale_factor=0.6)
        return scaled.tolist(), halves.tolist()

    assert on_ranks(2, body) == [([15.0] * 3, [1, 1])] * 2


def test_in_place_operations_write_into_the_given_tensor() -> None:
    def body() -> Any:
        x = torch.full((2, 2), float(hvd.rank()))
        assert hvd.allreduce_(x, op=hvd.Sum) is x
        y = torch.full((2,), float(hvd.rank()))
        assert hvd.broadcast_(y, 1) is y
        pair = [torch.full((2,), float(hvd.rank())), torch.full((3,), hvd.rank() + 1)]
        assert hvd.grouped_allreduce_(pair, op=hvd.Max)[1] is pair[1]
        return x.tolist(), y.tolist(), [t.tolist() for t in pair]

    assert on_ranks(2, body) == [([[1.0, 1.0]] * 2, [1.0, 1.0], [[1.0, 1.0], [2, 2, 2]])] * 2


def test_in_place_operation_on_noncontiguous_tensor_raises() -> None:
    def body() -> Any:
        for call in (hvd.allreduce_, lambda t: hvd.broadcast_(t, 0), hvd.allreduce_async_):
            with pytest.raises(ValueError, match=r"in-place operation needs a contiguous tensor"):
                call(torch.ones(2, 3).t())

    on_ranks(1, body)


def test_autograd_detects_in_place_operations() -> None:
    def body() -> Any:
        x = torch.ones(2, requires_grad=True)
        y = x * 2
        z = y * y  # keeps y for backward
        hvd.allreduce_(y.detach(), op=hvd.Sum)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z.sum().backward()

    on_ranks(2, body)


def test_grouped_allreduce_keeps_order_shapes_and_dtypes() -> None:
    def body() -> Any:
        tensors = [
            values(hvd.rank(), shape, dtype)
            for shape, dtype in [((3,), torch.float32), ((2, 2), torch.int64), ((), torch.float32)]
        ]
        results = hvd.grouped_allreduce(tensors, op=hvd.Sum, name="group")
        for result, tensor in zip(results, tensors, strict=True):
            every = [values(r, tuple(tensor.shape), tensor.dtype) for r in range(2)]
            assert torch.equal(result, every[0] + every[1])
            assert result.dtype == tensor.dtype
        assert hvd.grouped_allreduce([]) == []

    on_ranks(2, body)


UNEQUAL_GROUPS: dict[str, list[tuple[torch.dtype, ...]]] = {
    "a dtype of a mixed group": [(torch.float32, torch.int32), (torch.float32, torch.int64)],
    "mixed or not": [(torch.float32, torch.float32), (torch.float32, torch.int32)],
    "a shape": [(torch.float32, torch.int32), (torch.float32, torch.int32)],
    "the order": [(torch.float32, torch.int32), (torch.int32, torch.float32)],
    "how many": [(torch.float32, torch.int32), (torch.float32, torch.int32, torch.int32)],
}


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("case", UNEQUAL_GROUPS)
def test_group_with_mismatched_dtypes_is_not_reduced_partly(case: str, asynchronous: bool) -> None:
    """This holds even where the engine has one operation per element type."""

    def body() -> Any:
        dtypes = UNEQUAL_GROUPS[case][hvd.rank()]
        calls: dict[str, Callable[..., Any]] = {
            "allreduce": hvd.grouped_allreduce_,
            "allgather": hvd.grouped_allgather,
            "reducescatter": hvd.grouped_reducescatter,
        }
        if asynchronous:
            calls = {
                "allreduce": lambda *a, **k: hvd.grouped_allreduce_async_(*a, **k).wait(),
                "allgather": lambda *a, **k: hvd.grouped_allgather_async(*a, **k).wait(),
                "reducescatter": lambda *a, **k: hvd.grouped_reducescatter_async(*a, **k).wait(),
            }
        for kind, call in calls.items():
            sizes = [
                4 + hvd.rank() if case == "a shape" and i == 1 else 4 for i in range(len(dtypes))
            ]
            tensors = [
                torch.full((2, size), hvd.rank() + 1, dtype=dtype)
                for size, dtype in zip(sizes, dtypes, strict=True)
            ]
            options = {} if kind == "allgather" else {"op": hvd.Sum}
            with pytest.raises(MismatchError):
                call(tensors, name="group", **options)
            hvd.barrier()
            assert all(tensor.eq(hvd.rank() + 1).all() for tensor in tensors)
        # The engine continues.
        whole = [torch.ones(2), torch.ones(3, dtype=torch.int64)]
        return [t.tolist() for t in hvd.grouped_allreduce(whole, op=hvd.Sum, name="next")]

    assert on_ranks(2, body) == [[[2.0, 2.0], [2, 2, 2]]] * 2


def test_a_group_with_an_unsupported_dtype_is_left_unchanged() -> None:
    def body() -> Any:
        tensors = [torch.full((2,), hvd.rank() + 1.0), torch.ones(2, dtype=torch.bool)]
        with pytest.raises(
            InvalidArgumentError, match="a tensor of the group is bool, which has no Average"
        ):
            hvd.grouped_allreduce_(tensors, op=hvd.Average)
        with pytest.raises(InvalidArgumentError, match=r"Adasum needs floating-point tensors"):
            hvd.grouped_allreduce_([tensors[0], torch.ones(2, dtype=torch.int8)], op=hvd.Adasum)
        hvd.barrier()
        return tensors[0].tolist(), hvd.metrics().counters["in_flight"]

    assert on_ranks(2, body) == [([1.0, 1.0], 0), ([2.0, 2.0], 0)]


def test_asynchronous_group_of_several_dtypes_can_be_polled() -> None:
    def body() -> Any:
        tensors = [torch.ones(3), torch.ones(2, dtype=torch.int32), torch.ones(1)]
        handle = hvd.grouped_allreduce_async(tensors, op=hvd.Sum)
        wait_until(lambda: hvd.poll(handle), "the group finishes", every_s=0)
        return [t.tolist() for t in hvd.synchronize(handle)]

    assert on_ranks(2, body) == [[[2.0] * 3, [2, 2], [2.0]]] * 2


def test_asynchronous_groups_of_several_dtypes_need_no_order() -> None:
    def body() -> Any:
        def start(name: str) -> Any:
            return hvd.grouped_allreduce_async(
                [torch.ones(2), torch.ones(1).int()], name=name, op=hvd.Sum
            )

        names = ["x", "y"] if hvd.rank() == 0 else ["y", "x"]
        handles = [start(name) for name in names]
        hvd.barrier()
        results = [hvd.synchronize(handle) for handle in handles]
        last = start("last")
        if hvd.rank() == 0:
            hvd.join()
            results.append(hvd.synchronize(last))
        else:
            results.append(hvd.synchronize(last))
            hvd.join()
        return [[t.tolist() for t in result] for result in results]

    assert on_ranks(2, body) == [[[[2.0, 2.0], [2]]] * 3] * 2


def test_names_with_a_zero_character_are_refused() -> None:
    def body() -> Any:
        with pytest.raises(InvalidArgumentError, match="contains a NUL character"):
            hvd.allreduce(torch.ones(1), name="a\0b")

    on_ranks(1, body)


def test_compressed_allreduce_keeps_the_dtype() -> None:
    def body() -> Any:
        x = torch.full((4,), 1.0 + hvd.rank())
        for compression in (hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.bf16):
            result = hvd.allreduce(x, op=hvd.Sum, compression=compression)
            assert result.dtype == torch.float32
            assert result.tolist() == [3.0] * 4
        ints = hvd.allreduce(torch.ones(2, dtype=torch.int64), compression=hvd.Compression.fp16)
        assert ints.dtype == torch.int64

    on_ranks(2, body)


@pytest.mark.parametrize("rows", [[0, 0], [3, 0], [0, 5], [2, 7], [50_000, 3]], ids=str)
def test_allgather_joins_unequal_rows(rows: Any) -> None:
    def body() -> Any:
        x = values(hvd.rank(), (rows[hvd.rank()], 3), torch.float32)
        result = hvd.allgather(x)
        expected = torch.cat([values(r, (rows[r], 3), torch.float32) for r in range(2)])
        assert torch.equal(result, expected)
        result += 1  # its memory is the caller's own
        gc.collect()
        assert torch.equal(result, expected + 1)

    on_ranks(2, body)


def test_result_of_allgather_outlives_the_engine() -> None:
    results = on_ranks(2, lambda: hvd.allgather(torch.full((100_000,), float(hvd.rank()))))
    gc.collect()
    for result in results:
        assert result.sum() == 100_000
        result.fill_(3)
        assert result.sum() == 600_000


def test_asynchronous_operations_match_in_different_orders() -> None:
    def body() -> Any:
        names = ["a", "b", "c"]
        if hvd.rank() == 1:
            names.reverse()
        handles = {
            name: hvd.allreduce_async(
                torch.full((5,), float(ord(name))) + hvd.rank(), name=name, op=hvd.Sum
            )
            for name in names
        }
        for name, handle in handles.items():
            while not hvd.poll(handle):
                pass
            result = hvd.synchronize(handle)
            assert result.tolist() == [2.0 * ord(name) + 1] * 5
            assert hvd.synchronize(handle) is result

    on_ranks(2, body)


def test_every_asynchronous_collective_gives_its_result() -> None:
    def body() -> Any:
        r = float(hvd.rank())
        sync = hvd.synchronize
        assert sync(hvd.allreduce_async(torch.tensor([r]))).tolist() == [0.5]
        assert sync(hvd.allreduce_async_(torch.tensor([r]))).tolist() == [0.5]
        pair = [torch.tensor([r]), torch.tensor([r])]
        assert [t.item() for t in sync(hvd.grouped_allreduce_async(pair))] == [0.5, 0.5]
        assert [t.item() for t in sync(hvd.grouped_allreduce_async_(pair))] == [0.5, 0.5]
        assert sync(hvd.allgather_async(torch.tensor([r]))).tolist() == [0.0, 1.0]
        assert sync(hvd.broadcast_async(torch.tensor([r]), 1)).tolist() == [1.0]
        assert sync(hvd.broadcast_async_(torch.tensor([r]), 1)).tolist() == [1.0]

    on_ranks(2, body)


def test_dropped_handles_and_inputs_do_not_affect_later_operations() -> None:
    def body() -> Any:
        for i in range(20):
            hvd.allreduce_async(torch.full((1000,), float(i)), name=f"dropped{i}")
        hvd.barrier()
        return hvd.allreduce(torch.tensor(1.0), op=hvd.Sum).item()

    assert on_ranks(2, body) == [2.0, 2.0]


@pytest.mark.parametrize("handle", [None, 3, "x"])
def test_unknown_handles_raise(handle: Any) -> None:
    for call in (hvd.poll, hvd.synchronize):
        with pytest.raises(ValueError, match="is not a handle"):
            call(handle)


def test_average_argument_is_a_deprecated_alias_of_op() -> None:
    def body() -> Any:
        x = torch.tensor([float(hvd.rank())])
        with pytest.warns(DeprecationWarning, match="give op=hvd.Average"):
            total = hvd.allreduce(x, average=False)
        with pytest.raises(ValueError, match="op replaces average"):
            hvd.allreduce(x, average=True, op=hvd.Sum)
        return total.item()

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert on_ranks(1, body) == [0.0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: hvd.allreduce(torch.ones(2), op=99),
            "op=99 is not a reduction",
        ),
        (
            lambda: hvd.allreduce(torch.ones(2), prescale_factor=float("nan")),
            "one is NaN",
        ),
        (
            lambda: hvd.allreduce(torch.ones(2), name="x" * 5000),
            "the name has 5010 bytes; it must have 1 to 4096",
        ),
        (
            lambda: hvd.broadcast(torch.ones(2), root_rank="a"),  # type: ignore[arg-type]
            "root_rank is 'a'",
        ),
        (
            lambda: hvd.allreduce(torch.ones(2, dtype=torch.complex64), op=hvd.Max),
            "op=Max is not defined for complex numbers",
        ),
        (
            lambda: hvd.allgather(torch.ones(2, dtype=torch.complex64)),
            r"dtype torch.complex64 is not supported.*torch.view_as_real\(tensor\)",
        ),
        (
            lambda: hvd.allreduce_(torch.ones(2, dtype=torch.complex64).conj()),
            "has their conjugates",
        ),
        (lambda: hvd.allreduce([1.0]), "expected a torch.Tensor, got list"),
        (lambda: hvd.allreduce(torch.eye(2).to_sparse()), "only dense tensors can be sent"),
        (
            lambda: hvd.allreduce(torch.empty(2, device="meta")),
            "is on meta, but .* only the CPU and NVIDIA GPUs",
        ),
        (
            lambda: hvd.allreduce(torch.ones(2, dtype=torch.int64), op=hvd.Adasum),
            "Adasum needs floating-point tensors",
        ),
        (lambda: hvd.alltoall(torch.ones(2), [0.5]), "they must be integers"),
        (
            lambda: hvd.alltoall(torch.ones(2), torch.ones(1, 1).int()),
            "they must have one dimension",
        ),
        (lambda: hvd.alltoall(torch.ones(2), []), "0 splits were given"),
        (lambda: hvd.alltoall(torch.tensor(1.0)), "the tensor is a scalar"),
        (lambda: hvd.reducescatter(torch.tensor(1.0)), "does not support scalar inputs"),
        (
            lambda: hvd.sparse_allreduce_async(torch.ones(1), "x", hvd.Sum),
            "expected a sparse COO tensor",
        ),
        (lambda: hvd.registered_empty((2, -1)), "every length must be an integer of 0 or more"),
        (lambda: hvd.allgather(torch.tensor(1.0)), "tensor without dimensions"),
        (lambda: hvd.broadcast(torch.ones(1), 5), "with 1 ranks it must be from 0 to 0"),
        (lambda: hvd.broadcast(torch.ones(1), -1), "root_rank is -1"),
    ],
)
def test_invalid_collective_arguments_raise_immediately(call: Any, message: Any) -> None:
    def body() -> Any:
        with pytest.raises(InvalidArgumentError, match=message):
            call()

    on_ranks(1, body)


def test_mismatch_raises_on_every_rank_and_the_next_operation_works() -> None:
    def body() -> Any:
        with pytest.raises(MismatchError) as caught:
            hvd.allreduce(torch.ones(2 + hvd.rank()), name="layer3.weight")
        return str(caught.value), hvd.allreduce(torch.ones(1), op=hvd.Sum).item()

    for message, total in on_ranks(2, body):
        assert "layer3.weight" in message
        assert total == 2.0
