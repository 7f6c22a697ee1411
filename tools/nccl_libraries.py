"""Fetch real libnccl for tests without a GPU, from the wheels on PyPI (`make test-nccl`).

    python -m tools.nccl_libraries

The libraries of RELEASES are stored in build/nccl/: a wheel is 200 to 300 MB. If the index cannot be
reached, this prints one line per release and succeeds. The tests that lack a library are then skipped with
that line as the reason.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "nccl"
MEMBER = "nvidia/nccl/lib/libnccl.so.2"
TIMEOUT_S = 900


@dataclass(frozen=True)
class Release:
    package: str
    version: str

    @property
    def name(self) -> str:
        return f"{self.package}-{self.version}"

    @property
    def code(self) -> int:
        """Version as ncclGetVersion counts: 22809 is 2.28.9."""
        major, minor, patch = map(int, self.version.split("."))
        return major * 10000 + minor * 100 + patch

    @property
    def library(self) -> Path:
        return FOLDER / self.name / "libnccl.so.2"

    def why_missing(self) -> str:
        """Read the error of the last attempt to fetch the release."""
        note = FOLDER / f"{self.name}.missing"
        return note.read_text() if note.exists() else f"{self.name}: fetch it by make test-nccl"


# The oldest release on PyPI that the engine takes, the one of torch 2.11, and the newest.
RELEASES = (
    Release("nvidia-nccl-cu12", "2.18.3"),
    Release("nvidia-nccl-cu13", "2.28.9"),
    Release("nvidia-nccl-cu13", "2.32.3"),
)


def fetch(release: Release) -> str:
    """Put the library into its folder and return the problem in one line, empty on success."""
    if release.library.exists():
        return ""
    wheels = FOLDER / "wheels" / release.name
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q"]
    command += ["--no-deps", "--only-binary=:all:", f"--dest={wheels}"]
    command += [f"{release.package}=={release.version}"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"{release.name}: pip downloaded for {TIMEOUT_S} s without an end"
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return f"{release.name}: pip cannot download it: {last}"
    release.library.parent.mkdir(parents=True, exist_ok=True)
    partial = release.library.with_suffix(".partial")
    with (
        zipfile.ZipFile(next(wheels.glob("*.whl"))) as wheel,
        wheel.open(MEMBER) as source,
        partial.open("wb") as target,
    ):
        shutil.copyfileobj(source, target)
    partial.replace(release.library)
    shutil.rmtree(wheels)
    return ""


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for release in RELEASES:
        note = FOLDER / f"{release.name}.missing"
        if problem := fetch(release):
            note.write_text(problem)
            print(f"test-nccl: without {problem}", file=sys.stderr)
        else:
            note.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
