"""Observe and tune a job.

Timeline and autotune need only the engine. Report and loggers of a fit do not need it.

Threads: the engine writes its events in its own threads. A rank has a thread that samples its load (`system`), and the
driver has a thread per logger of a fit.
Failure: a file that cannot be written raises an error at once. A timeline is valid JSON at any moment, also after kill
-9; a timeline of all ranks keeps the part of rank 0 if a rank is lost.

Each module imports only those above it:

    autotune   search for the fastest settings during training
    report     report of a fit as JSON and HTML
    system     load of a rank's process, once per second
    timeline   events of all ranks in Chrome's trace format
    live_plot  curves of a fit in a notebook
    loggers    MLflow, TensorBoard and other destinations of a fit's numbers
"""
