"""Write checkpoints, and resume from them exactly.

A checkpoint is a file and a pointer that is written last, so a reader sees the old one or the new one. Each file carries a SHA-256;
where the newest one is damaged the one before is used, with a warning.

Threads: one on rank 0 writes while training goes on; the next checkpoint, and the end of training, wait for it. Trust: everything is read by
`weights_only=True`.

Each module imports only those above it:

    changes     changes of model and optimizer that no state dict holds
    frozen      parameters that no step changes
    checkpoint  a checkpoint and its file
    files       a run's files and the pointer
    resume      the state that a checkpoint holds
    saver       writes while training goes on
"""
