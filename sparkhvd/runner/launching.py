"""Code shared by launches under Spark and on this host."""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import re
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, TextIO

from sparkhvd import as_horovod
from sparkhvd.errors import InvalidArgumentError, PreflightError, SparkhvdError
from sparkhvd.interfaces import address_on, address_towards, is_loopback, loopback
from sparkhvd.rendezvous import Job
from sparkhvd.runner.gpu.agreement import OwnGpu
from sparkhvd.runner.protocol import (
    THREAD_VARIABLES,
    JobFrame,
    dump_program,
    failing_path,
    unpicklable,
)
from sparkhvd.settings import JobSettings, Settings
from sparkhvd.topology import horovod_variables, topology


def dump_call(
    fn: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
) -> bytes:
    """Pickle a call. The error names the unpicklable part.

    Raises:
        InvalidArgumentError: `fn` is not callable, or `fn` or an argument cannot be pickled.
    """
    if not callable(fn):
        raise InvalidArgumentError(
            f"fn is {fn!r}; it must be a function to call on every rank. Give the function itself: run(train), not run(train())."
        )
    if isinstance(args, (str, bytes)) or not isinstance(args, Sequence):
        raise InvalidArgumentError(
            f"args is {args!r}; it must be a tuple of positional arguments, such as args=(10,)."
        )
    if not isinstance(kwargs, Mapping):
        raise InvalidArgumentError(
            f"kwargs is {kwargs!r}; it must be a mapping of names to values."
        )
    try:
        return dump_program(fn, tuple(args), dict(kwargs))
    except Exception as e:
        raise InvalidArgumentError(_unpicklable(fn, args, kwargs, e)) from e


def _unpicklable(
    fn: Callable[..., object],
    args: Sequence[object],
    kwargs: Mapping[str, object],
    error: Exception,
) -> str:
    parts = [(f"args[{i}]", value) for i, value in enumerate(args)]
    parts += [(f"kwargs[{name!r}]", value) for name, value in kwargs.items()]
    for name, value in parts:
        try:
            dump_program(len, (value,), {})
        except Exception as e:  # noqa: BLE001 - pickling runs methods of the user's classes
            return (
                f"{name}, a {type(value).__module__}.{type(value).__qualname__}, cannot be pickled, so it "
                f"cannot travel to the ranks ({type(e).__name__}: {e}{_at(name, value)}). Create it inside fn."
            )
    name = getattr(fn, "__qualname__", repr(fn))
    return (
        f"fn={name} cannot be pickled, so it cannot travel to the ranks ({type(error).__name__}: {error}{_at('fn', fn)}). "
        "It must not refer to a Spark session, a lock, an open file or the like; create them inside fn."
    )


def _at(name: str, value: object) -> str:
    """Name the unpicklable part of a value as the end of a sentence, or "" for the whole value."""
    path = failing_path(value, unpicklable)
    return f", at {name}{path}" if path else ""


def check_env(env: Mapping[str, str]) -> dict[str, str]:
    """Check the ranks' variables, and add the name `horovod` if this process has it.

    Raises:
        InvalidArgumentError: a name or value is not text.
    """
    for name, value in env.items():
        if not isinstance(name, str) or not isinstance(value, str) or not name or "=" in name:
            raise InvalidArgumentError(
                f"env[{name!r}] is {value!r}; names and values of environment variables must be text."
            )
    return {**as_horovod.variables(), **env}


# Keys that `thread_variables` reads.
THREAD_CONF_KEYS = (
    *(f"spark.executorEnv.{name}" for name in THREAD_VARIABLES),
    "spark.driver.cores",
)


def thread_variables(conf: Mapping[str, str]) -> dict[str, str]:
    """Read the user's thread settings: Spark's executor conf, else this process's environment.

    Spark's workers have OMP_NUM_THREADS in any case, so its value there says nothing.
    """
    own = environ()
    if own.get(THREAD_VARIABLES[0]) == conf.get("spark.driver.cores"):  # set by spark-submit
        own.pop(THREAD_VARIABLES[0], None)
    found = {n: conf.get(f"spark.executorEnv.{n}") or own.get(n) for n in THREAD_VARIABLES}
    return {name: value for name, value in found.items() if value}


def choose_settings(
    given: Settings | None, env: Mapping[str, str], conf: Mapping[str, str] | None = None
) -> JobSettings:
    """Resolve the settings of a launch.

    Args:
        given: settings given in code; neither `env` nor a rank's variables override values other than the defaults.
        env: variables of the ranks.
        conf: of Spark; used, like this process's environment, if `given` is None.

    Raises:
        InvalidArgumentError: the value of a variable or key is not allowed.
    """
    if given is None:
        return JobSettings(Settings.resolve(conf=conf).overridden(env))
    if not isinstance(given, Settings):
        raise InvalidArgumentError(f"settings is {given!r:.100}; it must be a sparkhvd.Settings.")
    return JobSettings(given.overridden(env, given.given), given.given)


# Erases the cursor's line.
ERASE = "\r\x1b[K"
# A short string in a pickle: its length, then its text. Module names are such strings, both in references and in
# an `import` inside the function.
_MENTIONED = re.compile(
    rb"\x8c(.)((?:torch|sparkhvd\.(?:torch|training|distributed))[\w.]*)", re.DOTALL
)
_SCAN_BYTES = 1 << 20


def preload(program: bytes, requirements: Sequence[str] = ()) -> list[str]:
    """Find the slow modules of a pickled call, to import while the ranks connect.

    An optimization: other modules are imported when the function needs them.
    """
    names = {"torch"} & set(requirements)
    for length, text in _MENTIONED.findall(program, 0, _SCAN_BYTES):
        if len(text) >= length[0]:
            name = text[: length[0]].decode()
            names.add("torch" if name.startswith("torch.") else name)
    modules = {name for name in names if name == "torch" or name.startswith("sparkhvd.")}
    return ["pyspark.cloudpickle", *sorted(modules)]


def environ() -> dict[str, str]:
    return dict(os.environ)  # noqa: TID251 - ranks on other hosts get some of them


def job_frame(job: Job, settings: JobSettings, master: tuple[str, int], gpu: OwnGpu) -> JobFrame:
    """Make a rank's job frame, once all ranks are known.

    Args:
        job: ranks of the job, and this one.
        settings: of the launch.
        master: address for torch.distributed.
        gpu: GPU of the rank.
    """
    place = topology(job.rank, [endpoint.host_key for endpoint in job.endpoints])
    return JobFrame(
        job=job.to_json(),
        settings=settings.to_json(),
        local_rank=place.local_rank,
        attempt=job.attempt,
        gpu=gpu.ordinal,
        env={
            "RANK": str(place.rank),
            "WORLD_SIZE": str(place.size),
            "LOCAL_RANK": str(place.local_rank),
            "LOCAL_WORLD_SIZE": str(place.local_size),
            "MASTER_ADDR": master[0],
            "MASTER_PORT": str(master[1]),
            **horovod_variables(place, socket.gethostname()),
            **({} if gpu.visible is None else {"CUDA_VISIBLE_DEVICES": gpu.visible}),
        },
    )


def own_address(
    host: str, hosts: Sequence[str], choice: str = "", *, is_local: bool = False
) -> str:
    """Numeric address of this host for ranks on other hosts.

    Args:
        host: Spark's name or address of this host.
        hosts: Spark's names or addresses of the hosts of all ranks.
        choice: `Settings.interfaces`.
        is_local: whether all ranks are children of one process. Then Spark's name is the driver's
            (`spark.driver.host`), which this host may not resolve.

    Raises:
        OSError: `host` has no address.
        PreflightError: no interface of the choice is here and up.
    """
    if choice:
        return address_on(choice)
    if is_local:
        return loopback()
    try:
        addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as e:
        raise OSError(
            f"Spark calls this host {host!r}, and that name has no address here: {e}"
        ) from e
    # The name may resolve to IPv4 and IPv6. Spark's JVM prefers IPv4, and firewalls often allow only IPv4.
    addresses.sort(key=lambda entry: entry[0] != socket.AF_INET)
    address = str(addresses[0][4][0])
    elsewhere = [other for other in hosts if other != host]
    if elsewhere and is_loopback(address):
        address = address_towards(elsewhere[0])  # Debian maps a host's own name to 127.0.1.1
    return address


@contextlib.contextmanager
def within_open_files(num_proc: int) -> Iterator[None]:
    """Raise an error with a remedy if the launch in the block reaches the limit of open files.

    Raises:
        PreflightError: it does.
    """
    try:
        yield
    except (OSError, SparkhvdError) as error:
        causes = (error, error.__cause__)
        if not any(getattr(each, "errno", None) == errno.EMFILE for each in causes):
            raise
        import resource  # absent on Windows, where a Connect client may import this file

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        raise PreflightError(
            f"num_proc={num_proc}: this process may open {soft} files (RLIMIT_NOFILE), and needs more for the ranks' pipes and sockets. "
            f"Raise the limit (ulimit -n {max(1024, 16 * num_proc)}; the hard limit is {hard}), or start fewer ranks."
        ) from error


@contextlib.contextmanager
def reserved_port(address: str) -> Iterator[int]:
    """Yield a reserved TCP port. torch.distributed of rank 0 can still listen on it.

    Linux lets several sockets with SO_REUSEADDR bind one port while none of them listens.
    """
    family = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]
    with socket.socket(family, socket.SOCK_STREAM) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((address, 0))
        port: int = holder.getsockname()[1]
        yield port


def load_result(data: bytes) -> Any:
    """Unpickle a rank's result, received through Spark or this process's own pipe."""
    return pickle.loads(data)  # noqa: S301


def log_to(stream: TextIO | None, *, verbose: int, timestamps: bool) -> Callable[[str], None]:
    """Make a function to write lines of ranks to a stream, or to stderr unless `verbose` is 0."""

    def log(text: str) -> None:
        if stream is not None or verbose > 0:
            to = sys.stderr if stream is None else stream
            write_to(to, "".join(line_of(line, timestamp=timestamps) for line in text.split("\n")))

    return log


def erase_line(stream: TextIO) -> None:
    """Erase an unfinished line on a terminal, such as a progress bar."""
    if getattr(stream, "isatty", lambda: False)():
        stream.write(ERASE)


def write_to(stream: TextIO, text: str) -> None:
    """Write to a stream and flush it, escaping unencodable characters."""
    try:
        stream.write(text)
    except UnicodeEncodeError as e:
        stream.write(text.encode(e.encoding, "backslashreplace").decode(e.encoding))
    stream.flush()


def line_of(text: str, *, timestamp: bool) -> str:
    """Make a line of output: the text and a newline, with the local time in front if `timestamp` is True."""
    now = f"{datetime.now().astimezone().isoformat(timespec='milliseconds')} " if timestamp else ""
    return f"{now}{text}\n"
