"""The numbers and structures of squashfs 4.0: https://dr-emann.github.io/squashfs/ and Linux,
fs/squashfs/squashfs_fs.h.
"""

from __future__ import annotations

import os
import struct

from ekiben.formats.layer import Kind

Block = bytes | bytearray | memoryview

MAGIC = 0x73717368
METADATA_SIZE = 8192
# Measured on lora-opencalm's 4.8 GB, with ISA-L's gzip: 0.6 % larger than with 256 KiB, and its packages are imported a
# fifth sooner (reading a page of a library decompresses less); 32 KiB is 1 % larger still and no faster.
BLOCK_SIZE = 1 << 16
ABSENT = 0xFFFF_FFFF_FFFF_FFFF  # a table that is not there
NONE = 0xFFFF_FFFF  # value for "no fragment" and "no xattr"
STORED_BLOCK = 1 << 24  # bit of a block's size word: not compressed
STORED_METADATA = 1 << 15
PAD = 4096  # loop devices are made of whole pages

DIR, FILE, SYMLINK, BLOCK_DEVICE, CHAR_DEVICE, FIFO, SOCKET = range(1, 8)
EXTENDED = 7  # added to the type of an inode in its long form

FLAG_DUPLICATES, FLAG_NO_XATTRS, FLAG_OPTIONS = 0x40, 0x200, 0x400

SUPERBLOCK = struct.Struct("<5I6H8Q")
INODE = struct.Struct("<4H2I")  # type, mode, uid index, gid index, mtime, inode number
DIR_BODY = struct.Struct("<2I2HI")  # listing start, nlink, listing size + 3, listing offset, parent
LONG_DIR_BODY = struct.Struct("<4I2HI")  # nlink, size + 3, start, parent, index count, offset, xattr
FILE_BODY = struct.Struct("<4I")  # start, fragment, offset in fragment, size
LONG_FILE_BODY = struct.Struct("<3Q4I")  # start, size, sparse bytes, nlink, fragment, offset, xattr
PAIR = struct.Struct("<2I")
XATTR_HEADER = struct.Struct("<Q2I")  # start of the names and values, count of sets, unused
XATTR_SET = struct.Struct("<Q2I")  # metadata block << 16 | offset in it, count of pairs, bytes that listxattr() gives
XATTR_NAME = struct.Struct("<2H")  # namespace, length of the rest of the name
XATTR_PREFIXES = ("user.", "trusted.", "security.")
XATTR_ELSEWHERE = 0x100  # bit of a namespace: a reference to the value follows, not the value
XATTR_SIZE = 1 << 16  # Linux, include/uapi/linux/limits.h: XATTR_SIZE_MAX
LONG = struct.Struct("<Q")
WORD = struct.Struct("<I")
HALF = struct.Struct("<H")
LIST_HEAD = struct.Struct("<3I")  # entries - 1, their inodes' metadata block, base inode number
LIST_ENTRY = struct.Struct("<HhHH")  # inode offset, inode number - base, type, name length - 1
LIST_INDEX = struct.Struct("<3I")  # offset in listing, metadata block, name length - 1
FRAGMENT = struct.Struct("<Q2I")  # position, size word, unused

BATCH = 1 << 20  # bytes of one worker's job: large enough to make Python's overhead negligible

COMPRESSIONS = {1: "gzip", 2: "lzma", 3: "lzo", 4: "xz", 5: "lz4", 6: "zstd"}
GZIP, ZSTD = 1, 6
# What we write: SingularityCE runs nothing that is compressed with zstd, and every kernel reads this. libdeflate's,
# since its bytes do not depend on the processor; level 2 would be 1 % smaller and take a fifth longer.
LEVEL = 1
TYPES: dict[Kind, int] = {"dir": DIR, "file": FILE, "symlink": SYMLINK, "fifo": FIFO, "whiteout": CHAR_DEVICE}
KINDS: dict[int, Kind] = {DIR: "dir", FILE: "file", SYMLINK: "symlink", FIFO: "fifo", CHAR_DEVICE: "whiteout"}


def usable_cores() -> int:
    """Return how many threads to compress or decompress on."""
    return min(len(os.sched_getaffinity(0)), 16)


BLOCK_SIZES = tuple(1 << bits for bits in range(12, 21))
