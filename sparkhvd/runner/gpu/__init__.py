"""Give each rank its GPU.

Decisions are pure functions of configuration and of what the ranks found, and carry their reason. A process looks for GPUs with
CUDA's own driver library in a forked child, so that nothing of CUDA is left in it.

Each module imports only those above it:

    probe      counts GPUs as the CUDA driver sees them
    decide     which GPU a rank gets, from the configuration
    agreement  what the ranks' findings mean together
    profiles   Spark resource profiles of barrier stages
    task       GPUs of a barrier task and of its trainer
"""
