"""Train a model on the ranks: the loop, its checkpoints, and the user's code in it. Plain PyTorch around `sparkhvd.torch`; knows no Spark.

The driver checks and pickles the `program`; every rank rebuilds it from a `spec` and runs `train`. What one rank cannot do, all
ranks raise together (`together`), so nobody waits for one that has left.

Each module imports only those above it:

    together         seeds, and errors that all ranks raise together
    to_device        batches and modules to the rank's device
    modules          modules apart from their weights
    user_code        the user's callbacks, functions and loops
    early_stopping   the best epoch, and when to stop
    class_mean       means of losses with class weights
    metric_states    metrics of torchmetrics
    metrics          metrics of an epoch, over all ranks
    user_step        the user's own forward and loss
    check_user_code  the user's functions and objects, checked on the driver
    schedulers       the user's learning-rate scheduler
    program          model, optimizer, loss and metrics, pickled
    building         the same where the user gave functions
    spec             what a rank gets and returns
    losses           the loss of a global batch
    host_rows        rows that the ranks of a host read once and share
    batches          a rank's batches of an epoch
    device           the rank's device
    precision        mixed precision
    compile          torch.compile
    checkpoints      checkpoints: when, what, where, and resuming
    schedule         steps of the scheduler
    step             one optimizer step
    train_fn         the user's own training loop
    train            the loop
"""
