"""`run` in barrier tasks of the shared `local[2]` session."""

from __future__ import annotations

import io
import os
import random
import re
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import sparkhvd
from sparkhvd import Settings
from sparkhvd.errors import InvalidArgumentError, PreflightError, RankError
from sparkhvd.interfaces import interfaces
from sparkhvd.runner import context, job, run, slots
from sparkhvd.runner.outcomes import Outcome
from sparkhvd.settings import conf_keys
from sparkhvd.spark import SparkShim
from tests.harness import faults
from tests.harness.by_value import by_value
from tests.harness.processes import wait_for_no_trainers
from tests.harness.soak import soak
from tests.harness.waiting import wait_until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


travels_by_value = by_value(__name__)


@pytest.fixture(autouse=True)
def no_trainer_is_left() -> Iterator[None]:
    yield
    assert wait_for_no_trainers() == set()


class Files:
    """A folder as shared files. `broken_reader` is a rank that sees an empty store."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.url = f"file://{root}"

    def read_bytes(self, path: str) -> bytes:
        return Path(self.root, path).read_bytes()

    def write_bytes(self, path: str, data: bytes) -> None:
        target = Path(self.root, path)
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f"{target.name}.{os.getpid()}")
        part.write_bytes(data)
        part.rename(target)

    def exists(self, path: str) -> bool:
        return Path(self.root, path).exists()


class FilesOfOneProcess(Files):
    """A path that exists on every host, but is a different folder on each."""

    def write_bytes(self, path: str, data: bytes) -> None:
        super().write_bytes(f"{os.getpid()}/{path}", data)

    def read_bytes(self, path: str) -> bytes:
        return super().read_bytes(f"{os.getpid()}/{path}")


@pytest.mark.usefixtures("threads_by_default")
def test_results_are_in_rank_order_and_runs_are_independent(
    spark: SparkSession,
) -> None:
    """Both runs use the same Python workers of the session, but fresh processes without state of the first run."""

    def found(base: int, *, step: int) -> tuple[Any, ...]:
        from sparkhvd import rendezvous

        here, current = context(), rendezvous.current_rendezvous()
        assert here is not None
        assert current is not None
        variables = os.environ.get("STALE"), os.environ.get("CUDA_VISIBLE_DEVICES")
        settings = current.settings.slots, current.settings.stall_shutdown_s
        place = base + step * here.rank, here.size, here.num_threads
        print("words of", here.rank)
        address = current.job.endpoints[here.rank].address  # type: ignore[attr-defined]  # of its way through sockets
        # Larger than one part.
        return os.getpid(), place, variables, settings, bytes([here.rank]) * (3 << 20), address

    conf = {"spark.sparkhvd.slots": "5", "spark.sparkhvd.stall_shutdown_s": "9"}
    conf["spark.executorEnv.OMP_NUM_THREADS"] = "3"
    env = {"STALE": "1", "CUDA_VISIBLE_DEVICES": "none", "SPARKHVD_STALL_SHUTDOWN_S": "20"}
    env["SPARKHVD_NURSERY"] = "0"  # a variable of CUDA would start another zygote
    for key, value in conf.items():
        spark.conf.set(key, value)
    output = io.StringIO()
    try:
        # By position as with Horovod: num_proc, start_timeout, use_mpi, use_gloo, extra_mpi_args, env, stdout.
        arguments = (100,), {"step": 5}, 2, 60.0, None, False, None, env, output
        python = spark.sparkContext.pythonExec
        first = sparkhvd.run(found, *arguments, executable=python, nics=["none0", "::1/128", "lo"])
    finally:
        for key in conf:
            spark.conf.unset(key)
    second = run(found, (100,), {"step": 5}, spark=spark)  # as many ranks as slots

    chosen = "::1" if "::1" in {each.address for each in interfaces()} else "127.0.0.1"
    assert {of_rank[5] for of_rank in first} == {chosen}
    assert {of_rank[5] for of_rank in second} != {"::1"}
    # Live output is in order of arrival.
    assert sorted(output.getvalue().splitlines()) == ["[0] words of 0", "[1] words of 1"]
    assert len({of_rank[0] for of_rank in (*first, *second)}) == 4
    default = Settings()
    for ranks, threads, variables, settings in (
        (first, 3, ("1", "none"), (5, 20.0)),  # `env` wins over the conf
        (second, 1, (None, None), (default.slots, default.stall_shutdown_s)),
    ):
        assert [of_rank[1] for of_rank in ranks] == [(100, 2, threads), (105, 2, threads)]
        assert [of_rank[2] for of_rank in ranks] == [variables] * 2
        assert [of_rank[3] for of_rank in ranks] == [settings] * 2
        assert [of_rank[4] for of_rank in ranks] == [b"\0" * (3 << 20), b"\1" * (3 << 20)]


@pytest.mark.usefixtures("threads_by_default")
def test_single_rank_run_uses_all_threads_and_leaves_no_files(spark: SparkSession) -> None:
    """The rank has a large argument and the user's job description, and all threads of `local`."""
    context = spark.sparkContext
    folder = Path(context._temp_dir)  # type: ignore[attr-defined]  # it has no public name
    before = set(folder.iterdir())

    def found(data: bytes) -> tuple[str, int, list[bytes]]:
        files = [file.read_bytes() for file in set(folder.iterdir()) - before]
        return os.environ["OMP_NUM_THREADS"], len(os.sched_getaffinity(0)), files

    context.setJobDescription("nightly")
    try:
        ((threads, processors, (program,)),) = run(
            found, args=(os.urandom(2 << 20),), num_proc=1, env={"SPARKHVD_NURSERY": "0"}
        )
        tracker = context._jsc.sc().statusStore()  # type: ignore[union-attr]  # classic

        def described() -> bool:
            jobs = tracker.jobsList(None)
            found = [jobs.apply(i).description() for i in range(jobs.size())]
            return any(
                d.isDefined() and d.get() == "nightly: sparkhvd: 1 ranks, attempt 1" for d in found
            )

        wait_until(described, "Spark's UI shows the description")
        assert context.getLocalProperty("spark.job.description") == "nightly"
    finally:
        context.setJobDescription(None)  # type: ignore[arg-type]  # None clears
    assert threads == str(min(2, processors))
    assert len(program) > 2 << 20
    assert b'"job_id"' not in program  # of the JSON that holds the key
    assert set(folder.iterdir()) == before


def test_modules_added_to_spark_import_and_spark_files_resolve(
    spark: SparkSession, tmp_path: Path
) -> None:
    name = f"added_{os.getpid()}_module"
    (tmp_path / f"{name}.py").write_text("def answer():\n    return 42\n")
    (tmp_path / "data.txt").write_text("contents")
    spark.addArtifacts(str(tmp_path / f"{name}.py"), pyfile=True)
    spark.addArtifacts(str(tmp_path / "data.txt"), file=True)

    def uses(module: str) -> tuple[int, str]:
        import importlib

        from pyspark import SparkFiles

        text = Path(SparkFiles.get("data.txt")).read_text()
        return importlib.import_module(module).answer(), text

    assert run(uses, (name,), num_proc=1, spark=spark) == [(42, "contents")]


def test_an_exception_names_its_rank_and_the_next_run_works(
    spark: SparkSession, tmp_path: Path
) -> None:
    def fails_on_one() -> None:
        if os.environ["RANK"] == "1":
            print("before it failed")
            faults.note()
            raise KeyError("missing piece")
        time.sleep(60)

    env = {faults.HAPPENED_AT: str(tmp_path / "raised")}
    with pytest.raises(RankError) as e:
        run(fails_on_one, num_proc=2, spark=spark, env=env)
    assert faults.seconds_since(tmp_path / "raised") < 10
    assert (e.value.rank, e.value.host, e.value.exit) == (1, "127.0.0.1", "exception")
    first, second, third, *_, last = str(e.value).splitlines()
    assert re.search(r'test_run\.py:\d+: raise KeyError\("missing piece"\)$', first)
    assert second == "Rank 1 of 2 on host 127.0.0.1 raised KeyError: 'missing piece'"
    assert third.startswith("Traceback")
    assert last == "KeyError: 'missing piece'"
    assert e.value.error_type == "KeyError"
    assert repr(e.value.__cause__) == "KeyError('missing piece')"
    assert e.value.__suppress_context__
    assert 'raise KeyError("missing piece")' in e.value.traceback
    assert e.value.log_tail == "before it failed"
    assert "org.apache.spark" not in str(e.value)
    assert run(lambda: 1, num_proc=2, spark=spark) == [1, 1]


def test_arguments_that_cannot_be_pickled_are_refused_before_launch(spark: SparkSession) -> None:
    with pytest.raises(InvalidArgumentError, match=r"args\[0\], a _thread.lock"):
        run(print, (threading.Lock(),), num_proc=2, spark=spark)
    with pytest.raises(InvalidArgumentError, match="cannot be pickled"):
        run(lambda: spark.range(1), num_proc=2, spark=spark)


def test_more_ranks_than_slots_raise_immediately(spark: SparkSession) -> None:
    seconds = []
    for _ in range(3):  # Spark answers late while its JVM collects garbage
        began = time.monotonic()
        with pytest.raises(PreflightError, match=r"num_proc=3: the application can run 2 barrier"):
            run(print, num_proc=3, spark=spark)
        seconds.append(time.monotonic() - began)
    assert min(seconds) < 1


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"num_proc": 0}, "num_proc is 0"),
        ({"max_retries": -1}, "max_retries is -1"),
        ({"start_timeout": 0}, "start_timeout is 0"),
        ({"env": {"A": 1}}, r"env\['A'\] is 1"),
        ({"env": {"HOROVOD_FUSION_THRESHOLD": "-5"}}, "HOROVOD_FUSION_THRESHOLD is -5; it must be"),
        ({"executable": "/no/python"}, "and the ranks run '.*'. Set spark.pyspark.python"),
        ({"spark": "local[2]"}, "spark is 'local\\[2\\]'; it must be a SparkSession"),
    ],
)
def test_error_names_wrong_arguments_of_run(spark: SparkSession, wrong: Any, says: str) -> None:
    with pytest.raises(InvalidArgumentError, match=says):
        run(print, **{"spark": spark, "num_proc": 1, **wrong})


def test_a_spark_idle_timeout_that_kills_workers_is_refused(spark: SparkSession) -> None:
    seconds = "spark.sql.execution.pyspark.udf.idleTimeoutSeconds"
    kill = "spark.sql.execution.pyspark.udf.killOnIdleTimeout"
    spark.conf.set(seconds, "60")
    spark.conf.set(kill, "true")
    try:
        with pytest.raises(PreflightError, match=f"Set {re.escape(kill)}=false"):
            run(print, num_proc=1, spark=spark)
    finally:
        spark.conf.unset(seconds)
        spark.conf.unset(kill)


def test_error_names_a_module_missing_on_workers_and_their_python(spark: SparkSession) -> None:
    options = job.LaunchOptions(requirements=("surely_no_such_module",))
    with pytest.raises(PreflightError) as e:
        job.launch(SparkShim(spark), print, (), {}, 1, options)
    assert re.fullmatch(
        r"The workers run \S+python\S* \(rank 0 on host \S+\), which has no surely_no_such_module. Set "
        r"PYSPARK_PYTHON \(spark.pyspark.python\) to a Python that has it, or install it there.",
        str(e.value),
    )


def test_error_names_the_worker_python_without_the_package(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The same Python without the checkout on its path, like a cluster before the installation.
    bare = tmp_path / "bare"
    bare.mkdir()
    # Runs in every Python that starts with this folder on its path, whatever installed the package.
    (bare / "sitecustomize.py").write_text(
        "import sys\n"
        "class Blocked:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'sparkhvd':\n"
        "            raise ModuleNotFoundError(name, name=name)\n"
        "sys.meta_path.insert(0, Blocked())\n"
    )
    wrapper = tmp_path / "bare-python"
    python = os.environ["PYSPARK_PYTHON"]
    wrapper.write_text(f'#!/bin/sh\nPYTHONPATH="{bare}:$PYTHONPATH" exec {python} "$@"\n')
    wrapper.chmod(0o755)
    # As if the session had been started with spark.pyspark.python.
    monkeypatch.setattr(spark.sparkContext, "pythonExec", str(wrapper))
    with pytest.raises(PreflightError, match="The workers run .*which has no module sparkhvd"):
        run(print, num_proc=1, spark=spark)


def test_rank_outcomes_are_stored_and_reported(spark: SparkSession, tmp_path: Path) -> None:
    def body() -> str:
        print(f"rank {os.environ['RANK']}")
        return os.environ["RANK"]

    files = Files(str(tmp_path))
    options = job.LaunchOptions(
        shared=files,
        run_dir="runs/a",
        requirements=("numpy",),
        env={"SPARKHVD_NURSERY": "0"},
    )
    report = job.launch(SparkShim(spark), body, (), {}, 2, options)
    assert report.results == ["0", "1"]
    assert report.attempts == 1
    assert 0 < report.launch_s < 60
    for rank, outcome in enumerate(report.outcomes):
        assert (outcome.rank, outcome.kind, outcome.exit) == (rank, "ok", "ok")
        assert outcome.log_tail == (f"rank {rank}",)
        assert outcome.peak_rss_bytes > 1 << 20
        stored = Outcome.from_json(files.read_bytes(f"runs/a/attempts/0/rank-{rank}.json").decode())
        assert stored == outcome


def test_run_id_can_be_reused_after_a_fixed_failure(spark: SparkSession, tmp_path: Path) -> None:
    """The second launch ignores the outcomes of the first."""

    def fails() -> None:
        raise ValueError("everywhere")

    options = job.LaunchOptions(shared=Files(str(tmp_path)), run_dir="runs/a", max_retries=0)
    # Spark kills the other rank's task when one ends, and both may have reported their outcomes.
    with pytest.raises(RankError, match="raised ValueError: everywhere"):
        job.launch(SparkShim(spark), fails, (), {}, 2, options)

    def lose_rank_1(ended: Path) -> None:
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        while not ended.exists():  # rank 0 reports nothing itself
            time.sleep(0.05)

    with pytest.raises(RankError) as raised:
        job.launch(SparkShim(spark), lose_rank_1, (tmp_path / "ended",), {}, 2, options)
    (tmp_path / "ended").touch()
    # `is_retryable` counts this as a loss: with retries it would have been launched again.
    assert (raised.value.rank, raised.value.exit) == (1, "signal SIGKILL")


def test_an_unshared_store_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    options = job.LaunchOptions(shared=FilesOfOneProcess(str(tmp_path)), run_dir="runs/a")
    with pytest.raises(PreflightError) as e:
        job.launch(SparkShim(spark), print, (), {}, 2, options)
    assert str(e.value).startswith("The store is not shared: the driver wrote runs/a/attempts/0/")
    assert f"in file://{tmp_path}" in str(e.value)


def test_store_that_the_driver_cannot_write_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    options = job.LaunchOptions(shared=Files(str(tmp_path)), run_dir="runs/a")
    with pytest.raises(PreflightError, match="The driver cannot write runs/a/attempts/0/token-dr"):
        job.launch(SparkShim(spark), print, (), {}, 2, options)


def test_jobs_that_need_all_slots_run_in_sequence(spark: SparkSession) -> None:
    def spans() -> tuple[float, float]:
        began = time.time()
        time.sleep(0.3)
        return began, time.time()

    with ThreadPoolExecutor(2) as threads:
        jobs = [threads.submit(run, spans, num_proc=2, spark=spark) for _ in range(2)]
        first, second = sorted(job.result(120) for job in jobs)
    assert max(end for _, end in first) < min(start for start, _ in second)


@pytest.mark.parametrize("verbose", [1, 0])
def test_waiting_for_free_slots_is_reported(
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    verbose: int,
) -> None:
    """A job of the user holds a slot."""
    monkeypatch.setattr(job, "_LATE_S", 0.5)
    ends = str(tmp_path / "ends")

    def holds(number: int) -> int:
        deadline = time.monotonic() + 60
        while not os.path.exists(ends) and time.monotonic() < deadline:
            time.sleep(0.05)
        return number

    printed = ""

    def is_printed() -> bool:
        nonlocal printed
        printed += capsys.readouterr().err
        return "Waiting" in printed

    tracker = spark.sparkContext.statusTracker()
    with ThreadPoolExecutor(2) as threads:
        held = threads.submit(lambda: spark.sparkContext.parallelize([1], 1).map(holds).collect())
        wait_until(tracker.getActiveStageIds, "the slot is held", within_s=60)
        launched = threads.submit(run, os.getpid, num_proc=2, spark=spark, verbose=verbose)
        if verbose:
            wait_until(is_printed, "the line", within_s=30)
        else:
            time.sleep(2.0)
        Path(ends).touch()
        assert held.result(60) == [1]
        launched.result(60)
    if verbose:
        assert (
            "sparkhvd: Waiting for task slots: the ranks need 2 at once. 1 task of other jobs of this application runs.\n"
            in printed
        )
        printed = ""
        run(time.sleep, (1.0,), num_proc=2, spark=spark)
    assert not is_printed()


def test_concurrent_jobs_end_independently(spark: SparkSession, tmp_path: Path) -> None:
    def stays(name: str, folder: str) -> str:
        Path(folder, name).touch()
        deadline = time.monotonic() + 60
        while not Path(folder, f"end-{name}").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        if name == "fails":
            raise ValueError("on purpose")
        return name

    def launches(name: str) -> list[str]:
        spark.sparkContext.addJobTag(f"mine-{name}")
        try:
            return run(stays, (name, str(tmp_path)), num_proc=1, spark=spark)
        finally:
            spark.sparkContext.removeJobTag(f"mine-{name}")

    def await_rank(name: str) -> None:
        wait_until(Path(tmp_path, name).exists, f"the rank of {name!r} runs", within_s=60)

    with ThreadPoolExecutor(2) as threads:
        good = threads.submit(launches, "good")
        for name, exit_ in (("fails", "exception"), ("cancelled", "cancelled")):
            bad = threads.submit(launches, name)
            await_rank(name)
            await_rank("good")
            Path(tmp_path, "end-fails").touch()
            if name == "cancelled":
                spark.sparkContext.cancelJobsWithTag("mine-cancelled")
            with pytest.raises(RankError) as raised:
                bad.result(60)
            assert raised.value.exit == exit_
            assert not good.done()
        Path(tmp_path, "end-good").touch()
        assert good.result(60) == ["good"]


def test_interrupt_ends_a_job_submitted_afterwards(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    shim, is_cancelled = SparkShim(spark), threading.Event()
    cancel = shim.cancel

    def cancels(tag: str) -> None:
        cancel(tag)
        is_cancelled.set()

    def sleeps(batches: Any) -> Any:
        time.sleep(120)
        yield from batches

    class Stage:
        def collect(self) -> list[Any]:
            os.kill(os.getpid(), signal.SIGINT)
            assert is_cancelled.wait(20)
            return spark.range(1).mapInArrow(sleeps, "id long").collect()

    monkeypatch.setattr(shim, "cancel", cancels)
    with pytest.raises(KeyboardInterrupt):
        shim.collect(Stage(), "interrupted")
    wait_until(
        lambda: "sparkhvd-collect" not in {thread.name for thread in threading.enumerate()},
        "the job is cancelled",
    )
    assert not spark.sparkContext.statusTracker().getActiveJobsIds()


@soak("jobs side by side, jobs that take turns, a cancelled job, an exception, here")
def test_concurrent_random_jobs_end_with_their_own_outcomes(
    spark: SparkSession, tmp_path: Path
) -> None:
    """No launch, Spark job or thread is left after any combination."""
    context_ = spark.sparkContext
    draw = random.Random(7)

    def body(kind: str, place: str) -> str:
        Path(place).touch()
        if kind == "fails":
            raise ValueError("on purpose")
        if kind == "cancelled":
            time.sleep(120)
        return kind

    def launches(kind: str, size: int, place: Path) -> str:
        context_.addJobTag(place.name)
        try:
            return run(body, (kind, str(place)), num_proc=size, spark=spark, verbose=0)[-1]
        except RankError as e:
            return str(e.exit)
        finally:
            context_.removeJobTag(place.name)

    def cancels(place: Path) -> None:
        wait_until(place.exists, "a rank runs", within_s=120)
        context_.cancelJobsWithTag(place.name)

    for sequence in range(30):
        with ThreadPoolExecutor(8) as threads:
            kinds = draw.sample(["cancelled", "fails", "good", "good"], 4)
            jobs = []
            for number, kind in enumerate(kinds):
                place = tmp_path / f"{sequence}-{number}"
                jobs.append(threads.submit(launches, kind, draw.randint(1, 2), place))
                if kind == "cancelled":
                    threads.submit(cancels, place)
            ended = [job.result(180) for job in jobs]
        assert ended == ["exception" if kind == "fails" else kind for kind in kinds], sequence
        assert not slots.is_launched(context_.applicationId)
        wait_until(lambda: not context_.statusTracker().getActiveJobsIds(), "no Spark job is left")
        left = [one.name for one in threading.enumerate() if one.name.startswith("sparkhvd-")]
        assert left == []


@soak("jobs run side by side, here: one of them is cancelled")
def test_cancelled_job_ends_its_ranks(spark: SparkSession, tmp_path: Path) -> None:
    def stays(folder: str) -> None:
        Path(folder, os.environ["RANK"]).touch()
        time.sleep(60)

    raised: list[BaseException] = []

    def launches() -> None:
        try:
            run(stays, (str(tmp_path),), num_proc=2, spark=spark)
        except RankError as e:
            raised.append(e)

    thread = threading.Thread(target=launches)
    thread.start()
    wait_until(lambda: len(list(tmp_path.iterdir())) >= 2, "both ranks have started", within_s=30)
    spark.sparkContext.cancelAllJobs()
    thread.join(20)
    assert not thread.is_alive()
    assert [e.exit for e in raised if isinstance(e, RankError)] == ["cancelled"]


def test_launch_options_can_be_replaced_and_are_checked() -> None:
    options = job.LaunchOptions()
    assert replace(options, max_retries=0).max_retries == 0
    with pytest.raises(InvalidArgumentError, match="shared and run_dir belong together"):
        job.LaunchOptions(run_dir="runs/a")


def test_reading_many_conf_keys_equals_reading_each_key(spark: SparkSession) -> None:
    odd = "spark.sparkhvd.testOdd"
    spark.conf.set(odd, "a -> b, (c)\n=d ünïcode")
    try:
        keys = [*slots.SLOT_CONF_KEYS, *conf_keys(), odd, "spark.driver.host", "spark.none"]
        known = {key: value for key in keys if (value := spark.conf.get(key, None)) is not None}
        assert odd in known
        assert SparkShim(spark).conf(keys) == known
    finally:
        spark.conf.unset(odd)
