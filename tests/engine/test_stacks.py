"""The handler that writes stacks, in separate processes, because a handler belongs to the whole process."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.processes


def run(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_stack_handler_writes_the_stack_of_every_thread() -> None:
    text = run(
        """
import os, signal, threading, time
from sparkhvd.engine import stacks
number, pipe = stacks.prepare(44)
assert (number, pipe) == stacks.prepare(44)
is_there = threading.Event()
def sleeping_here():
    is_there.set()
    time.sleep(60)
threading.Thread(target=sleeping_here, daemon=True).start()
assert is_there.wait(30)
signal.raise_signal(number)
print(os.read(pipe, 100000).decode())
"""
    )
    assert "in sleeping_here" in text
    assert "in <module>" in text


def test_stack_handler_is_reinstalled_after_the_program_removed_it() -> None:
    text = run(
        """
import os, signal
from sparkhvd.engine import stacks
number, pipe = stacks.prepare(44)
signal.signal(44, signal.getsignal(44))  # what Python knows of it, as at the end of a trainer of Lightning
assert not stacks._is_used(44)
assert (number, pipe) == stacks.prepare(44)
signal.raise_signal(number)
print(os.read(pipe, 100000).decode())
"""
    )
    assert "in <module>" in text


@pytest.mark.parametrize(
    "install",
    [
        "signal.signal(44, lambda *_: print('mine'))",
        "faulthandler.register(44, file=sys.stdout)",
        "signal.signal(44, signal.SIG_IGN)",
        "ctypes.CDLL(None).signal(44, handler)",
    ],
)
def test_signal_used_by_the_program_keeps_its_handler(install: str) -> None:
    text = run(
        f"""
import ctypes, faulthandler, signal, sys
from sparkhvd.engine import stacks
handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda _: None)
{install}
before = signal.getsignal(44)
print(stacks.prepare(44) == stacks.NO_STACKS, signal.getsignal(44) is before)
"""
    )
    assert text.split() == ["True", "True"]


def test_without_a_stack_signal_no_handler_is_installed() -> None:
    text = run(
        """
import os
from sparkhvd.engine import stacks
before = sorted(os.listdir("/proc/self/fd"))
print(stacks.prepare(0) == stacks.NO_STACKS, before == sorted(os.listdir("/proc/self/fd")))
"""
    )
    assert text.split() == ["True", "True"]


def test_forked_child_writes_stacks_to_its_own_pipe() -> None:
    text = run(
        """
import os, signal
from sparkhvd.engine import stacks
number, pipe = stacks.prepare(44)
child = os.fork()
if child == 0:
    def in_the_child():
        number, own = stacks.prepare(44)
        signal.raise_signal(number)
        assert own != pipe
        assert "in_the_child" in os.read(own, 100000).decode()
    in_the_child()
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
try:
    os.read(pipe, 1)
except BlockingIOError:
    print("nothing")
"""
    )
    assert text.split() == ["7", "nothing"]
