"""Decoders for petastorm's data sets, made from its codecs.

Such a data set is Parquet whose `_common_metadata` holds a Unischema: for each column a numpy type, a shape, and the
codec that encoded arrays and images as bytes. petastorm only reads the Unischema and decodes values. sparkhvd itself
reads the files, so that every row is used once per epoch, in a reproducible order.

petastorm unpickles the Unischema in the data: use it only with a data set that you trust. It is imported only here,
and only on request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from sparkhvd.data.columns.decoders import Decoder
from sparkhvd.errors import InvalidArgumentError

# Key of the Unischema in the metadata of `_common_metadata`.
UNISCHEMA_KEY = b"dataset-toolkit.unischema.v1"
_SCALAR = "ScalarCodec"  # a column with this codec is stored plain in the files


@dataclass(frozen=True)
class CodecDecoder:
    """Decoder of one column by petastorm's codec, then by the user's function, if any.

    Attributes:
        field: petastorm's UnischemaField.
        then: the user's function (or mapping) of the codec's value, or None.
    """

    field: Any
    then: Decoder | None = None

    def __call__(self, value: bytes) -> Any:
        """Decode the bytes of a row to an array or number."""
        decoded = self.field.codec.decode(self.field, value)
        if self.then is None:
            return decoded
        return self.then[decoded] if isinstance(self.then, Mapping) else self.then(decoded)


def codec_decoders(
    metadata: Mapping[bytes, bytes], names: Sequence[str], decoders: Mapping[str, Decoder]
) -> dict[str, Decoder]:
    """Put petastorm's decoders before the user's, for columns encoded by petastorm.

    Args:
        metadata: metadata of `_common_metadata`; without a Unischema the data are plain, and the user's decoders are
            returned unchanged.
        names: columns of the fit.
        decoders: the user's decoders by column.

    Raises:
        InvalidArgumentError: petastorm is not installed, or cannot read the Unischema.
    """
    get_schema = _import_get_schema()
    if UNISCHEMA_KEY not in metadata:
        return dict(decoders)
    try:
        schema = get_schema(SimpleNamespace(common_metadata=SimpleNamespace(metadata=metadata)))
    except Exception as e:  # a pickle of another program may raise any error
        raise InvalidArgumentError(
            f"reader='petastorm': petastorm cannot read the Unischema of the data: {type(e).__name__}: {e}. Write it again "
            "with petastorm-generate-metadata.py, or leave reader out and give decoders."
        ) from e
    composed = dict(decoders)
    for name in names:
        field = schema.fields.get(name)
        codec = type(getattr(field, "codec", None)).__name__
        if codec not in ("NoneType", _SCALAR):
            composed[name] = CodecDecoder(field, decoders.get(name))
    return composed


def _import_get_schema() -> Callable[[Any], Any]:
    try:
        from petastorm.etl.dataset_metadata import get_schema
    except (ImportError, AttributeError) as e:
        # With a newer pyarrow, an installed petastorm cannot be imported.
        raise InvalidArgumentError(
            f"reader='petastorm' needs petastorm, which this Python cannot import: {type(e).__name__}: {e}. Install it on the "
            "driver and the executors with `pip install 'sparkhvd[petastorm]'`: petastorm 0.13.1 with pyarrow 14, numpy "
            "1.26, setuptools below 70, and so pyspark 3.5. Plain Parquet needs no petastorm: leave reader out."
        ) from e
    return get_schema  # type: ignore[no-any-return]  # petastorm has no types
