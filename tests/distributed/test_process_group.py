"""Each method of this torch's groups and backends is ours, or is listed here with a reason."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
from torch._C import _distributed_c10d as c10d

from sparkhvd.distributed import Group
from sparkhvd.distributed.process_group import FORMS

pytestmark = pytest.mark.pure

# Methods of torch's own object, which each of our groups is. They need no backend.
OF_THE_OBJECT = {
    *("BackendType", "CUSTOM", "GLOO", "MPI", "NCCL", "UCC", "UNDEFINED", "XCCL"),
    *("_backend_id", "_id", "_pybind11_conduit_v1_", "boxed", "unbox", "bound_device_id"),
    *("_register_backend", "_set_default_backend"),
}
# torch's own behaviour is right for us: it does nothing, returns nothing, or raises an error that names the backend.
TORCHS_ANSWER = {
    "_add_ephemeral_timeout": "does nothing, as its documentation allows",
    "_has_hooks": "False",
    "_register_on_completion_hook": "raises: NCCL's",
    "_wait_for_pending_works": "raises: NCCL's",
    "get_reconfigure_handle": "raises, as supports_reconfigure is False",
    "merge_remote_group": "raises",
    "new_window": "raises, as supports_window is False",
    "reconfigure": "raises, as supports_reconfigure is False",
    "register_abort_hook": "raises, as supports_abort_hooks is False",
    "register_completion_hook": "raises, as supports_completion_hooks is False",
    "unregister_abort_hook": "raises: there is no hook",
    "unregister_completion_hook": "raises: there is no hook",
    "unregister_post_hook": "does nothing: there is no hook",
    "unregister_pre_hook": "does nothing: there is no hook",
}
# Methods that torch has only on backends. `get_backend` of our group returns the group. These belong to GPUs or to torch's own constructors.
OF_BACKENDS = {
    *("Options", "_end_time_estimate", "_set_group_uid", "_start_time_estimate"),
    *("allocate_tensor", "eager_connect_single_device", "mem_allocator", "memory_stats", "merge"),
    *("resume", "setUsePgForSymmMemRendezvous", "shrink", "split", "suspend"),
}


def names_of(kind: Any) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("__")}


def ours() -> set[str]:
    kinds = [kind for kind in Group.__mro__ if kind.__module__.startswith("sparkhvd.")]
    return {name for kind in kinds for name in vars(kind)}


def test_every_torch_process_group_attribute_is_ours_or_has_a_reason() -> None:
    wanted = names_of(c10d.ProcessGroup) - OF_THE_OBJECT - set(TORCHS_ANSWER)
    assert wanted - ours() == set()


def test_every_torch_backend_attribute_is_ours_or_has_a_reason() -> None:
    wanted = names_of(c10d.Backend) - OF_THE_OBJECT - set(TORCHS_ANSWER) - OF_BACKENDS
    assert wanted - ours() == set()


def keywords(name: str) -> list[list[str]]:
    """Return the keywords of each form of a method of torch's groups, from its documentation."""
    text = getattr(c10d.ProcessGroup, name).__doc__ or ""
    forms = re.findall(rf"^(?:\d+\. )?{name}\(self: [^,)]*(.*)\) ->", text, re.MULTILINE)
    return [re.findall(r"(?<=, )(\w+): ", form) for form in forms]


METHODS = sorted(name for name in ours() & names_of(c10d.ProcessGroup) if keywords(name))


def test_method_list_from_torch_docstrings_contains_known_methods() -> None:
    assert {"allreduce", "all_gather_single", "split_group", "send"} <= set(METHODS)


@pytest.mark.parametrize("name", METHODS)
def test_group_methods_accept_the_keywords_of_torch(name: str) -> None:
    for form in keywords(name):
        words = [word for word in form if not word.startswith("arg")]
        if name not in FORMS:
            places = [None] * (1 + len(form) - len(words))
            inspect.signature(getattr(Group, name)).bind(*places, **dict.fromkeys(words))
            continue
        known = {word for names in FORMS[name].tensor_names() for word in names}
        assert set(words) <= known | {"opts", *FORMS[name].rest}


def test_new_group_accepts_unknown_keywords() -> None:
    kinds = [each.kind for each in inspect.signature(Group.new_group).parameters.values()]
    assert inspect.Parameter.VAR_KEYWORD in kinds
