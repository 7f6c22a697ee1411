"""The corpus: real programs, each trained by a plain loop of PyTorch and by the estimator on the same rows in the same order.

`case.py` says what a case is, `cases/` has the tables by library, `plain.py` the plain loop, `ddp.py` the same loop under
DistributedDataParallel, `fit.py` the fits and the comparisons, `run.py` the command, `page.py` the page of results.
"""
