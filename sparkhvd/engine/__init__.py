"""Bindings of the compiled library. Only this package uses ctypes.

It imports neither torch nor Spark.

Threads: every method of `Engine` may be called from any thread; waiting releases the GIL. The engine's own threads run no Python.

Memory: the engine reads and writes the caller's memory from the start of an operation until its end; a `Work` keeps its
`keep` alive as long.

Failure: every status of the library becomes one exception of `sparkhvd.errors`, with the library's own text. After the loss of a rank
all operations fail, and the engine can only be closed.

Each module imports only those above it:

    counters  counters of an engine, as a table and in Prometheus' text format
    library   the C header in ctypes
    stacks    the stacks of this process's threads, on another rank's request
    calls     operations before they are submitted: `Call`, `Reduction`, `TensorView`
    work      operations in flight and their results: `Work`, `GatherOutput`, `Buffer`
    engine    `Engine`
"""
