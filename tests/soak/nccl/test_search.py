"""Messages to the user if CUDA or NCCL cannot be used."""

from __future__ import annotations

import pytest

from tests.soak.nccl.programs import NATIVE, conformity

pytestmark = pytest.mark.soak

REMEDY = (
    " Install NCCL 2.18 or newer (a torch built for CUDA brings it, or pip install nvidia-nccl-cu12 or -cu13), "
    "or name its file in SPARKHVD_NCCL_LIB.\n"
)


def refusal(*arguments: str, **environment: str) -> str:
    done = conformity(*arguments, **environment)
    assert done.returncode == 2, done.stdout + done.stderr
    return done.stderr.removeprefix("nccl_conformity: ")


def test_error_names_a_missing_nccl_library() -> None:
    assert refusal("--no-device", "--nccl-library", "/nowhere/libnccl.so.2") == (
        "NCCL was not found: /nowhere/libnccl.so.2: cannot open shared object file: "
        "No such file or directory." + REMEDY
    )


def test_library_that_is_not_nccl_is_refused() -> None:
    other = str(NATIVE / "libfake_cuda.so")
    assert refusal("--no-device", "--nccl-library", other) == (
        f"NCCL was not found: {other} is not NCCL: it has no ncclGetVersion." + REMEDY
    )


@pytest.mark.parametrize(
    ("code", "text"), [("21706", "NCCL 2.17.6"), ("2804", "NCCL of version code 2804")]
)
def test_too_old_nccl_library_is_refused(code: str, text: str) -> None:
    library = str(NATIVE / "libfake_nccl.so")
    assert refusal("--no-device", "--nccl-library", library, FAKE_NCCL_VERSION=code) == (
        f"NCCL was not found: {library} is {text}, and 2.18 is the oldest that can be used."
        + REMEDY
    )


def test_error_names_every_searched_nccl_location() -> None:
    other = str(NATIVE / "libfake_cuda.so")
    old = str(NATIVE / "libfake_nccl.so")
    candidates = ("/nowhere/libnccl.so.2", other, old)
    arguments = [word for path in candidates for word in ("--nccl-candidate", path)]
    done = conformity("--no-device", *arguments, FAKE_NCCL_VERSION="21706")
    if done.returncode == 0 or "libnccl.so.2: cannot open" not in done.stderr.split(";")[-1]:
        pytest.skip("this machine has an NCCL where the loader looks")
    assert done.stderr == (
        "nccl_conformity: NCCL was not found: /nowhere/libnccl.so.2: cannot open shared object file: "
        f"No such file or directory; {other} is not NCCL: it has no ncclGetVersion; {old} is NCCL 2.17.6, and 2.18 "
        "is the oldest that can be used; libnccl.so.2: cannot open shared object file: "
        "No such file or directory." + REMEDY
    )


def test_error_names_a_missing_cuda_driver() -> None:
    assert refusal("--cuda-library", "/nowhere/libcuda.so.1", "--ranks", "1") == (
        "The CUDA driver's library /nowhere/libcuda.so.1 cannot be loaded: /nowhere/libcuda.so.1: "
        "cannot open shared object file: No such file or directory. "
        "GPUs need NVIDIA's driver on the host.\n"
    )


def test_library_that_is_not_the_cuda_driver_is_refused() -> None:
    text = refusal("--cuda-library", "libm.so.6", "--ranks", "1")
    assert text.startswith("The CUDA driver's library libm.so.6 has no cuInit, cuGetErrorName, ")
    assert text.endswith(
        " and cuPointerGetAttribute. Update NVIDIA's driver: the engine needs one of CUDA 11 or newer.\n"
    )


def test_error_says_that_the_cuda_driver_has_no_device() -> None:
    assert refusal("--ranks", "1") == (
        "The CUDA driver cannot be used: cuInit answered CUDA_ERROR_NO_DEVICE "
        "(100: no CUDA-capable device is detected). Look at nvidia-smi and CUDA_VISIBLE_DEVICES.\n"
    )
