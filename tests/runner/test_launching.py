"""Parts that all launches share: pickling a call, variables, addresses."""

from __future__ import annotations

import collections
import functools
import importlib.machinery
import pickle
import socket
import sys
import threading
import types
from dataclasses import replace
from typing import Any

import pytest
from pyspark import cloudpickle

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.rendezvous import Endpoint, Job
from sparkhvd.runner import context
from sparkhvd.runner.gpu.agreement import OwnGpu
from sparkhvd.runner.launching import (
    check_env,
    dump_call,
    job_frame,
    own_address,
    preload,
    reserved_port,
    thread_variables,
)
from sparkhvd.runner.protocol import THREAD_VARIABLES, failing_path, own_threads, unpicklable
from sparkhvd.runner.task import TaskSpec, host_of
from sparkhvd.settings import Settings

pytestmark = pytest.mark.pure


def test_closure_is_pickled_by_value() -> None:
    offset = 5
    program = dump_call(lambda x, y=0: x + y + offset, (1,), {"y": 2})
    _, fn, args, kwargs, _ = pickle.loads(program)
    assert fn(*args, **kwargs) == 8


def test_ranks_import_the_backend_of_the_caller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "sparkhvd.distributed"  # a notebook may import in a cell what no function names
    monkeypatch.delitem(sys.modules, name, raising=False)
    assert name not in preload(dump_call(len, ((),), {}))
    backend = types.ModuleType(name)
    backend.__spec__ = importlib.machinery.ModuleSpec(name, None)
    monkeypatch.setitem(sys.modules, name, backend)
    program = dump_call(len, ((),), {})
    assert name in preload(program)
    assert pickle.loads(program)[-1] is backend


@pytest.mark.parametrize(
    ("fn", "args", "kwargs", "says"),
    [
        (
            3,
            (),
            {},
            r"fn is 3; it must be a function to call on every rank. Give .* run\(train\), not run\(train\(\)\)\.",
        ),
        (len, "abc", {}, "args is 'abc'; it must be a tuple of positional arguments"),
        (len, 5, {}, "args is 5; it must be a tuple"),
        (len, (), 5, "kwargs is 5; it must be a mapping"),
        (len, (1, threading.Lock()), {}, r"args\[1\], a _thread.lock, cannot be pickled"),
        (len, (), {"a": threading.Lock()}, r"kwargs\['a'\], a _thread.lock, cannot be pickled"),
    ],
)
def test_error_names_the_part_of_a_call_that_cannot_be_sent(
    fn: Any, args: Any, kwargs: Any, says: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=says):
        dump_call(fn, args, kwargs)


def test_error_names_a_function_that_holds_a_lock() -> None:
    lock = threading.Lock()

    def trains() -> None:
        lock.acquire()

    with pytest.raises(InvalidArgumentError, match=r"fn=.*trains cannot be pickled.*inside fn"):
        dump_call(trains, (), {})


class Holder:
    """Holds values in attributes and slots."""

    __slots__ = ("__dict__", "first")

    def __init__(self, **values: Any) -> None:
        self.first = 1
        vars(self).update(values)

    def work(self) -> None: ...


def locked(inner: Any) -> Any:
    def works(a: int = 0, *, key: Any = inner) -> Any:
        return key

    return works


def named_lock() -> Any:
    return GLOBAL_LOCK


GLOBAL_LOCK = threading.Lock()
LOCK = threading.Lock()


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (LOCK, ""),
        (Holder(encoder=Holder(lock=LOCK)), ".encoder.lock"),
        ([1, {"a": (2, LOCK)}], "[1]['a'][1]"),
        (locked(Holder(lock=LOCK)), ": variable 'key'.lock"),
        (locked(LOCK), ": variable 'key'"),
        ((lambda: LOCK)(), ""),
        (functools.partial(print, 1, file=LOCK), ".keywords['file']"),
        (Holder(lock=LOCK).work, ".lock"),
        (collections.defaultdict(lambda: LOCK, {"a": LOCK}), "['a']"),
        (Holder(fine=3), ""),
    ],
)
def test_error_shows_the_path_to_an_unpicklable_value(value: Any, path: str) -> None:
    assert failing_path(value, unpicklable) == path


def test_error_names_unpicklable_variables_of_functions_pickled_by_value() -> None:
    lock = threading.Lock()

    class Own:
        shared = lock

    def train() -> Any:
        return Own, named_lock

    assert failing_path(train, unpicklable) == ": variable 'Own'.shared"
    home = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(home)
    try:
        assert failing_path(named_lock, unpicklable) == ": variable 'GLOBAL_LOCK'"
    finally:
        cloudpickle.unregister_pickle_by_value(home)
    with pytest.raises(
        InvalidArgumentError, match=r"lock' object, at fn: variable 'Own'\.shared\)\. It"
    ):
        dump_call(train, (), {})
    with pytest.raises(InvalidArgumentError, match=r"lock' object, at args\[0\]\[1\]\)\. Create"):
        dump_call(len, ([1, lock],), {})


@pytest.mark.parametrize(
    ("conf", "environ", "found", "threads"),
    [
        ({}, {}, {}, None),
        ({}, {"OMP_NUM_THREADS": "4"}, {"OMP_NUM_THREADS": "4"}, 4),
        (
            {"spark.executorEnv.OMP_NUM_THREADS": "2"},
            {"OMP_NUM_THREADS": "4"},
            {"OMP_NUM_THREADS": "2"},
            2,
        ),
        ({"spark.executorEnv.MKL_NUM_THREADS": "2"}, {}, {"MKL_NUM_THREADS": "2"}, None),
        # Set by spark-submit, not by the user.
        ({"spark.driver.cores": "4"}, {"OMP_NUM_THREADS": "4"}, {}, None),
        ({"spark.driver.cores": "4"}, {"OMP_NUM_THREADS": "8"}, {"OMP_NUM_THREADS": "8"}, 8),
        ({}, {"OMP_NUM_THREADS": "3,2"}, {"OMP_NUM_THREADS": "3,2"}, 3),
        ({}, {"OMP_NUM_THREADS": "all"}, {"OMP_NUM_THREADS": "all"}, None),
        ({}, {"OMP_NUM_THREADS": "0"}, {"OMP_NUM_THREADS": "0"}, None),
    ],
)
def test_thread_variables_set_by_the_user_are_found(
    monkeypatch: pytest.MonkeyPatch,
    conf: dict[str, str],
    environ: dict[str, str],
    found: dict[str, str],
    threads: int | None,
) -> None:
    for name in THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert thread_variables(conf) == found
    assert own_threads(found) == threads


def test_env_values_other_than_text_raise() -> None:
    assert check_env({"A": "1"}) == {"A": "1"}
    with pytest.raises(InvalidArgumentError, match=r"env\['A'\] is 1; names and values"):
        check_env({"A": 1})  # type: ignore[dict-item]


def test_torch_is_preloaded_only_if_the_program_uses_it() -> None:
    def imports_it() -> None:
        import sparkhvd.torch as hvd

        hvd.init()

    def does_not() -> str:
        return "a torch in the dark"

    def by_torch() -> None:
        import torch

        torch.optim.SGD([torch.zeros(1)])

    def by_hvd(optimizer: Any) -> None:
        import sparkhvd.torch as hvd

        hvd.DistributedOptimizer(optimizer)

    assert "sparkhvd.torch" in preload(dump_call(imports_it, (), {}))
    assert "torch" in preload(dump_call(imports_it, ("torch",), {}))
    assert "torch" not in preload(dump_call(does_not, (), {}))
    assert "torch" in preload(dump_call(does_not, (), {}), ("torch",))
    for trains in (by_torch, by_hvd):
        assert {"torch", "sparkhvd.torch"} & {*preload(dump_call(trains, (), {}))}


def test_imports_of_a_user_module_are_preloaded_with_its_functions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = types.ModuleType("of_the_user")
    source = """
def plain(): pass
def inside():
    import torch
    return lambda: torch.optim.SGD([torch.zeros(1)])
class Model:
    def fit(self): import sparkhvd.torch
"""
    exec(source, vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert "torch" not in preload(dump_call(module.plain, (), {}))  # pickled by reference
    for fn in (module.inside, functools.partial(module.inside)):
        assert "torch" in preload(dump_call(fn, (), {}))
    assert "sparkhvd.torch" in preload(dump_call(module.Model().fit, (), {}))
    monkeypatch.setattr(module, "torch", types.ModuleType("torch"), raising=False)
    assert "torch" in preload(dump_call(module.plain, (), {}))  # with its module comes torch


def test_job_frame_contains_standard_variables_and_hides_the_key() -> None:
    endpoints = tuple(Endpoint("127.0.0.1", 1000 + r, f"host-{r % 2}", "") for r in range(4))
    job = Job(key=b"k" * 32, job_id="j", attempt=1, rank=3, size=4, endpoints=endpoints)
    frame = job_frame(job, Settings(), ("10.0.0.1", 2345), OwnGpu(1, "4,7"))
    assert frame.env == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "2345",
        "HOROVOD_HOSTNAME": socket.gethostname(),
        **{"HOROVOD_RANK": "3", "HOROVOD_SIZE": "4"},
        **{"HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "2"},
        **{"HOROVOD_CROSS_RANK": "1", "HOROVOD_CROSS_SIZE": "2"},
        "CUDA_VISIBLE_DEVICES": "4,7",
    }
    assert frame.gpu == 1
    assert "CUDA_VISIBLE_DEVICES" not in job_frame(job, Settings(), ("::1", 1), OwnGpu(0)).env
    assert (b"k" * 32).hex() not in repr(frame)


def test_task_spec_survives_json_and_hides_the_key() -> None:
    spec = TaskSpec(2, 0, "j", "ab" * 32, "{}", {"A": "1"}, {}, ("torch",), (), None, "runs/x")
    for one in (spec, replace(spec, driver_at=("host", 1))):
        assert TaskSpec.from_json(one.to_json()) == one
    assert "ab" * 32 not in repr(spec)


def test_reserved_port_can_be_used_by_one_more_listener() -> None:
    with reserved_port("127.0.0.1") as port, socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("0.0.0.0", port))
        server.listen()
        assert server.getsockname() == ("0.0.0.0", port)


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("127.0.0.1:4040", "127.0.0.1"),
        ("node-1:4040", "node-1"),
        ("[::1]:4040", "::1"),
        ("::1:4040", "::1"),
        ("node-1", "node-1"),
    ],
)
def test_host_is_parsed_from_a_spark_address(address: str, host: str) -> None:
    assert host_of(address) == host


@pytest.mark.parametrize(
    ("host", "hosts", "address"),
    [
        ("127.0.0.1", ["127.0.0.1"] * 2, "127.0.0.1"),
        ("localhost", ["localhost"] * 2, "127.0.0.1"),
        ("::1", ["::1"], "::1"),
        ("127.0.1.1", ["127.0.1.1", "127.0.0.1"], "127.0.0.1"),  # by the route to the other host
    ],
)
def test_own_address_is_numeric_and_reachable(host: str, hosts: list[str], address: str) -> None:
    assert own_address(host, hosts) == address


def test_error_names_an_unresolvable_host_name() -> None:
    with pytest.raises(
        OSError, match=r"Spark calls this host 'no\.such\.invalid', and that name has"
    ):
        own_address("no.such.invalid", ["no.such.invalid"])
    assert own_address("no.such.invalid", ["no.such.invalid"], is_local=True) == "127.0.0.1"


def test_rank_context_is_none_outside_a_rank() -> None:
    assert context() is None
