"""Move files between this host and a path as Spark resolves it.

Classic Spark: if the path is on this host's file system, a file is moved there; else the driver's JVM copies it through
Hadoop's file system of the path. The content never passes through the JVM's heap or through an executor.

Spark Connect: the client has no JVM, so a file is written as a text file and read as a table of bytes. Spark's text
writer writes the bytes of a string unchanged and one separator after each row: rows are cut at newlines, or at zeros if
those are denser (weights that are all 0 have no newline), and torch and pickle ignore the last separator. The DataFrame
API has no other writer of files that are not tables.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from sparkhvd.arrow_buffers import binary_array
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.spark import is_connect

if TYPE_CHECKING:
    from pyarrow import RecordBatch
    from pyspark.sql import SparkSession


# Limit of a file over Spark Connect: reading returns the file as one row, and a row must be well below 2 GiB.
MAX_CONNECT_BYTES = 1 << 30
# Size of the pieces in which a file is read; a message from the server holds at most 128 MiB.
CHUNK_BYTES = 16 << 20
_SEPARATORS = (b"\n", b"\0")


@contextlib.contextmanager
def staging_folder(spark: SparkSession, path: str) -> Iterator[str]:
    """Make a staging folder on this host for `write_file`. It is deleted when the block ends.

    If possible, the folder is on the file system of `path`, to avoid a copy.
    """
    with contextlib.ExitStack() as stack:
        near = os.path.dirname(_local_path(spark, path))
        while near and not os.path.isdir(near):
            near = os.path.dirname(near)
        folder = ""
        if near:
            with contextlib.suppress(OSError):  # this user may have no permission to write there
                made = tempfile.TemporaryDirectory(prefix=".sparkhvd-tmp-", dir=near)
                folder = stack.enter_context(made)
        if not folder:
            made = tempfile.TemporaryDirectory(prefix="sparkhvd-file-")
            folder = stack.enter_context(made)
        yield folder


def write_file(spark: SparkSession, folder: str, path: str) -> None:
    """Write a file of this host as the only file of a new folder. The original may be moved.

    Raises:
        InvalidArgumentError: the file is larger than this kind of session can write.
    """
    if not is_connect(spark):
        if local := _local_path(spark, folder):
            os.makedirs(local)
            shutil.move(path, f"{local}/part-00000")
            return
        system, target = _hadoop(spark, f"{folder}/part-00000")
        hadoop = _jvm(spark).org.apache.hadoop.fs
        system.copyFromLocalFile(False, False, hadoop.Path(f"file://{path}"), target)
        return
    size = os.path.getsize(path)
    if size > MAX_CONNECT_BYTES:
        raise InvalidArgumentError(
            f"{folder!r} would have {size / 2**30:.1f} GiB, but over Spark Connect a saved file may have at most "
            f"{MAX_CONNECT_BYTES / 2**30:.0f} GiB. Save it in a classic session, or save the module yourself: "
            "torch.save(model.getModel().state_dict(), ...)."
        )
    with tempfile.TemporaryDirectory(prefix="sparkhvd-file-") as scratch:
        # The file is an artifact, because rows of a local query would pass through the server's heap. Its name must be
        # unique.
        name = f"sparkhvd-{uuid.uuid4().hex}"
        separator = _separator(path)
        shutil.move(path, f"{scratch}/{name}")
        spark.addArtifacts(f"{scratch}/{name}", file=True)
    df = spark.range(0, 1, 1, 1).mapInArrow(
        functools.partial(_artifact, name, separator), "data binary"
    )
    text = df.selectExpr("cast(data AS string) AS value")
    text.write.text(folder, compression="none", lineSep=separator.decode())


def _artifact(name: str, separator: bytes, batches: Iterator[RecordBatch]) -> Iterator[RecordBatch]:
    """In a task, yield the rows of a file added to the client's session."""
    import pyarrow as pa
    from pyspark import SparkFiles

    for _ in batches:
        with _mapped(SparkFiles.get(name)) as data:
            for start, end in _rows(data, separator):
                yield pa.record_batch([binary_array(data[start:end])], names=["data"])


@contextlib.contextmanager
def read_file(spark: SparkSession, folder: str) -> Iterator[str]:
    """Yield the path of a local copy of a folder's only file. The end of the block deletes it.

    Raises:
        InvalidArgumentError: the folder is empty, or has several files.
    """
    with tempfile.TemporaryDirectory(prefix="sparkhvd-file-") as scratch:
        path = f"{scratch}/content"
        if is_connect(spark):
            _read_table(spark, folder, path)
        else:
            system, target = _hadoop(spark, folder)
            paths = [f.getPath() for f in system.listStatus(target)]
            # Skip files that Spark itself does not read: _SUCCESS and checksums.
            paths = [p for p in paths if p.getName()[:1] not in "_."]
            _expect_one(folder, len(paths))
            local = _jvm(spark).org.apache.hadoop.fs.Path(f"file://{path}")
            system.copyToLocalFile(False, paths[0], local, True)
        yield path


def _jvm(spark: SparkSession) -> Any:
    return spark._jvm


def _hadoop(spark: SparkSession, path: str) -> tuple[Any, Any]:
    """Get Hadoop's file system of a path, and the path, as objects of the driver's JVM."""
    target = _jvm(spark).org.apache.hadoop.fs.Path(path)
    conf = spark._jsparkSession.sessionState().newHadoopConf()
    return target.getFileSystem(conf), target


def _local_path(spark: SparkSession, path: str) -> str:
    """Resolve `path` like Spark (with mount tables) to a local path, or "" if it is not local."""
    if is_connect(spark):
        return ""
    system, target = _hadoop(spark, path)
    rest: list[str] = []
    while not system.exists(target):
        if target.getParent() is None:
            return ""
        rest.insert(0, target.getName())
        target = target.getParent()
    uri = system.resolvePath(target).toUri()
    return os.path.join(uri.getPath(), *rest) if uri.getScheme() == "file" else ""


def _separator(path: str) -> bytes:
    """Choose the separator that minimizes the longest row of a file."""
    with _mapped(path) as data:
        longest = {s: max(end - start for start, end in _rows(data, s)) for s in _SEPARATORS}
    return min(_SEPARATORS, key=lambda separator: longest[separator])


@contextlib.contextmanager
def _mapped(path: str) -> Iterator[mmap.mmap | bytes]:
    """Map a file into memory."""
    if not os.path.getsize(path):  # an empty file cannot be mapped
        yield b""
        return
    with (
        open(path, "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        yield data


def _rows(data: mmap.mmap | bytes, separator: bytes) -> Iterator[tuple[int, int]]:
    """Yield begin and end of each row. The separator divides the rows."""
    start = 0
    while True:
        end = data.find(separator, start + CHUNK_BYTES)
        if end < 0:
            yield start, len(data)
            return
        yield start, end
        start = end + 1


def _read_table(spark: SparkSession, folder: str, path: str) -> None:
    from pyspark.sql import functions as F  # noqa: N812 - everyone's name

    table = spark.read.format("binaryFile").load(folder)
    lengths = [row.length for row in table.select("length").collect()]
    _expect_one(folder, len(lengths))
    with open(path, "wb") as file:
        for start in range(0, lengths[0], CHUNK_BYTES):
            part = table.select(F.substring("content", start + 1, CHUNK_BYTES).alias("part"))
            file.write(part.collect()[0].part)


def _expect_one(folder: str, count: int) -> None:
    if count != 1:
        raise InvalidArgumentError(f"{folder!r} holds {count} files; one is expected.")
