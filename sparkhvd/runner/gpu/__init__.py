"""Give each rank its GPU.

Decisions are pure functions of configuration and of the GPUs that ranks see, and carry their reason. A process counts GPUs
with CUDA's driver library in a forked child, so that nothing of CUDA is left in it.

Each module imports only those above it:

    probe      counts GPUs as the CUDA driver sees them
    decide     decision on the GPUs of a job, from the configuration
    agreement  agreement of the ranks on the GPUs that they see
    task       GPUs of a barrier task and of its trainer
"""
