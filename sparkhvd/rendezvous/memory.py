"""Proof that two processes can map the same memory."""

from __future__ import annotations

import contextlib
import errno
import hmac
import mmap
import os
import secrets
import selectors
import socket
from collections.abc import Generator

from sparkhvd.engine.memfd import is_sealed_against_shrinking, new_memfd, seal_against_shrinking
from sparkhvd.rendezvous.loop import Wait, read, send

TOKEN_BYTES = 32


def offer_memory(sock: socket.socket, until: float) -> Generator[Wait, None, bool]:
    """Do the connecting side: pass a memory file with a token and expect an answer inside it."""
    token = secrets.token_bytes(TOKEN_BYTES)
    try:
        descriptor = new_memfd("sparkhvd-proof")
    except OSError:  # forbidden here: use sockets, and tell the peer
        send(sock, token)
        yield from read(sock, TOKEN_BYTES, until)
        send(sock, b"\0")
        return False
    try:
        os.ftruncate(descriptor, 2 * TOKEN_BYTES)
        seal_against_shrinking(descriptor)
        os.pwrite(descriptor, token, 0)
        socket.send_fds(sock, [token], [descriptor])
        answer = yield from read(sock, TOKEN_BYTES, until)
        shared = hmac.compare_digest(os.pread(descriptor, TOKEN_BYTES, TOKEN_BYTES), answer)
    finally:
        os.close(descriptor)
    send(sock, bytes([shared]))
    return shared


def check_memory(sock: socket.socket, until: float) -> Generator[Wait, None, bool]:
    """Do the accepting side: map the memory file, compare its token, write an answer into it."""
    yield Wait(sock, selectors.EVENT_READ, until)
    token, descriptors, _, _ = socket.recv_fds(sock, TOKEN_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
    answer = secrets.token_bytes(TOKEN_BYTES)
    shared = False
    try:
        if (
            len(token) < TOKEN_BYTES
        ):  # cut short or closed; a sender of this version never splits it
            raise ConnectionResetError(errno.ECONNRESET, "closed by the other side")
        with contextlib.suppress(
            OSError, ValueError
        ):  # cannot map: no shared memory between the two
            if descriptors and _has_room(descriptors[0]):
                with mmap.mmap(descriptors[0], 2 * TOKEN_BYTES) as memory:
                    shared = hmac.compare_digest(memory[:TOKEN_BYTES], token)
                    memory[TOKEN_BYTES:] = answer
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    send(sock, answer)
    verdict = yield from read(sock, 1, until)
    return shared and verdict == b"\1"


def _has_room(descriptor: int) -> bool:
    """Return True if the file holds both tokens and cannot shrink, which would kill a process that has mapped it."""
    return (
        is_sealed_against_shrinking(descriptor) and os.fstat(descriptor).st_size >= 2 * TOKEN_BYTES
    )
