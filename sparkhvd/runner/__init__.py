"""Run a function on every rank: in one Spark barrier stage, in processes on this host, or on several by ssh.

    from sparkhvd import run

    def train(steps):
        import sparkhvd.torch as hvd

        hvd.init()
        ...
        return hvd.rank()

    run(train, args=(100,), num_proc=4, spark=spark)  # [0, 1, 2, 3]

The function runs in a process per rank of its own, its trainer, which the rank's task starts or a nursery forks. Nothing of Spark is imported
here, so a rank may import this package cheaply.

Threads: launches may come from several threads of the driver; they take task slots in the order of their calls (`admission`). In a
task, threads read the trainer's pipes, and one waits for Ctrl-C (`interrupts`). A trainer calls the function on its main thread; one more
watches its parent. Live output has a thread per task that prints, and one on the driver (`live`).

Trust: the job's key and the pickled function come from the driver's closure, through Spark, ssh's standard input or the parent's pipe; the
key is never in argv, environment or a file. The driver unpickles what its own ranks return. It has two ports, for live output and for Ctrl-C, at which only tasks are
heard that know a key derived from the attempt's.

Failure: a rank's result, exception or signal comes to the driver as data (`outcomes`); the root cause is raised as a `RankError`. Only a
lost process, executor or host is relaunched. What can be known before ranks start is checked by `preflight`.

Shutdown: a trainer ends with its task, whose pipe it watches, and takes the processes of its group along; `run_local` and `run_hosts` also
end those in sessions of their own (`orphans`). After Ctrl-C the function has 5 s to save.

Each module imports only those above it:

    allocator          memory that trainers keep for the next step
    driver_port        a port of the driver for tasks, and the proof of both ends
    host_names         hosts, their slots, and who runs where
    loggers            load of the ranks of `run(fn)`, for its loggers
    orphans            processes that ranks have started and left behind, also in sessions of their own: found by a mark in their variables
    output             lines of a rank's output, with or without an end
    processes          fresh and forked processes of trainers
    protocol           frames on the pipe from a task to its trainer
    slots              task slots for launches, in the order of their calls
    tracebacks         tracebacks of ranks as the driver shows them
    local_processes    ends what ranks have started and left behind
    outcomes           values and errors of ranks as data
    reports            a trainer's report on its function
    zygote_client      the nursery of a process or an executor, which forks trainers of later launches
    horovod_arguments  arguments of Horovod's `run` without effect, or with one right value
    live               output of ranks on the driver while they run
    preflight          checks before anything long starts
    results            results of ranks by pieces, below Spark's limit
    trainer            parent's side of a trainer process
    gpu                a GPU for each rank
    interrupts         Ctrl-C, from the driver to the ranks
    options            options and result of a launch under Spark
    outcome_files      outcomes of ranks as files of the run
    child              the trainer process
    doctor             what this machine can do and lacks
    launching          what launches under Spark and on this host share
    prewarm            head start of a launch: tasks of an earlier Spark job start the nurseries that will fork its trainers
    live_output        live output, or the last lines, of an attempt on the driver
    local              launches on this host: `run_local`
    supervisor         wait for the ranks of a script, here or on other hosts, and end them together
    task               executor's side of a launch under Spark
    zygote             the nursery process
    hosts              the user's command, or a function, on several hosts: `run_hosts`
    job                driver's side of a launch under Spark: `run`
    script             the user's command on this host
    elastic            the user's command on ranks that come and go, and a function under Spark: `run_elastic`
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

    from sparkhvd.observe.loggers.base import Logger
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
    loggers: Sequence[Logger] | None = None,
) -> list[R]:
    """Call `fn(*args, **kwargs)` on `num_proc` ranks in one Spark barrier stage; return results by rank.

    Each rank is a fresh process beside a Spark task, with its own rendezvous installed: `sparkhvd.torch.init()`
    connects the ranks. The standard torch variables (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT)
    are set too. Jobs that several threads launch in one Spark application run side by side where its task slots allow
    it; a job that does not fit waits, and no later one overtakes it. Jobs whose ranks find GPUs by local rank take turns.

    Output of a rank comes line by line, after its [rank], to this process while the rank runs: to `stdout`, else to stderr, in a notebook to
    the cell. It never makes a rank wait: of more than 2,000 lines or 1 MiB per second and rank the rest is left out here and counted, and the
    executor's log has all of it. Over Spark Connect the executors may not reach the client: one line says so after 10 s; a fit's lines come through
    its store. `sparkhvd.log_to_driver(message)` and docs/observe.md have more.

    Ctrl-C raises KeyboardInterrupt in `fn` on every rank, as with `run_local`, and then cancels the Spark job: `fn` has 5 s to save, then
    it is killed; a second Ctrl-C kills it at once. That holds for a launch from the main thread whose executors reach the driver (docs/training.md).
    A job that is cancelled in Spark (its UI, `cancelJobGroup`) or loses its executor ends without notice.

    Args:
        fn: any function that pickles; also from a notebook cell, `__main__` or a `--py-files` module.
        args: positional arguments of `fn`.
        kwargs: keyword arguments of `fn`.
        num_proc: number of ranks. None means every task slot of the configured cluster: N for `local[N]`,
            executors x (cores // `spark.task.cpus`) elsewhere, or every GPU where Spark gives ranks GPUs (with
            `use_gpu=True` on `local[N]`: no more than this host has); an error where the configuration does not say.
        start_timeout: longest wait in seconds for enough task slots; None means `Settings.start_timeout_s`. A wait for
            other jobs of this application does not count.
        use_mpi: Horovod's, without effect: there is one transport, sparkhvd's own.
        use_gloo: the same.
        extra_mpi_args: the same.
        env: environment variables of the ranks, set before `fn` and its modules load. Those that are settings
            (SPARKHVD_*, HOROVOD_*) count as such, and win over this process's environment and the Spark conf.
        stdout: a stream of this process that gets the ranks' output as it comes; where ranks do not reach it, the last lines at the end.
        stderr: the same, where there is no `stdout`: both streams of a rank are one pipe.
        verbose: 0 prints nothing on the driver; 1 prints the ranks' output, waits and relaunches; 2 also leaves Spark's own log of a failed rank.
        nics: interfaces by which the ranks talk, by name or as networks (10.0.0.0/8); None means `Settings.interfaces`, or else the
            address that Spark has for their host (SPARK_LOCAL_IP there), with a `local` master the loopback's.
        prefix_output_with_timestamp: whether lines begin with the local time, here and in the executors' logs.
        executable: the Python that Spark's workers run; another one is an error.
        spark: the session to use, classic or Connect; None means the active one.
        settings: engine settings; those that differ from the defaults are final. None reads them from the Spark conf
            (`spark.sparkhvd.*`) and this process's environment.
        max_retries: relaunches after a lost process, executor or host. An exception of `fn` is never retried.
        use_gpu: True: every rank gets a GPU of its own, which `hvd.init()` makes torch's current device and `context().gpu`
            numbers, or the job fails before `fn` starts. False: the ranks see no GPU. None: True if Spark gives tasks
            GPUs, else the ranks see the GPUs that their executor sees. See docs/gpus.md.
        profile: Spark resource profile of the stage (pyspark 4 and a cluster master). None means one that asks for a
            GPU and its share of the cores per rank, where Spark gives ranks GPUs.
        loggers: such as [sparkhvd.MLflowLogger()]: get what ranks give to `sparkhvd.log_metrics`, while they run, and the ranks' load. See docs/loggers.md.

    Returns:
        The results of `fn` on rank 0, 1, ...

    Raises:
        InvalidArgumentError: an argument is wrong, or `fn` cannot be pickled. Nothing has started.
        PreflightError: the cluster cannot run this job; the message has the remedy. `fn` has not started.
        RankError: `fn` failed on a rank: which, where, and its traceback or signal.
    """
    from sparkhvd.runner import horovod_arguments, job
    from sparkhvd.runner import loggers as metric_lines
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
    followed = metric_lines.following(loggers, fn, facts, stream, verbose)
    with followed as (split, called):
        options = replace(options, stream=split)
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
    """Call `fn(*args, **kwargs)` on `num_proc` processes of this host, without Spark; return results by rank.

    The same processes as `run` starts, so a program can be tried before it meets a cluster. Never relaunched.

    Ctrl-C raises KeyboardInterrupt in `fn` on every rank, also while it waits in a collective. `fn` has 5 s to save in its `except` or
    `finally`, then it is killed; a second Ctrl-C kills it at once. If this process is killed, the ranks are too.

    Args:
        fn: any function that pickles.
        args: positional arguments of `fn`.
        kwargs: keyword arguments of `fn`.
        num_proc: number of processes, at least 1.
        env: environment variables of the ranks, set before `fn` and its modules load. Those that are settings
            (SPARKHVD_*, HOROVOD_*) count as such, and win over this process's environment.
        settings: engine settings; those that differ from the defaults are final. None reads them from this process's
            environment.
        verbose: 0 keeps the ranks' output, unless a stream is given; 1, or Horovod's None, prints it to stderr, each line after
            its [rank].
        use_gpu: True: every rank gets a GPU of its own, which `context().gpu` numbers in its process, or the job fails
            before `fn` starts. False: the ranks see no GPU. None: they see the GPUs that this process sees.
        hosts: Horovod's "name:slots"; only this host, with a slot for each rank.
        stdout: a stream for the ranks' output, line by line.
        stderr: the same, where there is no `stdout`: both streams of a rank are one pipe.
        prefix_output_with_timestamp: whether lines begin with the local time.
        executable: the Python of this process; another one is an error.
        start_timeout: Horovod's, without effect: processes of this host start at once.
        use_mpi: Horovod's, without effect: there is one transport, sparkhvd's own.
        use_gloo: the same.
        mpi_args: the same.
        network_interfaces: Horovod's, without effect: the ranks meet on the loopback interface.
        loggers: as of `run`.

    Returns:
        The results of `fn` on rank 0, 1, ...

    Raises:
        InvalidArgumentError: an argument is wrong, or `fn` cannot be pickled. Nothing has started.
        PreflightError: the processes may have too little address space for torch, or too few GPUs. `fn` has not
            started.
        RankError: `fn` failed on a rank: which, and its traceback or signal.
    """
    from sparkhvd.runner import horovod_arguments, local
    from sparkhvd.runner import loggers as metric_lines

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
    followed = metric_lines.following(loggers, fn, {"num_proc": num_proc}, stream, verbose)
    with followed as (split, called):
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
            stream=split,
            timestamps=prefix_output_with_timestamp,
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
    """Call `fn(*args, **kwargs)` on processes of several hosts, which ssh reaches without a password; return results by rank.

    The same processes as `run_local` starts, and nothing of Spark. Every host has this Python, at the same path and in the same minor
    version, this version of the package, and the working directory. Never relaunched. Output comes live, each line after its [rank].

    Ctrl-C raises KeyboardInterrupt in `fn` on every rank. `fn` has 5 s to save, then it is killed; a second Ctrl-C kills it at once. If this
    process is killed, or the connection to a host is lost, all ranks end.

    Args:
        fn: any function that pickles.
        args: positional arguments of `fn`.
        kwargs: keyword arguments of `fn`.
        num_proc: number of processes; None means every slot. Hosts are filled in their order.
        hosts: "name:slots,name:slots"; names of this host need no ssh.
        hostfile: a file with lines `name slots=N` or `name:N` instead.
        env: environment variables of the ranks, set before `fn` and its modules load, beside those of a login by ssh and those that
            travel by themselves (docs/running.md). Settings among them win over this process's environment.
        settings: engine settings; those that differ from the defaults are final. None reads them from this process's
            environment.
        verbose: 0 keeps the ranks' output, unless a stream is given; 1, or Horovod's None, prints it to stderr.
        use_gpu: as of `run_local`.
        ssh_port: of the other hosts; None for what ssh's configuration says.
        ssh_identity_file: private key for ssh; None likewise.
        start_timeout: longest wait in seconds for each step of the start; None means 30. A host has 10 s to answer at all.
        network_interfaces: interfaces by which the ranks talk, by name or as networks (10.0.0.0/8); None means the address by which ssh
            came to a host, or `Settings.interfaces`.
        stdout: a stream for the ranks' output, line by line.
        stderr: the same, where there is no `stdout`: both streams of a rank are one pipe.
        prefix_output_with_timestamp: whether lines begin with the local time.
        loggers: as of `run`.

    Returns:
        The results of `fn` on rank 0, 1, ...

    Raises:
        InvalidArgumentError: an argument is wrong, or `fn` cannot be pickled. Nothing has started.
        PreflightError: hosts cannot run their ranks or do not reach each other; all of them are listed. `fn` has not started.
        RankError: `fn` failed on a rank: which, where, and its traceback or signal; or a host was lost.
    """
    from sparkhvd.runner import horovod_arguments
    from sparkhvd.runner import loggers as metric_lines
    from sparkhvd.runner.hosts import run as function

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
    followed = metric_lines.following(loggers, fn, facts, options.stream, options.verbose)
    with followed as (split, called):
        options = replace(options, stream=split)
        return function.launch_on_hosts(called, args, kwargs or {}, num_proc, options)
