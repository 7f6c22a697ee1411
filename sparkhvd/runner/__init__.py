"""Run a function or a command on every rank: in a Spark barrier stage, on this host, or over ssh.

    from sparkhvd import run

    def train(steps):
        import sparkhvd.torch as hvd

        hvd.init()
        ...
        return hvd.rank()

    run(train, args=(100,), num_proc=4, spark=spark)  # [0, 1, 2, 3]

Start: a launch plans its slots (`slots`), checks the cluster (`preflight`) and starts one process per rank, the trainer
(`trainer`). Under Spark a barrier task is its parent (`job`, `task`), without Spark the caller (`local`) or an agent on
each host (`hosts`). The zygote of the process or executor forks trainers of later launches (`zygote`, `zygote_client`,
`prewarm`). `sparkhvdrun` starts the user's command instead (`command`, `script`, `local_processes`). Elastic jobs
replace ranks that fail (`elastic`).

Communication: the parent sends a trainer its function and job over a pipe and reads results and messages from another
(`protocol`). Facts of all ranks travel through Spark's barrier, ssh or the parent. Output and Ctrl-C have a port of the
driver each (`live`, `interrupts`, `driver_port`). Nothing of Spark is imported here, so a rank may import this package
cheaply.

End: a rank's result, exception or signal reaches the driver as data (`outcomes`), which raises the root cause as a
`RankError` and relaunches only after a lost process, executor or host. A trainer watches its parent's pipe, dies with
it, and takes its process group along. `run_local` and `run_hosts` also kill processes in other sessions (`orphans`).
After Ctrl-C the function has 5 s to save.

Threads: several threads of the driver may launch; slots are assigned in call order. In a task, threads read the
trainer's pipes and one waits for Ctrl-C. A trainer calls the function on its main thread and watches its parent on
another.

Trust: the job's key and the pickled function come from the driver's closure, through Spark, ssh's standard input or the
parent's pipe. The key is never in argv, the environment or a file. The driver unpickles only what its own ranks return.
Its ports accept only tasks that prove a key derived from the attempt's.

Each module imports only those above it:

    allocator          memory allocator of trainers: keeps freed memory for the next step
    driver_port        a port of the driver for its tasks, authenticated on both sides
    host_names         hosts, their slots, and the placement of ranks
    loggers            loggers of `run(fn)`, and the load of its ranks
    orphans            kills processes that a launch leaves behind, also if its launcher is killed
    output             lines of a rank's output
    processes          processes of a launch, fresh or forked: start, signals, end
    protocol           frames between a task and its trainer, pickled functions, broadcast payloads
    slots              task slots of a launch, assigned in call order
    tracebacks         tracebacks of ranks as the driver shows them
    local_processes    ranks of this host that run the user's command
    outcomes           outcomes of ranks as data, and their root cause
    reports            a trainer's report on its function
    zygote_client      starts the zygote of this process or executor, and asks it for forks
    horovod_arguments  arguments of Horovod's `run` without effect, or with one right value
    live               live output of ranks on the driver
    preflight          checks before ranks start
    results            results of ranks in pieces below Spark's limits
    trainer            parent's side of a trainer process
    gpu                one GPU per rank
    interrupts         Ctrl-C, from the driver to the ranks
    options            options and result of a launch under Spark
    outcome_files      outcomes of ranks as files of the run
    child              the trainer process
    doctor             `sparkhvd doctor`: what this machine supports
    launching          code shared by launches under Spark and on this host
    prewarm            starts zygotes from tasks of an earlier Spark job
    live_output        live output of one attempt, on the driver
    local              launches on this host: `run_local`
    supervisor         waits for the ranks of a command and shuts them down together
    task               executor's side of a launch under Spark
    zygote             the zygote process
    hosts              a function or command on several hosts over ssh: `run_hosts`
    job                driver's side of a launch under Spark: `run`
    script             the user's command on this host
    elastic            elastic training: commands, and functions under Spark (`run_elastic`)
    command            the command line: `sparkhvdrun`
    horovod_runner     Databricks' `HorovodRunner`
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TextIO, TypeVar

from sparkhvd.runner.elastic.function import run_elastic
from sparkhvd.topology import RankContext, context

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile
    from pyspark.sql import SparkSession

    from sparkhvd.observe.loggers.base import Logger, Metric
    from sparkhvd.settings import Settings

__all__ = ["RankContext", "context", "run", "run_elastic", "run_hosts", "run_local"]

R = TypeVar("R")


def run(
    fn: Callable[..., R],
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    num_proc: int | None = None,
    start_timeout: float | None = None,
    use_mpi: bool | None = None,
    use_gloo: bool | None = None,
    extra_mpi_args: str | None = None,
    env: Mapping[str, str] | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    verbose: int = 1,
    nics: Iterable[str] | str | None = None,
    prefix_output_with_timestamp: bool = False,
    executable: str | None = None,
    *,
    spark: SparkSession | None = None,
    settings: Settings | None = None,
    max_retries: int = 2,
    use_gpu: bool | None = None,
    profile: ResourceProfile | None = None,
    loggers: Sequence[Logger] | Callable[[Sequence[Metric]], None] | None = None,
) -> list[R]:
    """Call `fn(*args, **kwargs)` on `num_proc` ranks in one Spark barrier stage, and return results by rank.

    Each rank is a process beside a Spark task. `sparkhvd.torch.init()` connects the ranks. The standard torch variables
    (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT) are set too. Jobs launched from several threads of one
    Spark application run side by side while its task slots suffice. A job that does not fit waits, and later jobs do
    not overtake it. Jobs whose ranks find GPUs by local rank take turns.

    Output of a rank is shown line by line, prefixed with its [rank], while the rank runs: on `stdout`, else on stderr,
    in a notebook in the cell. It never blocks a rank. Lines beyond 2,000 lines or 1 MiB per second and rank are left
    out here and counted; the executor's log has all of them. Over Spark Connect the executors may not reach the client:
    one line says so after 10 s. A fit's lines travel through its store. See `sparkhvd.log_to_driver(message)` and
    docs/monitoring.md.

    Ctrl-C raises KeyboardInterrupt in `fn` on every rank, as with `run_local`, and then cancels the Spark job. `fn` has
    5 s to save before it is killed; a second Ctrl-C kills it at once. This requires a launch from the main thread, and
    executors that reach the driver (docs/training.md). A job cancelled in Spark (its UI, `cancelJobGroup`), or one that
    loses its executor, ends without notice.

    Args:
        fn: any picklable function, also from a notebook cell, `__main__` or a `--py-files` module.
        args: positional arguments of `fn`.
        kwargs: keyword arguments of `fn`.
        num_proc: number of ranks. None means every task slot of the configured cluster: N for `local[N]`, executors x
            (cores // `spark.task.cpus`) elsewhere, or every GPU where Spark gives ranks GPUs (with `use_gpu=True` on
            `local[N]`: at most this host's). An error where the configuration sets no limit.
        start_timeout: longest wait in seconds for enough task slots; None means `Settings.start_timeout_s`. Waiting for
            other jobs of this application does not count.
        use_mpi: Horovod's, without effect: sparkhvd has one transport of its own.
        use_gloo: the same.
        extra_mpi_args: the same.
        env: environment variables of the ranks, set before `fn` and its modules load. Settings among them (SPARKHVD_*,
            HOROVOD_*) override this process's environment and the Spark conf.
        stdout: a stream of this process for the ranks' live output. Where ranks do not reach it, it gets the last lines
            at the end.
        stderr: the same, if `stdout` is not given: both streams of a rank are one pipe.
        verbose: 0 prints nothing on the driver; 1 prints the ranks' output, waits and relaunches; 2 also keeps Spark's
            own log of a failed rank.
        nics: interfaces that the ranks use, by name or as networks (10.0.0.0/8). None means `Settings.interfaces`, else
            the address that Spark has for their host (SPARK_LOCAL_IP there), with a `local` master the loopback
            interface.
        prefix_output_with_timestamp: whether lines start with the local time, here and in the executors' logs.
        executable: the Python that Spark's workers run; any other is an error.
        spark: the session to use, classic or Connect; None means the active one.
        settings: engine settings. Values other than the defaults are final. None reads them from the Spark conf
            (`spark.sparkhvd.*`) and this process's environment.
        max_retries: relaunches after a lost process, executor or host. An exception of `fn` is never retried.
        use_gpu: True: every rank gets a GPU of its own, which `hvd.init()` makes torch's current device
            (`context().gpu` is its index), or the job fails before `fn` starts. False: the ranks see no GPU. None: True
            if Spark gives tasks GPUs, else the ranks see the GPUs of their executor. See docs/gpus.md.
        profile: Spark resource profile of the stage (pyspark 4 and a cluster master). Where Spark gives ranks GPUs,
            None requests a GPU and its share of the cores per rank.
        loggers: such as [sparkhvd.MLflowLogger()], or a function that gets lists of `Metric` in a thread. They receive the ranks'
            `sparkhvd.log_metrics` and load, live. See docs/monitoring.md#loggers.

    Returns:
        The results of `fn` on rank 0, 1, ...

    Raises:
        InvalidArgumentError: an argument is wrong, or `fn` cannot be pickled. Nothing has started.
        PreflightError: the cluster cannot run this job; the message has the remedy. `fn` has not started.
        RankError: `fn` failed on a rank; it has the rank, host, and traceback or signal.
    """
    from sparkhvd.runner import horovod_arguments, job
    from sparkhvd.runner.loggers import attach_loggers
    from sparkhvd.runner.options import LaunchOptions
    from sparkhvd.spark import SparkShim, active_session

    stream = horovod_arguments.choose_stream(stdout, stderr)
    facts = {"num_proc": num_proc}
    horovod_arguments.warn_of(use_mpi=use_mpi, use_gloo=use_gloo, extra_mpi_args=extra_mpi_args)
    interfaces = horovod_arguments.join_interfaces(nics)
    options = LaunchOptions(
        env={**(env or {}), **({"SPARKHVD_INTERFACES": interfaces} if interfaces else {})},
        settings=settings,
        start_timeout_s=start_timeout,
        max_retries=max_retries,
        verbose=verbose,
        use_gpu=use_gpu,
        profile=profile,
        timestamps=prefix_output_with_timestamp,
        stream=stream,
    )
    shim = SparkShim(active_session() if spark is None else spark)
    horovod_arguments.check_executable(
        executable,
        shim.worker_python(),
        "Set spark.pyspark.python or PYSPARK_PYTHON to it before the session starts.",
    )
    with attach_loggers(loggers, fn, facts, verbose) as (metrics, called):
        options = replace(options, metrics=metrics)
        return job.launch(shim, called, args, kwargs or {}, num_proc, options).results


def run_local(
    fn: Callable[..., R],
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    num_proc: int = 1,
    *,
    env: Mapping[str, str] | None = None,
    settings: Settings | None = None,
    verbose: int | None = 1,
    use_gpu: bool | None = None,
    hosts: str | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    prefix_output_with_timestamp: bool = False,
    executable: str | None = None,
    start_timeout: float | None = None,
    use_mpi: bool | None = None,
    use_gloo: bool | None = None,
    mpi_args: str | None = None,
    network_interfaces: Iterable[str] | str | None = None,
    loggers: Sequence[Logger] | None = None,
) -> list[R]:
    """Call `fn(*args, **kwargs)` on `num_proc` processes of this host, without Spark, and return results by rank.

    The processes are those of `run`, so a program can be tried without a cluster. Never relaunched.

    Ctrl-C raises KeyboardInterrupt in `fn` on every rank, also while it waits in a collective. `fn` has 5 s to save in
    its `except` or `finally` before it is killed; a second Ctrl-C kills it at once. If this process is killed, the
    ranks are too.

    Args:
        fn: any picklable function.
        args: positional arguments of `fn`.
        kwargs: keyword arguments of `fn`.
        num_proc: number of processes, at least 1.
        env: environment variables of the ranks, set before `fn` and its modules load. Settings among them (SPARKHVD_*,
            HOROVOD_*) override this process's environment.
        settings: engine settings. Values other than the defaults are final. None reads them from this process's
            environment.
        verbose: 0 hides the ranks' output, unless a stream is given; 1, or Horovod's None, prints it to stderr, each
            line prefixed with its [rank].
        use_gpu: True: every rank gets a GPU of its own (`context().gpu` is its index in the process), or the job fails
            before `fn` starts. False: the ranks see no GPU. None: they see the GPUs of this process.
        hosts: Horovod's "name:slots"; only this host, with a slot for each rank.
        stdout: a stream for the ranks' output, line by line.
        stderr: the same, if `stdout` is not given: both streams of a rank are one pipe.
        prefix_output_with_timestamp: whether lines start with the local time.
        executable: the Python of this process; any other is an error.
        start_timeout: Horovod's, without effect: processes of this host start at once.
        use_mpi: Horovod's, without effect: sparkhvd has one transport of its own.
        use_gloo: the same.
        mpi_args: the same.
        network_interfaces: Horovod's, without effect: the ranks use the loopback interface.
        loggers: as for `run`.

    Returns:
        The results of `fn` on rank 0, 1, ...

    Raises:
        InvalidArgumentError: an argument is wrong, or `fn` cannot be pickled. Nothing has started.
        PreflightError: the processes may have too little address space for torch, or too few GPUs. `fn` has not
            started.
        RankError: `fn` failed on a rank; it has the rank, and traceback or signal.
    """
    from sparkhvd.runner import horovod_arguments, local
    from sparkhvd.runner.loggers import attach_loggers

    horovod_arguments.warn_of(
        start_timeout=start_timeout,
        use_mpi=use_mpi,
        use_gloo=use_gloo,
        mpi_args=mpi_args,
        network_interfaces=network_interfaces,
    )
    horovod_arguments.check_executable(
        executable, sys.executable, "Start this program with the one that the ranks need."
    )
    verbose = 1 if verbose is None else verbose
    stream = horovod_arguments.choose_stream(stdout, stderr)
    with attach_loggers(loggers, fn, {"num_proc": num_proc}, verbose) as (metrics, called):
        return local.launch_local(
            called,
            args,
            kwargs or {},
            num_proc,
            env=dict(env or {}),
            settings=settings,
            verbose=verbose,
            use_gpu=use_gpu,
            hosts=hosts,
            stream=stream,
            timestamps=prefix_output_with_timestamp,
            metrics=metrics,
        )


def run_hosts(
    fn: Callable[..., R],
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    num_proc: int | None = None,
    *,
    hosts: str | None = None,
    hostfile: str | None = None,
    env: Mapping[str, str] | None = None,
    settings: Settings | None = None,
    verbose: int | None = 1,
    use_gpu: bool | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    start_timeout: float | None = None,
    network_interfaces: Iterable[str] | str | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    prefix_output_with_timestamp: bool = False,
    loggers: Sequence[Logger] | None = None,
) -> list[R]:
    """Call `fn(*args, **kwargs)` on processes of several hosts over ssh, and return results by rank.

    The processes are those of `run_local`, without Spark. ssh must reach every host without a password. Every host has
    this Python, at the same path and in the same minor version, this version of the package, and the working directory.
    Never relaunched. Output is shown live, each line prefixed with its [rank].

    Ctrl-C raises KeyboardInterrupt in `fn` on every rank. `fn` has 5 s to save before it is killed; a second Ctrl-C
    kills it at once. If this process is killed, or the connection to a host is lost, all ranks end.

    Args:
        fn: any picklable function.
        args: positional arguments of `fn`.
        kwargs: keyword arguments of `fn`.
        num_proc: number of processes; None means every slot. Hosts are filled in order.
        hosts: "name:slots,name:slots". Names of this host need no ssh.
        hostfile: alternatively, a file with lines `name slots=N` or `name:N`.
        env: environment variables of the ranks, set before `fn` and its modules load, in addition to those of an ssh
            login and those forwarded automatically (docs/launchers.md). Settings among them override this process's
            environment.
        settings: engine settings. Values other than the defaults are final. None reads them from this process's
            environment.
        verbose: 0 hides the ranks' output, unless a stream is given; 1, or Horovod's None, prints it to stderr.
        use_gpu: as for `run_local`.
        ssh_port: of the other hosts; None means ssh's configuration.
        ssh_identity_file: private key for ssh; None likewise.
        start_timeout: longest wait in seconds for each step of the start; None means 30. A host has 10 s to answer at
            all.
        network_interfaces: interfaces that the ranks use, by name or as networks (10.0.0.0/8). None means the address
            at which ssh reached a host, or `Settings.interfaces`.
        stdout: a stream for the ranks' output, line by line.
        stderr: the same, if `stdout` is not given: both streams of a rank are one pipe.
        prefix_output_with_timestamp: whether lines start with the local time.
        loggers: as for `run`.

    Returns:
        The results of `fn` on rank 0, 1, ...

    Raises:
        InvalidArgumentError: an argument is wrong, or `fn` cannot be pickled. Nothing has started.
        PreflightError: hosts cannot run their ranks or do not reach each other; all of them are listed. `fn` has not
            started.
        RankError: `fn` failed on a rank, or a host was lost; it has the rank, host, and traceback or signal.
    """
    from sparkhvd.runner import horovod_arguments
    from sparkhvd.runner.hosts import run as function
    from sparkhvd.runner.loggers import attach_loggers

    options = function.HostsOptions(
        hosts=hosts,
        hostfile=hostfile,
        env=dict(env or {}),
        settings=settings,
        verbose=1 if verbose is None else verbose,
        use_gpu=use_gpu,
        interfaces=horovod_arguments.join_interfaces(network_interfaces),
        ssh_port=ssh_port,
        ssh_identity_file=ssh_identity_file,
        start_timeout_s=start_timeout,
        stream=horovod_arguments.choose_stream(stdout, stderr),
        timestamps=prefix_output_with_timestamp,
    )
    facts = {"num_proc": num_proc, "hosts": hosts}
    with attach_loggers(loggers, fn, facts, options.verbose) as (metrics, called):
        options = replace(options, metrics=metrics)
        return function.launch_on_hosts(called, args, kwargs or {}, num_proc, options)
