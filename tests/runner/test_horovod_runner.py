"""`HorovodRunner` with processes of this host. tests/runner/test_plain_torch.py has Spark tasks."""

from __future__ import annotations

from typing import Any

import pytest

from sparkhvd import HorovodRunner
from sparkhvd.errors import InvalidArgumentError, RankError
from sparkhvd.runner import context
from tests.harness.processes import wait_for_no_trainers
from tests.harness.soak import soak

pytestmark = pytest.mark.processes


@soak("horovod/test_as_horovod")
def test_negative_np_starts_as_many_processes_on_this_host(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def main(*, base: int, fails: bool = False) -> tuple[int, int]:
        here = context()
        assert here is not None
        assert not (fails and here.rank == 1), "on purpose"
        print(f"rank {here.rank} speaks", flush=True)
        return base + here.rank, here.size

    runner = HorovodRunner(np=-2, driver_log_verbosity="all")
    assert runner.run(main, base=5) == (5, 2)
    assert capsys.readouterr().err.count("speaks") == 2
    with pytest.raises(RankError, match=r"Rank 1 of 2 .*on purpose"):
        runner.run(main, base=5, fails=True)
    assert wait_for_no_trainers() == set()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"np": None}, r"np=None\): it must be an integer"),
        ({"np": True}, "it must be an integer"),
        ({"np": 2, "driver_log_verbosity": "some"}, "must be one of all, log_callback_only"),
    ],
)
def test_wrong_horovod_runner_arguments_raise_a_clear_error(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        HorovodRunner(**arguments)
