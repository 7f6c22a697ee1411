"""Slots and threads, computed from the configuration."""

from __future__ import annotations

import pytest

from sparkhvd.errors import InvalidArgumentError, PreflightError
from sparkhvd.runner.slots import (
    choose_num_proc,
    configured_slots,
    is_local,
    local_slots,
    threads_per_rank,
)

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("conf", "expected"),
    [
        ({"spark.master": "local"}, 1),
        ({"spark.master": "local[3]"}, 3),
        ({"spark.master": "local[*]"}, 8),
        ({"spark.master": "local[4, 2]"}, 4),
        ({"spark.master": "local[5]", "spark.task.cpus": "2"}, 2),
        ({"spark.master": "local-cluster[2,1,1024]"}, 2),
        ({"spark.master": "local-cluster[2,3,1024]", "spark.task.cpus": "2"}, 2),
        ({"spark.master": "spark://h:7077"}, None),
        ({"spark.master": "spark://h:7077", "spark.cores.max": "6"}, 6),
        (
            {"spark.master": "spark://h:7077", "spark.cores.max": "6", "spark.executor.cores": "4"},
            4,
        ),
        ({"spark.master": "yarn"}, 2),
        (
            {
                "spark.master": "yarn",
                "spark.executor.instances": "4",
                "spark.executor.cores": "5",
                "spark.task.cpus": "2",
            },
            8,
        ),
        (
            {
                "spark.master": "k8s://https://h",
                "spark.executor.instances": "3",
                "spark.executor.cores": "8",
                "spark.executor.resource.gpu.amount": "2",
                "spark.task.resource.gpu.amount": "1",
            },
            6,
        ),
        ({"spark.master": "something-else"}, None),
    ],
)
def test_configured_slots_follow_the_spark_master(
    conf: dict[str, str], expected: int | None
) -> None:
    assert configured_slots(conf, num_cpus=8).maximum == expected


def test_slots_of_a_resource_profile_use_its_cpus_per_task() -> None:
    conf = {"spark.master": "local-cluster[2,4,1024]"}
    assert configured_slots(conf, 8, task_cpus=3).maximum == 2


def test_num_proc_none_takes_all_slots() -> None:
    assert choose_num_proc(None, configured_slots({"spark.master": "local[3]"}, 8)) == 3


def test_num_proc_none_raises_if_the_number_of_slots_is_unknown() -> None:
    with pytest.raises(InvalidArgumentError) as e:
        choose_num_proc(None, configured_slots({"spark.master": "spark://h:7077"}, 8))
    assert str(e.value) == (
        "num_proc is not given, and spark.cores.max is not set, so the number of slots is unknown. "
        "Give num_proc."
    )


def test_num_proc_beyond_the_configuration_is_refused_with_both_numbers() -> None:
    with pytest.raises(PreflightError) as e:
        choose_num_proc(3, configured_slots({"spark.master": "local[2]"}, 8))
    assert str(e.value) == (
        "num_proc=3: the application can run 2 barrier tasks at once (master 'local[2]' has 2 threads, and a "
        "task takes spark.task.cpus=1), so a stage of 3 would never start. Lower num_proc, or use a master "
        "such as local[N] with more threads."
    )


@pytest.mark.parametrize("bad", [0, -1, 2.0, True, "2"])
def test_num_proc_must_be_a_positive_whole_number(bad: object) -> None:
    with pytest.raises(InvalidArgumentError, match="num_proc is .*whole number of at least 1"):
        choose_num_proc(bad, configured_slots({"spark.master": "local[2]"}, 8))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("task_cpus", "allowed", "fixed", "expected"),
    [(4, 8, None, 4), (4, 2, None, 2), (4, 1.5, None, 1), (1, 8, 3, 3), (1, 0.2, None, 1)],
)
def test_threads_per_rank_do_not_exceed_the_processors(
    task_cpus: int, allowed: float, fixed: int | None, expected: int
) -> None:
    assert threads_per_rank(task_cpus, allowed, fixed) == expected


def test_local_spark_masters_are_recognized() -> None:
    assert is_local("local")
    assert is_local("local[*]")
    assert not is_local("local-cluster[2,1,1024]")
    assert local_slots("local[*]", 6) == 6
    assert local_slots("yarn", 6) is None
