"""Text for a terminal: names and messages of others may hold characters that move the cursor, rename the window or turn
text around.
"""

from __future__ import annotations

import re

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")  # but for tabs and ends of lines


def printable(text: str) -> str:
    r"""Return ``text`` with each control character as it is written in Python: ``\x1b``.

    Tabs and ends of lines stay.
    """
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)
