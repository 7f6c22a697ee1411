"""Live output of ranks on the driver: from a task's output pipe through a connection to the driver's stream.

    trainer -> pipe -> `Sender` with its `Backlog` -> `LiveConnection` -> `Receiver` -> `Display` -> the driver's stream
                                                      `ChunkWriter` -> `ChunkReader`   (files of the run, for a fit under Spark Connect)

A record is a text of whole lines, numbered per rank. The task keeps it until the driver has acknowledged showing it, so
a connection may be cut, refused or silent without loss. The next connection starts with the first unacknowledged
record, and the driver drops numbers that it has shown. Unacknowledged records at the end of a rank travel with its
outcome.

**It never slows the training**: nothing that reads the rank's output waits. Under a flood, or with a driver that does
not read, lines are left out, and the next line counts them. At its end a rank waits at most `sender.FLUSH_S`.

**Threads**: a daemon thread per task, from its first line on (for a Connect client from its start), and one on the
driver per attempt. **Trust**: both sides prove that they know a key derived from the attempt's. The driver only shows
the records, as text. **Shutdown**: `Sender.close` in the task, the end of the block on the driver.

Each module imports only those above it:

    frames      records on a connection
    receiver    driver's side of connections
    sender      task's side
    connection  connection from a task to the driver
    files       both sides of live output through files
"""
