"""Settings on their way from the driver to a launched rank."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.knobs import variables_of
from sparkhvd.settings import Settings, read_variables

__all__ = ["JobSettings", "RankSettings", "setting_variables"]


@dataclass(frozen=True)
class JobSettings:
    """Settings of a launch, as the driver has decided on them.

    Attributes:
        values: the settings.
        fixed: names of those that were given in code and that no variable of a rank changes.
    """

    values: Settings
    fixed: tuple[str, ...] = ()

    def to_json(self) -> str:
        """Return JSON from which `from_json` rebuilds this on another machine."""
        return json.dumps([self.values.to_json(), self.fixed])

    @classmethod
    def from_json(cls, text: str) -> JobSettings:
        """Rebuild settings from `to_json`."""
        values, fixed = json.loads(text)
        return cls(Settings.from_json(values), tuple(fixed))


class RankSettings:
    """Settings of a launched rank: the job's, changed by variables that its function sets before `init()`.

    Variables that were set when this was made do not count: they are the host's, or the job's settings have them.

    Args:
        job: settings of the job.
        before: variables that were set when the rank began; None for those of now.
    """

    # Settings that have had their effect before the function begins.
    _EARLY = (
        "elastic_patience_s",
        "keep_freed_memory",
        "nursery",
        "port_range",
        "start_timeout_s",
    )

    def __init__(self, job: JobSettings, before: Mapping[str, str] | None = None) -> None:
        self._job = job
        self._before = dict(os.environ if before is None else before)

    def current(self) -> Settings:
        """Return the current settings.

        Raises:
            InvalidArgumentError: the value of a variable is not allowed, or comes too late to have an effect.
        """
        changed = {
            name: text for name, text in os.environ.items() if self._before.get(name) != text
        }
        job = self._job.values
        settings = job.overridden(changed, self._job.fixed)
        for f, name, value in read_variables(changed):
            if f.name in self._EARLY and getattr(settings, f.name) != getattr(job, f.name):
                raise InvalidArgumentError(
                    f"{name}={value!r} was set in a rank, where it comes too late. Give it with env= of the launch, or set it in "
                    "the driver's environment."
                )
        return settings


def setting_variables() -> dict[str, str]:
    """Return the variables of settings that are set in this process."""
    names = {name for f in fields(Settings) for name in variables_of(f)}
    return {name: os.environ[name] for name in names if name in os.environ}
