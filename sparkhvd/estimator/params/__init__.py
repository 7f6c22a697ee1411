"""Spark ML Params of the estimator and its model: a table with a row for each, and what follows from it.

To add one that the ranks get as it is: a row with `to_ranks=True` in the file of its group, a field of `TrainSpec`, and
`python -m tools.keywords`; CONTRIBUTING.md has the whole recipe.

Each module imports only those above it:

    converters     type converters
    table          a row of facts for each Param
    foreign        arguments of Horovod's other estimators
    explain        values as explanations show them
    base           accessors, keyword arguments, checks, explanations
    prediction     Params that an estimator shares with its model
    model          model, optimizer and loss
    data           training data
    training       training loop and run
    cluster        launch
    compatibility  second names, and Params without effect
    options        values of one fit or transform (generated)
    keywords       types of keyword arguments (generated)
    fit            all Params of a fit
"""
