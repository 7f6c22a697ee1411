"""Former name of `tests.saving.saved_store`, for pickles in `tests/saving/fixtures`."""

from tests.saving.saved_store import Decay, Killed

__all__ = ["Decay", "Killed"]
