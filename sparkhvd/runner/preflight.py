"""skeleton"""
from __future__ import annotations
from typing import Protocol

class SharedFiles(Protocol):
    """Files that the driver and every rank can reach; picklable. Paths are relative to one root."""

    def read_bytes(self, path: str) -> bytes:
        """The contents of a file."""
    def write_bytes(self, path: str, data: bytes) -> None:
        """Write a file whole or not at all."""
    def exists(self, path: str) -> bool:
        """Whether a file is there."""
