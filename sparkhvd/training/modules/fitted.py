"""`Fitted`: a module with the columns that it takes, and the history of its training."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from sparkhvd.data.columns import heads
from sparkhvd.data.columns.features import InputBinding
from sparkhvd.data.columns.schema import Column
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.training.modules.architecture import dump_shell, tensors_of
from sparkhvd.training.modules.copies import light_copy
from sparkhvd.training.modules.weights import CLOSURE_BYTES, Weights, dump
from sparkhvd.training.types import History

__all__ = ["Fitted"]


@dataclass(frozen=True, eq=False)
class Fitted:
    """A trained module with its columns, history and timings; never changed.

    One that no fit has trained has no columns: `transform` binds it to those of its DataFrame.

    Attributes:
        module: the trained module in eval mode.
        columns: feature columns of the training data.
        labels: names of the label columns.
        inputs: binding of columns to arguments of the model.
        links: per label, the relation of outputs and probabilities; one without columns may have one for all.
        widths: per label, elements of the output per row; () if not known.
        history: one record per epoch.
        timings: seconds of the phases of the fit.
        run_id: name of the run in the store.
        loss: of its training, with trained parameters; or a list with one per label; None where it is not known.
        report: document of its report, see `sparkhvd.observe.report`; {} where no fit of this process has made it.
    """

    module: torch.nn.Module = field(repr=False)
    columns: tuple[Column, ...] = ()
    labels: tuple[str, ...] = ()
    inputs: InputBinding = InputBinding(())
    links: tuple[str, ...] = (heads.IDENTITY,)
    widths: tuple[int, ...] = ()
    history: History = field(default_factory=list, repr=False)
    timings: Mapping[str, float] = field(default_factory=dict)
    run_id: str = ""
    loss: Any = field(default=None, repr=False)
    report: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @cached_property
    def for_predict(self) -> torch.nn.Module:
        """Copy of the module over the same parameters: `forward` may keep tensors or change buffers."""
        return light_copy(self.module)

    @cached_property
    def weights(self) -> Weights:
        """The weights, with their bytes if they are small."""
        tensors = tensors_of(self.module)
        if sum(t.nbytes for t in tensors.values()) > CLOSURE_BYTES:
            return Weights(dump(tensors))
        buffer = io.BytesIO()
        return Weights(dump(tensors, buffer), buffer.getvalue())

    @cached_property
    def shell(self) -> bytes:
        """The module without its weights.

        Raises:
            InvalidArgumentError: it cannot be pickled.
        """
        try:
            return dump_shell(self.module, with_hooks=False)
        except Exception as e:
            raise InvalidArgumentError(
                f"model: {type(self.module).__name__} cannot be sent to Spark's workers: pickling failed: {type(e).__name__}: {e}. Give a "
                "module of classes and functions that pickle; for TorchScript the module that it was made from."
            ) from e
