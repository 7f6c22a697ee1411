"""Write checkpoints, and resume from them exactly.

A checkpoint is a file and a pointer that is written last, so a reader sees the old one or the new one. Each file carries a SHA-256;
where the newest one is damaged the one before is used, with a warning.

Threads: one on rank 0 writes while training goes on; the next checkpoint, and the end of training, wait for it. Trust: everything is read by
`weights_only=True`.

Each module imports only those above it:

    cadence            times of checkpoints inside an epoch
    fingerprint        comparison of two fits
    module_state       buffers and extra state of a module
    frozen             parameters that no step changes
    rank_state         state of one rank: random numbers, sums
    compression_state  state of PowerSGD
    checkpoint         a checkpoint and its file
    files              a run's files and the pointer
    changes            changes of model and optimizer that no state dict holds
    resume             the state that a checkpoint holds
    saver              writes while training goes on
"""
