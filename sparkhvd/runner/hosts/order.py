"""What the launcher asks of an agent, before all ranks are known."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Order"]


@dataclass(frozen=True)
class Order:
    """Ranks of a host. The job, with its key, comes later.

    Attributes:
        first: first rank of the host.
        count: number of its ranks.
        cwd: working directory.
        env: variables of the ranks, on top of those that the agent has.
        settings: `JobSettings.to_json()`.
        address: of this host for the others, where it is known: a loopback's, if all hosts are this machine; "" else.
        towards: name of another host.
        command: of a script; None for a function, whose pickled call goes with the order.
        sys_path: of the launcher, for a function.
        use_gpu: of `run_hosts`.
        is_elastic: whether processes are started one by one, when the launcher says so.
    """

    first: int
    count: int
    cwd: str
    env: dict[str, str] = field(repr=False)
    settings: str = field(repr=False)
    address: str
    towards: str
    command: list[str] | None = None
    sys_path: list[str] = field(default_factory=list)
    use_gpu: bool | None = None
    is_elastic: bool = False
