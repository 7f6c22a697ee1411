"""Hosts of an elastic job without Spark: how they are reached, where its processes listen, what agents are asked for."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from sparkhvd.interfaces import LOOPBACK, own_address
from sparkhvd.rank_settings import JobSettings
from sparkhvd.runner.elastic.discovery import Discovered
from sparkhvd.runner.host_names import merged
from sparkhvd.runner.hosts.connection import Reach
from sparkhvd.runner.hosts.launch import bare, loopback_addresses
from sparkhvd.runner.hosts.order import Order

__all__ = ["HostGroup"]


@dataclass(frozen=True)
class HostGroup:
    """What does not change while the job runs.

    Attributes:
        hosts: names of those that were there at the beginning. If all of them are this host, so must those be that come later.
        reach: how other hosts are reached.
        settings: of the launch.
        env: variables of the ranks: all of them on this host alone, else those on top of what a login by ssh gives.
    """

    hosts: tuple[str, ...]
    reach: Reach
    settings: JobSettings
    env: Mapping[str, str] = field(repr=False)

    @property
    def others(self) -> list[str]:
        """The hosts that are not this one."""
        return [host for host in self.hosts if not self.reach.is_here(host)]

    def address(self) -> str:
        """Return the address of this host at which all processes reach it."""
        if not self.others or loopback_addresses(self.hosts, self.reach):
            return LOOPBACK
        return own_address(self.settings.values.interfaces, bare(self.others[0]))

    def order(
        self,
        host: str,
        *,
        command: Sequence[str] | None = None,
        sys_path: Sequence[str] = (),
        use_gpu: bool | None = None,
    ) -> Order:
        """Return what the agent of a host is asked for; see `Order` for the arguments."""
        return Order(
            first=0,
            count=0,
            cwd=os.getcwd(),
            env=dict(self.env),
            settings=self.settings.to_json(),
            address=loopback_addresses(self.hosts, self.reach).get(host, ""),
            towards=bare(self.others[0]),
            command=None if command is None else list(command),
            sys_path=list(sys_path),
            use_gpu=use_gpu,
            is_elastic=True,
        )

    def checked(self, found: Discovered) -> Discovered:
        """Return what was discovered, with names of this host as one, or the problem with it."""
        if found.hosts is not None:
            found = replace(found, hosts=tuple(merged(found.hosts, self.reach.is_here)))
        new = [host.name for host in found.hosts or () if not self.reach.is_here(host.name)]
        if self.others or not new:
            return found
        return Discovered(
            None,
            f"{new[0]} cannot be used: the ranks of this host listen where only this host reaches them. Begin with several hosts.",
        )
