"""Log to TensorBoard: one event file per fit, for `tensorboard --logdir`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib import util
from typing import Any

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.observe.loggers.base import Fit, Logger, Metric, Sink


class TensorBoardLogger(Logger):
    """TensorBoard logger of each epoch's numbers, in a folder per run below `log_dir`."""

    def __init__(self, log_dir: str | os.PathLike[str] = "runs") -> None:
        """Write below a folder visible to the driver.

        Args:
            log_dir: folder for all fits, in which each fit has a folder with the name of its run.

        Raises:
            InvalidArgumentError: the package tensorboard is missing.
        """
        if util.find_spec("tensorboard") is None:
            raise InvalidArgumentError(
                "TensorBoardLogger needs the package tensorboard. Install it: pip install 'sparkhvd[tensorboard]'."
            )
        self.log_dir = os.fspath(log_dir)

    def __repr__(self) -> str:
        return f"TensorBoardLogger({self.log_dir!r})"

    def begin(self, fit: Fit) -> Sink:
        """Make the sink for the folder of the fit."""
        return _Events(os.path.join(self.log_dir, fit.run_id), fit)


class _Events(Sink):
    """File of the events of one fit."""

    def __init__(self, folder: str, fit: Fit) -> None:
        self.place = f"TensorBoard's folder {folder}"
        self._folder, self._fit = folder, fit
        self._writer: Any = None

    def start(self) -> None:
        """Open the file."""
        from tensorboard.summary import Writer

        self._writer = Writer(self._folder)

    def log(self, metrics: Sequence[Metric]) -> None:
        """Write numbers."""
        for metric in metrics:
            self._writer.add_scalar(
                metric.name, metric.value, step=metric.step, wall_time=metric.time
            )
        self._writer.flush()

    def finish(self, state: str, files: Mapping[str, bytes]) -> None:
        """Close the file."""
        self._writer.close()
