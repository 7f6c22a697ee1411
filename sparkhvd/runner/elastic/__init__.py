"""Ranks that come and go: of the user's command, `sparkhvdrun -np 4 --min-np 2 --max-np 8`, or of a function: on Spark, `run_elastic`, or by `horovod.run`.

The launcher asks which hosts and slots there are (`discovery`), keeps a process in every slot up to the largest number of ranks, and is
the job's `Coordinator`. A process that dies is replaced; a host on which processes die again and again is left out for a growing time. Which
processes are the ranks of a generation is decided by `sparkhvd.elastic` alone.

**Threads**: the main one decides; a thread runs the discovery script, the coordinator has one, each process three (`crew`), each other host two.
Other threads only put events into the main one's queue.

**Failure**: the job ends when its processes have ended, with 0 if one of them has ended well. It fails when all that had the training's state
are gone, when too few ranks are there for `--elastic-timeout`, and when `--reset-limit` is reached.

Each module imports only those above it:

    options         limits of a job, from the flags
    slots           which processes to start and to remove; pure
    task            executor's side of a job on Spark
    processes       processes of members on this host and on others
    launcher        what to start and to remove
    coordinator     results and failures of a function's processes; pure
    function_hosts  a function on this host or on several
    job             driver's side of a job on Spark
    function        elastic training of a function on Spark: `sparkhvd.runner.run_elastic`
    script          the user's command on ranks that come and go
"""
