"""Ctrl-C passes from the driver to the trainers of its tasks: real processes and sockets, no Spark."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparkhvd.rendezvous import Job, Listener
from sparkhvd.rendezvous.handshake import HELLO
from sparkhvd.runner import interrupts, launching
from sparkhvd.runner.driver_port import proof_between
from sparkhvd.runner.gpu.agreement import OwnGpu
from sparkhvd.runner.interrupts import Interrupter, InterruptWatch
from sparkhvd.runner.outcomes import OutcomeKind
from sparkhvd.runner.protocol import Prologue
from sparkhvd.runner.trainer import Trainer
from sparkhvd.settings import JobSettings, Settings
from tests.harness.by_value import by_value
from tests.harness.waiting import wait_until

pytestmark = pytest.mark.pure

travels_by_value = by_value(__name__)

KEY = secrets.token_hex(32)


def waits(folder: Path, ends: bool) -> str:
    while True:
        try:
            (folder / os.environ["RANK"]).touch()
            time.sleep(300)
        except KeyboardInterrupt:
            if ends:
                return "saved"


@contextlib.contextmanager
def trainer_of(rank: int, folder: Path, *, ends: bool = True) -> Iterator[Trainer]:
    """Start a trainer whose function has begun and waits for an interrupt."""
    with Listener.bind("127.0.0.1", Settings()) as listener:
        endpoint = listener.endpoint()
        prologue = Prologue(
            sys_path=list(sys.path), listener=listener.filenos(), endpoint=endpoint.to_dict()
        )
        trainer = Trainer(rank, prologue, launching.dump_call(waits, (folder, ends), {}), print)
    with trainer:
        job = Job(bytes.fromhex(KEY), "job", 0, rank, 2, (endpoint, endpoint))
        place = ("127.0.0.1", endpoint.port)
        trainer.send(launching.job_frame(job, JobSettings(Settings()), place, OwnGpu(None, None)))
        wait_until((folder / str(rank)).exists, "the function has begun")
        yield trainer


@contextlib.contextmanager
def interrupter_of(size: int) -> Iterator[Interrupter]:
    listening = socket.create_server(("127.0.0.1", 0))
    listening.setblocking(False)
    with Interrupter(
        listening, "127.0.0.1", proof_between("interrupt", KEY, "job", 0, 0, 2), size
    ) as driver:
        yield driver


def watch_of(driver: Interrupter, trainer: Trainer) -> InterruptWatch:
    """Return a watch whose connection has reached the driver's kernel."""
    watch = InterruptWatch(driver.address, KEY, "job", 0, trainer)
    wait_until(lambda: watch._sock, "the task has connected")
    return watch


def test_interrupted_rank_waits_until_a_hanging_rank_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unauthenticated peers connect before the ranks."""
    monkeypatch.setattr(interrupts, "INTERRUPT_GRACE_S", 1.0)
    with (
        contextlib.ExitStack() as stack,
        trainer_of(0, tmp_path) as ready,
        trainer_of(1, tmp_path, ends=False) as stubborn,
        interrupter_of(2) as driver,
    ):
        for message in (
            b"",
            b"half",
            secrets.token_bytes(200),
            HELLO.pack(b"sparkhvd", 1, 0, 0, secrets.token_bytes(32)) + secrets.token_bytes(32),
        ):
            sock = stack.enter_context(socket.create_connection(driver.address))
            sock.sendall(message)
        watches = [watch_of(driver, trainer) for trainer in (ready, stubborn)]
        began = time.monotonic()
        thread = threading.Thread(target=driver.interrupt)
        thread.start()
        assert ready.wait(20)
        with watches[0]:
            pass  # leaving it waits for the other rank
        assert stubborn.wait(0)
        assert time.monotonic() - began > 1.0
        with watches[1]:
            pass
        thread.join(20)
        assert not thread.is_alive()
        assert launching.load_result(ready.result) == "saved"
        outcome = stubborn.outcome()
        assert (outcome.kind, outcome.exit) == (OutcomeKind.CRASH, "signal SIGKILL")
        assert outcome.log_tail == ()
        assert time.monotonic() - began < 1.0 + interrupts._MARGIN_S


def test_only_a_driver_with_the_key_can_interrupt_ranks(tmp_path: Path) -> None:
    """Neither a driver that is gone nor a process that listens in its place interrupts."""
    with trainer_of(0, tmp_path) as trainer:
        with interrupter_of(1) as driver:
            gone = watch_of(driver, trainer)
        with gone:
            gone._thread.join(20)
        with socket.create_server(("127.0.0.1", 0)) as fake:
            fooled = InterruptWatch(fake.getsockname()[:2], KEY, "job", 0, trainer)
            taken, _ = fake.accept()
            with taken, fooled:
                taken.recv(HELLO.size, socket.MSG_WAITALL)
                taken.sendall(secrets.token_bytes(64))
                fooled._thread.join(20)
                assert not fooled._thread.is_alive()
        with interrupter_of(1) as driver, watch_of(driver, trainer):
            pass  # the trainer's task ends while nothing happens
        assert not trainer.wait(0.2)
        os.kill(trainer.pid, signal.SIGINT)
        assert trainer.wait(20)
        assert launching.load_result(trainer.result) == "saved"
