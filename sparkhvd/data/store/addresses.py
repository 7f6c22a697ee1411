"""Parse paths and URLs of stores, hide secrets in them, and open file systems."""

from __future__ import annotations

import os
import posixpath
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from urllib.parse import parse_qsl, quote, unquote, unquote_plus, urlencode, urlsplit

import pyarrow.fs as pafs

from sparkhvd.errors import InvalidArgumentError

# Schemes opened by pyarrow.fs; all others use fsspec.
PYARROW_SCHEMES = frozenset({"s3", "gs", "gcs", "hdfs", "viewfs", "abfs", "abfss"})
_ALIASES = {"s3a": "s3", "s3n": "s3", "gcs": "gs"}
# Schemes of object stores in pyarrow and fsspec. There a file appears when its upload completes, and a rename is a
# copy.
_OBJECT_STORES = frozenset(
    {"s3", "gs", "abfs", "abfss", "az", "adl", "oss", "obs", "oci", "cos", "tos", "hf", "lakefs"}
)
# Parameters of a URL's query that may be shown; all others are hidden.
_OPEN_QUERY = frozenset(
    {
        "allow_bucket_creation",
        "anonymous",
        "blob_storage_authority",
        "blob_storage_scheme",
        "dfs_storage_authority",
        "dfs_storage_scheme",
        "enable_tls",
        "endpoint_override",
        "project_id",
        "region",
        "replication",
        "retry_limit_seconds",
        "scheme",
        "tls_ca_file_path",
    }
)
SECRET_NAME = re.compile(
    r"key|secret|token|passw|passphrase|pwd|sas|cred|sign|auth|connection_string|bearer|jwt|cookie",
    re.I,
)
# Matches a password in any URL: "mysql://user:password@host", "jdbc:x://host/db?password=...".
_PASSWORD = re.compile(r"(://[^\s/:@]{0,200}):[^\s/]{1,1000}@")
# Matches secrets in text: "AccountKey=...;", "host=h password=...", "Authorization: Bearer ...".
_IN_TEXT = re.compile(
    r"(\b(?:password|passwd|pwd|accountkey|sharedaccesskey|sharedaccesssignature)=|\bauthorization: *(?:basic +|bearer +)?|\bbearer +(?=[\w.~+/-]{20}))[^\s;&]{1,1000}",
    re.I,
)
_IN_QUERY = re.compile(
    r"([?&;][\w.-]{0,60}?(?:password|passwd|passphrase|pwd|secret|token|key|credential|sig|signature)=)[^\s&;]{1,1000}",
    re.I,
)
# Folders of Databricks, where a file cannot be appended to, and a writer cannot seek.
_SEQUENTIAL_ROOTS = ("/Volumes/", "/dbfs/")


@dataclass(frozen=True)
class Address:
    """Parsed path or URL of a store.

    Attributes:
        scheme: "file", or a scheme of pyarrow or fsspec.
        url: URL without secrets and without a trailing slash, for messages, manifests and saved models.
        root: path in the file system; None if fsspec decides it.
        full: URL with its secrets, only for opening the file system.
    """

    scheme: str
    url: str
    root: str | None
    full: str = field(repr=False)


def parse(path_or_url: str) -> Address:
    """Parse a path or URL without opening it.

    Raises:
        InvalidArgumentError: it is not a valid path or URL of a store.
    """
    scheme, colon, rest = path_or_url.partition(":")
    if path_or_url.startswith("/") or not colon or "/" in scheme:
        return _local(path_or_url, path_or_url)
    scheme = _ALIASES.get(scheme.lower(), scheme.lower())
    if rest.startswith("//") and not _is_quoted(path_or_url):
        raise InvalidArgumentError(
            f"Store.create({without_secrets(path_or_url)!r}): the user or password before the '@' holds a character that is "
            "not allowed there. Quote it with urllib.parse.quote(password, safe=''), or give it as a storage option. If the "
            "'@' belongs to the path, write it as '%40'."
        )
    if scheme == "file":
        parts = urlsplit(path_or_url)
        if parts.netloc not in ("", "localhost"):
            raise InvalidArgumentError(
                f"Store.create({path_or_url!r}): {parts.netloc!r} is in the place of a host name. Give three slashes: "
                f"'file:///{parts.netloc}{parts.path}'."
            )
        return _local(unquote(parts.path), path_or_url)
    if scheme == "dbfs":
        path = "/" + rest.lstrip("/")
        # On Databricks, dbfs: is the local folder /dbfs, and Volumes are the local folder /Volumes.
        return _local(path if path.startswith("/Volumes/") else f"/dbfs{path}", path_or_url)
    if not rest.startswith("//"):
        raise InvalidArgumentError(
            f"Store.create({without_secrets(path_or_url)!r}): this is neither an absolute path nor a URL like "
            "'s3://bucket/prefix'."
        )
    if scheme not in PYARROW_SCHEMES and not _fsspec_knows(scheme):
        raise InvalidArgumentError(
            f"Store.create({without_secrets(path_or_url)!r}): unknown scheme {scheme!r}. Known are absolute paths, "
            f"file, dbfs, {', '.join(sorted(PYARROW_SCHEMES))} and the schemes of fsspec (pip install fsspec "
            "and its driver for yours)."
        )
    full = f"{scheme}:{rest}"
    return Address(scheme, without_secrets(full), _root(scheme, full), full)


def split(path_or_url: str) -> tuple[str, str]:
    """Split a path or URL into a folder for `parse` and the name of a file in it, unquoted.

    A relative path is relative to this process's working directory.
    """
    if not re.match(r"[A-Za-z][A-Za-z0-9+.-]*:/", path_or_url):
        folder, _, name = os.path.abspath(path_or_url).rpartition("/")
        return folder or "/", name
    url, mark, query = path_or_url.partition("?")
    folder, _, name = url.rstrip("/").rpartition("/")
    scheme = _ALIASES.get(url.partition(":")[0].lower(), url.partition(":")[0].lower())
    # The name is unquoted where `parse` unquotes the path.
    is_quoted = scheme == "file" or scheme in PYARROW_SCHEMES
    return f"{folder}{mark}{query}", unquote(name) if is_quoted else name


def _root(scheme: str, full: str) -> str | None:
    if scheme not in PYARROW_SCHEMES:
        return None
    parts = urlsplit(full)
    path = unquote(parts.path).rstrip("/")
    if scheme in ("hdfs", "viewfs"):
        return path or "/"
    if "@" in parts.netloc and scheme in ("abfs", "abfss"):
        return parts.netloc.split("@")[0] + path
    return parts.netloc.rpartition("@")[2] + path


def _local(path: str, path_or_url: str) -> Address:
    if not path.startswith("/"):
        raise InvalidArgumentError(
            f"Store.create({path_or_url!r}): the path is relative, so each process would use another folder. Give an "
            f"absolute path, for example {os.path.abspath(path)!r}."
        )
    root = posixpath.normpath(path)
    if root == "/":
        raise InvalidArgumentError(
            f"Store.create({path_or_url!r}): this is the root of the file system. Give a folder for the store."
        )
    url = Path(root).as_uri()
    return Address("file", url, root, url)


def check_databricks(root: str, path_or_url: str) -> None:
    """Reject a `/dbfs` or Volume path without a mount, because it would be a local folder of this machine.

    Raises:
        InvalidArgumentError: the mount does not exist.
    """
    if root.startswith("/dbfs/") and not os.path.isdir("/dbfs"):
        raise InvalidArgumentError(
            f"Store.create({path_or_url!r}): there is no /dbfs here, so this is not a Databricks cluster with the "
            "DBFS folder. Give a path or URL that this machine can reach."
        )
    if root == "/Volumes" or root.startswith("/Volumes/"):
        volume = "/".join(root.split("/")[:5])
        if volume.count("/") < 4 or not os.path.isdir(volume):
            raise InvalidArgumentError(
                f"Store.create({path_or_url!r}): there is no Volume {volume} here. Give a folder in an existing one, "
                "/Volumes/<catalog>/<schema>/<volume>/<folder>, on a Databricks cluster that may use it."
            )


# --- secrets --------------------------------------------------------------------------------------------------------


def without_secrets(url: str) -> str:
    """Remove "user:password@" and secrets in the query, such as a signature, from a URL."""
    if not _is_quoted(url):
        return f"{url.partition(':')[0]}://<hidden>"
    parts = urlsplit(url)
    if not parts.scheme:
        return url
    user, at, host = parts.netloc.rpartition("@")
    shown = host if ":" in user else f"{user}{at}{host}"
    pairs = [(k, v) for k, v in parse_qsl(parts.query, keep_blank_values=True) if k in _OPEN_QUERY]
    query = f"?{urlencode(pairs, safe='/:')}" if pairs else ""
    return f"{parts.scheme}://{shown}{parts.path.rstrip('/')}{query}"


def without_passwords(text: str) -> str:
    """Mask the passwords of URLs, connection strings and headers in a text."""
    text = _IN_TEXT.sub(r"\1***", text)
    if "://" not in text:
        return text
    return _IN_QUERY.sub(r"\1***", _PASSWORD.sub(r"\1:***@", text))


def _is_quoted(url: str) -> bool:
    """False if a password seems to hold an unquoted "/", "?", "#" or "[".

    Such a character ends the URL's part for user and host. Then the "@" is in a later part, or the port is invalid.
    """
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 - raises ValueError for an invalid port
    except ValueError:
        return False
    after = url.partition("//")[2][len(parts.netloc) :]
    return ":" not in parts.netloc or "@" not in after


def secrets_of(full: str, options: Mapping[str, object]) -> frozenset[str]:
    """Collect passwords and keys of a URL and storage options, to keep them out of messages."""
    if not _is_quoted(full):
        return frozenset({full})
    parts = urlsplit(full)
    user, _, _ = parts.netloc.rpartition("@")
    secrets = {user.partition(":")[2]} if ":" in user else set()
    if ":" in user:
        secrets.add(user)
    for pair in parts.query.split("&"):
        name, _, value = pair.partition("=")
        if name not in _OPEN_QUERY:
            secrets.update((value, unquote_plus(value)))
    secrets.update(_secret_options(options))
    both = {text for raw in secrets for text in (raw, unquote(raw), quote(raw, safe=""))}
    # Shorter secrets would match ordinary words.
    return frozenset(text for text in both if len(text) >= 4)


def _secret_options(options: Mapping[str, object]) -> Iterator[str]:
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _secret_options(value)
        elif isinstance(value, str) and SECRET_NAME.search(str(name)):
            yield value


# --- file systems ---------------------------------------------------------------------------------------------------


def has_atomic_writes(scheme: str) -> bool:
    """Whether a file appears, or replaces an older file, only when its writer closes it, as on object stores."""
    return scheme in _OBJECT_STORES


def is_sequential(root: str) -> bool:
    """Whether files of this local folder may only be written in one sequential pass.

    True for Databricks' Volumes and DBFS. Assumed for every other FUSE mount, because most of them show an object
    store.
    """
    if root.startswith(_SEQUENTIAL_ROOTS):
        return True
    return _mount_kind(root).startswith("fuse")


def _mount_kind(path: str) -> str:
    """Look up the kernel's name for the type of a path's file system, or "" if unknown."""
    try:
        device = os.stat(path).st_dev
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in lines:
        fields = line.split(" ")
        if fields[2] == wanted:
            return fields[fields.index("-") + 1]
    return ""


def open_filesystem(address: Address, options: Mapping[str, object]) -> tuple[pafs.FileSystem, str]:
    """Open the file system of an address and return it and the store's root in it.

    Raises:
        OSError: the file system is unreachable, or a required library is missing.
        ImportError: a required Python package is missing.
    """
    scheme = address.scheme
    if scheme == "file":
        assert address.root is not None
        return pafs.LocalFileSystem(), address.root
    if address.root is None:
        return _open_fsspec(address, options)
    if scheme in ("hdfs", "viewfs"):
        return _open_hdfs(address.full, options), address.root
    if not options:
        return pafs.FileSystem.from_uri(_bucket(address.full))[0], address.root
    kinds = {"s3": "S3FileSystem", "gs": "GcsFileSystem"}
    kind = getattr(pafs, kinds.get(scheme, "AzureFileSystem"))
    return kind(**{**url_options(scheme, address.full), **options}), address.root


def url_options(scheme: str, full: str) -> dict[str, object]:
    """Convert the user and query of a URL to arguments of pyarrow's file system for its scheme."""
    parts = urlsplit(full)
    user, password = unquote(parts.username or ""), unquote(parts.password or "")
    query: dict[str, object] = dict(parse_qsl(parts.query))
    for name, value in parse_qsl(parts.query):
        if value.lower() in ("true", "false"):
            query[name] = value.lower() == "true"
    if scheme == "s3":
        login: dict[str, object] = {"access_key": user, "secret_key": password}
    elif scheme == "gs":
        if (limit := query.pop("retry_limit_seconds", None)) is not None:
            query["retry_time_limit"] = timedelta(seconds=float(str(limit)))
        login = {"anonymous": True} if user == "anonymous" else {}
    elif scheme in ("hdfs", "viewfs"):
        for name in {"replication", "buffer_size", "default_block_size"} & query.keys():
            query[name] = int(str(query[name]))
        login = {"user": user}
    else:  # abfs, abfss: the account is the first part of the host name
        account, _, domain = (parts.hostname or "").partition(".")
        if query.pop("enable_tls", True) is False:
            query |= {"blob_storage_scheme": "http", "dfs_storage_scheme": "http"}
        login = {"account_name": account if domain else user, "account_key": password}
    return {**{k: v for k, v in login.items() if v}, **query}


def _bucket(full: str) -> str:
    """Cut the path off a URI, because a file system needs only the bucket, and pyarrow rejects blanks in paths."""
    return urlsplit(full)._replace(path="/").geturl()


def _open_fsspec(address: Address, options: Mapping[str, object]) -> tuple[pafs.FileSystem, str]:
    import fsspec

    filesystem, root = fsspec.core.url_to_fs(address.full, **options)
    return pafs.PyFileSystem(pafs.FSSpecHandler(filesystem)), root.rstrip("/")


def _open_hdfs(full: str, options: Mapping[str, object]) -> pafs.FileSystem:
    try:
        if options:
            parts = urlsplit(full)
            host = parts.hostname or "default"
            return pafs.HadoopFileSystem(
                host,
                parts.port or (0 if host == "default" else 8020),
                **{**url_options(parts.scheme, full), **options},
            )
        with warnings.catch_warnings():
            return pafs.FileSystem.from_uri(full)[0]
    except OSError as e:
        if "libhdfs" not in str(e) and "libjvm" not in str(e):
            raise
        # Only the first line, because pyarrow lists a hundred searched paths.
        first = str(e).partition("\n")[0]
        raise OSError(
            f"{first}. HDFS is reached through Hadoop's own library: set HADOOP_HOME to an unpacked Hadoop (with "
            "lib/native/libhdfs.so, or ARROW_LIBHDFS_DIR to its folder), JAVA_HOME, and CLASSPATH to what "
            "`hadoop classpath --glob` prints, for the driver and all executors"
        ) from None


def _fsspec_knows(scheme: str) -> bool:
    try:
        import fsspec
    except ImportError:
        return False
    return scheme in fsspec.available_protocols()
