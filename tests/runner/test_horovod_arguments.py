"""Horovod's arguments of `run` and `run_local`: their effect, a warning, or an error."""

from __future__ import annotations

import inspect
import io
import re
import socket
import warnings
from dataclasses import replace
from typing import Any

import pytest

import sparkhvd
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.runner import horovod_arguments, launching, outcomes

pytestmark = pytest.mark.pure

OF_HOROVOD = (
    "fn args kwargs num_proc start_timeout use_mpi use_gloo extra_mpi_args env stdout stderr verbose nics "
    "prefix_output_with_timestamp executable"
)


def test_run_accepts_horovod_arguments_in_horovod_order() -> None:
    parameters = inspect.signature(sparkhvd.run).parameters.values()
    positional = [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
    assert positional == OF_HOROVOD.split()


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"use_mpi": True}, "use_mpi=True has no effect in sparkhvd: .*neither MPI nor Gloo"),
        ({"use_gloo": True}, "use_gloo=True has no effect"),
        ({"extra_mpi_args": "-x A"}, "extra_mpi_args='-x A' has no effect"),
    ],
)
def test_argument_without_effect_warns_at_the_line_of_the_caller(
    given: dict[str, Any], why: str
) -> None:
    with pytest.warns(UserWarning, match=why) as warned, pytest.raises(InvalidArgumentError):
        sparkhvd.run(print, spark="no session", **given)  # type: ignore[arg-type]
    assert [one.filename for one in warned] == [__file__]


def test_arguments_that_request_nothing_do_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        horovod_arguments.warn_of(use_mpi=False, use_gloo=None, start_timeout=None)
        assert horovod_arguments.choose_stream(None, None) is None


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (
            {"executable": "/no/python"},
            "executable is '/no/python', and the ranks run .*Start this",
        ),
        (
            {"hosts": "a:1,localhost:1"},
            "processes only on this host, not on a. Call sparkhvd.run_hosts",
        ),
        (
            {"hosts": "localhost:1"},
            "with 1 slots, and num_proc .-np. is 2; there must be at least one slot per rank",
        ),
        ({"hosts": "localhost:many"}, "hosts is 'localhost:many'"),
        ({"stdout": "ranks.log"}, "stdout is 'ranks.log'; it must be a text stream"),
    ],
)
def test_impossible_arguments_raise_an_error_with_the_remedy(wrong: Any, says: str) -> None:
    with pytest.raises(InvalidArgumentError, match=says):
        sparkhvd.run_local(print, num_proc=2, **wrong)


def test_host_names_of_this_host_are_accepted() -> None:
    for name in ("localhost", socket.gethostname(), "127.0.0.1", "[::1]"):
        horovod_arguments.check_hosts(f"{name}:3", 3)
        with pytest.raises(InvalidArgumentError, match=r"only on this host, not on a\. "):
            horovod_arguments.check_hosts(f"{name}:2,a:1", 3)


def test_stdout_argument_replaces_stderr_for_both_streams() -> None:
    out, err = io.StringIO(), io.StringIO()
    assert horovod_arguments.choose_stream(None, err) is err
    assert horovod_arguments.choose_stream(out, out) is out
    with pytest.warns(UserWarning, match="stderr has no effect in sparkhvd beside stdout"):
        assert horovod_arguments.choose_stream(out, err) is out


def test_last_lines_are_written_in_rank_order_despite_a_broken_stream() -> None:
    first = outcomes.Outcome(0, outcomes.OutcomeKind.OK, log_tail=("a", "b"))
    ended = [replace(first, rank=1, log_tail=("c",)), first, replace(first, rank=None)]
    stream = io.StringIO()
    horovod_arguments.write_tails(stream, ended)
    assert stream.getvalue() == "[0] a\n[0] b\n[1] c\n"
    stream.close()
    horovod_arguments.write_tails(stream, ended)


def test_timestamps_show_local_time_with_time_zone() -> None:
    line = launching.line_of("[0] x", timestamp=True)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d \[0\] x\n", line)
    assert launching.line_of("[0] x", timestamp=False) == "[0] x\n"
