"""Malicious peers without the key: `python -m tests.rendezvous.malicious_peers` with JSON on standard input.

Input: `endpoints` (as `Endpoint.to_dict` writes them), `messages` (the minimum to send), `until` (a file:
continue until it exists and a false proof was answered, with any number of messages), `within_s` (the time limit),
`seed`, and `recorded`: handshakes of an eavesdropper, each a rank, a hello and a proof in hex. Output, as
JSON: the numbers of messages, connections and listeners that answered, and `accepted`: connections that were
not closed after a false proof.
"""

from __future__ import annotations

import contextlib
import json
import random
import socket
import struct
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

from sparkhvd.rendezvous import Endpoint
from sparkhvd.rendezvous.listener import unix_address
from sparkhvd.wire import rebuild

# The public part of the handshake.
HELLO = struct.Struct("!8sIIB32s")
NOTICE = struct.Struct("!8sIIBI32s")
REPLY_BYTES = 64
HELD_OPEN = 150

Conversation = Generator[None, None, None]


class MaliciousPeers:
    """Many parallel conversations without the key."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.endpoints = [rebuild(Endpoint, e) for e in plan["endpoints"]]
        self.recorded = [(r, bytes.fromhex(h), bytes.fromhex(p)) for r, h, p in plan["recorded"]]
        self.dice = random.Random(plan["seed"])
        self.messages = self.connections = self.answers = self.accepted = self.refused = 0

    def run(self, messages: int, until: Path, within_s: float) -> dict[str, int]:
        """Send that many messages, and more until the file exists and a false proof was answered. Then close everything.

        Listeners answer only while the ranks meet, and on a busy machine all messages may be sent between two rendezvous.
        """
        conversations: list[Conversation] = []
        deadline = time.monotonic() + within_s
        while (
            self.messages < messages or not self.answers or not until.exists()
        ) and time.monotonic() < deadline:
            conversations.append(self.talk())
            for index in [-1, *(self.dice.randrange(len(conversations)) for _ in range(3))]:
                with contextlib.suppress(StopIteration, OSError, IndexError):
                    next(conversations[index])
                    continue
                with contextlib.suppress(IndexError):
                    conversations.pop(index)
            if len(conversations) > HELD_OPEN:
                conversations.pop(0).close()
        time.sleep(0.2)
        for conversation in conversations:
            with contextlib.suppress(StopIteration, OSError):
                next(conversation)
            conversation.close()
        counts = ("messages", "connections", "answers", "accepted", "refused")
        return {name: getattr(self, name) for name in counts}

    def dial(self, endpoint: Endpoint) -> socket.socket:
        is_unix = bool(endpoint.unix_name) and self.dice.random() < 0.5
        sock = socket.socket(socket.AF_UNIX if is_unix else socket.AF_INET)
        try:
            if is_unix:
                sock.setblocking(False)
                sock.connect(unix_address(endpoint.unix_name))
            else:
                sock.settimeout(0.05)  # a full backlog does not answer
                sock.connect((endpoint.address, endpoint.port))
            sock.setblocking(False)
        except OSError:
            self.refused += 1
            sock.close()
            raise
        self.connections += 1
        return sock

    def send(self, sock: socket.socket, data: bytes) -> None:
        self.messages += 1
        sock.send(data)

    def hello(self) -> bytes:
        """Return a hello of the right form, at times with the right contents."""
        dice = self.dice
        rank = dice.choice((0, 1, 2, 3, 2**32 - 1))
        generation = dice.choice((0, 1, dice.randrange(40), 2**32 - 1))
        magic = b"sparkhvd" if dice.random() < 0.9 else dice.randbytes(8)
        return HELLO.pack(magic, rank, generation, dice.choice((0, 0, 1, 255)), dice.randbytes(32))

    def talk(self) -> Conversation:
        """Attack over one connection. Yields where it would have to wait."""
        dice = self.dice
        rank = dice.randrange(len(self.endpoints))
        move = dice.choice(
            ("garbage", "hellos", "notices", "proof", "proof", "reset", "loris", "flood")
        )
        with self.dial(self.endpoints[rank]) as sock:
            if move == "garbage":
                for _ in range(dice.randint(1, 10)):
                    self.send(sock, dice.randbytes(dice.randint(1, 300)))
            elif move == "hellos":
                for _ in range(dice.randint(1, 10)):
                    self.send(sock, self.hello())
                yield
            elif move == "notices":
                for _ in range(dice.randint(1, 5)):
                    fields = [dice.choice((0, 1, 2, 2**32 - 1)) for _ in range(3)]
                    self.send(
                        sock,
                        NOTICE.pack(
                            b"sparkhvn",
                            fields[0],
                            fields[1],
                            dice.randrange(256),
                            fields[2],
                            dice.randbytes(32),
                        ),
                    )
            elif move == "reset":
                self.send(sock, self.hello()[: dice.randint(1, 48)])
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            elif move == "loris":
                for byte in self.hello():
                    self.send(sock, bytes([byte]))
                    yield
            elif move == "flood":
                for _ in range(5):
                    self.send(sock, dice.randbytes(1 << 16))
            else:
                yield from self.prove_falsely(sock, rank)

    def prove_falsely(self, sock: socket.socket, rank: int) -> Conversation:
        """Say hello as a rank that is expected, and answer the challenge with a recorded or random proof."""
        known = [(h, p) for r, h, p in self.recorded if r == rank]
        if not known:  # no rank is above the last one
            return
        hello, proof = self.dice.choice(known)
        self.send(sock, hello)
        reply = b""
        while len(reply) < REPLY_BYTES:
            try:
                part = sock.recv(REPLY_BYTES - len(reply))
            except BlockingIOError:
                yield
                continue
            if not part:
                return
            reply += part
        self.answers += 1
        self.send(sock, self.dice.choice((proof, reply[32:], self.dice.randbytes(32), reply[:32])))
        until = time.monotonic() + 5
        while time.monotonic() < until:
            try:
                # Closed, without a byte that only a rank may see.
                self.accepted += bool(sock.recv(1))
                return
            except BlockingIOError:
                yield
        self.accepted += 1


def main() -> None:
    plan = json.load(sys.stdin)
    print(
        json.dumps(
            MaliciousPeers(plan).run(plan["messages"], Path(plan["until"]), plan["within_s"])
        )
    )


if __name__ == "__main__":
    main()
