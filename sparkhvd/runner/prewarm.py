"""Prewarming of a launch: tasks of an earlier Spark job start the zygotes for its trainers."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sparkhvd import cpus
from sparkhvd.runner import slots
from sparkhvd.runner.gpu import task
from sparkhvd.runner.protocol import FIT_MODULES, Prologue, own_threads
from sparkhvd.runner.trainer import may_fork, prepare_zygote
from sparkhvd.runner.zygote_client import of_this_process
from sparkhvd.settings import JobSettings, Settings

if TYPE_CHECKING:
    from pyspark import TaskContext


@dataclass(frozen=True)
class Prewarm:
    """Starts the zygotes of a later launch. It is sent to the executors and called in tasks.

    A host's zygote imports while tasks write the data, and the launch finds it ready. If the launch's facts differ
    after all, the launch starts another zygote, and this zygote ends by itself.

    Attributes:
        size: number of ranks.
        settings: `JobSettings.to_json()`.
        env: variables for the ranks.
        fixed_threads: threads per rank; None means the task's cores.
        gpu_mode: source of a rank's GPU, of `decide.GpuMode`.
    """

    size: int
    settings: str
    env: Mapping[str, str] = field(repr=False)
    fixed_threads: int | None
    gpu_mode: str

    def __call__(self, context: TaskContext) -> None:
        """Start this host's zygote if this is one of the first `size` tasks. Return at once."""
        if context.partitionId() < self.size:
            settings = JobSettings.from_json(self.settings)
            prologue = task_prologue(
                context, settings, self.env, self.fixed_threads, self.gpu_mode, FIT_MODULES
            )
            if may_fork(prologue):
                share_zygote()
                prepare_zygote(prologue)


def share_zygote() -> None:
    """Share a zygote with the other Python workers of this executor: their parent process outlives them."""
    of_this_process.share(os.getppid())


# Idle time of a zygote on a cluster: other applications may need its memory.
_IDLE_S = 60.0


def zygote_idle_s(settings: Settings) -> float:
    """Get the lifetime of an idle zygote on an executor, or 0 for no zygote."""
    return 0.0 if settings.nursery == "0" else settings.nursery_idle_s or _IDLE_S


def task_prologue(
    context: TaskContext,
    chosen: JobSettings,
    env: Mapping[str, str],
    fixed_threads: int | None,
    gpu_mode: str,
    preload: tuple[str, ...],
) -> Prologue:
    """Make the prologue, without a listener, for a trainer of this Spark task.

    Args:
        context: of the task.
        chosen: settings of the launch.
        env: variables for the ranks.
        fixed_threads: threads per rank unless `env` has OMP_NUM_THREADS; None means the task's cores.
        gpu_mode: of `decide.GpuMode`.
        preload: modules that the trainer imports early.
    """
    from pyspark import SparkFiles

    return Prologue(
        env={**task.variables(context, gpu_mode), **env},
        sys_path=list(sys.path),
        cwd=os.getcwd(),
        num_threads=own_threads(env)
        or slots.threads_per_rank(context.cpus(), cpus.allowed(), fixed_threads),
        keep_freed_memory=chosen.values.keep_freed_memory,
        lazy_compiler=chosen.values.lazy_compiler,
        zygote_idle_s=zygote_idle_s(chosen.values),
        preload=list(preload),
        gpu_views=task.views(gpu_mode),
        cuda_library=chosen.values.cuda_library,
        spark_files=SparkFiles.getRootDirectory(),
    )
