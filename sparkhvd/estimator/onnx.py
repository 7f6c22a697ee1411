"""Export of a model as a file of ONNX: the trained module, and the columns that `transform` adds."""

from __future__ import annotations

import copy
import importlib.metadata
import importlib.util
import inspect
import tempfile
import warnings
from collections.abc import Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sparkhvd.data.columns import heads
from sparkhvd.data.columns.features import InputBinding
from sparkhvd.data.store.store import Store
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.estimator.params.options import PredictOptions
from sparkhvd.estimator.transform.binding import bind_module
from sparkhvd.estimator.transform.computation import Computation, column_tensor
from sparkhvd.estimator.transform.outputs import named_outputs
from sparkhvd.training.modules.fitted import Fitted
from sparkhvd.training.modules.modes import in_mode
from sparkhvd.training.modules.output_widths import zeros

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["OnnxExport"]

_PACKAGES = ("onnx", "onnxscript")


class OnnxExport:
    """Mixin of `TorchModel`: its export as ONNX."""

    if TYPE_CHECKING:

        def _require_fitted(self) -> Fitted: ...

        def _check_outputs(self, fitted: Fitted) -> None: ...

        _read_options: Any  # of `TorchParams`

    def to_onnx(self, path: str | PathLike[str], *, dataset: DataFrame | None = None) -> None:
        """Write the model to a file of ONNX, over one that is there; weights beyond 1.5 GB go into a second file beside it.

        Inputs are the arguments of the module's `forward`, with any number of rows; outputs are the columns that `transform` adds, in the
        module's dtype, classes as int64. Decoders and `handle_invalid` are no part of it: inputs are what the module gets.

        Args:
            path: file as a path or URL, such as "model.onnx" or "s3://bucket/model.onnx".
            dataset: of a model that no fit has trained: a DataFrame with its columns, which tell the types.

        Raises:
            InvalidArgumentError: onnx or onnxscript is not installed, a column is not a dense tensor, or torch cannot export the module.
        """
        if missing := [name for name in _PACKAGES if importlib.util.find_spec(name) is None]:
            raise InvalidArgumentError(
                f"to_onnx needs the package {missing[0]}. Install it: pip install 'sparkhvd[onnx]'."
            )
        fitted, options = self._require_fitted(), self._read_options(PredictOptions)
        if not fitted.columns:
            if dataset is None:
                raise InvalidArgumentError(
                    "to_onnx: no fit has trained this model, so the types of its columns are not known. Give dataset=, a DataFrame with them."
                )
            fitted, options = bind_module(fitted, options, dataset.schema)
        self._check_outputs(fitted)
        _check_columns(fitted)
        module = in_mode(copy.deepcopy(fitted.module), is_training=False)
        _save(_exported(module, fitted, options), fspath(path))


class _OutputColumns(nn.Module):
    """A module whose outputs are the columns of a transform."""

    def __init__(self, module: nn.Module, spec: Computation) -> None:
        super().__init__()
        self.module = module
        self._spec = spec

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Compute the columns from the arguments of the module, in the order of the binding."""
        named = list(zip(self._spec.inputs.arguments, values, strict=True))
        positional = [value for argument, value in named if argument.name is None]
        keywords = {a.name: value for a, value in named if a.name is not None}
        outputs = heads.outputs_of(self.module(*positional, **keywords))
        columns = []
        for column in self._spec.outputs:
            tensor = column_tensor(self._spec, column, outputs[column.label])
            tensor = tensor.long() if tensor.dtype == torch.bool else tensor
            shape = (tensor.shape[0], -1) if column.is_vector else (-1,)
            columns.append(tensor.reshape(shape))
        return tuple(columns)


def _check_columns(fitted: Fitted) -> None:
    """Refuse columns that are no dense tensors."""
    for column in fitted.columns:
        if column.kind == "sparse" or column.is_collated or column.row_shape is None:
            kind = "sparse" if column.kind == "sparse" else "collated, or its rows have any length"
            raise InvalidArgumentError(
                f"to_onnx: column {column.name!r} is {kind}, and ONNX gets dense tensors. Give getModel() to torch.onnx.export, with arguments "
                "of your own."
            )


def _exported(module: nn.Module, fitted: Fitted, options: PredictOptions) -> Any:
    """Export a module; returns torch's ONNXProgram."""
    if "dynamic_shapes" not in inspect.signature(torch.onnx.export).parameters:
        raise InvalidArgumentError(
            f"to_onnx needs torch 2.6 or newer; this is {torch.__version__}. Upgrade it: pip install 'torch>=2.6'."
        )
    outputs = named_outputs(fitted, options)
    spec = Computation(
        columns=fitted.columns,
        sources=(),
        names=(),
        inputs=fitted.inputs,
        links=fitted.links,
        outputs=outputs,
        output_fn=options.output_fn,
        thresholds=options.thresholds,
    )
    rows = {column.name: zeros(column) for column in fitted.columns}
    examples = tuple(argument.tensor(rows) for argument in fitted.inputs.arguments)
    names = _input_names(module, fitted.inputs)
    batch = torch.export.Dim("batch")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch's own code
            program = torch.onnx.export(
                _OutputColumns(module, spec).eval(),
                examples,
                input_names=names,
                output_names=[output.name for output in outputs],
                dynamic_shapes=(tuple({0: batch} for _ in examples),),
                dynamo=True,
                verbose=False,
            )
    except ImportError as e:
        raise InvalidArgumentError(
            f"to_onnx: torch {torch.__version__} wants another onnxscript than the {importlib.metadata.version('onnxscript')} that is installed ({e}). "
            "Upgrade it: pip install -U onnx onnxscript."
        ) from e
    except Exception as e:
        text = " ".join(str(e).split())
        raise InvalidArgumentError(
            f"to_onnx: torch {torch.__version__} cannot export {type(module).__name__}: {type(e).__name__}: {text:.600}. Write its forward so that "
            "torch.export takes it: no branch on values of tensors, and nothing that holds for one number of rows alone."
        ) from e
    assert program is not None  # with dynamo=True
    for name, argument in zip(names, fitted.inputs.arguments, strict=True):
        program.model.metadata_props[f"columns of {name}"] = ", ".join(argument.columns)
    return program


def _input_names(module: nn.Module, inputs: InputBinding) -> list[str]:
    """Name the inputs after the arguments of `forward`."""
    kinds = inspect.Parameter
    known = [
        name
        for name, each in inspect.signature(module.forward).parameters.items()
        if each.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
    ]
    positional = iter(range(len(inputs.arguments)))
    return [a.name or _nth(known, next(positional)) for a in inputs.arguments]


def _nth(names: Sequence[str], index: int) -> str:
    return names[index] if index < len(names) else f"input_{index}"


def _save(program: Any, path: str) -> None:
    """Write torch's ONNXProgram to a path or URL."""
    if "://" not in path and not path.startswith("dbfs:"):
        program.save(path)
        return
    folder, _, name = path.rpartition("/")
    store = Store.create(folder)
    with tempfile.TemporaryDirectory() as made:
        program.save(f"{made}/{name}")
        # The file that names another one comes last.
        for file in sorted(Path(made).iterdir(), key=lambda file: file.name == name):
            with store.open_output(file.name) as sink, file.open("rb") as source:
                while block := source.read(1 << 24):
                    sink.write(block)
