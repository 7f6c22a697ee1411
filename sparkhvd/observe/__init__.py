"""Observe and tune a job. Timeline and autotune need only the engine; a fit's report and loggers do without it.

Threads: the engine writes its events; a rank has a thread that samples its load (`system`), the driver one per logger of a fit.
Failure: a file that cannot be written is an error at once. A timeline is valid JSON
at any moment, also after kill -9; a timeline of all ranks keeps rank 0's part when a rank is lost.

Each module imports only those above it:

    autotune   search for the fastest settings during training
    report     report of a fit as JSON and HTML
    system     load of a rank's process, once per second
    timeline   events of all ranks in Chrome's trace format
    live_plot  curves of a fit in a notebook
    loggers    MLflow, TensorBoard and others, fed by a fit
"""
