"""Tracebacks of ranks as the driver shows them: the user's frames, and those of libraries as a count.

A rank reports its exception as text, so all of this works on text. Everything here is pure.
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
# Folders in which Python, pip and Spark put packages; a zip is a file of `--py-files`.
_PACKAGE = re.compile(r"(?:/|\\)(?:site-packages|dist-packages|python|[^/\\]+\.zip)[/\\](\w+)")
_STDLIB = re.compile(r"[/\\]lib(?:64)?[/\\]python3\.\d+[/\\](?!site-packages|dist-packages)")
# The last sentence of what the engine says of a lost rank.
_ADVICE = re.compile(r"( stopped because of another rank: .*\.) [A-Z][^.]*\.$", re.DOTALL)
_OF_SPARK = ("pyspark", "py4j")
# Packages that this one calls by itself.
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
# As `outcomes` cuts long texts.
_CUT = re.compile(r"\.\.\. \[\d+ characters left out\] \.\.\.")
# Frames of the user's code that are shown of a deep recursion: the outermost, and the innermost.
_OUTERMOST, _INNERMOST = 5, 15
# Lines of an error's text besides frames; those that the message may have in any case; characters of a line that is cut.
_LINES, _LEAST, _CHARACTERS = 15, 4, 300


@dataclass(frozen=True)
class Frame:
    """Frame of a traceback.

    Attributes:
        file: its file.
        line: its line in there.
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
        """The frame as Python writes it."""
        first = f'  File "{self.file}", line {self.line}, in {self.function}'
        return [first, f"    {self.code}"] if self.code else [first]


@dataclass(frozen=True)
class Raised:
    """Exception in a traceback.

    Attributes:
        frames: from the outermost to the one that raised.
        text: lines of its type, its message and its notes.
        connector: sentence about its relation to the exception before; "" for the first.
    """

    frames: tuple[Frame, ...]
    text: tuple[str, ...]
    connector: str = ""

    @property
    def own(self) -> tuple[Frame, ...]:
        """Frames of the user's code; without any those of packages that the user chose, one of which may be the user's."""
        users = tuple(frame for frame in self.frames if not frame.library)
        return users or tuple(frame for frame in self.frames if frame.library not in _OURS)

    @property
    def shown(self) -> tuple[Frame, ...]:
        """Frames that tell the user something: the own ones, and the innermost if it is of another library."""
        own, last = self.own, self.frames[-1:]
        if len(own) > _OUTERMOST + _INNERMOST:
            own = own[:_OUTERMOST] + own[-_INNERMOST:]
        is_notified = last and last[0] not in own and last[0].library not in ("sparkhvd", "pyspark")
        return (*own, *last) if is_notified else own

    @property
    def lines(self) -> list[str]:
        """The frames: the number of those that are left out, then the others."""
        hidden = Counter(self.frames) - Counter(self.shown)
        counted = [f"  {_count_frames(hidden.elements())}"] if hidden else []
        return [*counted, *(line for frame in self.shown for line in frame.lines)]


def parse(traceback: str) -> list[Raised]:
    """Return the exceptions of a traceback, in the order of their raising; none if the text is no plain traceback."""
    found: list[Raised] = []
    frames: list[Frame] = []
    text: list[str] = []
    connector = ""
    is_inside = is_cut = False
    for line in traceback.splitlines():
        if is_cut:  # this line has lost its beginning
            is_cut = False
        elif _CUT.fullmatch(line) and len(text) <= 1:  # else the message is cut
            text, is_inside, is_cut = [], True, True  # the line before it has lost its end
        elif line.strip() in _CONNECTORS:
            found.append(Raised(tuple(frames), _stripped(text), connector))
            frames, text, connector, is_inside = [], [], line.strip(), False
        elif line == _HEADER and not text:
            is_inside = True
        elif is_inside and (match := _FRAME.fullmatch(line)):
            frames.append(_frame(match[1], int(match[2]), match[3]))
        elif is_inside and frames and line.startswith(("    ", "  [Previous line repeated")):
            # Then come marks below parts of the line, or more lines of the statement.
            if not frames[-1].code and line.startswith("    "):
                frames[-1] = _with_code(frames[-1], line.strip())
        elif frames:
            is_inside = False
            text.append(line)
    if frames:
        found.append(Raised(tuple(frames), _stripped(text), connector))
    return [_complete(raised) for raised in found if raised.frames]


def shows_user(traceback: str) -> bool:
    """Return True if a traceback has frames of the user's code, or of packages that the user chose."""
    return any(raised.own for raised in parse(traceback))


def _stripped(lines: Sequence[str]) -> tuple[str, ...]:
    return tuple("\n".join(lines).strip().splitlines())


def _frame(file: str, line: int, function: str) -> Frame:
    return Frame(file, line, function, "", _library(file))


def _with_code(frame: Frame, code: str) -> Frame:
    return Frame(frame.file, frame.line, frame.function, code, frame.library)


def _complete(raised: Raised) -> Raised:
    """Add code that only this process has: of cells of a notebook, and of an interactive Python."""
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
    """Return the package that a file belongs to; "" for the user's code."""
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
    """Return the text of an error: the user's own line and the exception first and last, its frames between them.

    Besides frames it has at most 15 lines.

    Args:
        said: lines that say which rank failed, and how.
        traceback: the rank's; "" if there is none.
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
    # The last lines are the ones that are seen in a log, and at the end of a notebook's output.
    end = [*places, brief(final)] if frames else []
    return "\n".join([*places, *cut(said, max(_LEAST, _LINES - num_others)), *frames, *rest, *end])


def _notes(raised: Sequence[Raised], final: str) -> list[str]:
    """Return the lines that a traceback has after the exception's message."""
    text = "\n".join(raised[-1].text) if raised else ""
    return text.removeprefix(final).strip("\n").splitlines() if text.startswith(final) else []


def brief(text: str) -> str:
    """Return the first line of a text, cut to a few lines of a terminal."""
    line = text.partition("\n")[0]
    return line if len(line) <= _CHARACTERS else f"{line[:_CHARACTERS]} ..."


def also(text: str) -> str:
    """Return the line about one more rank that failed; what to do where a rank is lost is for programs without a driver."""
    return brief("Also: " + _ADVICE.sub(r"\1", text))


def module_hint(error: str, message: str) -> str:
    """Return what to do about a module that a rank lacks and this process has; "" of any other error."""
    missing = re.fullmatch(r"No module named '(\w+)'", message)
    if error != ModuleNotFoundError.__name__ or missing is None:
        return ""
    with contextlib.suppress(ImportError, ValueError):  # of a module without a spec
        spec = importlib.util.find_spec(missing[1])
        if spec is not None and spec.origin:
            return (
                f". This process has it: {spec.origin}. Install it in the Python of the ranks or, if it is a file of yours, let Spark bring "
                "it: spark.sparkContext.addPyFile(path), with Connect spark.addArtifacts(path, pyfile=True), or spark-submit --py-files."
            )
    return ""


def cut(lines: Sequence[str], most: int) -> list[str]:
    """Return the first lines, and the number of those that are left out."""
    if len(lines) <= most:
        return list(lines)
    return [*lines[: most - 1], f"... {len(lines) - most + 1} more lines"]


def _count_frames(frames: Iterable[Frame]) -> str:
    """Describe frames that are not shown, at least one: "... 6 frames of sparkhvd and torch"."""
    counts = Counter(frame.library or "your code" for frame in frames)
    *names, last = sorted(counts)
    total = sum(counts.values())
    listed = f"{', '.join(names)} and {last}" if names else last
    return f"... {total} frame{'s' * (total != 1)} of {listed}"


def rebuild(error: str, message: str) -> BaseException | None:
    """Rebuild an exception from its class and text; None if that is no class of Python or of `sparkhvd.errors`.

    No other class is looked up, and nothing is unpickled: the name comes from another process.
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
    except Exception:  # noqa: BLE001 - such as UnicodeDecodeError, which is made of more than its text
        return None


def _unquoted(text: str) -> object:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
