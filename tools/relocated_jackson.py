"""Make the Jackson classes for PyPI's Iceberg runtime: `relocated_jackson.py OUTPUT.jar`.

`iceberg-spark-runtime` has its libraries under the prefix `org.apache.iceberg.shaded`. The one in the package
`snowpark-connect-deps-iceberg` has no Jackson there. pyspark's own jars have Jackson under its own name, and this gives it the prefix: every
constant text of a class that begins with the name of the package is changed.
"""

from __future__ import annotations

import struct
import sys
import zipfile
from pathlib import Path

_JARS = ("jackson-annotations", "jackson-core-2", "jackson-databind")
_NAMES = (b"com/fasterxml/jackson", b"com.fasterxml.jackson")
# Bytes of a constant after its tag, by tag (Java Virtual Machine Specification, table 4.4-A).
_SIZES = {
    3: 4,
    4: 4,
    5: 8,
    6: 8,
    7: 2,
    8: 2,
    9: 4,
    10: 4,
    11: 4,
    12: 4,
    15: 3,
    16: 2,
    17: 4,
    18: 4,
    19: 2,
    20: 2,
}


def relocated(data: bytes) -> bytes:
    """Insert the prefix before each name of Jackson in a class file."""
    (count,) = struct.unpack_from(">H", data, 8)
    parts, at, number = [data[:10]], 10, 1
    while number < count:
        tag = data[at]
        if tag == 1:
            (size,) = struct.unpack_from(">H", data, at + 1)
            text = data[at + 3 : at + 3 + size]
            for name in _NAMES:
                separator = name[3:4]
                prefix = separator.join([b"org", b"apache", b"iceberg", b"shaded", b""])
                text = text.replace(name, prefix + name)
            parts.append(b"\x01" + struct.pack(">H", len(text)) + text)
            at += 3 + size
        else:
            size = 1 + _SIZES[tag]
            parts.append(data[at : at + size])
            at += size
            number += tag in (5, 6)  # these take two numbers
        number += 1
    return b"".join([*parts, data[at:]])


def main(output: str) -> None:
    import pyspark

    jars = Path(pyspark.__file__).parent / "jars"
    with zipfile.ZipFile(output, "w", zipfile.ZIP_DEFLATED) as made:
        for path in sorted(jars.glob("jackson-*.jar")):
            if not path.name.startswith(_JARS):
                continue
            with zipfile.ZipFile(path) as source:
                for name in source.namelist():
                    if name.startswith("com/fasterxml/jackson") and name.endswith(".class"):
                        made.writestr(
                            f"org/apache/iceberg/shaded/{name}", relocated(source.read(name))
                        )


if __name__ == "__main__":
    main(sys.argv[1])
