"""The name `horovod` for sparkhvd's modules: in one process, and in processes that it starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sparkhvd import as_horovod
from tests.harness.paths import ROOT
from tests.harness.soak import left_to_soak

pytestmark = pytest.mark.pure

NAMES = """
import sys
from pathlib import Path

import sparkhvd

# A Horovod that is installed is hidden.
sys.path.insert(0, sys.argv[1])
sparkhvd.install_as_horovod()
sparkhvd.install_as_horovod()
import horovod
import horovod.torch as hvd
import horovod.torch.mpi_ops
import horovod.common.elastic
import sparkhvd.horovod.torch
import sparkhvd.torch.mpi_ops
from horovod.common.util import extension_available, gloo_built, nccl_built
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from horovod.spark.common.backend import Backend, SparkBackend
from horovod.spark.common.store import FilesystemStore, HDFSStore, LocalStore, Store
from horovod.spark.torch import TorchEstimator, TorchModel

assert horovod.__version__ == "0.28.1"
assert hvd is sparkhvd.horovod.torch
assert hvd.__spec__.name == "sparkhvd.horovod.torch"
import horovod.torch.elastic.sampler
import horovod.torch.elastic.state
import sparkhvd.torch.elastic

assert hvd.elastic is sparkhvd.torch.elastic
assert horovod.torch.elastic.state.TorchState is hvd.elastic.TorchState
assert horovod.torch.elastic.sampler.ElasticSampler is hvd.elastic.ElasticSampler
assert horovod.common.elastic.State is hvd.elastic.State
assert HostsUpdatedInterrupt(skip_sync=True).skip_sync
assert horovod.torch.mpi_ops is sparkhvd.torch.mpi_ops
assert issubclass(TorchEstimator, sparkhvd.TorchEstimator)
assert issubclass(TorchModel, sparkhvd.TorchModel)
assert HorovodInternalError is hvd.HorovodInternalError
assert extension_available("torch") and not extension_available("tensorflow")
assert SparkBackend(3).num_processes() == 3
import os

from horovod.common.util import num_rank_is_power_2
from horovod.spark.common import constants, store

assert [ranks for ranks in range(-1, 9) if num_rank_is_power_2(ranks)] == [1, 2, 4, 8]
assert hvd.num_rank_is_power_2 is num_rank_is_power_2
assert hvd.gpu_available("torch") == __import__("torch").cuda.is_available()
hvd.check_extension("horovod.torch", "HOROVOD_WITH_PYTORCH", "", "mpi_lib_v2")
assert {*sparkhvd.torch.__all__} < {*hvd.__all__}
assert constants.TOTAL_BUFFER_MEMORY_CAP_GIB * constants.BYTES_PER_GIB == 4 * 2**30
for absent, word in (
    ("METRIC_PRINT_FREQUENCY", "a callback's on_step_end()"),
    ("MIXED_SPARSE_DENSE_VECTOR", "Leave it out"),
    ("NONSENSE", "cannot import name 'NONSENSE'"),
):
    try:
        exec(f"from horovod.spark.common.constants import {absent}")
    except ImportError as e:
        assert word in str(e), e
    else:
        raise AssertionError(absent)
for version, wanted in ((None, False), ("15.4", True)):
    os.environ.pop("DATABRICKS_RUNTIME_VERSION", None)
    os.environ.update({} if version is None else {"DATABRICKS_RUNTIME_VERSION": version})
    assert store.is_databricks() is wanted
del os.environ["DATABRICKS_RUNTIME_VERSION"]
from pyspark import SparkConf
from horovod.spark import conf
import horovod.spark.common.params
import horovod.spark.lightning.estimator
import horovod.spark.torch.estimator

settings = SparkConf(loadDefaults=False).setAll([conf.SPARK_CONF_ALWAYS_RESTART_FAILED_TASK, conf.SPARK_CONF_BLACKLIST_DISABLED])
assert settings.get("spark.task.maxFailures") == "2147483647"
assert settings.get("spark.excludeOnFailure.enabled") == "false"
assert horovod.spark.lightning.estimator.MIN_PL_VERSION == "1.3.8"
for module in (horovod.spark.torch.estimator, horovod.spark.lightning.estimator):
    assert module.EstimatorParams is horovod.spark.common.params.EstimatorParams
    assert issubclass(module.TorchEstimator, module.EstimatorParams)
try:
    from horovod.spark.conf import SPARK_CONF_NONSENSE
except ImportError as e:
    assert "elastic jobs need no setting of Spark" in str(e), e
else:
    raise AssertionError("SPARK_CONF_NONSENSE")
for missing, word in (
    ("horovod.tensorflow", "Train with PyTorch"),
    ("horovod.tensorflow.keras", "and horovod.keras"),
    ("horovod.spark.tensorflow", "horovod.spark.torch has an estimator"),
    ("horovod.spark.keras.bare", "Train with Keras 3"),
    ("horovod.nonsense", "No module named 'horovod.nonsense'"),
):
    try:
        __import__(missing)
    except ModuleNotFoundError as e:
        assert word in str(e), e
    else:
        raise AssertionError(missing)
import horovod.common.process_sets
import horovod.spark.common.util
import horovod.spark.lightning.util as util
from horovod.data.data_loader_base import AsyncDataLoaderMixin
from horovod.spark.common.serialization import HorovodParamsReader
from horovod.spark.data_loaders import pytorch_data_loaders
from horovod.spark.lightning.datamodule import PetastormDataModule
from horovod.spark.task import get_available_devices
import horovod.runner.common.util.settings
from horovod.runner import gloo_run
from horovod.runner.launch import parse_args, run_commandline
from horovod.runner.elastic.driver import ElasticDriver
from horovod.spark.driver.rsh import rsh
from horovod.spark.keras.remote import RemoteTrainer
from horovod.spark.mpi_run import mpi_run

assert horovod.common.process_sets.ProcessSet is hvd.ProcessSet
assert horovod.torch.mpi_ops.allreduce is hvd.allreduce
assert horovod.torch.mpi_ops.check_extension is hvd.check_extension is horovod.common.util.check_extension
assert not horovod.torch.mpi_ops.gpu_available("tensorflow")
assert horovod.torch.mpi_ops.num_rank_is_power_2(4) and not horovod.torch.mpi_ops.num_rank_is_power_2(6)
assert not hasattr(util, "__all__")
from sparkhvd import rank_context

assert get_available_devices() == []
for gpu, wanted in ((None, []), (1, ["1"])):
    rank_context.install_rank_context(rank_context.RankContext(1, 2, 1, 0, 1, gpu))
    assert get_available_devices() == wanted
rank_context.install_rank_context(None)
assert horovod.runner.run_commandline is run_commandline
assert gloo_run.__name__ == "horovod.runner.gloo_run"
for refused, word in (
    *((each, "Call horovod.run or horovod.spark.run") for each in (gloo_run.gloo_run, parse_args, rsh, mpi_run)),
    (horovod.runner.common.util.settings.Settings, "Call horovod.run or horovod.spark.run"),
    (ElasticDriver, "sparkhvdrun --host-discovery-script"),
    (RemoteTrainer, "it belongs to Horovod's training loop"),
):
    try:
        refused()
    except NotImplementedError as e:
        assert word in str(e), e
    else:
        raise AssertionError(refused)


class Rows(AsyncDataLoaderMixin, pytorch_data_loaders.PytorchDataLoader):
    pass


for make, name, word in (
    (Rows, "horovod.data.data_loader_base.AsyncDataLoaderMixin", "sparkhvd.data has loaders"),
    (PetastormDataModule, "horovod.spark.lightning.datamodule.PetastormDataModule", "batches come from"),
    (HorovodParamsReader, "horovod.spark.common.serialization.HorovodParamsReader", "call save() and"),
    (util.anything, "horovod.spark.lightning.util.anything", "it belongs to Horovod's training loop"),
    (store.host_hash, "horovod.spark.common.util.host_hash", "tell which ranks share a host"),
    (horovod.common.util.get_ext_suffix, "horovod.common.util.get_ext_suffix", "Write your own version"),
    (horovod.spark.common.util.prepare_data, "horovod.spark.common.util.prepare_data", "Use sparkhvd.data.prepare"),
    (horovod.torch.mpi_ops.HorovodAllreduce, "horovod.torch.mpi_ops.HorovodAllreduce", "call allreduce()"),
):
    try:
        make(1, a=2)
    except NotImplementedError as e:
        assert str(e).startswith(f"{name} is not in sparkhvd: ") and word in str(e), e
    else:
        raise AssertionError(name)
from sparkhvd.errors import SparkhvdError
from tools.horovod_names import PAGE, page

text = PAGE.read_text()
assert page(text) == text, "The table of names is old. Regenerate it: python -m tools.horovod_names"


def place(extra):
    import subprocess
    import horovod.torch as hvd

    child = [sys.executable, "-c", "import horovod; print(horovod.__name__)"]
    assert subprocess.check_output(child, text=True) == "sparkhvd.horovod\\n"

    hvd.init()
    return hvd.rank(), hvd.size(), extra, hvd.__name__


if __name__ == "__main__":
    name = "sparkhvd.horovod.torch"
    assert horovod.run(place, args=(5,), np=2) == [(0, 2, 5, name), (1, 2, 5, name)]
    assert horovod.run(place, args=(5,), np=2, min_np=1) == [(0, 2, 5, name), (1, 2, 5, name)]
    for argument in ({"min_np": 1, "hosts": "a:x"}, {"host_discovery_script": "./no.sh"}):
        try:
            horovod.run(place, args=(5,), **argument)
        except SparkhvdError:
            continue
        raise AssertionError(argument)
"""

SCRIPT = """
import os
import sys
import horovod.torch as hvd

hvd.init()
place = [os.environ.get(f"HOROVOD_{name}") for name in ("RANK", "SIZE", "LOCAL_RANK", "CROSS_SIZE")]
ranks = [str(hvd.rank()), str(hvd.size()), str(hvd.local_rank()), "1"]
assert place == (ranks if hvd.size() > 1 else [None] * 4), place
print(__name__, hvd.rank(), hvd.size(), sys.argv[1:], flush=True)
"""


# Imports horovod again in each process that it spawns.
SPAWNS = """
import multiprocessing
import horovod

def version(queue):
    queue.put((multiprocessing.current_process().name, horovod.__version__, horovod.__name__))

if __name__ == "__main__":
    for method in ("spawn", "forkserver"):
        context = multiprocessing.get_context(method)
        queue = context.SimpleQueue()
        process = context.Process(target=version, args=(queue,), name=method)
        process.start()
        process.join()
        print(process.exitcode, *(() if queue.empty() else queue.get()))
"""


def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run(words, env=env, capture_output=True, text=True, timeout=240, check=False)


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """An installed Horovod."""
    package = tmp_path / "installed" / "horovod"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "torch.py").write_text("raise ImportError('the other one')")
    return package.parent


def test_horovod_imports_resolve_to_sparkhvd_modules(tmp_path: Path, other: Path) -> None:
    script = tmp_path / "names.py"
    script.write_text(NAMES)
    done = run(sys.executable, str(script), str(other))
    assert done.returncode == 0, done.stderr


def test_install_as_horovod_raises_after_an_import_of_horovod(other: Path) -> None:
    code = "import horovod, sparkhvd; sparkhvd.install_as_horovod()"
    done = run(sys.executable, "-c", code, PYTHONPATH=f"{ROOT}:{other}")
    assert done.returncode == 1
    assert (
        f"{other}/horovod/__init__.py has been imported as horovod. Call it before" in done.stderr
    )


@pytest.mark.parametrize("how", ["script", *left_to_soak("script, here", "-m", "-c")])
def test_programs_started_by_the_command_can_import_horovod(tmp_path: Path, how: str) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    words = {"script": [str(tmp_path / "train.py")], "-m": ["-m", "train"], "-c": ["-c", SCRIPT]}
    path = f"{ROOT}:{tmp_path}"
    done = run(sys.executable, "-m", "sparkhvd.horovod", *words[how], "a", "-b", PYTHONPATH=path)
    assert done.stdout == "__main__ 0 1 ['a', '-b']\n", done.stderr


def test_multiprocessing_children_can_import_horovod(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SPAWNS)
    done = run(sys.executable, "-m", "sparkhvd.horovod", str(tmp_path / "train.py"))
    wanted = [f"0 {method} 0.28.1 sparkhvd.horovod" for method in ("spawn", "forkserver")]
    assert done.stdout.splitlines() == wanted, done.stderr


@pytest.mark.parametrize(
    "which", ["program of a shell", *left_to_soak("another rank", "itself", "program of it")]
)
def test_environment_variable_provides_horovod_in_ranks_of_sparkhvdrun(
    tmp_path: Path, which: str
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    launcher = [sys.executable, "-m", "sparkhvd.runner.command", "-np", "2"]
    script = str(tmp_path / "train.py")
    started = (
        f"import subprocess; subprocess.run([{sys.executable!r}, {script!r}, 'a'], check=True)"
    )
    command = {
        "itself": [sys.executable, "-u", script, "a"],
        "program of it": [sys.executable, "-c", started],
        "program of a shell": ["sh", "-c", f"HOROVOD_RANK=7 {sys.executable} {script} a | cat"],
    }[which]
    done = run(*launcher, *command, SPARKHVD_AS_HOROVOD="1")
    said = sorted(line.partition("] ")[2] for line in (done.stdout + done.stderr).splitlines())
    assert said == ["__main__ 0 2 ['a']", "__main__ 1 2 ['a']"], done.stderr


def test_child_programs_inherit_the_horovod_name_unless_disabled(other: Path) -> None:
    on = as_horovod.path_variables({as_horovod.VARIABLE: "1", "PYTHONPATH": f"{other}:{ROOT}"})
    assert on["PYTHONPATH"].endswith(f":{other}:{ROOT}")
    assert as_horovod.path_variables({as_horovod.VARIABLE: "1", **on}) == {}  # it is there
    assert as_horovod.path_variables({"PYTHONPATH": str(other)}) == {}
    code = "import horovod; print(horovod.__file__)"
    found = [run(sys.executable, "-c", code, **on, **{as_horovod.VARIABLE: v}) for v in "10"]
    wanted = [ROOT / "sparkhvd" / "horovod", other / "horovod"]
    assert [done.stdout for done in found] == [f"{each}/__init__.py\n" for each in wanted]
    alone = run(sys.executable, "-c", code, PYTHONPATH=on["PYTHONPATH"].partition(":")[0])
    assert "No module named 'horovod'" in alone.stderr


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("python train.py -m 3", "python -m sparkhvd.horovod train.py -m 3"),
        ("/usr/bin/python3.11 -u -X dev -m train", "/usr/bin/python3.11 -u -X dev -m sparkhvd.horovod -m train"),
        ("python -W error -c pass", "python -W error -m sparkhvd.horovod -c pass"),
        ("python --version", "python --version"),
        ("pythonic train.py", "pythonic train.py"),
        ("bash run.sh", "bash run.sh"),
        ("", ""),
    ],
)  # fmt: skip
def test_only_python_commands_get_the_horovod_name(
    words: str, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert as_horovod.command(words.split()) == words.split()
    monkeypatch.setenv(as_horovod.VARIABLE, "1")
    assert as_horovod.command(words.split()) == wanted.split()


def test_command_without_a_program_prints_its_usage() -> None:
    done = run(sys.executable, "-m", "sparkhvd.horovod", "-m")
    assert done.returncode == 1
    assert done.stderr.startswith("usage: python -m sparkhvd.horovod script.py")
