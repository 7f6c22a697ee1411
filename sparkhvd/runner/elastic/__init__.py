"""Ranks that come and go: of the user's command, `sparkhvdrun -np 4 --min-np 2 --max-np 8`, or of a function: on Spark, `run_elastic`, or by `horovod.run`.

The launcher asks which hosts and slots there are (`discovery`), keeps a process in every slot up to the largest number of ranks, and is
the job's `Coordinator`. A process that dies is replaced; a host on which processes die again and again is left out for a growing time. Which
processes are the ranks of a generation is decided by `sparkhvd.elastic` alone.

**Threads**: the main one decides; a thread runs the discovery script, the coordinator has one, each process three (`crew`), each other host two.
Other threads only put events into the main one's queue.

**Failure**: the job ends when its processes have ended, with 0 if one of them has ended well. It fails when all that had the training's state
are gone, when too few ranks are there for `--elastic-timeout`, and when `--reset-limit` is reached.

Each module imports only those above it:

    options            limits of a job, from the flags
    discovery          hosts and slots, now and later
    cooldown           hosts that are left out after failures; pure
    slots              which processes to start and to remove; pure
    report             a line for each change
    hosts              processes of members on this host and on others
    launcher           what to start and to remove
    host_group         hosts without Spark
    script             the user's command on ranks that come and go
    ends               results and failures of a function's processes; pure
    attempt_result     end of an attempt on Spark, from its coordinator to its launcher
    function_hosts     a function on this host or on several
    task               executor's side of a job on Spark
    tasks              its tasks, as the coordinator sees them
    coordination       what decides in a job on Spark, in the driver or in a task
    coordinator_files  files by which a coordinator in a task is found and told
    entry              what Spark calls in a task
    coordinators       the coordinator, as the driver sees it
    stage              its stage, beside the thread that decides
    job                driver's side of a job on Spark
    shared             store of a function over Spark Connect
    function           `run_elastic`
"""
