"""Spark ML Params of the estimator and its model, derived from a table with a row for each Param.

To add a Param that is passed to the ranks unchanged: add a row with `to_ranks=True` in the file of its group and a
field of `TrainSpec`, and run `python -m tools.keywords`. CONTRIBUTING.md lists all steps.

Each module imports only those above it:

    converters  type converters
    generated   values of one fit or transform; a generated file
    table       row of facts for each Param
    base        accessors, keyword arguments, checks, explanations
    groups      Params that an estimator shares with its model
"""
