"""Agent on one of several hosts: starts the ranks there, forwards their output and ends, and ends with its connection.

The launcher starts it through ssh by `BOOTSTRAP`, and communicates through its standard input and output. **Threads**:
the main one reads messages; others wait for ranks and read their output.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NoReturn, Protocol

from sparkhvd import __version__, cpus
from sparkhvd.elastic import JoinToken
from sparkhvd.errors import InternalError, PreflightError, SparkhvdError
from sparkhvd.interfaces import address_on, is_loopback, own_address
from sparkhvd.rendezvous import Endpoint, Job, Listener
from sparkhvd.rendezvous.event_loop import EventLoop, Task, open_connection
from sparkhvd.rendezvous.listener import tcp_place
from sparkhvd.runner import launching
from sparkhvd.runner.gpu import agreement
from sparkhvd.runner.hosts.protocol import Channel, StartRequest
from sparkhvd.runner.local import Trainers, TrainersPlan
from sparkhvd.runner.local_processes import (
    LocalProcesses,
    check_command,
    hand_over,
    hand_over_member,
    member_variables,
)
from sparkhvd.runner.outcomes import Outcome, OutcomeKind
from sparkhvd.runner.protocol import JobFrame
from sparkhvd.runner.trainer import Trainer, interrupt
from sparkhvd.settings import JobSettings, Settings
from sparkhvd.wire import Message, rebuild

# One line for `python -c`: prints the version of this Python before any import, and takes the module path from the
# first line. It removes the working directory from that path: a `json.py` in the login's home would hide Python's.
MARK = b"sparkhvd-agent "
BOOTSTRAP = (
    "import sys;sys.path=[p for p in sys.path if p];import json,os;"
    "os.write(1,('sparkhvd-agent %d.%d %s\\n'%(sys.version_info[0],sys.version_info[1],sys.executable)).encode());"
    "sys.path[:0]=json.loads(open(0,'rb',0,closefd=False).readline().decode());"
    "from sparkhvd.runner.hosts.agent import main;main()"
)
# How long another host may take to answer.
REACH_S = 5.0
# Interval of the launcher's heartbeats.
BEAT_S = 5.0
# Silence of the launcher after which the agent checks the launcher's host.
SILENCE_S = 15.0
# Pause between two polls for functions that outlive an interrupt.
_POLL_S = 1.0


class _Ranks(Protocol):
    """Ranks of this host, of a script or a function."""

    def endpoints(self) -> list[Endpoint]: ...

    def gpus(self) -> list[dict[str, object]]: ...

    def start(self, job: Job, master: tuple[str, int]) -> None: ...

    def send(self, number: int) -> None: ...


def main() -> NoReturn:
    """Serve the launcher until its end."""
    channel = _take_over()
    status = 1
    try:
        _serve(channel)
        status = 0
    except BrokenPipeError:  # the launcher is gone
        pass
    except (SparkhvdError, OSError) as error:
        with contextlib.suppress(OSError):
            channel.send("failed", text=str(error))
    # Other threads may block; what this process has started ends with it.
    os._exit(status)


def _take_over() -> Channel:
    """Reserve standard input and output for messages. Other code of this process does not see them."""
    reader, writer = os.dup(0), os.dup(1)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return Channel(reader, writer)


def _serve(channel: Channel) -> None:
    channel.send("hello", version=__version__)
    asked = _expect(channel, "order")
    order = rebuild(StartRequest, asked.values)
    try:
        os.chdir(order.cwd)
    except OSError as error:
        raise OSError(f"the working directory {order.cwd!r} cannot be entered: {error}") from error
    settings = JobSettings.from_json(order.settings)
    address = _address(order, settings.values)
    if order.is_elastic:
        _serve_elastic(order, settings, address, asked.data, channel)
    with contextlib.ExitStack() as stack:
        ranks: _Ranks
        if order.command is None:
            ranks = stack.enter_context(
                _FunctionRanks(order, settings, address, asked.data, channel)
            )
        else:
            ranks = stack.enter_context(_ScriptRanks(order, settings.values, address, channel))
        port = stack.enter_context(launching.reserved_port(address))
        endpoints = [each.to_dict() for each in ranks.endpoints()]
        channel.send("bound", endpoints=endpoints, port=port, gpus=ranks.gpus())
        peers = _expect(channel, "reach").values["peers"]
        own = ranks.endpoints()[0].host_key
        channel.send("reached", problems=_unreached(peers, own))
        notified = _expect(channel, "job")
        master = (str(notified.values["master"][0]), int(notified.values["master"][1]))
        ranks.start(Job.from_json(notified.values["job"]), master)
        while message := _receive(channel):
            ranks.send(int(message.values["number"]))
        ranks.send(signal.SIGKILL)
        os._exit(0)


def _serve_elastic(
    order: StartRequest, settings: JobSettings, address: str, program: bytes, channel: Channel
) -> NoReturn:
    """Start processes at the launcher's request, until its end."""
    with contextlib.ExitStack() as stack:
        members: Members | FunctionMembers
        if order.command is None:
            members = stack.enter_context(
                _function_members(order, settings, address, program, channel)
            )
        else:
            members = _script_members(order, settings.values, address, channel, stack)
        channel.send("ready")
        while message := _receive(channel):
            values = message.values
            if message.kind == "start":
                join_token = rebuild(JoinToken, values["join_token"])
                members.start(join_token, int(values["slot"]), int(values["slots"]))
            else:
                members.send(int(values["number"]), values["member"])
    os._exit(0)


def _script_members(
    order: StartRequest,
    settings: Settings,
    address: str,
    channel: Channel,
    stack: contextlib.ExitStack,
) -> Members:
    env = {**os.environ, **order.env}  # noqa: TID251 - the user's own, of this host
    command = order.command or []
    check_command(command, env)

    def show(number: int, stream: str, line: bytes) -> None:
        with contextlib.suppress(OSError):
            channel.send("line", line, rank=number, stream=stream)

    def end(number: int, status: int) -> None:
        with contextlib.suppress(OSError):
            channel.send("ended", rank=number, status=status)

    return Members(stack.enter_context(LocalProcesses(show, end)), command, env, settings, address)


def _function_members(
    order: StartRequest, settings: JobSettings, address: str, program: bytes, channel: Channel
) -> FunctionMembers:
    def show(line: str) -> None:
        with contextlib.suppress(OSError):
            channel.send("line", line.encode(), rank=-1, stream="stdout")

    def end(outcome: Outcome, result: bytes) -> None:
        with contextlib.suppress(OSError):
            channel.send("outcome", result, rank=outcome.rank, outcome=outcome.to_json())

    plan = _plan(order, settings)
    return FunctionMembers(plan, program, address, socket.gethostname(), show, end)


def _plan(order: StartRequest, settings: JobSettings) -> TrainersPlan:
    return TrainersPlan(
        env=order.env,
        sys_path=order.sys_path,
        cwd=order.cwd,
        settings=settings,
        use_gpu=order.use_gpu,
        may_fork=False,  # this process ends with the launch
    )


def _receive(channel: Channel) -> Message | None:
    """Receive a message other than a heartbeat, or return None if the launcher, or its host, is gone."""
    while True:
        try:
            message = channel.receive(SILENCE_S)
        except TimeoutError:
            if not _is_there():
                return None
            continue
        if message is None or message.kind != "beat":
            return message


def _is_there() -> bool:
    """Whether the launcher's host answers. False if the host is down or the network is cut.

    A launcher that is only stopped sends no heartbeats either, but its host's kernel answers.
    """
    came = os.environ.get("SSH_CONNECTION", "").split()  # noqa: TID251 - sshd's variable
    if len(came) != 4:
        return True  # a child process of the launcher: the launcher's end closes the pipe
    try:
        # ssh's client port there, which accepts no connection.
        socket.create_connection((came[0], int(came[1])), timeout=REACH_S).close()
    except ConnectionError:  # refused: its kernel answers
        return True
    except OSError:
        return False
    return True


def _expect(channel: Channel, kind: str) -> Message:
    message = _receive(channel)
    if message is None:
        raise BrokenPipeError
    if message.kind != kind:
        raise InternalError(f"an agent received {message.kind!r} instead of {kind!r}.")
    return message


def _address(order: StartRequest, settings: Settings) -> str:
    """This host's address for the other hosts: of the chosen interface, or as ssh reached it."""
    if settings.interfaces:
        return address_on(settings.interfaces)
    if order.address:
        return order.address
    # SSH_CONNECTION has the client's address and port, then the server's.
    came = os.environ.get("SSH_CONNECTION", "").split()  # noqa: TID251 - sshd's variable
    if len(came) == 4 and not is_loopback(came[2]):
        return came[2].removeprefix("::ffff:")
    return own_address("", order.towards)


def _unreached(peers: Sequence[tuple[str, dict[str, str | int]]], own: str) -> list[str]:
    """Try to connect to a rank of each other host and return the failures."""
    problems = []
    loop = EventLoop()

    def reach(host: str, endpoint: Endpoint) -> Task:
        try:
            family, place = tcp_place(endpoint)
            sock = yield from open_connection(family, place, time.monotonic() + REACH_S)
            sock.close()
        except OSError as error:
            problems.append(f"{host} does not answer at {endpoint}: {error}")

    try:
        for host, values in peers:
            endpoint = rebuild(Endpoint, values)
            if endpoint.host_key != own:
                loop.start(reach(host, endpoint))
        loop.run(loop.is_idle)
    finally:
        loop.close()
    return problems


class _ScriptRanks:
    """Processes of the user's command."""

    def __init__(
        self, order: StartRequest, settings: Settings, address: str, channel: Channel
    ) -> None:
        self._channel = channel
        self._env = {**os.environ, **order.env}  # noqa: TID251 - the user's own, of this host
        self._command = order.command or []
        check_command(self._command, self._env)
        self._processes = LocalProcesses(self._show, self._end)
        self._listeners = [Listener.bind(address, settings) for _ in range(order.count)]

    def endpoints(self) -> list[Endpoint]:
        return [each.endpoint() for each in self._listeners]

    def gpus(self) -> list[dict[str, object]]:
        return []

    def start(self, job: Job, master: tuple[str, int]) -> None:
        for each in hand_over(self._listeners, job, self._env, master):
            self._processes.start(each, self._command)

    def send(self, number: int) -> None:
        self._processes.send(number)

    def _show(self, rank: int, stream: str, line: bytes) -> None:
        with contextlib.suppress(OSError):
            self._channel.send("line", line, rank=rank, stream=stream)

    def _end(self, rank: int, status: int) -> None:
        with contextlib.suppress(OSError):
            self._channel.send("ended", rank=rank, status=status)

    def __enter__(self) -> _ScriptRanks:
        return self

    def __exit__(self, *_: object) -> None:
        self._processes.__exit__()


class _FunctionRanks:
    """Trainers for the user's function."""

    def __init__(
        self,
        order: StartRequest,
        settings: JobSettings,
        address: str,
        program: bytes,
        channel: Channel,
    ) -> None:
        self._channel = channel
        self._first = order.first
        self._ended: queue.SimpleQueue[int] = queue.SimpleQueue()
        plan = _plan(order, settings)
        ranks = range(order.first, order.first + order.count)
        self._trainers = Trainers(
            ranks, address, plan, program, self._show, self._ended.put, self._pass_metrics
        )
        threading.Thread(target=self._report, daemon=True).start()

    def endpoints(self) -> list[Endpoint]:
        return self._trainers.endpoints

    def gpus(self) -> list[dict[str, object]]:
        return [dataclasses.asdict(each) for each in self._trainers.gpus(socket.gethostname())]

    def start(self, job: Job, master: tuple[str, int]) -> None:
        self._trainers.start(job, master)

    def send(self, number: int) -> None:
        """Raise KeyboardInterrupt in the functions, or kill them."""
        if number == signal.SIGINT:
            threading.Thread(target=interrupt, args=(self._trainers.all,), daemon=True).start()
        else:
            for trainer in self._trainers.all:
                trainer.kill()

    def _show(self, line: str) -> None:
        with contextlib.suppress(OSError):
            self._channel.send("line", line.encode())

    def _pass_metrics(self, rank: int, entry: str) -> None:
        with contextlib.suppress(OSError):
            self._channel.send("metrics", entry.encode(), rank=rank)

    def _report(self) -> None:
        while True:
            try:
                rank = self._ended.get(timeout=_POLL_S)
            except queue.Empty:
                for trainer in self._trainers.all:
                    trainer.enforce_grace()
                continue
            trainer = self._trainers.all[rank - self._first]
            outcome = trainer.outcome(host=socket.gethostname())
            with contextlib.suppress(OSError):
                self._channel.send("outcome", trainer.result, outcome=outcome.to_json())

    def __enter__(self) -> _FunctionRanks:
        return self

    def __exit__(self, *_: object) -> None:
        self._trainers.__exit__()


# ----------------------------------------------------------------------------------------------------
# Processes of an elastic job on this host: the launcher's own, or an agent's.


class Members:
    """Processes of the user's command.

    Args:
        processes: runs them.
        command: program and arguments.
        env: variables of all of them.
        settings: of the launch.
        address: where they listen.
    """

    def __init__(
        self,
        processes: LocalProcesses,
        command: Sequence[str],
        env: Mapping[str, str],
        settings: Settings,
        address: str,
    ) -> None:
        self._processes = processes
        self._command = command
        self._env = env
        self._settings = settings
        self._address = address

    def start(self, join_token: JoinToken, slot: int, slots: int) -> None:
        """Start a process.

        Args:
            join_token: to the job.
            slot: its number among the slots of this host.
            slots: of this host.

        Raises:
            PreflightError: it cannot listen.
            OSError: it cannot be started.
        """
        listener = Listener.bind(self._address, self._settings)
        threads = max(1, int(cpus.allowed() / slots))
        given = hand_over_member(listener, join_token, self._env, slot, threads)
        self._processes.start(given, self._command)

    def send(self, number: int, member: int | None = None) -> None:
        """Send a signal to all processes, or to one."""
        self._processes.send(number, member)


# ----------------------------------------------------------------------------------------------------
# Processes of an elastic function on this host: the launcher's own, or an agent's.


class FunctionMembers:
    """Trainers of members. The context manager kills the remaining trainers at its end.

    **Threads**: one per process, beside its trainer's.

    Args:
        plan: what they need.
        program: pickled call.
        address: where they listen.
        host: name of this host.
        log: called with each line of their output, from threads.
        on_end: called with the outcome of a process and its pickled result, from threads.
    """

    def __init__(
        self,
        plan: TrainersPlan,
        program: bytes,
        address: str,
        host: str,
        log: Callable[[str], None],
        on_end: Callable[[Outcome, bytes], None],
    ) -> None:
        self._plan = plan
        self._program = program
        self._address = address
        self._host = host
        self._log = log
        self._on_end = on_end
        # Guards the running processes.
        self._lock = threading.Lock()
        self._running: dict[int, Trainer] = {}
        self._is_over = False
        self._threads: list[threading.Thread] = []

    def start(self, join_token: JoinToken, slot: int, slots: int) -> None:
        """Start a process. See `Members.start`."""
        thread = threading.Thread(
            target=self._run_process, args=(join_token, slot, slots), daemon=True
        )
        self._threads.append(thread)
        thread.start()

    def send(self, number: int, member: int | None = None) -> None:
        """Raise KeyboardInterrupt in all processes, or in one, or kill them."""
        with self._lock:
            for each, trainer in self._running.items():
                if member in (None, each):
                    trainer.kill() if number == signal.SIGKILL else trainer.interrupt()

    def __enter__(self) -> FunctionMembers:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self.send(signal.SIGKILL)
        for thread in self._threads:
            thread.join()

    def _run_process(self, join_token: JoinToken, slot: int, slots: int) -> None:
        """Run a process to its end, and report it."""
        number, result = join_token.number, b""
        try:
            outcome, result = self._run(join_token, slot, slots)
        except Exception as error:  # noqa: BLE001 - the launcher must be notified of every end
            text = str(error) if isinstance(error, PreflightError) else repr(error)
            outcome = Outcome(number, OutcomeKind.PREFLIGHT, exit="not started", message=text)
        self._on_end(replace(outcome, host=self._host), result)

    def _run(self, join_token: JoinToken, slot: int, slots: int) -> tuple[Outcome, bytes]:
        number = join_token.number
        plan = replace(self._plan, num_threads=max(1, int(cpus.allowed() / slots)))
        given = ([number], self._address, plan, self._program, self._log, lambda _: None)
        with Trainers(*given) as trainers:
            (trainer,) = trainers.all
            with self._lock:
                self._running[number] = trainer
            if self._is_over:
                trainer.kill()
            try:
                mode = trainers.gpu_plan.mode
                (seen,) = trainers.gpus(self._host)
                seen = agreement.RankGpus(self._host, slot, seen.uuids, seen.error)
                required = trainers.gpu_plan.is_required
                if problem := agreement.check_gpus(mode, [seen], is_required=required):
                    raise PreflightError(problem)
                trainer.send(
                    JobFrame(
                        json.dumps(join_token.to_dict()),
                        plan.settings.to_json(),
                        local_rank=slot,
                        gpu=agreement.own_gpu(mode, [seen], slot, (), None).ordinal,
                        env=member_variables(slot),
                        is_elastic=True,
                    )
                )
                trainer.wait()
            finally:
                with self._lock:
                    del self._running[number]
            return trainer.outcome(host=self._host), trainer.result
