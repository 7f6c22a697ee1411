"""Fuzz the parsers of files and sockets with atheris: `make fuzz`, or `python -m tests.fuzz <corpus> <seconds> [parser]`.

Each parser has a process, a part of the seconds and a folder of the corpus, which starts with its writer's outputs. An unexpected error ends the
run and leaves the input in a file beside the corpus. Add that input to `tests/fuzz/test_parsers.py`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["sparkhvd"], enable_loader_override=False):
    from tests.harness.parsers import PARSERS, Parser, example

# First byte of an input: the rest is all bytes for the parser, or the JSON inside.
_BYTES, _BODY = b"b", b"j"


def _targets(parser: Parser) -> dict[str, bytes]:
    written = example(parser)
    inputs = {"bytes": _BYTES + written}
    if parser.body is not None:
        inputs["body"] = _BODY + parser.body(written)
    return inputs


def fuzz(parser: Parser, folder: Path, seconds: int) -> None:
    """Fuzz one parser in this process, which ends."""
    corpus = folder / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    for name, data in _targets(parser).items():
        (corpus / name).write_bytes(data)

    def run(data: bytes) -> None:
        if data[:1] == _BODY and parser.body is not None:
            parser.survives(parser.wrap(data[1:]))
        else:
            parser.survives(data[1:])

    options = [f"-max_total_time={seconds}", "-max_len=16384", "-timeout=10", "-rss_limit_mb=4096"]
    atheris.Setup([sys.argv[0], *options, f"-artifact_prefix={folder}/", str(corpus)], run)
    atheris.Fuzz()


def _in_a_fork(parser: Parser, folder: Path, seconds: int) -> int:
    """Fuzz one parser in a fork, which does not import again, and return its exit status."""
    folder.mkdir(parents=True, exist_ok=True)
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with open(folder / "log", "wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    fuzz(parser, folder, seconds)
    os._exit(0)


def main(root: Path, seconds: int, name: str = "") -> int:
    """Fuzz all parsers, or one, for some seconds together, and return the number of those with a finding."""
    names = {parser.name.replace(" ", "-"): parser for parser in PARSERS}
    if name:
        fuzz(names[name], root / name, seconds)
    share, failed = max(1, seconds // len(names)), []
    for each, parser in names.items():
        status = _in_a_fork(parser, root / each, share)
        lines = (root / each / "log").read_text(errors="replace").splitlines()
        print(f"{each}: {lines[-1] if lines else 'no output'}", flush=True)
        if status:
            failed.append(each)
            print("\n".join(lines[-40:]), flush=True)
    print(f"fuzz: {len(names)} parsers, {share} s each; findings: {', '.join(failed) or 'none'}")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).absolute(), int(sys.argv[2]), *sys.argv[3:]))
