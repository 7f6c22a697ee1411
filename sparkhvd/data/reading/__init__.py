"""Give a rank its batches.

The rows of a rank at a step are a pure function (`sampler`), so every rank knows those of all others, a fit goes on inside
an epoch, and no row is lost or seen twice. One thread reads ahead; the training thread waits for it with a deadline.

Each module imports only those above it:

    sampler   rows of each rank and step
    groups    whole groups in place of rows
    source    rows of a manifest's files by number
    subset    training and validation rows, and their division among processes
    prefetch  reading ahead in a thread
    resident  rows that are held in memory
    order     plans of a reader's epochs
    batch     the arrays of a step
    decoding  the user's decoders in threads
    reader    batches of a rank
"""
