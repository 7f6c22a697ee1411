"""Text of ranks and files for a terminal: colours stay, and no other control sequence reaches it."""

from __future__ import annotations

import re

# Control characters except the tab, escapes except those of colours (`\x1b[1;31m`), and Unicode's direction marks. A
# terminal obeys them: it sets its title, its clipboard or a scroll region, or shows letters in another order.
_CONTROL = re.compile(
    r"\x1b(?!\[[0-9;:]*m)|[\x00-\x08\x0a-\x1a\x1c-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]"
)


def visible(text: str) -> str:
    r"""Show the control characters of a line as text: a bell as `\x07`."""
    if text.isprintable():  # true of most lines, and the search is slow
        return text
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
