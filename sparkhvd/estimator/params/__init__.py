"""Spark ML Params of the estimator and its model, derived from a table with a row for each.

To add a Param that is passed to the ranks unchanged: a row with `to_ranks=True` in the file of its group, a field of `TrainSpec`,
and `python -m tools.keywords`; CONTRIBUTING.md has the whole recipe.

Each module imports only those above it:

    converters  type converters
    generated   values of one fit or transform (generated)
    table       a row of facts for each Param
    base        accessors, keyword arguments, checks, explanations
    groups      Params that an estimator shares with its model
"""
