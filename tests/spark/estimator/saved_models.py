"""Former name of `tests.saving.saved_models`, for pickles in `tests/saving/fixtures`."""

from tests.saving.saved_models import Scaled

__all__ = ["Scaled"]
