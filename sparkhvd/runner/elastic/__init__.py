"""Elastic training of a command or a function.

A command runs under `sparkhvdrun -np 4 --min-np 2 --max-np 8`, a function under `run_elastic` on Spark or
`horovod.run`. The launcher learns hosts and slots (`options`) and keeps a process in every slot up to the largest
number of ranks. It is also the job's `Coordinator`. It replaces a process that dies, and excludes a host with repeated
failures for a growing time. Only `sparkhvd.elastic` decides which processes are the ranks of a generation.

**Threads**: the main thread decides. The discovery script and the coordinator have a thread each, each process three
(`local_processes`), and each other host two. They only put events into the main thread's queue.

**Failure**: the job ends when its processes have ended, with status 0 if one of them succeeded. It fails when all ranks
with the training's state are lost, when there are too few ranks for `--elastic-timeout`, and when `--reset-limit` is
reached.

Each module imports only those above it:

    options         limits of a job, host discovery
    slots           which processes to start and to remove; pure
    task            executor's side of a job on Spark
    processes       processes of members on this host and on others
    launcher        starts and removes processes
    coordinator     coordinator, task connections and results of a job on Spark
    function_hosts  a function on this host or on several, without Spark
    job             driver's side of a job on Spark
    function        `sparkhvd.runner.run_elastic`
    script          the user's command as an elastic job
"""
