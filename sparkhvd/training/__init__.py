"""Train a model on the ranks: the loop, its checkpoints, and the user's code in it. Plain PyTorch around `sparkhvd.torch`; knows no Spark.

The driver checks and pickles the `program`; every rank rebuilds it from a `spec` and runs `train`. An error of one rank is
raised by all ranks together (`together`), so that none waits for a rank that has ended.

Each module imports only those above it:

    host_memory      frozen parameters that the ranks of a host hold once
    metrics          metrics of an epoch, over all ranks
    precision        mixed precision: autocast of forward, and the loss scale that float16 needs
    rank_sync        seeds, and errors that all ranks raise together
    references       what a user's loss, metric or step function refers to
    torch_settings   settings of torch as on the driver
    types            types that training shares
    device           the rank's device
    early_stopping   best epoch, and early end
    loss_functions   the user's losses, checked
    to_device        moves of losses, optimizers and batches to the device of a rank, and of state to the CPU
    modules          modules apart from their weights
    schedule         steps of the scheduler
    loss_state       state of losses and metrics
    model            the user's model, built and checked
    profile          where the time of a training goes
    row_pairs        losses and metrics tried on permuted labels
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
    elastic          the same on ranks that come and go
"""
