"""Train a model on the ranks: the loop, its checkpoints, and the user's code in it. Plain PyTorch around `sparkhvd.torch`; knows no Spark.

The driver checks and pickles the `program`; every rank rebuilds it from a `spec` and runs `train`. An error of one rank is
raised by all ranks together (`together`), so that none waits for a rank that has ended.

Each module imports only those above it:

    types             types that training shares
    hashing           SHA-256 of files
    references        what a user's loss, metric or step function refers to
    together          seeds, and errors that all ranks raise together
    to_device         batches and modules to the rank's device
    precision         mixed precision
    torch_settings    settings of torch as on the driver
    modules           modules apart from their weights
    user_code         the user's callbacks, functions and loops
    early_stopping    best epoch, and early end
    class_mean        means of losses with class weights
    metric_states     metrics of torchmetrics
    class_metrics     F1 and the area under the ROC curve
    metrics           metrics of an epoch, over all ranks
    user_step         the user's own forward and loss
    check_user_code   the user's functions and objects, checked on the driver
    schedulers        the user's learning-rate scheduler
    others            state of losses and metrics
    model             the user's model, built and checked
    optimizer         the user's optimizer, its groups, compression
    loss_functions    the user's losses, checked
    row_pairs         losses and metrics tried on permuted labels
    program           model, optimizer, losses and metrics, pickled
    describe_program  the same, described for a checkpoint
    spec              input and result of a rank
    losses            loss of a global batch
    host_weights      frozen parameters that the ranks of a host hold once
    host_rows         rows that the ranks of a host read once and share
    batches           a rank's batches of an epoch
    device            the rank's device
    compile           torch.compile
    waits             time in which the ranks of an epoch waited for each other
    run_timeline      timeline of the first steps, in the run's folder
    profile           where the time of a training goes
    checkpoints       checkpoints, and resuming from them
    schedule          steps of the scheduler
    step              one optimizer step
    progress          how far an epoch is, for the driver
    train_fn          the user's own training loop
    train             the loop
    elastic           the same on ranks that come and go
"""
