"""Tracebacks of ranks as the driver shows them: the user's frames, and a count of library frames.

A rank reports its exception as text, so everything here works on text, as pure functions.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib.util
import linecache
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sparkhvd import errors

_OWN = os.path.dirname(os.path.abspath(errors.__file__)) + os.sep
_FRAME = re.compile(r'  File "(.+)", line (\d+), in (.+)')
_HEADER = "Traceback (most recent call last):"
_CONNECTORS = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)
# Folders in which Python, pip and Spark install packages; a zip is a file of `--py-files`.
_PACKAGE = re.compile(r"(?:/|\\)(?:site-packages|dist-packages|python|[^/\\]+\.zip)[/\\](\w+)")
_STDLIB = re.compile(r"[/\\]lib(?:64)?[/\\]python3\.\d+[/\\](?!site-packages|dist-packages)")
# The last sentence of the engine's message about a lost rank.
_ADVICE = re.compile(r"( stopped because of another rank: .*\.) [A-Z][^.]*\.$", re.DOTALL)
_OF_SPARK = ("pyspark", "py4j")
# sparkhvd, and packages that it calls. Their frames are not the user's.
_OURS = frozenset(
    (
        "Python",
        "sparkhvd",
        "torch",
        "pyspark",
        "numpy",
        "pyarrow",
        "pandas",
        "fsspec",
        "cloudpickle",
    )
)
# Compiled code names its source: "pyarrow/error.pxi".
_CYTHON = re.compile(r"(\w+)[/\\].*\.(?:px[id]|pyx)")
# Marker of a text that `outcomes` has cut.
_CUT = re.compile(r"\.\.\. \[\d+ characters left out\] \.\.\.")
# Shown user frames of a deep recursion: outermost and innermost.
_OUTERMOST, _INNERMOST = 5, 15
# Limits of an error's text: lines besides frames, least lines of the message, characters of a line.
_LINES, _LEAST, _CHARACTERS = 15, 4, 300


@dataclass(frozen=True)
class Frame:
    """Frame of a traceback.

    Attributes:
        file: its file.
        line: its line number.
        function: its function.
        code: the code of the line; "" where the rank could not read it.
        library: package that it belongs to, "Python" for the standard library; "" for the user's code.
    """

    file: str
    line: int
    function: str
    code: str
    library: str

    @property
    def place(self) -> str:
        """File, line and code, for one line of a message."""
        where = f"{self.file}:{self.line}"
        return f"{where}: {self.code}" if self.code else f"{where}, in {self.function}"

    @property
    def lines(self) -> list[str]:
        """This frame's lines, as in a traceback of Python."""
        first = f'  File "{self.file}", line {self.line}, in {self.function}'
        return [first, f"    {self.code}"] if self.code else [first]


@dataclass(frozen=True)
class Raised:
    """Exception in a traceback.

    Attributes:
        frames: from the outermost to the one that raised.
        text: lines of its type, its message and its notes.
        connector: sentence about its relation to the previous exception; "" for the first.
    """

    frames: tuple[Frame, ...]
    text: tuple[str, ...]
    connector: str = ""

    @property
    def own(self) -> tuple[Frame, ...]:
        """User frames, or third-party frames if there are no user frames."""
        users = tuple(frame for frame in self.frames if not frame.library)
        return users or tuple(frame for frame in self.frames if frame.library not in _OURS)

    @property
    def shown(self) -> tuple[Frame, ...]:
        """Own frames, and the innermost one if it belongs to another library."""
        own, last = self.own, self.frames[-1:]
        if len(own) > _OUTERMOST + _INNERMOST:
            own = own[:_OUTERMOST] + own[-_INNERMOST:]
        is_notified = last and last[0] not in own and last[0].library not in ("sparkhvd", "pyspark")
        return (*own, *last) if is_notified else own

    @property
    def lines(self) -> list[str]:
        """Shown frames, after a count of the hidden ones."""
        hidden = Counter(self.frames) - Counter(self.shown)
        counted = [f"  {_count_frames(hidden.elements())}"] if hidden else []
        return [*counted, *(line for frame in self.shown for line in frame.lines)]


def parse(traceback: str) -> list[Raised]:
    """Parse a traceback's exceptions in raising order. Empty if the text is no plain traceback."""
    found: list[Raised] = []
    frames: list[Frame] = []
    text: list[str] = []
    connector = ""
    is_inside = is_cut = False
    for line in traceback.splitlines():
        if is_cut:  # the start of this line is missing
            is_cut = False
        elif _CUT.fullmatch(line) and len(text) <= 1:  # else the message is cut
            text, is_inside, is_cut = [], True, True  # the end of the previous line is missing
        elif line.strip() in _CONNECTORS:
            found.append(Raised(tuple(frames), _stripped(text), connector))
            frames, text, connector, is_inside = [], [], line.strip(), False
        elif line == _HEADER and not text:
            is_inside = True
        elif is_inside and (match := _FRAME.fullmatch(line)):
            frames.append(_frame(match[1], int(match[2]), match[3]))
        elif is_inside and frames and line.startswith(("    ", "  [Previous line repeated")):
            # Markers below parts of the line, or more lines of the statement, follow.
            if not frames[-1].code and line.startswith("    "):
                frames[-1] = _with_code(frames[-1], line.strip())
        elif frames:
            is_inside = False
            text.append(line)
    if frames:
        found.append(Raised(tuple(frames), _stripped(text), connector))
    return [_complete(raised) for raised in found if raised.frames]


def shows_user(traceback: str) -> bool:
    """Whether a traceback has user or third-party frames."""
    return any(raised.own for raised in parse(traceback))


def _stripped(lines: Sequence[str]) -> tuple[str, ...]:
    return tuple("\n".join(lines).strip().splitlines())


def _frame(file: str, line: int, function: str) -> Frame:
    return Frame(file, line, function, "", _library(file))


def _with_code(frame: Frame, code: str) -> Frame:
    return Frame(frame.file, frame.line, frame.function, code, frame.library)


def _complete(raised: Raised) -> Raised:
    """Add code known only to this process, from notebook cells and interactive Python."""
    frames = [
        _with_code(frame, linecache.getline(frame.file, frame.line).strip())
        if not frame.code and not frame.library and _is_interactive(frame.file)
        else frame
        for frame in raised.frames
    ]
    return Raised(tuple(frames), raised.text, raised.connector)


def _is_interactive(file: str) -> bool:
    return file.startswith("<") or "ipykernel_" in file


def _library(file: str) -> str:
    """Find the package of a file, or "" for the user's code."""
    if file.startswith(_OWN):
        return "sparkhvd"
    if cython := _CYTHON.fullmatch(file):
        return cython[1]
    if file.startswith("<frozen ") or _STDLIB.search(file):
        return "Python"
    for package in reversed(_PACKAGE.findall(file)):
        is_spark = package in _OF_SPARK
        # A folder "python", or a zip, may hold the user's own code.
        if is_spark or package in ("sparkhvd", "torch") or "-packages" in file:
            return "pyspark" if is_spark else str(package)
    return ""


def failure_text(said: Sequence[str], traceback: str, final: str, rest: Sequence[str] = ()) -> str:
    """Compose an error's text, with the user's line and the exception both at its start and at its end.

    Besides frames it has at most 15 lines.

    Args:
        said: lines about which rank failed, and how.
        traceback: the rank's; "" without one.
        final: type and message of the exception.
        rest: lines about other ranks.
    """
    raised = parse(traceback)
    said = [*said, *_notes(raised, final)]
    places = [each.own[-1].place for each in raised if each.own][-1:]
    frames: list[str] = []
    num_others = len(rest) + 2 * len(places)
    last = raised[-2:]
    if any(each.shown for each in last):
        frames = [
            "Traceback on the rank (most recent call last; RankError.traceback has all of it):"
        ]
        for each in last:
            is_second = len(frames) > 1
            connection = [brief("\n".join(last[0].text)), each.connector] if is_second else []
            frames += [*connection, *each.lines]
        num_others += 2 + sum(not line.startswith(("    ", '  File "')) for line in frames)
    # Repeat them at the end: a log or a notebook's output shows its last lines.
    end = [*places, brief(final)] if frames else []
    return "\n".join([*places, *cut(said, max(_LEAST, _LINES - num_others)), *frames, *rest, *end])


def _notes(raised: Sequence[Raised], final: str) -> list[str]:
    """Lines after the exception's message in a traceback."""
    text = "\n".join(raised[-1].text) if raised else ""
    return text.removeprefix(final).strip("\n").splitlines() if text.startswith(final) else []


def brief(text: str) -> str:
    """Shorten a text to its first line, of a few terminal lines at most."""
    line = text.partition("\n")[0]
    return line if len(line) <= _CHARACTERS else f"{line[:_CHARACTERS]} ..."


def also(text: str) -> str:
    """Make a line about another failed rank.

    The engine's advice for programs without a driver is left out.
    """
    return brief("Also: " + _ADVICE.sub(r"\1", text))


def module_hint(error: str, message: str) -> str:
    """Suggest a remedy for a module missing only on the rank, or return "" for any other error."""
    missing = re.fullmatch(r"No module named '(\w+)'", message)
    if error != ModuleNotFoundError.__name__ or missing is None:
        return ""
    with contextlib.suppress(ImportError, ValueError):  # a module may have no spec
        spec = importlib.util.find_spec(missing[1])
        if spec is not None and spec.origin:
            return (
                f". This process has it: {spec.origin}. Install it in the Python of the ranks or, if it is a file of yours, let Spark bring "
                "it: spark.sparkContext.addPyFile(path), with Connect spark.addArtifacts(path, pyfile=True), or spark-submit --py-files."
            )
    return ""


def cut(lines: Sequence[str], most: int) -> list[str]:
    """Shorten to `most` lines. The last line then counts the lines left out."""
    if len(lines) <= most:
        return list(lines)
    return [*lines[: most - 1], f"... {len(lines) - most + 1} more lines"]


def _count_frames(frames: Iterable[Frame]) -> str:
    """Describe hidden frames, at least one: "... 6 frames of sparkhvd and torch"."""
    counts = Counter(frame.library or "your code" for frame in frames)
    *names, last = sorted(counts)
    total = sum(counts.values())
    listed = f"{', '.join(names)} and {last}" if names else last
    return f"... {total} frame{'s' * (total != 1)} of {listed}"


def rebuild(error: str, message: str) -> BaseException | None:
    """Rebuild an exception from its class and text.

    Return None unless the class is Python's or of `sparkhvd.errors`. No other class is looked up and nothing is
    unpickled: the name comes from another process.
    """
    kind: object
    home, _, name = error.rpartition(".")
    if home == errors.__name__:
        kind = getattr(errors, name, None) if name in errors.__all__ else None
    else:
        kind = None if home else getattr(builtins, name, None)
    if not (isinstance(kind, type) and issubclass(kind, BaseException)):
        return None
    given: object = message
    if kind is KeyError:  # its text is the repr of the key
        given = _unquoted(message)
    try:
        return kind(given) if message else kind()
    except Exception:  # noqa: BLE001 - such as UnicodeDecodeError, whose constructor needs more than a text
        return None


def _unquoted(text: str) -> object:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
