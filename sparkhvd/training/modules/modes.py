"""Train and eval modes of user modules. The modules may override `train` and `eval`."""

from __future__ import annotations

import inspect
from typing import TypeVar

from torch import nn

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.training.modules.copies import copied

M = TypeVar("M", bound=nn.Module)


def in_mode(module: M, *, is_training: bool) -> M:
    """Put a module into train or eval mode and return the module, even if its own method returns something else."""
    if is_training:
        module.train()
    else:
        module.eval()
    return module


def check_modes(module: nn.Module, param: str) -> None:
    """Check on a copy that `train` and `eval` of a module and its parts set the mode.

    Raises:
        InvalidArgumentError: a method does something else, such as a training loop.
    """
    own = [
        (path, type(part).__qualname__, name)
        for path, part in module.named_modules()
        # Check `eval` of the whole module only, because torch calls only `train` of the parts.
        for name in ("train", "eval")[: 1 if path else 2]
        if _has_own(part, name)
    ]
    if not own:
        return
    trial = copied(module)  # a copy with its own memory, because the method may be a training loop
    for path, kind, name in own:
        part = trial.get_submodule(path)
        if problem := _problem(part, name):
            where = f" (its part {path!r})" if path else ""
            raise InvalidArgumentError(
                f"{param}{where}: {kind}.{name} does not do what {name} of torch.nn.Module does: {problem}. The training calls it "
                "to switch between training and evaluation. Give your method another name."
            )


def _has_own(part: nn.Module, name: str) -> bool:
    return name in vars(part) or not (getattr(type(part), name).__module__ or "").startswith(
        "torch."
    )


def _problem(part: nn.Module, name: str) -> str:
    """Describe what the named method does instead of setting the mode, or return ""."""
    method = getattr(part, name)
    taken = [(True,), ()] if name == "train" else [()]
    try:
        for arguments in taken:
            inspect.signature(method).bind(*arguments)
    except TypeError as e:
        wanted = "train(mode=True)" if name == "train" else "eval() without arguments"
        return f"it cannot be called as {wanted} ({e})"
    # Set training mode directly, to see whether the method changes it.
    for each in part.modules():
        each.training = True
    try:
        method(False) if name == "train" else method()
    except Exception as e:  # noqa: BLE001 - the user's own code
        return f"called for eval mode, it raised {type(e).__name__}: {e}"
    return "called for eval mode, it leaves `training` True" if part.training else ""
