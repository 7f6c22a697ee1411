"""Watch a job, and tune it: the timeline and autotune, which stand on the engine alone, and the report of a fit, which stands on nothing.

Threads: none of their own; the engine writes its events. Failure: a file that cannot be written is an error at once. A timeline is valid JSON
at any moment, also after kill -9; one of all ranks keeps rank 0's part when a rank is lost.

Each module imports only those above it:

    report    report of a fit as JSON and HTML
    timeline  events of all ranks in Chrome's trace format
    autotune  search for the fastest settings while training goes on
"""
