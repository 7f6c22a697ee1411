"""Assign a GPU to each rank.

Decisions are pure functions of the configuration and of the GPUs that ranks see, with a reason. A process counts GPUs
with CUDA's driver library in a forked child, so that CUDA leaves no state in it.

Each module imports only those above it:

    probe      counts GPUs as the CUDA driver sees them
    decide     decides on the GPUs of a job, from the configuration
    agreement  agreement of the ranks on their GPUs
    task       GPUs of a barrier task and of its trainer
"""
