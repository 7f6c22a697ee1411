"""Give a rank its batches.

The rows of a rank at a step are a pure function (`sampler`), so every rank knows those of all others, a fit goes on inside
an epoch, and no row is lost or seen twice. One thread reads ahead; the training thread waits for it with a deadline.

Each module imports only those above it:

    sampler  rows of each rank and step
    source   rows of a manifest's files by number
    subset   training and validation rows, and their division among processes
    order    plans of a reader's epochs
    reader   batches of a rank
"""
