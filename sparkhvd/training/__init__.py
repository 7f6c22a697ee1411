"""Train a model on the ranks: the loop, its checkpoints, and the user's code. Uses `sparkhvd.torch`, and no Spark.

The driver checks and pickles the `program`; every rank rebuilds it from a `spec` and runs `train`. If a rank has an
error, all ranks raise it (`rank_sync`), so that no rank waits for a rank that has ended.

Each module imports only those above it:

    host_memory      rows and frozen parameters held once per host
    metrics          metrics of an epoch, over all ranks
    precision        mixed precision: autocast of forward, and the loss scale for float16
    rank_sync        seeds, and errors raised by all ranks together
    references       objects referenced by a user's loss, metric or step function
    torch_settings   torch's settings, copied from the driver
    types            shared types of training
    device           the rank's device
    early_stopping   best epoch, and early stopping
    loss_functions   the user's losses, checked
    to_device        moves of losses, optimizers and batches to the device of a rank, and of state to the CPU
    modules          modules and their weights, pickled separately
    schedule         steps of the scheduler
    loss_state       state of losses and metrics
    model            the user's model, built and checked
    profile          time spent in each part of a training
    row_pairs        tests of losses and metrics with permuted labels
    optimizer        the user's optimizer, its groups, compression
    user_code        the user's callbacks, functions and loops
    spec             input and result of a rank
    batches          a rank's batches of an epoch
    checkpoints      checkpoints, and resuming from them
    user_step        the user's own forward and loss
    check_user_code  the user's functions and objects, checked on the driver
    program          model, optimizer, losses and metrics, pickled
    train_fn         the user's own training loop
    losses           loss of a global batch
    step             one optimizer step
    train            the loop
    elastic          the loop of elastic jobs
"""
