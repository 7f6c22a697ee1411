"""Watch a running job, and tune it: the timeline and autotune. Both stand on the engine alone.

Each module imports only those above it:

    timeline  events of all ranks in Chrome's trace format
    autotune  search for the fastest settings while training goes on
"""
