"""Build the source distribution and the wheels into dist/, and check their contents (`make wheel`).

    python -m tools.wheel                 the three wheels
    python -m tools.wheel any x86_64      some of them

The wheels are built from the unpacked source distribution, so a missing file fails here. One wheel
per architecture serves every Python and every torch. `py3-none-any` has no library and serves clients.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path

from tools.cross import ARCHITECTURES, GLIBC, ROOT, toolchain
from tools.elf import kernel_problems, library_problems, machine, newest_glibc

DIST = ROOT / "dist"
WORK = ROOT / "build" / "wheel"
LIBRARY = "sparkhvd/lib/libsparkhvd.so"
ANY = "any"
ISAS = ("avx2", "avx512", "neon")


def platform_tag(kind: str) -> str:
    return ANY if kind == ANY else f"manylinux_{GLIBC[0]}_{GLIBC[1]}_{kind}"


def run(command: list[str], folder: Path, **variables: str) -> str:
    """Run `command` and return its output. On failure, print the output and exit."""
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"{done.stdout}\nmake wheel: failed: {' '.join(command)}")
    return done.stdout


def source_tree() -> Path:
    """Write the source distribution and unpack it."""
    for old in DIST.glob("sparkhvd-*"):
        old.unlink()
    run([sys.executable, "setup.py", "-q", "sdist", "-d", str(DIST)], ROOT)
    (archive,) = DIST.glob("sparkhvd-*.tar.gz")
    shutil.rmtree(WORK / "source", ignore_errors=True)
    with tarfile.open(archive) as tar:
        tar.extractall(WORK / "source", filter="data")
    (tree,) = (WORK / "source").iterdir()
    return tree


def build(kind: str, tree: Path) -> Path:
    """Build one wheel: 'any' or an architecture."""
    shutil.rmtree(tree / "build", ignore_errors=True)
    command = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "wheel",
        ".",
        "--no-deps",
    ]
    command += ["--no-build-isolation", "--no-cache-dir", "-w", str(DIST)]
    variables = {"SPARKHVD_BUILD_ENGINE": "0"}
    if kind != ANY:
        command.append(f"-C--build-option=--plat-name={platform_tag(kind)}")
        variables = {"CMAKE_TOOLCHAIN_FILE": str(toolchain(kind))}
    run(command, tree, **variables)
    (wheel,) = DIST.glob(f"sparkhvd-*-py3-none-{platform_tag(kind)}.whl")
    return wheel


def check(kind: str, wheel: Path, tree: Path) -> list[str]:
    """Check a wheel and return its problems as sentences."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = next(n for n in names if n.endswith(".dist-info/WHEEL"))
        tag = re.search(r"^Tag: (.*)$", archive.read(metadata).decode(), re.MULTILINE)
        folder = WORK / "unpacked" / kind
        shutil.rmtree(folder, ignore_errors=True)
        archive.extractall(folder)
    sources = {str(p.relative_to(ROOT)) for p in (ROOT / "sparkhvd").rglob("*.py")}
    sources.add("sparkhvd/py.typed")
    problems = [f"lacks {name}" for name in sorted(sources - names)]
    problems += [
        f"has {name}, which is no part of the package"
        for name in sorted(names - sources - {LIBRARY})
        if ".dist-info/" not in name
    ]
    if tag is None or tag[1] != f"py3-none-{platform_tag(kind)}":
        problems.append(f"says {tag and tag[0]!r} in WHEEL, not py3-none-{platform_tag(kind)}")
    if (LIBRARY in names) != (kind != ANY):
        problems.append("has the library" if kind == ANY else "lacks the library")
    elif kind != ANY:
        library = folder / LIBRARY
        problems += library_problems(library, glibc=GLIBC)
        if machine(library) != kind:
            problems.append(f"has a library for {machine(library)}")
        problems += audit(kind, wheel)
        problems += kernels(tree)
    return problems


def kernels(tree: Path) -> list[str]:
    """Check the objects of single instruction sets built by the wheel's compiler and return their problems as sentences."""
    objects = [
        path
        for path in sorted(tree.glob("build/temp*/native/**/kernels/*.o"))
        if any(isa in path.name for isa in ISAS)
    ]
    if not objects:
        return ["was built without objects of kernels, so nothing is known about them"]
    return [f"has {path.name}, which {what}" for path in objects for what in kernel_problems(path)]


def audit(kind: str, wheel: Path) -> list[str]:
    """Check the wheel's name with auditwheel and return the problems as sentences."""
    output = " ".join(run([sys.executable, "-m", "auditwheel", "show", str(wheel)], ROOT).split())
    pattern = rf'following platform tag: "manylinux_(\d+)_(\d+)_{kind}"'
    found = re.search(pattern, output)
    problems = []
    if found is None or (int(found[1]), int(found[2])) > GLIBC:
        problems.append(f"auditwheel does not call it {platform_tag(kind)}: {output}")
    if "external shared libraries are required" in output:
        problems.append(f"auditwheel finds libraries that it needs: {output}")
    return problems


def describe(kind: str, wheel: Path, seconds: float) -> str:
    text = f"{wheel.name}  {wheel.stat().st_size / 1024:.0f} KiB  {seconds:.0f} s"
    if kind == ANY:
        return f"{text}  no library"
    library = WORK / "unpacked" / kind / LIBRARY
    newest = ".".join(map(str, newest_glibc(library)))
    return f"{text}  library {library.stat().st_size / 1024:.0f} KiB, glibc {newest}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    kinds = (ANY, *ARCHITECTURES)
    parser.add_argument("kinds", nargs="*", metavar="kind", help=f"of {', '.join(kinds)}")
    chosen = parser.parse_args().kinds or list(kinds)
    if unknown := sorted(set(chosen) - set(kinds)):
        parser.error(f"there is no wheel {', '.join(unknown)}: choose from {', '.join(kinds)}")
    tree = source_tree()
    failed = False
    for kind in chosen:
        start = time.monotonic()
        wheel = build(kind, tree)
        problems = check(kind, wheel, tree)
        print(describe(kind, wheel, time.monotonic() - start), flush=True)
        for problem in problems:
            failed = True
            print(f"make wheel: {wheel.name} {problem}.", file=sys.stderr)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
