"""Write docs/errors.md: every message of the package's own exceptions.

    .venv/bin/python -m tools.errors

The page follows from the sources alone; `tests/test_architecture.py` compares it with them.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from sparkhvd import errors

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "docs" / "errors.md"

_INTRODUCTION = """# Errors

<!-- Written by `python -m tools.errors`; do not edit. -->

Messages by exception and by the package that raises it. `<...>` is a value, `[...]` is optional text. Search for the words between the values.
The meaning of an exception for a caller is below its name. With a `TypeError` that starts with `Invalid param value given for param`, Spark ML
rejects a value of another type. It ends with the expected type. Messages of the compiled engine, raised as `MismatchError`, `CollectiveError` and
others, are not listed, and neither are texts that forward another error unchanged.
"""

# Functions whose argument is more informative than their name.
_TRANSPARENT = {"str", "repr", "sorted", "list", "tuple", "set", "int", "shown", "hide", "join"}


def page() -> str:
    """Generate the page from the current sources."""
    messages: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for path in sorted((ROOT / "sparkhvd").rglob("*.py")):
        package = ".".join(path.parent.relative_to(ROOT).parts)
        for name, text in _messages(ast.parse(path.read_text(), str(path))):
            messages[name][package].add(text)
    parts = [_INTRODUCTION]
    for cls in _classes():
        bases = ", ".join(f"`{base.__name__}`" for base in cls.__bases__)
        parts.append(f"\n## {cls.__name__}\n\n{inspect.getdoc(cls)}\n\nA subclass of {bases}.\n")
        for package, texts in sorted(messages[cls.__name__].items()):
            parts.append(f"\n### {cls.__name__} in `{package}`\n\n")
            parts += [f"- {_code(text)}\n" for text in sorted(texts, key=_order)]
    return "".join(parts)


def _classes() -> list[type[Exception]]:
    """List the exceptions of `sparkhvd.errors` in source order."""
    tree = ast.parse(Path(errors.__file__).read_text())
    return [getattr(errors, node.name) for node in tree.body if isinstance(node, ast.ClassDef)]


def _messages(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the class and message template of each exception created in the module."""
    names = {cls.__name__ for cls in _classes()}
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    # The innermost function of a call comes last, and its assignments count.
    scopes: dict[ast.Call, ast.AST] = {}
    for scope in [tree, *functions]:
        for node in ast.walk(scope):
            if isinstance(node, ast.Call) and node.args and _name(node.func) in names:
                scopes[node] = scope
    for call, scope in scopes.items():
        for text in _templates(call.args[0], scope):
            if re.search(r"\w", re.sub(r"<[^<>]*>", "", text)):
                yield _name(call.func), text


def _templates(message: ast.expr, scope: ast.AST) -> list[str]:
    """List the possible texts of a message, with each assignment if the message is a name."""
    if isinstance(message, ast.IfExp):
        return [*_templates(message.body, scope), *_templates(message.orelse, scope)]
    if isinstance(message, ast.Name):
        values = [
            node.value
            for node in ast.walk(scope)
            if isinstance(node, ast.Assign)
            and [_name(target) for target in node.targets] == [message.id]
        ]
        return [text for value in values for text in _templates(value, scope)]
    return [" ".join(_text(message).split())]


def _text(node: ast.expr) -> str:
    """Convert an expression to text with placeholders."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(value) for value in node.values)
    if isinstance(node, ast.FormattedValue):
        return _text(node.value)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    if isinstance(node, ast.BinOp) and isinstance(node.left, ast.Constant):
        return f"[{node.left.value!s}]"  # a plural's "s", times whether it is one
    if isinstance(node, ast.IfExp):
        texts = [text for text in (_text(node.body), _text(node.orelse)) if text.strip()]
        return f"[{' | '.join(texts)}]"
    return f"<{_placeholder(node)}>"


def _placeholder(node: ast.expr) -> str:
    """Derive a placeholder's name from an expression."""
    match node:
        case ast.Attribute(value, "__name__" | "__qualname__" | "name"):
            return _placeholder(value)
        case ast.Attribute(_, name) | ast.Name(name):
            return name.strip("_")
        case ast.Call(func, [argument, *_]) if _name(func) in _TRANSPARENT:
            return _placeholder(argument)
        case ast.Call(ast.Name("type"), [argument]):
            return f"type of {_placeholder(argument)}"
        case ast.Call(ast.Name("len"), [argument]):
            return f"number of {_placeholder(argument)}"
        case ast.Call(ast.Name("map"), [_, argument]):
            return _placeholder(argument)
        case ast.Call(func):
            return _name(func).strip("_") or "value"
        case ast.GeneratorExp(_, [generator, *_]) | ast.ListComp(_, [generator, *_]):
            return _placeholder(generator.iter)
        case ast.Subscript(value) | ast.Starred(value):
            return _placeholder(value)
        case ast.BoolOp(_, [first, *_]):
            return _placeholder(first)
        case _:
            return re.sub(r"[<>`]", "", ast.unparse(node))


def _name(node: ast.expr) -> str:
    """Get the last name `c` of `a.b.c`, or "" if the expression has no name."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _order(text: str) -> tuple[str, str]:
    """Make a sort key from the words of a text, without punctuation around placeholders."""
    return re.sub(r"[^a-z ]", "", text.lower()), text


def _code(text: str) -> str:
    """Format a text as Markdown code, so that `<...>` appears unchanged."""
    return f"`` {text} ``" if "`" in text else f"`{text}`"


if __name__ == "__main__":
    FILE.write_text(page())
