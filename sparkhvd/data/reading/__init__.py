"""Provide the batches of a rank.

A pure function (`sampler`) gives the rows of a rank at a step. So every rank knows the rows of all other ranks, a fit
can resume inside an epoch, and no row is lost or used twice. One thread prefetches; the training thread waits for it
with a deadline.

Each module imports only those above it:

    sampler  rows of each rank and step
    source   rows of a manifest's files by number
    subset   training and validation rows, divided among processes
    order    plans of a reader's epochs
    reader   batches of a rank
"""
