"""Memory files, with and without Python's own functions for them."""

from __future__ import annotations

import os

import pytest

from sparkhvd.engine.library import is_sealed_against_shrinking, new_memfd, seal_against_shrinking

pytestmark = pytest.mark.pure


@pytest.mark.parametrize("python_knows_them", [True, False])
def test_memfd_is_sealed_and_close_on_exec(
    monkeypatch: pytest.MonkeyPatch, python_knows_them: bool
) -> None:
    if not python_knows_them:
        monkeypatch.delattr(os, "memfd_create", raising=False)
    descriptor = new_memfd("sparkhvd-test")
    try:
        assert os.readlink(f"/proc/self/fd/{descriptor}").startswith("/memfd:sparkhvd-test")
        assert not os.get_inheritable(descriptor)
        os.ftruncate(descriptor, 64)
        assert not is_sealed_against_shrinking(descriptor)
        seal_against_shrinking(descriptor)
        assert is_sealed_against_shrinking(descriptor)
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, 32)
    finally:
        os.close(descriptor)


def test_memfd_refused_by_the_kernel_raises_oserror(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    with pytest.raises(OSError, match="memfd_create"):
        new_memfd("n" * 300)  # names have at most 249 bytes


def test_memfd_raises_oserror_on_unknown_cpu_architecture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    parts = list(os.uname())
    machine = os.uname_result([*parts[:4], "mips"])
    monkeypatch.setattr(os, "uname", lambda: machine)
    with pytest.raises(OSError, match="cannot make memory files on mips"):
        new_memfd("sparkhvd-test")
