"""skeleton"""
from __future__ import annotations
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from sparkhvd.runner.preflight import SharedFiles
from sparkhvd.runner.results import Outcome
from sparkhvd.settings import Settings

@dataclass(frozen=True)
class LaunchOptions:
    env: Mapping[str, str] = field(default_factory=dict)
    settings: Settings = field(default_factory=Settings)
    start_timeout_s: float | None = None
    max_retries: int = 2
    verbose: int = 1
    threads_per_rank: int | None = None
    shared: SharedFiles | None = None
    run_dir: str | None = None
    progress: Callable[[], object] | None = None
    requirements: tuple[str, ...] = ()
    profile: Any = None

@dataclass(frozen=True)
class JobReport:
    results: list[Any]
    attempts: int
    launch_s: float
    run_s: float
    outcomes: tuple[Outcome, ...]

def launch(spark: Any, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], num_proc: int | None, options: LaunchOptions) -> JobReport:
    raise NotImplementedError
