"""torch.distributed on the engine, in ranks of `run_local`: all checks share one start per number of ranks."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from sparkhvd.runner import run_local
from tests.harness.by_value import by_value
from tests.harness.soak import SOAK, left_to_soak

pytestmark = pytest.mark.processes

travels_by_value = by_value(__name__)


def everything(with_users: bool, is_soak: bool) -> dict[str, Any]:
    """Return by subject what is wrong on this rank."""
    import torch
    import torch.distributed as dist

    import sparkhvd.distributed  # noqa: F401 - registers the backend
    import sparkhvd.torch as hvd
    from tests.distributed import collectives, groups, programs, users

    warnings.simplefilter("ignore", FutureWarning)  # names of before torch 2.13
    dist.init_process_group("sparkhvd")
    found = {"default": collectives.wrong(), **groups.findings()}
    found["programs"] = programs.wrong(range(500 if is_soak else 20))
    if with_users:
        found |= groups.compiled() | users.findings(with_metrics=is_soak)
    found["later generations"] = groups.later_generations()
    dist.destroy_process_group()
    ones = hvd.allreduce(torch.ones(1), op=hvd.Sum)
    found["hvd after destroy_process_group"] = [] if ones.item() == hvd.size() else [str(ones)]
    return found


@pytest.mark.usefixtures("zygote_has_compiler")
@pytest.mark.parametrize("size", [2, 3, *left_to_soak("sizes 2 and 3 test the same code", 1, 4)])
def test_collectives_and_their_users_give_what_one_process_computes(size: int) -> None:
    for found in run_local(everything, args=(size == 2, SOAK), num_proc=size):
        assert found == dict.fromkeys(found, [])
