"""Give a rank its batches.

Which rows a rank sees at which step is a pure function (`sampler`), so every rank knows it of all, a fit goes on inside an epoch, and
no row is lost or seen twice. One thread reads ahead; the training thread waits for it with a deadline.

Each module imports only those above it:

    sampler   rows of each rank and step
    source    rows of a manifest's files by number
    subset    training and validation rows, and whether they fit in memory
    preload   rows that are read while torch is still imported
    prefetch  reading ahead in a thread
    reader    batches of a rank
"""
