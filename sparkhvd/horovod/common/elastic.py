"""Horovod's `horovod.common.elastic`."""

from sparkhvd.torch.elastic import ObjectState, State, run_fn

__all__ = ["ObjectState", "State", "run_fn"]
