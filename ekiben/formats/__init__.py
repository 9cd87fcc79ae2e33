"""Layers and images as bytes; nothing here knows a store.

layer           entries in canonical order, and what takes them
base_config     what a base of others says of itself, as files
changeset       what a script changed, as a layer's entries
left_out        what a script wrote and no layer keeps, with the reason
placement       destinations of %files on the layers below
upper           an overlay's upper directory, as a stream
xattrs          which extended attributes are content, and their form
tar             the OCI form of a layer
foreign_tar     tars that somebody else made, checked
squashfs        the form in which a layer is stored
partition       a squashfs in a file, or as a part of one
sif             SIF files
sif_rewrite     the last layer of a SIF, rewritten in its file
evaluated       what scripts of an image's environment set, and its Docker entrypoint
runtime_files   what container runtimes look for inside an image
oci             images in their OCI and Docker forms
users           the users and groups that runtimes show, where upper layers change them
compare         two layers, entry by entry
"""

__all__ = [
    "base_config",
    "changeset",
    "compare",
    "evaluated",
    "foreign_tar",
    "layer",
    "left_out",
    "oci",
    "partition",
    "placement",
    "runtime_files",
    "sif",
    "sif_rewrite",
    "squashfs",
    "tar",
    "upper",
    "users",
    "xattrs",
]
