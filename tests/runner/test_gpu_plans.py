"""GPUs of ranks, as tables: configuration -> plan, addresses -> variables."""

from __future__ import annotations

from typing import Any

import pytest

from sparkhvd.errors import InvalidArgumentError, PreflightError
from sparkhvd.runner.gpu import decide as profiles
from sparkhvd.runner.gpu.decide import (
    GpuMode,
    GpuPlan,
    TaskShare,
    decide,
    plan_gpus,
    share_of_a_gpu,
    slots_of,
    variables,
    views,
)
from sparkhvd.runner.slots import choose_num_proc

pytestmark = pytest.mark.pure

YARN = {"spark.master": "yarn", "spark.executor.instances": "3"}
STANDALONE = {"spark.master": "spark://h:7077", "spark.cores.max": "16"}
K8S = {"spark.master": "k8s://https://h", "spark.executor.instances": "2"}
CLUSTER = {"spark.master": "local-cluster[2,8,1024]"}
OLD = "pyspark 3.5.6 has no resource profiles for DataFrame stages"


def conf(base: dict[str, str], **amounts: object) -> dict[str, str]:
    """Return a configuration with cores= and gpus= of an executor, and task= and cpus= of a task."""
    keys = {
        "cores": "spark.executor.cores",
        "gpus": "spark.executor.resource.gpu.amount",
        "task": "spark.task.resource.gpu.amount",
        "cpus": "spark.task.cpus",
    }
    return {**base, **{keys[name]: str(value) for name, value in amounts.items()}}


# conf, use_gpu, refused -> mode, profile, ranks with num_proc=None (None: nothing bounds them)
TABLE: list[tuple[dict[str, str], bool | None, str, str, TaskShare | None, int | None]] = [
    # A local master gives tasks no GPUs, whatever the conf says, and takes no profile.
    ({"spark.master": "local[4]"}, None, "", GpuMode.FREE, None, 4),
    ({"spark.master": "local[4]"}, True, "", GpuMode.HOST, None, 4),
    ({"spark.master": "local[4]"}, False, "", GpuMode.OFF, None, 4),
    (conf({"spark.master": "local[4]"}, gpus=2), None, "", GpuMode.FREE, None, 4),
    # No GPUs in the conf.
    (conf(YARN, cores=4), None, "", GpuMode.FREE, None, 12),
    (conf(YARN, cores=4), True, "", GpuMode.HOST, None, 12),
    # GPUs of executors, but none for tasks: the profile requests them.
    (conf(YARN, cores=8, gpus=2), None, "", GpuMode.TASK, TaskShare(4, 1.0), 6),
    (conf(YARN, cores=8, gpus=2), True, "", GpuMode.TASK, TaskShare(4, 1.0), 6),
    (conf(YARN, cores=8, gpus=2), None, OLD, GpuMode.FREE, None, 24),
    # A part of a GPU per task: whole ones by profile.
    (conf(K8S, cores=8, gpus=4, task=0.25), None, "", GpuMode.TASK, TaskShare(2, 1.0), 8),
    (conf(CLUSTER, gpus=2, task=0.5), True, "", GpuMode.TASK, TaskShare(4, 1.0), 4),
    (conf(CLUSTER, cores=4, gpus=3, task=0.1), None, "", GpuMode.TASK, TaskShare(1, 1.0), 6),
    (conf(K8S, cores=2, gpus=4, task=0.1), None, "", GpuMode.TASK, TaskShare(1, 1.0), 4),
    # One GPU per task: the profile gives its share of the cores, and is not needed if the conf does.
    (conf(YARN, cores=8, gpus=2, task=1), None, "", GpuMode.TASK, TaskShare(4, 1.0), 6),
    (conf(YARN, cores=8, gpus=2, task=1, cpus=4), None, "", GpuMode.TASK, None, 6),
    (conf(YARN, gpus=1, task=1), None, "", GpuMode.TASK, None, 3),
    (conf(YARN, cores=8, gpus=2, task=1), None, OLD, GpuMode.TASK, None, 6),
    # Executors that take all cores of their host: the share is not known.
    (conf(STANDALONE, gpus=2, task=0.5), None, "", GpuMode.TASK, TaskShare(None, 1.0), 16),
    (conf(STANDALONE, gpus=2, task=1), None, "", GpuMode.TASK, None, 16),
    (conf(STANDALONE, cores=8, gpus=4), None, "", GpuMode.TASK, TaskShare(2, 1.0), 8),
    # Several per task.
    (conf(YARN, cores=8, gpus=4, task=2), None, "", GpuMode.TASK, TaskShare(2, 1.0), 12),
    (conf(YARN, cores=8, gpus=4, task=2), None, OLD, GpuMode.TASK, None, 6),
    # The CPU on GPU executors.
    (conf(YARN, cores=8, gpus=2, task=0.5), False, "", GpuMode.OFF, None, 12),
]


@pytest.mark.parametrize(("given", "use_gpu", "refused", "mode", "profile", "ranks"), TABLE)
def test_gpu_plan_follows_the_configuration(
    given: dict[str, str],
    use_gpu: bool | None,
    refused: str,
    mode: str,
    profile: TaskShare | None,
    ranks: int | None,
) -> None:
    plan = decide(given, use_gpu, refused=refused)
    assert (plan.mode, plan.profile, plan.is_required) == (mode, profile, bool(use_gpu))
    assert plan.reason
    has_gpus = "spark.executor.resource.gpu.amount" in given and "local[" not in str(given)
    assert plan.leaves_gpus == (mode == GpuMode.FREE and has_gpus)
    assert choose_num_proc(None, slots_of(given, plan)) == ranks


def test_too_many_ranks_error_names_gpus_and_cores_per_task() -> None:
    given = conf(YARN, cores=8, gpus=2, task=0.5)
    slots = slots_of(given, decide(given, None))
    with pytest.raises(PreflightError) as e:
        choose_num_proc(7, slots)
    assert str(e.value) == (
        "num_proc=7: the application can run 6 barrier tasks at once (spark.executor.instances=3, "
        "spark.executor.cores=8, 4 cores per task, 2 GPUs per executor and 1 per task), so a stage of 7 would never "
        "start. Lower num_proc, or raise spark.executor.instances."
    )


@pytest.mark.parametrize(
    ("given", "use_gpu", "kind", "message"),
    [
        (
            conf(YARN, cores=8, gpus=2, task=0.5),
            use_gpu,
            PreflightError,
            "spark.task.resource.gpu.amount is 0.5, so Spark would put 2 ranks on one GPU, and this stage cannot ask "
            f"for whole GPUs: {OLD}. Set spark.task.resource.gpu.amount=1, or give use_gpu=False.",
        )
        for use_gpu in (None, True)
    ]
    + [
        (
            conf(YARN, cores=8, gpus=2),
            True,
            PreflightError,
            "use_gpu is True, spark.executor.resource.gpu.amount is 2 and spark.task.resource.gpu.amount is not set, so "
            f"tasks get no GPU, and this stage cannot ask for one: {OLD}. Set spark.task.resource.gpu.amount=1.",
        ),
        (
            conf({"spark.master": "local[4]"}, gpus=2, task=0.5),
            False,
            PreflightError,
            "spark.task.resource.gpu.amount is 0.5, and master 'local[4]' has no GPUs for tasks, so Spark would never "
            "start one. Start the session without it; with use_gpu=True ranks get the GPUs of this host by their local "
            "rank.",
        ),
        (
            YARN,
            "yes",
            InvalidArgumentError,
            "use_gpu is 'yes'; it must be True, False or None (automatic).",
        ),
        (
            conf(YARN, gpus="two"),
            None,
            PreflightError,
            "spark.executor.resource.gpu.amount is 'two'; it must be a number.",
        ),
    ],
)
def test_impossible_gpu_configuration_is_refused(
    given: dict[str, str], use_gpu: Any, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind) as e:
        decide(given, use_gpu, refused=OLD)
    assert str(e.value) == message


def test_resource_profile_of_the_user_takes_precedence() -> None:
    given = conf(YARN, cores=8, gpus=2, task=0.5)
    assert decide(given, None, given=TaskShare(2, 1.0)) == GpuPlan(
        GpuMode.TASK, "as the profile given asks"
    )
    assert decide(given, None, given=TaskShare(2, 2.0)).mode == GpuMode.TASK
    assert decide(given, None, given=TaskShare(2, 0.0)).mode == GpuMode.FREE
    assert decide(given, False, given=TaskShare(2, 1.0)).mode == GpuMode.OFF
    with pytest.raises(InvalidArgumentError, match="the profile given asks for no GPU per task"):
        decide(given, True, given=TaskShare(2, 0.0))
    with pytest.raises(InvalidArgumentError, match=r"asks for 0\.5 GPUs per task, so Spark would"):
        decide(given, None, given=TaskShare(1, 0.5))


ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


@pytest.mark.parametrize(
    ("mode", "addresses", "visible", "order", "expected"),
    [
        (GpuMode.OFF, ["0"], "0,1", None, {"CUDA_VISIBLE_DEVICES": ""}),
        (GpuMode.FREE, [], "0,1", None, {}),
        (GpuMode.HOST, [], None, None, {}),
        (GpuMode.TASK, ["3"], None, None, {"CUDA_VISIBLE_DEVICES": "3", **ORDER}),
        (GpuMode.TASK, ["1"], "4,7", None, {"CUDA_VISIBLE_DEVICES": "7", **ORDER}),
        (GpuMode.TASK, ["0", "2"], "4, 5, 6", "X", {"CUDA_VISIBLE_DEVICES": "4,6"}),
        (GpuMode.TASK, ["1"], "GPU-a,MIG-b", None, {"CUDA_VISIBLE_DEVICES": "MIG-b", **ORDER}),
        (GpuMode.TASK, ["GPU-c"], None, None, {"CUDA_VISIBLE_DEVICES": "GPU-c", **ORDER}),
        (GpuMode.TASK, ["MIG-b"], "GPU-a,MIG-b", None, {"CUDA_VISIBLE_DEVICES": "MIG-b", **ORDER}),
    ],
)
def test_rank_variables_follow_gpu_mode_and_addresses(
    mode: str,
    addresses: list[str],
    visible: str | None,
    order: str | None,
    expected: dict[str, str],
) -> None:
    assert variables(mode, addresses, visible, order) == expected


def test_gpu_address_hidden_from_the_executor_raises() -> None:
    with pytest.raises(PreflightError) as e:
        variables(GpuMode.TASK, ["2"], "4,7", None)
    assert str(e.value) == (
        "Spark gave the task the GPU with address 2, and CUDA_VISIBLE_DEVICES='4,7' of the executor names 2; addresses "
        "count in this list, from 0. Unset the variable for the executors, or let the discovery script print the "
        "numbers of its entries."
    )
    with pytest.raises(PreflightError, match=r"CUDA_VISIBLE_DEVICES='' of the executor names 0"):
        variables(GpuMode.TASK, ["0"], "", None)
    with pytest.raises(PreflightError, match="Spark gave the task no GPU"):
        variables(GpuMode.TASK, [], None, None)


def test_rank_reports_its_own_gpus_and_all_visible_gpus() -> None:
    assert views(GpuMode.TASK, None) == [{}, {"CUDA_VISIBLE_DEVICES": None}]
    assert views(GpuMode.TASK, "2,3") == [{}, {"CUDA_VISIBLE_DEVICES": "2,3"}]
    assert views(GpuMode.HOST, "2,3") == [{}]
    assert views(GpuMode.OFF, None) == views(GpuMode.FREE, None) == []


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (conf(YARN, cores=8, gpus=2), 0.25),
        (conf(YARN, cores=8, gpus=2, cpus=4), 1.0),
        (conf(YARN, cores=2, gpus=4), 1.0),
        (conf(K8S, cores=7, gpus=2), 0.25),
        (conf(CLUSTER, gpus=1), 0.125),
        (conf(YARN, cores=3, gpus=1), 0.333333),  # rounded down: three of them fit
        (conf(STANDALONE, gpus=2), 0.25),  # executors that take all cores of their host
        (conf(YARN, cores=8, gpus=2, task=0.5), None),  # they get GPUs without asking
        (conf(YARN, cores=8), None),
        (conf({"spark.master": "local[4]"}, gpus=2), None),
        ({**conf(YARN, cores=8, gpus=2), "spark.dynamicAllocation.enabled": "true"}, None),
    ],
)
def test_gpu_share_per_task_does_not_reduce_the_number_of_tasks(
    given: dict[str, str], expected: float | None
) -> None:
    share = share_of_a_gpu(given)
    assert share == (None if expected is None else TaskShare(None, expected))


class Refusing:
    """A shim whose Spark accepts no profile, like one with an unsuitable master."""

    def profile(self, cpus: int | None, gpus: float | None) -> Any:
        raise RuntimeError(
            "TaskResourceProfiles are only supported for Standalone, Yarn and Kubernetes cluster\n\tat org.apache..."
        )


def test_gpu_plan_follows_the_conf_without_resource_profile_support() -> None:
    shim: Any = Refusing()
    plan, profile = plan_gpus(shim, conf(YARN, cores=8, gpus=2, task=1), True, None)
    assert (plan.mode, plan.profile, profile) == (GpuMode.TASK, None, None)
    with pytest.raises(PreflightError) as e:
        plan_gpus(shim, conf(YARN, cores=8, gpus=2, task=0.5), None, None)
    assert str(e.value) == (
        "spark.task.resource.gpu.amount is 0.5, so Spark would put 2 ranks on one GPU, and this stage cannot ask for "
        "whole GPUs: Spark takes no resource profile here (TaskResourceProfiles are only supported for Standalone, Yarn "
        "and Kubernetes cluster). Set spark.task.resource.gpu.amount=1, or give use_gpu=False."
    )
    # No rank needs one here.
    plan, _ = plan_gpus(shim, conf(YARN, cores=8, gpus=2, task=1, cpus=4), None, None)
    assert plan.mode == GpuMode.TASK


@pytest.mark.parametrize(("takes", "made"), [(True, 1), (False, 0)])
def test_application_has_one_resource_profile_for_shared_gpus(
    monkeypatch: pytest.MonkeyPatch, takes: bool, made: int
) -> None:
    asked: list[tuple[int | None, float | None]] = []

    class Shim:
        def __init__(self, key: str) -> None:
            self.key = key

        def profile_scope(self) -> str:
            return str(self.key)

        def conf(self, keys: Any) -> dict[str, str]:
            return conf(YARN, cores=8, gpus=2)

        def profile(self, cpus: int | None, gpus: float | None) -> Any:
            asked.append((cpus, gpus))
            if not takes:
                raise RuntimeError("TaskResourceProfiles are only supported for ...")
            return object()

    monkeypatch.setattr(profiles, "no_profiles", lambda: "")
    monkeypatch.setattr(profiles, "_shared", {})
    application: Any = Shim("one")
    first = profiles.profile_to_share_gpus(application)
    assert profiles.profile_to_share_gpus(application) is first
    assert (first is not None) == bool(made)
    assert asked == [(None, 0.25)]
    other: Any = Shim("two")
    assert not takes or profiles.profile_to_share_gpus(other) is not first
