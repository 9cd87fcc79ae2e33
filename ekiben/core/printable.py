"""Text for a terminal: foreign texts may contain characters that move the cursor, rename the window or turn
text around.
"""

from __future__ import annotations

import codecs
import io
import re
from collections.abc import Iterable, Iterator

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")  # but for tabs and ends of lines


def printable(text: str) -> str:
    r"""Return ``text`` with each control character as it is written in Python: ``\x1b``.

    Tabs and ends of lines stay.
    """
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def single_line(text: str) -> str:
    r"""Return ``text`` as printable() has it, with ends of lines and tabs as ``\n`` and ``\t``, too.

    For a name within a message.
    """
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def printable_pieces(pieces: Iterable[bytes]) -> Iterator[str]:
    """Yield pieces of UTF-8 as printable() has them. A carriage return, as of progress bars, ends a line."""
    lines = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8")("replace"), translate=True)
    for piece in pieces:
        yield printable(lines.decode(piece))
    yield printable(lines.decode(b"", final=True))
