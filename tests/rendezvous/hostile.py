"""Malicious peers with the key: they send recorded frames, changed, to a live engine.

`python -m tests.rendezvous.hostile <frames> <seed>` attacks one engine after another while another job in the
same process continues, and prints what happened as JSON. It changes frames that it has recorded between
honest ranks without knowing their bodies, so it follows the wire format by itself. `--only <n>` repeats one
session of a run.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import random
import socket
import struct
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sparkhvd.engine.calls import Call, Reduction
from sparkhvd.engine.engine import Engine
from sparkhvd.engine.library import Collective, ReduceOp
from sparkhvd.engine.work import Work
from sparkhvd.errors import InternalError, MismatchError, SparkhvdError
from sparkhvd.rendezvous import Connections
from sparkhvd.settings import Settings
from tests.engine.arrays import allreduce, dtype_of, start_allreduce, start_broadcast, view
from tests.harness.ranks import run_threads

HEADER = struct.Struct("<IB3x")  # length of the body, type
# The types that this file treats specially. A test compares them with the engine's header.
HELLO, MAPPED, REFUSE, DATA, ABORT = 1, 2, 5, 6, 8
STALL_S = 0.1
# A coordinator that is silent, or that sends unrequested bytes, is given up 5 s after stall_shutdown_s; most
# sessions end by an abort before that.
PATIENCE_S = 2 * STALL_S
LIMIT_S = 2.0
AT_ONCE = 4
BATCH = 40
SETTINGS = Settings(
    connect_timeout_s=STALL_S, stall_shutdown_s=STALL_S, stall_warning_s=0, spin_us=0
)


# --- Recording honest ranks ---


def split_frames(data: bytes) -> list[bytes]:
    """Split a connection's bytes into frames."""
    frames = []
    while data:
        length, _ = HEADER.unpack_from(data)
        frames.append(data[: HEADER.size + length])
        data = data[HEADER.size + length :]
    return frames


def type_of(frame: bytes) -> int:
    return frame[4]


class Tap:
    """A connection between two ranks that remembers what each has sent."""

    def __init__(self) -> None:
        self.first, first_inside = socket.socketpair()
        self.second, second_inside = socket.socketpair()
        self.sent = (bytearray(), bytearray())  # by the first, by the second
        self._threads = [
            threading.Thread(target=self._pump, args=ends, name="test-tap", daemon=True)
            for ends in (
                (first_inside, second_inside, self.sent[0]),
                (second_inside, first_inside, self.sent[1]),
            )
        ]
        for thread in self._threads:
            thread.start()
        self._inside = (first_inside, second_inside)

    def _pump(self, source: socket.socket, target: socket.socket, log: bytearray) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                log += data
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for thread in self._threads:
            thread.join(5)
        for end in self._inside:
            end.close()


def start_everything(engine: Engine) -> list[Work]:
    """Start one operation of every kind that the engine has. They need not succeed."""
    rank, size = engine.rank, engine.size
    works = [
        start_allreduce(engine, "a", np.ones(3, np.float32))[0],
        start_allreduce(engine, "big", np.ones(20_000, np.float64))[0],
        start_broadcast(engine, "b", np.ones(5, np.int64), size - 1)[0],
        engine.barrier(name="c"),
        start_allreduce(engine, "different", np.ones(3 + rank))[0],
    ]
    rows = np.ones((rank + 1, 2), np.float32)
    works.append(engine.allgather(view(rows), name="g", dtype=dtype_of(rows), keep=rows))
    parts = np.ones((5, 2), np.int32)
    call = engine.prepare(
        Collective.ALLTOALL, [view(parts)], dtype_of(parts), numbers=(5, *[0] * (size - 1))
    )
    works.append(engine.start(call, "t", parts))
    result = np.empty((len(range(rank, 5, size)), 2), np.int32)
    call = engine.prepare(
        Collective.REDUCESCATTER,
        [view(parts, result)],
        dtype_of(parts),
        Reduction(ReduceOp.SUM),
    )
    works.append(engine.start(call, "r", (parts, result)))
    works.append(engine.add_process_set([0, 1]))
    works.append(engine.configure(chunk_bytes=8192))
    works.append(engine.start(Call(Collective.REGISTER, numbers=(10_000,)), "m"))
    return works


@dataclass(frozen=True)
class Recording:
    """Frames of honest ranks by sender and receiver, in order."""

    size: int
    hosts: tuple[int, ...]
    frames: dict[tuple[int, int], list[bytes]]

    def handshake(self, sender: int, receiver: int) -> list[bytes]:
        return [f for f in self.frames[sender, receiver] if type_of(f) in (HELLO, MAPPED)]

    def pool(self) -> list[bytes]:
        return [frame for frames in self.frames.values() for frame in frames]


def record(size: int, hosts: tuple[int, ...]) -> Recording:
    """Let honest ranks work, disagree and leave, once normally and once by an abort."""
    frames: defaultdict[tuple[int, int], list[bytes]] = defaultdict(list)
    for is_aborted in (False, True):
        # Of every pair, one for control frames and one for tensors.
        taps = {(a, b, kind): Tap() for b in range(size) for a in range(b) for kind in range(2)}

        def body(rank: int, taps: Any = taps, is_aborted: bool = is_aborted) -> None:
            sockets = [[-1] * size for _ in range(2)]
            for (a, b, kind), tap in taps.items():
                if rank == a:
                    sockets[kind][b] = tap.first.detach()
                elif rank == b:
                    sockets[kind][a] = tap.second.detach()
            settings = Settings(connect_timeout_s=20, stall_shutdown_s=20)
            with Engine(Connections(rank, size, hosts, *sockets), settings) as engine:
                for work in start_everything(engine):
                    with contextlib.suppress(MismatchError):
                        work.wait()
                engine.barrier(name="end").wait()
                engine.join().wait()
                if is_aborted and rank == size - 1:
                    engine.abort("recorded")

        for outcome in run_threads([lambda r=r: body(r) for r in range(size)]):
            if isinstance(outcome, BaseException) and not is_aborted:
                raise outcome
        for (a, b, _), tap in taps.items():
            tap.close()
            for pair, sent in zip(((a, b), (b, a)), tap.sent, strict=True):
                new = split_frames(bytes(sent))
                frames[pair] += [f for f in new if not is_aborted or type_of(f) == ABORT]
    return Recording(size, hosts, dict(frames))


# --- Changing frames ---

NUMBERS = (0, 1, 2, 0x7F, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x7FF0000000000000, 2**64 - 1)


def frame_of(kind: int, body: bytes, length: int | None = None) -> bytes:
    return HEADER.pack(len(body) if length is None else length, kind) + body


def change_bytes(body: bytearray, dice: random.Random) -> None:
    for _ in range(dice.randint(1, 4) if body else 0):
        body[dice.randrange(len(body))] = dice.randrange(256)


def change_number(body: bytearray, dice: random.Random) -> None:
    """Change a count, a length or a dimension."""
    number = dice.choice(NUMBERS)
    at = dice.randrange(max(1, len(body) - 3))
    raw = struct.pack("<Q", number)[: 8 if number > 0xFFFFFFFF else dice.choice((4, 8))]
    body[at : at + len(raw)] = raw


def change_process_set(body: bytearray, dice: random.Random) -> None:
    body[:4] = struct.pack("<i", dice.choice((-(2**31), -1, 1, 2, 7, 2**31 - 1)))


def cut(body: bytearray, dice: random.Random) -> None:
    del body[dice.randint(0, len(body)) :]


def lengthen(body: bytearray, dice: random.Random) -> None:
    body += dice.randbytes(dice.randint(1, 40))


CHANGES = (change_bytes, change_number, change_process_set, cut, lengthen)


def mutate(frame: bytes, dice: random.Random, pool: list[bytes]) -> bytes:
    """Return the frame with one change, or unchanged at an unexpected moment."""
    kind, body = type_of(frame), bytearray(frame[HEADER.size :])
    how = dice.choice((*CHANGES, *CHANGES, "length", "type", "body", "padding", "noise", "none"))
    if how == "length":
        length = dice.choice((0, len(body) - 1, len(body) + 1, 1 << 20, 4 << 20, 2**31, 2**32 - 1))
        return frame_of(kind, bytes(body), max(0, length))
    if how == "type":
        return frame_of(dice.choice((0, 9, 10, 255, dice.randrange(256))), bytes(body))
    if how == "body":
        return frame_of(kind, dice.choice(pool)[HEADER.size :])
    if how == "padding":  # three bytes of the header that are 0
        return frame[:5] + dice.randbytes(3) + frame[8:]
    if how == "noise":
        return dice.randbytes(dice.randint(1, 60))
    if not isinstance(how, str):
        how(body, dice)
    return frame_of(kind, bytes(body))


# --- A session ---


@dataclass
class Session:
    """Attack on one engine."""

    frames: int = 0
    kinds: set[int] = field(default_factory=set)
    texts: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    is_stalled: bool = False


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        client = socket.create_connection(listening.getsockname())
        return client, listening.accept()[0]


def send_all(sock: socket.socket, data: bytes, dice: random.Random) -> None:
    """Send in pieces. Stop when the victim has stopped reading or closed."""
    sock.settimeout(0.02)
    with contextlib.suppress(OSError):
        while data:
            cut = dice.choice((1, 7, 64, 4096, len(data))) if dice.random() < 0.3 else len(data)
            sock.sendall(data[:cut])
            data = data[cut:]


def attack(recording: Recording, dice: random.Random, patience_s: float = PATIENCE_S) -> Session:
    """Connect a victim with one malicious peer and, in a larger world, with its accomplices."""
    session = Session()
    size = recording.size
    victim = dice.randrange(size)
    pool = recording.pool()
    ours: dict[int, list[socket.socket]] = {}  # by peer: for control frames, for tensors
    sockets = [[-1] * size for _ in range(2)]
    spoils_handshake = dice.random() < 0.1
    for peer in range(size):
        if peer == victim:
            continue
        is_tcp = dice.random() < 0.3
        pairs = [tcp_pair() if is_tcp else socket.socketpair() for _ in range(2)]
        ours[peer] = [mine for mine, _ in pairs]
        for row, (_, theirs) in zip(sockets, pairs, strict=True):
            row[peer] = theirs.detach()
        mine = ours[peer][0]
        greeting = recording.handshake(peer, victim)
        if spoils_handshake:
            greeting = [mutate(frame, dice, pool) for frame in greeting]
            session.frames += len(greeting)
            session.kinds |= {type_of(f) for f in greeting if len(f) > 4}
        send_all(mine, b"".join(greeting), dice)
        # During the short wait of a starting engine, an end is clearer than silence.
        if spoils_handshake and dice.random() < 0.8:
            mine.shutdown(socket.SHUT_WR)
    began = time.monotonic()
    try:
        engine = Engine(Connections(victim, size, recording.hosts, *sockets), SETTINGS)
    except SparkhvdError as error:
        judge(session, error)
    else:
        work_off(engine, ours, victim, recording, dice, session, patience_s)
    finally:
        close_all(ours)
    if time.monotonic() - began > patience_s + LIMIT_S:
        session.problems.append(f"took {time.monotonic() - began:.2f} s")
    return session


def close_all(ours: dict[int, list[socket.socket]]) -> None:
    for ends in ours.values():
        for end in ends:
            end.close()


def has_ended(work: Work) -> bool:
    try:
        return work.done()
    except SparkhvdError:
        return True


def work_off(
    engine: Engine,
    ours: dict[int, list[socket.socket]],
    victim: int,
    recording: Recording,
    dice: random.Random,
    session: Session,
    patience_s: float,
) -> None:
    """Let the engine work and its peers attack. Every operation must end."""
    works: list[Work] = []
    if dice.random() < 0.9:
        try:
            works = start_everything(engine)
        except SparkhvdError as error:  # the first frames of the malicious peer were enough
            judge(session, error)
    for peer, ends in ours.items():
        lie(ends, peer, victim, recording, dice, session)
    await_ends(engine, works, session, patience_s)
    close_all(ours)
    started = time.monotonic()
    engine.shutdown()
    if time.monotonic() - started > 1.5:
        session.problems.append(f"shutdown took {time.monotonic() - started:.2f} s")


def lie(
    ends: list[socket.socket],
    peer: int,
    victim: int,
    recording: Recording,
    dice: random.Random,
    session: Session,
) -> None:
    """Send expected frames first, so that the attack starts at every depth, then mutated frames."""
    own = [f for f in recording.frames[peer, victim] if type_of(f) not in (HELLO, MAPPED)]
    pool = recording.pool()
    honest = own[: dice.randint(0, len(own))] if dice.random() < 0.7 else []
    lies = [
        mutate(dice.choice(own if dice.random() < 0.7 else pool), dice, pool)
        for _ in range(dice.randint(1, 20))
    ]
    session.frames += len(honest) + len(lies)
    session.kinds |= {type_of(f) for f in honest + lies if len(f) > 4}
    # Each on its connection, tensors before or after the frames that need them, sometimes on the other connection.
    swaps = dice.random() < 0.05
    for kind in dice.choice(((0, 1), (1, 0))):
        is_data = bool(kind) != swaps
        data = b"".join(f for f in honest + lies if (f[4:5] == bytes([DATA])) == is_data)
        if dice.random() < 0.2:  # half a frame at the end
            data = data[: -dice.randint(1, 9)]
        send_all(ends[kind], data, dice)
    for mine in ends:
        if dice.random() < 0.95:
            with contextlib.suppress(OSError):
                mine.shutdown(socket.SHUT_WR)
        if dice.random() < 0.5:
            mine.close()


def await_ends(engine: Engine, works: list[Work], session: Session, patience_s: float) -> None:
    """Wait until every operation has ended by itself or, after the test's limit, by an abort."""
    deadline = time.monotonic() + patience_s
    for work in works:
        try:
            work.wait(max(0.0, deadline - time.monotonic()))
        except SparkhvdError as error:
            if "continues: wait again" not in str(error):
                judge(session, error)
                continue
            session.is_stalled = True
            engine.abort("the test has seen enough")
            with contextlib.suppress(SparkhvdError):
                work.wait(LIMIT_S)
            if not has_ended(work):
                session.problems.append(f"hangs after an abort: {error}")


def judge(session: Session, error: SparkhvdError) -> None:
    """Return whether the error says which rank did what."""
    text = str(error)
    session.texts.append(text)
    # The peer writes the text of these, which may say anything.
    from_peer = session.kinds & {REFUSE, ABORT}
    if isinstance(error, InternalError) and not from_peer:
        session.problems.append(f"taken for a defect: {text}")
    if "rank " not in text.lower() and "ranks " not in text.lower() and not from_peer:
        session.problems.append(f"names no rank: {text}")


# --- The whole attack ---


@dataclass
class Usage:
    """Resources of a process."""

    rss_bytes: int
    descriptors: int
    threads: int
    mappings: int

    @classmethod
    def now(cls) -> Usage:
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return cls(
            pages * os.sysconf("SC_PAGESIZE"),
            len(os.listdir("/proc/self/fd")),
            len(os.listdir("/proc/self/task")),
            len(Path("/proc/self/maps").read_text().splitlines()),
        )


class Bystanders:
    """Two ranks of another job in this process, which work all the time."""

    def __init__(self) -> None:
        self.operations = 0
        self.errors: list[str] = []
        self._stop = threading.Event()

    def _work(self, rank: int, ends: tuple[socket.socket, socket.socket]) -> None:
        try:
            settings = Settings(stall_shutdown_s=30, slot_bytes=4096)
            sockets = [self._sockets(rank, end) for end in ends]
            with Engine(Connections(rank, 2, (0, 0), *sockets), settings) as engine:
                while True:
                    number = self.operations
                    result = allreduce(engine, "x", np.full(3000, rank + 1.0))
                    assert (result == 3).all()
                    go_on = allreduce(engine, "continue", np.array([1 - self._stop.is_set()]))
                    if go_on[0] < 2:
                        return
                    if rank == 0:
                        self.operations = number + 2
                    time.sleep(0.001)
        except BaseException as error:  # noqa: BLE001 - reported at the end
            self.errors.append(f"rank {rank}: {error!r}")

    def _sockets(self, rank: int, end: socket.socket) -> list[int]:
        sockets = [-1, -1]
        sockets[1 - rank] = end.detach()
        return sockets

    def __enter__(self) -> Bystanders:
        pairs = zip(socket.socketpair(), socket.socketpair(), strict=True)
        self._threads = [
            threading.Thread(target=self._work, args=(rank, ends), name=f"bystander-{rank}")
            for rank, ends in enumerate(pairs)
        ]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(30)


def recordings() -> list[Recording]:
    return [record(2, (0, 1)), record(3, (0, 1, 2)), record(2, (0, 0))]


def batches(frames: int, seed: int) -> Iterator[list[Session]]:
    """Run attacks until that many frames were sent, some in parallel, because many only wait."""
    known = recordings()
    count = sent = 0

    def one(number: int) -> Session:
        dice = random.Random(f"{seed} {number}")
        return attack(dice.choice(known), dice)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        while sent < frames:
            batch = list(pool.map(one, range(count, count + BATCH)))
            count += BATCH
            sent += sum(session.frames for session in batch)
            yield batch


def run(frames: int, seed: int) -> dict[str, Any]:
    """Return the summary of an attack. `problems` is empty if all checks passed."""
    done: list[Session] = []
    middle: Usage | None = None
    with Bystanders() as others:
        for batch in batches(frames, seed):
            done += batch
            for session in batch:  # kept small, because a million frames have many texts
                session.texts = [text[:200] for text in session.texts[:1]]
                session.kinds = set()
            if middle is None and sum(s.frames for s in done) >= frames / 3:
                middle = Usage.now()
        assert middle is not None
        end = Usage.now()
    problems = [f"session {i}: {p}" for i, s in enumerate(done) for p in s.problems]
    endings = Counter(text.partition(": ")[2][:60] for s in done for text in s.texts)
    return {
        "frames": sum(s.frames for s in done),
        "sessions": len(done),
        "stalled": sum(s.is_stalled for s in done),
        "problems": problems + others.errors,
        "operations_of_others": others.operations,
        "rss_growth_bytes": end.rss_bytes - middle.rss_bytes,
        "descriptor_growth": end.descriptors - middle.descriptors,
        "thread_growth": end.threads - middle.threads,
        "mapping_growth": end.mappings - middle.mappings,
        "endings": dict(endings.most_common(12)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("frames", type=int)
    parser.add_argument("seed", type=int)
    parser.add_argument("--only", type=int, help="repeat this session and show it")
    options = parser.parse_args()
    if options.only is None:
        print(json.dumps(run(options.frames, options.seed)))
        return
    dice = random.Random(f"{options.seed} {options.only}")
    session = attack(dice.choice(recordings()), dice)
    json.dump(vars(session) | {"kinds": sorted(session.kinds)}, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
