"""An unmodified script of `accelerate.test_utils.scripts`, and the recorded outcome of each of its functions.

torchrun ... -m tests.soak.users.accelerate_program BACKEND FOLDER SCRIPT     each rank writes FOLDER/<rank>.json
"""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.nn.parallel import DistributedDataParallel

import sparkhvd.distributed  # noqa: F401 - registers the backend

# A rank whose peer has failed waits for it as long.
TIMEOUT = timedelta(seconds=30)
PASSED = "passed"


class Recorder:
    """Lets the script continue after a failed function, with a new default group, because the ranks may be out of step.

    Attributes:
        outcomes: by function and arguments: `PASSED`, or the end of the traceback.
    """

    def __init__(self, backend: str) -> None:
        self.outcomes: dict[str, str] = {}
        self._backend = backend
        self._rank, self._size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._store = TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,  # torchrun serves it
            timeout=4 * TIMEOUT,
        )
        self._groups = itertools.count()
        self._running = False

    def join(self) -> None:
        """Make the default group, and replace an existing one."""
        if dist.is_initialized():
            dist.destroy_process_group()
        store = PrefixStore(f"group{next(self._groups)}", self._store)
        dist.init_process_group(
            self._backend, store=store, rank=self._rank, world_size=self._size, timeout=TIMEOUT
        )

    def call(self, name: str, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call a function of the script, and record its outcome. Calls inside it belong to it."""
        if self._running:
            return function(*args, **options)
        name, self._running, result = self._label(name, args, options), True, None
        outcome = PASSED
        try:
            result = function(*args, **options)
        except Exception:  # noqa: BLE001 - recorded
            outcome = traceback.format_exc()[-3000:]
        self._running = False
        self.outcomes[name] = outcome
        if not self._all_passed(name, outcome):
            from accelerate.state import GradientState

            self.join()
            # A loop that an error has left stays active, and later calls would fail because of it.
            GradientState().dataloader_references = [None]
        return result

    def _all_passed(self, name: str, outcome: str) -> bool:
        self._store.set(f"{name}/{self._rank}", outcome)
        return all(
            self._store.get(f"{name}/{rank}") == PASSED.encode() for rank in range(self._size)
        )

    def _label(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> str:
        words = [str(each) for each in args if isinstance(each, (bool, int, str, dict, Enum))]
        words += [f"{key}={value}" for key, value in options.items()]
        label = f"{name}({', '.join(words)})"
        numbers = (f"{label} #{number}" for number in itertools.count(2))
        return next(each for each in itertools.chain([label], numbers) if each not in self.outcomes)

    def watch(self, script: ModuleType) -> None:
        """Record the script's tests and checks when its `main` calls them."""
        for name, function in inspect.getmembers(script, inspect.isfunction):
            is_check = name.startswith(("test_", "check_")) or name.endswith("_check")
            if is_check and function.__module__ == script.__name__:
                watched = functools.partial(self.call, name, function)
                setattr(script, name, functools.wraps(function)(watched))


class OnCPU(DistributedDataParallel):
    """DDP for Accelerate and scripts that name GPUs."""

    def __init__(
        self, module: nn.Module, device_ids: Any = None, output_device: Any = None, **options: Any
    ) -> None:
        super().__init__(module, **options)


def beyond_main(script: ModuleType) -> Iterator[Callable[[], Any]]:
    """Yield tests that the script's `main` or Accelerate leaves to GPUs, and that a CPU can run."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    if script.__name__.endswith("test_distributed_data_loop"):
        PartialState().distributed_type = DistributedType.MULTI_GPU  # as which Accelerate joins
        for name in sorted(vars(script)):
            if name.startswith(
                ("test_can_join", "test_join_can", "test_join_raises_warning_for_i")
            ):
                yield getattr(script, name)
    if script.__name__.endswith("test_sync"):
        for flags in itertools.product([True, False], repeat=3):
            yield functools.partial(script.test_gradient_accumulation, *flags)
            if any(flags):  # `main` has the other
                yield functools.partial(
                    script.test_gradient_accumulation_with_opt_and_scheduler, *flags
                )


def main() -> None:
    backend, folder, name = sys.argv[1:]
    torch.set_num_threads(1)
    torch.nn.parallel.DistributedDataParallel = OnCPU  # type: ignore[misc,assignment]
    recorder = Recorder(backend)
    recorder.join()  # on CPUs Accelerate requests Gloo, but uses an existing group
    script = importlib.import_module(f"accelerate.test_utils.scripts.{name}")
    recorder.watch(script)
    try:
        script.main()
        for test in beyond_main(script):
            if not dist.is_initialized():  # the end of `main` destroys it
                recorder.join()
            test()
    finally:
        Path(folder, f"{recorder._rank}.json").write_text(json.dumps(recorder.outcomes))


if __name__ == "__main__":
    main()
