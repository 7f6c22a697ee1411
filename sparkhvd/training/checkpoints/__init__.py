"""Write checkpoints, and resume from them exactly.

A checkpoint is a file plus a pointer written last, so a reader sees either the old or the new checkpoint. Each file carries a
SHA-256. If the newest file is damaged, the previous one is used, with a warning.

Threads: one thread on rank 0 writes while training continues. The next checkpoint and the end of training wait for it.
Security: all files are read with `weights_only=True`, so they cannot run code.

Each module imports only those above it:

    changes     changes of model and optimizer outside state dicts
    frozen      parameters that no step changes
    checkpoint  a checkpoint and its file
    files       a run's files and the pointer
    resume      collects and restores the state of a checkpoint
    saver       writes checkpoints while training continues
"""
