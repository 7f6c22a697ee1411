"""Check of the estimator's training, as a program: `python -m tests.gpu.estimator "bf16-mixed" 1 cuda`.

It is a separate program because `run_local` starts its ranks, which end with it if they hang.
"""

from __future__ import annotations

import pickle
import sys

from tests.gpu.machine import share_gpu


def main() -> int:
    if sys.modules["cloudpickle"] is pickle:
        print("skipped: the estimator needs cloudpickle, which is not here")
        return 0
    try:
        from tests.harness.estimator_checks import CHECKS, Place
    except ImportError as error:
        print(f"skipped: the estimator needs more than is here: {error}")
        return 0
    name, size, kind = sys.argv[1:]
    place = Place(int(size), kind, is_shared=kind == "cuda" and int(size) > 1)
    if place.is_shared:
        share_gpu(0)  # the ranks inherit it, and choose their own names
    if name == "compile" and (reason := no_compiler()):
        print(f"skipped: {reason}")
        return 0
    print(CHECKS[name](place))
    return 0


def no_compiler() -> str:
    """Return the reason why torch.compile cannot make kernels here, or "" if it can."""
    import shutil

    from torch.utils._triton import has_triton

    if not has_triton():
        return "torch.compile needs triton"
    return "" if shutil.which("cc") or shutil.which("gcc") else "torch.compile needs a C compiler"


if __name__ == "__main__":
    sys.exit(main())
