"""Values of Params as explanations show them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["short_repr"]


def short_repr(value: object, limit: int = 80) -> str:
    """Show a value on one short line: a module by class and size, an optimizer by class, a function by name."""
    if isinstance(value, type):
        return f"<{value.__module__}.{value.__qualname__}>"
    if hasattr(value, "parameters") and hasattr(value, "state_dict"):
        # A lazy module's parameters have no size yet.
        count = sum(0 if hasattr(p, "materialize") else p.numel() for p in value.parameters())
        return f"<{type(value).__name__}: {count:,} parameters>"
    if hasattr(value, "param_groups"):
        groups = len(value.param_groups)
        return f"<{type(value).__name__}: {groups} parameter group{'s' * (groups != 1)}>"
    if callable(value) and hasattr(value, "__qualname__"):
        return f"<{value.__module__}.{value.__qualname__}>"
    end = "..."
    if isinstance(value, Mapping):
        text = "{" + ", ".join(f"{k!r}: {short_repr(v, limit)}" for k, v in value.items()) + "}"
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        text = "[" + ", ".join(short_repr(v, limit) for v in value) + "]"
        end = f"... ({len(value)} in all)"
    else:
        text = " ".join(repr(value).split())
    return text if len(text) <= limit else text[: limit - len(end)] + end
