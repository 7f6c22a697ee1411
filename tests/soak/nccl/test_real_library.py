"""The real libnccl without a GPU: its exports, configuration, errors, and the copy that is loaded."""

from __future__ import annotations

import pytest

from tests.soak.nccl.programs import conformity
from tools.nccl_libraries import RELEASES, Release

pytestmark = pytest.mark.soak

OLDEST, MIDDLE, NEWEST = RELEASES


def library_of(release: Release) -> str:
    if not release.library.exists():
        pytest.skip(f"no libnccl of {release.name}: {release.why_missing()}")
    return str(release.library)


@pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.name)
def test_nccl_library_matches_the_engine_tables_for_its_release(release: Release) -> None:
    library = library_of(release)
    done = conformity("--no-device", "--nccl-library", library)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[:2] == [f"version {release.code}", f"file {library}"]
    assert lines[2].startswith("symbols ")
    assert lines[3] == "unique ids differ"
    # An error of CUDA, not of an argument, so the configuration was accepted.
    assert lines[4].startswith("without a GPU: ncclCommInitRankConfig failed: unhandled cuda error")


def test_loaded_nccl_library_is_preferred_to_candidates() -> None:
    loaded, candidate = library_of(OLDEST), library_of(NEWEST)
    done = conformity("--no-device", "--loaded", loaded, "--nccl-candidate", candidate)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[:2] == [f"version {OLDEST.code}", f"file {loaded}"]


def test_nccl_library_setting_is_preferred_to_the_loaded_library() -> None:
    loaded, named = library_of(OLDEST), library_of(MIDDLE)
    done = conformity("--no-device", "--loaded", loaded, "--nccl-library", named)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[:2] == [f"version {MIDDLE.code}", f"file {named}"]


def test_nccl_candidates_are_tried_in_order() -> None:
    first, second = library_of(MIDDLE), library_of(NEWEST)
    candidates = ("/nowhere/libnccl.so.2", first, second)
    arguments = [word for path in candidates for word in ("--nccl-candidate", path)]
    done = conformity("--no-device", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[0] == f"version {MIDDLE.code}"
