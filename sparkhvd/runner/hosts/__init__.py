"""Ranks on several hosts, started over ssh: `sparkhvdrun -H a:4,b:4` and `run_hosts`.

Each host runs an agent (`agent`), which starts and ends the ranks there with the code of a launch on one host. The
launcher and its agents communicate only through ssh's standard input and output (`protocol`). No port is opened on the
launcher's host, and hosts connect to each other only where ranks listen.

Each step of the start runs on all hosts in parallel. The agent sends its versions. It receives its request and binds
the ranks' listeners. It connects to the listeners of the other hosts. It receives the job, with its key and all
addresses, and starts the ranks. An error names its host, and all processes are removed.

Trust: ssh authenticates hosts and user, and hosts with an unknown key are refused. The key, variables and the pickled
function travel through ssh's standard input, never in argv or the environment of ssh. The launcher unpickles only what
its own ranks return.

Failure: an agent whose connection ends kills its ranks and ends. A guard kills them if the agent is killed. ssh ends
with the launcher. A lost connection to a host ends the job.

Each module imports only those above it:

    protocol    messages between launcher and agent
    agent       ranks of one host
    connection  the launcher's connection to an agent
    launch      start on all hosts
    run         a function or the user's command on hosts
"""
