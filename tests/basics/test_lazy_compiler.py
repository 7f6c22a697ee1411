"""torch's compiler is imported only by code that compiles, and torch is unchanged after that."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sparkhvd import lazy_compiler
from tests.harness.paths import ROOT
from tests.harness.soak import SOAK, left_to_soak

pytestmark = pytest.mark.processes

# Runs programs in forks of a process that has imported torch, because each import takes seconds: [status, output] by name.
FORKS = """
import json, os, sys, traceback, torch

found = {}
for name, text in json.load(sys.stdin).items():
    if not (pid := os.fork()):
        status = 1
        try:
            descriptor = os.open(name, os.O_WRONLY | os.O_CREAT)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            exec(compile(text, name, "exec"), {"__name__": "__main__"})
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with open(name) as output:
        found[name] = status, output.read()
print(json.dumps(found))
"""


def run(programs: dict[str, str], folder: Path) -> dict[str, tuple[int, str]]:
    done = subprocess.run(
        [sys.executable, "-c", FORKS],
        input=json.dumps(programs),
        capture_output=True,
        text=True,
        timeout=250,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, tuple[int, str]] = json.loads(done.stdout)
    return found


NO_COMPILER = f"""
from sparkhvd import TorchEstimator
import sparkhvd.estimator.transform.worker, sparkhvd.training.train
import sys, torch, torch.utils.checkpoint, sparkhvd.torch as hvd

hvd.init()
p = torch.nn.Parameter(torch.ones(2))
o = hvd.DistributedOptimizer(torch.optim.Adam([p]))
p.sum().backward()
o.step()
o.zero_grad()
o.load_state_dict(o.state_dict())
torch.utils.checkpoint.checkpoint(lambda x: x * p, torch.ones(2), use_reentrant=False).sum().backward()
torch.distributed.init_process_group('gloo', store=torch.distributed.HashStore(), rank=0, world_size=1)
unwanted = ("sympy", "torch._inductor.config", {lazy_compiler.REAL!r})
print([name for name in unwanted if name in sys.modules])
hvd.shutdown()
assert 'torch._dynamo' not in sys.modules
"""

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


# Code that loads the compiler.
SUBMODULE = """
from pytest import raises as pytest_raises

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
"""
DECORATOR = """
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
"""
STEP = """
def step():
    p.grad = torch.ones(2)
    torch.compile(lambda: o.step(), backend="eager")()
    assert p[0] < 0
"""
BEFORE = """
import importlib, sys, torch
from sparkhvd import lazy_compiler

lazy_compiler.install()
p = torch.nn.Parameter(torch.zeros(2))
o = torch.optim.SGD([p], lr=0.1)
p.grad = torch.zeros(2)
o.step()
o.zero_grad()
assert not lazy_compiler.is_loaded()
"""
AFTER = """
assert lazy_compiler.is_loaded() and torch._dynamo is sys.modules["torch._dynamo"]
assert "lazy_compiler" not in repr(type(torch._dynamo))
# torch keeps its own function again.
o.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
kept = vars(torch.optim.Optimizer.add_param_group.__wrapped__)["__dynamo_disable"]
assert "lazy_compiler" not in kept.__code__.co_filename, kept
"""

# The same bits before and after a submodule loads the compiler.
OPTIMIZERS = (
    f"{TRAINING}{SUBMODULE}{BEFORE}\nlazy = digest(), lazy_compiler.is_loaded()\nsubmodule()\n{AFTER}\n"
    "print(*lazy, digest(), lazy_compiler.is_loaded())"
)

BLOCK = """
import sys, torch
from sparkhvd import lazy_compiler

p = torch.nn.Parameter(torch.zeros(2))
with lazy_compiler.installed():
    o = torch.optim.SGD([p], lr=0.1)
    p.grad = torch.ones(2)
    o.step()
assert not lazy_compiler.is_loaded() and 'torch._dynamo' not in sys.modules
assert '_dynamo' not in vars(torch)
assert not vars(torch.optim.Optimizer.add_param_group.__wrapped__)
o.step()
assert lazy_compiler.is_loaded()
with lazy_compiler.installed():
    assert torch._dynamo.config
assert lazy_compiler.is_loaded() and torch._dynamo.config
"""

ERROR = """
import sys, torch
from sparkhvd import lazy_compiler

lazy_compiler.install()
sys.modules['sympy'] = None
for _ in range(2):
    try:
        torch.compile(lambda x: x)(torch.ones(1))
    except ImportError as e:
        assert 'sympy' in str(e)
    else:
        raise AssertionError
p = torch.nn.Parameter(torch.zeros(2))
torch.optim.SGD([p], lr=0.1)
"""

# One thread imports a library of the compiler while another thread needs the compiler.
THREADS = """
import importlib, os, sys, threading, time, torch
from sparkhvd import lazy_compiler

lazy_compiler.install()
begun = threading.Event()

def first_use():
    begun.wait()
    time.sleep(0.1)
    {use}

def library():
    begun.set()
    importlib.import_module("sympy")

threads = [threading.Thread(target=each, daemon=True) for each in (first_use, library)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join(60)
assert not any(thread.is_alive() for thread in threads)
assert lazy_compiler.is_loaded()
"""

# The stand-in stays until the last of two overlapping blocks ends.
OVERLAP = """
import sys, threading, torch
from sparkhvd import lazy_compiler

inside, left = threading.Event(), threading.Event()

def other():
    with lazy_compiler.installed():
        inside.set()
        left.wait(60)
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
        found.append(lazy_compiler.is_loaded())

found = []
thread = threading.Thread(target=other)
with lazy_compiler.installed():
    thread.start()
    inside.wait(60)
left.set()
thread.join(60)
assert found == [False]
assert 'torch._dynamo' not in sys.modules
"""

PROGRAMS = {
    "no compiler": NO_COMPILER,
    "optimizers": OPTIMIZERS,
    "decorator": f"{DECORATOR}{BEFORE}\ndecorator()\n{AFTER}",
    "block": BLOCK,
    "overlap": OVERLAP,
    "threads": THREADS.format(use="import torch._dynamo.config"),
}
COMPILE = 'torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))'
OF_SOAK = {
    "step": f"{STEP}{BEFORE}\nstep()\n{AFTER}",
    "error": ERROR,
    "threads of torch.compile": THREADS.format(use=COMPILE),
}


Outputs = dict[str, tuple[int, str]]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Outputs:
    return run(PROGRAMS | (OF_SOAK if SOAK else {}), tmp_path_factory.mktemp("programs"))


def test_no_compiler_is_imported_by_what_trains(outputs: Outputs) -> None:
    """The program imports the estimator, the training loop and a worker, and uses an optimizer and a process group."""
    status, output = outputs["no compiler"]
    assert status == 0, output
    assert output.splitlines()[-1] == "[]"


def test_torch_optimizers_give_the_same_bits_without_compiler_import(outputs: Outputs) -> None:
    status, output = outputs["optimizers"]
    assert status == 0, output
    lazy, was_loaded, plain, is_loaded = output.splitlines()[-1].split()
    assert (lazy, was_loaded, is_loaded) == (plain, "False", "True")


@pytest.mark.parametrize(
    "program",
    [
        "decorator",
        "block",
        "overlap",
        "threads",
        *left_to_soak(
            "decorators, an optimizer's step and threads, here",
            "step",
            "error",
            "threads of torch.compile",
        ),
    ],
)
def test_stand_in_and_compiler_replace_each_other(outputs: Outputs, program: str) -> None:
    status, output = outputs[program]
    assert status == 0, output
