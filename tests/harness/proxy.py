"""A TCP proxy between two processes, which can refuse, cut or swallow bytes."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Iterator


class Proxy:
    """Forwards connections to one address. A context manager with one thread, which waits for readable sockets.

    Attributes:
        address: listening address.
        swallows: whether bytes are dropped in both directions, while connections stay open.
        forwarded: number of forwarded bytes.
    """

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._listening = socket.create_server(("127.0.0.1", 0))
        host, port = self._listening.getsockname()[:2]
        self.address = (str(host), int(port))
        self.swallows = False
        self.forwarded = 0
        self._peers: dict[socket.socket, socket.socket] = {}
        self._refuses = False
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="proxy")

    def cut(self) -> int:
        """Close every connection, and return their number."""
        with self._lock:
            for sock in self._peers:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
            return len(self._peers) // 2

    @contextlib.contextmanager
    def refusing(self) -> Iterator[None]:
        """Cut every connection, and close each new connection at once."""
        self._refuses = True
        self.cut()
        yield
        self._refuses = False

    def __enter__(self) -> Proxy:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        for sock in (self._listening, *self._peers):
            sock.close()

    def _run(self) -> None:
        while not self._is_over.is_set():
            ready, _, _ = select.select([self._listening, *self._peers], [], [], 0.02)
            with self._lock:
                for sock in ready:
                    if sock is self._listening:
                        self._accept()
                    elif sock in self._peers:
                        self._pass(sock)

    def _accept(self) -> None:
        near, _ = self._listening.accept()
        if self._refuses:
            near.close()
            return
        far = socket.create_connection(self._target)
        self._peers.update({near: far, far: near})

    def _pass(self, sock: socket.socket) -> None:
        other = self._peers[sock]
        try:
            data = sock.recv(1 << 16)
            if data and not self.swallows:
                other.sendall(data)
                self.forwarded += len(data)
        except OSError:
            data = b""
        if not data:
            for one in (sock, other):
                del self._peers[one]
                one.close()
