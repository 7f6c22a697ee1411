"""Output of ranks on the driver while they run: from a task's pump through a connection to the driver's stream.

    trainer -> pump -> `Sender` with its `Backlog` -> `Connection` -> `Receiver` -> `Display` -> the driver's stream
                                                     `ChunkWriter` -> `ChunkReader`   (files of the run, for a fit under Spark Connect)

A record is one text of whole lines, with a number of its rank. The task keeps it until the driver has said that it is shown, so a connection
that is cut, refused or silent costs nothing: the next one begins with the first record that is not acknowledged, and the driver leaves out
numbers that it has shown. What is not acknowledged when the rank ends travels with its outcome.

**It never hurts the training**: nothing of the pump waits. A flood, or a driver that does not read, leaves lines out, and the next line says
how many. At its end a rank waits `sender.FLUSH_S` at most.

**Threads**: a daemon thread per task, from its first line on (for a Connect client from its start); one on the driver per attempt. **Trust**: both ends prove that they know a key
that is derived from the attempt's; the driver only ever shows what comes, as text. **Shutdown**: `Sender.close` in the task, the end of the block on the driver.

Each module imports only those above it:

    frames      records on a connection
    receiver    driver's end of connections
    sender      task's end
    connection  from a task to the driver
    files       both ends of files
"""
