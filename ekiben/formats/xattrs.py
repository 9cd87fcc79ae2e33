"""Extended attributes that are content, as layers keep them: a file's capabilities, and those of the namespace
``user``.

A tar has them as pax records ``SCHILY.xattr.NAME`` (GNU tar's, which Docker, podman and buildah read and write, too), a
squashfs in a table. All others belong to a machine or to an overlay: SELinux labels, ACLs, the marks that overlays
leave.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ekiben.core.errors import LayerError
from ekiben.formats.layer import Xattrs, decode_name, encode_name

PAX_PREFIX = "SCHILY.xattr."
CAPABILITY, _USER, _ACL = "security.capability", "user.", "system.posix_acl_"
_OVERLAYS = (
    "user.overlay.",
    "user.fuseoverlayfs.",
    "user.containers.",
)  # rootless overlays store metadata here that they cannot set
OPAQUE_MARK = ".overlay.opaque"  # in the namespace trusted or user
COPIED_UP = "user.fuseoverlayfs.origin"  # set by fuse-overlayfs on files copied up: the path below
# Linux, include/uapi/linux/capability.h: revision 3 adds the id that root has outside of its user namespace.
_REVISION_2, _REVISION_3, _REVISIONS, _SIZE_2 = 0x0200_0000, 0x0300_0000, 0xFF00_0000, 20


def is_content(name: str) -> bool:
    """Return whether layers keep the attribute of this name."""
    return name == CAPABILITY or (name.startswith(_USER) and not name.startswith(_OVERLAYS))


def is_acl(name: str) -> bool:
    """Return whether the attribute is an access control list, which no layer keeps."""
    return name.startswith(_ACL)


def content_xattrs(attributes: Iterable[tuple[str, bytes]]) -> Xattrs:
    """Return those that are content, normalized: sorted, a capability without the ids of the namespace that set it."""
    kept = {
        name: _without_owner(value) if name == CAPABILITY else value for name, value in attributes if is_content(name)
    }
    return tuple(sorted(kept.items(), key=lambda item: encode_name(item[0])))


def check_names(path: str, xattrs: Xattrs) -> None:
    """Raise LayerError for a name that tools write in different ways into a tar."""
    for name, _ in xattrs:
        if "=" in name or "%" in name:
            raise LayerError(
                f"/{path}: the extended attribute {name!r} cannot be stored: tools differ in how they write = and % "
                "in its name; give it another name"
            )


def _without_owner(capability: bytes) -> bytes:
    word = int.from_bytes(capability[:4], "little")
    if word & _REVISIONS != _REVISION_3 or len(capability) < _SIZE_2:
        return capability
    return (word & ~_REVISIONS | _REVISION_2).to_bytes(4, "little") + capability[4:_SIZE_2]


def from_pax(headers: Mapping[str, str]) -> list[tuple[str, bytes]]:
    """Return the attributes in a tar entry's pax records, as tarfile has read them with surrogate escapes."""
    return [
        (name.removeprefix(PAX_PREFIX), encode_name(value))
        for name, value in headers.items()
        if name.startswith(PAX_PREFIX)
    ]


def to_pax(attributes: Iterable[tuple[str, bytes]]) -> dict[str, str]:
    """Return the pax records that keep the attributes."""
    return {PAX_PREFIX + name: decode_name(value) for name, value in attributes}
