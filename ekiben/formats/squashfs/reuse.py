"""Compressed blocks of a layer's former version, by the hash of their content.

An edited package changes few blocks of a layer, and compressing is half of the work of writing one. So the writer notes
where it wrote which block, and the next version of the layer copies the bytes of equal blocks. What is copied is
decompressed and compared: a wrong index, or a damaged blob, costs time and never a byte. Only an index of this very
compressor is used, for another one's bytes would differ.
"""

from __future__ import annotations

import hashlib
import os
import struct
from bisect import bisect_left
from typing import BinaryIO

import deflate

from ekiben.formats.squashfs import format as sq
from ekiben.formats.squashfs.format import Block

# Version of the compressor: another one writes other bytes, and tests compare with those of this one.
COMPRESSOR = f"deflate {deflate.__version__}, level {sq.LEVEL}, blocks of {sq.BLOCK_SIZE}"
_HEAD = f"ekiben blocks 1: {COMPRESSOR}\n".encode()
_KEY = 16  # bytes of a SHA-256
_RECORD = struct.Struct(f"<{_KEY}sQI")  # key, position, size of the compressed block
MAX_INDEX = 1 << 26  # bytes: of a layer of 150 GB


class BlockReuse:
    """Finds blocks in ``blob``, which ``index`` describes, and notes where the new blob has them.

    Without them nothing is found. An index that is damaged or another compressor's is left.
    """

    def __init__(self, blob: BinaryIO | None = None, index: bytes = b"") -> None:
        self._blob = blob
        records = memoryview(index)[len(_HEAD) :] if index.startswith(_HEAD) else memoryview(b"")
        self._known = records if blob and len(records) % _RECORD.size == 0 else memoryview(b"")
        self._noted = bytearray()
        self.copied = 0  # blocks

    def find(self, block: Block) -> tuple[bytes, bytes | None]:
        """Return the key of a block, and its compressed bytes where the former blob has them; from any thread."""
        key = hashlib.sha256(block).digest()[:_KEY]
        position, size = self._where(key)
        if self._blob is None or not 0 < size < len(block):
            return key, None
        try:
            data = os.pread(self._blob.fileno(), size, position)
            is_equal = len(data) == size and deflate.zlib_decompress(data, len(block)) == block
        except (OSError, OverflowError, deflate.DeflateError):
            return key, None
        self.copied += is_equal
        return key, data if is_equal else None

    def _where(self, key: bytes) -> tuple[int, int]:
        known, size = self._known, _RECORD.size
        count = len(known) // size
        at = bisect_left(range(count), key, key=lambda number: bytes(known[number * size : number * size + _KEY]))
        record = _RECORD.unpack_from(known, at * size) if at < count else (b"", 0, 0)
        return (record[1], record[2]) if record[0] == key else (0, 0)

    def note(self, key: bytes, position: int, size: int) -> None:
        """Note where the new blob has a compressed block."""
        self._noted += key + position.to_bytes(8, "little") + size.to_bytes(4, "little")

    def index(self) -> bytes:
        """Return the index of the new blob; nothing where it has no compressed block, or would exceed MAX_INDEX."""
        size = _RECORD.size
        # Of equal blocks the first counts: a file that equals an earlier one is written over.
        first = dict[bytes, int]()
        for at in range(0, len(self._noted), size):
            first.setdefault(bytes(self._noted[at : at + _KEY]), at)
        data = b"".join([_HEAD, *(self._noted[at : at + size] for _, at in sorted(first.items()))])
        return data if first and len(data) <= MAX_INDEX else b""
