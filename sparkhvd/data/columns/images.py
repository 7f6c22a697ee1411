"""Images as a column: bytes of JPEG, PNG and others, or paths and URLs of such files, decoded when rows are read.

Pillow decodes. It releases the GIL meanwhile, so that threads decode in parallel.
"""

from __future__ import annotations

import functools
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt

from sparkhvd.data.store.addresses import split
from sparkhvd.data.store.store import Store
from sparkhvd.errors import InvalidArgumentError

if TYPE_CHECKING:
    from PIL.Image import Image


_MODES = {1: "L", 3: "RGB", 4: "RGBA"}
_FITS = ("stretch", "crop", "pad", "exact")
_DTYPES = ("float32", "uint8")
_BROKEN = ("error", "skip")
# Errors of a path without a file. Other errors, such as an unavailable store, would affect every image.
_MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
# Local path in Spark's form: "file:/a/b", "file:///a/b".
_FILE_URL = re.compile(r"file:/+")
# Number of folders kept open.
_FOLDERS = 256


class BrokenImage(OSError):
    """Raised for a missing, truncated or undecodable image."""


class _OtherSize(ValueError):
    """Raised for an image of another size under fit="exact"."""


@dataclass(frozen=True)
class image:  # noqa: N801 - used as a function: decoders={"photo": image(224, 224)}
    """Decoder of images to arrays (channels, height, width).

    A value is the bytes of an image, or its path or URL: an absolute path, or an address supported by stores (`s3://`,
    `gs://`, `hdfs://`, ... or a scheme of fsspec), with the credentials of the process. JPEGs of more than twice the
    size are decoded at a smaller scale, which is faster. Needs Pillow.

    Attributes:
        height: in pixels.
        width: in pixels.
        channels: 3 (RGB), 1 (gray) or 4 (RGBA); other images are converted.
        dtype: "float32", or "uint8" for a model that converts pixels itself, which moves a quarter of the bytes.
        mean: number for all channels, or one per channel, that is subtracted after values are scaled to 0 to 1.
        std: number for all channels, or one per channel, that divides the result.
        fit: "stretch" to the size, "crop" the middle, "pad" the whole image with 0, or "exact": another size is an
            error.
        broken: "error", or "skip": a row with a missing, truncated or undecodable image is skipped when it is read, and
            `transform` returns null for it.

    Raises:
        InvalidArgumentError: an argument is out of range, or Pillow is not installed.
    """

    height: int
    width: int
    channels: int = 3
    dtype: str = "float32"
    mean: float | Sequence[float] = 0.0
    std: float | Sequence[float] = 1.0
    fit: str = "stretch"
    broken: str = "error"

    def __post_init__(self) -> None:
        choices = {
            "channels": tuple(_MODES),
            "dtype": _DTYPES,
            "fit": _FITS,
            "broken": _BROKEN,
        }
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise InvalidArgumentError(
                    f"image: {name} is {getattr(self, name)!r}; it must be one of {', '.join(map(repr, known))}."
                )
        for name in ("height", "width"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise InvalidArgumentError(
                    f"image: {name} is {getattr(self, name)!r}; it must be a number of pixels, at least 1."
                )
        for name in ("mean", "std"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)):
                object.__setattr__(self, name, tuple(map(float, value)))
                if len(value) != self.channels:
                    raise InvalidArgumentError(
                        f"image: {name} has {len(value)} numbers and the image {self.channels} channels. Give one per channel, or one for all."
                    )
        if not np.all(np.asarray(self.std) > 0):
            raise InvalidArgumentError(f"image: std is {self.std!r}; it must be above 0.")
        if self.dtype == "uint8" and (self.mean, self.std) != (0.0, 1.0):
            raise InvalidArgumentError(
                "image: dtype is 'uint8', but mean and std produce floats. Give dtype='float32', or scale in the model."
            )
        _pillow()

    @functools.cached_property
    def _scale(self) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Factor and shift per channel to convert bytes to values."""
        mean, std = (
            np.broadcast_to(np.asarray(v, np.float64), self.channels) for v in (self.mean, self.std)
        )
        return (1 / (255 * std)).astype(np.float32), (-mean / std).astype(np.float32)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width."""
        return (self.channels, self.height, self.width)

    def __call__(self, value: bytes | str) -> npt.NDArray[Any]:
        """Decode one image.

        Raises:
            BrokenImage: the file is missing, or is not a complete image.
            OSError: the file cannot be read.
        """
        out = np.empty(self.shape, self.dtype)
        self.into(value, out)
        return out

    def into(self, value: bytes | str, out: npt.NDArray[Any]) -> None:
        """Decode one image into an array of `shape` and `dtype`. Errors are as in a call."""
        try:
            data = value if isinstance(value, bytes) else _read(value)
        except _MISSING as e:
            raise BrokenImage(*e.args) from e
        try:
            planes = self._planes(data)
        except (_OtherSize, InvalidArgumentError, MemoryError):
            raise
        except Exception as e:  # for some bytes Pillow raises a SyntaxError, a ValueError, ...
            reason = str(e).partition(" <_io.")[0]  # omit the Python object that Pillow names
            raise BrokenImage(f"its {len(data):,} bytes are not a complete image: {reason}") from e
        factors, shifts = self._scale
        for plane, place, factor, shift in zip(planes, out, factors, shifts, strict=True):
            if self.dtype == "uint8":
                place[:] = plane
                continue
            np.multiply(plane, factor, out=place)
            if shift:
                place += shift

    def _planes(self, data: bytes) -> list[npt.NDArray[np.uint8]]:
        """Decode an image to its channels (height, width).

        Pillow splits channels as fast as it makes one interleaved array, and an interleaved array needs another copy.
        """
        pil, size, mode = _pillow(), (self.width, self.height), _MODES[self.channels]
        with pil.open(io.BytesIO(data)) as opened:
            if self.fit == "exact" and opened.size != size:
                raise _OtherSize(
                    f"it has {opened.height} x {opened.width} pixels, and image(fit='exact') asks for {self.height} x {self.width}"
                )
            opened.draft(None, (2 * self.width, 2 * self.height))
            found = opened if opened.mode == mode else opened.convert(mode)
            fitted = found if found.size == size else self._fitted(found)
            return [
                np.frombuffer(fitted.tobytes("raw", band), np.uint8).reshape(
                    self.height, self.width
                )
                for band in mode
            ]

    def _fitted(self, found: Image) -> Image:
        """Resize an image to the wanted size as `fit` says."""
        size = (self.width, self.height)
        if self.fit == "stretch":
            return found.resize(size)
        if self.fit == "crop":
            width, height = self._largest(found, min)
            left, top = (found.width - width) / 2, (found.height - height) / 2
            return found.resize(size, box=(left, top, left + width, top + height))
        width, height = self._largest(found, max)
        scaled = (round(size[0] * found.width / width), round(size[1] * found.height / height))
        inner = found.resize((max(1, scaled[0]), max(1, scaled[1])))
        outer: Image = _pillow().new(found.mode, size)
        outer.paste(inner, ((size[0] - inner.width) // 2, (size[1] - inner.height) // 2))
        return outer

    def _largest(self, found: Image, choose: Any) -> tuple[float, float]:
        """Width and height of the box with the wanted aspect ratio inside (`min`) or around (`max`) the image."""
        scale = choose(found.width / self.width, found.height / self.height)
        return self.width * scale, self.height * scale


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as e:
        raise InvalidArgumentError(
            "image needs Pillow, which is not installed here: pip install pillow, also where the ranks run."
        ) from e
    return Image


def _read(path: str) -> bytes:
    """Read a file by its path or URL."""
    if match := _FILE_URL.match(path):
        path = "/" + path[match.end() :]
        # Spark's `binaryFile` gives plain paths, but `input_file_name()` gives percent-encoded ones.
        path = path if Path(path).exists() else unquote(path)
    if path.startswith("/"):
        with open(path, "rb", buffering=0) as file:  # a buffer would add a copy
            return file.read()
    if ":" not in path:
        raise ValueError(
            "the path is relative, and each rank has a working directory of its own. Give absolute paths or URLs, for example by "
            "concat_ws('/', lit(folder), path)"
        )
    folder, name = split(path)
    return _folder(folder).read_bytes(name)


@functools.lru_cache(_FOLDERS)
def _folder(url: str) -> Store:
    return Store(url)
