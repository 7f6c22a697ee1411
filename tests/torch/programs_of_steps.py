"""Programs of `ways.py` about gradients, hooks, optimizers, schedules and passes."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import lr_scheduler, swa_utils

from tests.torch.ways import (
    ANYHOW,
    BEHAVIOURS,
    LATER,
    STEPS,
    Batch,
    Behaviour,
    Make,
    Result,
    Way,
    behaviour,
    clip,
    grad,
    learn,
    mean_squares,
    mlp,
    numbers,
    plain_sgd,
    sgd,
    spoiled,
    vectors,
)

# --- Gradients between backward() and step(). ---


@behaviour(*ANYHOW, "sharded")
def clipping_by_norm(way: Way) -> Result:
    norms: list[Tensor] = []
    model = learn(
        way,
        mlp(),
        change=lambda ps, optimizer, _: norms.append(way.clip_grad_norm(optimizer, ps, 0.3)),
    )
    return model, norms


@behaviour("halves", bound=2e-3, bound_of_one=2e-3)
def clipping_by_norm_roughly(way: Way) -> Result:
    """Clip gradients sent as halves, which are exact to about 1e-3. The weights have moved by only a part of it."""
    return learn(way, mlp(), change=lambda ps, *_: clip_grad_norm_(ps, 0.3))


@behaviour(*ANYHOW)
def clipping_by_value(way: Way) -> Result:
    return learn(way, mlp(), change=lambda ps, *_: clip_grad_value_(ps, 0.05))


@behaviour(*ANYHOW)
def clipping_each_group(way: Way) -> Result:
    def change(_: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
        for number, group in enumerate(optimizer.param_groups):
            clip_grad_norm_(group["params"], 0.1 * (number + 1 + step % 2))

    return learn(way, mlp(), in_two_groups, change=change)


@behaviour(*ANYHOW)
def scaling_in_place(way: Way) -> Result:
    def change(parameters: list[nn.Parameter], _: Any, step: int) -> None:
        for p in parameters:
            grad(p).mul_(0.5 + 0.1 * step)

    return learn(way, mlp(), change=change)


# Only a rank's part of the gradients is reduced.
BEHAVIOURS["scaling_in_place_of_shards"] = Behaviour(
    scaling_in_place, ("sharded",), refused="optimizer.clip_grad_norm_("
)


@behaviour("views")
def scaling_all_at_once(way: Way) -> Result:
    return learn(way, mlp(), change=lambda ps, *_: torch._foreach_mul_([grad(p) for p in ps], 0.5))


@behaviour("views")
def scaling_data(way: Way) -> Result:
    """Scale `.data` as old code does. torch's count of changes does not see it."""

    def change(parameters: list[nn.Parameter], *_: Any) -> None:
        for p in parameters:
            grad(p).data.mul_(0.5)

    return learn(way, mlp(), change=change)


@behaviour(*ANYHOW)
def replacing_gradients(way: Way) -> Result:
    def change(parameters: list[nn.Parameter], *_: Any) -> None:
        for p in parameters:
            p.grad = grad(p).sign() * 0.01

    return learn(way, mlp(), change=change)


@behaviour("views")
def normalizing_gradients(way: Way) -> Result:
    def change(parameters: list[nn.Parameter], *_: Any) -> None:
        for p in parameters:
            grad(p).div_(grad(p).norm() + 0.1)

    return learn(way, mlp(), change=change)


@behaviour("views")
def centring_gradients(way: Way) -> Result:
    def change(parameters: list[nn.Parameter], *_: Any) -> None:
        for p in parameters:
            if p.dim() > 1:
                grad(p).sub_(grad(p).mean(dim=1, keepdim=True))

    return learn(way, mlp(), change=change)


@behaviour("views")
def adding_noise_that_is_the_same_everywhere(way: Way) -> Result:
    def change(parameters: list[nn.Parameter], _: Any, step: int) -> None:
        for p in parameters:
            grad(p).add_(numbers(step, *p.shape), alpha=0.02)

    return learn(way, mlp(), change=change)


@behaviour("views")
def weight_decay_by_hand(way: Way) -> Result:
    def change(parameters: list[nn.Parameter], *_: Any) -> None:
        for p in parameters:
            grad(p).add_(p.detach(), alpha=0.05)

    return learn(way, mlp(), change=change)


@behaviour(*ANYHOW)
def zeroing_some_gradients(way: Way) -> Result:
    """Set the bias of the first layer to zero, and at times rows of the last one."""

    def change(parameters: list[nn.Parameter], _: Any, step: int) -> None:
        grad(parameters[1]).zero_()
        grad(parameters[2])[step % 2] = 0

    return learn(way, mlp(), change=change)


@behaviour(*ANYHOW)
def dropping_some_gradients(way: Way) -> Result:
    """Drop gradients, which keeps a parameter unchanged for a step, without momentum and decay."""

    def change(parameters: list[nn.Parameter], _: Any, step: int) -> None:
        if step % 3:
            parameters[step % 4].grad = None

    decaying = torch.optim.SGD
    return learn(
        way,
        mlp(),
        lambda ps: decaying(ps, lr=0.05, momentum=0.9, weight_decay=0.1),
        change=change,
    )


@behaviour("views")
def logging_norms(way: Way) -> Result:
    norms: list[Tensor] = []
    model = learn(
        way, mlp(), change=lambda ps, *_: norms.extend(grad(p).norm().clone() for p in ps)
    )
    return model, norms


@behaviour(*ANYHOW)
def reading_gradients(way: Way) -> Result:
    read: list[Tensor] = []
    model = learn(way, mlp(), change=lambda ps, *_: read.extend(grad(p).clone() for p in ps))
    return model, read


@behaviour(*ANYHOW, "sharded")
def learning_rate_from_the_norm(way: Way) -> Result:
    def change(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer, _: int) -> None:
        norm = way.clip_grad_norm(optimizer, parameters, 1e9)
        optimizer.param_groups[0]["lr"] = 0.05 / (1 + norm.item())

    return learn(way, mlp(), change=change)


@behaviour("views")
def skipping_steps_whose_norm_is_not_finite(way: Way) -> Result:
    """Skip steps with a norm that is not finite, on every rank."""
    model = mlp()
    net, optimizer = way.pair(model, sgd)
    skipped = 0
    for step in range(STEPS):
        optimizer.zero_grad()
        way.backward(lambda rows: mean_squares(net, rows), way.share(spoiled(step)))
        norm = clip_grad_norm_(model.parameters(), 1.0)
        if norm.isfinite():
            optimizer.step()
        else:
            skipped += 1
    return model, torch.tensor(skipped)


@behaviour("views")
def unscaling_by_hand_and_clipping(way: Way) -> Result:
    def change(parameters: list[nn.Parameter], *_: Any) -> None:
        for p in parameters:
            grad(p).div_(1024)
        clip_grad_norm_(parameters, 0.3)

    return learn(way, mlp(), loss=lambda net, rows: 1024 * mean_squares(net, rows), change=change)


@behaviour(*ANYHOW)
def updating_weights_by_hand(way: Way) -> Result:
    """Update weights in the program. The optimizer only reduces."""
    model = mlp()
    net, optimizer = way.pair(model, sgd)
    for step in range(STEPS):
        optimizer.zero_grad()
        way.backward(lambda rows: mean_squares(net, rows), way.share(vectors(step)))
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(grad(p), alpha=0.1)
    return model


@behaviour()
def updating_weights_without_an_optimizer(way: Way) -> Result:
    model = mlp()
    net = way.model(model)
    for step in range(STEPS):
        model.zero_grad()
        mean_squares(net, way.share(vectors(step))).backward()
        way.reduce(model)
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(grad(p), alpha=0.1)
    return model


@behaviour(*ANYHOW)
def sharpness_aware_steps(way: Way) -> Result:
    """Take the gradients of the step where other gradients point to."""
    model = mlp()
    net, optimizer = way.pair(model, sgd)
    parameters = list(model.parameters())
    for step in range(STEPS):
        rows = way.share(vectors(step))
        optimizer.zero_grad()
        way.backward(lambda part: mean_squares(net, part), rows)
        with torch.no_grad():
            offsets = [0.05 * grad(p) / (grad(p).norm() + 0.1) for p in parameters]
            torch._foreach_add_(parameters, offsets)
        optimizer.zero_grad()
        way.backward(lambda part: mean_squares(net, part), rows)
        with torch.no_grad():
            torch._foreach_sub_(parameters, offsets)
        optimizer.step()
    return model


# --- Hooks. ---


@behaviour("views")
def clipping_in_a_hook_of_the_optimizer(way: Way) -> Result:
    model = mlp()
    net, optimizer = way.pair(model, sgd)
    optimizer.register_step_pre_hook(lambda *_: clip(list(model.parameters())))
    for step in range(STEPS):
        optimizer.zero_grad()
        way.backward(lambda rows: mean_squares(net, rows), way.share(vectors(step)))
        optimizer.step()
    return model


@behaviour(*ANYHOW, "sharded")
def scaling_in_a_hook_of_a_parameter(way: Way) -> Result:
    model = mlp()
    for p in model.parameters():
        p.register_hook(lambda gradient: gradient * 0.5)
    return learn(way, model)


@behaviour("sharded")
def scaling_in_a_hook_behind_accumulation(way: Way) -> Result:
    def halve(p: Any) -> None:
        grad(p).mul_(0.5 * p.dim())

    model = mlp()
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(halve)
    return learn(way, model)


# --- Optimizers. ---


def in_two_groups(parameters: Any) -> torch.optim.Optimizer:
    every = list(parameters)
    return torch.optim.SGD(
        [{"params": every[:2], "lr": 0.02}, {"params": every[2:], "momentum": 0.5}],
        lr=0.1,
        weight_decay=0.01,
    )


# If a gradient is nearly zero, a division by its size would turn rounding into steps.
EPS = 1e-2

OPTIMIZERS: dict[str, Make] = {
    "sgd": plain_sgd,
    "nesterov_and_decay": lambda ps: torch.optim.SGD(
        ps, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01
    ),
    "dampened_momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, dampening=0.3),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.02, eps=EPS, weight_decay=0.01),
    "amsgrad": lambda ps: torch.optim.Adam(ps, lr=0.02, eps=EPS, amsgrad=True),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.02, eps=EPS, weight_decay=0.1),
    "fused_adamw": lambda ps: torch.optim.AdamW(ps, lr=0.02, eps=EPS, fused=True),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.05, eps=EPS),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=0.01, eps=EPS, momentum=0.5, centered=True),
    "several_groups": in_two_groups,
}


def with_optimizer(make: Make) -> Callable[[Way], Result]:
    return lambda way: learn(way, mlp(), make)


for _name, _make in OPTIMIZERS.items():
    _others = ("accumulated",) if _name in ("adam", "several_groups") else ()
    BEHAVIOURS[_name] = Behaviour(with_optimizer(_make), ("plain", "sharded", *_others))


@behaviour("views", bound=1e-9, bound_of_one=1e-9)
def lbfgs(way: Way) -> Result:
    """Step with LBFGS, whose quotients of differences amplify rounding."""
    model = mlp()
    net, optimizer = way.pair(
        model,
        lambda ps: torch.optim.LBFGS(
            ps, lr=0.1, max_iter=3, history_size=5, tolerance_grad=0, tolerance_change=0
        ),
    )
    rows = way.share(vectors(0))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = mean_squares(net, rows)
        loss.backward()
        return loss

    for _ in range(STEPS):
        optimizer.step(closure)  # type: ignore[arg-type]  # a tensor is a loss too
    return model


@behaviour("views", "sharded")
def closures_of_other_optimizers(way: Way) -> Result:
    """Step with closures that clip inside."""
    model = mlp()
    net, optimizer = way.pair(model, sgd)
    for step in range(STEPS):
        rows = way.share(vectors(step))

        def closure(rows: Batch = rows) -> Tensor:
            optimizer.zero_grad()
            loss = mean_squares(net, rows)
            loss.backward()
            way.clip_grad_norm(optimizer, model.parameters(), 0.3)
            return loss

        optimizer.step(closure)  # type: ignore[arg-type]  # a tensor is a loss too
    return model


@behaviour("sharded")
def a_group_added_later(way: Way) -> Result:
    model = mlp()
    net = way.model(model)
    optimizer = way.optimizer(sgd(model[2].parameters()), model[2])
    for step in range(STEPS):
        if step == LATER:
            optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.02})
        net.zero_grad()  # DDP reduces parameters that the optimizer does not have yet
        way.backward(lambda rows: mean_squares(net, rows), way.share(vectors(step)))
        way.clip_grad_norm(
            optimizer, [p for group in optimizer.param_groups for p in group["params"]], 0.3
        )
        optimizer.step()
    return model


@behaviour("sharded")
def two_networks_against_each_other(way: Way) -> Result:
    """Train a generator and its critic. The generator's loss leaves gradients in the critic."""
    maker, critic = mlp(1), nn.Sequential(*mlp(2)[:1], nn.Tanh(), nn.Linear(8, 1).double())
    torch.manual_seed(3)
    nn.init.normal_(critic[2].weight, std=0.3)
    (made, making), (judged, judging) = way.pair(maker, sgd), way.pair(critic, sgd)
    for step in range(STEPS):
        (noise, _), (real, _) = way.share(vectors(step)), way.share(vectors(step + 1000))
        drawn = torch.cat([made(noise), noise[:, :4]], dim=1)
        judging.zero_grad()
        both = judged(torch.cat([real, drawn.detach()]))
        (both[len(real) :].mean() - both[: len(real)].mean() + both.square().mean()).backward()
        judging.step()
        making.zero_grad()
        (-judged(drawn).mean()).backward()
        making.step()
    return maker, critic


# --- Schedules, averages, and restarts. ---

SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "step_schedule": lambda o: lr_scheduler.StepLR(o, step_size=5, gamma=0.3),
    "one_cycle_schedule": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=STEPS),
    "cosine_schedule": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=7),
}


def with_schedule(make: Callable[[Any], Any]) -> Callable[[Way], Result]:
    def program(way: Way) -> Result:
        model = mlp()
        net, optimizer = way.pair(model, sgd)
        schedule = make(optimizer)
        for step in range(STEPS):
            optimizer.zero_grad()
            way.backward(lambda rows: mean_squares(net, rows), way.share(vectors(step)))
            optimizer.step()
            schedule.step()
        return model

    return program


for _name, _schedule in SCHEDULES.items():
    BEHAVIOURS[_name] = Behaviour(with_schedule(_schedule), ("plain", "sharded"))


@behaviour()
def schedule_made_before_the_optimizer_was_wrapped(way: Way) -> Result:
    model = mlp()
    net, plain = way.model(model), sgd(model.parameters())
    schedule = lr_scheduler.StepLR(plain, step_size=5, gamma=0.3)
    optimizer = way.optimizer(plain, model)
    for step in range(STEPS):
        optimizer.zero_grad()
        way.backward(lambda rows: mean_squares(net, rows), way.share(vectors(step)))
        optimizer.step()
        schedule.step()
    return model


@behaviour()
def schedule_by_the_mean_loss(way: Way) -> Result:
    model = mlp()
    net, optimizer = way.pair(model, sgd)
    schedule = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
    for step in range(STEPS):
        rows = way.share(vectors(step))
        optimizer.zero_grad()
        loss = mean_squares(net, rows)
        loss.backward()
        optimizer.step()
        schedule.step(way.mean(loss).item())
    return model, torch.tensor(optimizer.param_groups[0]["lr"])


@behaviour("sharded")
def learning_rate_by_hand(way: Way) -> Result:
    def change(_: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (1 + step)

    return learn(way, mlp(), change=change)


@behaviour("views")
def moving_average_of_weights(way: Way) -> Result:
    model = mlp()
    average = copy.deepcopy(model)

    def change(parameters: list[nn.Parameter], *_: Any) -> None:
        with torch.no_grad():
            for kept, p in zip(average.parameters(), parameters, strict=True):
                kept.lerp_(p, 0.2)

    return learn(way, model, change=change), average


@behaviour()
def stochastic_weight_averaging(way: Way) -> Result:
    model = mlp()
    net, optimizer = way.pair(model, sgd)
    averaged = swa_utils.AveragedModel(model)
    schedule = swa_utils.SWALR(optimizer, swa_lr=0.02, anneal_epochs=3)
    for step in range(STEPS):
        optimizer.zero_grad()
        way.backward(lambda rows: mean_squares(net, rows), way.share(vectors(step)))
        optimizer.step()
        if step >= LATER:
            averaged.update_parameters(model)
            schedule.step()
    return model, averaged.module


@behaviour("sharded", "views")
def saving_and_loading_in_the_middle(way: Way) -> Result:
    model = mlp()
    net, optimizer = way.pair(model, OPTIMIZERS["adam"])
    for step in range(STEPS):
        if step == LATER:
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            model = mlp(seed=5)
            model.load_state_dict(saved[0])
            net, optimizer = way.pair(model, OPTIMIZERS["adam"])
            optimizer.load_state_dict(saved[1])
            way.at_start.pop()
        optimizer.zero_grad()
        mean_squares(net, way.share(vectors(step))).backward()
        optimizer.step()
    return model


@behaviour()
def ranks_that_begin_with_other_weights(way: Way) -> Result:
    return learn(way, mlp(seed=1 + way.rank))


@behaviour("views")
def looking_at_other_data_between_steps(way: Way) -> Result:
    model = mlp()
    net, optimizer = way.pair(model, sgd)
    losses = []
    for step in range(STEPS):
        net.train()
        optimizer.zero_grad()
        way.backward(lambda rows: mean_squares(net, rows), way.share(vectors(step)))
        net.eval()
        with torch.no_grad():
            losses.append(mean_squares(net, vectors(500)))
        optimizer.step()
    return model, losses


# --- Several passes. ---


@behaviour()
def accumulating_without_sync(way: Way) -> Result:
    model = mlp()
    net, optimizer = way.pair(model, sgd, ours={"backward_passes_per_step": 3})
    for step in range(STEPS):
        optimizer.zero_grad()
        for number in range(3):
            last = number == 2
            with contextlib.nullcontext() if last else way.no_sync(net):
                rows = way.share(vectors(3 * step + number))
                (mean_squares(net, rows) / 3).backward()
        clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
    return model


@behaviour("views")
def accumulating_with_a_reduction_each(way: Way) -> Result:
    model = mlp()
    net, optimizer = way.pair(model, sgd)
    for step in range(STEPS):
        optimizer.zero_grad()
        for number in range(2):
            rows = way.share(vectors(2 * step + number))
            (mean_squares(net, rows) / 2).backward()
        optimizer.step()
    return model


@behaviour("views")
def gradients_that_are_never_zeroed(way: Way) -> Result:
    model = mlp()
    net, optimizer = way.pair(model, lambda ps: torch.optim.SGD(ps, lr=0.005))
    for step in range(STEPS):
        way.backward(lambda rows: mean_squares(net, rows), way.share(vectors(step)))
        optimizer.step()
    return model


@behaviour("sharded", "views")
def zeroing_instead_of_dropping(way: Way) -> Result:
    model = mlp()
    net, optimizer = way.pair(model, sgd)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        way.backward(lambda rows: mean_squares(net, rows), way.share(vectors(step)))
        optimizer.step()
    return model


@behaviour("views", "sharded")
def dropping_gradients_by_the_model(way: Way) -> Result:
    model = mlp()
    net, optimizer = way.pair(model, sgd)
    for step in range(STEPS):
        way.backward(lambda rows: mean_squares(net, rows), way.share(vectors(step)))
        optimizer.step()
        model.zero_grad()
    return model


@behaviour("views")
def two_losses_at_once(way: Way) -> Result:
    def loss(net: Any, rows: Batch) -> Tensor:
        x, y = rows
        out = net(x)
        both: Tensor = (out - y).square().mean() + 0.3 * (out - y).abs().square().square().mean()
        return both

    return learn(way, mlp(), loss=loss)


@behaviour("views")
def gradients_of_the_inputs_first(way: Way) -> Result:
    """Compute the inputs' gradients first, and keep the graph for the parameters' gradients."""

    def loss(net: Any, rows: Batch) -> Tensor:
        x, y = rows
        x = x.clone().requires_grad_()
        loss = mean_squares(net, (x, y))
        (inputs,) = torch.autograd.grad(loss, x, retain_graph=True)
        return loss * (1 + inputs.detach().norm() * 0)

    model = mlp()
    net, optimizer = way.pair(model, sgd)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(net, way.share(vectors(step))).backward(retain_graph=True)
        clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
    return model


@behaviour("views")
def gradient_penalty(way: Way) -> Result:
    def loss(net: Any, rows: Batch) -> Tensor:
        x, y = rows
        x = x.clone().requires_grad_()
        out = net(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        penalised: Tensor = (out - y).square().mean() + 0.1 * slope.square().sum(1).mean()
        return penalised

    return learn(way, mlp(), loss=loss, change=lambda ps, *_: clip_grad_norm_(ps, 0.3))


@behaviour()
def anomalies_are_looked_for(way: Way) -> Result:
    with torch.autograd.set_detect_anomaly(True):
        return learn(way, mlp())


@behaviour("views")
def a_batch_that_fails_is_left_out(way: Way) -> Result:
    model = mlp()
    net, optimizer = way.pair(model, sgd)
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = way.share(vectors(step))
        with contextlib.suppress(RuntimeError):
            mean_squares(net, (x[:, : 5 + (step % 4 > 0)], y)).backward()
            optimizer.step()
    return model


@behaviour(has_one_process=False)
def ranks_with_different_numbers_of_batches(way: Way) -> Result:
    model = mlp()
    net, optimizer = way.pair(model, sgd)
    with way.uneven(net):
        for step in range(STEPS + 3 * way.rank):
            optimizer.zero_grad()
            mean_squares(net, way.share(vectors(step))).backward()
            optimizer.step()
    return model
