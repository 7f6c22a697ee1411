"""A real file system like Databricks' Volumes: a FUSE mount whose files allow one sequential pass.

    with sequential_mount(folder, at) as place: ...

Every process of the host sees it. Only a file that is still open since its creation can be written, at its end. Other writes,
opening a file for appending, truncating it to a length other than 0, and (with `renames=False`) renaming fail with
EOPNOTSUPP or ENOSYS, as on Volumes. All other requests go to `folder`. The module implements the kernel's protocol
(linux/fuse.h), so no library is needed. Mounting needs root, or an own user namespace.

**Threads**: a separate process answers, one request at a time. **Ownership**: it holds `/dev/fuse`; the process
that mounted the folder unmounts it. **Shutdown**: unmounting ends the process.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.harness.mounts import mount, unmount

HEADER = struct.Struct("<IIQQIIIHH")
REPLY = struct.Struct("<IiQ")
ATTRIBUTES = struct.Struct("<QQQQQQIIIIIIIIII")
MAX_WRITE = 1 << 17
# Set attributes, make and remove folders and files, rename, write.
CHANGES = {4, 9, 10, 11, 12, 16, 35, 45}


class Refused(OSError):
    """Operation that the file system refuses."""

    def __init__(self, number: int = errno.EOPNOTSUPP) -> None:
        super().__init__(number, os.strerror(number))


class SequentialFolder:
    """Answers the kernel's requests from a folder."""

    def __init__(
        self,
        folder: str,
        *,
        renames: bool,
        kill_at: int | None = None,
        before_change: Callable[[], object] = lambda: None,
    ) -> None:
        self.renames = renames
        self.before_change = before_change
        # Number of allowed changes. The process that makes one more is killed.
        self.left = kill_at
        self.paths = {1: folder}
        self.nodes = {folder: 1}
        # Handle -> descriptor, and the written length, or None for reading.
        self.written: dict[int, int | None] = {}
        self.listings: dict[int, list[tuple[str, os.stat_result]]] = {}
        self.calls: dict[int, Callable[[int, bytes], bytes]] = {
            1: self.lookup,
            3: lambda node, _: self.attributes(self.paths[node]),
            4: self.set_attributes,
            9: self.make_folder,
            10: self.unlink,
            11: self.remove_folder,
            12: lambda node, body: self.rename(node, body, 8),
            14: self.open,
            15: self.read,
            16: self.write,
            17: lambda *_: struct.pack(
                "<5Q4I6I", 1 << 20, 1 << 19, 1 << 19, 0, 0, 4096, 255, 4096, 0, *[0] * 6
            ),
            18: self.release,
            20: lambda *_: b"",  # fsync
            25: lambda *_: b"",  # flush
            26: self.initialize,
            27: self.open_folder,
            28: self.read_folder,
            29: self.release_folder,
            35: self.create,
            45: lambda node, body: self.rename(node, body, 16),
        }

    def answer(self, request: bytes) -> bytes | None:
        _, opcode, unique, node, _, _, pid, *_ = HEADER.unpack_from(request)
        if opcode in (2, 42, 36):  # forget, and an interrupt: no answer is expected
            return None
        try:
            call = self.calls.get(opcode)
            if call is None:
                raise Refused(errno.ENOSYS)
            if opcode in CHANGES:
                self.before_change()
                if self.left == 0:
                    os.kill(pid, signal.SIGKILL)
                    raise Refused(errno.EINTR)
                if self.left is not None:
                    self.left -= 1
            body = call(node, request[HEADER.size :])
            return REPLY.pack(REPLY.size + len(body), 0, unique) + body
        except OSError as e:
            return REPLY.pack(REPLY.size, -(e.errno or errno.EIO), unique)
        except KeyError:
            return REPLY.pack(REPLY.size, -errno.ESTALE, unique)

    # -- names ---------------------------------------------------------------------------------------

    def path(self, node: int, name: bytes) -> str:
        return os.path.join(self.paths[node], name.rstrip(b"\0").decode())

    def entry(self, path: str) -> bytes:
        found = os.lstat(path)
        node = self.nodes.setdefault(path, found.st_ino)
        self.paths[node] = path
        return struct.pack("<QQQQII", node, 0, 0, 0, 0, 0) + _attributes(found)

    def lookup(self, node: int, body: bytes) -> bytes:
        return self.entry(self.path(node, body))

    def attributes(self, path: str) -> bytes:
        return struct.pack("<QII", 0, 0, 0) + _attributes(os.lstat(path))

    def set_attributes(self, node: int, body: bytes) -> bytes:
        valid, _, _, size = struct.unpack_from("<IIQQ", body)
        if valid & 8:
            if size:
                raise Refused
            os.truncate(self.paths[node], 0)
        return self.attributes(self.paths[node])

    def make_folder(self, node: int, body: bytes) -> bytes:
        path = self.path(node, body[8:])
        os.mkdir(path)
        return self.entry(path)

    def unlink(self, node: int, body: bytes) -> bytes:
        path = self.path(node, body)
        os.unlink(path)
        self.nodes.pop(path, None)
        return b""

    def remove_folder(self, node: int, body: bytes) -> bytes:
        path = self.path(node, body)
        os.rmdir(path)
        self.nodes.pop(path, None)
        return b""

    def rename(self, node: int, body: bytes, names_at: int) -> bytes:
        if not self.renames:
            raise Refused(errno.ENOSYS)
        (target_node,) = struct.unpack_from("<Q", body)
        old, new = body[names_at:].split(b"\0")[:2]
        source, target = self.path(node, old), self.path(target_node, new)
        os.rename(source, target)
        moved = self.nodes.pop(source, None)
        if moved is not None:
            self.nodes[target], self.paths[moved] = moved, target
        return b""

    # -- files ---------------------------------------------------------------------------------------

    def opened(self, path: str, flags: int, *, is_new: bool) -> bytes:
        if flags & os.O_APPEND:
            raise Refused
        is_written = flags & os.O_ACCMODE != os.O_RDONLY
        if is_written and flags & os.O_ACCMODE != os.O_WRONLY and not is_new:
            raise Refused
        handle = os.open(
            path, flags & ~(os.O_EXCL | os.O_NOFOLLOW) | (os.O_CREAT if is_new else 0), 0o644
        )
        self.written[handle] = os.fstat(handle).st_size and -1 if is_written else None
        return struct.pack(
            "<QII", handle, 1, 0
        )  # 1: no page cache, so that writes arrive as they were made

    def open(self, node: int, body: bytes) -> bytes:
        return self.opened(self.paths[node], struct.unpack_from("<I", body)[0], is_new=False)

    def create(self, node: int, body: bytes) -> bytes:
        (flags,) = struct.unpack_from("<I", body)
        path = self.path(node, body[16:])
        opened = self.opened(path, flags, is_new=True)
        return self.entry(path) + opened

    def read(self, node: int, body: bytes) -> bytes:
        handle, offset, size = struct.unpack_from("<QQI", body)
        return os.pread(handle, size, offset)

    def write(self, node: int, body: bytes) -> bytes:
        handle, offset, size = struct.unpack_from("<QQI", body)
        end = self.written[handle]
        if end == -1 and os.fstat(handle).st_size == 0:
            end = 0  # truncated since it was opened
        if offset != end:
            raise Refused
        os.pwrite(handle, body[40 : 40 + size], offset)
        self.written[handle] = offset + size
        return struct.pack("<II", size, 0)

    def release(self, node: int, body: bytes) -> bytes:
        (handle,) = struct.unpack_from("<Q", body)
        self.written.pop(handle)
        os.close(handle)
        return b""

    # -- folders -------------------------------------------------------------------------------------

    def open_folder(self, node: int, body: bytes) -> bytes:
        path = self.paths[node]
        handle = max(self.listings, default=0) + 1
        names = sorted(os.listdir(path))
        self.listings[handle] = [(n, os.lstat(os.path.join(path, n))) for n in names]
        return struct.pack("<QII", handle, 0, 0)

    def read_folder(self, node: int, body: bytes) -> bytes:
        handle, offset, size = struct.unpack_from("<QQI", body)
        out = b""
        for number, (name, found) in enumerate(self.listings[handle][offset:], int(offset) + 1):
            encoded = name.encode()
            one = (
                struct.pack("<QQII", found.st_ino, number, len(encoded), found.st_mode >> 12)
                + encoded
            )
            one += b"\0" * (-len(one) % 8)
            if len(out) + len(one) > size:
                break
            out += one
        return out

    def release_folder(self, node: int, body: bytes) -> bytes:
        del self.listings[struct.unpack_from("<Q", body)[0]]
        return b""

    def initialize(self, node: int, body: bytes) -> bytes:
        _, minor, readahead, _ = struct.unpack_from("<IIII", body)
        return struct.pack(
            "<IIIIHHIIHHI28x", 7, min(minor, 31), readahead, 0, 12, 9, MAX_WRITE, 1, 32, 0, 0
        )


def _attributes(s: os.stat_result) -> bytes:
    times = (s.st_atime_ns, s.st_mtime_ns, s.st_ctime_ns)
    return ATTRIBUTES.pack(
        s.st_ino,
        s.st_size,
        s.st_blocks,
        *(t // 10**9 for t in times),
        *(t % 10**9 for t in times),
        s.st_mode,
        s.st_nlink,
        s.st_uid,
        s.st_gid,
        0,
        4096,
        0,
    )


def serve(descriptor: int, files: SequentialFolder) -> None:
    """Answer until the mount is removed."""
    while True:
        try:
            request = os.read(descriptor, MAX_WRITE + 4096)
        except InterruptedError:
            continue
        except OSError as e:
            if e.errno == errno.ENODEV:
                return
            if e.errno == errno.ENOENT:  # the request was taken back
                continue
            raise
        answer = files.answer(request)
        if answer is not None:
            with contextlib.suppress(FileNotFoundError):
                os.write(descriptor, answer)


@contextlib.contextmanager
def sequential_mount(
    folder: Path,
    at: Path,
    *,
    renames: bool = True,
    kill_at: int | None = None,
    before_change: Callable[[], object] = lambda: None,
) -> Iterator[Path]:
    """Mount `folder` at `at`, which is made.

    Args:
        folder: holds the files.
        at: where they are seen.
        renames: whether files can be renamed.
        kill_at: the process dies that makes one change more than that.
        before_change: called before every change, in the process that answers, while the process that makes it waits.

    Raises:
        OSError: this process may not mount.
    """
    at.mkdir(exist_ok=True)
    folder.mkdir(exist_ok=True)
    descriptor = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={descriptor},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}"
    mount(b"sequential", at, b"fuse", options.encode())
    pid = os.fork()
    if pid == 0:
        try:
            files = SequentialFolder(
                str(folder), renames=renames, kill_at=kill_at, before_change=before_change
            )
            serve(descriptor, files)
        finally:
            os._exit(0)
    os.close(descriptor)
    try:
        yield at
    finally:
        unmount(at)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


if (
    __name__ == "__main__"
):  # python -m tests.harness.sequential_mount <folder> <at> <renames: 0 or 1>
    with sequential_mount(
        Path(sys.argv[1]), Path(sys.argv[2]), renames=sys.argv[3] == "1"
    ) as place:
        sys.stdout.write(f"mounted {place}\n")
        sys.stdout.flush()
        sys.stdin.read()
