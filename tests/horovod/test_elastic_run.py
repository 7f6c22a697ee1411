"""An elastic function on processes of this host, called by `horovod.run(min_np=...)`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sparkhvd.errors import ElasticError, InvalidArgumentError, RankError
from sparkhvd.horovod.runner import run
from tests.harness.by_value import by_value
from tests.harness.elastic_fn import train
from tests.harness.processes import wait_for_no_trainers

travels_by_value = by_value(__name__)
pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]


@pytest.fixture(autouse=True)
def no_trainer_is_left() -> Iterator[None]:
    yield
    assert wait_for_no_trainers() == set()


@pytest.mark.usefixtures("zygote_has_torch")
def test_a_killed_process_is_replaced_and_no_step_is_lost(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    results = run(train, (str(tmp_path), 2, "process"), np=2, min_np=1, cooldown_range=(0.1, 1))
    assert [rank for rank, *_ in results] == [0, 1]
    for _, sizes, steps, weight in results:
        assert sizes[0] == sizes[-1] == 2
        assert weight == -steps  # each step exactly once
    lines = re.findall(r"^sparkhvd: (\d+ .*)$", capfd.readouterr().err, re.MULTILINE)
    assert re.match(r"2 ranks in [\d.]+ s: 2 on ", lines[0]), lines
    assert re.search(r"process 1 on \S+ ended with signal SIGKILL", " ".join(lines)), lines
    assert re.search(r"process 2 on \S+ joined as rank 1$", lines[-1]), lines


def test_ranks_that_change_too_often_end_the_job(tmp_path: Path) -> None:
    with pytest.raises(ElasticError, match="reset_limit="):
        run(train, (str(tmp_path), 2, "process"), np=2, min_np=1, reset_limit=0)


def fails() -> None:
    raise ValueError("the cause")


def test_exception_before_rendezvous_ends_the_job() -> None:
    with pytest.raises(RankError, match=r"raised ValueError: the cause") as caught:
        run(fails, np=2, min_np=1, verbose=0)
    assert "in fails" in caught.value.traceback


def test_too_few_slots_raise_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ElasticError, match=r"after 1 s .*start_timeout=.* 1 of the 2 ranks"):
        run(train, (str(tmp_path), 2), np=2, min_np=2, slots=1, start_timeout=1, verbose=0)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"np": 2, "min_np": 3}, "min_num_proc is 3, num_proc is 2"),
        ({"min_np": 2, "max_np": 1}, "max_num_proc is 1"),
        ({"np": 1, "min_np": 0}, "min_num_proc is 0"),
        ({"np": 1, "reset_limit": -1}, "reset_limit is -1"),
        ({"np": 1, "cooldown_range": (5, 1)}, "cooldown_range is 5 1"),
        ({"np": 1, "cooldown_range": (5,)}, "cooldown_range is"),
        ({"min_np": 1, "hosts": "a", "host_discovery_script": "x"}, "Give one of them"),
        ({"min_np": 1, "hosts": "a", "hostfile": "x"}, "give one of them"),
        ({"min_np": 1, "hosts": "a:x"}, "it must be host:slots"),
    ],
)
def test_invalid_numbers_of_processes_are_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        run(print, **given)
