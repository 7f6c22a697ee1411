"""Trainers of the ranks of one host, without Spark."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from sparkhvd import processors
from sparkhvd.rank_settings import JobSettings
from sparkhvd.rendezvous import Endpoint, Job, Listener
from sparkhvd.runner import launching, preflight
from sparkhvd.runner.frames import Prologue
from sparkhvd.runner.gpu import agreement, decide
from sparkhvd.runner.leftovers import Leftovers
from sparkhvd.runner.trainer import Trainer, inherited

__all__ = ["Trainers", "TrainersPlan"]


@dataclass(frozen=True)
class TrainersPlan:
    """What trainers need besides their rank and program.

    Attributes:
        env: variables of the ranks.
        sys_path: search path of their modules.
        cwd: their working directory.
        settings: of the launch.
        use_gpu: of `run_local`.
        may_fork: whether a nursery of this process may fork them.
        num_threads: of each; None for an equal share of the processors.
    """

    env: Mapping[str, str]
    sys_path: Sequence[str]
    cwd: str
    settings: JobSettings
    use_gpu: bool | None = None
    may_fork: bool = True
    num_threads: int | None = None


class Trainers:
    """Trainers of some ranks; a context manager that leaves none behind.

    Args:
        ranks: their numbers, one after the other.
        address: at which they listen.
        plan: what they need.
        program: pickled call.
        log: called with each line of their output, from threads.
        on_end: called with a rank when its trainer has ended, from threads.

    Raises:
        PreflightError: the processes may have too little address space for torch.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        address: str,
        plan: TrainersPlan,
        program: bytes,
        log: Callable[[str], None],
        on_end: Callable[[int], None],
    ) -> None:
        self._settings = plan.settings
        settings = plan.settings.values
        self.gpu_plan = decide.decide({"spark.master": "local"}, plan.use_gpu)
        hidden = decide.variables(self.gpu_plan.mode, (), None, None)
        self._env = {**hidden, **plan.env}
        modules = launching.preload(program)
        num_bytes = settings.slots * settings.slot_bytes * len(ranks)
        needed = preflight.address_space_needed(modules, num_bytes)
        preflight.check_address_space(preflight.rank_facts((), needed_bytes=needed))
        prologue = Prologue(
            env=self._env,
            sys_path=list(plan.sys_path),
            cwd=plan.cwd,
            num_threads=plan.num_threads or max(1, int(processors.allowed() / len(ranks))),
            keep_freed_memory=settings.keep_freed_memory,
            nursery=plan.may_fork and settings.nursery != "0",
            preload=modules,
            gpu_views=decide.views(self.gpu_plan.mode, None),
            cuda_library=settings.cuda_library,
        )
        self.endpoints: list[Endpoint] = []
        self.all: list[Trainer] = []
        self._gpus: list[agreement.RankGpus] = []
        with contextlib.ExitStack() as stack:
            mark = stack.enter_context(Leftovers()).mark
            for rank in ranks:
                with Listener.bind(address, settings) as listener:
                    self.endpoints.append(listener.endpoint())
                    own = replace(
                        prologue,
                        listener=listener.filenos(),
                        endpoint=listener.endpoint().to_dict(),
                    )
                    ended = functools.partial(on_end, rank)
                    trainer = Trainer(rank, own, program, log, ended, f"{mark}.{rank}")
                    self.all.append(stack.enter_context(trainer))
            self._stack = stack.pop_all()

    def gpus(self, host: str) -> list[agreement.RankGpus]:
        """Return the GPUs that the ranks' processes see; waits for them."""
        visible = self._env.get("CUDA_VISIBLE_DEVICES", inherited("CUDA_VISIBLE_DEVICES"))
        self._gpus = [
            agreement.RankGpus(host, number, *trainer.gpus(), visible)
            for number, trainer in enumerate(self.all)
        ]
        return self._gpus

    def start(self, job: Job, master: tuple[str, int]) -> None:
        """Start the functions, once `gpus` are known and good.

        Args:
            job: of the first of these ranks; the others follow it.
            master: address for torch.distributed.
        """
        for number, trainer in enumerate(self.all):
            gpu = agreement.own_gpu(self.gpu_plan.mode, self._gpus, number, (), None)
            own = replace(job, rank=job.rank + number)
            trainer.send(launching.job_frame(own, self._settings, master, gpu))

    def __enter__(self) -> Trainers:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
