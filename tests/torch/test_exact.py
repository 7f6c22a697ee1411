"""N ranks with batch b train as one process with batch N * b: every optimizer, several models, every option."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

import sparkhvd.torch as hvd
from sparkhvd.settings import Settings
from tests.harness.soak import SOAK, left_to_soak
from tests.torch import exact
from tests.torch.exact import (
    ARGUMENTS,
    BOUNDS,
    CNN,
    EMBEDDING,
    MATRICES,
    MLP,
    SHIFTING,
    SMALL,
    SPARSE,
    STEPS,
    TABLE,
    TRANSFORMER,
    Case,
    Problem,
    case,
    cases,
    compare,
    distance,
    mine,
    same_everywhere,
    train,
    values,
)
from tests.torch.on_ranks import on_ranks

pytestmark = pytest.mark.ranks

F64, F32 = torch.float64, torch.float32
both_dtypes = pytest.mark.parametrize("dtype", [F64, F32], ids=["float64", "float32"])
needs_sync_batch_norm = pytest.mark.skipif(
    not hasattr(hvd, "SyncBatchNorm"), reason="hvd.SyncBatchNorm is not there yet"
)

# Ranks that train in float64.
SIZES = (2, 3) if SOAK else (3,)
# Problems of some optimizers. The others use the MLP.
PROBLEMS = {"Muon": MATRICES, "SparseAdam": TABLE}
MOMENTUM = case("SGD", lr=0.02, momentum=0.9, weight_decay=0.01)
ON_EVERY_MODEL = (MOMENTUM, case("AdamW"), case("Adagrad"), case("RMSprop"))
MODELS = (
    MLP,
    pytest.param(CNN, marks=needs_sync_batch_norm),
    TRANSFORMER,
    EMBEDDING,
)
cnn_too = pytest.mark.parametrize("problem", MODELS, ids=str)


@functools.cache
def reference(problem: Problem, make: Case, dtype: torch.dtype = F64) -> Tensor:
    """Weights after training in one process."""
    return train(problem, make, dtype, distributed=False)


def ranks(
    problem: Problem,
    make: exact.Make,
    dtype: torch.dtype = F64,
    *,
    size: int = 2,
    hosts: list[int] | None = None,
    settings: Settings = SMALL,
    **options: Any,
) -> Tensor:
    """Weights after training on several ranks, which are the same bits on each."""
    norm = hvd.SyncBatchNorm if problem is CNN else nn.BatchNorm2d
    results = on_ranks(
        size,
        lambda: train(problem, make, dtype, distributed=True, norm=norm, **options),
        settings=settings,
        hosts=hosts,
    )
    same_everywhere(results)
    return results[0]


# --- Optimizers. ---


def test_exact_tests_cover_every_torch_optimizer() -> None:
    # An optimizer that a newer torch has needs a line in ARGUMENTS; an older torch may lack some.
    assert set(exact.optimizer_names()) <= set(ARGUMENTS)


def in_both_types(covered_by: str, cases: list[Any], in_float32: list[Any]) -> list[Any]:
    """Return cases in float64, and in float32, of which only some run outside `make soak`."""
    others = [(case, F32) for case in cases if case not in in_float32]
    each = [*((case, F64) for case in cases), *((case, F32) for case in in_float32)]
    return [*each, *left_to_soak(covered_by, *others)]


@pytest.mark.parametrize(
    ("make", "dtype"),
    in_both_types(
        "in float64, here",
        [c for name in exact.optimizer_names() for c in cases(name)],
        [cases(name)[0] for name in ("SGD", "Adam", "Adagrad")],
    ),
    ids=lambda each: str(each).removeprefix("torch."),
)
def test_every_optimizer_trains_as_in_one_process(make: Case, dtype: Any) -> None:
    problem = SHIFTING if "strong_wolfe" in str(make) else PROBLEMS.get(make.optimizer, MLP)
    expected = reference(problem, make, dtype)
    # The comparison is meaningful: the weights have moved by far more than the bound.
    assert distance(values(problem.build(dtype)), expected) > 0.01
    for size in SIZES if dtype is F64 else (3,):
        result = ranks(problem, make, dtype, size=size, sparse_as_dense=problem is TABLE)
        assert distance(result, expected) <= BOUNDS[dtype]


def test_no_gradient_sign_depends_on_rounding() -> None:
    """Rprop's cases above assume this."""
    smallest = []

    def watched(parameters: Any) -> torch.optim.Optimizer:
        optimizer = case("Rprop")(parameters)

        def look(*_: Any) -> None:
            gradients = [p.grad.abs() for group in optimizer.param_groups for p in group["params"]]
            largest = max(float(g.max()) for g in gradients)
            smallest.append(min(float(g.min()) for g in gradients) / largest)

        optimizer.register_step_pre_hook(look)
        return optimizer

    train(MLP, watched, F32, distributed=False)
    assert min(smallest) > 100 * torch.finfo(F32).eps


# --- Models. ---


@pytest.mark.parametrize(
    ("make", "dtype"),
    in_both_types("in float64, here", list(ON_EVERY_MODEL), [MOMENTUM]),
    ids=lambda each: str(each).removeprefix("torch."),
)
@cnn_too
def test_every_model_trains_as_in_one_process(problem: Any, make: Case, dtype: Any) -> None:
    sizes = SIZES if dtype is F64 else (4,) if problem is TRANSFORMER else (3,)
    for size in sizes:
        result = ranks(problem, make, dtype, size=size)
        assert distance(result, reference(problem, make, dtype)) <= BOUNDS[dtype]


@both_dtypes
@pytest.mark.parametrize("as_dense", [True, False], ids=["as dense", "as sparse"])
@pytest.mark.parametrize(
    "make", [case("Adagrad"), *left_to_soak("Adagrad, here", case("SGD"))], ids=str
)
def test_sparse_gradients_train_as_in_one_process(make: Case, as_dense: Any, dtype: Any) -> None:
    expected = reference(SPARSE, make, dtype)
    assert distance(values(SPARSE.build(dtype)), expected) > 0.01
    for size in (2, 3):
        result = ranks(SPARSE, make, dtype, size=size, sparse_as_dense=as_dense)
        assert distance(result, expected) <= BOUNDS[dtype]


@both_dtypes
def test_sparse_gradients_train_as_in_one_process_with_sparse_adam(dtype: Any) -> None:
    make = case("SparseAdam")
    for size in (2, 3):
        result = ranks(TABLE, make, dtype, size=size)
        assert distance(result, reference(TABLE, make, dtype)) <= BOUNDS[dtype]


@cnn_too
def test_two_runs_give_the_same_bits(problem: Any) -> None:
    make = case("AdamW")
    assert torch.equal(ranks(problem, make, F32, size=3), ranks(problem, make, F32, size=3))


# --- Options: with and without each of them. ---


@pytest.mark.parametrize(
    "options",
    [
        {"groups": 1},
        {"groups": 3},
        {"gradient_predivide_factor": 3.0},
        {"gradient_predivide_factor": 0.5},
        {"gradient_as_bucket_view": True},
        {"gradient_as_bucket_view": True, "groups": 2},
        {"process_set": hvd.global_process_set},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "make",
    [MOMENTUM, *left_to_soak("momentum, here; every optimizer without options", case("AdamW"))],
    ids=str,
)
def test_optimizer_options_do_not_change_the_weights(make: Case, options: Any) -> None:
    result = ranks(MLP, make, size=3, **options)
    assert distance(result, reference(MLP, make)) <= BOUNDS[F64]


@pytest.mark.parametrize("problem", [MLP, EMBEDDING], ids=str)
def test_gradients_as_bucket_views_give_the_same_bits(problem: Any) -> None:
    assert torch.equal(
        ranks(problem, MOMENTUM, F32, size=3),
        ranks(problem, MOMENTUM, F32, size=3, gradient_as_bucket_view=True),
    )


@pytest.mark.parametrize("hosts", [[0, 1, 1], [0, 1, 2]], ids=str)
@pytest.mark.parametrize(
    "dtype", [F64, *left_to_soak("float64, here; float32 on one host", F32)], ids=str
)
def test_ranks_on_several_hosts_train_as_in_one_process(dtype: Any, hosts: Any) -> None:
    for problem in (MLP, TRANSFORMER):
        result = ranks(problem, MOMENTUM, dtype, size=3, hosts=hosts)
        assert distance(result, reference(problem, MOMENTUM, dtype)) <= BOUNDS[dtype]
        assert torch.equal(result, ranks(problem, MOMENTUM, dtype, size=3, hosts=hosts))


def test_bucket_size_does_not_change_a_bit() -> None:
    # Two addends have one sum, whatever their place in a bucket.
    results = [
        ranks(TRANSFORMER, MOMENTUM, F32, settings=Settings(bucket_bytes=size))
        for size in (1, 256, 1 << 20)
    ]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_process_set_trains_as_one_process_and_other_ranks_alone() -> None:
    """Ranks 0 and 2 divide each batch, and rank 1 trains on whole batches."""

    def body() -> Tensor:
        pair = hvd.add_process_set([0, 2])
        model = MLP.build()
        optimizer = hvd.DistributedOptimizer(MOMENTUM(model.parameters()), process_set=pair)
        for step in range(STEPS):
            batch = MLP.batch(step, F64)
            if pair.included():
                batch = tuple(t.chunk(2)[pair.rank()] for t in batch)
            optimizer.zero_grad()
            MLP.loss(model, batch).backward()
            optimizer.step()
        return values(model)

    expected = reference(MLP, MOMENTUM)
    first, alone, second = on_ranks(3, body, settings=SMALL)
    assert torch.equal(first, second)
    assert torch.equal(alone, expected)
    assert distance(first, expected) <= BOUNDS[F64]


# --- The loops of users. ---


class Loop:
    """A test's training, on a rank or in one process."""

    def __init__(
        self,
        distributed: bool,
        make: exact.Make = MOMENTUM,
        dtype: torch.dtype = F64,
        problem: Problem = MLP,
        **options: Any,
    ) -> None:
        self.distributed = distributed
        self.dtype = dtype
        self.problem = problem
        self.model: Any = problem.build(dtype)
        self.plain = make(self.model.parameters())
        self.optimizer: Any = self.plain
        if distributed:
            self.wrap(**options)

    def wrap(self, **options: Any) -> None:
        self.optimizer = hvd.DistributedOptimizer(self.plain, **options)

    def batch(self, step: int) -> exact.Batch:
        batch = self.problem.batch(step, self.dtype)
        return mine(batch) if self.distributed else batch

    def loss(self, step: int) -> Tensor:
        return self.problem.loss(self.model, self.batch(step))

    def step(self, step: int) -> None:
        self.optimizer.zero_grad()
        self.loss(step).backward()
        self.optimizer.step()

    def synchronize(self) -> None:
        if self.distributed:
            self.optimizer.synchronize()


@both_dtypes
@pytest.mark.parametrize("as_views", [False, True])
def test_two_backward_passes_per_step_equal_one_process(as_views: Any, dtype: Any) -> None:
    def run(distributed: bool) -> Tensor:
        options = {"backward_passes_per_step": 2, "gradient_as_bucket_view": as_views}
        loop = Loop(distributed, dtype=dtype, **options)
        for step in range(STEPS):
            loop.optimizer.zero_grad()
            for number in (2 * step, 2 * step + 1):
                (loop.loss(number) / 2).backward()
            loop.optimizer.step()
        return values(loop.model)

    compare(run, dtype=dtype)
    compare(run, dtype=dtype, size=3)


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "Rprop"])
def test_step_closures_equal_one_process(optimizer: Any) -> None:
    def run(distributed: bool) -> Tensor:
        loop = Loop(distributed, case(optimizer))
        for step in range(STEPS):

            def closure(step: int = step) -> Tensor:
                loop.optimizer.zero_grad()
                loss = loop.loss(step)
                loss.backward()
                return loss

            loop.optimizer.step(closure)
        return values(loop.model)

    compare(run, size=3)


def test_parameter_groups_added_later_equal_one_process() -> None:
    """The last layer is added after five steps, with another learning rate."""

    def run(distributed: bool) -> Tensor:
        model = MLP.build()
        optimizer = MOMENTUM(model[:-1].parameters())
        if distributed:
            optimizer = hvd.DistributedOptimizer(optimizer)
        for step in range(STEPS):
            if step == 5:
                optimizer.add_param_group({"params": list(model[-1].parameters()), "lr": 0.02})
            batch = MLP.batch(step, F64)
            model.zero_grad()  # including parameters that the optimizer does not have yet
            optimizer.zero_grad()
            MLP.loss(model, mine(batch) if distributed else batch).backward()
            optimizer.step()
        return values(model)

    compare(run, size=3)


def test_unfrozen_parameters_equal_one_process() -> None:
    def run(distributed: bool) -> Tensor:
        model = MLP.build()
        model[0].requires_grad_(False)
        optimizer = MOMENTUM(model.parameters())
        if distributed:
            optimizer = hvd.DistributedOptimizer(optimizer)
        for step in range(STEPS):
            model[0].weight.requires_grad_(step >= 4)
            model[0].bias.requires_grad_(step >= 9)
            batch = MLP.batch(step, F64)
            optimizer.zero_grad()
            MLP.loss(model, mine(batch) if distributed else batch).backward()
            optimizer.step()
        return values(model)

    compare(run, size=3)


def test_bfloat16_autocast_equals_one_process_over_the_same_shares() -> None:
    """Autocast rounds each share's gradient to bfloat16, so the reference also computes share by share."""

    def step_gradients(model: nn.Module, batch: exact.Batch) -> list[Tensor]:
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = MLP.loss(model, batch)
        loss.backward()
        return [p.grad for p in model.parameters()]

    def alone() -> Tensor:
        model: Any = MLP.build(F32)
        optimizer = MOMENTUM(model.parameters())
        for step in range(STEPS):
            shares = zip(*(t.chunk(2) for t in MLP.batch(step, F32)), strict=True)
            gradients = [step_gradients(model, share) for share in shares]
            for p, one, other in zip(model.parameters(), *gradients, strict=True):
                p.grad = (one + other) * 0.5
            optimizer.step()
        return values(model)

    def together() -> Tensor:
        model: Any = MLP.build(F32)
        optimizer = hvd.DistributedOptimizer(MOMENTUM(model.parameters()))
        for step in range(STEPS):
            optimizer.zero_grad()
            step_gradients(model, mine(MLP.batch(step, F32)))
            optimizer.step()
        return values(model)

    expected = alone()
    for result in on_ranks(2, together, settings=SMALL):
        assert torch.equal(result, expected)


@both_dtypes
@pytest.mark.parametrize("make", [MOMENTUM, case("AdamW"), case("AdamW", fused=True)], ids=str)
@pytest.mark.parametrize("unscale", [False, True], ids=["", "unscale and clip"])
def test_grad_scaler_without_synchronize_calls_equals_one_process(
    unscale: Any, make: Case, dtype: Any
) -> None:
    """The loop calls neither synchronize() nor skip_synchronize(). In step 7, one row overflows on one rank."""

    def run(distributed: bool) -> Tensor:
        loop = Loop(distributed, make, dtype)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=5)
        for step in range(STEPS):
            loop.optimizer.zero_grad()
            x, y = loop.problem.batch(step, dtype)
            if step == 7:
                x[-1, 0] = torch.inf
            batch = mine((x, y)) if distributed else (x, y)
            scaler.scale(loop.problem.loss(loop.model, batch)).backward()
            if unscale:
                scaler.unscale_(loop.optimizer)
                nn.utils.clip_grad_norm_(loop.model.parameters(), 0.1)
            scaler.step(loop.optimizer)
            scaler.update()
        scale = torch.tensor([scaler.get_scale()], dtype=dtype).log2() / 100
        return torch.cat([values(loop.model), scale])

    compare(run, dtype=dtype, size=3)


@both_dtypes
@pytest.mark.parametrize("skip", [False, True], ids=["", "skip_synchronize"])
def test_clipping_after_synchronize_equals_one_process(skip: Any, dtype: Any) -> None:
    def run(distributed: bool) -> Tensor:
        loop = Loop(distributed, dtype=dtype)
        for step in range(STEPS):
            loop.optimizer.zero_grad()
            loop.loss(step).backward()
            loop.synchronize()
            nn.utils.clip_grad_norm_(loop.model.parameters(), 0.05)
            if skip and distributed:
                with loop.optimizer.skip_synchronize():
                    loop.optimizer.step()
            else:
                loop.optimizer.step()
        return values(loop.model)

    compare(run, dtype=dtype, size=3)


@pytest.mark.parametrize("as_views", [False, True], ids=["", "views"])
@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("who", ["optimizer", "model"])
def test_zero_grad_of_model_or_optimizer_equals_one_process(
    who: Any, to_none: Any, as_views: Any
) -> None:
    def run(distributed: bool) -> Tensor:
        loop = Loop(distributed, gradient_as_bucket_view=as_views)
        for step in range(STEPS):
            loop.loss(step).backward()
            loop.optimizer.step()
            getattr(loop, who).zero_grad(set_to_none=to_none)
        return values(loop.model)

    compare(run)


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 5, 0.5),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.2, total_steps=STEPS + 1),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, 0.1, total_iters=5), lr_scheduler.ExponentialLR(o, 0.9)],
        milestones=[5],
    ),
}


@pytest.mark.parametrize(
    ("name", "when"),
    [
        *((name, "before") for name in SCHEDULERS),
        ("OneCycleLR", "after"),
        *left_to_soak(
            "one that changes the momentum too, here",
            *((name, "after") for name in SCHEDULERS if name != "OneCycleLR"),
        ),
    ],
)
def test_schedulers_created_before_or_after_wrapping_equal_one_process(
    name: Any, when: Any
) -> None:
    """torch must not warn about the order of step() calls."""

    def run(distributed: bool) -> Tensor:
        loop = Loop(False)
        loop.distributed = distributed
        scheduler = None
        if when == "before":
            scheduler = SCHEDULERS[name](loop.plain)
        if distributed:
            loop.wrap()
        scheduler = scheduler or SCHEDULERS[name](loop.optimizer)
        for step in range(STEPS):
            loop.step(step)
            scheduler.step()
        return values(loop.model)

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        # Of torch 2.4's own SequentialLR, whose step() gives it.
        warnings.filterwarnings("ignore", "The epoch parameter in `scheduler.step", UserWarning)
        expected = run(False)
        results = on_ranks(2, lambda: run(True), settings=SMALL)
    same_everywhere(results)
    assert distance(results[0], expected) <= BOUNDS[F64]
    assert distance(expected, reference(MLP, MOMENTUM)) > 0.001


def test_plateau_scheduler_created_before_wrapping_equals_one_process() -> None:
    def run(distributed: bool) -> Tensor:
        loop = Loop(False)
        loop.distributed = distributed
        scheduler = lr_scheduler.ReduceLROnPlateau(loop.plain, patience=1, factor=0.5)
        if distributed:
            loop.wrap()
        for step in range(STEPS):
            loop.step(step)
            loss = loop.loss(step).detach()
            scheduler.step(hvd.allreduce(loss) if distributed else loss)
        assert loop.plain.param_groups[0]["lr"] < 0.05
        return values(loop.model)

    compare(run)
