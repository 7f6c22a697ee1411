"""Tracebacks of ranks on the driver."""

from __future__ import annotations

import linecache
import os
import traceback

import pytest

import sparkhvd
from sparkhvd import errors
from sparkhvd.runner import tracebacks
from sparkhvd.runner.outcomes import Outcome, OutcomeKind, error_of

pytestmark = pytest.mark.pure

OWN = os.path.dirname(sparkhvd.__file__)
TORCH = "/env/lib/python3.11/site-packages/torch/nn/modules"

# As Python 3.11 writes it, with marks below parts of lines.
TRACEBACK = f"""\
Traceback (most recent call last):
  File "{OWN}/training/train.py", line 100, in train
    stopped = train_epochs(step)
              ^^^^^^^^^^^^^^^^^^
  File "{OWN}/training/step.py", line 50, in forward
    output = model(x)
             ^^^^^^^^
  File "{TORCH}/module.py", line 1751, in _wrapped_call_impl
    return self._call_impl(*args, **kwargs)
           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  File "{TORCH}/module.py", line 1762, in _call_impl
    return forward_call(*args, **kwargs)
           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  File "/home/me/net.py", line 12, in forward
    return self.head(x)
           ^^^^^^^^^^^^
  File "{TORCH}/module.py", line 1762, in _call_impl
    return forward_call(*args, **kwargs)
  File "{TORCH}/linear.py", line 134, in forward
    return F.linear(input, self.weight, self.bias)
           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
RuntimeError: mat1 and mat2 shapes cannot be multiplied
"""


def failed(trace: str, error: str, message: str, **more: object) -> Outcome:
    return Outcome(
        1,
        OutcomeKind.EXCEPTION,
        host="h1",
        exit="exception",
        error=error,
        message=message,
        traceback=trace,
        **more,  # type: ignore[arg-type]
    )


def test_error_shows_user_frames_and_counts_library_frames() -> None:
    message = "mat1 and mat2 shapes cannot be multiplied"
    error = error_of(failed(TRACEBACK, "RuntimeError", message), 2)
    assert isinstance(error, errors.RankError)
    assert str(error).splitlines() == [
        "/home/me/net.py:12: return self.head(x)",
        f"Rank 1 of 2 on host h1 raised RuntimeError: {message}",
        "Traceback on the rank (most recent call last; RankError.traceback has all of it):",
        "  ... 5 frames of sparkhvd and torch",
        '  File "/home/me/net.py", line 12, in forward',
        "    return self.head(x)",
        f'  File "{TORCH}/linear.py", line 134, in forward',
        "    return F.linear(input, self.weight, self.bias)",
        "/home/me/net.py:12: return self.head(x)",
        f"RuntimeError: {message}",
    ]
    assert error.traceback == TRACEBACK
    assert error.error_type == "RuntimeError"
    assert type(error.__cause__) is RuntimeError
    assert str(error.__cause__) == message


def deep(depth: int) -> None:
    if depth:
        shallow(depth)
    raise ValueError("a\nmessage\n" + "of many lines\n" * 50)


def shallow(depth: int) -> None:
    deep(depth - 1)


def test_error_has_at_most_fifteen_lines_besides_user_frames() -> None:
    try:
        try:
            try:
                deep(40)
            except ValueError as e:
                raise KeyError("second") from e
        except KeyError:
            raise RuntimeError("x" * 1000 + "\nlast\n" * 30)  # noqa: B904 - Python chains it by itself
    except RuntimeError as e:
        e.add_note("a note\n" * 40) if hasattr(e, "add_note") else None
        trace, message = traceback.format_exc(), str(e)
    others = [Outcome(rank, OutcomeKind.CRASH, exit="exit 3") for rank in range(2, 9)]
    text = str(error_of(failed(trace, "RuntimeError", message), 9, others=others))
    lines = text.splitlines()
    frames = [line for line in lines if line.startswith(("    ", '  File "'))]
    assert len(lines) - len(frames) <= 15, text
    assert "Also: 5 more ranks failed." in lines
    assert "During handling of the above exception, another exception occurred:" in lines
    assert lines[0] == lines[-2]
    assert lines[-1].startswith("RuntimeError: xxx")
    first = str(error_of(failed(first_part(trace), "ValueError", "a"), 9))
    frames = [line for line in first.splitlines() if line.startswith('  File "')]
    assert len(frames) == 20
    assert "  ... 62 frames of your code" in first
    assert len(str(error_of(failed("", "ValueError", "line\n" * 99), 2)).splitlines()) == 15


def first_part(trace: str) -> str:
    return trace.partition("\nThe above exception")[0]


def test_error_of_this_package_shows_its_cause_in_user_code() -> None:
    trace = f"""\
Traceback (most recent call last):
  File "{OWN}/training/user_code/callbacks.py", line 9, in call
    function()
  File "/home/me/train.py", line 3, in on_epoch_end
    1 / 0
ZeroDivisionError: division by zero

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "{OWN}/training/user_code/callbacks.py", line 11, in call
    raise InvalidArgumentError(f"{{name}} failed") from e
sparkhvd.errors.InvalidArgumentError: Mine.on_epoch_end failed
"""
    name = "sparkhvd.errors.InvalidArgumentError"
    error = error_of(failed(trace, name, "Mine.on_epoch_end failed"), 2)
    assert str(error).splitlines() == [
        "/home/me/train.py:3: 1 / 0",
        f"Rank 1 of 2 on host h1 raised {name}: Mine.on_epoch_end failed",
        "Traceback on the rank (most recent call last; RankError.traceback has all of it):",
        "  ... 1 frame of sparkhvd",
        '  File "/home/me/train.py", line 3, in on_epoch_end',
        "    1 / 0",
        "ZeroDivisionError: division by zero",
        "The above exception was the direct cause of the following exception:",
        "  ... 1 frame of sparkhvd",
        "/home/me/train.py:3: 1 / 0",
        f"{name}: Mine.on_epoch_end failed",
    ]
    assert type(error.__cause__) is errors.InvalidArgumentError


def test_an_installed_user_package_counts_as_user_code_without_other_code() -> None:
    mine = "/env/lib/python3.11/site-packages/mine/net.py"
    trace = TRACEBACK.replace("/home/me/net.py", mine)
    text = str(error_of(failed(trace, "RuntimeError", "mat1"), 2))
    assert text.startswith(f"{mine}:12: return self.head(x)\n")
    assert "  ... 5 frames of sparkhvd and torch\n" in text


def test_error_of_this_package_without_user_code_shows_only_its_message() -> None:
    trace = f"""\
Traceback (most recent call last):
  File "{OWN}/training/step.py", line 9, in check
    raise_on_all_ranks(text)
sparkhvd.errors.InvalidArgumentError: The shapes differ.
"""
    error = error_of(failed(trace, "sparkhvd.errors.InvalidArgumentError", "The shapes differ."), 2)
    assert str(error) == (
        "Rank 1 of 2 on host h1 raised sparkhvd.errors.InvalidArgumentError: The shapes differ."
    )


def test_exception_notes_follow_the_message() -> None:
    trace = TRACEBACK + "The first batch has 8 rows\nGive label_dtypes\n"
    message = "mat1 and mat2 shapes cannot be multiplied"
    lines = str(error_of(failed(trace, "RuntimeError", message), 2)).splitlines()
    assert lines[2:4] == ["The first batch has 8 rows", "Give label_dtypes"]


def test_notebook_cell_frame_shows_the_source_of_the_driver() -> None:
    name = "/tmp/ipykernel_7/123.py"
    trace = f"""\
Traceback (most recent call last):
  File "{name}", line 2, in fn
ValueError: bad
"""
    error = error_of(failed(trace, "ValueError", "bad"), 2)
    assert str(error).splitlines()[0] == f"{name}:2, in fn"
    source = ["def fn():\n", "    raise ValueError('bad')\n"]
    linecache.cache[name] = (1, None, source, name)
    try:
        error = error_of(failed(trace, "ValueError", "bad"), 2)
    finally:
        del linecache.cache[name]
    assert str(error).splitlines()[0] == f"{name}:2: raise ValueError('bad')"


@pytest.mark.parametrize(
    ("file", "library"),
    [
        ("/home/me/torch/train.py", ""),
        ("/home/me/sparkhvd/train.py", ""),
        ("/env/lib/python3.11/site-packages/numpy/core/x.py", "numpy"),
        ("/usr/lib/python3/dist-packages/sparkhvd/runner/task.py", "sparkhvd"),
        ("/tmp/userFiles-1/deps.zip/sparkhvd/runner/task.py", "sparkhvd"),
        ("/tmp/userFiles-1/mine.zip/project/train.py", ""),
        ("/opt/spark/python/lib/pyspark.zip/pyspark/worker.py", "pyspark"),
        ("/opt/spark/python/pyspark/worker.py", "pyspark"),
        ("/usr/lib/python3.11/json/decoder.py", "Python"),
        ("<frozen importlib._bootstrap>", "Python"),
        ("<stdin>", ""),
        ("pyarrow/error.pxi", "pyarrow"),
        ("pyarrow/_parquet.pyx", "pyarrow"),
        (f"{OWN}/training/train.py", "sparkhvd"),
    ],
)
def test_files_are_attributed_to_packages_or_the_user(file: str, library: str) -> None:
    trace = f'Traceback (most recent call last):\n  File "{file}", line 2, in fn\nValueError: bad\n'
    (raised,) = tracebacks.parse(trace)
    assert raised.frames[0].library == library


def test_shortened_traceback_still_shows_both_ends() -> None:
    half = TRACEBACK.index("_call_impl\n    return forward")
    trace = f"{TRACEBACK[:half]}\n... [70 characters left out] ...\nward_call(*args, **kwargs)\n"
    trace += TRACEBACK[TRACEBACK.index('  File "/home/me') :]
    (raised,) = tracebacks.parse(trace)
    assert raised.own[-1].place == "/home/me/net.py:12: return self.head(x)"
    assert raised.text[0].startswith("RuntimeError: mat1")


def test_text_that_is_no_traceback_is_omitted() -> None:
    assert tracebacks.parse("") == []
    assert tracebacks.parse("  + Exception Group Traceback (most recent call last):\n  | x") == []
    error = error_of(failed("odd", "ValueError", "bad"), 2)
    assert str(error) == "Rank 1 of 2 on host h1 raised ValueError: bad"


@pytest.mark.parametrize(
    "error",
    [
        ValueError("bad"),
        ValueError(),
        KeyError("missing piece"),
        KeyError(3),
        FileNotFoundError("no such file"),
        errors.StoreError("full"),
        errors.InvalidArgumentError("odd"),
    ],
    ids=repr,
)
def test_exceptions_of_python_and_of_this_package_are_rebuilt(error: Exception) -> None:
    kind = type(error)
    home = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    rebuilt = tracebacks.rebuild(home + kind.__name__, str(error))
    assert type(rebuilt) is kind
    assert str(rebuilt) == str(error)


@pytest.mark.parametrize(
    "error",
    [
        "print",
        "int",
        "os.system",
        "torch.OutOfMemoryError",
        "sparkhvd.errors.annotations",
        "UnicodeDecodeError",
        "builtins.ValueError",
        "",
    ],
)
def test_names_other_than_known_exceptions_are_not_rebuilt(error: str) -> None:
    assert tracebacks.rebuild(error, "text") is None
