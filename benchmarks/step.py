"""Time of a training step of two processes, beside the same step without communication and beside DDP on Gloo.

    .venv/bin/python benchmarks/step.py [--models mlp,resnet] [--variants none,DDP,sparkhvd] [--rounds 15] [--quick]
                                        [--json FILE] [--write]

A step is `zero_grad()`, forward, backward and `step()` of SGD. Both ranks, one thread each, hold the model once per
variant and train all of them by turns; both start a block of steps together. A block lasts until the slower rank is
done; what counts is its ratio to the block without communication of the same round. CPU seconds are those of all
threads of both processes: on a busy machine they say more than the clock. Variants:

    none                two ranks that do not communicate: what the machine can do
    DDP                 torch's DistributedDataParallel on Gloo; "DDP views": with gradient_as_bucket_view=True
    sparkhvd            `hvd.DistributedOptimizer` as it comes
    views, fp16, ...    the same with options; benchmarks/step_rank.py has the list, one line each

Also what `DistributedOptimizer` adds to a step where there is one rank only.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from step_models import MODELS, Limits
from step_rank import BORN, LOSSY, OURS, OVERLAPPED, VARIANTS, Found, Plan, measure, together

from common import Report, Target, median_and_quartiles, shown

STEP_MODELS = tuple(name for name in MODELS if MODELS[name].limits != Limits())
# Where the step is short, what one rank pays shows.
ALONE = ("mlp", "layers")
MAY_ADD_PERCENT = 2.0
# One rank never waits: its blocks differ less, but the limit is nearer to the noise.
ROUNDS_ALONE = 2
# Where most of the memory that a step allocates is in large blocks.
ALLOCATING = "mlp"


def run(plan: Plan, size: int, keep_freed_memory: bool = False) -> Found:
    """Run `plan` on so many ranks, together.

    By default with the allocator as it is, because that is what every other launcher's processes have.
    """
    from sparkhvd.runner import run_local
    from sparkhvd.settings import Settings

    settings = Settings(keep_freed_memory=keep_freed_memory)
    return together(run_local(measure, (plan,), num_proc=size, settings=settings))


def ratios(times: Mapping[str, Sequence[float]], name: str, to: str) -> list[float]:
    """Divide `name`'s time of each round by `to`'s."""
    return [a / b for a, b in zip(times[name], times[to], strict=True)]


def median_ratio(times: Mapping[str, Sequence[float]], name: str, to: str) -> float:
    return statistics.median(ratios(times, name, to))


def best_of_ours(times: Mapping[str, Sequence[float]]) -> str:
    """Find our fastest variant with unchanged gradients, or "" if no variant ran."""
    exact = [name for name in times if name in OURS and name not in (*LOSSY, BORN, OVERLAPPED)]
    return min(exact, key=lambda name: median_ratio(times, name, "none"), default="")


def targets_of(limits: Limits, times: Mapping[str, Sequence[float]], name: str) -> list[Target]:
    """Make the targets of a row from the limits."""
    targets = []
    if name == "sparkhvd" and limits.default is not None:
        ratio = median_ratio(times, name, "none")
        targets.append(Target("of none", ratio, limits.default, at_least=False))
    if name == "sparkhvd" and limits.faster_than_ddp is not None and "DDP" in times:
        ratio = median_ratio(times, "DDP", name)
        targets.append(Target("faster than DDP", ratio, limits.faster_than_ddp, at_least=True))
    if limits.best is not None and name == best_of_ours(times):
        ratio = median_ratio(times, name, "none")
        targets.append(Target("best: of none", ratio, limits.best, at_least=False))
    return targets


def ratio_shown(values: Sequence[float]) -> str:
    """Format ratios as `median (25 % to 75 %)`."""
    low, _, high = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    return f"{statistics.median(values):.3f} ({low:.3f} to {high:.3f})"


def report_model(report: Report, model: str, found: Found) -> None:
    """Add the table of a model: a line per variant, also for failed variants."""
    rows: list[list[str | Sequence[Target]]] = []
    for name in VARIANTS:
        if name in found.errors:
            rows.append([name, f"error: {found.errors[name][:160]}", "", "", ""])
        elif name in found.wall:
            rows.append(
                [
                    name,
                    median_and_quartiles(found.wall[name]),
                    ratio_shown(ratios(found.wall, name, "none")) if name != "none" else "1",
                    f"{shown(statistics.median(found.cpu[name]))} ({median_ratio(found.cpu, name, 'none'):.3f} x)",
                    targets_of(MODELS[model].limits, found.wall, name),
                ]
            )
    report.table([MODELS[model].title, "a step", "x none", "CPU, both ranks", "targets"], rows)


def report_alone(report: Report, found: Mapping[str, Found]) -> None:
    """Add the table of the optimizer's cost for a single rank."""
    rows: list[list[str | Sequence[Target]]] = []
    for model, times in found.items():
        percent = (median_ratio(times.wall, "sparkhvd", "none") - 1) * 100
        rows.append(
            [
                MODELS[model].title,
                *(median_and_quartiles(times.wall[name]) for name in ("none", "sparkhvd")),
                ratio_shown(ratios(times.wall, "sparkhvd", "none")),
                [Target("longer", percent, MAY_ADD_PERCENT, at_least=False, unit="%")],
            ]
        )
    report.table(["one rank", "plain optimizer", "sparkhvd", "x plain", "target"], rows)


def report_allocator(report: Report, plain: Found, kept: Found) -> None:
    """Add the table of `Settings.keep_freed_memory`: the same variants in processes with and without it."""
    rows: list[list[str | Sequence[Target]]] = [
        [
            name,
            median_and_quartiles(plain.wall[name]),
            median_and_quartiles(kept.wall[name]),
            f"{statistics.median(kept.wall[name]) / statistics.median(plain.wall[name]):.2f}",
            f"{statistics.median(kept.wall[name]) / statistics.median(plain.wall['DDP']):.2f}",
        ]
        for name in plain.wall
        if name in kept.wall
    ]
    head = [
        "glibc's malloc as it is",
        "freed memory kept",
        "kept / as it is",
        "kept / DDP as it is",
    ]
    report.table([MODELS[ALLOCATING].title, *head], rows)


def chosen(names: str | None, known: Sequence[str]) -> list[str]:
    """Split an option at its commas. None means all known words."""
    words = list(known) if names is None else names.split(",")
    unknown = [word for word in words if word not in known]
    if unknown:
        raise SystemExit(f"Unknown: {', '.join(unknown)}. There are {', '.join(known)}.")
    return words


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", help=f"with commas, of {','.join(STEP_MODELS)}")
    parser.add_argument("--variants", help="with commas; none is always among them")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="3 rounds, shorter")
    parser.add_argument("--not-alone", action="store_true", help="leave the single rank out")
    parser.add_argument("--json", help="a file for the raw numbers")
    parser.add_argument("--write", action="store_true", help="keep the tables in docs/results/")
    options = parser.parse_args()
    rounds, shorter = (3, 2) if options.quick else (options.rounds, 1)
    models = chosen(options.models, STEP_MODELS)
    variants = ["none", *(n for n in chosen(options.variants, VARIANTS) if n != "none")]
    load = os.getloadavg()[0]
    report = Report(
        f"A training step of 2 processes, one thread each, load {load:.1f} at the start"
    )
    for model in models:
        wanted = variants if options.variants else MODELS[model].variants or variants
        found = run(Plan(model, tuple(wanted), rounds, shorter), size=2)
        report.raw[model] = asdict(found)
        report_model(report, model, found)
        print(f"{model}: " + brief(found), flush=True)
    alone = [] if options.not_alone else [model for model in models if model in ALONE]
    if alone:
        plans = {m: Plan(m, ("none", "sparkhvd"), ROUNDS_ALONE * rounds, shorter) for m in alone}
        by_model = {model: run(plan, size=1) for model, plan in plans.items()}
        report.raw["one rank"] = {model: asdict(found) for model, found in by_model.items()}
        report_alone(report, by_model)
    if ALLOCATING in models and not options.variants:
        plan = Plan(ALLOCATING, ("none", "DDP", "sparkhvd"), rounds, shorter)
        report_allocator(report, run(plan, size=2), run(plan, size=2, keep_freed_memory=True))
    report.note(
        f"Median (25 % to 75 %) of {rounds} rounds. Every round measures each variant. DDP also broadcasts buffers"
        " (running means) before every forward pass. sparkhvd, like Horovod, does not."
        " The best variant is chosen among the options that do not change gradients."
        f" '{BORN}' is not an option but an experiment (benchmarks/step_born.py): Linear layers whose backward writes into"
        " registered memory, which also saves the page faults of new gradients."
    )
    report.finish("benchmarks/step.py", write=options.write, json_path=options.json)


def brief(found: Found) -> str:
    """Format a line of progress."""
    done = [
        f"{name} {median_ratio(found.wall, name, 'none'):.3f}"
        for name in VARIANTS
        if name in found.wall
    ]
    return ", ".join([*done, *(f"{name} failed" for name in found.errors)])


if __name__ == "__main__":
    main()
