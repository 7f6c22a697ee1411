"""torch's compiler is imported only by what compiles, and torch is as ever once it is."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sparkhvd import lazy_compiler
from tests.harness.paths import ROOT
from tests.harness.soak import soak

pytestmark = pytest.mark.processes

PROGRAMS = {
    "estimator, training loop, worker, a rank's optimizer, a process group": (
        "from sparkhvd import TorchEstimator; import sparkhvd.estimator.transform.worker, sparkhvd.training.train; "
        "import torch, sparkhvd.torch as hvd; hvd.init(); p = torch.nn.Parameter(torch.ones(2)); "
        "o = hvd.DistributedOptimizer(torch.optim.Adam([p])); p.sum().backward(); o.step(); o.zero_grad(); "
        "o.load_state_dict(o.state_dict()); "
        "torch.distributed.init_process_group('gloo', store=torch.distributed.HashStore(), rank=0, world_size=1)"
    ),
}


def python(program: str, *args: str) -> str:
    command = [sys.executable, "-c", program, *args]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=250, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("what", PROGRAMS)
def test_no_compiler_is_imported_by(what: str) -> None:
    unwanted = ("sympy", "torch._inductor.config", lazy_compiler.REAL)
    ending = f"; import sys; print([n for n in {unwanted!r} if n in sys.modules])"
    assert python(PROGRAMS[what] + ending).strip() == "[]"


TRAINING = """
import hashlib, sys, torch
from torch import nn
from sparkhvd import lazy_compiler

def digest():
    found = hashlib.sha256()
    for name in sorted(n for n in dir(torch.optim) if n[0].isupper()):
        kind = getattr(torch.optim, name)
        if not isinstance(kind, type) or kind is torch.optim.Optimizer:
            continue
        torch.manual_seed(1)
        sparse = name == "SparseAdam"
        module = nn.Embedding(6, 4, sparse=True) if sparse else nn.Linear(4, 4, bias=name != "Muon")
        given = torch.randint(0, 6, (5,)) if sparse else torch.randn(5, 4)
        def closure():
            loss = module(given).square().mean()
            loss.backward()
            return loss
        calls = []
        optimizer = kind(module.parameters(), lr=0.01)
        optimizer.register_step_post_hook(lambda *_: calls.append(1))
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        for _ in range(3):
            optimizer.zero_grad()
            if name == "LBFGS":
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
            schedule.step()
        assert len(calls) == 3
        again = kind(module.parameters(), lr=0.01)
        again.load_state_dict(optimizer.state_dict())
        if name != "LBFGS":
            extra = nn.Parameter(torch.ones(2, 2))
            again.add_param_group({"params": [extra]})
        for value in module.parameters():
            found.update(name.encode() + value.detach().numpy().tobytes())
        found.update(repr(again.state_dict()["param_groups"]).encode())
    return found.hexdigest()
"""


def test_every_optimizer_of_torch_gives_the_same_bits() -> None:
    program = (
        f"{TRAINING}\nlazy_compiler.install()\nlazy = digest(), lazy_compiler.is_loaded()\n"
        "import torch._dynamo.utils\nprint(*lazy, digest(), lazy_compiler.is_loaded())"
    )
    lazy, was_loaded, plain, is_loaded = python(program).split()
    assert (lazy, was_loaded, is_loaded) == (plain, "False", "True")


# What loads the compiler, each in a fork of a process with the stand-in.
LATER = """
from pytest import raises as pytest_raises

def step():
    p.grad = torch.ones(2)
    torch.compile(lambda: o.step(), backend="eager")()
    assert p[0] < 0

def submodule():
    import torch._dynamo.config as config
    from torch._dynamo import OptimizedModule
    torch._dynamo.config.verbose = True
    assert config.verbose and isinstance(OptimizedModule, type)
    assert torch._dynamo.eval_frame.config is config  # loaded once
    assert config.__spec__.loader is config.__loader__ is not None
    import torch._dynamo.testing as testing  # the package does not load it
    assert testing.CompileCounter().frame_count == 0
    with pytest_raises(ModuleNotFoundError):
        importlib.import_module("torch._dynamo.none_of_these")
    from torch._dynamo.utils import counters
    from torch._dynamo.output_graph import counters as seen
    assert counters is seen

def decorator():
    inner = torch.compiler.disable(lambda x: x + 1)
    outer = torch.compile(lambda x: inner(x) * 2, backend="eager")
    assert outer(torch.ones(2)).tolist() == [4, 4]
    def breaks(x):
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2
    from torch._dynamo.testing import CompileCounter
    counter = CompileCounter()
    torch.compile(breaks, backend=counter)(torch.ones(2))
    assert counter.frame_count == 2

import importlib, os, sys, torch
from sparkhvd import lazy_compiler

lazy_compiler.install()
p = torch.nn.Parameter(torch.zeros(2))
o = torch.optim.SGD([p], lr=0.1)
p.grad = torch.zeros(2)
o.step()
o.zero_grad()
assert not lazy_compiler.is_loaded()
for case in [submodule, decorator] if sys.argv[1:] == ["quick"] else [step]:
    if pid := os.fork():
        assert os.waitpid(pid, 0)[1] == 0, case
        continue
    case()
    assert lazy_compiler.is_loaded() and torch._dynamo is sys.modules["torch._dynamo"]
    assert "lazy_compiler" not in repr(type(torch._dynamo))
    # torch keeps its own function again.
    o.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    kept = vars(torch.optim.Optimizer.add_param_group.__wrapped__)["__dynamo_disable"]
    assert "lazy_compiler" not in kept.__code__.co_filename, kept
    sys.stdout.flush()
    os._exit(0)
"""


def test_torch_is_as_ever_once_something_compiles() -> None:
    python(LATER, "quick")


@soak("a step of an optimizer is compiled after steps with the stand-in")
def test_a_step_is_compiled_after_steps_that_were_not() -> None:
    python(LATER)


def test_a_block_leaves_torch_as_it_was() -> None:
    python(
        "import sys, torch\nfrom sparkhvd import lazy_compiler\n"
        "p = torch.nn.Parameter(torch.zeros(2))\n"
        "with lazy_compiler.installed():\n"
        "    o = torch.optim.SGD([p], lr=0.1); p.grad = torch.ones(2); o.step()\n"
        "assert not lazy_compiler.is_loaded() and 'torch._dynamo' not in sys.modules\n"
        "assert '_dynamo' not in vars(torch)\n"
        "assert not vars(torch.optim.Optimizer.add_param_group.__wrapped__)\n"
        "o.step(); assert lazy_compiler.is_loaded()\n"
        "with lazy_compiler.installed(): assert torch._dynamo.config\n"
        "assert lazy_compiler.is_loaded() and torch._dynamo.config\n"
    )


@soak("test_torch_is_as_ever_once_something_compiles")
def test_an_error_of_the_import_reaches_what_compiles_each_time() -> None:
    python(
        "import sys, torch\nfrom sparkhvd import lazy_compiler\nlazy_compiler.install()\n"
        "sys.modules['sympy'] = None\n"
        "for _ in range(2):\n"
        "    try: torch.compile(lambda x: x)(torch.ones(1))\n"
        "    except ImportError as e: assert 'sympy' in str(e)\n"
        "    else: raise AssertionError\n"
        "p = torch.nn.Parameter(torch.zeros(2)); torch.optim.SGD([p], lr=0.1)\n"
    )
