"""Text of ranks and files for a terminal: colours stay, and no other control sequence reaches it."""

from __future__ import annotations

import re

# Controls but the tab, the escape but in front of colours (`\x1b[1;31m`), and orders of direction. A terminal obeys them: it sets its
# title, its clipboard or a scroll region, or shows letters in another order.
_CONTROL = re.compile(
    r"\x1b(?!\[[0-9;:]*m)|[\x00-\x08\x0a-\x1a\x1c-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]"
)


def visible(text: str) -> str:
    r"""Show the control characters of a line as text: a bell as `\x07`."""
    if text.isprintable():  # most lines; the search takes longer than the rest of a line
        return text
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
