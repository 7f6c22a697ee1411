"""The migration pages for DDP and Horovod, and the scripts of examples/torch, on two ranks.

The pages' own code runs (tests/harness/pages.py). Most of the time of such a test is the import of torch. So one job of two ranks runs
nearly all scripts in a row, as `start.py` would.
"""

from __future__ import annotations

import contextlib
import faulthandler
import inspect
import io
import os
import re
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import sparkhvd.torch as hvd
from sparkhvd import as_horovod
from sparkhvd.runner import run_local
from sparkhvd.settings import Settings
from tests.harness.pages import named
from tests.harness.processes import wait_for_no_trainers
from tests.harness.soak import SOAK, soak
from tests.harness.spark import ROOT, run_script

pytestmark = [pytest.mark.spark, pytest.mark.timeout(100)]

EXAMPLES = ROOT / "examples" / "torch"
DDP_PAGE = "docs/coming_from_ddp.md"
HOROVOD_PAGE = "docs/coming_from_horovod.md"

RANK_TIMEOUT_S = 80.0

ONE_THREAD = {"OMP_NUM_THREADS": "1"}

# The network and the data of the large example, small enough for a test.
TINY = (
    *("--width", "8", "--image-size", "32", "--num-classes", "3"),
    *("--num-images", "120", "--num-val-images", "31", "--batch-size", "8"),
)
FEW = ("--num-warmup-batches", "1", "--num-batches-per-iter", "2", "--num-iters", "3")
BENCHMARK = ("--model", "resnet18", "--width", "8", "--image-size", "32", "--batch-size", "4", *FEW)


def block(page: str, name: str) -> str:
    """Return the code of a page under the comment that names it."""
    return named(page, name).text


def numbers(pattern: str, text: str) -> list[float]:
    found = [float(number) for number in re.findall(pattern, text)]
    assert found, f"no {pattern!r} in:\n{text}"
    return found


# --- On a rank. ---


def run_in_turn(scripts: Sequence[tuple[Path, Path, Sequence[str]]]) -> list[str]:
    """Run (folder, script, arguments) one after the other, as `start.py` does, and return the output of each."""
    # A rank that hangs says where, and ends the job.
    faulthandler.dump_traceback_later(RANK_TIMEOUT_S, exit=True)
    start: Callable[..., None] = runpy.run_path(str(EXAMPLES / "start.py"))["run_script"]
    printed = []
    for folder, script, arguments in scripts:
        os.chdir(folder)
        with contextlib.redirect_stdout(io.StringIO()) as output:
            start(str(script), *arguments)
        hvd.shutdown()
        printed.append(output.getvalue())
    return printed


def beside_ddp(folder: Path) -> dict[str, Any]:
    """Measure how far DDP and sparkhvd are apart in the page's training and collectives."""
    hvd.init()
    # Not by MASTER_PORT, which an earlier script has used, and whose store may still exist for some ranks.
    meeting = f"file://{folder / 'meeting'}"
    dist.init_process_group("gloo", meeting, rank=hvd.rank(), world_size=hvd.size())
    found = {
        "accumulation": apart(accumulated_by_ddp(), accumulated_by_hvd()),
        "views": apart(
            trained(in_ddp(network(), gradient_as_bucket_view=True)),
            trained(in_hvd(network(), gradient_as_bucket_view=True)),
        ),
        "fp16": apart(
            trained(in_ddp_with_fp16(network())),
            trained(in_hvd(network(), compression=hvd.Compression.fp16)),
        ),
        "sharded": apart(
            trained(in_ddp_and_zero(network())), trained(in_hvd(network(), sharded=True))
        ),
        "uneven": apart(uneven_by_ddp(), uneven_by_hvd()),
        "unused": [unused_by_ddp(), unused_by_hvd()],
        "buffers": buffers_on_ranks(),
        **collectives(),
    }
    dist.destroy_process_group()
    return found


Pair = tuple[nn.Module, torch.optim.Optimizer]


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def in_ddp(model: nn.Module, **options: Any) -> Pair:
    wrapped = DistributedDataParallel(model, **options)
    return wrapped, sgd(wrapped)


def in_ddp_with_fp16(model: nn.Module) -> Pair:
    wrapped, optimizer = in_ddp(model.float())
    wrapped.register_comm_hook(None, fp16_compress_hook)
    return wrapped, optimizer


def in_ddp_and_zero(model: nn.Module) -> Pair:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # slow to load

    wrapped = DistributedDataParallel(model)
    options = {"lr": 0.1, "momentum": 0.9}
    return wrapped, ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.SGD, **options)


def in_hvd(model: nn.Module, **options: Any) -> Pair:
    if "compression" in options:
        model = model.float()
    return model, hvd.DistributedOptimizer(
        sgd(model), named_parameters=model.named_parameters(), **options
    )


def loss(model: nn.Module, step: int) -> torch.Tensor:
    """Return the loss of a batch of this rank."""
    generator = torch.Generator().manual_seed(10 * step + hvd.rank())
    x = torch.randn(6, 4, generator=generator, dtype=next(model.parameters()).dtype)
    return (model(x) - x.sin().sum(dim=1, keepdim=True)).square().mean()


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1).double() for p in model.parameters()])


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    assert (one - weights(network())).abs().max() > 0.01, "nothing was trained"
    return float((one - other).abs().max())


def trained(pair: Pair) -> torch.Tensor:
    model, optimizer = pair
    for step in range(4):
        optimizer.zero_grad()
        loss(model, step).backward()
        optimizer.step()
    return weights(model)


def accumulated_by_ddp() -> torch.Tensor:
    model, optimizer = in_ddp(network())
    for step in range(3):
        optimizer.zero_grad()
        with model.no_sync():  # type: ignore[operator]  # DDP's
            loss(model, 2 * step).backward()
        loss(model, 2 * step + 1).backward()
        optimizer.step()
    return weights(model)


def accumulated_by_hvd() -> torch.Tensor:
    model, optimizer = in_hvd(network(), backward_passes_per_step=2)
    for step in range(3):
        optimizer.zero_grad()
        loss(model, 2 * step).backward()
        loss(model, 2 * step + 1).backward()
        optimizer.step()
    return weights(model)


def uneven_by_ddp() -> torch.Tensor:
    model, optimizer = in_ddp(network())
    with Join([model]):  # type: ignore[list-item]  # DDP's
        for step in range(2 + 3 * hvd.rank()):
            optimizer.zero_grad()
            loss(model, step).backward()
            optimizer.step()
    return weights(model)


def uneven_by_hvd() -> torch.Tensor:
    model, optimizer = in_hvd(network())
    for step in range(2 + 3 * hvd.rank()):
        optimizer.zero_grad()
        loss(model, step).backward()
        optimizer.step()
    last = hvd.join()
    hvd.broadcast_parameters(model.state_dict(), root_rank=last)
    return weights(model)


class Branches(nn.Module):
    """All ranks use the first layer, rank 0 the second, and no rank the third."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.parts = nn.ModuleList(nn.Linear(2, 1) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.parts[0](x)
        return y + self.parts[1](x) if hvd.rank() == 0 else y


def gradients(pair: Pair, parts: nn.ModuleList) -> list[Any]:
    model, optimizer = pair
    model(torch.ones(3, 2)).sum().backward()
    optimizer.step()
    grads = [part.weight.grad for part in parts]
    return [None if grad is None else grad.tolist() for grad in grads]


def unused_by_ddp() -> list[Any]:
    model = Branches()
    return gradients(in_ddp(model, find_unused_parameters=True), model.parts)


def unused_by_hvd() -> list[Any]:
    model = Branches()
    return gradients(in_hvd(model), model.parts)


def buffers_on_ranks() -> list[list[float]]:
    """Running means of both ranks after training, and after a broadcast."""
    model, optimizer = in_hvd(nn.BatchNorm1d(1))
    model(torch.full((4, 1), float(hvd.rank()))).sum().backward()
    optimizer.step()
    mean: Any = model.running_mean
    before = hvd.allgather(mean).tolist()
    hvd.broadcast_parameters(model.named_buffers(), root_rank=0)
    return [before, hvd.allgather(mean).tolist()]


def collectives() -> dict[str, Any]:
    rank = hvd.rank()
    x = torch.arange(4.0) + 10 * rank
    summed = x.clone()
    dist.all_reduce(summed)
    parts = [torch.empty(4), torch.empty(4)]
    dist.all_gather(parts, x)
    sent = x.clone()
    dist.broadcast(sent, src=1)
    mine = torch.empty(2)
    dist.reduce_scatter_tensor(mine, x)
    exchanged = torch.empty(4)
    dist.all_to_all_single(exchanged, x)
    objects = [{"rank": rank}, rank]
    dist.broadcast_object_list(objects, src=1)
    every: list[Any] = [None, None]
    dist.all_gather_object(every, {"rank": rank})
    in_place = x.clone()
    hvd.allreduce_(in_place, op=hvd.Sum)
    replaced = x.clone()
    hvd.broadcast_(replaced, root_rank=1)
    alone = hvd.add_process_set([1])
    pairs = {
        "allreduce": (hvd.allreduce(x, op=hvd.Sum), summed),
        "average": (hvd.allreduce(x), summed / 2),
        "async": (hvd.synchronize(hvd.allreduce_async(x)), summed / 2),
        "allreduce_": (in_place, summed),
        "allgather": (hvd.allgather(x), torch.cat(parts)),
        "broadcast": (hvd.broadcast(x, root_rank=1), sent),
        "broadcast_": (replaced, sent),
        "reducescatter": (hvd.reducescatter(x, op=hvd.Sum), mine),
        "alltoall": (hvd.alltoall(x), exchanged),
        "splits": (hvd.alltoall(x, [2, 2])[0], exchanged),
        "process_set": (hvd.allreduce(x, process_set=alone) if rank == 1 else x, x),
    }
    found: dict[str, Any] = {
        name: torch.equal(ours, theirs) for name, (ours, theirs) in pairs.items()
    }
    found["objects"] = [objects, hvd.broadcast_object([{"rank": rank}, rank], root_rank=1)]
    found["every"] = [every, hvd.allgather_object({"rank": rank})]
    return found


# --- The pages. ---


@dataclass(frozen=True)
class Job:
    """Result of two ranks: their output, by script, and the comparison with DDP."""

    folder: Path
    printed: dict[str, str]
    printed_by_1: dict[str, str]
    beside_ddp: list[dict[str, Any]]


@pytest.fixture(autouse=True)
def no_trainer_is_left() -> Iterator[None]:
    yield
    assert wait_for_no_trainers() == set()


def page_scripts(folder: Path) -> dict[str, tuple[Path, Path, Sequence[str]]]:
    """Write the pages' scripts, each into its own folder. Horovod's scripts differ only in the import."""
    horovod = block(HOROVOD_PAGE, "before")
    texts = {
        "horovod_after": horovod.replace("import horovod.torch as", "import sparkhvd.torch as")
    }
    if SOAK:
        # DDP that frees its group last joins Gloo's thread under the GIL. That thread needs the GIL to free a tensor
        # that Python has released, so both may wait forever: `del model` lets `dist` free the group.
        end = "dist.destroy_process_group()"
        texts["ddp_before"] = block(DDP_PAGE, "before").replace(end, f"del model\n{end}")
        texts["ddp_after"] = block(DDP_PAGE, "after")
    scripts: dict[str, tuple[Path, Path, Sequence[str]]] = {}
    for name, text in texts.items():
        path = folder / name / "train.py"
        path.parent.mkdir()
        path.write_text(text)
        scripts[name] = (path.parent, path, ())
    return scripts


def example_scripts(folder: Path) -> dict[str, tuple[Path, Path, Sequence[str]]]:
    mnist, large = EXAMPLES / "mnist.py", EXAMPLES / "imagenet_resnet50.py"
    short = ("--epochs", "2", "--batch-size", "64")
    halves = ("--gradient-predivide-factor", "2", "--fp16-allreduce")
    split = (*TINY, "--batches-per-allreduce", "2")
    return {
        "mnist": (folder, mnist, (*short, *halves, "--lr", "0.05")),
        "mnist_adasum": (folder, mnist, (*short, "--use-adasum", "--lr", "0.1")),
        "imagenet": (folder, large, (*split, "--epochs", "2")),
        "imagenet_again": (folder, large, (*split, "--epochs", "3")),
    }


def run_job(folder: Path) -> Job:
    runs = {**page_scripts(folder), **example_scripts(folder)}
    scripts = list(runs.values())

    def job() -> tuple[list[str], dict[str, Any]]:
        return run_in_turn(scripts), beside_ddp(folder)

    by_rank = run_local(job, num_proc=2, env=ONE_THREAD)  # a rank that hangs writes its stacks
    first, second = (dict(zip(runs, printed, strict=True)) for printed, _ in by_rank)
    return Job(folder, first, second, [beside for _, beside in by_rank])


@pytest.fixture(scope="module")
def job(zygote_has_compiler: None, tmp_path_factory: pytest.TempPathFactory) -> Job:
    return run_job(tmp_path_factory.mktemp("migration"))


@soak("the programs of the page, here; DDP on our backend: tests/distributed")
def test_ddp_script_and_its_migration_give_the_same_output_and_weights(
    job: Job,
) -> None:
    before, after = job.printed["ddp_before"], job.printed["ddp_after"]
    losses = numbers(r"epoch \d: loss (\S+)", before)
    assert len(losses) == 5
    assert losses[-1] < losses[0] / 2
    assert numbers(r"epoch \d: loss (\S+)", after) == pytest.approx(losses, abs=2e-6)
    saved = [torch.load(job.folder / name / "model.pt") for name in ("ddp_before", "ddp_after")]
    assert list(saved[0]) == list(saved[1])
    for name, tensor in saved[0].items():
        torch.testing.assert_close(saved[1][name], tensor, atol=1e-6, rtol=0)


def test_horovod_script_runs_with_only_its_import_changed(job: Job) -> None:
    before = block(HOROVOD_PAGE, "before")
    removed, added = block(HOROVOD_PAGE, "after").splitlines()
    assert (removed[0], added[0]) == ("-", "+")
    assert removed[1:] == "import horovod.torch as hvd"
    assert added[1:] == "import sparkhvd.torch as hvd"
    assert before.count(removed[1:]) == before.count("horovod") == 1
    losses = numbers(r"epoch \d: loss (\S+)", job.printed["horovod_after"])
    assert len(losses) == 5
    assert losses[-1] < losses[0] / 2


def test_only_rank_0_of_the_scripts_prints(job: Job) -> None:
    assert {*job.printed_by_1.values()} == {""}
    assert "" not in job.printed.values()


@pytest.mark.parametrize("name", ["accumulation", "views", "sharded", "uneven"])
def test_distributed_optimizer_equals_ddp_on_every_rank(name: str, job: Job) -> None:
    assert [beside[name] < 1e-12 for beside in job.beside_ddp] == [True, True]


def test_compressed_training_is_close_to_ddp_with_its_hook(job: Job) -> None:
    assert [beside["fp16"] < 1e-3 for beside in job.beside_ddp] == [True, True]


def test_unused_parameters_have_the_gradients_of_ddp_find_unused_parameters(
    job: Job,
) -> None:
    for beside in job.beside_ddp:
        theirs, ours = beside["unused"]
        assert ours == theirs == [[[3.0, 3.0]], [[1.5, 1.5]], None]


def test_buffers_differ_between_ranks_until_broadcast(job: Job) -> None:
    for beside in job.beside_ddp:
        (mine, other), sent = beside["buffers"]
        assert mine != other
        assert sent == [mine, mine]


def test_collectives_equal_torch_distributed(job: Job) -> None:
    for beside in job.beside_ddp:
        assert [name for name, value in beside.items() if value is False] == []
        for name in ("objects", "every"):
            assert beside[name][0] == beside[name][1]


@pytest.mark.parametrize("page", [DDP_PAGE, HOROVOD_PAGE], ids=["ddp", "horovod"])
def test_pages_show_start_py_unchanged(page: str) -> None:
    assert block(page, "start.py") == (EXAMPLES / "start.py").read_text()


@pytest.mark.parametrize("page", [DDP_PAGE, HOROVOD_PAGE], ids=["ddp", "horovod"])
def test_names_on_migration_pages_exist(page: str) -> None:
    page = (ROOT / page).read_text().partition("## Not in this version")[0]
    names = set(re.findall(r"\bhvd\.(\w+)", page)) - {"torch"}
    assert sorted(name for name in names if not hasattr(hvd, name)) == []
    kinds = set(re.findall(r"hvd\.Compression\.(\w+)", page))
    assert sorted(name for name in kinds if not hasattr(hvd.Compression, name)) == []
    known = set(inspect.signature(hvd.DistributedOptimizer).parameters)
    given = {
        argument
        for call in re.findall(r"DistributedOptimizer\(([^()]*)", page)
        for argument in re.findall(r"(\w+)=", call)
    }
    assert given <= known
    variables = {f.metadata["env"] for f in fields(Settings)}
    assert set(re.findall(r"SPARKHVD_\w+", page)) <= {*variables, as_horovod.VARIABLE}


# horovod.torch 0.28.1, except the parts that the page lists as missing.
HOROVODS_NAMES = """
    init shutdown is_initialized rank size local_rank local_size cross_rank cross_size mpi_threads_supported
    mpi_enabled gloo_enabled mpi_built gloo_built ddl_built ccl_built cuda_built rocm_built nccl_built
    start_timeline stop_timeline Average Sum Adasum Min Max Product ProcessSet global_process_set
    add_process_set remove_process_set allreduce allreduce_async allreduce_ allreduce_async_
    grouped_allreduce grouped_allreduce_async grouped_allreduce_ grouped_allreduce_async_
    sparse_allreduce_async allgather allgather_async grouped_allgather grouped_allgather_async broadcast
    broadcast_async broadcast_ broadcast_async_ alltoall alltoall_async reducescatter reducescatter_async
    grouped_reducescatter grouped_reducescatter_async join barrier poll synchronize broadcast_parameters
    broadcast_optimizer_state broadcast_object allgather_object Compression DistributedOptimizer
    SyncBatchNorm HorovodInternalError elastic
"""


def test_horovod_public_names_exist() -> None:
    names = re.findall(r"\w+", HOROVODS_NAMES)
    assert [name for name in names if not hasattr(hvd, name)] == []


def test_page_lists_the_horovod_variables_that_are_read() -> None:
    aliases = {f.metadata["alias"] for f in fields(Settings)} - {None}
    text = (ROOT / HOROVOD_PAGE).read_text()
    assert set(re.findall(r"^\| `(HOROVOD_\w+)`", text, re.MULTILINE)) == aliases


# --- The scripts. ---


def check_mnist(text: str) -> None:
    losses = numbers(r"train loss ([\d.]+)", text)
    assert losses[-1] < losses[0]
    tested = re.findall(r"test loss [\d.]+, accuracy ([\d.]+) \((\d+)\)", text)
    assert len(tested) == len(losses)
    # Every test image counts once, however they are divided, and one in ten is guessed right.
    assert {count for _, count in tested} == {"359"}
    assert float(tested[-1][0]) > 0.2


@pytest.mark.parametrize("run", ["mnist", "mnist_adasum"])
def test_mnist_script_reaches_its_accuracy(run: str, job: Job) -> None:
    check_mnist(job.printed[run])


def test_imagenet_script_trains_warms_up_and_resumes(job: Job) -> None:
    first, again = job.printed["imagenet"], job.printed["imagenet_again"]
    losses = numbers(r"train loss ([\d.]+)", first + again)
    assert losses[0] > losses[1] > losses[2]
    assert numbers(r"validation loss [\d.]+, accuracy ([\d.]+)", again)[-1] > 0.6
    assert "resuming after epoch 2" in again
    saved = sorted(path.name for path in job.folder.glob("checkpoint-*"))
    assert saved == ["checkpoint-1.pt", "checkpoint-2.pt", "checkpoint-3.pt"]
    assert re.findall(r"^epoch (\d): lr", first + again, re.MULTILINE) == ["1", "2", "3"]
    # 8 steps of 8 images on 2 ranks make 4 steps of 2 passes: the last rates of the first 3 of 5 epochs of
    # warm-up from 0.0125 to 4 times that.
    steps = -(-60 // 16)
    rates = [0.0125 * (1 + 3 * (epoch + (steps - 1) / steps) / 5) for epoch in range(3)]
    assert numbers(r"lr ([\d.]+)", first + again) == pytest.approx(rates, abs=1e-4)


@soak("on one rank: test_example_scripts_run_unchanged_on_one_rank; start.py: the job, here")
def test_benchmark_started_by_start_py_prints_rates_and_total() -> None:
    arguments = (*BENCHMARK, "--use-adasum", "--fp16-allreduce")
    result = run_script(
        EXAMPLES / "start.py", "2", "synthetic_benchmark.py", *arguments, timeout_s=80
    )
    text = result.output
    assert result.returncode == 0, text
    assert {line[:4] for line in text.splitlines()} == {"[0] "}, text
    rates = numbers(r"Iter \d: ([\d.]+) img/sec per rank", text)
    assert len(rates) == 3
    mean, error = re.findall(r"Img/sec per rank: ([\d.]+) \+-([\d.]+)", text)[0]
    assert float(mean) == pytest.approx(sum(rates) / 3, abs=0.1)
    deviation = (sum((rate - sum(rates) / 3) ** 2 for rate in rates) / 3) ** 0.5
    assert float(error) == pytest.approx(1.96 * deviation, abs=0.2)
    total = numbers(r"Total img/sec on 2 rank\(s\): ([\d.]+)", text)[0]
    # Ranks step together, so the other's rate is about the same.
    assert 1.2 * float(mean) < total < 3 * float(mean)


@pytest.mark.parametrize(
    ("script", "arguments", "expected"),
    [
        ("mnist.py", ("--epochs", "1"), r"test loss [\d.]+, accuracy 0\.\d+ \(359\)"),
        ("imagenet_resnet50.py", (*TINY, "--epochs", "1"), r"epoch 1: validation loss [\d.]+"),
        ("synthetic_benchmark.py", BENCHMARK, r"Total img/sec on 1 rank\(s\): [\d.]+"),
    ],
)
def test_example_scripts_run_unchanged_on_one_rank(
    script: str,
    arguments: Sequence[str],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # As `python script.py` would, but without another process that loads torch.
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    finally:
        hvd.shutdown()
        torch.set_num_threads(threads)
        sys.modules.pop("resnet", None)
    assert re.search(expected, capsys.readouterr().out)
