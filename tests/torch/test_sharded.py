from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import sparkhvd.torch as hvd
from sparkhvd.errors import InvalidArgumentError, MismatchError
from sparkhvd.settings import Settings
from sparkhvd.torch.gradients.layout import cut_range, is_dense
from sparkhvd.torch.optimizer.shards import owners_of
from tests.harness.soak import left_to_soak
from tests.torch.on_ranks import on_ranks

pytestmark = pytest.mark.ranks

SMALL = Settings(bucket_bytes=512)
STEPS = 5

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(
        p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01
    ),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "AdamW one by one": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.1),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.05),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.05),
}
if not hasattr(torch.optim, "Adafactor"):
    del OPTIMIZERS["Adafactor"]


class Model(nn.Module):
    """Matrices, vectors, a number, an unused layer, and a convolution in channels_last."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 2)
        self.first = nn.Linear(20, 7)
        self.scale = nn.Parameter(torch.ones(()))
        self.single = nn.Parameter(torch.ones(1))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.unused = nn.Linear(3, 3)
        self.last = nn.Linear(7, 2)
        self.to(dtype)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.4)
        self.conv.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.conv(x.reshape(-1, 3, 3, 3)).flatten(1)
        return self.last(torch.tanh(self.first(hidden) * self.scale)) + self.single


def batch(step: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(50 + step)
    return torch.randn(12, 27, generator=generator, dtype=torch.float64).to(dtype)


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) - x[:, :2].sin()).square().mean()


def mine(x: torch.Tensor) -> torch.Tensor:
    return x.chunk(hvd.size())[hvd.rank()]


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1).double() for p in model.parameters()])


def one_step(model: nn.Module, optimizer: Any, step: int, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss_of(model, x).backward()
    optimizer.step()


def alone(make: Callable[..., torch.optim.Optimizer], steps: int = STEPS) -> nn.Module:
    model = Model()
    optimizer = make(model.parameters())
    for step in range(steps):
        one_step(model, optimizer, step, batch(step))
    return model


def sharded(
    make: Callable[..., torch.optim.Optimizer], steps: int = STEPS, **options: Any
) -> tuple[nn.Module, Any]:
    model = Model()
    optimizer = hvd.DistributedOptimizer(
        make(model.parameters()), model.named_parameters(), sharded=True, **options
    )
    for step in range(steps):
        one_step(model, optimizer, step, mine(batch(step)))
    return model, optimizer


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


# Optimizers with each kind of state: moments, no state by element, matrices, with kernels for one tensor and for many.
SHARED = ("momentum", "AdamW", "Adamax", *{"Adafactor"}.intersection(OPTIMIZERS))


@pytest.mark.parametrize(
    ("name", "share"),
    [
        *((name, False) for name in OPTIMIZERS),
        *((name, True) for name in SHARED),
        *left_to_soak(
            "private, here", *((name, True) for name in OPTIMIZERS if name not in SHARED)
        ),
    ],
)
def test_sharded_weights_equal_one_process(name: str, share: bool) -> None:
    expected = weights(alone(OPTIMIZERS[name]))

    def body() -> torch.Tensor:
        return weights(sharded(OPTIMIZERS[name], share_parameters=share)[0])

    found = on_ranks(3, body, settings=SMALL)
    for each in found:
        assert_close(each, expected)
        assert torch.equal(each, found[0])


@pytest.mark.parametrize("hosts", [[0, 1], [0, 0, 1], [0, 1, 0, 1]])
def test_sharded_training_on_several_hosts_equals_one_process(hosts: list[int]) -> None:
    expected = weights(alone(OPTIMIZERS["Adam"]))
    found = on_ranks(
        len(hosts), lambda: weights(sharded(OPTIMIZERS["Adam"])[0]), settings=SMALL, hosts=hosts
    )
    for each in found:
        assert_close(each, expected)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch before 2.9 has no Muon")
def test_sharded_muon_gets_whole_matrices() -> None:
    def make() -> nn.Sequential:
        model = nn.Sequential(nn.Linear(27, 9, bias=False), nn.Tanh(), nn.Linear(9, 2, bias=False))
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) * 0.3)
        return model.double()

    plain = make()
    optimizer = torch.optim.Muon(plain.parameters(), lr=0.02)
    for step in range(STEPS):
        one_step(plain, optimizer, step, batch(step))

    def body() -> torch.Tensor:
        model = make()
        muon = hvd.DistributedOptimizer(torch.optim.Muon(model.parameters(), lr=0.02), sharded=True)
        for step in range(STEPS):
            one_step(model, muon, step, mine(batch(step)))
        return weights(model)

    for each in on_ranks(2, body):
        # Muon computes in bfloat16, where the last bit of a sum matters.
        torch.testing.assert_close(each, weights(plain), rtol=1e-4, atol=1e-4)


def test_sharded_unknown_optimizer_class_gets_whole_parameters() -> None:
    class ByNorm(torch.optim.SGD):
        """Reads a whole parameter."""

        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.grad.div_(p.grad.norm() + 1e-3)
            return super().step(closure)

    def make(p: Any) -> torch.optim.Optimizer:
        return ByNorm(p, lr=0.05, momentum=0.5)

    expected = weights(alone(make))
    for each in on_ranks(2, lambda: weights(sharded(make)[0])):
        assert_close(each, expected)


def test_optimizer_memory_is_divided_among_ranks() -> None:
    def body() -> int:
        model, optimizer = sharded(OPTIMIZERS["Adam"])
        del model
        return sum(
            value.numel()
            for values in optimizer.state.values()
            for name, value in values.items()
            if name != "step"
        )

    full = sum(p.numel() for n, p in Model().named_parameters() if not n.startswith("unused")) * 3
    found = on_ranks(4, body)
    assert sum(found) == full
    assert max(found) < 1.2 * full / 4


class Saved:
    """The state that four ranks saved after three steps, and the state of one process then and later."""

    def __init__(self) -> None:
        make = OPTIMIZERS["momentum"]
        model = Model()
        optimizer = make(model.parameters())
        for step in range(3):
            one_step(model, optimizer, step, batch(step))
        self.expected_state = copy.deepcopy(optimizer.state_dict())
        for step in range(3, STEPS):
            one_step(model, optimizer, step, batch(step))
        self.expected = weights(model)

        def save() -> tuple[bytes, dict[str, Any]]:
            model, optimizer = sharded(make, steps=3)
            file = io.BytesIO()
            torch.save(optimizer.state_dict(), file)
            return file.getvalue(), copy.deepcopy(model.state_dict())

        self.by_rank = on_ranks(4, save)
        self.model = self.by_rank[0][1]

    def state(self) -> dict[str, Any]:
        """Load it in each call, because an optimizer continues to use the tensors that it loads."""
        loaded: dict[str, Any] = torch.load(io.BytesIO(self.by_rank[3][0]))
        return loaded


@pytest.fixture(scope="module")
def saved() -> Saved:
    return Saved()


def test_sharded_state_dict_equals_the_plain_optimizer_on_every_rank(saved: Saved) -> None:
    state = saved.state()
    assert state["param_groups"] == saved.expected_state["param_groups"]
    expected = saved.expected_state["state"]
    assert state["state"].keys() == expected.keys()
    for index, values in expected.items():
        assert values.keys() == state["state"][index].keys()
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                assert value.stride() == state["state"][index][name].stride()
                torch.testing.assert_close(state["state"][index][name], value)
    for file, _ in saved.by_rank:
        assert file == saved.by_rank[0][0]


@pytest.mark.parametrize("share", [False, True], ids=["private", "shared"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_sharded_state_loads_with_any_number_of_ranks(saved: Saved, size: int, share: bool) -> None:
    def go_on() -> torch.Tensor:
        model, optimizer = sharded(OPTIMIZERS["momentum"], steps=1, share_parameters=share)
        with optimizer.writing_parameters():
            if not share or hvd.rank() == 0:
                model.load_state_dict(saved.model)
        optimizer.load_state_dict(saved.state())
        for step in range(3, STEPS):
            one_step(model, optimizer, step, mine(batch(step)))
        return weights(model)

    for each in on_ranks(size, go_on):
        assert_close(each, saved.expected)


def test_sharded_state_loads_into_the_plain_optimizer(saved: Saved) -> None:
    model = Model()
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    model.load_state_dict(saved.model)
    optimizer.load_state_dict(saved.state())
    for step in range(3, STEPS):
        one_step(model, optimizer, step, batch(step))
    assert_close(weights(model), saved.expected)


@pytest.mark.skipif("Adafactor" not in OPTIMIZERS, reason="torch before 2.5 has no Adafactor")
def test_state_dict_gathers_state_of_unsharded_parameters() -> None:
    def body() -> dict[str, Any]:
        return dict(sharded(OPTIMIZERS["Adafactor"])[1].state_dict())

    model = Model()
    optimizer = OPTIMIZERS["Adafactor"](model.parameters())
    for step in range(STEPS):
        one_step(model, optimizer, step, batch(step))
    expected = optimizer.state_dict()["state"]
    for state in on_ranks(2, body):
        assert state["state"].keys() == expected.keys()
        for index, values in expected.items():
            for name, value in values.items():
                torch.testing.assert_close(state["state"][index][name], value)


@pytest.mark.parametrize(
    ("norm_type", "share"),
    [
        *((norm_type, False) for norm_type in (2.0, 1.0, float("inf"))),
        (2.0, True),
        *left_to_soak("private, here", (1.0, True), (float("inf"), True)),
    ],
)
def test_sharded_norm_clipping_equals_one_process(norm_type: float, share: bool) -> None:
    make = OPTIMIZERS["momentum"]
    model = Model()
    optimizer = make(model.parameters())
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, batch(step)).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type))
        optimizer.step()

    def body() -> tuple[torch.Tensor, torch.Tensor]:
        model, optimizer = sharded(make, steps=0, share_parameters=share)
        found = []
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, mine(batch(step))).backward()
            if step % 3 == 0:  # torch's own, over whole gradients
                optimizer.synchronize()
                found.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type))
            else:
                found.append(optimizer.clip_grad_norm_(0.1, norm_type))
            optimizer.step()
        return weights(model), torch.stack([norm.double() for norm in found])

    expected_norms = torch.stack(norms)
    assert (expected_norms > 0.1).all()  # it does clip
    for found, found_norms in on_ranks(3, body, settings=SMALL):
        torch.testing.assert_close(found_norms, expected_norms, rtol=1e-10, atol=0)
        torch.testing.assert_close(found, weights(model), rtol=1e-10, atol=1e-10)


def test_sharded_gradient_norm_has_the_gradient_dtype() -> None:
    dtypes = [torch.float32, torch.float64], [torch.bfloat16], [torch.float64]

    def run(distributed: bool) -> list[torch.dtype]:
        found = []
        for each in dtypes:
            parameters = [nn.Parameter(torch.zeros(1, dtype=dtype)) for dtype in each]
            optimizer = torch.optim.SGD(parameters, lr=0.1)
            if distributed:  # the second rank has no part of a single element
                optimizer = hvd.DistributedOptimizer(optimizer, sharded=True)
            sum(p.double().sum() for p in parameters).backward()
            if distributed:
                found.append(optimizer.clip_grad_norm_(0.1).dtype)
            else:
                found.append(nn.utils.clip_grad_norm_(parameters, 0.1).dtype)
        return found

    assert on_ranks(2, lambda: run(True)) == [run(False)] * 2


def test_synchronize_gives_whole_gradients_on_every_rank() -> None:
    model = Model()
    loss_of(model, batch(0)).backward()
    expected = [p.grad for p in model.parameters()]

    def body() -> list[torch.Tensor | None]:
        model, optimizer = sharded(OPTIMIZERS["SGD"], steps=0)
        loss_of(model, mine(batch(0))).backward()
        optimizer.synchronize()
        optimizer.synchronize()  # does nothing more
        return [p.grad for p in model.parameters()]

    for found in on_ranks(3, body, settings=SMALL):
        for one, other in zip(found, expected, strict=True):
            assert (one is None) == (other is None)
            if one is not None and other is not None:
                assert_close(one, other)


def test_sharded_grad_scaler_without_synchronize_equals_one_process() -> None:
    expected = weights(alone(OPTIMIZERS["momentum"], 4))

    def body() -> torch.Tensor:
        model, optimizer = sharded(OPTIMIZERS["momentum"], steps=0)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(5):
            optimizer.zero_grad()
            at = min(step, 3)
            loss = loss_of(model, mine(batch(at)))
            if step == 3 and hvd.rank() == 1:
                loss = loss * float("inf")  # every rank leaves out this step
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return weights(model)

    for found in on_ranks(2, body):
        assert_close(found, expected)


@pytest.mark.parametrize(
    "options",
    [
        {"backward_passes_per_step": 2},
        {"gradient_predivide_factor": 2.0},
        {"groups": 3},
        {"op": hvd.Sum},
    ],
    ids=str,
)
def test_sharded_training_with_any_option_equals_one_process(options: dict[str, Any]) -> None:
    passes = options.get("backward_passes_per_step", 1)

    def train(
        model: nn.Module, optimizer: Any, rows: Callable[..., torch.Tensor], k: float
    ) -> torch.Tensor:
        for step in range(STEPS):
            optimizer.zero_grad()
            for part in rows(batch(step)).chunk(passes):
                (loss_of(model, part) * k).backward()
            optimizer.step()
        return weights(model)

    model = Model()
    factor = 2.0 if options.get("op") is hvd.Sum else 1.0
    expected = train(model, OPTIMIZERS["Adam"](model.parameters()), lambda x: x, factor)

    def body() -> torch.Tensor:
        model, optimizer = sharded(OPTIMIZERS["Adam"], steps=0, **options)

        def rows(x: torch.Tensor) -> torch.Tensor:
            if passes == 1:
                return mine(x)
            return torch.cat([mine(part) for part in x.chunk(passes)])

        return train(model, optimizer, rows, 1.0)

    for found in on_ranks(2, body, settings=SMALL):
        assert_close(found, expected)


@pytest.mark.parametrize("share", [False, True])
def test_sharded_closures_schedulers_and_unfreezing_equal_one_process(share: bool) -> None:
    def train(model: Any, optimizer: Any, rows: Callable[..., torch.Tensor]) -> torch.Tensor:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        for step in range(STEPS):
            if step == 2:
                model.first.weight.requires_grad_(True)

            def closure(step: int = step) -> torch.Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, rows(batch(step)))
                loss.backward()
                return loss

            assert optimizer.step(closure) is not None
            scheduler.step()
        return weights(model)

    def frozen() -> nn.Module:
        model = Model()
        model.first.weight.requires_grad_(False)
        return model

    model = frozen()
    expected = train(model, torch.optim.Adam(model.parameters(), lr=0.01), lambda x: x)

    def body() -> torch.Tensor:
        model = frozen()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.Adam(model.parameters(), lr=0.01), sharded=True, share_parameters=share
        )
        return train(model, optimizer, mine)

    for found in on_ranks(2, body, settings=SMALL):
        assert_close(found, expected)


def test_sharded_parameter_groups_and_added_groups_equal_one_process() -> None:
    def train(wrap: Callable[[Any], Any], rows: Callable[..., torch.Tensor]) -> torch.Tensor:
        model = Model()
        optimizer = wrap(
            torch.optim.Adam(
                [
                    {"params": list(model.conv.parameters()), "lr": 0.001},
                    {
                        "params": [
                            model.scale,
                            model.single,
                            model.empty,
                            *model.unused.parameters(),
                        ]
                    },
                ],
                lr=0.02,
            )
        )
        for step in range(STEPS):
            if step == 2:
                optimizer.add_param_group(
                    {"params": [*model.first.parameters(), *model.last.parameters()], "lr": 0.03}
                )
            one_step(model, optimizer, step, rows(batch(step)))
        return weights(model)

    expected = train(lambda optimizer: optimizer, lambda x: x)
    for found in on_ranks(
        2, lambda: train(lambda o: hvd.DistributedOptimizer(o, sharded=True), mine), settings=SMALL
    ):
        assert_close(found, expected)


def test_existing_optimizer_state_is_divided_among_ranks() -> None:
    expected = weights(alone(OPTIMIZERS["Adam"]))

    def body() -> torch.Tensor:
        model = Model()
        optimizer = OPTIMIZERS["Adam"](model.parameters())
        for step in range(2):
            one_step(model, optimizer, step, batch(step))
        optimizer = hvd.DistributedOptimizer(optimizer, sharded=True)
        for step in range(2, STEPS):
            one_step(model, optimizer, step, mine(batch(step)))
        return weights(model)

    for found in on_ranks(2, body):
        assert_close(found, expected)


def test_sharded_parameters_may_get_new_memory() -> None:
    def body() -> torch.Tensor:
        model, optimizer = sharded(OPTIMIZERS["momentum"], steps=2)
        model.first.weight.data = model.first.weight.detach().clone()
        for step in range(2, STEPS):
            one_step(model, optimizer, step, mine(batch(step)))
        return weights(model)

    for found in on_ranks(2, body):
        assert_close(found, weights(alone(OPTIMIZERS["momentum"])))


def test_sharded_training_in_a_process_set_equals_one_process() -> None:
    expected = weights(alone(OPTIMIZERS["Adam"]))

    def body() -> torch.Tensor | None:
        pair = hvd.add_process_set([0, 2])
        if hvd.rank() == 1:
            return None
        model = Model()
        optimizer = hvd.DistributedOptimizer(
            OPTIMIZERS["Adam"](model.parameters()),
            sharded=True,
            process_set=pair,
            share_parameters=True,
        )
        for step in range(STEPS):
            one_step(model, optimizer, step, batch(step).chunk(2)[hvd.rank() // 2])
        return weights(model)

    for rank, found in enumerate(on_ranks(3, body)):
        assert found is None if rank == 1 else torch.allclose(found, expected, 1e-10, 1e-10)


def test_sharded_fp16_compression_is_close_to_one_process() -> None:
    expected = weights(alone(OPTIMIZERS["momentum"]))
    found = on_ranks(
        2,
        lambda: weights(sharded(OPTIMIZERS["momentum"], compression=hvd.Compression.fp16)[0]),
        settings=SMALL,
    )
    assert torch.equal(found[0], found[1])
    torch.testing.assert_close(found[0], expected, rtol=0, atol=5e-3)
    assert not torch.equal(found[0], expected)


def test_sharded_optimizer_of_one_rank_equals_the_plain_optimizer() -> None:
    expected = weights(alone(OPTIMIZERS["Adam"]))

    def body() -> torch.Tensor:
        model, optimizer = sharded(OPTIMIZERS["Adam"], share_parameters=True)
        copy.deepcopy(optimizer)
        with optimizer.writing_parameters():
            pass
        return weights(model)

    assert torch.equal(on_ranks(1, body)[0], expected)


# --- One copy of the parameters. ---


def test_shared_parameters_use_one_memory_with_rank_0_values() -> None:
    def body() -> tuple[torch.Tensor, bool]:
        model = Model()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(hvd.rank())
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), sharded=True, share_parameters=True
        )
        start = weights(model)
        with optimizer.writing_parameters():
            if hvd.rank() == 1:
                with torch.no_grad():
                    model.single.fill_(17.0)
        return start, bool(model.single == 17.0)

    expected = weights(Model())
    for start, is_seen in on_ranks(3, body):
        assert torch.equal(start, expected)
        assert is_seen


def test_writing_shared_parameters_outside_step_raises_on_every_rank() -> None:
    def body() -> str:
        model, optimizer = sharded(OPTIMIZERS["SGD"], steps=1, share_parameters=True)
        if hvd.rank() == 1:
            with torch.no_grad():
                model.last.weight.clamp_(-1, 1)
        with pytest.raises(InvalidArgumentError) as caught:
            one_step(model, optimizer, 1, mine(batch(1)))
        one_step(model, optimizer, 2, mine(batch(2)))  # the next one works
        return str(caught.value)

    for text in on_ranks(2, body):
        assert text == (
            "DistributedOptimizer(share_parameters=True): 'last.weight' was written outside of "
            "step(), on this rank or another rank, but all ranks of the host share it. Write it "
            "inside `with optimizer.writing_parameters():`, on every rank, or leave share_parameters "
            "out."
        )


def test_shared_parameters_are_restored_after_an_error() -> None:
    def body() -> torch.Tensor:
        model, optimizer = sharded(OPTIMIZERS["Adam"], steps=2, share_parameters=True)
        saved = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        hvd.barrier()  # every rank has its copy
        with torch.no_grad():
            model.first.weight.add_(float(hvd.rank()))  # what a rank did by mistake
        with pytest.raises(InvalidArgumentError, match="written outside of step"):
            one_step(model, optimizer, 2, mine(batch(2)))
        with optimizer.writing_parameters():
            model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        for step in (2, 3, 4):
            one_step(model, optimizer, step, mine(batch(step)))
        return weights(model)

    expected = weights(alone(OPTIMIZERS["Adam"], 5))
    for found in on_ranks(3, body, settings=SMALL):
        assert_close(found, expected)


def test_copies_of_shared_parameters_are_private() -> None:
    def body() -> bool:
        model, optimizer = sharded(OPTIMIZERS["SGD"], steps=1, share_parameters=True)
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        copies = [copy.deepcopy(model), copy.deepcopy(model)]
        copies[1].load_state_dict(torch.load(io.BytesIO(file.getvalue())))
        before = weights(model)
        single = float(model.single)
        for each in copies:
            with torch.no_grad():
                each.single.add_(hvd.rank() + 1)
        hvd.barrier()
        # No other rank sees this change, and no other rank's change is here.
        is_private = all(float(each.single) == single + hvd.rank() + 1 for each in copies)
        is_private = is_private and torch.equal(weights(model), before)
        one_step(model, optimizer, 1, mine(batch(1)))
        return is_private and not torch.equal(weights(model), before)

    expected = weights(alone(OPTIMIZERS["SGD"], 2))
    assert on_ranks(2, body) == [True, True]
    for found in on_ranks(
        2, lambda: weights(sharded(OPTIMIZERS["SGD"], 2, share_parameters=True)[0])
    ):
        assert_close(found, expected)


def test_shared_parameters_on_two_hosts_raise() -> None:
    def body() -> str:
        with pytest.raises(InvalidArgumentError) as caught:
            sharded(OPTIMIZERS["SGD"], steps=0, share_parameters=True)
        return str(caught.value)

    for text in on_ranks(2, body, hosts=[0, 1]):
        assert text.startswith(
            "DistributedOptimizer(share_parameters=True): the 2 ranks are on 2 hosts, but only the ranks of one host can share memory."
        )


# --- Refusals. ---


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda p: torch.optim.LBFGS(p), {}, "LBFGS combines all parameters"),
        (lambda p: torch.optim.SparseAdam(p), {}, "SparseAdam needs sparse gradients"),
        (OPTIMIZERS["SGD"], {"op": hvd.Adasum}, "op is Adasum. Use Average or Sum"),
        (OPTIMIZERS["SGD"], {"op": hvd.Max}, "op is Max. Use Average or Sum"),
        (
            OPTIMIZERS["SGD"],
            {"gradient_as_bucket_view": True},
            "gradient_as_bucket_view=True needs all gradients, but each rank gets only its part of them",
        ),
    ],
)
def test_optimizers_that_cannot_be_sharded_raise(make: Any, options: Any, message: str) -> None:
    def body() -> None:
        with pytest.raises(InvalidArgumentError, match=message):
            sharded(make, steps=0, **options)

    on_ranks(2, body)


def test_share_parameters_without_sharded_raises() -> None:
    def body() -> None:
        model = Model()
        with pytest.raises(InvalidArgumentError, match="share_parameters=True needs sharded=True"):
            hvd.DistributedOptimizer(OPTIMIZERS["SGD"](model.parameters()), share_parameters=True)

    on_ranks(1, body)


def test_copying_a_sharded_optimizer_raises() -> None:
    def body() -> None:
        _, optimizer = sharded(OPTIMIZERS["Adam"], steps=1)
        with pytest.raises(InvalidArgumentError, match="Call state_dict\\(\\) on every rank"):
            copy.deepcopy(optimizer)

    on_ranks(2, body)


def test_sharded_sparse_gradients_raise_without_sparse_as_dense() -> None:
    def make() -> tuple[nn.Embedding, Any]:
        table = nn.Embedding(11, 3, sparse=True, dtype=torch.float64)
        with torch.no_grad():
            table.weight.copy_(torch.arange(33).view(11, 3) / 10)
        return table, torch.tensor([[1, 5], [5, 10]])

    def body() -> torch.Tensor:
        table, indices = make()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(table.parameters(), lr=0.1), sharded=True, sparse_as_dense=True
        )
        table(indices[hvd.rank()]).square().sum().backward()
        optimizer.step()
        other, indices = make()
        refusing = hvd.DistributedOptimizer(
            torch.optim.SGD(other.parameters(), lr=0.1), sharded=True
        )
        with pytest.raises(
            InvalidArgumentError, match="is sparse, but sharded=True supports only dense gradients"
        ):
            other(indices[hvd.rank()]).square().sum().backward()
        del refusing
        return table.weight.detach()

    table, indices = make()
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    (table(indices).square().sum() / 2).backward()
    optimizer.step()
    for found in on_ranks(2, body):
        assert_close(found, table.weight.detach())


def test_sharded_ranks_with_different_memory_formats_raise() -> None:
    def body() -> str:
        model = Model()
        if hvd.rank() == 1:
            model.conv.weight.data = model.conv.weight.detach().contiguous()
        optimizer = hvd.DistributedOptimizer(
            OPTIMIZERS["SGD"](model.parameters()), model.named_parameters(), sharded=True
        )
        with pytest.raises(MismatchError) as caught:
            one_step(model, optimizer, 0, mine(batch(0)))
        return str(caught.value)

    for text in on_ranks(2, body):
        assert "ranks disagree on the memory layout (strides) of 'conv.weight'" in text


@pytest.mark.parametrize("share", [False, True])
def test_closure_without_backward_causes_no_second_reduction(share: bool) -> None:
    model = Model()
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, batch(step))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step(lambda loss=loss: loss)

    def body() -> torch.Tensor:
        model, optimizer = sharded(OPTIMIZERS["momentum"], steps=0, share_parameters=share)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = loss_of(model, mine(batch(step)))
            loss.backward()
            optimizer.clip_grad_norm_(0.1)
            optimizer.step(lambda loss=loss: loss)
        return weights(model)

    for found in on_ranks(2, body):
        torch.testing.assert_close(found, weights(model), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("share", [False, True])
def test_step_hooks_get_whole_gradients_and_parameters(share: bool) -> None:
    def train(model: nn.Module, optimizer: Any, rows: Callable[..., torch.Tensor]) -> torch.Tensor:
        average = weights(model)

        def before(*_: Any) -> None:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)

        def after(*_: Any) -> None:
            average.lerp_(weights(model), 0.5)

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)
        for step in range(STEPS):
            one_step(model, optimizer, step, rows(batch(step)))
        return torch.cat([average, weights(model)])

    plain = Model()
    expected = train(plain, OPTIMIZERS["momentum"](plain.parameters()), lambda x: x)

    def body() -> torch.Tensor:
        return train(*sharded(OPTIMIZERS["momentum"], steps=0, share_parameters=share), mine)

    for found in on_ranks(2, body):
        assert_close(found, expected)


def test_sharded_optimizer_that_calls_its_closure_twice_raises() -> None:
    class Twice(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            closure()
            super().step()
            with torch.enable_grad():
                return closure()

    def body() -> None:
        model = Model()
        optimizer = hvd.DistributedOptimizer(Twice(model.parameters(), lr=0.1), sharded=True)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, mine(batch(0)))
            loss.backward()
            return loss

        with pytest.raises(InvalidArgumentError, match="calls its closure more than once"):
            optimizer.step(closure)

    on_ranks(2, body)


@pytest.mark.parametrize("share", [False, True])
def test_changing_the_memory_format_after_sharding_raises(share: bool) -> None:
    def body() -> str:
        model, optimizer = sharded(OPTIMIZERS["Adam"], steps=1, share_parameters=share)
        model.conv.to(memory_format=torch.contiguous_format)
        with pytest.raises(InvalidArgumentError) as caught:
            one_step(model, optimizer, 1, mine(batch(1)))
        return str(caught.value)

    for text in on_ranks(2, body):
        assert "had strides (12, 1, 6, 3) when the optimizer divided its memory" in text


def test_moving_a_shared_parameter_raises_on_every_rank() -> None:
    def body() -> str:
        model, optimizer = sharded(OPTIMIZERS["Adam"], steps=1, share_parameters=True)
        if hvd.rank() == 1:
            model.first.weight.data = model.first.weight.data.clone()
        with pytest.raises(InvalidArgumentError) as caught:
            one_step(model, optimizer, 1, mine(batch(1)))
        return str(caught.value)

    for text in on_ranks(2, body):
        assert "'first.weight' was moved to other memory" in text


def test_later_unshared_optimizer_gets_private_parameters() -> None:
    def body() -> torch.Tensor:
        model, optimizer = sharded(OPTIMIZERS["SGD"], steps=1, share_parameters=True)
        del optimizer
        later = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(1, STEPS):
            one_step(model, later, step, mine(batch(step)))
        return weights(model)

    for found in on_ranks(2, body):
        assert_close(found, weights(alone(OPTIMIZERS["SGD"])))


def test_later_adasum_optimizer_gets_private_parameters() -> None:
    def body() -> float:
        p = nn.Parameter(torch.ones(4))
        sharing = hvd.DistributedOptimizer(
            torch.optim.SGD([p], lr=0.1), sharded=True, share_parameters=True
        )
        del sharing
        combining = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=0.25), op=hvd.Adasum)
        p.sum().backward()
        combining.step()
        return float(p.detach()[0])

    assert on_ranks(2, body) == [0.75, 0.75]


def test_shared_parameters_of_several_dtypes_are_saved_separately() -> None:
    def body() -> int:
        model = nn.ModuleDict({"a": nn.Linear(300, 300), "b": nn.Linear(4, 2).double()})
        hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), sharded=True, share_parameters=True
        )
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        assert torch.equal(torch.load(io.BytesIO(file.getvalue()))["b.weight"], model["b"].weight)
        small = io.BytesIO()
        torch.save(model["b"].state_dict(), small)
        return len(small.getvalue())

    for num_bytes in on_ranks(2, body):
        assert num_bytes < 10_000


def test_frozen_parameters_are_not_exchanged() -> None:
    def body() -> float:
        model = Model()
        model.first.weight.requires_grad_(False)
        optimizer = hvd.DistributedOptimizer(OPTIMIZERS["SGD"](model.parameters()), sharded=True)
        with torch.no_grad():
            model.first.weight.fill_(float(hvd.rank()))
        one_step(model, optimizer, 0, mine(batch(0)))
        return float(model.first.weight.detach().mean())

    assert on_ranks(2, body) == [0.0, 1.0]


def test_broadcasting_sharded_optimizer_state_raises_on_every_rank() -> None:
    def body() -> None:
        model, optimizer = sharded(OPTIMIZERS["momentum"], steps=0)
        hvd.broadcast_optimizer_state(optimizer, 0)  # it is empty
        one_step(model, optimizer, 0, mine(batch(0)))
        with pytest.raises(InvalidArgumentError, match="no rank has the state of all parameters"):
            hvd.broadcast_optimizer_state(optimizer, 0)

    on_ranks(2, body)


def test_adding_parameters_to_shared_parameters_raises() -> None:
    def body() -> None:
        model, optimizer = sharded(OPTIMIZERS["SGD"], steps=0, share_parameters=True)
        with pytest.raises(InvalidArgumentError, match="add_param_group\\(\\) is not supported"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
        one_step(model, optimizer, 0, mine(batch(0)))  # nothing was added

    on_ranks(2, body)


# --- The arithmetic of parts. ---


def test_shard_ranges_cover_every_index_once() -> None:
    for count in (0, 1, 2, 5, 7, 100, 101):
        for num_parts in (1, 2, 3, 8):
            ranges = [cut_range(count, num_parts, part) for part in range(num_parts)]
            covered = [i for first, last in ranges for i in range(first, last)]
            assert covered == list(range(count))
            assert max(b - a for a, b in ranges) - min(b - a for a, b in ranges) <= 1


def test_parameter_owners_get_balanced_sizes() -> None:
    sizes = [100, 1, 50, 49, 3, 7]
    owners = owners_of(sizes, 2)
    loads = [sum(s for s, o in zip(sizes, owners, strict=True) if o == rank) for rank in (0, 1)]
    assert max(loads) - min(loads) <= 2
    assert owners_of([], 3) == []
    assert owners_of([1, 1, 1], 2, [10, 0]) == [1, 1, 1]


def test_dense_memory_layouts_are_recognized() -> None:
    x = torch.empty(4, 3, 2, 2)
    assert is_dense(x)
    assert is_dense(x.to(memory_format=torch.channels_last))
    assert is_dense(x.permute(2, 0, 3, 1))
    assert is_dense(torch.empty(()))
    assert is_dense(torch.empty(0, 3))
    assert not is_dense(x[:, :2])
    assert not is_dense(torch.empty(3, 1).expand(3, 4))
