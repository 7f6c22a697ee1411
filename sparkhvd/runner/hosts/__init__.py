"""Ranks on several hosts, started over ssh: `sparkhvdrun -H a:4,b:4` and `run_hosts`.

On every host runs an agent (`agent`), which starts and ends the ranks there by the same code as a launch on one host. The launcher and
its agents talk through ssh's standard input and output alone (`channel`): no port is opened on the launcher's host, and hosts reach each
other only where ranks listen.

The start, on all hosts at once: the agent tells versions; gets its order and binds the ranks' listeners; reaches the listeners of the other
hosts; gets the job, with its key and all addresses, and starts the ranks. What fails on any host is told with the host's name, and
nothing stays.

Trust: ssh authenticates hosts and user, and hosts whose key is unknown are refused. The key, variables and the pickled function travel
through ssh's standard input; never in argv or the environment of ssh. The launcher unpickles what its own ranks return.

Failure: an agent whose connection ends kills its ranks and ends; a guard does so if the agent is killed. ssh ends with the launcher. A host
whose connection is lost ends the job.

Each module imports only those above it:

    protocol    messages between launcher and agent
    agent       ranks of one host
    connection  an agent, as the launcher reaches it
    launch      start on all hosts
    run         the user's command on hosts
"""
